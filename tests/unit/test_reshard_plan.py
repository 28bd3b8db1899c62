"""The plan as an object: stable, small, quick, near its bound, refused when it cannot be. Its worked example is what
the planner makes of it, and transports are checked before a run.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from machine import times_slower
from reshard_cases import MODELS, QWEN3_30B, QWEN3_235B, TRAIN_235B, Pair, bytes_of_a_worker, random_pairs
from seldom import seldom
from test_config_rules import TINY_MODEL

from mrl.config.load import load_config
from mrl.config.rules import notes, violations
from mrl.errors import ConfigError
from mrl.model.boxes import Box
from mrl.model.device_grid import DeviceId
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Piece, Shard
from mrl.model.vllm_parameters import TargetParameter, TargetPiece
from mrl.plan.devices import Starts, SyncRates
from mrl.plan.sync_times import Link, launch_seconds, reshard_summary
from mrl.reshard import faults, plan, streams
from mrl.reshard.faults import PlanFault
from mrl.reshard.messages import Copy, Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard
from mrl.reshard.schedule import level, make_schedule
from mrl.units import GIB, MIB

TP8, EP128 = RolloutLayout(16, 8), RolloutLayout(1, 4, 32, 128)


def pair_of(name: str = "qwen3_moe") -> Pair:
    degrees = {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    return Pair(
        MODELS[name], TrainLayout.build(degrees, MODELS[name]), RolloutLayout(2, 2), "cpu", "float32", None, 1 << 20
    )


@pytest.mark.parametrize("rollout", [TP8, EP128], ids=["tp8", "ep128"])
def test_qwen3_235b_on_128_ranks_is_planned_in_two_seconds_and_twenty_megabytes(rollout):
    needed = bytes_of_a_worker(QWEN3_235B, rollout)
    begun = time.process_time()
    plan = plan_reshard(QWEN3_235B, TRAIN_235B, rollout, dialect="cuda", dtype="bfloat16")
    seconds = time.process_time() - begun
    summary = reshard_summary(plan)
    assert seconds < 2 * times_slower()
    assert len(json.dumps(plan.to_json())) < 20e6
    assert plan.bytes_required == plan.bytes_moved == 128 * needed
    assert summary["received_bytes"] == [needed] * 128
    assert summary["seconds_of"]["wire"] <= 1.15 * summary["bound_seconds"]
    assert summary["bound_seconds"] >= needed / 46e9


@pytest.mark.parametrize(("tensor", "data"), seldom([(16, 1), (4, 2), (4, 4), (4, 8), (8, 2), (8, 4)], (4, 2), (8, 4)))
def test_qwen3_235b_is_near_its_bound_in_every_layout_of_the_table_of_bounds(tensor, data):
    """At 400 Gb/s; TP8 and TP4-DP32-EP128 above. With data parallelism inside an engine experts are spread."""
    workers = tensor * data
    rollout = RolloutLayout(128 // workers, tensor, data, workers if data > 1 else 1)
    summary = reshard_summary(plan_reshard(QWEN3_235B, TRAIN_235B, rollout, dialect="cuda", dtype="bfloat16"))
    assert bytes_of_a_worker(QWEN3_235B, rollout) / 46e9 <= summary["bound_seconds"]
    assert summary["seconds_of"]["wire"] <= 1.15 * summary["bound_seconds"]


def test_time_grows_no_faster_than_ranks_times_tensors():
    """Twice the ranks, twice the layers: at most four times the work (and half as much again for noise)."""

    def seconds(layers: int, ranks: int) -> float:
        model = replace(QWEN3_30B, num_layers=layers, moe_layers=tuple(range(layers)))
        degrees = {"world_size": ranks, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}
        train, begun = TrainLayout.build(degrees, model), time.process_time()
        plan_reshard(model, train, RolloutLayout(ranks // 2, 2), dialect="cuda", dtype="bfloat16")
        return time.process_time() - begun

    small = min(seconds(12, 16) for _ in range(2))
    assert seconds(24, 32) < 6 * small


@pytest.mark.parametrize(
    ("degrees", "rollout"),
    [
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8},
            RolloutLayout(8, 4),
        ),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8},
            RolloutLayout(1, 8, 4, 32),
        ),
        ({"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}, RolloutLayout(4, 4, 2, 8)),
    ],
)
def test_qwen3_30b_is_near_its_bound(degrees, rollout):
    train = TrainLayout.build(degrees | {"world_size": 32}, QWEN3_30B)
    summary = reshard_summary(plan_reshard(QWEN3_30B, train, rollout, dialect="npu", dtype="bfloat16"))
    assert summary["seconds_of"]["wire"] <= 1.15 * summary["bound_seconds"]


def test_what_is_on_the_device_or_the_node_is_taken_from_there():
    """Two nodes of two devices, a replica of everything on each: no byte leaves a node,
    and half of a worker's bytes its device.
    """
    model = MODELS["qwen3"]
    train = TrainLayout.build({"world_size": 4, "tensor_model_parallel_size": 2}, model)
    places = tuple(DeviceId(*divmod(device, 2)) for device in range(4))
    plan = plan_reshard(
        model, train, RolloutLayout(4, 1), dialect="cuda", dtype="bfloat16", topology=Topology(places, places)
    )
    device, node, remote = plan.loads.received.sum(axis=(1, 2)).tolist()
    assert remote == 0
    assert (plan.bytes_local, plan.bytes_moved) == (device, node)
    sources = {(m.worker, m.source) for worker in range(4) for m in plan.receives(worker)}
    assert sources == {(w, r) for w in range(4) for r in range(4) if w // 2 == r // 2}


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("qwen3", {"world_size": 4}),
        ("qwen3", {"world_size": 4, "context_parallel_size": 2}),
        ("qwen3_moe", {"world_size": 4, "context_parallel_size": 2}),
    ],
)
def test_replicas_share_the_work(name, degrees):
    """Data- and context-parallel replicas of everything, and one worker: each sends an equal share, up to a grain."""
    model = MODELS[name]
    train = TrainLayout.build(degrees, model)
    plan = plan_reshard(model, train, RolloutLayout(), dialect="cpu", dtype="float32", budget_bytes=4096)
    sent = plan.loads.sent.sum(axis=(0, 1))
    assert max(sent) - min(sent) <= plan.num_rounds * max(stream.largest for stream in plan.templates)
    assert (plan.loads.sent.sum(axis=0) > 0).all(), "all of them in every round"


@pytest.mark.parametrize("degrees", [{"world_size": 8}, {"world_size": 16, "tensor_model_parallel_size": 2}], ids=str)
def test_replicas_of_a_published_model_share_the_work(degrees):
    """Context, data and expert-data parallelism at once: nobody sends 5 % more than the mean."""
    degrees = degrees | {"context_parallel_size": 2, "expert_model_parallel_size": degrees["world_size"] // 4}
    train = TrainLayout.build(degrees, QWEN3_30B)
    sent = plan_reshard(QWEN3_30B, train, RolloutLayout(2, 2), dialect="cuda", dtype="bfloat16").loads.sent.sum(
        axis=(0, 1)
    )
    assert max(sent) <= 1.05 * sent.mean()


@pytest.mark.parametrize(
    ("loads", "more", "expected"),
    [
        ([[0, 0, 0]], [9], [[3, 3, 3]]),
        ([[5, 0, 1]], [3], [[0, 2, 1]]),
        ([[5, 0, 1]], [12], [[1, 6, 5]]),
        ([[4, 9]], [0], [[0, 0]]),
        ([[7]], [5], [[5]]),
    ],
)
def test_levelling_fills_the_least_loaded_first(loads, more, expected):
    assert level(np.array(loads), np.array(more)).tolist() == expected


def test_every_process_comes_to_the_same_hash():
    program = (
        "import sys; sys.path.insert(0, 'tests/unit')\n"
        "from reshard_cases import random_pairs\n"
        "print(*(pair.plan().hash for pair in random_pairs(7, 4)))\n"
    )
    here = " ".join(pair.plan().hash for pair in random_pairs(7, 4))
    root = Path(__file__).resolve().parents[2]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == here, done.stderr


def test_the_hash_covers_every_argument():
    pair = pair_of()
    places = tuple(DeviceId(0, device) for device in range(8))
    changed = [
        replace(pair, model=replace(pair.model, vocab_size=23)),
        replace(pair, train=replace(pair.train, chunk_layers=((1,), (3,)))),
        replace(pair, rollout=RolloutLayout(1, 2)),
        replace(pair, rollout=RolloutLayout(2, 2, 1, 2)),
        replace(pair, dialect="npu"),
        replace(pair, dtype="bfloat16"),
        replace(pair, budget=pair.budget // 2),
        replace(pair, topology=Topology(places[:4], places[4:])),
        replace(pair, topology=Topology(places[:4], places[:4])),
    ]
    hashes = [one.plan().hash for one in (pair, *changed)]
    assert len(set(hashes)) == len(hashes)
    assert pair.plan().hash == hashes[0]


def test_budget_below_a_row_is_refused():
    with pytest.raises(ConfigError, match=r"reshard\.budget_mb: a round of 16 bytes is too small"):
        replace(pair_of(), budget=16).plan()


def test_topology_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="places 4 ranks and 3 workers, the layouts have 4 and 4"):
        replace(pair_of(), topology=Topology((DeviceId(0, 0),) * 4, (DeviceId(0, 0),) * 3)).plan()


def test_number_format_that_nobody_moves_is_refused():
    with pytest.raises(ConfigError, match="float8"):
        replace(pair_of(), dtype="float8").plan()


def test_summary_predicts_each_round_by_its_busiest_device_and_each_step_by_its_busiest_process():
    """One rank, one worker, one round of 1 MiB budget: all bytes over the slowest link at its rate;
    staging is that round.
    """
    model = MODELS["qwen3"]
    train = TrainLayout.build({"world_size": 1}, model)
    plan = plan_reshard(model, train, RolloutLayout(), dialect="cpu", dtype="float32", budget_bytes=MIB)
    rates = SyncRates(digest=500.0, finalise=250.0, read_back=125.0)
    summary = reshard_summary(plan, Link(between_nodes=1000.0), rates, 0.5, Starts(copy=2.0, wait=3.0))
    assert summary["rounds"] == 1
    assert summary["seconds_of"]["wire"] == summary["bound_seconds"] == pytest.approx(plan.bytes_moved / 1000)
    assert summary["predicted_seconds"] == pytest.approx(
        plan.bytes_moved / 1000 * (1 + 2 + 4 + 8) + 2 * summary["copies"] + 3 * summary["messages"]
    )
    assert summary["peak_staging_bytes"] == plan.bytes_moved == summary["sent_bytes"][0]
    assert summary["plan_seconds"] == 0.5
    assert summary.keys() >= {
        "bytes_required",
        "bytes_moved",
        "peak_staging_bytes",
        "rounds",
        "predicted_seconds",
        "bound_seconds",
        "hash",
    }


def test_a_rank_that_sends_more_than_a_worker_receives_digests_it_all():
    """One rank and four engines; it sends to each what each receives, but for the one on its device."""
    model = MODELS["qwen3"]
    plan = plan_reshard(
        model, TrainLayout.build({"world_size": 1}, model), RolloutLayout(4), dialect="cpu", dtype="float32"
    )
    summary = reshard_summary(plan, Link(), SyncRates(digest=500.0, finalise=250.0, read_back=125.0))
    assert summary["sent_bytes"][0] > max(summary["received_bytes"])
    assert summary["seconds_of"]["digest"] == pytest.approx(summary["sent_bytes"][0] / 500.0)
    assert summary["seconds_of"]["finalise"] == pytest.approx(max(summary["received_bytes"]) / 250.0)


def test_bytes_that_no_round_brings_are_a_fault_of_the_plan(monkeypatch):
    def without_a_round(*given):
        rounds, loads = make_schedule(*given)
        received = loads.received.copy()
        received[:, 0] = 0
        return rounds, replace(loads, received=received)

    model = MODELS["qwen3"]
    given = (model, TrainLayout.build({"world_size": 2}, model), RolloutLayout(1))
    plan_reshard(*given, dialect="cpu", dtype="float32", budget_bytes=MIB)
    monkeypatch.setattr("mrl.reshard.plan.make_schedule", without_a_round)
    with pytest.raises(PlanFault, match=r"rounds bring \d+ of \d+ bytes"):
        plan_reshard(*given, dialect="cpu", dtype="float32", budget_bytes=MIB)


# Of a layer: tensors of experts that a worker has, copies that bring them, and copies of everything else. A copy has at
# most 4 MiB, in whole rows: of 235B w1 and w3 of a whole expert (12 MiB) are three each, and w2, whose rows divide
# worse, is four.
LAUNCHES = {
    "30B, TP4": (QWEN3_30B, 4, RolloutLayout(1, 4), (128 * 3, 128 * 3, 9), 18432),
    "235B, TP8": (QWEN3_235B, 8, RolloutLayout(1, 8), (128 * 3, 128 * 3, 11), 36096),
    "235B, EP16": (QWEN3_235B, 16, RolloutLayout(1, 4, 4, 16), (8 * 3, 8 * (3 + 3 + 4), 15), 2256),
}


@pytest.mark.parametrize(("model", "ranks", "rollout", "of_a_layer", "tensors"), LAUNCHES.values(), ids=LAUNCHES)
def test_launches_of_a_sync_are_its_workers_copies_and_a_wait_a_message(model, ranks, rollout, of_a_layer, tensors):
    """One round, so that no border of a round cuts a block; one layer more has so many copies more."""
    held, of_experts, others = of_a_layer
    assert held * model.num_layers == tensors
    plans = []
    for layers in (1, 2):
        small = replace(model, num_layers=layers, moe_layers=tuple(range(layers)))
        train = TrainLayout.build({"world_size": ranks, "expert_model_parallel_size": 4}, small)
        plans.append(plan_reshard(small, train, rollout, dialect="cuda", dtype="bfloat16", budget_bytes=64 * GIB))
    one, two = plans
    blocks = [copy for message in one.receives(0) for copy in message.copies if "experts" in copy.parameter]
    assert (len({copy.hf_name for copy in blocks}), len(blocks)) == (held, of_experts)
    more = launch_seconds(two, Starts(copy=1.0, wait=0.0)) - launch_seconds(one, Starts(copy=1.0, wait=0.0))
    assert more == of_experts + others
    waits = launch_seconds(one, Starts(copy=0.0, wait=1.0))
    numbers = {int(copy.hf_name.partition(".experts.")[2].partition(".")[0]) for copy in blocks}
    assert waits == len({number // 32 for number in numbers})  # each of the four ranks with 32 experts sends one


# ---------------------------------------------------------------- the worked example at the head of mrl/reshard/plan.py


RANKS, WORKERS, ROWS, COLUMNS = 2, 3, 4, 6
NAME = "model.layers.0.mlp.down_proj.weight"
BOXES = "abcd"


def columns_of(number: int, parts: int) -> tuple[Box, Box]:
    """An equal share of the weight's columns: in the tensor, and as a parameter of its own."""
    width = COLUMNS // parts
    return Box(((0, ROWS), (number * width, (number + 1) * width))), Box.whole((ROWS, width))


