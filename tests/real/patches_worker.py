"""One of two ranks: takes each row of the CPU table out, runs the check that the row is there for,
and writes what happened.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from padded import PaddedBatch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.model import load_model_spec
from mrl.model.layout import TrainLayout
from mrl.platforms import get_platform, patching
from mrl.platforms.cpu_patches import rows_for
from mrl.platforms.host_memory_collectives import SLOT_BYTES, SharedSlots
from mrl.platforms.packs import Pack, tie
from mrl.platforms.torch_platforms import CpuPlatform
from mrl.rank import parallel
from mrl.rank.actor import MegatronActor

TIMEOUT_S = 60


def main(rank: int, world_size: int, out: Path, plan: dict) -> None:
    meeting = 0

    def attempt(check: str) -> str | None:
        """The error that the check ends with, None when it passes."""
        nonlocal meeting
        meeting += 1
        try:
            CHECKS[check](plan, rank, world_size, agree_on_port(out, rank, meeting))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            parallel.close()
            _meet(out, rank, world_size, meeting)
        return None

    rows = {row.target: row for row in rows_for("cpu")}
    patching.apply(rows.values())
    CpuPlatform.apply_patches = lambda self: None  # an actor would put the row back
    report = {"all in place": {check: attempt(check) for check in CHECKS}}
    for target, check in plan["rows"].items():
        revert(rows[target])
        report[target] = attempt(check)
        patching.apply([rows[target]])
    (out / f"report-{rank}.json").write_text(json.dumps(report))


def revert(row: patching.Patch) -> None:
    """Restores the original."""
    owner, name = patching._owner(row.target)
    original = patching._originals.pop(row.target)
    if original is patching.MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _meet(out: Path, rank: int, world_size: int, step: int) -> None:
    """Waits until every rank has ended this step: one may fail at once where another waits for a collective to time
    out.
    """
    (out / f"ended-{step}-{rank}").touch()
    while not all((out / f"ended-{step}-{other}").exists() for other in range(world_size)):
        time.sleep(0.01)  # the whole program has a deadline


def generators(plan: dict, rank: int, world_size: int, port: int) -> None:
    """In the tracker's fork tensor ranks draw different numbers, the same after the same seed;
    outside it leaves no trace.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    model = load_model_spec(plan["moe"])
    layout = TrainLayout.build({"world_size": world_size, "tensor_model_parallel_size": world_size}, model)
    parallel.init_distributed(get_platform("cpu"), rank, world_size, "127.0.0.1", port, TIMEOUT_S)
    draws = []
    for _ in range(2):
        parallel.init_model_parallel(layout, 3, TIMEOUT_S)
        before = torch.get_rng_state()
        with get_cuda_rng_tracker().fork():
            draws.append(torch.rand(8))
        assert torch.equal(torch.get_rng_state(), before)
        mpu.destroy_model_parallel()
    assert torch.equal(*draws)
    both = [torch.empty(8), torch.empty(8)]
    dist.all_gather(both, draws[0])
    assert not torch.equal(*both)


def moe_update(plan: dict, rank: int, world_size: int, port: int) -> None:
    """Builds a MoE over tensor and expert parallel ranks and takes one optimizer step, with activations recomputed."""
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # it is made once per process
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    _update(plan, rank, world_size, port, "moe", layout, recompute)


def hybrid_update(plan: dict, rank: int, world_size: int, port: int) -> None:
    """One step of Megatron's hybrid Adam, with all of it on the host and bfloat16 weights alone on the device."""
    optim = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    _update(plan, rank, world_size, port, "dense", {"pipeline_model_parallel_size": 2}, {}, optim)


def latent_update(plan: dict, rank: int, world_size: int, port: int) -> None:
    """One optimizer step of latent attention over two tensor ranks."""
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    _update(plan, rank, world_size, port, "latent", layout, {})


def pipeline_update(plan: dict, rank: int, world_size: int, port: int) -> None:
    """One optimizer step of a dense model with tied embeddings over two pipeline stages."""
    _update(plan, rank, world_size, port, "dense", {"pipeline_model_parallel_size": 2}, {})


