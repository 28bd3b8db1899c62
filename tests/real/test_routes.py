"""Routes that come with the samples (R3) are the ones that every layout computes by; a missing one leaves the router
its own choice.

The reference is Hugging Face's model, its routers made to choose the given experts.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from padded import collate
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import save, tiny_moe

from mrl.data.routes import MISSING
from mrl.data.samples import Sample

pytestmark = pytest.mark.real

TP, PP, VPP, CP, EP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip
PACKED, PADDED = {"use_remove_padding": True}, {"use_remove_padding": False}
# name -> (degrees, how the actor cuts); all on two ranks
LAYOUTS = {
    "tp2-ep2-packed": ({TP: 2, EP: 2}, PACKED),
    "pp2-vpp2-padded": ({PP: 2, VPP: 2}, PADDED),
    "pp1+3-packed": ({PP: 2, "pipeline_layers": [1, 3]}, PACKED),
    "cp2-packed": ({CP: 2}, PACKED),
    "cp2-padded": ({CP: 2}, PADDED),
    "dp2-ep2-packed": ({EP: 2}, PACKED),  # 9 rows on two ranks: one of them has a filler
}
QUICK = ("tp2-ep2-packed", "cp2-packed")  # run by continuous integration
EVERY_LAYOUT = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in LAYOUTS]
WITH_REFERENCE = ("tp2-ep2-packed",)  # the policy itself, so at ratio one its KL has no gradient
WITHOUT_ANY = "dp2-ep2-packed"  # also has a batch whose engine returned no routes at all
LENGTHS = [(3, 9), (1, 1), (12, 4), (7, 17), (5, 2), (2, 24), (9, 9), (4, 6), (1, 13)]
LAYERS, EXPERTS, TOPK = 4, 8, 2
UNKNOWN = 2  # the sample that comes without routes where some are missing


def _samples(routes: list[np.ndarray | None]) -> list[Sample]:
    rng = np.random.default_rng(1)
    ids = [tuple(rng.integers(1, 127, sum(lengths)).tolist()) for lengths in LENGTHS]
    return [
        Sample(i, i, i, 0, ids[i][:prompt], ids[i][prompt:], (0.0,) * response, "stop", 0, routes[i])
        for i, (prompt, response) in enumerate(LENGTHS)
    ]


def _forced() -> list[np.ndarray]:
    """Two different experts for every token and layer, at random; none for a sample's last token,
    as engines have it.
    """
    rng = np.random.default_rng(2)
    routes = [rng.random((sum(n), LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int8) for n in LENGTHS]
    for r in routes:
        r[-1] = MISSING
    return routes


def _with_holes(routes: list[np.ndarray]) -> list[np.ndarray | None]:
    """One sample without any; of each of the others the first three tokens as from a prefix cache,
    as far as it is longer.
    """
    cut = [r.copy() for r in routes]
    for r in cut:
        r[:3] = MISSING
    return [None if i == UNKNOWN else r for i, r in enumerate(cut)]


@dataclass(frozen=True)
class Expected:
    """What the Hugging Face model computes."""

    log_probs: np.ndarray
    gradients: dict[str, torch.Tensor]
    own_is_another: int  # (token, layer) pairs with a route, whose router would have chosen another set
    supplied: int
    missing: int  # of all but each sample's last token
    routed: int


@contextmanager
def _routers_choosing(model, routes: np.ndarray | None, own: list[np.ndarray]) -> Iterator[None]:
    """`own` takes what each router would have chosen, [tokens, topk] sorted, layer by layer."""
    gates = [layer.mlp.gate for layer in model.model.layers]

    def patched(gate, layer):
        def forward(hidden):
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            scores = logits.softmax(-1)
            index = scores.topk(gate.top_k).indices
            own.append(index.sort(-1).values.numpy())
            if routes is not None:
                wanted = torch.from_numpy(routes[:, layer].astype(np.int64))
                index = torch.where(wanted == MISSING, index, wanted)
            chosen = scores.gather(-1, index)
            return logits, chosen / chosen.sum(-1, keepdim=True), index

        return forward

    for layer, gate in enumerate(gates):
        gate.forward = patched(gate, layer)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def _expected(model, samples: list[Sample], advantages: np.ndarray) -> Expected:
    """GSPO at ratio one: its gradient is that of -mean over samples of advantage times mean log-prob."""
    model.zero_grad()
    log_probs, losses, another, supplied, missing = np.zeros((len(samples), 24), np.float32), [], 0, 0, 0
    for i, s in enumerate(samples):
        ids, own = torch.tensor(s.prompt_ids + s.response_ids), []
        with _routers_choosing(model, s.routes, own):
            logits = model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1]
        found = logits.log_softmax(-1).gather(-1, ids[len(s.prompt_ids) :, None])[:, 0]
        log_probs[i, : len(found)] = found.detach().numpy()
        losses.append(-float(advantages[i]) * found.mean())
        routes = np.full((len(ids), LAYERS, TOPK), MISSING) if s.routes is None else s.routes
        known = routes[..., 0] != MISSING
        another += int(((np.sort(routes, -1) != np.stack(own, axis=1)).any(-1) & known).sum())
        supplied += int(known.sum())
        missing += int((~known[:-1]).sum())
    torch.stack(losses).mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    routed = LAYERS * sum(sum(n) - 1 for n in LENGTHS)
    return Expected(log_probs, gradients, another, supplied, missing, routed)


@dataclass(frozen=True)
class World:
    """What is expected of each set of routes, and the ranks' files, which come to be when they are asked for."""

    out: Path
    model: Path
    expected: dict[str, Expected]
    batches: dict[str, str]  # files, by set of routes

    def folder(self, layout: str) -> Path:
        """Of what all ranks of a layout found."""
        group = [name for name in LAYOUTS if (name in QUICK) == (layout in QUICK)]
        started = self.out / group[0]
        if not started.exists():
            actor = {"ppo_micro_batch_size_per_gpu": 3, "log_prob_micro_batch_size_per_gpu": 2, "router_replay": "R3"}
            cases = [
                _case(name, self.model, {"world_size": 2} | LAYOUTS[name][0], actor | LAYOUTS[name][1])
                for name in group
            ]
            _run(self.out, group[0], 2, cases, self.batches)
        return started / layout


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    out = tmp_path_factory.mktemp("routes")
    model = tiny_moe()
    path = save(model, out / "model")
    advantages = np.random.default_rng(3).choice([-1.0, 0.5, 2.0], len(LENGTHS))
    own = _case("own", path, {"world_size": 1}, {"ppo_micro_batch_size_per_gpu": 1, "router_replay": "R2"})
    plain = _samples([None] * len(LENGTHS))
    expected = {"own": _expected(model, plain, advantages)}
    _run(out, "first", 1, [own], {"own": _written(out / "plain.npz", plain, expected["own"], advantages)})
    recorded = np.load(out / "first" / "own" / "recorded.npz")
    given = {
        "own": [recorded[str(i)].astype(np.int8) for i in range(len(LENGTHS))],
        "forced": _forced(),
        "holes": _with_holes(_forced()),
        "none": [None] * len(LENGTHS),
    }
    files = {}
    for name, routes in given.items():
        samples = _samples(routes)
        expected[name] = _expected(model, samples, advantages)
        files[name] = _written(out / f"{name}.npz", samples, expected[name], advantages)
    return World(out, path, expected, files)


