"""The memory model against real Megatron ranks: what is predicted from sizes alone is what they hold.

Activations are the unique storages that autograd keeps, parameters excluded, at the fullest moment of one forward and
backward over a mini-batch. Where experts lie on several ranks, which rank gets a token is chance, so the ranks of a
stage are compared by their mean.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from padded import collate
from ranks import ROOT, run_ranks
from tiny_models import save, tiny_dense, tiny_latent, tiny_moe, tiny_next, tiny_shared

from mrl.checkpoint.disk_space import BESIDE_TENSORS, checkpoint_bytes
from mrl.data.samples import Sample
from mrl.model import load_model_spec
from mrl.model.adapters import Lora
from mrl.model.layout import TrainLayout
from mrl.model.precision import Precision
from mrl.plan.activations import Activations, MicroBatchShape, Recompute
from mrl.plan.model_state import stage_state

pytestmark = [pytest.mark.real, pytest.mark.long]

TP, PP, EP, ETP, VPP, CP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
)  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# name -> (model, ranks, degrees, dtype, recomputation)
LAYOUTS = {
    "moe-tp1": ("moe", 1, {}, "float32", {}),
    "moe-tp1-full-recompute": ("moe", 1, {}, "bfloat16", FULL),
    "moe-tp1-selective": ("moe", 1, {}, "bfloat16", {"recompute_granularity": "selective"}),
    "moe-tp1-padded": ("moe", 1, {}, "float32", {}),
    "dense-tp1": ("dense", 1, {}, "bfloat16", {}),
    "moe-tp2-ep2": ("moe", 2, {TP: 2, EP: 2}, "bfloat16", {}),
    "moe-tp2-etp2": ("moe", 2, {TP: 2, ETP: 2}, "float32", {}),
    "moe-pp2": ("moe", 2, {PP: 2}, "bfloat16", {}),
    "moe-pp1+3-full-recompute": ("moe", 2, {PP: 2, "pipeline_layers": [1, 3]}, "float32", FULL),
    "moe-pp2-vpp2": ("moe", 2, {PP: 2, VPP: 2}, "bfloat16", {}),
    "moe-dp2": ("moe", 2, {}, "bfloat16", {}),
    "moe-cp2": ("moe", 2, {CP: 2}, "bfloat16", {}),
    "dense-cp2-padded": ("dense", 2, {CP: 2}, "float32", {}),
    "shared-tp2": ("shared", 2, {TP: 2}, "bfloat16", {}),
    "next-tp1": ("next", 1, {}, "float32", {}),
    "next-tp1-half-full-recompute": ("next", 1, {}, "bfloat16", FULL),
    "next-tp2": ("next", 2, {TP: 2}, "bfloat16", {}),
    "latent-tp1": ("latent", 1, {}, "float32", {}),
    "latent-tp1-padded": ("latent", 1, {}, "float32", {}),
    "latent-tp2-ep2": ("latent", 2, {TP: 2, EP: 2}, "bfloat16", {}),
    "latent-cp2": ("latent", 2, {CP: 2}, "bfloat16", {}),
    "dense-tp2": ("dense", 2, {TP: 2}, "float32", {}),
    "dense-pp2": ("dense", 2, {PP: 2}, "bfloat16", {}),
    "moe-tp2-pp2-ep2": ("moe", 4, {TP: 2, PP: 2, EP: 2}, "bfloat16", {}),
    "moe-tp4-of-2-kv-heads": ("moe", 4, {TP: 4, EP: 2}, "float32", {}),
}
# name -> (the layout, modules that are recomputed)
MODULES = {
    "moe-tp1-norms": ("moe-tp1", ["layernorm"]),
    "dense-tp1-norms": ("dense-tp1", ["layernorm"]),
    "next-tp1-norms": ("next-tp1", ["layernorm"]),
    "latent-tp1-norms": ("latent-tp1", ["layernorm"]),
    "moe-tp1-activation": ("moe-tp1", ["moe_act"]),
    "moe-tp2-ep2-activation-and-norms": ("moe-tp2-ep2", ["moe_act", "layernorm"]),
    "moe-dp2-experts": ("moe-dp2", ["moe"]),
    "dense-tp1-mlp": ("dense-tp1", ["mlp"]),
    "dense-tp2-mlp-and-attention": ("dense-tp2", ["mlp", "core_attn"]),
    "shared-tp2-shared-experts": ("shared-tp2", ["shared_experts"]),
}
LAYOUTS |= {
    name: (*LAYOUTS[layout][:4], {"recompute_granularity": "selective", "recompute_modules": modules})
    for name, (layout, modules) in MODULES.items()
}
# an Adam on the host, without and with float32 weights on the device beside; shares below 1 are met to one tensor, much
# in a tiny model
ON_HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
BESIDE = ON_HOST | {"use_precision_aware_optimizer": False}
OPTIMIZERS = {"moe-tp2-ep2-on-host": ON_HOST, "moe-dp2-masters-stay": BESIDE}
LAYOUTS |= {"moe-tp2-ep2-on-host": LAYOUTS["moe-tp2-ep2"], "moe-dp2-masters-stay": LAYOUTS["moe-dp2"]}
# adapters in the weights' place: what is trained is small, what is kept of a pass is more
ALL, SOME = {"rank": 8, "target_modules": ["all-linear"]}, {"rank": 8, "target_modules": ["q_proj", "down_proj"]}
ADAPTERS = {
    "moe-tp1-lora": ALL, "dense-tp1-lora": ALL, "moe-tp1-full-recompute-lora": ALL, "moe-tp1-lora-some": SOME,
    "moe-tp1-lora-dropout": ALL | {"dropout": 0.1}, "moe-tp2-ep2-lora": ALL, "dense-tp2-lora": ALL,
    "shared-tp2-lora": ALL, "moe-pp2-lora": ALL, "moe-dp2-lora": ALL,
}  # fmt: skip
BOUNDED = ("moe-tp1-lora-some", "moe-tp1-lora-dropout")  # inputs of layers without adapters are counted and not kept
LAYOUTS |= {name: LAYOUTS[name.partition("-lora")[0]] for name in ADAPTERS}
PROMPT, RESPONSE, ROWS, ROWS_PER_MICRO_BATCH = 16, 40, 8, 2  # 56 tokens: plain attention pads them to 64
STATE_BOUND, ACTIVATION_BOUND = 0.02, 0.10


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank of each layout held, and where the models are."""
    out = tmp_path_factory.mktemp("memory")
    models = {"moe": tiny_moe, "dense": tiny_dense, "shared": tiny_shared, "next": tiny_next, "latent": tiny_latent}
    paths = {name: str(save(make(), out / name)) for name, make in models.items()}
    np.savez(out / "batch.npz", **_batch())
    for world in (1, 2, 4):
        names = [name for name, (_, ranks, *_) in LAYOUTS.items() if ranks == world]
        cases = [{"name": name, "config": _config(name, paths), "batch": str(out / "batch.npz")} for name in names]
        (out / f"cases-{world}.json").write_text(json.dumps(cases))
        run_ranks(ROOT / "tests/real/memory_worker.py", world, out / str(world), [str(out / f"cases-{world}.json")])
    found = {name: _reports(out / str(LAYOUTS[name][1]), name) for name in LAYOUTS}
    return found | {"models": paths}


