"""What a step's samples take on a device, and what a run keeps in host memory: against real arrays and real totals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replicas import ReplicaActor
from small_model import write_model

from mrl.algo.advantages import TokenAdvantages
from mrl.checkpoint.disk_space import BESIDE_TENSORS, checkpoint_bytes
from mrl.cluster.prerequisites import check_object_stores
from mrl.config.deployment import Deployment, rank_devices
from mrl.config.load import load_config
from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, Samples, packed
from mrl.errors import EnvironmentFault
from mrl.model import planning_model_spec
from mrl.plan.devices import USUAL
from mrl.plan.host_memory import host_section, object_stores, resume_seconds, save_bytes
from mrl.plan.memory import actor_bytes
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for, engine_of
from mrl.plan.sample_bytes import fetched_share, held_bytes, sample_bytes, stored_bytes
from mrl.rank.cut import ReplicaCut
from mrl.rank.packing import Shape, micro_batch
from mrl.rank.rank_batch import RankBatch
from mrl.units import GIB

ROOT = Path(__file__).resolve().parents[2]
TINY = "tiny-moe/cpu"
FILTERING = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score", "data.gen_batch_size=1024")
SMALL = [
    "data.train_batch_size=4", "data.max_prompt_length=6", "data.max_response_length=10", "rollout.n=2",
    "actor.ppo_mini_batch_size=2",
    "actor.layout.world_size=1", "actor.layout.sequence_parallel=null", "actor.layout.tensor_model_parallel_size=1",
    "actor.layout.expert_model_parallel_size=1",
]  # fmt: skip


def inputs_of(preset: str, *overrides: str, held_out: int | None = None) -> PlanInputs:
    config = load_config(ROOT / "parallel_configs" / f"{preset}.yaml", None, list(overrides)).config
    model, _ = planning_model_spec(config.model.path)
    return PlanInputs.of(config, model, device_for(config), validation_prompts=held_out)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    """An override: the tiny preset's model is made by a script, which nobody has run here."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_model(folder)
    return f"model.path={folder}"


def full_samples(rows: int, prompt: int, response: int) -> Samples:
    """Every sample at its limits."""
    return packed(
        [Sample(i, i, i, 0, (1,) * prompt, (2,) * response, (0.0,) * response, "length", 0) for i in range(rows)]
    )


def nbytes(arrays) -> int:
    return sum(value.nbytes for value in vars(arrays).values() if isinstance(value, np.ndarray))


def test_inputs_of_an_update_are_those_that_are_laid_out(tiny_model):
    """Without R3 and beside a few integers for the sequences' starts."""
    inputs = inputs_of(TINY, tiny_model, *SMALL)
    rows, width = 4, 10
    batch = TrainBatch.of(full_samples(rows, 6, width), 1.0)
    zeros = np.zeros(rows * width, np.float32)
    batch = replace(batch, old_log_probs=zeros, advantages=zeros, selected=zeros.astype(bool))
    arrays = micro_batch(batch, np.arange(rows), Shape(packed=True, context=1, tensor=1))
    planned = batch_plan(inputs.config, inputs.train)
    assert planned.micro.tokens == rows * (6 + width)
    found = sample_bytes(inputs, planned, 0)
    assert found.update + arrays.sequence_starts.nbytes == nbytes(arrays)
    assert found.update_routes == found.log_prob_routes == 0


def test_what_is_stored_and_what_a_rank_holds_of_a_step_are_their_arrays(tiny_model):
    switches = (
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction={level: token, mode: truncate, high: 2}",
    )
    inputs = inputs_of(TINY, tiny_model, *SMALL, *switches)
    batch, rows, width = batch_plan(inputs.config, inputs.train), 8, 10
    samples = full_samples(rows, 6, width)
    by_row = samples.numbers.nbytes
    assert stored_bytes(inputs) == samples.nbytes - by_row
    held = RankBatch(ReplicaActor(inputs.config), samples, np.ones(rows, bool), ReplicaCut((), (), ()))
    held.keep(held.score())
    held.score_by_reference()
    held.correct()
    held.set_advantages(TokenAdvantages(np.zeros(rows)))
    selection = rows * width  # which this loss has none of
    assert held_bytes(inputs, batch, 0) == held.batch.nbytes - rows * (8 + 8 + 4) + held._penalties.nbytes + selection