@pytest.fixture
def planned(monkeypatch):
    """The planner, for a model that is this one weight: a maker of plans by their budget."""

    def sent_shards(model, layout, rank, fp8_block):
        hf_box, local_box = columns_of(rank, RANKS)
        return (
            Shard(
                "decoder.layers.0.mlp.linear_fc2.weight",
                0,
                local_box.shape,
                (Piece(NAME, hf_box, local_box),),
                False,
                (rank,),
            ),
        )

    def target_parameters(model, rollout, worker, dialect, dtype, *_):
        hf_box, local_box = columns_of(worker, WORKERS)
        return (
            TargetParameter(
                NAME, NAME.rpartition(".")[0], local_box.shape, dtype, (TargetPiece(NAME, hf_box, local_box, (0, 1)),)
            ),
        )

    monkeypatch.setattr(streams, "sent_shards", sent_shards)
    for module in (streams, faults):
        monkeypatch.setattr(module, "target_parameters", target_parameters)
    model = replace(MODELS["qwen3"], num_layers=1)
    train = TrainLayout.build({"world_size": RANKS, "tensor_model_parallel_size": RANKS}, model)
    return lambda budget: plan_reshard(
        model, train, RolloutLayout(1, WORKERS), dialect="cpu", dtype="bfloat16", budget_bytes=budget
    )


