"""Workers stand where most of what they need lies already: hand-worked orders,
and the best of all orders of small layouts.
"""

import random
from dataclasses import replace
from itertools import permutations

import pytest
from reshard_cases import QWEN3_30B

from mrl.config.deployment import Deployment, rank_devices
from mrl.config.load import load_config
from mrl.errors import ConfigError
from mrl.model.device_grid import ClusterShape, DeviceId, actor_devices, best_assignment, engine_devices, near_devices
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.reshard.messages import Topology
from mrl.reshard.plan import plan_reshard

# experts are nearly all of it, as of the deep one; with its whole vocabulary a shallow one would be mostly that
SHALLOW = replace(
    QWEN3_30B, num_layers=2, moe_layers=(0, 1), vocab_size=1024, num_experts=16, hidden_size=256,
    moe_intermediate_size=384, num_attention_heads=8, head_dim=32,
)  # fmt: skip
TP, PP, EP, ETP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
)


def devices_of(degrees: dict, rollout: RolloutLayout, per_node: int, model=QWEN3_30B, **how):
    """(layout, places of ranks, places of workers)."""
    train = TrainLayout.build(degrees, model)
    cluster = ClusterShape(train.world_size // per_node, per_node)
    ranks = actor_devices(train.world_size, cluster)
    return train, ranks, near_devices(train, rollout, ranks, engine_devices(rollout, cluster), **how)


def devices(places: tuple[DeviceId, ...]) -> list[int]:
    return [place.device for place in places]


def test_quarters_stand_where_their_halves_are():
    *_, workers = devices_of({"world_size": 8, TP: 2, EP: 8}, RolloutLayout(2, 4), 8)
    assert devices(workers) == [0, 2, 1, 3, 4, 6, 5, 7]


def test_spread_experts_stand_where_their_owners_are():
    """Eighths of the experts, and two ranks that hold each quarter:
    workers 2e and 2e + 1 belong to ranks e and e + 4.
    """
    *_, workers = devices_of({"world_size": 8, EP: 4}, RolloutLayout(1, 2, 4, 8), 8)
    assert [device % 4 for device in devices(workers)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_on_ascend_a_process_sees_its_devices_in_ascending_order_and_data_parallel_ranks_move_as_a_whole():
    """Pairs of devices hold experts of quarter 0 and 1, 2 and 3, and again;
    data-parallel rank d needs those of quarter d.
    """
    *_, workers = devices_of({"world_size": 8, EP: 4}, RolloutLayout(1, 2, 4, 8), 8, ascending=True)
    pairs = [devices(workers)[first : first + 2] for first in range(0, 8, 2)]
    assert sorted(pairs) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [pair[0] // 2 % 2 for pair in pairs] == [0, 0, 1, 1]
    *_, workers = devices_of({"world_size": 8, TP: 2, EP: 8}, RolloutLayout(2, 4), 8, ascending=True)
    assert devices(workers) == list(range(8))


def test_the_usual_order_stays_where_another_gains_nothing():
    for degrees, rollout in [
        ({"world_size": 8, TP: 4, EP: 8}, RolloutLayout(2, 4)),
        ({"world_size": 8}, RolloutLayout(4, 2)),
    ]:
        *_, workers = devices_of(degrees, rollout, 8)
        assert devices(workers) == list(range(8))


@pytest.mark.parametrize(
    ("degrees", "rollout"),
    [
        ({"world_size": 4, TP: 2, EP: 4}, RolloutLayout(1, 4)),
        ({"world_size": 4, TP: 2, EP: 2}, RolloutLayout(1, 2, 2, 4)),
        ({"world_size": 4, EP: 2}, RolloutLayout(1, 2, 2, 4)),
        ({"world_size": 4, TP: 2, PP: 2, EP: 2}, RolloutLayout(1, 4)),
        ({"world_size": 4, TP: 2, ETP: 2, EP: 2}, RolloutLayout(1, 2, 2, 1)),
        ({"world_size": 4, TP: 4, EP: 2}, RolloutLayout(2, 2)),
    ],
    ids=str,
)
def test_no_other_order_has_more_bytes_at_hand(degrees, rollout):
    """Of all orders of the workers of each engine over its devices."""
    model = SHALLOW
    train, ranks, workers = devices_of(degrees, rollout, 4, model)

    def local(order: tuple[DeviceId, ...]) -> int:
        topology = Topology(ranks, order)
        return plan_reshard(model, train, rollout, dialect="cuda", dtype="bfloat16", topology=topology).bytes_local

    size = rollout.workers_per_engine
    engines = [workers[first : first + size] for first in range(0, len(workers), size)]
    others = max(local((*order, *(p for engine in engines[1:] for p in engine))) for order in permutations(engines[0]))
    assert local(workers) == others


def test_no_pair_of_layouts_is_worse_for_it():
    """On nodes of any size: never fewer bytes at hand than in the usual order, and as many on the node."""
    rng, looked_at, model = random.Random(1), 0, SHALLOW
    while looked_at < 15:
        degrees = {
            "world_size": 8,
            TP: rng.choice([1, 2]),
            PP: rng.choice([1, 2]),
            EP: rng.choice([1, 2, 4]),
            ETP: rng.choice([1, 2]),
        }
        tensor, data = rng.choice([(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
        rollout = RolloutLayout(8 // tensor // data, tensor, data, rng.choice([1, tensor * data]))
        per_node = rng.choice([4, 8])
        try:
            train, ranks, workers = devices_of(degrees, rollout, per_node, model)
            usual = Topology(ranks, engine_devices(rollout, ClusterShape(8 // per_node, per_node)))
            before, after = (
                plan_reshard(model, train, rollout, dialect="cuda", dtype="bfloat16", topology=topology)
                for topology in (usual, Topology(ranks, workers))
            )
        except ConfigError:
            continue
        looked_at += 1
        assert sorted(workers) == sorted(usual.workers)
        assert after.bytes_remote == before.bytes_remote
        assert after.bytes_local >= before.bytes_local


def test_assignments_are_the_best_of_all():
    rng = random.Random(0)
    for size in (1, 2, 3, 5):
        for _ in range(20):
            gains = [[rng.randrange(8) for _ in range(size)] for _ in range(size)]
            best = max(
                sum(row[at] for row, at in zip(gains, order, strict=True)) for order in permutations(range(size))
            )
            columns = best_assignment(gains)
            assert sorted(columns) == list(range(size))
            assert sum(row[at] for row, at in zip(gains, columns, strict=True)) == best


def test_separate_engines_stand_as_they_did(tmp_path):
    preset = "parallel_configs/qwen3-30b-a3b/h100-4x8-separate.yaml"
    config = load_config(preset).config
    ranks, workers = rank_devices(Deployment.of(config))
    assert list(workers) == sorted(workers) and not set(ranks) & set(workers)