def test_routes_count_in_the_layers_of_the_stage_and_of_one_micro_batch_on_the_device():
    inputs = inputs_of("qwen3-235b-a22b/h100-16x8", "actor.router_replay=R3")
    batch = batch_plan(inputs.config, inputs.train)
    tokens = (
        batch.samples
        // inputs.train.data
        * (inputs.config.data.max_prompt_length + inputs.config.data.max_response_length)
    )
    found = sample_bytes(inputs, batch, 1)
    assert (
        found.log_prob_routes == batch.log_prob_micro.tokens * 12 * 8
    )  # a byte a choice, this stage's 12 layers, top 8
    assert found.update_routes == batch.micro.tokens * 12 * 8
    assert found.recorded_routes == tokens // 4 * 12 * 8  # a quarter of each sequence
    without = sample_bytes(inputs_of("qwen3-235b-a22b/h100-16x8"), batch, 1)
    assert without == replace(found, log_prob_routes=0, update_routes=0)


def test_what_ranks_hold_and_fetch_of_routes_adds_up_to_them():
    replayed, without = (inputs_of("qwen3-235b-a22b/h100-16x8", *more) for more in (["actor.router_replay=R3"], []))
    batch, train = batch_plan(replayed.config, replayed.train), replayed.train
    tokens = batch.samples * (replayed.config.data.max_prompt_length + replayed.config.data.max_response_length)
    routes, places = tokens * 94 * 8, tokens // train.data * 8
    every = [train.dense_coords(rank).pp for rank in range(train.world_size)]
    held = sum(held_bytes(replayed, batch, pp) - held_bytes(without, batch, pp) - places for pp in every)
    assert held == pytest.approx(routes, rel=1e-6)
    assert fetched_share(replayed, range(train.world_size)) == pytest.approx(1.0)


WORLD = 32
TEACHER = "distillation={enabled: true, teacher_model: {model_path: Qwen/Qwen3-30B-A3B, layout: {world_size: 32%s}}}"
BESIDE = [  # each node's replicas of the other model that are not rows of the actor's: of how many
    ("algorithm.adv_estimator=gae", 0, 1),
    ("critic.layout={world_size: 32, expert_model_parallel_size: 4}", 0, 1),  # the actor's rows on the same ranks
    ("critic.layout={world_size: 32, tensor_model_parallel_size: 2, expert_model_parallel_size: 8}", 4, 16),
    ("critic.layout={world_size: 32, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 4}", 1, 1),
    ("critic.ppo_mini_batch_size=32", 8, 32),  # dealt anew: smaller mini-batches than the actor's
    (TEACHER % "", 0, 1),
    (TEACHER % ", tensor_model_parallel_size: 4, expert_model_parallel_size: 8", 2, 8),
]  # fmt: skip


@pytest.mark.parametrize("replay", ["disabled", "R3"])
@pytest.mark.parametrize(("beside", "held", "replicas"), BESIDE)
def test_a_node_fetches_tokens_of_other_rows_for_a_critic_or_teacher_and_no_routes(beside, held, replicas, replay):
    """By hand, in bytes: 8 of 32 replicas of the actor with their routes, and rows of the other model without."""
    given = ["algorithm.adv_estimator=gae"] * beside.startswith("critic") + [f"actor.router_replay={replay}"]
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8", *given, beside)
    assert inputs.train.data == WORLD
    data = inputs.config.data
    one = full_samples(1, data.max_prompt_length, data.max_response_length)
    tokens = one.nbytes - one.numbers.nbytes
    routes = data.max_sample_length * 48 * 8 * (replay == "R3")  # a byte a choice
    expected = tokens * min(1.0, 8 / WORLD + held / replicas) + routes * 8 / WORLD
    for node in range(4):
        ranks = range(8 * node, 8 * node + 8)
        assert fetched_share(inputs, ranks) * (tokens + routes) == pytest.approx(expected)