def uneven_gather(plan: dict, rank: int, world_size: int, port: int) -> None:
    """Megatron's gather of unequal shares, forward and backward, as expert tensor parallelism uses it."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    parallel.init_distributed(get_platform("cpu"), rank, world_size, "127.0.0.1", port, TIMEOUT_S)
    mine = torch.full((1 + 2 * rank, 4), float(rank), requires_grad=True)
    whole = gather_from_sequence_parallel_region(mine, group=dist.group.WORLD, output_split_sizes=[1, 3])
    assert whole[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    (whole * (rank + 1)).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, 3.0))


def listening_threads(plan: dict, rank: int, world_size: int, port: int) -> None:
    """Further groups listen with what the first one has."""
    parallel.init_distributed(get_platform("cpu"), rank, world_size, "127.0.0.1", port, TIMEOUT_S)

    def listening() -> int:
        return sum(Path(task, "comm").read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").iterdir())

    before = listening()
    for _ in range(3):
        dist.new_group(range(world_size))
    assert listening() == before


def host_memory(plan: dict, rank: int, world_size: int, port: int) -> None:
    """Collectives give what gloo's exchange of all with all gives, to the bit, and without a message of gloo's; what is
    larger than a slot is right too.
    """
    from torch.profiler import ProfilerActivity, profile

    parallel.init_distributed(get_platform("cpu"), rank, world_size, "127.0.0.1", port, TIMEOUT_S)
    dist.all_reduce(torch.ones(1))  # the first one opens the memory
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for kind in (torch.float32, torch.bfloat16, torch.int64):
            for rows in (0, 1, 1000):
                _check_collectives(kind, rows, rank, world_size)
    assert not [event.name for event in seen.events() if event.name.startswith("c10d::")]
    _check_collectives(torch.float32, SLOT_BYTES // 4 // 3 // 2 + 1, rank, world_size)
    for sizes in ([SLOT_BYTES + 1, 1], [1, 2]), ([1, 2], [SLOT_BYTES + 1, 1]):  # one rank alone has too much
        sent = torch.full((sum(sizes[rank]),), rank, dtype=torch.uint8)
        received = torch.empty(sizes[0][rank] + sizes[1][rank], dtype=torch.uint8)
        dist.all_to_all_single(received, sent, [sizes[0][rank], sizes[1][rank]], sizes[rank])
        assert torch.equal(received.bincount(minlength=2), torch.tensor([sizes[0][rank], sizes[1][rank]]))
    _check_refusals(rank)
    if rank == 1:
        SharedSlots.make, kept = _no_memory, SharedSlots.make
    group = dist.new_group([0, 1])
    dist.all_reduce(total := torch.full((3,), rank + 1.0), group=group)  # by gloo on both ranks
    if rank == 1:
        SharedSlots.make = kept
    assert total.tolist() == [3.0] * 3


def _no_memory() -> int:
    raise AttributeError("memfd_create")


def _check_refusals(rank: int) -> None:
    """What does not fit is refused on every rank, and nothing beside the output is written."""
    buffer = torch.zeros(12)
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather_into_tensor(buffer[:4], torch.ones(3)),
        lambda: dist.reduce_scatter_tensor(buffer[:2], torch.ones(3)),
        lambda: dist.all_reduce(buffer[: 1 + rank]),
        lambda: dist.all_to_all_single(buffer[:3], torch.ones(3)),
        lambda: dist.all_to_all_single(buffer[:3], torch.ones(4), [1, 2], [2, 2]),
        lambda: dist.all_to_all_single(buffer[:2], torch.ones(4), [2, 2], [2, 2]),
        lambda: dist.all_to_all_single(buffer[:2], torch.ones(3), [1, 1], [1, 1]),
    )
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            assert "where" in str(error), error
        else:
            raise AssertionError(f"call {number} passed")
    assert not buffer.any()


def _check_collectives(kind: torch.dtype, rows: int, rank: int, world_size: int) -> None:
    """Each of the four, of tensors [2 * rows, 3] that every rank can make."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(world_size)]
    of_ranks = torch.stack([(9 * torch.randn(2 * rows, 3, generator=g)).to(kind) for g in generators])
    gathered, scattered = torch.empty(4 * rows, 3, dtype=kind), torch.empty(rows, 3, dtype=kind)
    dist.all_gather_into_tensor(gathered, of_ranks[rank])
    assert torch.equal(gathered, of_ranks.flatten(0, 1))
    dist.all_gather_into_tensor(strided := torch.empty(3, 4 * rows, dtype=kind).t(), of_ranks[rank])
    assert torch.equal(strided, gathered)
    summed = of_ranks[0] + of_ranks[1]
    dist.reduce_scatter_tensor(scattered, of_ranks[rank], async_op=True).wait()
    assert torch.equal(scattered, summed[rank * rows : (rank + 1) * rows])
    for op, expected in (dist.ReduceOp.SUM, summed), (dist.ReduceOp.MAX, of_ranks.amax(0)):
        reduced = of_ranks[rank].t().clone().t()  # not contiguous
        dist.all_reduce(reduced, op=op)
        assert torch.equal(reduced, expected)
    received = torch.empty(rows if rank == 0 else 3 * rows, 3, dtype=kind)
    sizes = [0, rows] if rank == 0 else [2 * rows, rows]  # rank 0 keeps nothing, rank 1 half
    dist.all_to_all_single(received, of_ranks[rank], sizes, [0, 2 * rows] if rank == 0 else [rows, rows])
    assert torch.equal(received, torch.cat([of_ranks[0], of_ranks[1][rows:]]) if rank else of_ranks[1][:rows])


