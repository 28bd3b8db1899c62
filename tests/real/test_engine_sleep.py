"""A real engine sleeps, wakes and is synced: the same bits as before, memory given away, and nothing sampled from what
is nobody's.

One start at TP2, and one at TP1 among the long tests, go through everything in turn (engine_sleep.walk); the tests look
at what came of it.
"""

import os
from pathlib import Path

import pytest
import torch
from engine_driver import run_engine
from test_engine_slices import ONE_RANK, checkpoints, setup_of
from tiny_models import save, tiny_glm, tiny_moe, wide_moe, with_head

from mrl.config.schema_run import ReshardConfig
from mrl.model import load_model_spec, tensor_specs, with_predicting
from mrl.platforms.hosting import get_hosting
from mrl.units import KIB, MIB


def start(
    folder: Path,
    what: str,
    model: Path,
    other: Path,
    tensor: int,
    limit_s: float = 400,
    budget_bytes: int = 64 * KIB,
    speculation: dict | None = None,
    **more,
) -> dict:
    """What came of one engine's job. `budget_bytes`: of a round; as it is, a tiny model takes many."""
    spec = load_model_spec(model)
    arguments = {
        "model": str(model), "dtype": "float32", "tensor_parallel_size": tensor, "max_model_len": 64,
        "max_num_seqs": 16, "seed": 0,
        "skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "distributed_executor_backend": "mp", **get_hosting("cpu").engine_arguments(64, 1024),
    }  # fmt: skip
    setup = setup_of(model, "float32", ONE_RANK, tensor, 1) | {"transport": {"kind": "shm", "name": "none"}}
    setup["budget_bytes"] = budget_bytes
    if speculation is not None:
        arguments["speculative_config"] = speculation
        setup["hf_config"] = with_predicting(setup["hf_config"], True)
    job = {
        "what": what, "model": str(model), "other": str(other), "arguments": arguments, "vocab_size": spec.vocab_size,
        "expected": [[t.name, t.shape] for t in tensor_specs(spec)], "setup": setup, **more,
    }  # fmt: skip
    return run_engine("engine_sleep.py", folder, job, tensor, limit_s)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2], ids=["TP1", "TP2"])
