"""The actor with adapters computes what the Hugging Face model with W + alpha / rank * B A in the place of each weight
computes, in every layout: log-probs, gradients of both factors, two updates; and its export is that model.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_parity as parity
import torch
from padded import PaddedBatch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_parity import CP, EP, ETP, PP, TP
from tiny_models import save, tiny_dense, tiny_glm, tiny_kinds, tiny_latent, tiny_moe, tiny_next, tiny_shared
from torch import Tensor

from mrl.model import load_model_spec
from mrl.model.adapters import TARGETS, Lora, adapted_tensors, adapter_shapes, factor_name
from mrl.model.peft_files import CONFIG, PREFIX, WEIGHTS, peft_config

pytestmark = [pytest.mark.real, pytest.mark.long]

MODELS = {
    "moe": tiny_moe, "dense": tiny_dense, "shared": tiny_shared, "glm": tiny_glm, "latent": tiny_latent,
    "direct": partial(tiny_latent, q_lora_rank=None), "next": tiny_next, "kinds": tiny_kinds,
}  # fmt: skip
ATTENTION, EXPERTS, SOME = ("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"), ("k_proj", "o_proj", "up_proj")
DELTA = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a", "out_proj")
DOWNS = ("q_a_proj", "kv_a_proj_with_mqa")
VPP = "virtual_pipeline_model_parallel_size"
# Of Qwen3-Next with adapters everywhere transformers' own float32 is 1.0e-5 from its float64, so that one has them on
# gated delta attention alone. Qwen3.5 has them everywhere.
# name -> (model, targets, ranks, degrees, fields of Megatron's transformer config)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = ["layernorm", "moe_act", "core_attn"]
LAYOUTS = {
    "moe-tp1": ("moe", TARGETS, 1, {}, {}),
    "moe-recomputed": ("moe", TARGETS, 1, {}, FULL),
    "moe-parts-recomputed": ("moe", TARGETS, 1, {}, {"recompute_granularity": "selective", "recompute_modules": PARTS}),
    "moe-experts": ("moe", EXPERTS, 1, {}, {}),
    "dense-tp1": ("dense", TARGETS, 1, {}, {}),
    "dense-attention": ("dense", ATTENTION, 1, {}, {}),
    "shared-some": ("shared", SOME, 1, {}, {}),
    "shared-tp1": ("shared", TARGETS, 1, {}, {}),
    "glm-tp1": ("glm", TARGETS, 1, {}, {}),
    "moe-tp2": ("moe", TARGETS, 2, {TP: 2}, {}),
    "moe-tp2-recomputed": ("moe", TARGETS, 2, {TP: 2}, FULL),
    "moe-tp2-etp2": ("moe", TARGETS, 2, {TP: 2, ETP: 2}, {}),
    "moe-ep2": ("moe", TARGETS, 2, {EP: 2}, {}),
    "moe-pp2": ("moe", TARGETS, 2, {PP: 2}, {}),
    "moe-pp2-vpp2": ("moe", TARGETS, 2, {PP: 2, VPP: 2}, {}),
    "moe-experts-dp2": ("moe", EXPERTS, 2, {}, {}),
    "dense-tp2": ("dense", TARGETS, 2, {TP: 2}, {}),
    "dense-pp2": ("dense", TARGETS, 2, {PP: 2}, {}),
    "dense-tp2-whole-sequences": ("dense", TARGETS, 2, {TP: 2, "sequence_parallel": False}, {}),
    "dense-cp2": ("dense", TARGETS, 2, {CP: 2}, {}),
    "shared-tp2-ep2": ("shared", TARGETS, 2, {TP: 2, EP: 2}, {}),
    "glm-tp2-ep2": ("glm", TARGETS, 2, {TP: 2, EP: 2}, {}),
    "latent-tp1": ("latent", TARGETS, 1, {}, {}),
    "latent-tp2": ("latent", TARGETS, 2, {TP: 2}, {}),
    "latent-pp2": ("latent", TARGETS, 2, {PP: 2}, {}),
    "latent-downs": ("latent", DOWNS, 2, {TP: 2}, {}),
    "direct-tp2": ("direct", TARGETS, 2, {TP: 2}, {}),
    "next-delta": ("next", DELTA, 1, {}, {}),
    "next-tp2-ep2": ("next", DELTA, 2, {TP: 2, EP: 2}, {}),
    "kinds-delta": ("kinds", DELTA, 1, {}, {}),
    "kinds-tp2": ("kinds", TARGETS, 2, {TP: 2}, {}),
    "kinds-pp2": ("kinds", TARGETS, 2, {PP: 2}, {}),
    "moe-tp2-pp2-ep2": ("moe", TARGETS, 4, {TP: 2, PP: 2, EP: 2}, {}),
}  # fmt: skip
# the same with dropout of the adapters' inputs, which no other program draws alike
EXPERTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DROPPING = {
    "moe-dropout": ("moe", TARGETS, 1, {}, {}),
    "moe-dropout-recomputed": ("moe", TARGETS, 1, {}, FULL),
    "moe-dropout-experts-recomputed": ("moe", TARGETS, 1, {}, EXPERTS_AGAIN),
    "dense-dropout-tp2": ("dense", TARGETS, 2, {TP: 2}, {}),
    "dense-dropout-tp2-whole-sequences": ("dense", TARGETS, 2, {TP: 2, "sequence_parallel": False}, {}),
    "moe-dropout-tp2-etp2": ("moe", TARGETS, 2, {TP: 2, ETP: 2}, {}),
}  # fmt: skip
DROPOUT = 0.25
ALL = LAYOUTS | DROPPING
CUTS = {name: parity.CUTS[name] for name in ("packed-5", "packed-40-tokens", "padded-5")}
RANK, ALPHA = 4, 8.0


@dataclass(frozen=True)
class Oracle:
    """What the Hugging Face model computes with adapters."""

    model_path: Path
    adapter: Path
    batch: PaddedBatch
    batch_path: Path
    log_probs: np.ndarray
    reference: np.ndarray  # without adapters
    gradients: dict[str, Tensor]
    updated: dict[str, Tensor]  # factors after two updates
    merged: dict[str, Tensor]  # float64, under the names of the checkpoint


class Merged:
    """A Hugging Face model whose weights are made of a checkpoint's and of factors."""

    def __init__(self, model, weights: dict[str, Tensor], factors: dict[str, Tensor]):
        self._model, self.config = model, model.config
        merged = dict(weights)
        for name in weights:
            if (first := factors.get(factor_name(name, "lora_A"))) is not None:
                merged[name] = weights[name] + ALPHA / RANK * (factors[factor_name(name, "lora_B")] @ first)
        self.weights = merged

    def __call__(self, ids: Tensor):
        given = {name: self._parameter(name) for name, _ in self._model.named_parameters()}
        return torch.func.functional_call(self._model, given, (ids,))

    def _parameter(self, name: str) -> Tensor:
        """transformers has the experts of a layer in one tensor, checkpoints have them apart."""
        if name in self.weights:
            return self.weights[name]
        layer, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        experts = getattr(self.config, "num_experts", None) or self.config.n_routed_experts
        return torch.stack(
            [torch.cat([self.weights[f"{layer}.{n}.{part}.weight"] for part in parts]) for n in range(experts)]
        )


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[tuple[str, tuple[str, ...]], Oracle]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("oracle")
    kinds = dict.fromkeys((model, targets) for model, targets, *_ in ALL.values())
    return {(name, targets): _oracle(name, targets, folder / f"{name}-{'-'.join(targets)}") for name, targets in kinds}


