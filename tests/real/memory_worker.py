"""One rank: for each case in turn, builds the actor in its layout and writes the bytes that it holds.

See test_memory_truth.
"""

import json
import sys
from pathlib import Path
from weakref import WeakSet

import torch
from padded import read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_save import HostCopy


class SavedTensors:
    """Bytes of the storages that autograd keeps for the backward pass, those in `excluded` left out.

    Megatron empties the storage of an output that it will compute again, while autograd keeps the tensor: a storage
    counts with what it has whenever something is saved.
    """

    def __init__(self, excluded: set[int]) -> None:
        self.excluded = excluded
        self.kept: WeakSet[_Kept] = WeakSet()
        self.peak = 0

    def __enter__(self) -> "SavedTensors":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)

    def _keep(self, tensor: torch.Tensor) -> "_Kept":
        kept = _Kept(tensor)
        if kept.storage.data_ptr() not in self.excluded:
            self.kept.add(kept)
            sizes = {one.storage._cdata: one.storage.nbytes() for one in self.kept}
            self.peak = max(self.peak, sum(sizes.values()))
        return kept


class _Kept:
    """A saved tensor, until autograd lets it go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        batch = read_batch(case["batch"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        stage = actor.layout.dense_coords(rank).pp
        report = {"stage": stage, "activations": _activations(actor, batch), **_state(actor, batch)}
        (out / f"{case['name']}-{rank}.json").write_text(json.dumps(report))
        actor.close()


def _activations(actor: MegatronActor, batch: TrainBatch) -> int:
    """Peak of one forward and backward over the whole batch."""
    with SavedTensors(set(_parameters(actor))) as saved:
        actor.gradients(batch)
    return saved.peak


def _parameters(actor: MegatronActor) -> dict[int, int]:
    """Storage -> bytes."""
    return _sizes([p for chunk in actor.chunks for p in chunk.parameters()])


def _state(actor: MegatronActor, batch: TrainBatch) -> dict[str, int]:
    """Weights, gradient buffers, and after one update the optimizer's own tensors and what a checkpoint has."""
    actor.update(batch)
    copy = HostCopy()
    copy.take(actor)
    parameters = _parameters(actor)
    buffers = [b for chunk in actor.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    own: dict[int, int] = {}
    host: dict[int, int] = {}
    for part in actor.optimizer.chained_optimizers:
        on_host = getattr(part.optimizer, "cpu_optimizers", [])  # of Megatron's hybrid optimizer
        own |= _sizes([p for group in part.param_groups for p in group["params"]])
        for adam in getattr(part.optimizer, "sub_optimizers", [part.optimizer]):
            weights = [p for group in adam.param_groups for p in group["params"]]
            states = [v for values in adam.state.values() for v in values.values() if torch.is_tensor(v)]
            place = host if any(adam is one for one in on_host) else own
            place |= _sizes(weights + states + ([p.grad for p in weights] if place is host else []))
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(size for storage, size in own.items() if storage not in parameters),
        "optimizer_host": sum(host.values()),
        "saved": sum(tensor.nbytes for key, tensor in copy.tensors.items() if not key.startswith("rng/")),
    }


def _sizes(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Storage -> bytes."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