def test_rows_that_a_critic_has_on_a_host_are_without_routes():
    def of_routes(*overrides: str) -> int:
        replayed, without = (inputs_of("qwen3-30b-a3b/h100-4x8", *overrides, f"actor.router_replay={replay}")
            for replay in ("R3", "disabled"))  # fmt: skip
        batch = batch_plan(replayed.config, replayed.train)
        return held_bytes(replayed, batch, 0) - held_bytes(without, batch, 0)

    assert of_routes("algorithm.adv_estimator=gae", BESIDE[2][0]) == of_routes() > 0


@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("qwen3-30b-a3b/h100-4x8", ""), ("qwen3-235b-a22b/h100-16x8", ""), ("qwen3-8b/h100-1x8", ""), (TINY, ""),
        ("qwen3-8b/h100-1x8", "context_parallel_size=2"), ("qwen3-30b-a3b/h100-4x8", "context_parallel_size=4"),
    ],
)  # fmt: skip
def test_what_all_ranks_copy_for_a_save_is_a_checkpoint(preset, layout, tiny_model):
    overrides = [tiny_model] if preset == TINY else []
    if layout:
        overrides.append(f"actor.layout.{layout}")
    inputs = inputs_of(preset, *overrides)
    copied = sum(save_bytes(inputs))
    assert copied == pytest.approx(checkpoint_bytes(inputs.model, inputs.config.model.dtype) - BESIDE_TENSORS, rel=0.01)


def host_of(inputs: PlanInputs) -> dict:
    batch = batch_plan(inputs.config, inputs.train)
    actors = [actor_bytes(inputs, batch, pp) for pp in range(inputs.train.pipeline)]
    return host_section(inputs, batch, engine_of(inputs), actors, *rank_devices(Deployment.of(inputs.config)))


def test_an_engine_asleep_keeps_its_weights_on_the_host_at_level_one_only():
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8")
    kept = replace(inputs, assumptions=replace(USUAL, sleep_level=1))
    assert "engine_weights" not in host_of(inputs)["terms"]
    assert host_of(kept)["terms"]["engine_weights"] == 8 * engine_of(inputs).weights  # of the eight workers of a node
    assert host_of(kept)["bytes_of_a_worker"] - host_of(inputs)["bytes_of_a_worker"] == engine_of(inputs).weights


def test_a_node_holds_its_ranks_places_and_copies_and_samples():
    """One node with all ranks: their optimizer and parameters, a whole checkpoint, and the samples of a step."""
    inputs = inputs_of("qwen3-8b/h100-1x8")
    host, batch = host_of(inputs), batch_plan(inputs.config, inputs.train)
    assert host["terms"]["object_store"] == stored_bytes(inputs)
    assert host["terms"]["samples"] == 8 * held_bytes(inputs, batch, 0)
    assert host["terms"]["save"] == sum(save_bytes(inputs))
    assert host["bytes_per_node"] == sum(host["terms"].values())
    assert host["fits"] and host["change"] == ""