@pytest.fixture(scope="module")
def results(oracles, tmp_path_factory) -> dict[str, Path]:
    """Runs every layout once; layouts with equally many ranks share their processes."""
    folders = {}
    for world_size in sorted({world for _, _, world, *_ in ALL.values()}):
        out = tmp_path_factory.mktemp(f"ranks{world_size}")
        names = [name for name, (_, _, world, *_) in ALL.items() if world == world_size]
        cases = out / "cases.json"
        cases.write_text(json.dumps([_case(name, oracles) for name in names]))
        run_ranks(Path(__file__).with_name("lora_worker.py"), world_size, out, [str(cases)])
        folders |= {name: out / name for name in names}
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_hugging_face_with_adapters_and_the_reference_is_the_model_without(
    layout, oracles, results
):
    oracle = oracles[LAYOUTS[layout][:2]]
    for kind, expected in (("log_probs", oracle.log_probs), ("reference", oracle.reference)):
        parts = [np.load(file) for file in results[layout].glob(f"{kind}-*.npz")]
        rows = np.concatenate([part["rows"] for part in parts])
        assert sorted(rows) == list(range(len(oracle.batch)))
        found = np.concatenate([part["log_probs"] for part in parts])[np.argsort(rows)]
        assert np.abs(found - expected).max() < 1e-5
    assert np.abs(oracle.log_probs - oracle.reference).max() > 0.1


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_both_factors_are_those_of_hugging_face(layout, cut, oracles, results):
    oracle = oracles[LAYOUTS[layout][:2]]
    found = _whole(results[layout], f"gradients-{cut}", oracle.gradients)
    assert parity._worst(found, oracle.gradients) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_updates_are_those_of_adamw_and_leave_the_weights(layout, oracles, results):
    oracle = oracles[LAYOUTS[layout][:2]]
    start = load_file(oracle.adapter / WEIGHTS)
    start = {name.removeprefix(PREFIX): tensor for name, tensor in start.items()}
    found = _whole(results[layout], "updated", oracle.updated)
    moved = {name: found[name] - start[name] for name in found}
    assert parity._worst(moved, {name: oracle.updated[name] - start[name] for name in found}) < 1e-3
    reports = [json.loads(file.read_text()) for file in results[layout].glob("report-*.json")]
    assert len(reports) == LAYOUTS[layout][2] and all(report["base_stays"] for report in reports)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_is_the_base_and_the_product(layout, oracles, results):
    oracle = oracles[LAYOUTS[layout][:2]]
    exported = load_file(results[layout] / "merged.safetensors")
    assert exported.keys() == oracle.merged.keys()
    for name, tensor in exported.items():
        rounded = oracle.merged[name].float()
        assert (tensor - rounded).abs().max() <= 4e-7 * rounded.abs().max(), name