@pytest.mark.parametrize("what", ["parameters", "gradients", "optimizer", "optimizer_host"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_predicted_within_two_percent(layout, what, truth):
    model, train = _built(layout, truth)
    adam = OPTIMIZERS.get(layout, {"optimizer_offload_fraction": 0.0})
    staying = not adam.get("use_precision_aware_optimizer")
    precision = Precision(
        parameters=_element_bytes(layout), host_share=adam["optimizer_offload_fraction"], keeps_masters=staying
    )
    for report in truth[layout]:
        predicted = getattr(stage_state(model, train, report["stage"], precision, lora=_lora(layout)), what)
        assert predicted == pytest.approx(report[what], rel=STATE_BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_the_bytes_that_are_predicted(layout, truth):
    """Of all ranks together, states of random generators left out, which are a rank's and not the model's."""
    model, _ = _built(layout, truth)
    predicted = checkpoint_bytes(model, LAYOUTS[layout][3], _lora(layout)) - BESIDE_TENSORS
    assert predicted == pytest.approx(sum(report["saved"] for report in truth[layout]), rel=STATE_BOUND)


@pytest.mark.parametrize("layout", ADAPTERS)
def test_adapters_hold_the_predicted_part_of_full_training(layout, truth):
    """Gradients, optimizer and checkpoint, measured beside those of the same ranks that train all weights."""
    model, train = _built(layout, truth)
    whole = truth[layout.partition("-lora")[0]]
    precision = Precision(parameters=_element_bytes(layout))
    for small, full in zip(truth[layout], whole, strict=True):
        states = [stage_state(model, train, full["stage"], precision, lora=lora) for lora in (_lora(layout), None)]
        for what in ("gradients", "optimizer"):
            predicted = getattr(states[0], what) / getattr(states[1], what)
            assert predicted == pytest.approx(small[what] / full[what], rel=STATE_BOUND)
            assert small[what] < full[what] / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_are_predicted_within_ten_percent(layout, truth):
    model, train = _built(layout, truth)
    micro = MicroBatchShape(ROWS_PER_MICRO_BATCH, PROMPT + RESPONSE, RESPONSE, packed="padded" not in layout)
    activations = Activations(model, train, micro, _element_bytes(layout), "torch", _recompute(layout))
    activations = replace(activations, lora=_lora(layout), dropout="dropout" in layout)
    count = ROWS // train.data // ROWS_PER_MICRO_BATCH
    for stage in range(train.pipeline):
        held = np.mean([report["activations"] for report in truth[layout] if report["stage"] == stage])
        predicted = activations.stage_saved(stage, count)
        print(f"{layout} stage {stage}: predicted / held = {predicted / held:.4f}")
        if layout in BOUNDED:
            assert predicted >= held / (1 + ACTIVATION_BOUND)
            continue
        assert predicted == pytest.approx(held, rel=ACTIVATION_BOUND)


@pytest.mark.parametrize("layout", MODULES)
def test_what_modules_that_are_recomputed_spare_is_predicted(layout, truth):
    """The difference to the same layout that keeps all, which is a small part of what a stage holds."""
    model, train = _built(layout, truth)
    micro = MicroBatchShape(ROWS_PER_MICRO_BATCH, PROMPT + RESPONSE, RESPONSE)
    activations = Activations(model, train, micro, _element_bytes(layout), "torch")
    count = ROWS // train.data // ROWS_PER_MICRO_BATCH
    recomputed = replace(activations, recompute=_recompute(layout))
    predicted = activations.stage_saved(0, count) - recomputed.stage_saved(0, count)
    keeping, sparing = (
        np.mean([report["activations"] for report in truth[name]]) for name in (MODULES[layout][0], layout)
    )
    spared = keeping - sparing
    print(f"{layout}: predicted / spared = {predicted / spared:.4f}, {spared / keeping:.3f} of what is kept")
    assert predicted == pytest.approx(spared, rel=ACTIVATION_BOUND)


def _built(layout: str, truth) -> tuple:
    name, world, degrees, *_ = LAYOUTS[layout]
    model = load_model_spec(truth["models"][name])
    return model, TrainLayout.build({"world_size": world} | degrees, model)


def _lora(layout: str) -> Lora | None:
    if layout not in ADAPTERS:
        return None
    return Lora.of(ADAPTERS[layout]["rank"], 16.0, ADAPTERS[layout]["target_modules"])


def _element_bytes(layout: str) -> int:
    return {"float32": 4, "bfloat16": 2}[LAYOUTS[layout][3]]


def _recompute(layout: str) -> Recompute:
    given = LAYOUTS[layout][4]
    return Recompute(given.get("recompute_granularity"), modules=tuple(given.get("recompute_modules", ["core_attn"])))


def _reports(folder, name: str) -> list[dict]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(LAYOUTS[name][1])]


def _config(name: str, paths: dict[str, str]) -> dict:
    model, world, degrees, dtype, recompute = LAYOUTS[name]
    return {
        "model": {"path": paths[model], "dtype": dtype, "override_transformer_config": recompute},
        "actor": {
            "layout": {"world_size": world} | degrees,
            "ppo_mini_batch_size": ROWS,
            "ppo_micro_batch_size_per_gpu": ROWS_PER_MICRO_BATCH,
            "use_remove_padding": "padded" not in name,
            "optim": {"override_optimizer_config": OPTIMIZERS.get(name, {})},
            "lora": ADAPTERS.get(name, {}),
        },
        "rollout": {"n": 1},
        "data": {"train_batch_size": ROWS},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }


def _batch() -> dict[str, np.ndarray]:
    """Rows of one length, so that every micro-batch has the same shape."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(ROWS):
        ids = tuple(rng.integers(1, 127, PROMPT + RESPONSE).tolist())
        samples.append(Sample(i, i, i, 0, ids[:PROMPT], ids[PROMPT:], (0.0,) * RESPONSE, "length", 0))
    batch = collate(samples, 1.0, 0)
    advantages = np.where(batch.response_mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32)
    return batch.arrays | {
        "old_log_probs": np.where(batch.response_mask, -4.0, 0).astype(np.float32),
        "advantages": advantages,
    }