def test_object_stores_hold_what_is_generated_on_their_node_and_what_is_fetched_to_it():
    """Four nodes of 8 ranks, 8 engines each; of the data-parallel replicas each node has some,
    and so it fetches their rows.
    """
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8")
    batch, (ranks, workers) = batch_plan(inputs.config, inputs.train), rank_devices(Deployment.of(inputs.config))
    whole, stores = stored_bytes(inputs), object_stores(inputs, batch, ranks, workers)
    assert set(stores) == {0, 1, 2, 3} and sum(place.node == 0 for place in workers) == len(workers) // 4
    for node in (1, 2, 3):
        on_node = {inputs.train.dense_coords(rank).dp for rank, place in enumerate(ranks) if place.node == node}
        assert stores[node] == pytest.approx(whole * (1 / 4 + len(on_node) / inputs.train.data), abs=1)
    assert stores[0] == whole, "a start reads a step there that an earlier one left, and its ranks fetch it from there"
    assert host_of(inputs)["object_store_bytes"] == max(stores.values()) <= whole


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [((), 256), (FILTERING, 256), (("trainer.schedule=one_step_off",), 512)],
    ids=["sync", "filtered", "ahead"],
)
def test_the_drivers_node_has_room_for_what_a_start_reads_there_and_for_its_part_of_the_rest(overrides, groups):
    """A start reads a step of the spool, and what is ahead of it from the checkpoint, and nothing that was filtered."""
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8", *overrides)
    batch, places = batch_plan(inputs.config, inputs.train), rank_devices(Deployment.of(inputs.config))
    stores = object_stores(inputs, batch, *places)
    whole = stored_bytes(inputs)
    read = groups * (stored_bytes(inputs_of("qwen3-30b-a3b/h100-4x8")) // 256)
    assert stores[0] - read == pytest.approx((whole - read) * stores[1] / whole, abs=2)


def test_groups_that_are_kept_lie_beside_another_batch_while_they_are_filtered():
    plain, filtering = inputs_of("qwen3-30b-a3b/h100-4x8"), inputs_of("qwen3-30b-a3b/h100-4x8", *FILTERING)
    assert plain.config.data.train_batch_size == 256  # and 1,024 more at a time
    assert stored_bytes(filtering) == (256 + 1024 - 1) / 256 * stored_bytes(plain)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["trainer.schedule=one_step_off"], 2),
        (["trainer.schedule=bounded", "trainer.max_staleness=3"], 4),
        (["trainer.schedule=bounded"], 1),
    ],
)
def test_responses_of_the_steps_that_generation_is_ahead_lie_in_the_stores_too(overrides, steps):
    plain, ahead = inputs_of("qwen3-30b-a3b/h100-4x8"), inputs_of("qwen3-30b-a3b/h100-4x8", *overrides)
    assert stored_bytes(ahead) == steps * stored_bytes(plain)


def stores_of(*overrides: str, held_out: int | None = None) -> dict[int, int]:
    """Of four nodes of 8 ranks and 8 workers each, in the middle of a run that validates."""
    overrides = ("data.val_files=held-out.parquet", "rollout.val_kwargs.n=4", "trainer.test_freq=5", *overrides)
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8", *overrides, held_out=held_out)
    return object_stores(inputs, batch_plan(inputs.config, inputs.train), *rank_devices(Deployment.of(inputs.config)))


def answers_of(prompts: int) -> int:
    """Four answers a prompt on four nodes: what one node has of them, by the bytes of real columns."""
    data = load_config(ROOT / "parallel_configs/qwen3-30b-a3b/h100-4x8.yaml").config.data
    one = full_samples(1, data.max_prompt_length, data.max_response_length)
    return prompts * sum(each.nbytes for each in (one.token_ids, one.rollout_log_probs))


@pytest.mark.parametrize("schedule", [(), ("trainer.schedule=bounded", "trainer.max_staleness=3")])
def test_answers_to_held_out_prompts_lie_beside_the_step_and_what_is_ahead_of_it(schedule):
    without, with_them = stores_of(*schedule), stores_of(*schedule, held_out=1000)
    assert {node: with_them[node] - without[node] for node in without} == dict.fromkeys(range(4), answers_of(1000))


def test_held_out_answers_before_the_first_step_have_the_stores_to_themselves():
    once = ("trainer.test_freq=-1", "trainer.val_before_train=true")
    assert stores_of(*once, held_out=10) == stores_of(*once)
    assert set(stores_of(*once, held_out=10**6).values()) == {answers_of(10**6)}


def test_a_batch_that_was_filtered_is_gone_when_held_out_prompts_are_answered():
    """256 groups are kept of 1,024 more: 1,000 prompts of 4 answers take less room than those that were dropped."""
    assert stores_of(*FILTERING, held_out=1000) == stores_of(*FILTERING)


@pytest.mark.parametrize(
    ("overrides", "read", "counted"),
    [
        (["data.val_max_samples=100"], None, 100),
        (["data.val_max_samples=100"], 60, 60),  # the files have fewer
        ([], 60, 60),
        ([], None, 0),  # before anybody has read the files
        (["data.val_files=[]"], 60, 0),
        (["trainer.test_freq=-1", "trainer.val_before_train=false"], 60, 0),
    ],
)
def test_a_plan_counts_the_held_out_prompts_that_it_knows_of(overrides, read, counted):
    validating = ["data.val_files=held-out.parquet", "trainer.test_freq=5"]
    inputs = inputs_of("qwen3-8b/h100-1x8", *validating, *overrides, held_out=read)
    assert inputs.validation_prompts == host_of(inputs)["held_out_prompts"] == counted


