"""One of two data-parallel ranks, of which only rank 1 meets NaN or inf; what each of them then did, and what updates
come to whose gradient is huge, or whose responses teach nothing.

See test_guards.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from padded import read_batch
from ranks import agree_on_port

from mrl.checkpoint.manifest import EXP_AVG
from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.errors import NumericAbort
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_save import HostCopy


def main(rank: int, world_size: int, out: Path, config: dict, batch: TrainBatch) -> None:
    actor = MegatronActor(RunConfig.model_validate(config), rank, world_size, "127.0.0.1", agree_on_port(out, rank, 0))
    seen, steps = HostCopy(), []

    def update(name: str, own: TrainBatch) -> None:
        try:
            parts, error = actor.update(own).parts, None
        except NumericAbort as raised:
            parts, error = [], str(raised)
        skipped = sum(part["actor/skipped_updates"][0] for part in parts if "actor/skipped_updates" in part)
        steps.append(
            {"what": name, "skipped": skipped, "error": error, "row": actor.skipped_in_a_row, "bits": bits(actor, seen)}
        )

    infinite = replace(batch, advantages=np.full_like(batch.advantages, np.inf)) if rank == 1 else batch
    update("good", batch)
    update("inf in the loss", infinite)
    with nan_gradient(actor, rank == 1):
        update("nan in a gradient", batch)
    update("good again", batch)
    for _ in range(3):
        update("inf three times", infinite)
    (out / f"steps-{rank}.json").write_text(json.dumps(steps))
    other = {name: told(actor, seen, rows) for name, rows in without_much_to_learn(batch).items()}
    back = replace(batch, advantages=-batch.advantages)  # ratios are beyond the band by now, where they went to
    usual = told(actor, seen, back)
    spike = told(actor, seen, replace(back, advantages=1e4 * back.advantages))
    (out / f"other-{rank}.json").write_text(json.dumps(other | {"usual": usual, "spike": spike}))
    actor.close()


def without_much_to_learn(batch: TrainBatch) -> dict[str, TrainBatch]:
    """The batch with its first response empty and its second of one token, and with one mind in all groups."""
    lengths = batch.response_lengths.copy()
    lengths[:2] = 0, 1
    return {"short": cut_short(batch, lengths), "of one mind": replace(batch, advantages=0 * batch.advantages)}


def cut_short(batch: TrainBatch, lengths: np.ndarray) -> TrainBatch:
    """The first tokens of every response, so many."""
    tokens = []
    places = []
    for prompt, before, now in zip(batch.prompt_lengths, batch.response_lengths, lengths, strict=True):
        tokens.append(np.arange(prompt + before) < prompt + now)
        places.append(np.arange(before) < now)
    kept = np.concatenate(places)
    flat = {name: column[kept] for name in ("rollout_log_probs", "old_log_probs", "advantages")
            if (column := getattr(batch, name)) is not None}  # fmt: skip
    return replace(batch, response_lengths=lengths, token_ids=batch.token_ids[np.concatenate(tokens)], **flat)


def told(actor: MegatronActor, seen: HostCopy, batch: TrainBatch) -> dict:
    """What ranks say of an update, and the square of the gradient that its first moments took, of this rank's part."""
    before = moments(actor, seen)
    parts = actor.update(batch).parts
    beta = actor.config.actor.optim.betas[0]
    taken = {name: (now - beta * before[name]) / (1 - beta) for name, now in moments(actor, seen).items()}
    return {"parts": parts, "squares": sum(float((one**2).sum()) for one in taken.values())}


def moments(actor: MegatronActor, seen: HostCopy) -> dict[str, torch.Tensor]:
    """First moments, in float64, of what this rank saves."""
    seen.take(actor)
    return {name: tensor.double() for name, tensor in seen.tensors.items() if name.startswith(f"{EXP_AVG}/")}


class nan_gradient:
    """While it lasts, one parameter's gradient is not a number, on this rank if `here`."""

    def __init__(self, actor: MegatronActor, here: bool):
        self.parameter, self.here = next(p for p in actor.chunks[-1].parameters() if p.requires_grad), here

    def __enter__(self) -> None:
        self.hook = self.parameter.register_hook(lambda grad: grad * float("nan")) if self.here else None

    def __exit__(self, *_) -> None:
        if self.hook is not None:
            self.hook.remove()


def bits(actor: MegatronActor, seen: HostCopy) -> str:
    """SHA-256 of all weights and moments."""
    seen.take(actor)
    found = hashlib.sha256()
    for name, tensor in sorted(seen.tensors.items()):
        if not name.startswith("rng/"):
            found.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]), read_batch(sys.argv[5]))
