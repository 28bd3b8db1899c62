"""One rank: gradients and updates with and without the pass of old log-probs. See test_on_policy."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from padded import on_all_rows, read_batch
from ranks import agree_on_port
from safetensors.torch import save_file

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.megatron.actor import MegatronActor
from mrl.megatron.batching import RowResult


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        actor = MegatronActor(RunConfig.model_validate(case["config"]), rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        forwards = _counted(actor)
        batch = read_batch(case["batch"])
        report = _compared(actor, batch) if case["compares"] else {}
        report |= _updated(actor, batch, forwards, out / f"{case['name']}.safetensors", rank)
        report |= _spoilt(actor, batch) if actor.config.algorithm.on_policy else {}
        (out / f"{case['name']}-{rank}.json").write_text(json.dumps(report))
        actor.close()


def _counted(actor: MegatronActor) -> list[int]:
    """Grows with each forward of a chunk."""
    forwards: list[int] = []
    for chunk in actor.chunks:
        chunk.register_forward_hook(lambda *_: forwards.append(1))
    return forwards


def _compared(actor: MegatronActor, batch: TrainBatch) -> dict:
    """The gradient of a batch whose old log-probs are those of a pass, and of the batch without any."""
    parts, gradients = [], []
    for each in (replace(batch, old_log_probs=_everywhere(actor.log_probs(batch), batch)), batch):
        parts.append(actor.gradients(each))
        gradients.append({name: p.main_grad.double().clone() for c in actor.chunks for name, p in c.named_parameters()})
    error = max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(*(g.values() for g in gradients), strict=True))
    return {"gradient_error": error, "gradient_norm": max(float(g.norm()) for g in gradients[0].values()), "parts": parts}


def _updated(actor: MegatronActor, batch: TrainBatch, forwards: list[int], file: Path, rank: int) -> dict:
    """One update as the configuration makes it, the pass included that it needs."""
    forwards.clear()
    old = None if actor.config.algorithm.on_policy else actor.log_probs(batch)
    given = batch if actor.config.algorithm.on_policy else replace(batch, old_log_probs=_everywhere(old, batch))
    result = actor.update(given)
    report = {"forwards": len(forwards), "update": result.parts, "old": _numbers(old or result.old)}
    weights = dict(actor.export_hf())
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return report


def _spoilt(actor: MegatronActor, batch: TrainBatch) -> dict:
    """Updates on generation's log-prob and on a weight that are not finite; both say so and change nothing."""
    before, updates = _weights(actor), actor.num_updates
    rollout = batch.rollout_log_probs.copy()
    rollout[-1] = math.nan
    generations = actor.update(replace(batch, rollout_log_probs=rollout))
    unchanged = [_same(before, _weights(actor))]
    for chunk in actor.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.data[0] = math.inf
    spoilt = _weights(actor)
    own = actor.update(batch)
    unchanged.append(_same(spoilt, _weights(actor)))
    bad = None if own.old is None else int((~np.isfinite(own.old.log_probs)).sum())
    skipped = [part for result in (generations, own) for part in result.parts if "actor/skipped_updates" in part]
    counts = {"updates_counted": actor.num_updates - updates, "skipped": actor.skipped_in_a_row, "told": len(skipped)}
    return {"unchanged": unchanged, "bad": bad} | counts


def _weights(actor: MegatronActor) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in actor.chunks for p in chunk.parameters()]


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _numbers(result: RowResult | None) -> dict | None:
    return result and {"rows": result.rows.tolist(), "log_probs": result.log_probs.tolist(), "entropy": result.entropy}


def _everywhere(result: RowResult | None, batch: TrainBatch) -> np.ndarray:
    """[response tokens] of all rows on all ranks, from the rank of each replica that hands its rows out."""
    full = torch.zeros(batch.rollout_log_probs.shape)
    if result is not None:
        full += torch.from_numpy(on_all_rows(batch, result.rows, result.log_probs))
    torch.distributed.all_reduce(full)
    return full.numpy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