def _case(name: str, path: Path, layout: dict, actor: dict) -> dict:
    config = {
        "model": {"path": str(path), "dtype": "float32"},
        "actor": {"layout": layout, "ppo_mini_batch_size": len(LENGTHS), **actor},
        "rollout": {"n": 1},
        "algorithm": {"use_kl_loss": name in WITH_REFERENCE, "kl_loss_coef": 0.1},
        "data": {"train_batch_size": len(LENGTHS)},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
    return {"name": name, "config": config}


def _written(file: Path, samples: list[Sample], expected: Expected, advantages: np.ndarray) -> str:
    batch = collate(samples, 1.0, 0)
    each = np.where(batch.response_mask, advantages[:, None], 0.0).astype(np.float32)
    np.savez(file, **replace(batch, old_log_probs=expected.log_probs, advantages=each).arrays)
    return str(file)


def _run(out: Path, name: str, world_size: int, cases: list[dict], batches: dict[str, str]) -> None:
    for case in cases:
        case["batches"] = {k: v for k, v in batches.items() if k != "none" or case["name"] == WITHOUT_ANY}
    (out / f"{name}.json").write_text(json.dumps(cases))
    run_ranks(Path(__file__).with_name("routes_worker.py"), world_size, out / name, [str(out / f"{name}.json")])


def log_probs(world: World, layout: str, routes: str) -> np.ndarray:
    found = np.zeros((len(LENGTHS), 24), np.float32)
    for file in world.folder(layout).glob(f"{routes}-*.npz"):
        part = np.load(file)
        found[part["rows"]] = part["log_probs"]
    return found


def counted(world: World, layout: str, routes: str) -> dict[str, tuple[float, float]]:
    """Numerators and denominators, added over the ranks."""
    total: dict[str, tuple[float, float]] = {}
    for file in world.folder(layout).glob(f"{routes}-*.json"):
        for name, (part, whole) in json.loads(file.read_text()).items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + part, before[1] + whole)
    return total


