"""Plans carried out with numbered elements over random layout pairs:
each worker ends up with what vLLM's loader would have given it.
"""

from collections import defaultdict

import numpy as np
import pytest
from reshard_cases import Pair, random_pairs
from seldom import seldom

from mrl.model.device_grid import DeviceId
from mrl.model.megatron_shards import source_shards
from mrl.model.vllm_loader import loaded
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard.messages import Message
from mrl.reshard.proof import fill, numbered, simulated_faults
from mrl.reshard.streams import ITEM_BYTES

SEEDS = range(14)
PAIRS = 6  # for each seed


def messages(pair: Pair) -> tuple[list[Message], list[Message]]:
    """What all ranks say they send, and what all workers say they receive."""
    plan = pair.plan()
    sent = [message for rank in range(pair.train.world_size) for message in plan.sends(rank)]
    received = [message for worker in range(pair.rollout.world_size) for message in plan.receives(worker)]
    return sent, received


@pytest.mark.parametrize("seed", seldom(SEEDS, *range(5)))
def test_every_worker_gets_what_vllms_loader_would_give_it(seed):
    for pair in random_pairs(seed, PAIRS):
        assert list(simulated_faults(pair.plan())) == [], pair


def test_the_pairs_are_of_every_kind():
    pairs = [pair for seed in SEEDS for pair in random_pairs(seed, PAIRS)]
    assert {p.model.family for p in pairs} >= {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"}
    # dialects lay out experts in their own ways, and nothing else
    kinds = {(p.model.is_moe, p.dialect) for p in pairs}
    assert kinds == {(is_moe, dialect) for is_moe in (True, False) for dialect in ("cpu", "cuda", "npu")}
    kv = [p.model.num_key_value_heads for p in pairs]
    claims = {
        "more rollout tensor ranks than key/value heads": [p.rollout.tensor > n for p,
            n in zip(pairs, kv, strict=True)],
        "more training tensor ranks than key/value heads": [p.train.tensor > n for p, n in zip(pairs, kv, strict=True)],
        "uneven stages": [len({sum(stage) for stage in p.train.chunk_layers}) > 1 for p in pairs],
        "virtual stages": [p.train.virtual_pipeline > 1 for p in pairs],
        "tied embeddings over stages": [p.model.tie_word_embeddings and p.train.pipeline > 1 for p in pairs],
        "sliced experts": [p.train.expert_tensor > 1 for p in pairs],
        "context parallelism": [p.train.context > 1 for p in pairs],
        "data parallelism": [p.train.data > 1 for p in pairs],
        "expert replicas": [p.model.is_moe and p.train.expert_data > 1 for p in pairs],
        "padded vocabulary in training": [p.model.vocab_size % p.train.tensor > 0 for p in pairs],
        "several engines": [p.rollout.num_engines > 1 for p in pairs],
        "data parallelism in an engine, experts spread": [p.rollout.data > 1 and p.rollout.expert > 1 for p in pairs],
        "data parallelism in an engine, experts sliced": [
            p.model.is_moe and p.rollout.data > 1 and p.rollout.expert == 1 for p in pairs
        ],
        "unevenly spread experts": [p.model.is_moe and p.model.num_experts % p.rollout.expert > 0 for p in pairs],
        "layers with and without experts": [0 < len(p.model.moe_layers) < p.model.num_layers for p in pairs],
        "shared devices": [p.topology is not None and bool({*p.topology.ranks} & {*p.topology.workers}) for p in pairs],
    }  # fmt: skip
    assert [claim for claim, hits in claims.items() if sum(hits) < 3] == []


@pytest.mark.parametrize("seed", seldom(range(100, 103), 100))
def test_both_sides_list_the_same_messages_in_their_order(seed):
    for pair in random_pairs(seed, 6):
        sent, received = messages(pair)
        assert sorted(sent, key=lambda m: (m.round, m.source, m.worker)) == sorted(
            received, key=lambda m: (m.round, m.source, m.worker)
        )
        assert sent == sorted(sent, key=lambda m: (m.source, m.round, m.worker))
        assert received == sorted(received, key=lambda m: (m.worker, m.round, m.source))
        assert len({(m.round, m.source, m.worker) for m in sent}) == len(sent), "one message a peer and round"


@pytest.mark.parametrize("seed", seldom(range(200, 203), 200))
def test_no_process_exceeds_the_budget_in_a_round(seed):
    for pair in random_pairs(seed, 6):
        totals: dict[tuple, int] = defaultdict(int)
        for message in messages(pair)[0]:
            assert message.nbytes == sum(
                copy.hf_box.volume * ITEM_BYTES[copy.dtype or pair.dtype] for copy in message.copies
            )
            totals["rank", message.source, message.round] += message.nbytes
            totals["worker", message.worker, message.round] += message.nbytes
        assert max(totals.values()) <= pair.budget
        both = [nbytes + totals.get((side, number, at + 1), 0) for (side, number, at), nbytes in [*totals.items()]]
        assert max(both) == pair.plan().peak_staging_bytes <= 2 * pair.budget


@pytest.mark.parametrize("seed", seldom(range(300, 303), 300))
def test_at_most_two_modules_of_a_worker_are_unfinished_at_any_time(seed):
    for pair in random_pairs(seed, 6):
        plan = pair.plan()
        for worker in range(pair.rollout.world_size):
            rounds: dict[str, list[int]] = defaultdict(list)
            for message in plan.receives(worker):
                for copy in message.copies:
                    rounds[copy.parameter.rpartition(".")[0]].append(message.round)
            for number in range(plan.num_rounds):
                assert sum(min(seen) <= number < max(seen) for seen in rounds.values()) <= 2, "at the end of a round"


@pytest.mark.parametrize("seed", seldom(range(400, 403), 400))
def test_moved_bytes_are_those_that_no_rank_on_the_device_has_and_remote_ones_those_that_none_on_the_node_has(seed):
    for pair in random_pairs(seed, 8):
        hf, plan = numbered(pair.model), pair.plan()
        on_device: dict[DeviceId, list[np.ndarray]] = defaultdict(list)
        on_node: dict[int, list[np.ndarray]] = defaultdict(list)
        for rank in range(pair.train.world_size if pair.topology else 0):
            held = [fill(shard, hf).ravel() for shard in source_shards(pair.model, pair.train, rank)]
            on_device[pair.topology.ranks[rank]] += held
            on_node[pair.topology.ranks[rank].node] += held
        required = remote = 0
        for worker in range(pair.rollout.world_size):
            place = pair.topology.workers[worker] if pair.topology else None
            here, near = (on_device[place], on_node[place.node]) if place else ([], [])
            dtype_of = {
                t.name: t.dtype for t in target_parameters(pair.model, pair.rollout, worker, pair.dialect, pair.dtype)
            }
            for name, array in loaded(pair.model, pair.rollout, worker, hf, transposed=False).items():
                required += _lacking(array, here) * ITEM_BYTES[dtype_of[name]]
                remote += _lacking(array, near) * ITEM_BYTES[dtype_of[name]]
        assert plan.bytes_required == plan.bytes_moved == required
        assert plan.bytes_remote == remote
        assert sum(m.nbytes for m in messages(pair)[0]) == plan.bytes_moved + plan.bytes_local


def _lacking(needed: np.ndarray, held: list[np.ndarray]) -> int:
    """Elements that nobody of `held` has; 0 is padding."""
    return np.count_nonzero(~np.isin(needed, np.concatenate([[0], *held])))
