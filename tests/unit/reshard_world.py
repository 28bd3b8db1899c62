"""A whole reshard in one process: a thread a rank and a thread a worker, over the real transports,
into plain tensors.
"""

import os
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from small_model import SIZES
from torch import Tensor

from mrl.model import tensor_specs
from mrl.model.megatron_shards import source_shards
from mrl.model.vllm_parameters import TargetParameter, target_parameters
from mrl.process.free_ports import free_port
from mrl.reshard.connect import connect_receiver, open_sender
from mrl.reshard.digest import MODULUS, Merge, partial_digest
from mrl.reshard.execute import Receiver, Sender
from mrl.reshard.setup import SyncSetup
from mrl.reshard.sync_report import ReceiveReport, SendReport


def setup_for(
    train: dict, rollout: dict, transport: str = "shm", nodes: Callable[[str, int], int] = lambda side, i: 0, **changes
) -> SyncSetup:
    """A setup of the small model; `nodes` says on which node a ("ranks" or "workers", number) stands."""
    rollout = {"num_engines": 1, "tensor": 1, "data": 1, "expert": 1} | rollout
    counts = {"ranks": train["world_size"], "workers": rollout["num_engines"] * rollout["tensor"] * rollout["data"]}
    first = {"ranks": 0, "workers": counts["ranks"]}
    topology = {side: [[nodes(side, i), first[side] + i] for i in range(count)] for side, count in counts.items()}
    where = {
        "kind": transport,
        "name": f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        "address": f"127.0.0.1:{free_port()}",
    }
    values = {
        "hf_config": SIZES, "train": train, "rollout": rollout, "dialect": "cpu", "dtype": "float32",
        "topology": topology,
        "budget_bytes": 40_000, "timeout_s": 20.0, "transport": where,
    }  # fmt: skip
    return SyncSetup(**values | changes)


def hf_weights(setup: SyncSetup, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=noise).to(dtype) for s in tensor_specs(setup.model)}


