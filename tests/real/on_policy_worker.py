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
from mrl.data.samples import Sample, packed
from mrl.driver.step_batch import StepBatch
from mrl.errors import NumericAbort
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_step import RankStep
from mrl.rank.row_results import RowResult
from mrl.store.response_store import ResponseBlock, ResponseStore


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        actor = MegatronActor(
            RunConfig.model_validate(case["config"]), rank, world_size, "127.0.0.1", agree_on_port(out, rank, number)
        )
        forwards = _counted(actor)
        batch = read_batch(case["batch"])
        report = _compared(actor, batch) if case["compares"] else {}
        samples = _samples(batch, case["rejected"])
        report |= _updated(actor, samples, forwards, out / f"{case['name']}.safetensors", rank)
        report |= _spoilt(actor, samples) if actor.config.algorithm.on_policy else {}
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
    error = max(
        float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(*(g.values() for g in gradients), strict=True)
    )
    return {
        "gradient_error": error,
        "gradient_norm": max(float(g.norm()) for g in gradients[0].values()),
        "parts": parts,
    }


def _updated(actor: MegatronActor, samples: list[Sample], forwards: list[int], file: Path, rank: int) -> dict:
    """A step as the loop makes it."""
    forwards.clear()
    report = {"metrics": _step(actor, samples), "forwards": len(forwards)}
    weights = dict(actor.export_hf())
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return report


def _spoilt(actor: MegatronActor, samples: list[Sample]) -> dict:
    """Steps on a log-prob of generation and on a weight that are not finite; what each says,
    and whether it changed a weight.
    """
    updates, said, unchanged = actor.num_updates, [], []
    nan = [*samples[:-1], replace(samples[-1], rollout_log_probs=(math.nan, *samples[-1].rollout_log_probs[1:]))]
    for given in (nan, samples):
        before = _weights(actor)
        said.append(_abort(actor, given))
        unchanged.append(all(torch.equal(a, b) for a, b in zip(before, _weights(actor), strict=True)))
        for chunk in actor.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("final_layernorm.weight"):
                    parameter.data[0] = math.inf
    return {
        "said": said,
        "unchanged": unchanged,
        "counted": actor.num_updates - updates,
        "skipped": actor.skipped_in_a_row,
    }


def _abort(actor: MegatronActor, samples: list[Sample]) -> str:
    try:
        _step(actor, samples)
    except NumericAbort as error:
        return str(error)
    return "nothing"


def _weights(actor: MegatronActor) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in actor.chunks for p in chunk.parameters()]


def _step(actor: MegatronActor, samples: list[Sample]) -> dict[str, float]:
    """What the driver does of a step from its samples to its updates, on every rank alike."""
    made = packed(samples)
    stored = InMemory.of(made.numbers, ResponseBlock(replace(made, routes=None), made.routes))
    scores = np.cos(np.arange(len(samples)))
    step = StepBatch(Ranks(actor), stored, 1)
    scored = step.score(scores, np.ones(len(samples), bool))
    return dict(scored.metrics) | step.update()


class InMemory(ResponseStore):
    """References are the responses themselves."""

    @staticmethod
    def _get(references) -> list:
        return list(references)


class Ranks:
    """Stands in for the driver's group of ranks: each rank makes its own call,
    and all of them tell each other what it gave.
    """

    def __init__(self, actor: MegatronActor) -> None:
        self.config, self.model, self.layout, self._actor = actor.config, actor.model, actor.layout, actor
        self.route_readers = {}

    def score(self, arguments: list[tuple]) -> tuple[list, list]:
        rows, own, stored, *handed = arguments[self._actor.rank]
        self._step = RankStep(self._actor, rows)
        scored, returns = self._step.score(own, stored, handed)
        return self._of_all(scored), self._of_all(returns)

    def each(self, method: str, arguments: list[tuple], phase: str, interruptible: bool = False) -> list:
        return self._of_all(getattr(self._step, method)(*arguments[self._actor.rank]))

    @staticmethod
    def _of_all(answer) -> list:
        answers = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answers, answer)
        return answers


def _samples(batch: TrainBatch, truncated: int) -> list[Sample]:
    """A batch's rows as an engine hands them over; one of them was cut off."""
    found, ends = [], (np.cumsum(batch.lengths), np.cumsum(batch.response_lengths))
    for i, (prompt, response, end, response_end) in enumerate(
        zip(batch.prompt_lengths, batch.response_lengths, *ends, strict=True)
    ):
        ids = tuple(batch.token_ids[end - prompt - response : end].tolist())
        log_probs = tuple(batch.rollout_log_probs[response_end - response : response_end].tolist())
        found.append(
            Sample(i, i, i, 0, ids[:prompt], ids[prompt:], log_probs, "length" if i == truncated else "stop", 0)
        )
    return found


def _everywhere(result: RowResult | None, batch: TrainBatch) -> np.ndarray:
    """[response tokens] of all rows on all ranks, from the rank of each replica that hands its rows out."""
    full = torch.zeros(batch.rollout_log_probs.shape)
    if result is not None:
        full += torch.from_numpy(on_all_rows(batch, result.rows, result.log_probs))
    torch.distributed.all_reduce(full)
    return full.numpy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
