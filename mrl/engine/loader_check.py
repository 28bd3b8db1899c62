"""Compares the weight map's view of vLLM with what vLLM's own loader does: names, order, shapes, dtypes and every
element.

python -m mrl.engine.loader_check JOB.json

vLLM's model is built as each worker of a layout and takes numbered tensors by its loader. Every element of a checkpoint
has a number of its own, below 2^24, so that float32 holds it. Afterwards each parameter must hold exactly the numbers
that the map says, and zeros where it says padding. Only the process groups are mocks, which know a size and a rank.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mrl.checkpoint.manifest import WEIGHT
from mrl.checkpoint.open_checkpoint import Checkpoint, open_hf
from mrl.checkpoint.stored_boxes import BoxReader
from mrl.model import ModelSpec, model_spec, tensor_specs
from mrl.model.boxes import Box
from mrl.model.layout import RolloutLayout
from mrl.model.registry import family_of
from mrl.model.tensors import as_stored
from mrl.model.vllm_parameters import Dialect, TargetParameter, target_parameters

UNTOUCHED = -1.0


@dataclass
class FakeGroup:
    """The part of vLLM's GroupCoordinator that a model asks for while it is built and loaded."""

    world_size: int
    rank_in_group: int

    @property
    def rank(self) -> int:
        """The rank in the group."""
        return self.rank_in_group

    @property
    def is_first_rank(self) -> bool:
        """Tells whether this is the first rank."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Tells whether this is the last rank."""
        return self.rank_in_group == self.world_size - 1

    @property
    def device_group(self) -> Any:
        """What stands for torch's group."""
        return SimpleNamespace(size=lambda: self.world_size, rank=lambda: self.rank_in_group)


@contextmanager
def as_worker(layout: RolloutLayout, worker: int) -> Iterator[None]:
    """Gives vLLM the groups of one worker until the block ends."""
    from vllm.distributed import parallel_state

    coords = layout.coords(worker)
    one = FakeGroup(1, 0)
    groups = {
        "_TP": FakeGroup(layout.tensor, coords.tp),
        "_DP": FakeGroup(layout.data, coords.dp),
        "_EP": FakeGroup(layout.workers_per_engine, worker),
        "_PP": one,
        "_PCP": one,
        "_DCP": one,
        "_WORLD": FakeGroup(layout.workers_per_engine, worker),
    }
    before = {name: getattr(parallel_state, name) for name in groups}
    for name, group in groups.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def built(folder: Path, layout: RolloutLayout, worker: int, dtype: str = "float32", **given: Any) -> torch.nn.Module:
    """Returns vLLM's model of one worker in load layout, untouched.

    `given`: further arguments of vLLM's ModelConfig.
    """
    from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mrl.engine.receive import register_models

    register_models()
    parallel = ParallelConfig(enable_expert_parallel=layout.expert > 1)
    # set here, because vLLM compares given ones with this machine
    parallel.tensor_parallel_size = layout.tensor
    parallel.data_parallel_size = layout.data
    parallel.data_parallel_rank = layout.coords(worker).dp
    model = ModelConfig(
        model=str(folder), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=32, **given
    )
    config = VllmConfig(model_config=model, compilation_config=CompilationConfig(mode=0))
    config.parallel_config = parallel
    with as_worker(layout, worker), set_current_vllm_config(config), set_default_torch_dtype(getattr(torch, dtype)):
        return initialize_model(config)


