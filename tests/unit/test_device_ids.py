"""Where engines and ranks go, and what vLLM is told: for hand-worked clusters and for every preset that ships."""

import json
from pathlib import Path

import pytest

from mrl.cluster.prerequisites import device_bundles, engine_bundles, needed_resources, shared_devices
from mrl.config.deployment import Deployment, rank_devices, rollout_layout
from mrl.config.load import load_config
from mrl.config.override_rules import upstream_class
from mrl.engine import requests
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import known_spec
from mrl.model.device_grid import ClusterShape, DeviceId, actor_devices, bundles_of_devices, engine_devices, rank_order
from mrl.model.layout import RolloutLayout
from mrl.platforms.hosting import cpu_binding, get_hosting

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "parallel_configs").glob("*/*.yaml"))
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"


def configured(**values):
    """The tiny preset with `values` set; keys have __ for dots.

    Only the shape of its cluster and engines matters here.
    """
    keys = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    return load_config(TINY, None, keys).config


def test_ranks_fill_nodes_in_order():
    assert actor_devices(5, ClusterShape(2, 4)) == (
        DeviceId(0, 0),
        DeviceId(0, 1),
        DeviceId(0, 2),
        DeviceId(0, 3),
        DeviceId(1, 0),
    )


def test_an_engine_that_fits_a_node_never_straddles_two():
    # 3 actor devices leave one on node 0; an engine of 2 starts on node 1 and device 3 of node 0 stays idle
    places = engine_devices(RolloutLayout(2, tensor=2), ClusterShape(2, 4), first=3)
    assert places == (DeviceId(1, 0), DeviceId(1, 1), DeviceId(1, 2), DeviceId(1, 3))


def test_a_data_parallel_rank_of_a_wide_engine_stays_on_its_node():
    # TP4 x DP4 = 16 workers on nodes of 8: two data-parallel ranks a node
    places = engine_devices(RolloutLayout(1, tensor=4, data=4, expert=16), ClusterShape(2, 8))
    assert [p.node for p in places] == [0] * 8 + [1] * 8
    assert [p.device for p in places] == [*range(8), *range(8)]


@pytest.mark.parametrize(
    ("layout", "cluster", "first", "said"),
    [
        (RolloutLayout(3, tensor=2), ClusterShape(1, 4), 0, "only 4 of 6 workers"),
        (RolloutLayout(1, tensor=16), ClusterShape(2, 8), 0, "tensor workers need one node"),
        # nine devices are free for eight workers: three on node 0, where no engine fits, and six on node 1, where one
        # does
        (
            RolloutLayout(2, tensor=4),
            ClusterShape(2, 6),
            3,
            "only 4 of 8 workers .* where 4 have to share a node",
        ),
    ],
)
def test_engines_that_fit_nowhere_are_refused(layout, cluster, first, said):
    with pytest.raises(ConfigError, match=said):
        engine_devices(layout, cluster, first)


def test_an_actor_larger_than_the_cluster_is_refused():
    with pytest.raises(ConfigError, match="world_size = 9"):
        actor_devices(9, ClusterShape(1, 8))


def test_ranks_of_a_tensor_group_share_a_node_wherever_bundles_fell():
    # node a got 3 bundles, node b 5: two ranks together fit once on a and twice on b, and only the last pair is spread
    nodes = ["a", "b", "a", "b", "b", "a", "b", "b"]
    order = rank_order(nodes, together=2)
    assert order == (0, 2, 1, 3, 4, 6, 5, 7)
    assert [{nodes[i] for i in order[n : n + 2]} for n in range(0, 8, 2)] == [{"a"}, {"b"}, {"b"}, {"a", "b"}]
    assert rank_order(nodes) == (0, 2, 5, 1, 3, 4, 6, 7)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_preset_has_a_place_for_each_rank_and_worker(path):
    config = load_config(path).config
    layout, (ranks, workers) = rollout_layout(config.rollout), rank_devices(Deployment.of(config))
    per_node, nodes = config.cluster.n_gpus_per_node, config.cluster.nnodes
    assert (
        len(ranks) == config.actor.layout.world_size
        and len(workers) == layout.num_engines * layout.tensor * layout.data
    )
    assert len(set(ranks)) == len(ranks) and len(set(workers)) == len(workers), "two share a device"
    assert all(0 <= p.node < nodes and 0 <= p.device < per_node for p in (*ranks, *workers))
    if config.cluster.placement == "separate":
        assert not set(ranks) & set(workers)
    for first in range(0, len(workers), layout.tensor):
        assert len({p.node for p in workers[first : first + layout.tensor]}) == 1, "a tensor group is spread over nodes"


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_preset_starts_engines_with_arguments_vllm_has(path):
    config = load_config(path).config
    arguments = requests.engine_settings(config, known_spec("Qwen3-30B-A3B"), 0, Path("logs")).arguments
    assert set(arguments) <= upstream_class("AsyncEngineArgs", config.cluster.device).fields
    assert arguments["tensor_parallel_size"] == config.rollout.tensor_model_parallel_size
    assert arguments["enable_expert_parallel"] == (config.rollout.expert_parallel_size > 1)