def boxes_of(whole: ReshardPlan) -> dict[str, tuple[int, int, Copy]]:
    """Letter -> (rank, worker, copy) of a plan that cuts no box."""
    boxes = [(m.source, w, copy) for w in range(WORKERS) for m in whole.receives(w) for copy in m.copies]
    return dict(zip(BOXES, sorted(boxes, key=lambda box: box[2].hf_box.origin[1]), strict=True))


def test_the_boxes_are_those_of_the_picture(planned):
    held, needed = np.full((ROWS, COLUMNS), "?"), np.full((ROWS, COLUMNS), "?")
    for letter, (rank, worker, copy) in boxes_of(planned(1 << 20)).items():
        held[:, columns_of(rank, RANKS)[0].slices[1]][copy.source_box.slices] = letter
        needed[:, columns_of(worker, WORKERS)[0].slices[1]][copy.target_box.slices] = letter
    for row in range(ROWS):
        ranks = "     ".join(" ".join(part) for part in np.split(held[row], RANKS))
        workers = "       ".join(" ".join(part) for part in np.split(needed[row], WORKERS))
        assert f"    row {row}    {ranks}         {workers}\n" in plan.__doc__


def test_the_copies_are_those_of_the_table(planned):
    for letter, (rank, worker, copy) in boxes_of(planned(1 << 20)).items():
        hf, source, target = (
            f"[{', '.join(f'{start}:{stop}' for start, stop in box.ranges)}]"
            for box in (copy.hf_box, copy.source_box, copy.target_box)
        )
        assert f"    {letter}  {hf}  from rank {rank} {source}  to worker {worker} {target}\n" in plan.__doc__


