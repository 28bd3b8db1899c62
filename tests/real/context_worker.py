"""One rank: log-probs and an update of responses with context in between, whatever stands at it. See test_context."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from parity_worker import exported_gradients
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor

COLUMNS = ("rollout_log_probs", "old_log_probs", "advantages", "loss_weights", "ref_log_probs")


def main(rank: int, world_size: int, out: Path) -> None:
    meetings = 0
    batch = TrainBatch(**np.load(out / "batch.npz"))
    cut = TrainBatch(**np.load(out / "cut.npz"))
    batches = {
        "plain": batch, "noise": _spoilt(batch, 5.0), "nan": _spoilt(batch, math.nan), "let in": _let_in(batch)
    }  # fmt: skip
    report: dict = {}
    config = RunConfig.model_validate_json((out / "config.json").read_text())
    actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, meetings))
    meetings += 1
    report["before an update"] = _cut_apart(actor, batch, cut)
    report["by branches"] = actor.update(cut).parts
    report["after an update"] = _cut_apart(actor, batch, cut)
    actor.close()
    for name, given in batches.items():
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, meetings))
        meetings += 1
        report[name] = _updated(actor, given)
        if name == "plain":
            report |= _log_probs(actor, replace(given, advantages=None))
        actor.close()
    weights = {name: report[name].pop("weights") for name in batches}
    report["same"] = {name: _same(weights["plain"], own) for name, own in weights.items()}
    (out / f"{rank}.json").write_text(json.dumps(report))


def _spoilt(batch: TrainBatch, value: float) -> TrainBatch:
    """With `value` times random numbers at context, in every column that there is."""
    rng, changed = np.random.default_rng(1), {}
    for name in COLUMNS:
        if (column := getattr(batch, name)) is not None:
            noise = value * rng.random(len(column))
            changed[name] = np.where(batch.sampled, column, noise).astype(np.float32)
    return replace(batch, **changed)


def _let_in(batch: TrainBatch) -> TrainBatch:
    sampled = batch.sampled.copy()
    sampled[np.argmin(sampled)] = True
    return replace(_spoilt(batch, 5.0), sampled=sampled)


def _log_probs(actor: MegatronActor, batch: TrainBatch) -> dict:
    """Of what was sampled, with the mask and without it, on the ranks that hand out results."""
    results = [actor.log_probs(each) for each in (batch, replace(batch, sampled=None))]
    if results[0] is None:
        return {}
    own, whole = (np.zeros(len(batch.rollout_log_probs)) for _ in results)
    own[batch.sampled_indices(results[0].rows)] = results[0].log_probs
    whole[batch.token_indices(results[1].rows)] = results[1].log_probs
    return {
        "log_prob_error": float(np.abs(own - whole)[batch.sampled].max()),
        "counted": results[0].entropy[1],
        "sampled": int(batch.sampled[batch.token_indices(results[0].rows)].sum()),
        "entropy_apart": abs(results[0].entropy[0] - results[1].entropy[0]),
    }


def _cut_apart(actor: MegatronActor, batch: TrainBatch, cut: TrainBatch) -> dict:
    """How far gradients of rows that are cut into branches are from those of whole ones; and of the same rows with
    branches taken for one sequence. Every ratio is 1, so that none is clipped.
    """
    blind = replace(cut, branch_counts=None, branch_starts=None, branch_prompts=None)
    whole, parts, wrong = (_gradients(actor, each) for each in (batch, cut, blind))
    norm = float(whole.norm())
    return {
        "gradient_norm": norm,
        "cut_gradient_error": float((parts - whole).norm()) / norm,
        "blind_gradient_error": float((wrong - whole).norm()) / norm,
    }


def _gradients(actor: MegatronActor, batch: TrainBatch) -> torch.Tensor:
    actor.gradients(replace(batch, old_log_probs=None))
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(exported_gradients(actor).items())])


def _updated(actor: MegatronActor, batch: TrainBatch) -> dict:
    result = actor.update(batch)
    old = [] if result.old is None else [len(result.old.log_probs)]
    weights = {name: tensor.clone() for name, tensor in actor.export_hf()}
    return {"parts": result.parts, "old": old, "weights": weights}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
