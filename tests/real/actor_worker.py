"""One of two ranks over tensor and expert parallelism: the actor's own promises. Writes what it saw; see test_actor."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from padded import in_rows, read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor
from mrl.rank.row_results import RowResult, UpdateResult


@dataclass(frozen=True)
class Seen:
    """What the first actor in float32 had and computed."""

    start: dict[str, torch.Tensor]  # weights
    log_probs: RowResult | None  # None where this rank does not hold the result
    updates: list[UpdateResult]
    end: dict[str, torch.Tensor]  # weights after the updates
    num_updates: int


def main(rank: int, world_size: int, out: Path, plan: dict) -> None:
    batch = read_batch(plan["batch"])

    def actor(name: str, number: int) -> MegatronActor:
        config = RunConfig.model_validate(plan["configs"][name])
        return MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))

    report, seen = of_the_first(actor("float32", 0), batch)
    report |= of_the_second(actor("float32", 1), batch, seen)
    more, loaded = in_bfloat16(actor("bfloat16", 2), batch, seen)
    report |= more
    report |= with_16_bit_gradients(actor("16-bit gradients", 3), batch, loaded)
    (out / f"report-{rank}.json").write_text(json.dumps(report))


def of_the_first(first: MegatronActor, batch: TrainBatch) -> tuple[dict, Seen]:
    """An update that is skipped, log-probs, and two updates."""
    report: dict = {"kernels": first.kernels()}
    modes: list[bool] = []
    first.chunks[0].register_forward_pre_hook(lambda chunk, _: modes.append(chunk.training))
    before, state = _weights(first), _optimizer_state(first)
    bad = replace(batch, advantages=_infinite_in_row_1(batch))
    report["skipped"] = first.update(bad).parts
    report["unchanged"] = (
        _same(before, _weights(first)) and _same(state, _optimizer_state(first)) and first.num_updates == 0
    )
    modes.clear()
    log_probs = first.log_probs(batch)
    report["trains_while_scoring"] = sorted(set(modes))
    modes.clear()
    updates = [first.update(batch), first.update(batch)]
    report["trains_while_updating"] = sorted(set(modes))
    seen = Seen(before, log_probs, updates, _weights(first), first.num_updates)
    first.close()
    return report, seen


def of_the_second(second: MegatronActor, batch: TrainBatch, seen: Seen) -> dict:
    """The same again, without what was skipped: whether all of it has the same bits."""
    report = {}
    log_probs = seen.log_probs
    again = second.log_probs(batch)
    report["log_probs_repeat"] = (log_probs is None) == (again is None) and (
        again is None or np.array_equal(log_probs.log_probs, again.log_probs)
    )
    report["updates_repeat"] = [second.update(batch), second.update(batch)] == seen.updates
    report["weights_repeat"] = (
        _same(seen.end, _weights(second)) and not _same(seen.start, seen.end) and second.num_updates == seen.num_updates
    )
    second.close()
    return report


def in_bfloat16(half: MegatronActor, batch: TrainBatch, seen: Seen) -> tuple[dict, dict[str, torch.Tensor]]:
    """Its weights at the start too."""
    report = {}
    loaded = _weights(half)
    report["bfloat16_dtypes"] = sorted({str(t.dtype) for t in loaded.values()})
    report["bfloat16_loads_rounded_weights"] = _same(loaded, {n: t.bfloat16() for n, t in seen.start.items()})
    if (result := half.log_probs(batch)) is not None:
        exact, rounded = (in_rows(batch, r.rows, r.log_probs)[np.argsort(r.rows)] for r in (seen.log_probs, result))
        report["bfloat16_log_prob_error"] = float(np.abs(rounded - exact).mean())
    report["bfloat16_update"] = half.update(batch).parts
    report["bfloat16_moved"] = not _same(loaded, _weights(half))
    half.close()
    return report, loaded


def with_16_bit_gradients(coarse: MegatronActor, batch: TrainBatch, loaded: dict[str, torch.Tensor]) -> dict:
    """`loaded`: the weights that it starts from."""
    report = {}
    report["coarse_buffers"] = sorted({str(b.grad_data.dtype) for c in coarse.chunks for b in c.buffers})
    report["coarse_update"] = coarse.update(batch).parts
    report["coarse_moved"] = not _same(loaded, _weights(coarse))
    coarse.close()
    return report


def _infinite_in_row_1(batch: TrainBatch) -> np.ndarray:
    return np.where(np.repeat(np.arange(len(batch)), batch.response_lengths) == 1, np.inf, batch.advantages).astype(
        np.float32
    )


def _weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export_hf()}


def _optimizer_state(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """Moments, step counts and the schedule's place."""
    state = {"schedule": torch.tensor(actor.scheduler.num_steps)}
    for part, optimizer in enumerate(actor.optimizer.chained_optimizers):
        for number, values in enumerate(optimizer.optimizer.state.values()):
            state |= {f"{part}.{number}.{name}": torch.as_tensor(value).clone() for name, value in values.items()}
    return state


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