def shards_of(setup: SyncSetup, rank: int, weights: dict[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    """What a Megatron rank holds, by (name, model chunk); vocabulary padding is garbage, as it may be there."""
    found = {}
    for shard in source_shards(setup.model, setup.train_layout, rank):
        local = torch.full(shard.local_shape, 7.0, dtype=next(iter(weights.values())).dtype)
        for piece in shard.pieces:
            local[piece.local_box.slices] = weights[piece.hf_name][piece.hf_box.slices]
        found[shard.megatron_name, shard.vp_chunk] = local
    return found


def expected(setup: SyncSetup, worker: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a worker must hold, cut out of the full tensors one piece at a time."""
    found = {}
    layout, engine = setup.rollout_layout, (setup.dialect, setup.dtype, setup.fp8_block)
    for parameter in target_parameters(setup.model, layout, worker, *engine):
        local = torch.zeros(parameter.local_shape, dtype=getattr(torch, parameter.dtype))
        for piece in parameter.pieces:
            block = weights[piece.hf_name][piece.hf_box.slices].to(local.dtype)
            if piece.axes == (2, 1):
                block = block.t()
            local[piece.local_box.slices] = block.reshape(local[piece.local_box.slices].shape)
        found[parameter.name] = local
    return found


@dataclass
class DictWriter:
    """An engine's parameters as plain tensors, and what it saw."""

    setup: SyncSetup
    worker: int
    digests: dict[str, int] = field(default_factory=dict)
    most_begun: int = 0  # modules that were begun and not complete at the same time
    tensors: dict[str, Tensor] = field(default_factory=dict)
    spoil: Callable[[str, Tensor], None] = lambda name, tensor: None  # between the write and the digest

    def __post_init__(self) -> None:
        setup = self.setup
        layout = target_parameters(
            setup.model, setup.rollout_layout, self.worker, setup.dialect, setup.dtype, setup.fp8_block
        )
        self.parameters: dict[str, TargetParameter] = {p.name: p for p in layout}
        self._begun: set[str] = set()

    def tensor(self, parameter: str) -> Tensor:
        if parameter not in self.tensors:
            spec = self.parameters[parameter]
            self._begun.add(spec.module)
            self.most_begun = max(self.most_begun, len(self._begun))
            self.tensors[parameter] = torch.zeros(spec.local_shape, dtype=getattr(torch, spec.dtype))
        return self.tensors[parameter]

    def complete(self, module: str) -> None:
        self._begun.remove(module)
        for name, spec in self.parameters.items():
            if spec.module == module:
                self.spoil(name, self.tensors[name])
                self.digests[name] = self.digest(spec)

    def digest(self, spec: TargetParameter) -> int:
        total = 0
        for piece in spec.pieces:
            block = self.tensors[spec.name][piece.local_box.slices].permute(*_turned(piece.axes, len(spec.local_shape)))
            total += partial_digest(block.reshape(piece.hf_box.shape), piece.hf_name, piece.hf_box.origin)
        return total % MODULUS


def _turned(axes: tuple[int, ...], dims: int) -> list[int]:
    return [d for d in range(dims) if d not in axes] + list(axes)


@dataclass
class Outcome:
    """What every process came to: a report, or what it raised."""

    sends: dict[int, SendReport | Exception]
    receives: dict[int, ReceiveReport | Exception]
    writers: dict[int, DictWriter]

    def errors(self) -> list[str]:
        return [str(e) for e in [*self.sends.values(), *self.receives.values()] if isinstance(e, Exception)]


def end_of(sender: Sender):
    """The only transport of a rank's only connection."""
    (end,) = sender.end._ends
    return end


class World:
    """Every rank and worker of a setup, connected. Close it."""

    def __init__(
        self, setup: SyncSetup, weights: dict[str, Tensor], worker_setup: SyncSetup | None = None,
        merge: Merge | None = None,
    ):  # fmt: skip
        """`worker_setup`: what the workers were told, when it is to differ. `merge`: of all ranks' adapters."""
        self.setup = setup
        self.held = {rank: shards_of(setup, rank, weights) for rank in range(setup.train_layout.world_size)}
        self.senders: dict[int, Sender] = {
            r: open_sender(setup, r, lambda name, chunk, r=r: self.held[r][name, chunk], merge) for r in self.held
        }
        self.receivers: dict[int, Receiver] = {}
        self.connect([setup], worker_setup)

    def connect(self, setups: list[SyncSetup], worker_setup: SyncSetup | None = None) -> None:
        """Opens connections anew, one after the other on each rank."""
        for setup in setups:
            for worker in setup.workers:
                if worker in self.receivers:
                    self.receivers.pop(worker).end.close()

        def connect_rank(rank: int) -> None:
            for setup in setups:
                self.senders[rank].connect(setup)

        told = {worker: worker_setup or setup for setup in setups for worker in setup.workers}
        opened = self._at_once(
            {("rank", r): lambda r=r: connect_rank(r) for r in self.senders}
            | {("worker", w): lambda w=w: connect_receiver(told[w], w) for w in told}
        )
        for error in opened.values():
            if isinstance(error, Exception):
                raise error
        self.receivers |= {w: end for (side, w), end in opened.items() if side == "worker"}

    def sync(self, update: int, workers: Iterable[int] | None = None, **writer) -> Outcome:
        """One sync of `workers` (all of them when not given). `writer`: fields of the DictWriters."""
        workers = list(self.receivers if workers is None else workers)
        writers = {w: DictWriter(self.setup, w, **writer) for w in workers}
        done = self._at_once(
            {("rank", r): lambda s=s: s.send(update, workers) for r, s in self.senders.items()}
            | {("worker", w): lambda w=w: self.receivers[w].receive(writers[w], update) for w in workers}
        )
        sides = {side: {n: answer for (of, n), answer in done.items() if of == side} for side in ("rank", "worker")}
        return Outcome(sides["rank"], sides["worker"], writers)

    @staticmethod
    def _at_once(calls: dict) -> dict:
        def caught(call: Callable):
            try:
                return call()
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(calls)) as pool:
            return dict(zip(calls, pool.map(caught, calls.values()), strict=True))

    def close(self) -> None:
        for end in [*self.senders.values(), *self.receivers.values()]:
            end.end.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def sums_of(sends: Iterable[SendReport], worker: int) -> dict[str, int]:
    """The senders' digests of one worker's parameters."""
    total: dict[str, int] = {}
    for report in sends:
        for name, digest in report.digests.get(worker, {}).items():
            total[name] = (total.get(name, 0) + digest) % MODULUS
    return total