def test_a_store_that_is_too_small_is_refused_with_the_number():
    check_object_stores(10 * GIB, {"a": 10 * GIB, "b": 11 * GIB})
    with pytest.raises(
        EnvironmentFault, match=rf"1 of 2 nodes.*Ray on b has one of 9.50 GiB.*take 10.00 GiB.*memory {10 * GIB} "
    ):
        check_object_stores(10 * GIB, {"a": 10 * GIB, "b": int(9.5 * GIB)})


def test_processes_of_tools_and_agents_stand_on_the_nodes_of_their_engines():
    """By hand: each engine rank has processes for tools, and as many for environments."""
    preset = "qwen3-30b-a3b/h100-4x8"
    plain = inputs_of(preset)
    assert "tools" not in host_of(plain)["terms"]
    ranks = 8 // plain.config.rollout.tensor_model_parallel_size
    limit = "num_workers: 3, max_memory_gib: 0.5"
    for turns, processes in (
        (f"tools: [calculator], {limit}", 3), (f"environments: [guess_the_number], {limit}", 6),
        (f"tools: [python], {limit}, python: {{max_memory_gib: 2}}", 3 + 3 * 4),
    ):  # fmt: skip
        inputs = inputs_of(preset, f"rollout.turns={{{turns}}}")
        assert host_of(inputs)["terms"]["tools"] == ranks * processes * GIB // 2
    agent = ("rollout.endpoint=true", "rollout.agent={command: [python]}", "rollout.turns={network: true}")
    unlimited = host_of(inputs_of(preset, *agent))["terms"]["tools"]
    assert 0 < unlimited < ranks * GIB // 2
    small = replace(inputs, device=replace(inputs.device, host_memory=10**9))
    huge = inputs_of(preset, "rollout.turns={tools: [calculator], num_workers: 64, max_memory_gib: 200}")
    assert "num_workers" in host_of(huge)["change"] and "num_workers" not in host_of(small)["change"]


def test_staging_lies_in_host_memory_where_processes_cannot_open_each_others_device_memory(tiny_model):
    budget = 256 * 1024**2
    assert host_of(inputs_of(TINY, tiny_model))["terms"]["staging"] == 2 * budget
    assert host_of(inputs_of("qwen3-30b-a3b/h100-4x8", "reshard.transport=shm"))["terms"]["staging"] == 8 * 2 * budget
    assert "staging" not in host_of(inputs_of("qwen3-30b-a3b/h100-4x8"))["terms"]
    assert "staging" not in host_of(inputs_of("qwen3-30b-a3b/a3-1x16"))["terms"]  # HCCL between devices of a node
    assert host_of(inputs_of("qwen3-30b-a3b/a3-1x16", "reshard.transport=ipc"))["terms"]["staging"] == 16 * 2 * budget
    assert "staging" not in host_of(inputs_of("qwen3-30b-a3b/h100-4x8", "reshard.transport=p2p"))["terms"]


def test_a_node_that_is_too_small_is_told_what_weighs_most():
    inputs = inputs_of("qwen3-30b-a3b/h100-4x8")
    small = replace(inputs, device=replace(inputs.device, host_memory=10**9))
    assert not host_of(small)["fits"] and "checkpoint" in host_of(small)["change"]


def test_a_resume_takes_what_hashing_a_checkpoint_takes():
    """235B: 3.3 TB by one thread at 1.5 GB/s are 37 minutes; 128 ranks, each a file of its own, take seconds.

    Of two replicas of an expert the first also writes its parameters: 8 bytes a weight, where 7 are the mean.
    """
    inputs = inputs_of("qwen3-235b-a22b/h100-16x8")
    whole = sum(save_bytes(inputs))
    assert whole / 1.5e9 > 30 * 60
    assert 1.0 <= resume_seconds(inputs) / (whole / 1.5e9 / 128) < 1.1 * 8 / 7