def pack_rotation(plan: dict, rank: int, world_size: int, port: int) -> None:
    """A pack of 500 sequences is rotated in as many operations as a pack of two."""
    from megatron.core.models.common.embeddings import rope_utils
    from torch.profiler import ProfilerActivity, profile

    def operations(sequences: int) -> int:
        starts = 3 * torch.arange(sequences + 1, dtype=torch.int32)
        tie(starts, Pack((3,) * sequences, torch.arange(3).repeat(sequences)))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            rope_utils._apply_rotary_pos_emb_thd(
                torch.ones(3 * sequences, 2, 8), starts, torch.ones(4, 1, 1, 8), cp_group=dist.group.WORLD
            )
        return len(seen.events())

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    few, many = operations(2), operations(500)
    assert many <= few + 10, f"{many} operations, and {few} of two sequences"


def meta_context(plan: dict, rank: int, world_size: int, port: int) -> None:
    """A model built under torch.device("meta") has no memory, as transformers expects."""
    with torch.device("meta"):
        assert torch.zeros(3).is_meta
        assert torch.tensor([1.0]).is_meta


CHECKS: dict[str, Callable] = {
    check.__name__: check for check in (moe_update, generators, pipeline_update, hybrid_update, uneven_gather,
        listening_threads, host_memory, pack_rotation, latent_update, meta_context)
}  # fmt: skip


def _update(
    plan: dict,
    rank: int,
    world_size: int,
    port: int,
    model: str,
    layout: dict,
    overrides: dict,
    optim: dict | None = None,
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {
                "path": plan[model],
                "dtype": "bfloat16" if optim else "float32",
                "override_transformer_config": overrides,
            },
            "actor": {
                "layout": {"world_size": world_size} | layout,
                "ppo_mini_batch_size": 4,
                "optim": {"override_optimizer_config": optim or {}},
            },
            "rollout": {"n": 1},
            "data": {"train_batch_size": 4},
            "cluster": {"device": "cpu", "step_timeout_s": TIMEOUT_S},
        }
    )
    actor = MegatronActor(config, rank, world_size, "127.0.0.1", port)
    response = np.full((4, 3), -1.0, np.float32)
    ids = np.random.default_rng(0).integers(1, 100, (4, 8))
    lengths = np.full(4, 5), np.full(4, 3)
    batch = PaddedBatch(ids, *lengths, np.ones(4, np.float32), response, response, np.ones_like(response)).packed()
    for part in actor.update(batch).parts:
        assert part.get("actor/skipped_updates", (0.0, 1.0))[0] == 0.0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