@pytest.mark.parametrize("model", sorted({model for model, *_ in LAYOUTS.values()}))
def test_the_export_has_the_same_bits_in_every_layout(model, results):
    names = [name for name, (of, targets, *_) in LAYOUTS.items() if of == model and targets == TARGETS]
    files = [load_file(results[name] / "merged.safetensors") for name in names]
    assert all(torch.equal(file[name], files[0][name]) for file in files[1:] for name in file)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", DROPPING)
def test_dropout_is_of_updates_alone_and_follows_from_their_number(layout, oracles, results):
    oracle = oracles[ALL[layout][:2]]
    parts = [np.load(file) for file in results[layout].glob("log_probs-*.npz")]
    rows = np.concatenate([part["rows"] for part in parts])
    found = np.concatenate([part["log_probs"] for part in parts])[np.argsort(rows)]
    assert np.abs(found - oracle.log_probs).max() < 1e-5
    for report in reports(results[layout]):
        assert report["again"] and report["other"] and report["left"]
        assert all(abs(share - DROPOUT) < 0.03 for _, share in report["masks"].values())


def reports(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("report-*.json"))]


@pytest.mark.parametrize("again", ["moe-dropout-recomputed", "moe-dropout-experts-recomputed"])
def test_what_is_recomputed_drops_what_was_dropped(again, oracles, results):
    oracle = oracles[ALL[again][:2]]
    plain, found = (_whole(results[name], "gradients", oracle.gradients) for name in ("moe-dropout", again))
    assert parity._worst(found, plain) < 1e-5
    assert parity._worst(plain, oracle.gradients) > 1e-2


@pytest.mark.parametrize(
    ("layout", "alike"),
    [
        ("dense-dropout-tp2", ()),
        ("dense-dropout-tp2-whole-sequences", ("linear_qkv", "mlp.linear_fc1")),
        ("moe-dropout-tp2-etp2", ("experts.linear_fc1",)),
    ],
)
def test_tensor_ranks_drop_the_same_of_an_input_that_they_have_in_common_and_of_no_other(layout, alike, results):
    first, second = (report["masks"] for report in reports(results[layout]))
    assert first.keys() == second.keys() and len(first) > 4
    for name, (digest, _) in first.items():
        assert (digest == second[name][0]) == any(part in name for part in alike), name