def test_the_routes_one_rank_recorded_are_those_of_hugging_face(world):
    model = tiny_moe()
    recorded = np.load(world.out / "first" / "own" / "recorded.npz")
    for i, s in enumerate(_samples([None] * len(LENGTHS))):
        own: list[np.ndarray] = []
        with torch.no_grad(), _routers_choosing(model, None, own):
            model(torch.tensor(s.prompt_ids + s.response_ids)[None])
        assert np.array_equal(np.sort(recorded[str(i)], -1), np.stack(own, axis=1))


@pytest.mark.parametrize("routes", ["own", "forced", "holes"])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_log_probs_are_those_of_hugging_face_by_the_same_routes(layout, routes, world):
    assert np.abs(log_probs(world, layout, routes) - world.expected[routes].log_probs).max() < 1e-5


@pytest.mark.parametrize("routes", ["forced", "holes"])
@pytest.mark.parametrize("layout", WITH_REFERENCE)
def test_the_reference_is_asked_by_the_same_routes_so_the_kl_to_oneself_is_zero(layout, routes, world):
    found = [np.load(file) for file in world.folder(layout).glob(f"{routes}-*.npz")]
    assert found and all(np.array_equal(part["reference"], part["log_probs"]) for part in found)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_other_routes_give_other_log_probs(layout, world):
    assert np.abs(log_probs(world, layout, "forced") - log_probs(world, layout, "own")).max() > 0.1


@pytest.mark.parametrize("routes", ["own", "forced", "holes"])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_gradients_are_those_of_hugging_face_and_the_routers_have_some(layout, routes, world):
    found = load_file(world.folder(layout) / f"{routes}.safetensors")
    expected = {n: g for n, g in world.expected[routes].gradients.items() if n in found}
    routers = [n for n in expected if n.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS and all(found[n].norm() > 0 for n in routers)
    worst = max(float((found[n] - g).norm() / g.norm()) for n, g in expected.items())
    assert worst < 1e-4, worst


@pytest.mark.parametrize("routes", ["own", "forced", "holes"])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_missing_and_differing_routes_are_counted_one_by_one(layout, routes, world):
    expected, counts = world.expected[routes], counted(world, layout, routes)
    assert counts["router/missing_routes"] == (expected.missing, expected.routed)
    assert counts["router/rollout_drift"] == (expected.own_is_another, expected.supplied)
    assert (expected.own_is_another > 0) == (routes != "own") and (expected.missing > 0) == (routes == "holes")


@pytest.mark.long
def test_a_batch_without_any_route_is_the_trainers_own_choice_and_said_to_be(world):
    expected, counts = world.expected["none"], counted(world, WITHOUT_ANY, "none")
    assert np.abs(log_probs(world, WITHOUT_ANY, "none") - expected.log_probs).max() < 1e-5
    assert counts["router/missing_routes"] == (expected.routed, expected.routed) == (480.0, 480.0)
    assert "router/rollout_drift" not in counts


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_load_is_counted_over_the_samples_tokens_alone(layout, world):
    """Neither padding nor a filler counts: the busiest and the idlest expert are those of the given routes."""
    routes = [r[:-1] for r in _forced()]
    counts = np.zeros((LAYERS, EXPERTS))
    for r in routes:
        for layer in range(LAYERS):
            counts[layer] += np.bincount(r[:, layer].flatten(), minlength=EXPERTS)
    most, layers = counted(world, layout, "forced")["router/load/max"]
    tokens = sum(sum(n) for n in LENGTHS)
    low, high = counts.max(-1), counts.max(-1) + len(LENGTHS)  # each sample's last token has the router's own choice
    assert layers == LAYERS
    assert (low / (tokens * TOPK / EXPERTS)).sum() <= most <= (high / (tokens * TOPK / EXPERTS)).sum()
