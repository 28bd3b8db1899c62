"""One of two data-parallel ranks, of which only rank 1 meets NaN or inf; what each of them then did.

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

from mrl.checkpoint.rank_save import HostCopy
from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.errors import NumericAbort
from mrl.megatron.actor import MegatronActor


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
    actor.close()


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
