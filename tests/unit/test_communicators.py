"""Pairs of a rank and a worker that NCCL or HCCL serves have a communicator each, and so has each process group of the
actor, of a teacher, and of a critic in a layout of its own; the plan leaves room for those of the fullest device.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_memory_host import inputs_of

from mrl.config.load import load_config
from mrl.config.schema import with_values
from mrl.model import planning_model_spec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.plan.devices import find_device
from mrl.plan.engine_memory import GRAPHS
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import actor_groups, engine_groups, engine_of, most_pairs, process_groups
from mrl.platforms.hosting import get_hosting
from mrl.units import MIB

ROOT = Path(__file__).parents[2]


def pairs(preset: str, *settings: str) -> int:
    return most_pairs(load_config(ROOT / "parallel_configs" / f"{preset}.yaml", None, list(settings)).config)


# Counted by hand: a device has one rank and one worker, each with a peer on every device that shared memory does not
# reach
COUNTED = {
    ("qwen3-30b-a3b/h100-1x8",): 0,  # one node, whose devices open each other's memory
    ("qwen3-30b-a3b/h100-4x8",): 2 * 24,
    ("qwen3-30b-a3b/h100-4x8", "reshard.transport=p2p"): 2 * 31,  # not with the other of its own device
    ("qwen3-30b-a3b/h100-4x8", "reshard.path=slow"): 0,
    ("qwen3-30b-a3b/h100-4x8-separate",): 16,  # 16 ranks on two nodes, 16 workers on the other two
    ("qwen3-30b-a3b/a3-1x16",): 2 * 15,  # of a neighbour an NPU opens nothing
    ("qwen3-30b-a3b/a3-1x16", "reshard.transport=ipc"): 0,
    ("qwen3-235b-a22b/h100-16x8",): 2 * 120,
}


@pytest.mark.parametrize("asked", COUNTED, ids=" ".join)
def test_the_fullest_device_has_a_pair_for_each_peer_that_is_out_of_reach(asked):
    assert pairs(*asked) == COUNTED[asked]


def test_what_they_take_is_not_planned_with_and_is_counted_once():
    inputs, device = inputs_of("qwen3-235b-a22b/h100-16x8"), find_device("h100-80g")
    assert inputs.device.usable == device.usable - 240 * 16 * MIB - OF_ACTOR["qwen3-235b-a22b/h100-16x8"] * device.group
    again = type(inputs).of(inputs.config, inputs.model, inputs.device)
    assert again.device == inputs.device


@pytest.mark.parametrize("name", ["ascend-910b-64g", "ascend-a3-64g"])
def test_on_npus_a_pair_takes_what_mrl_sets(name):
    """Each of a pair's communicators has two buffers of that many MB."""
    for environment in (get_hosting("npu").actor_environment(), get_hosting("npu").engine_environment(0, 1, 1, 1)):
        assert find_device(name).pair == 2 * int(environment["P2P_HCCL_BUFFSIZE"]) * MIB


# ---------------------------------------------------------------- process groups

NAMES = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model", "etp": "expert_tensor"}


def layout(ranks: int, **degrees: int) -> str:
    named = dict(tp=1, pp=1, cp=1, ep=1, etp=1) | degrees  # none is the actor's
    return json.dumps({"world_size": ranks} | {f"{NAMES[name]}_parallel_size": n for name, n in named.items()})


def groups(preset: str, *settings: str) -> int:
    config = load_config(ROOT / "parallel_configs" / f"{preset}.yaml", None, list(settings)).config
    model = planning_model_spec(config.model.path)[0]
    return process_groups(config, model, TrainLayout.build(config.actor.layout.model_dump(), model))


# Counted by hand from the groups of Megatron's that have several ranks
OF_ACTOR = {
    # tensor ranks, replicas, all ranks for the gradient's norm, and all processes, a group of torch's own
    "qwen2.5-3b/a2-1x8": 4,
    "qwen3-32b/a3-4x16": 5,  # and stages
    # replicas, all ranks, all processes, experts' all-to-all, the gather of their counts over experts and their tensor
    # ranks, and what routers counted, over tensor ranks and replicas: a group each
    "qwen3-30b-a3b/h100-1x8": 6,
    "qwen3-30b-a3b/h100-4x8": 7,  # and experts' replicas
    "qwen3-235b-a22b/h200-1x8-lora": 3,  # stages, all ranks and all processes: every expert is whole on its rank
    "qwen3-235b-a22b/h100-16x8": 9,  # all of them but context and cut experts
}


@pytest.mark.parametrize("preset", OF_ACTOR)
def test_an_actor_has_a_communicator_for_each_of_its_groups_of_several_ranks(preset):
    inputs = inputs_of(preset)
    device = find_device(inputs.device.name)
    assert device.group > 0 and groups(preset) == OF_ACTOR[preset]
    pairs = device.pair * most_pairs(inputs.config)
    assert device.usable - inputs.device.usable == OF_ACTOR[preset] * device.group + pairs
    assert device.usable_by_engine - inputs.device.usable_by_engine == pairs, "its ranks alone have them"


def test_tied_embeddings_have_a_group_of_the_first_stage_and_the_last():
    inputs = inputs_of("qwen2.5-3b/a2-1x8")
    assert inputs.model.tie_word_embeddings
    staged = TrainLayout.build(json.loads(layout(ranks=8, tp=2, pp=2)), inputs.model)
    untied = replace(inputs.model, tie_word_embeddings=False)
    assert actor_groups(staged, inputs.model) == actor_groups(staged, untied) + 1
    assert actor_groups(inputs.train, inputs.model) == actor_groups(inputs.train, untied)


