"""What is put into vLLM's CPU workers: collectives of uneven parts against plain sums, other workers' experts,
and whom it refuses.
"""

import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist

from mrl.engine import cpu_parallel

SIZES = [3, 1, 4]


class Communicator:
    """Of vLLM's CpuCommunicator what the functions ask."""

    device_group = None
    world_size = len(SIZES)

    def __init__(self, rank: int):
        self.rank_in_group = rank


def rows(rank: int, number: int) -> torch.Tensor:
    """What a rank brings; in fp32 their sum depends on the order."""
    return torch.randn(number, 5, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)


def rank_of_three(rank: int, port: int, found) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(SIZES))
    here = Communicator(rank)
    gathered, ids = cpu_parallel.all_gatherv(
        here, [rows(rank, SIZES[rank]), torch.full((SIZES[rank],), rank, dtype=torch.int32)], 0, SIZES
    )
    scattered = cpu_parallel.reduce_scatterv(here, rows(rank, sum(SIZES)), 0, SIZES)
    even = cpu_parallel.reduce_scatterv(here, rows(rank, 6), 0)
    found.put((rank, gathered.numpy(), ids.tolist(), scattered.numpy(), even.numpy()))
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_uneven_rows_are_gathered_and_their_sums_scattered_in_the_order_of_ranks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # torch need not be imported again
    queue = context.Queue()
    ranks = [context.Process(target=rank_of_three, args=(rank, port, queue)) for rank in range(len(SIZES))]
    for process in ranks:
        process.start()
    try:
        found = sorted((queue.get(timeout=60) for _ in ranks), key=lambda of_rank: of_rank[0])
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    everything = torch.cat([rows(rank, size) for rank, size in enumerate(SIZES)])
    total = (rows(0, sum(SIZES)) + rows(1, sum(SIZES))) + rows(2, sum(SIZES))
    evenly = (rows(0, 6) + rows(1, 6)) + rows(2, 6)
    for rank, gathered, ids, scattered, even in found:
        start = sum(SIZES[:rank])
        assert torch.equal(torch.from_numpy(gathered), everything)
        assert ids == [0] * 3 + [1] + [2] * 4
        assert torch.equal(torch.from_numpy(scattered), total[start : start + SIZES[rank]])
        assert torch.equal(torch.from_numpy(even), evenly[2 * rank : 2 * rank + 2])


def test_rows_are_exchanged_along_the_first_dimension_only():
    with pytest.raises(NotImplementedError, match="first dimension"):
        cpu_parallel.reduce_scatterv(Communicator(0), torch.zeros(2, 2))


def moe(hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, width]: each token's chosen experts, weighed."""
    return torch.einsum("tkoi,ti,tk->to", experts[ids.long()], hidden, weights)


def test_workers_parts_add_up_to_what_one_worker_with_all_experts_computes():
    generator = torch.Generator().manual_seed(0)
    hidden, experts = torch.randn(7, 4, generator=generator), torch.randn(6, 4, 4, generator=generator)
    weights = torch.rand(7, 3, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(7)]).int()
    parts = []
    for worker in range(3):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[2 * worker : 2 * worker + 2] = torch.arange(2, dtype=torch.int32)
        local_weights, local_ids = cpu_parallel.local_choice(weights, ids, expert_map)
        assert local_ids.dtype == ids.dtype and set(local_ids.unique().tolist()) <= {0, 1}
        parts.append(moe(hidden, experts[2 * worker : 2 * worker + 2], local_weights, local_ids))
    torch.testing.assert_close(cpu_parallel.in_order(parts), moe(hidden, experts, weights, ids))


def test_vllms_own_functions_are_those_that_are_known():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert cpu_parallel.collective_faults(CpuCommunicator) == []
    assert cpu_parallel.apply_faults(CPUUnquantizedExperts) == []


def test_functions_that_fill_a_gap_themselves_are_told():
    class Communicator:
        def all_gatherv(self):
            pass

    class Other:
        def apply(self, output, expert_map):
            pass

    body = f"def apply({', '.join(cpu_parallel._APPLY_ARGUMENTS)}):\n    return expert_map\n"
    space: dict = {}
    exec(body, space)
    reading = type("Reading", (), {"apply": space["apply"]})
    assert cpu_parallel.collective_faults(Communicator) == ["Communicator has a all_gatherv of its own"]
    assert cpu_parallel.apply_faults(Other) == ["Other.apply has other arguments"]
    assert cpu_parallel.apply_faults(reading) == ["Reading.apply reads the expert map itself"]
    space.clear()
    exec(body.replace("return expert_map", "return None"), space)
    known = type("Known", (), {"apply": space["apply"]})
    assert cpu_parallel.apply_faults(known) == []
    below = type("Below", (known,), {"apply": lambda self: None})
    assert cpu_parallel.apply_faults(known) == [f"{below.__name__} has an apply of its own"]