def numbered(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Returns a checkpoint in which every element has its own number; 0 is kept for padding.

    Raises ValueError for a model with more elements than float32 can count.
    """
    tensors = {}
    number = 1
    for one in tensor_specs(spec):
        tensors[one.name] = torch.arange(number, number + one.numel, dtype=torch.float32).view(one.shape)
        number += one.numel
    if number >= 2**24:
        raise ValueError(f"{number} elements are more than float32 counts")
    return tensors


def described(target: TargetParameter, checkpoint: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns what a parameter holds if its description is right."""
    tensor = torch.zeros(target.local_shape)
    for piece in target.pieces:
        block = checkpoint[piece.hf_name][piece.hf_box.slices]
        others = [axis for axis in range(tensor.dim()) if axis not in piece.axes]
        tensor[piece.local_box.slices].permute(*others, *piece.axes).copy_(block)
    return tensor


class _Files(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors by their HF names, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, reader: BoxReader):
        self._shapes = {spec.name: spec.shape for spec in tensor_specs(checkpoint.model)}
        self._dtype = getattr(torch, checkpoint.dtype)
        self._reader = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], dtype=self._dtype)
        bits = tensor.view(getattr(torch, f"int{8 * self._dtype.itemsize}"))
        self._reader.fill(WEIGHT, name, Box.whole(tensor.shape), bits.numpy())
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def parallel_of_worker() -> Any:
    """Returns vLLM's ParallelConfig of this worker, while it loads its model."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().parallel_config


def unlike_files(model: torch.nn.Module, folder: Path, layout: RolloutLayout, worker: int) -> list[str]:
    """Returns the names of parameters that are not what the checkpoint in `folder` has of them.

    `model`: of the worker, before vLLM processes what it has loaded.
    """
    checkpoint = open_hf(folder)
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    wanted = {one.name: one for one in target_parameters(checkpoint.model, layout, worker, "cpu", checkpoint.dtype)}
    with closing(checkpoint.reader()) as reader:
        files = _Files(checkpoint, reader)
        same = {
            name
            for name in held.keys() & wanted.keys()
            if torch.equal(held[name].cpu(), described(wanted[name], files).to(held[name].dtype))
        }
    return sorted((held.keys() | wanted.keys()) - same)


def as_loaded(loaded: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a parameter as vLLM's loader leaves it."""
    return loaded


def differences(
    folder: Path,
    layout: RolloutLayout,
    dialect: Dialect = "cpu",
    in_kernel: Callable[[torch.Tensor, str], torch.Tensor] = as_loaded,
) -> list[str]:
    """Returns the names, their order, shapes, dtypes and elements in which vLLM and the description differ, on all
    workers.

    `in_kernel`: what the device's kernel reads of a loaded parameter, by its name.
    """
    spec = model_spec(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    checkpoint = numbered(spec)
    arrays = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    stored = {key: torch.from_numpy(array) for key, array in as_stored(spec, arrays).items()}
    keys = family_of(spec).engine_keys(spec)
    given = {"hf_overrides": keys} if keys else {}
    faults = []
    for worker in range(layout.workers_per_engine):
        model = built(folder, layout, worker, **given)
        with as_worker(layout, worker), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(UNTOUCHED)
            model.load_weights(iter(stored.items()))
        held = dict(model.named_parameters())
        wanted = {target.name: target for target in target_parameters(spec, layout, worker, dialect, "float32")}
        faults += [f"worker {worker}: only one of both has {name}" for name in sorted(held.keys() ^ wanted.keys())]
        faults += [f"worker {worker}: {fault}" for fault in _other_order(list(held), list(wanted))]
        for name in sorted(held.keys() & wanted.keys()):
            loaded = in_kernel(held[name].data, name)
            if wanted[name].dtype != str(held[name].dtype).removeprefix("torch."):
                faults.append(f"worker {worker}: {name} is {held[name].dtype}")
            if tuple(loaded.shape) != wanted[name].local_shape:
                faults.append(f"worker {worker}: {name} has shape {tuple(loaded.shape)}")
            elif not torch.equal(loaded.float(), described(wanted[name], checkpoint)):
                faults.append(f"worker {worker}: {name} holds other elements")
    return faults


def _other_order(held: list[str], wanted: list[str]) -> list[str]:
    """Returns the first place at which vLLM's module registers another parameter than Family.vllm_order says."""
    if sorted(held) != sorted(wanted):
        return []
    apart = (pair for pair in zip(held, wanted, strict=True) if pair[0] != pair[1])
    return [f"vLLM has {own} where vllm_order has {ours}" for own, ours in islice(apart, 1)]


def main(job: Path) -> None:
    """Judges each case of a job. What vLLM refuses is written as the case's `fault`."""
    torch.set_num_threads(1)
    found = {}
    for case in json.loads(job.read_text(encoding="utf-8"))["cases"]:
        try:
            found[case["name"]] = {"differences": differences(Path(case["folder"]), RolloutLayout(*case["layout"]))}
        except Exception as error:  # of vLLM, of whatever kind: the check names it
            found[case["name"]] = {"fault": f"{type(error).__name__}: {error}"}
    job.with_suffix(".out").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
