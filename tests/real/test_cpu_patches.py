"""Every symbol that the CPU platform replaces still has to be replaced: without it,
a training step or a collective fails, or takes a loop over sequences, or messages or threads of gloo's.
"""

import json
import subprocess
import sys

import pytest
from deadlines import END_S
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_dense, tiny_latent, tiny_moe

from mrl.platforms.cpu_patches import PATCHES

pytestmark = pytest.mark.real

HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer"
# What fails without the row. The last row comes last: it is read before the tensor factories are wrapped, and cannot be
# put back after.
CHECKED_BY = {
    "torch.cuda.current_device": "moe_update",
    "torch.cuda.get_rng_state": "generators",
    "torch.cuda.manual_seed": "generators",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": "generators",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": "generators",
    "torch.cuda.Stream": "moe_update",
    "torch.cuda.current_stream": "moe_update",
    "torch.Tensor.type": "moe_update",
    "torch.tensor": "moe_update",
    "torch.zeros": "moe_update",
    "torch.distributed.all_to_all_single": "moe_update",
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": "moe_update",
    "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__": "moe_update",
    "torch.empty": "hybrid_update",
    f"{HYBRID}._get_sub_optimizer_param_groups": "hybrid_update",
    "megatron.core.optimizer.optimizer_config.is_te_min_version": "hybrid_update",
    "torch.cuda.synchronize": "pipeline_update",
    "torch.Tensor.cuda": "pipeline_update",
    "torch.distributed.all_gather": "uneven_gather",
    "torch.distributed.distributed_c10d.ProcessGroupGloo": "listening_threads",
    "torch.distributed.ProcessGroup.all_gather_single": "host_memory",
    "torch.distributed.ProcessGroup.reduce_scatter_single": "host_memory",
    "torch.distributed.ProcessGroup.allreduce": "host_memory",
    "torch.distributed.ProcessGroup.all_to_all_single": "host_memory",
    "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd": "pack_rotation",
    "megatron.core.transformer.multi_latent_attention.TELinear": "latent_update",
    "torch.utils._device._device_constructors": "meta_context",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """What each of two ranks saw."""
    out = tmp_path_factory.mktemp("patches")
    plan = {
        "rows": CHECKED_BY,
        "moe": str(save(tiny_moe(), out / "moe")),
        "dense": str(save(tiny_dense(), out / "dense")),
        "latent": str(save(tiny_latent(), out / "latent")),
    }
    (out / "plan.json").write_text(json.dumps(plan))
    run_ranks(ROOT / "tests/real/patches_worker.py", 2, out, [str(out / "plan.json")])
    return [json.loads(file.read_text()) for file in out.glob("report-*.json")]


def test_every_row_has_a_check():
    assert set(CHECKED_BY) == {row.target for row in PATCHES}


def test_with_all_rows_in_place_every_check_passes(reports):
    assert [set(report["all in place"].values()) for report in reports] == [{None}, {None}]


@pytest.mark.parametrize("target", CHECKED_BY)
def test_without_the_row_its_check_fails(target, reports):
    assert any(report[target] for report in reports)


def test_nothing_is_replaced_in_a_process_that_has_imported_vllm():
    program = (
        "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm')\n"
        "from mrl.errors import EnvironmentFault\n"
        "from mrl.platforms import get_platform\n"
        "import torch; before = torch.zeros\n"
        "try: get_platform('cpu').apply_patches()\n"
        "except EnvironmentFault as fault: print(fault, torch.zeros is before)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=END_S, check=True
    ).stdout
    assert "has imported vllm" in answer
    assert answer.strip().endswith("True")


LINEAR = """
import torch
from torch import nn
from vllm.model_executor.layers import utils
from mrl.engine.cpu_batch_invariance import install
from mrl.engine.cpu_worker import allow_tiles

allow_tiles()
torch.manual_seed(0)


def is_invariant(inner, outer):
    half = torch.randn(64, inner // 2).bfloat16()
    tokens = torch.cat([half, -half], 1)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(outer, inner // 2).repeat(1, 2).bfloat16(), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    whole = layer.cpu_linear(tokens, layer.weight, None)
    return all(torch.equal(layer.cpu_linear(tokens[-n:], layer.weight, None), whole[-n:]) for n in range(1, 65))


SHAPES = (128, 256), (32, 384), (512, 256), (1024, 768), (2048, 2048)
before = [is_invariant(*shape) for shape in SHAPES]
install()
after = [is_invariant(*shape) for shape in SHAPES]
print(torch.cpu._is_amx_tile_supported(), any(before), all(after))
"""


def test_a_linear_in_bfloat16_has_the_same_bits_for_any_number_of_tokens():
    """All sums are 0, so that what is left of the order of their products is seen. Without mrl AMX breaks it."""
    answer = subprocess.run(
        [sys.executable, "-c", LINEAR], cwd=ROOT, capture_output=True, text=True, timeout=END_S, check=True
    ).stdout
    has_tiles, any_before, after = (word == "True" for word in answer.split()[-3:])
    assert after and not (has_tiles and any_before)