@pytest.mark.parametrize(
    ("workers", "is_moe", "expected"),
    [
        (RolloutLayout(8, 1), True, 0),
        (RolloutLayout(2, 4), False, 1),
        (RolloutLayout(2, 4), True, 2),  # experts have a group though they are cut as all else
        (RolloutLayout(1, 2, 4, 8), True, 3),
        (RolloutLayout(1, 1, 8, 8), True, 2),
    ],
)
def test_an_engine_has_a_group_for_each_way_that_splits_it(workers, is_moe, expected):
    assert engine_groups(workers, is_moe) == expected


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_an_engines_context_and_communicators_are_outside_its_share(placement):
    preset = {"colocated": "qwen3-30b-a3b/h100-4x8", "separate": "qwen3-30b-a3b/h100-4x8-separate"}[placement]
    inputs = inputs_of(preset)
    device, buffers = inputs.device, engine_of(inputs).buffers
    outside = device.context + device.group * engine_groups(inputs.rollout, is_moe=True) + buffers
    phases = memory_section(inputs)["phases"]
    assert phases["rollout"]["terms"]["engine_outside"] == outside > device.context
    if placement == "colocated":
        assert phases["train"]["terms"]["engine_asleep"] == outside + GRAPHS


@pytest.mark.parametrize(("preset", "inside"), [("qwen3-30b-a3b/h100-4x8", True), ("qwen3-30b-a3b/a3-1x16", False)])
def test_graphs_come_from_an_engines_share_where_vllm_itself_counts_them(preset, inside):
    inputs = inputs_of(preset)
    share = round(inputs.device.memory * inputs.config.rollout.gpu_memory_utilization)
    eager = engine_of(replace(inputs, config=with_values(inputs.config, {"rollout.enforce_eager": True})))
    graphs = engine_of(inputs)
    assert eager.total == share
    assert eager.cache - graphs.cache == inside * GRAPHS
    terms = memory_section(inputs)["phases"]["rollout"]["terms"]
    held = sum(terms[name] for name in ("engine_weights", "engine_working_set", "kv_cache"))
    assert held == share + (not inside) * GRAPHS


TEACHER = ("distillation.enabled=true", "distillation.teacher_model.model_path=Qwen/Qwen3-235B-A22B")
DENSE_TEACHER = ("distillation.enabled=true", "distillation.teacher_model.model_path=Qwen/Qwen3-32B")
CRITIC = ("algorithm.adv_estimator=gae",)
OF_TEACHER, OF_CRITIC = "distillation.teacher_model.layout=", "critic.layout="
GROUPS = {  # beside the actor's
    (): 0,
    CRITIC: 0,  # in the actor's groups
    # experts' all-to-all, and the gather of their counts
    (*TEACHER, OF_TEACHER + layout(ranks=8, ep=8)): 2,
    (*TEACHER, OF_TEACHER + layout(ranks=8, tp=4, ep=8)): 3,  # the tensor ranks' too
    (*TEACHER, OF_TEACHER + layout(ranks=8, tp=2, pp=2, cp=2)): 3,  # experts are whole on each rank
    (*TEACHER, OF_TEACHER + layout(ranks=8, tp=2, etp=2, ep=2)): 4,  # experts are cut, and a third group has both cuts
    (*DENSE_TEACHER, OF_TEACHER + layout(ranks=8, tp=4, pp=2)): 2,
    (*DENSE_TEACHER, OF_TEACHER + layout(ranks=8)): 0,  # whole on each rank, and without gradients
    # and replicas, and all ranks for the gradient's norm
    (*CRITIC, OF_CRITIC + layout(ranks=8, tp=4, ep=8)): 5,
    (*CRITIC, OF_CRITIC + layout(ranks=8, tp=2, pp=2, ep=2)): 7,  # and experts' replicas
    (*TEACHER, OF_TEACHER + layout(ranks=8, ep=8), *CRITIC, OF_CRITIC + layout(ranks=8, tp=4, ep=8)): 7,
    (*TEACHER, OF_TEACHER + layout(ranks=8, tp=3)): 0,  # illegal, which is said elsewhere
}


@pytest.mark.parametrize("asked", GROUPS)
def test_a_model_beside_the_actor_has_its_groups_of_several_ranks(asked):
    preset = "qwen3-30b-a3b/h100-1x8"
    assert groups(preset, *asked) == OF_ACTOR[preset] + GROUPS[asked]


@pytest.mark.parametrize(
    ("preset", "device"), [("qwen3-30b-a3b/h100-1x8", "h100-80g"), ("qwen3-30b-a3b/a3-1x16", "ascend-a3-64g")]
)
def test_each_group_of_a_second_model_has_a_communicator_in_the_plan(preset, device):
    ranks = 16 if "16" in preset else 8
    own = (*TEACHER, OF_TEACHER + layout(ranks=ranks, tp=4, ep=8))
    plain, taught = inputs_of(preset), inputs_of(preset, *own)
    assert groups(preset, *own) == groups(preset) + 3 and find_device(device).group > 0
    more = 3 * find_device(device).group
    assert plain.device.usable - taught.device.usable == more
    assert plain.device.usable_by_engine == taught.device.usable_by_engine, "its ranks alone have them"


@pytest.mark.parametrize("name", ["ascend-910b-64g", "ascend-a3-64g"])
def test_on_npus_a_group_takes_what_the_shipped_environment_sets(name):
    shipped = yaml.safe_load((ROOT / "launch" / "runtime_env.npu.yaml").read_text())["env_vars"]
    assert find_device(name).group == 2 * int(shipped["HCCL_BUFFSIZE"]) * MIB
