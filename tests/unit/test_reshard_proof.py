"""A plan with a fault sown into it is caught, by the proof and by the rehearsal, and the fault is named. Plans carried
out with numbered elements over random layout pairs give each worker what vLLM's loader would have given it.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import pytest
from reshard_cases import MODELS, Pair, random_pairs
from seldom import seldom

from mrl.model.device_grid import DeviceId
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.vllm_loader import loaded
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard import proof
from mrl.reshard.faults import PlanFault, shard_table, worker_faults
from mrl.reshard.messages import Copy, Message, Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard
from mrl.reshard.proof import fill, numbered, shrink, simulated_faults
from mrl.reshard.streams import ITEM_BYTES

WORKER = 1
LAYER = "model.layers.2."
W13 = f"{LAYER}mlp.experts.routed_experts.w13_weight"


@cache
def good_plan() -> ReshardPlan:
    """TP2, PP2, EP2, DP2 to two engines of TP2, in several rounds."""
    model = MODELS["qwen3_moe"]
    degrees = {
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    }
    train = TrainLayout.build(degrees, model)
    return plan_reshard(model, train, RolloutLayout(2, 2), dialect="cpu", dtype="float32", budget_bytes=8192)


@dataclass(frozen=True)
class SpoiledPlan(ReshardPlan):
    """The good plan, whose messages to WORKER pass through a function on both sides."""

    spoil: Callable[[list[Message]], list[Message]]

    def receives(self, worker: int) -> Iterator[Message]:
        messages = list(super().receives(worker))
        return iter(self.spoil(messages) if worker == WORKER else messages)

    def sends(self, rank: int) -> Iterator[Message]:
        others = [message for message in super().sends(rank) if message.worker != WORKER]
        mine = [message for message in self.receives(WORKER) if message.source == rank]
        return iter(sorted([*others, *mine], key=lambda m: (m.round, m.worker)))


def spoiled(spoil: Callable[[list[Message]], list[Message]]) -> SpoiledPlan:
    plan = good_plan()
    return SpoiledPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)}, spoil=spoil)


def each_copy(
    change: Callable[[Copy], list[Copy]], wanted: Callable[[Copy], bool]
) -> Callable[[list[Message]], list[Message]]:
    """Changes the first copy that is wanted."""

    def spoil(messages: list[Message]) -> list[Message]:
        done, found = False, []
        for message in messages:
            copies: list[Copy] = []
            for copy in message.copies:
                hit = not done and wanted(copy)
                copies += change(copy) if hit else [copy]
                done = done or hit
            found.append(replace(message, copies=tuple(copies)))
        assert done
        return found

    return spoil


def gate(copy: Copy) -> bool:
    return copy.parameter == W13 and "gate_proj" in copy.hf_name


def moved(copy: Copy, box: str, axis: int, by: int) -> list[Copy]:
    offsets = [0] * len(getattr(copy, box).ranges)
    offsets[axis] = by
    return [replace(copy, **{box: getattr(copy, box).shift(offsets)})]


def other_expert(copy: Copy) -> list[Copy]:
    stem, number = copy.source_name.split(".weight")
    return [replace(copy, source_name=f"{stem}.weight{(int(number) + 1) % 4}")]


def renamed(old: str, new: str) -> Callable[[Copy], list[Copy]]:
    return lambda copy: [replace(copy, hf_name=copy.hf_name.replace(old, new))]


def elsewhere(name: str) -> Callable[[Copy], list[Copy]]:
    return lambda copy: [replace(copy, source_name=name)]


FAULTS: dict[str, tuple[Callable, Callable]] = {
    "dropped": (lambda c: [], gate),
    "doubled": (lambda c: [c, c], gate),
    "written an expert too far": (lambda c: moved(c, "target_box", 0, 1),
        lambda c: gate(c) and c.target_box.ranges[0][1] < 8),
    "gate written where up belongs": (lambda c: moved(c, "target_box", 1, 6), gate),
    "taken from where up lies": (lambda c: moved(c, "source_box", 0, 12), gate),
    "taken from another expert": (other_expert, gate),
    "said to be gate and is up": (renamed("up_proj", "gate_proj"), lambda c: "up_proj" in c.hf_name),
    "taken from another layer": (elsewhere("decoder.layers.9.mlp.router.weight"), lambda c: "mlp.gate" in c.hf_name),
    "taken from another chunk": (lambda c: [replace(c, vp_chunk=1)], gate),
    "written along swapped axes": (lambda c: [replace(c, axes=(2, 1))], gate),
}  # fmt: skip


def first_fault(plan: ReshardPlan) -> str | None:
    return proof.prove(plan).fault


def test_the_good_plan_has_no_fault():
    assert first_fault(good_plan()) is None
    assert list(simulated_faults(good_plan())) == []
    assert good_plan().num_rounds > 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoiled_copy_is_caught_by_the_proof_and_named(fault):
    change, wanted = FAULTS[fault]
    named = first_fault(spoiled(each_copy(change, wanted)))
    assert named is not None
    assert "engine 0, worker 1" in named
    assert LAYER in named or "decoder.layers" in named or "model.layers" in named


# of the others the rehearsal takes the same elements to the same place, or cannot even carry them out
VISIBLE = [
    "dropped",
    "written an expert too far",
    "gate written where up belongs",
    "taken from where up lies",
    "taken from another expert",
]


@pytest.mark.parametrize("fault", VISIBLE)
def test_a_spoiled_copy_is_caught_by_the_rehearsal_and_named(fault):
    faults = list(simulated_faults(spoiled(each_copy(*FAULTS[fault]))))
    assert faults
    assert all("engine 0, worker 1" in text for text in faults)
    assert any(W13 in text or "routed_experts" in text for text in faults)


def test_a_message_from_a_rank_that_has_something_else_is_caught():
    def swap(messages: list[Message]) -> list[Message]:
        index = next(n for n, m in enumerate(messages) if any(gate(c) for c in m.copies))
        messages[index] = replace(messages[index], source=messages[index].source ^ 1)
        return messages

    assert "rank" in (first_fault(spoiled(swap)) or "")


def test_a_lost_message_is_caught_on_both_sides():
    plan = good_plan()

    class Deaf(SpoiledPlan):
        def sends(self, rank: int) -> Iterator[Message]:
            return ReshardPlan.sends(self, rank)

    deaf = Deaf(
        **{field.name: getattr(plan, field.name) for field in fields(plan)}, spoil=lambda messages: messages[1:]
    )
    faults = list(simulated_faults(deaf))
    assert any("does not expect" in text for text in faults)
    assert any("engine 0, worker 1" in text for text in faults)


@pytest.mark.parametrize("seed", seldom(range(4), 0))
def test_expanded_plans_hold_against_the_real_shards(seed):
    """The proof at plan time looks at templates; here every copy of every worker is held against the real layout."""
    for pair in random_pairs(1000 + seed, 6):
        plan = pair.plan()
        tables = [shard_table(source_shards(pair.model, pair.train, rank)) for rank in range(pair.train.world_size)]
        for worker in range(pair.rollout.world_size):
            wanted = target_parameters(pair.model, pair.rollout, worker, pair.dialect, pair.dtype)
            assert list(worker_faults(wanted, plan.receives(worker), tables.__getitem__)) == [], pair


def test_a_wrong_description_of_the_target_stops_the_planner(monkeypatch):
    """The proof does not take the planner's word: a planner that forgets every down projection is stopped."""
    from mrl.reshard import streams

    real = streams.Holdings._grains

    def forgetful(self, parameter, limit, dtype):
        return (grain for grain in real(self, parameter, limit, dtype) if "experts.3.down_proj" not in grain.hf_name)

    plan = good_plan()
    monkeypatch.setattr(streams.Holdings, "_grains", forgetful)
    with pytest.raises(
        PlanFault, match=r"w2_weight: model\.layers\.0\.mlp\.experts\.3\.down_proj\.weight .* not covered"
    ):
        plan_reshard(plan.model, plan.train, plan.rollout, dialect="cpu", dtype="float32")