def test_engines_read_other_positions_under_every_name_that_the_checkpoint_has(tmp_path):
    """vLLM takes the smallest of them."""
    stored = {"max_position_embeddings": 128, "model_max_length": 512, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = configured(model__path=tmp_path, model__max_position_embeddings=1024)
    arguments = requests.engine_settings(config, known_spec("Qwen3-30B-A3B"), 0, Path("logs")).arguments
    assert arguments["hf_overrides"] == {"max_position_embeddings": 1024, "model_max_length": 1024}


def test_an_engine_on_one_node_is_one_actor_with_all_its_devices():
    config = configured(
        cluster__device="cuda",
        cluster__n_gpus_per_node=10,
        rollout__num_engines=2,
        rollout__tensor_model_parallel_size=4,
    )
    settings = requests.engine_settings(config, known_spec("Qwen3-30B-A3B"), 1, Path("logs"))
    assert settings.arguments["distributed_executor_backend"] == "mp" and settings.workers == 4
    assert [place.device for place in rank_devices(Deployment.of(config))[1]] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert [bundle["GPU"] for bundle in engine_bundles(Deployment.of(config))] == [4.0, 4.0]


def test_each_data_parallel_rank_of_an_engine_is_an_actor_with_its_devices():
    config = configured(
        cluster__device="cuda", cluster__n_gpus_per_node=10, cluster__cpus_per_engine=3,
        rollout__tensor_model_parallel_size=2,
        rollout__data_parallel_size=4,
        rollout__expert_parallel_size=8,
    )  # fmt: skip
    bundle = {"CPU": 0.75, "GPU": 2.0}
    assert engine_bundles(Deployment.of(config)) == [bundle] * 4
    settings = [
        requests.engine_settings(config, known_spec("Qwen3-30B-A3B"), 0, Path("logs"), rank) for rank in range(4)
    ]
    assert [s.name for s in settings] == [f"engine 0 rank {rank}" for rank in range(4)]
    assert [(s.workers, list(s.positions)) for s in settings] == [(2, [2 * rank, 2 * rank + 1]) for rank in range(4)]
    assert [s.arguments["data_parallel_rank"] for s in settings] == [0, 1, 2, 3]
    assert all(s.arguments["data_parallel_size"] == 4 and s.arguments["enable_expert_parallel"] for s in settings)
    assert len({s.segments_file for s in settings}) == 4
    config = configured(rollout__tensor_model_parallel_size=2)
    alone = requests.engine_settings(config, known_spec("Qwen3-30B-A3B"), 0, Path("logs"))
    assert alone.name == "engine 0" and "data_parallel_rank" not in alone.arguments and list(alone.positions) == [0, 1]


def test_cpu_workers_get_equal_shares_of_the_cores():
    assert cpu_binding([0, 1, 2, 3], engine_id=1, engines=2, workers=2) == "2|3"
    assert cpu_binding(list(range(4, 12)), engine_id=0, engines=1, workers=2) == "4,5,6|8,9,10"  # a core each is free
    assert cpu_binding([4, 5], engine_id=0, engines=1, workers=1) == "4"
    assert cpu_binding([0], engine_id=1, engines=2, workers=1) == "0"  # more workers than cores: they share


def test_ray_reserves_what_each_process_of_an_engine_needs():
    config = configured(
        cluster__device="npu", cluster__nnodes=2, cluster__n_gpus_per_node=4, cluster__cpus_per_engine=3,
        rollout__num_engines=3,
        rollout__tensor_model_parallel_size=2,
    )  # fmt: skip
    assert engine_bundles(Deployment.of(config)) == [{"CPU": 3.0, "NPU": 2.0}] * 3
    assert needed_resources(Deployment.of(config)) == {"CPU": 2 * 0.5 + 3 * 3, "NPU": 2.0 + 3 * 2}


def test_an_actor_asks_ray_for_the_devices_of_its_bundle():
    from mrl.cluster.ray_cluster import Reservation  # brings Ray

    reserved = Reservation(group=None, bundles=({"CPU": 1.0, "NPU": 2.0}, {"CPU": 1.0, "GPU": 4.0}), order=(1, 0))
    gpu, npu = reserved.options(0), reserved.options(1)
    assert (gpu["num_gpus"], gpu["resources"], gpu["scheduling_strategy"].placement_group_bundle_index) == (4.0, {}, 1)
    assert (npu["num_gpus"], npu["resources"], npu["scheduling_strategy"].placement_group_bundle_index) == (
        0,
        {"NPU": 2.0},
        0,
    )


# --- colocated: ranks and workers on the same devices -----------------------------------------------------------------


def test_devices_of_a_planned_node_lie_on_one_real_node_wherever_bundles_fell():
    places = [DeviceId(node, device) for node in range(2) for device in range(2)]
    bundles = bundles_of_devices(places, ["b", "a", "b", "a"])
    assert bundles == (1, 3, 0, 2)  # node 0 of the plan is real node a
    # a node of four devices holds two planned nodes of two
    assert sorted(bundles_of_devices(places, ["a"] * 4)) == [0, 1, 2, 3]
    # a planned node of two and one of three: the smaller real node is left for the smaller planned one
    uneven = [DeviceId(0, 0), DeviceId(0, 1), DeviceId(1, 0), DeviceId(1, 1), DeviceId(1, 2)]
    assert bundles_of_devices(uneven, ["a", "a", "a", "b", "b"]) == (3, 4, 0, 1, 2)


def test_nodes_of_different_sizes_are_refused_with_both_portions():
    places = [DeviceId(node, device) for node in range(2) for device in range(4)]
    with pytest.raises(EnvironmentFault, match=r"portions of 4 \+ 4, a node each, and Ray has them as 5 \+ 3"):
        bundles_of_devices(places, ["a"] * 5 + ["b"] * 3)


COLOCATED = dict(
    cluster__placement="colocated",
    cluster__n_gpus_per_node=2,
    rollout__tensor_model_parallel_size=2,
    cluster__cpus_per_engine=3,
)


@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_a_device_is_reserved_once_for_rank_and_worker_and_cpus_are_those_of_both(device):
    config = configured(cluster__device=device, **COLOCATED)
    resource = {"cuda": {"GPU": 1.0}, "npu": {"NPU": 1.0}, "cpu": {}}[device]
    # two ranks of 0.5 and one engine of 3, over two devices
    assert device_bundles(Deployment.of(config)) == [{"CPU": 2.0, **resource}] * 2
    assert needed_resources(Deployment.of(config)) == {"CPU": 4.0, **dict.fromkeys(resource, 2.0)}
    assert needed_resources(Deployment.of(config), actor=False)["CPU"] == 3.0  # mrl eval has engines alone


def test_a_process_is_shown_its_devices_in_order_and_ray_leaves_them_alone():
    assert get_hosting("cuda").visible_devices(["3", "1"]) == {
        "CUDA_VISIBLE_DEVICES": "3,1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }  # fmt: skip
    assert get_hosting("npu").visible_devices(["7"])["ASCEND_RT_VISIBLE_DEVICES"] == "7"
    assert get_hosting("cpu").visible_devices([""]) == {}


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_in_every_colocated_preset_each_device_has_a_rank_and_a_worker(path):
    config = load_config(path).config
    if config.cluster.placement == "colocated":
        ranks, workers = rank_devices(Deployment.of(config))
        assert sorted(ranks) == sorted(workers) == list(shared_devices(Deployment.of(config)))