def _whole(folder: Path, kind: str, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factors put together from the boxes of all ranks; boxes that several have are equal."""
    whole = {name: torch.full(tensor.shape, torch.nan) for name, tensor in expected.items()}
    for file in sorted(folder.glob(f"{kind}-[0-9]*.safetensors")):
        for key, values in load_file(file).items():
            name, row, column = key.split("|")
            rows, columns = values.shape
            box = whole[name][int(row) : int(row) + rows, int(column) : int(column) + columns]
            assert box.isnan().all() or torch.equal(box, values), key
            box.copy_(values)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def _case(name: str, oracles: dict) -> dict:
    model, targets, world_size, degrees, transformer = ALL[name]
    oracle = oracles[model, targets]
    optim = {
        "lr": parity.LR, "lr_warmup_steps": 2, "eps": parity.EPS, "weight_decay": parity.WEIGHT_DECAY,
        "betas": [0.9, 0.95], "clip_grad": parity.CLIP_GRAD,
    }  # fmt: skip
    lora = {"rank": RANK, "alpha": ALPHA, "target_modules": list(targets), "path": str(oracle.adapter)}
    lora |= {"dropout": DROPOUT} if name in DROPPING else {}
    clip = {"clip_ratio_low": parity.CLIP_LOW, "clip_ratio_high": parity.CLIP_HIGH}
    config = {
        "model": {"path": str(oracle.model_path), "dtype": "float32", "override_transformer_config": transformer},
        "actor": {
            "layout": {"world_size": world_size} | degrees,
            "optim": optim,
            "lora": lora,
            "ppo_mini_batch_size": len(oracle.batch),
            "log_prob_micro_batch_size_per_gpu": 4,
        },
        "rollout": {"n": 1},
        # the coefficient is 0, so that the loss is parity's
        "algorithm": {"policy_loss": clip, "use_kl_loss": False, "use_kl_in_reward": True},
        "data": {"train_batch_size": len(oracle.batch)},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
    return {"name": name, "config": config, "batch": str(oracle.batch_path), "cuts": CUTS}


def _oracle(name: str, targets: tuple[str, ...], path: Path) -> Oracle:
    model = MODELS[name]()
    model_path = save(model, path)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    spec, lora = load_model_spec(model_path), Lora.of(RANK, ALPHA, targets)
    weights = load_file(model_path / "model.safetensors")
    factors = _factors(spec, lora)
    adapter = path / "adapter"
    adapter.mkdir()
    save_file({f"{PREFIX}{n}": t for n, t in factors.items()}, adapter / WEIGHTS, {"format": "pt"})
    (adapter / CONFIG).write_text(json.dumps(peft_config(lora, str(model_path))))
    batch = parity._samples(model.config.vocab_size)
    with torch.no_grad():
        log_probs, _ = parity._token_outputs(Merged(model, weights, factors), batch)
        reference, _ = parity._token_outputs(model, batch)
    mask = batch.response_mask
    batch = _trained_on(batch, np.where(mask, log_probs.numpy(), 0))
    np.savez(path / "batch.npz", **batch.arrays)
    gradients, updated = _updates(model, weights, factors, batch)
    doubles = {n: t.double() for n, t in factors.items()}
    merged = Merged(model, {n: t.double() for n, t in weights.items()}, doubles).weights
    assert len(adapted_tensors(spec, lora)) == len(factors) / 2
    of_response = [np.where(mask, values.numpy(), 0) for values in (log_probs, reference)]
    return Oracle(model_path, adapter, batch, path / "batch.npz", *of_response, gradients, updated, merged)


def _factors(spec, lora: Lora) -> dict[str, Tensor]:
    """Neither is zero, so that each has a gradient."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in adapter_shapes(spec, lora).items()}


def _trained_on(batch: PaddedBatch, log_probs: np.ndarray) -> PaddedBatch:
    """With old log-probs, advantages, weights and a rejected row, as parity's."""
    mask = batch.response_mask
    return PaddedBatch(
        batch.input_ids, batch.prompt_lengths, batch.response_lengths, batch.temperature, batch.rollout_log_probs,
        np.where(mask, log_probs - parity.LOG_RATIOS[:, None], 0).astype(np.float32),
        np.where(mask, parity.ADVANTAGES[:, None], 0).astype(np.float32),
        keep=mask & (np.arange(13) != parity.REJECTED)[:, None],
        loss_weights=np.where(mask, parity.WEIGHTS[:, None], 1).astype(np.float32),
    )  # fmt: skip


def _updates(model, weights, factors, batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first of two updates, and the factors after both."""
    trained = {name: tensor.clone().requires_grad_() for name, tensor in factors.items()}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=parity.LR, betas=(0.9, 0.95), eps=parity.EPS, weight_decay=parity.WEIGHT_DECAY
    )
    gradients = {}
    for update in range(2):
        optimizer.zero_grad()
        parity._sequence_gspo(Merged(model, weights, trained), batch).backward()
        gradients = gradients or {name: tensor.grad.clone() for name, tensor in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), parity.CLIP_GRAD)
        for group in optimizer.param_groups:
            group["lr"] = parity.LR * (update + 1) / 2
        optimizer.step()
    return gradients, {name: tensor.detach() for name, tensor in trained.items()}