def walked(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("sleep")
    model, other = checkpoints(folder, tiny_moe(), torch.float32)
    return start(folder, "walk", model, other, request.param) | {"tensor": request.param}


def test_after_sleep_and_sync_an_engine_holds_and_says_the_bits_of_before(walked):
    start, other, model, other_slowly, model_slowly = walked["prints"][:5]
    assert other != start and len(start) > 30 * walked["tensor"]
    assert other == other_slowly and model == model_slowly
    assert {k: v for k, v in model.items() if v != start[k]} == {}
    answers = walked["answers"]
    assert answers[1] != answers[0] and answers[1] == answers[3] and answers[0] == answers[2] == answers[4]


def test_memory_leaves_with_the_sleep_and_comes_back_in_two_parts(walked):
    for cycle in walked["memory"]:
        for awake, asleep, weights, cache in zip(
            walked["awake"], cycle["asleep"], cycle["weights"], cycle["cache"], strict=True
        ):
            assert asleep["live_bytes"] < 0.05 * awake["live_bytes"]
            assert asleep["live_bytes"] < weights["live_bytes"] < 0.05 * awake["live_bytes"] + 8 * MIB
            assert abs(cache["live_bytes"] - awake["live_bytes"]) < MIB
            # a fresh engine's cache has pages that nobody has touched
            left = cache["resident_bytes"] - asleep["resident_bytes"]
            assert left > 0.9 * (cache["live_bytes"] - asleep["live_bytes"])


def test_the_ledger_misses_nothing_that_the_collector_would_find(walked):
    for counted, awake in zip(walked["counted"], walked["awake"], strict=True):
        assert abs(counted["all"] + counted["packed"] - awake["live_bytes"]) < 64 * 1024
        assert counted["packed"] > 0


def test_a_sleeping_worker_refuses_updates_by_name_and_the_engine_before_it(walked):
    assert all("engine 0 is ASLEEP and refuses" in said for said in walked["asleep_refuses"])
    assert "start_weight_update: this worker's weights are asleep; first wake_weights" in walked["worker_refuses"]


def test_woken_without_a_sync_every_form_that_a_kernel_reads_is_nan_and_the_cache_zero(walked):
    for worker in walked["nan"]:
        assert len(worker) > 20 and any(name.endswith("<packed>") for name in worker)
        assert [name for name, is_nan in worker.items() if not is_nan] == []
    assert all(walked["cache_is_zero"])


def test_a_forgotten_sync_is_refused_and_forced_past_the_fence_shows_as_nan_in_every_answer(walked):
    generate, commit = walked["forgotten"]
    assert "engine 0 is FENCED and refuses generate" in generate and "no whole update has reached it" in commit
    assert len(walked["forced"]) == 12 and all(probs and set(probs) == {"nan"} for _, probs in walked["forced"])


def test_after_such_answers_the_next_sleep_and_sync_makes_everything_right(walked):
    assert walked["answers"][5] == walked["answers"][0] and walked["prints"][5] == walked["prints"][0]


def test_transports_can_be_connected_again_while_there_are_no_weights_to_read_back(walked):
    assert walked["connected_asleep"] == ""


def test_requests_in_flight_are_aborted_by_a_sleep_and_reported(walked):
    assert walked["aborted"] == 12 and "put to sleep while it generated" in walked["told"]


def test_requests_in_flight_and_new_ones_outlast_a_pause_bit_for_bit(walked):
    assert walked["done_in_pause"] == [False, False]
    assert walked["answers"][6] == walked["answers"][0] and walked["answers"][7] == walked["answers"][0]


@pytest.mark.long
def test_a_model_that_drafts_sleeps_and_is_synced_with_the_other(tmp_path):
    """Without a sync all that drafts is NaN, too; with one it holds and says the bits of before."""
    model, other = (with_head(folder) for folder in checkpoints(tmp_path, tiny_glm(), torch.float32))
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    found = start(tmp_path, "drafting", model, other, 1, speculation=speculation)
    before, there, back = found["prints"]
    assert back == before and found["answers"][0] == found["answers"][2] != found["answers"][1]
    drafting = {name for name in before if ".drafts." in name}
    changed = {name for name in before if there[name] != before[name]}
    assert len(drafting) > 15 and len(changed & drafting) > 10
    (worker,) = found["nan"]
    assert sum(name.startswith("drafts.") for name in worker) > 10
    assert [name for name, is_nan in worker.items() if not is_nan] == []
    assert all(found["cache_is_zero"])
    (asleep,), (awake,) = found["memory"]["asleep"], found["memory"]["awake"]
    assert asleep["live_bytes"] < 0.05 * awake["live_bytes"]


SLOPE_MIB = 0.5  # a cycle; a leak of any tensor of these models' layers is more
# 45, since the heap grows in a few steps of 2 to 7 MiB and then stands still: over 20 one such step is the slope
WARM = 5  # cycles until heap and caches have found their size


def slope(values: list[float]) -> float:
    """Of the straight line through them, a step."""
    middle = (len(values) - 1) / 2
    return sum((i - middle) * value for i, value in enumerate(values)) / sum(
        (i - middle) ** 2 for i in range(len(values))
    )


@pytest.fixture(scope="module")
def cycled(tmp_path_factory) -> dict:
    """SLEEP_CYCLES makes it longer."""
    folder = tmp_path_factory.mktemp("cycles")
    model, other = checkpoints(folder, tiny_moe(), torch.float32)
    found = start(
        folder, "cycles", model, other, 1, limit_s=560, cycles=int(os.environ.get("SLEEP_CYCLES", "45")), seconds=400
    )
    return found


@pytest.mark.long
def test_cycle_after_cycle_gives_the_same_bits_and_leaves_nothing_behind(cycled):
    rows = cycled["rows"][WARM:]
    assert len(rows) >= WARM  # on a busy machine not all that were asked for
    assert all(row["equal"] for row in cycled["rows"])
    for kind in ("processes", "segments", "own_handles"):
        assert len({row[kind] for row in rows}) == 1, [row[kind] for row in rows]
    for kind in ("handles", "threads"):
        assert len({row["resources"][0][kind] for row in rows}) == 1, [row["resources"][0][kind] for row in rows]
    for state in ("asleep", "awake"):
        assert len({row[state][0]["live_bytes"] // MIB for row in rows}) == 1
        assert slope([row[state][0]["resident_bytes"] / MIB for row in rows]) < SLOPE_MIB
    assert slope([row["own_resident"] / MIB for row in rows]) < SLOPE_MIB


# A run's own. A plan cuts weights to a sixteenth of it at most: in 4 KiB, of rounds for a tiny model, 0.4 GB are 80,000
# boxes of Python's, over 100 MiB.
BUDGET = ReshardConfig().budget_mb * MIB


@pytest.fixture(scope="module", params=[6, 13], ids=["0.4GB", "0.8GB"])
def wide(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("wide")
    model = save(wide_moe(request.param), folder / "model")
    found = start(folder, "cycles", model, model, 1, limit_s=500, budget_bytes=BUDGET, cycles=3, seconds=300)
    return found | {"bytes": (model / "model.safetensors").stat().st_size}


@pytest.mark.long
def test_a_wide_model_leaves_less_than_a_twentieth_of_itself_on_the_device(wide):
    assert wide["bytes"] > 0.4e9
    for row in wide["rows"]:
        assert row["asleep"][0]["live_bytes"] < 0.05 * wide["bytes"]
        assert row["awake"][0]["live_bytes"] > wide["bytes"]


@pytest.mark.long
def test_what_a_process_holds_is_what_its_tensors_take(wide):
    """Asleep to within a tenth of what it holds awake, and awake, with all its heap,
    to within a tenth of its tensors.
    """
    for row in wide["rows"]:
        for state in ("asleep", "awake"):
            (memory,) = row[state]
            grown = memory["resident_bytes"] - memory["baseline_bytes"]
            assert abs(grown - memory["live_bytes"]) < 0.1 * row["awake"][0]["live_bytes"]