def test_rounds_and_messages_are_those_of_the_table(planned):
    whole, small = boxes_of(planned(1 << 20)), planned(16)
    lines = []
    for message in sorted(
        (m for w in range(WORKERS) for m in small.receives(w)), key=lambda m: (m.round, m.source, m.worker)
    ):
        letters = [
            next(name for name, box in whole.items() if box[2].hf_box.contains(copy.hf_box)) for copy in message.copies
        ]
        grains = [
            f"{name}[{copy.hf_box.ranges[0][0]}:{copy.hf_box.ranges[0][1]}]"
            for name, copy in zip(letters, message.copies, strict=True)
        ]
        who = f"round {message.round}  rank {message.source} -> worker {message.worker}"
        lines.append(f"    {who}  {message.nbytes} bytes  {' '.join(grains)}\n")
    assert "".join(lines) in plan.__doc__
    assert plan.__doc__.count("    round ") == len(lines)


# ---------------------------------------------------------------- rules


TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"


def resolved(*overrides: str):
    return load_config(TINY, None, overrides)


def test_a_transport_of_one_host_is_refused_on_two():
    (found,) = [
        v for v in violations(resolved("reshard.transport=shm", "cluster.nnodes=2"), TINY_MODEL) if "reshard" in v.field
    ]
    assert (found.field, found.allowed) == ("reshard.transport", ("auto", "p2p", "ipc"))


@pytest.mark.parametrize("kind", ["auto", "p2p", "ipc"])
def test_other_transports_reach_every_host(kind):
    assert not [
        v
        for v in violations(resolved(f"reshard.transport={kind}", "cluster.nnodes=2"), TINY_MODEL)
        if "reshard" in v.field
    ]


def test_device_ipc_without_such_a_device_is_said():
    assert [n for n in notes(resolved("reshard.transport=ipc"), TINY_MODEL) if "go through shared memory" in n]
    assert not [n for n in notes(resolved("reshard.transport=shm"), TINY_MODEL) if "reshard" in n]
