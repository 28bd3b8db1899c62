"""No pass waits for the device: every read of a device value in forward and backward is counted, on two ranks that
share sequences or experts, packed, with activations recomputed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_dense, tiny_moe

sys.path.insert(0, str(ROOT / "scripts" / "hardware"))
from waits import FULL, OF_EXPERTS

pytestmark = pytest.mark.real

ROWS, LAYERS, MICRO = 12, 4, 3
CONTEXT, EXPERTS = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
CASES = {
    "dense, context parallel": ("dense", CONTEXT, {}),
    "dense, context parallel, recomputed": ("dense", CONTEXT, FULL),
    "experts, context parallel": ("moe", CONTEXT | EXPERTS, {}),
    "experts, context parallel, recomputed": ("moe", CONTEXT | EXPERTS, FULL),
    "experts alone recomputed": ("moe", EXPERTS, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
}
# Reads of a layer's forward pass, and of its backward pass, which exchanges tokens as well. A rank holds several
# experts, so chunks of all ranks are sorted; sizes come as lists on the CPU.
WITH_EXPERTS = {
    "moe/experts.py:forward": (1, 0), "moe/moe_utils.py:permute": (2, 0), "moe/router.py:gating": (1, 0),
    "moe/moe_utils.py:sort_chunks_by_idxs": (6, 0), "platforms/cpu_patches.py:_plain": (6, 6),
    "tensor_parallel/mappings.py:forward": (3, 3),
}  # fmt: skip


@pytest.fixture(scope="module")
def reads(tmp_path_factory) -> list[dict[str, dict[str, int]]]:
    """Of each rank, of each case."""
    out = tmp_path_factory.mktemp("waits")
    paths = {"moe": str(save(tiny_moe(), out / "moe")), "dense": str(save(tiny_dense(), out / "dense"))}
    cases = {name: _config(paths[model], layout, overrides) for name, (model, layout, overrides) in CASES.items()}
    (out / "cases.json").write_text(json.dumps(cases))
    run_ranks(Path(__file__).with_name("waits_worker.py"), 2, out, [str(out / "cases.json")])
    return [json.loads((out / f"reads-{rank}.json").read_text()) for rank in (0, 1)]


def _config(path: str, layout: dict[str, int], overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": path, "dtype": "float32", "override_transformer_config": overrides},
        "actor": {
            "layout": {"world_size": 2} | layout,
            "ppo_mini_batch_size": ROWS,
            "ppo_micro_batch_size_per_gpu": MICRO,
        },
        "rollout": {"n": 1},
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu"},
    }


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dense")])
def test_nothing_is_read_where_there_are_no_experts(reads, name):
    assert [rank[name] for rank in reads] == [{}, {}]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("experts")])
def test_of_experts_is_read_what_has_a_name_and_a_reason(reads, name):
    """Counts are exact: log-probs and an update are two forward passes of each layer, recomputation a third."""
    assert OF_EXPERTS.keys() >= WITH_EXPERTS.keys()
    _, layout, recomputed = CASES[name]
    samples = ROWS if CONTEXT.items() <= layout.items() else ROWS // 2  # of a rank
    passes, of_layers = 3 if recomputed else 2, LAYERS * samples // MICRO
    reads_of = {site: of_layers * (passes * forward + back) for site, (forward, back) in WITH_EXPERTS.items()}
    assert [rank[name] for rank in reads] == [reads_of] * 2