@pytest.mark.parametrize("seed", seldom(range(3), 1))
def test_shrunken_models_keep_layouts_legal_and_shards_of_two_rows(seed):
    for pair in random_pairs(2000 + seed, 8):
        small, train = shrink(pair.model, pair.train, pair.rollout)
        assert (train.world_size, train.pipeline, train.virtual_pipeline) == (
            pair.train.world_size, pair.train.pipeline, pair.train.virtual_pipeline,
        )  # fmt: skip
        assert train.num_layers == small.num_layers
        shards = [shard for rank in range(train.world_size) for shard in source_shards(small, train, rank)]
        pieces = [piece for shard in shards for piece in shard.pieces]
        for worker in range(pair.rollout.workers_per_engine):
            pieces += [p for t in target_parameters(small, pair.rollout, worker, "cpu", "float32") for p in t.pieces]
        # which have one row, and one column; of heads that tensor ranks share each has any of a group's rows
        narrow = ("shared_expert_gate.weight", "conv1d.weight")
        if train.tensor > small.num_key_value_heads:
            narrow += tuple(f"{x}_proj.{leaf}" for x in "qkv" for leaf in ("weight", "bias"))
        assert [p for p in pieces if min(p.hf_box.shape) < 2 and not p.hf_name.endswith(narrow)] == []
        if small.is_moe:
            assert small.num_experts >= max(
                2 * train.expert, min(2, pair.model.num_experts // pair.rollout.expert) * pair.rollout.expert
            )
        kinds = [{pair.model.layer_kind(n) for n in pair.train.stage_layers(p, v)} for p, v in chunks(train)]
        assert kinds == [{small.layer_kind(n) for n in train.stage_layers(p, v)} for p, v in chunks(train)]
        assert list(simulated_faults(replace_model(pair, small, train))) == []


def chunks(train: TrainLayout) -> list[tuple[int, int]]:
    return [(stage, chunk) for stage in range(train.pipeline) for chunk in range(train.virtual_pipeline)]


def test_a_layer_kind_in_the_middle_of_a_stage_is_kept():
    """Dense, with experts, dense: the ends alone would rehearse no expert."""
    model = replace(MODELS["mixed"], num_layers=3, moe_layers=(1,))
    small, train = shrink(
        model, TrainLayout.build({"world_size": 2, "expert_model_parallel_size": 2}, model), RolloutLayout()
    )
    assert (small.num_layers, small.moe_layers) == (3, (1,))
    assert train.num_layers == 3


def replace_model(pair: Pair, model, train) -> ReshardPlan:
    return replace(pair, model=model, train=train).plan()


def test_one_engine_and_a_worker_of_each_other_are_taken_apart_whatever_the_time(monkeypatch):
    plan = good_plan()
    plan = plan_reshard(plan.model, plan.train, RolloutLayout(num_engines=3, tensor=2), dialect="cpu", dtype="float32")
    seen, real = [], ReshardPlan.receives
    monkeypatch.setattr(ReshardPlan, "receives", lambda plan, worker: seen.append(worker) or real(plan, worker))
    checked = proof.prove(plan, seconds=0.0)
    assert (sorted(seen), checked.workers, checked.of_workers, checked.fault) == ([0, 1, 2, 4], 4, 6, None)
    seen.clear()
    assert proof.prove(plan).workers == 6 and sorted(seen) == list(range(6))
    assert gc.isenabled()


def test_what_a_worker_wants_depends_on_its_place_inside_the_engine_alone():
    for pair in random_pairs(3000, 6):
        size = pair.rollout.workers_per_engine
        for worker in range(pair.rollout.world_size):
            one, other = (
                target_parameters(pair.model, pair.rollout, w, pair.dialect, pair.dtype)
                for w in (worker, worker % size)
            )
            assert one == other


def test_verdict_counts_what_it_looked_at():
    places = tuple(DeviceId(0, device) for device in range(8))
    plan = good_plan()
    plan = plan_reshard(
        plan.model,
        plan.train,
        plan.rollout,
        dialect="npu",
        dtype="bfloat16",
        topology=Topology(places, places[:4]),
        budget_bytes=8192,
    )
    verdict = proof.verify(plan)
    assert verdict.fault is None
    assert verdict.proof.workers == 4
    assert verdict.proof.copies == sum(len(m.copies) for worker in range(4) for m in plan.receives(worker))
    assert (verdict.rehearsal.layers, verdict.rehearsal.experts) == (4, 4)


# ---------------------------------------------------------------- plans carried out with numbered elements


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
