"""Responses of several turns in columns and files: what was sampled and what is context, and where turns begin."""

import zlib
from dataclasses import fields, replace

import numpy as np
import pytest
from segment_checks import check_routes, token_versions
from trajectories import trajectories

import mrl.cli.samples as samples_command
from mrl.cli.main import main
from mrl.cluster.scoring import outcomes
from mrl.data.batch import TrainBatch
from mrl.data.routes import MISSING
from mrl.data.row_columns import ONE_BRANCH, ONE_TURN
from mrl.data.samples import (
    Sample,
    SampleRows,
    Samples,
    Turn,
    TurnCall,
    packed,
    with_outcome,
    with_turns,
)
from mrl.errors import DataError
from mrl.rank.rank_batch import RankBatch
from mrl.record.metrics import turn_metrics
from mrl.record.sample_files import read_samples, write_samples
from mrl.record.spec import metric_spec
from mrl.reward.items import ONE_TURN as REWARD_ONE_TURN
from mrl.schedule.branches import Branch, as_one_row
from mrl.schedule.segments import continuation, continuation_seed, joined, with_context
from mrl.tools.compare_runs import of_run
from mrl.tools.report.samples import PartHead, looked_at

TURNS = (Turn(0, "stop", 2, 0.5, 0.25), Turn(4, "length"))
CALLS = (TurnCall("guess", "ok", 0.5), TurnCall("", "unread"))
TWO = Sample(
    0, 0, 0, 1, (7, 8), (1, 2, 5, 6, 3), (-0.1, -0.2, 0, 0, -0.3), "length", 5, sampled=(1, 1, 0, 0, 1), turns=TURNS,
    calls=CALLS, parts={"won": 1.0, "tries": 2.0},
)  # fmt: skip
ONE = Sample(1, 0, 1, 2, (7,), (4, 4), (-0.4, -0.5), "stop", 5)


def same(one: Samples, other: Samples) -> bool:
    return one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(column, other.arrays[name]) and column.dtype == other.arrays[name].dtype
        for name, column in one.arrays.items()
    )


def test_two_turns_and_one_beside_each_other():
    rows = packed([TWO, ONE])
    assert rows.sampled.tolist() == [True, True, False, False, True, True, True]
    assert (rows.sampled_lengths.tolist(), rows.turn_counts.tolist()) == ([3, 2], [2, 1])
    assert (rows.turn_starts.tolist(), rows.turn_stops.tolist()) == ([0, 4, 0], [0, 1, 0])
    assert (rows.turn_calls.tolist(), rows.turn_seconds.tolist()) == ([2, 0, 0], [0.5, 0, 0])
    assert same(rows.rows(np.array([1, 0])), packed([ONE, TWO][::1])) and same(rows, with_turns(rows))


def test_without_turns_there_is_no_column_of_theirs_and_no_byte_more():
    rows = packed([ONE])
    assert not rows.arrays.keys() & ONE_TURN.keys() and rows.is_sampled.all()
    assert rows.sampled_lengths is rows.response_lengths
    mandatory = [
        f
        for f in fields(SampleRows)
        if f.name not in {**ONE_TURN, **ONE_BRANCH, "turn_states": None, "turn_parents": None}
    ]
    size = sum(np.dtype(f.metadata["dtype"]).itemsize for f in mandatory)
    assert len(zlib.decompress(rows.numbers.to_bytes())) == 16 + size


def test_numbers_of_rows_say_behind_what_each_turn_was_sampled():
    """Equal where the same context stands in front, whatever the model said before; first turns by their prompts."""
    given = [[1, 2, 5, 6, 3, 7, 4], [9, 5, 6, 3, 8, 8, 4], [1]]
    masks = [[1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 1, 0, 0, 1], [1]]
    starts = [(0, 4, 6), (0, 3, 6), (0,)]
    made = packed(
        [
            replace(ONE, response_ids=ids, rollout_log_probs=[0.0] * len(ids), sampled=np.array(mask, bool),
                turns=tuple(Turn(start, "stop") for start in begins))
            for ids, mask, begins in zip(given, masks, starts, strict=True)
        ]
    )  # fmt: skip
    states = made.numbers.turn_states.tolist()
    assert 0 not in states and states[0] == states[3] == states[6]
    assert states[1] == states[4] and len(set(states)) == 4
    assert made.numbers.turn_rewards.tolist() == [0.0] * 7
    assert made.numbers.turn_starts.tolist() == [0, 4, 6, 0, 3, 6, 0]


def test_a_turn_is_known_by_all_that_it_read_whichever_branch_it_begins():
    """A planner's first turn and a solver's are two states. A reply behind a shared turn is one, in its fork too."""

    def of(prompt, response, sampled, starts) -> Samples:
        turns = tuple(Turn(start, "stop") for start in starts)
        return packed([replace(ONE, prompt_ids=prompt, response_ids=response, rollout_log_probs=[0.0] * len(response),
            sampled=np.array(sampled, bool), turns=turns)])  # fmt: skip

    planner, solver = of([7, 8], [1, 2], [1, 1], [0]), of([9], [3], [1], [0])
    main, fork = (of([7, 8], [1, 2, 5, 6, said], [1, 1, 0, 0, 1], [0, 4]) for said in (3, 4))
    edited = of([7, 8], [1, 2, 5, 5, 3], [1, 1, 0, 0, 1], [0, 4])
    rows = [
        planner, solver, as_one_row([Branch(planner), Branch(solver)]), as_one_row([Branch(solver), Branch(planner)]),
        as_one_row([Branch(main), Branch(fork, 1), Branch(edited, 1)]),
    ]  # fmt: skip
    plan, solve, *of_both, first, reply, again, other = Samples.joined(rows).numbers.turn_states.tolist()
    assert plan != solve and of_both == [plan, solve, solve, plan]
    assert first == plan and reply == again and len({plan, solve, reply, other}) == 4
    assert rows[-1].numbers.turn_parents.tolist() == [-1, 0, 0, 0] and rows[2].numbers.turn_parents.tolist() == [-1, -1]


def test_parts_join_as_they_would_have_been_packed():
    every = trajectories()
    whole = packed([*every, ONE])
    assert same(Samples.joined([packed([]), packed(every[:5]), packed(every[5:]), packed([ONE])]), whole)
    numbers = SampleRows.joined([packed(every).numbers, packed([ONE]).numbers])
    *states, alone = whole.numbers.turn_states.tolist()
    assert alone and numbers.turn_states.tolist() == [*states, 0], "of rows without turns no prompt is left to digest"
    for name, column in replace(whole.numbers, turn_states=numbers.turn_states).arrays.items():
        np.testing.assert_array_equal(numbers.arrays[name], column, err_msg=name)


def test_numbers_of_turns_come_through_bytes():
    for some in (packed(trajectories()), packed([ONE]), packed([])):
        found = SampleRows.from_bytes(some.numbers.to_bytes()).arrays
        assert found.keys() == some.numbers.arrays.keys()
        assert all(np.array_equal(found[name], column) for name, column in some.numbers.arrays.items())


def test_of_context_no_log_prob_has_to_be_finite():
    spoilt = replace(TWO, rollout_log_probs=(-0.1, -0.2, np.nan, np.inf, -0.3))
    assert packed([spoilt]).finite.tolist() == [True]
    assert packed([replace(spoilt, rollout_log_probs=(-0.1, np.nan, 0, 0, -0.3))]).finite.tolist() == [False]


def test_what_is_trained_on_is_sampled_and_not_rejected():
    batch = TrainBatch.of(packed([TWO, ONE]), 1.0)
    assert batch.loss_mask.tolist() == [True, True, False, False, True, True, True]
    kept = replace(batch, keep=np.array([True, False, True, True, True, False, True]))
    assert kept.loss_mask.tolist() == [True, False, False, False, True, False, True]
    assert batch.sampled_indices(np.array([1, 0])).tolist() == [5, 6, 0, 1, 4]


def test_how_far_the_trainers_log_probs_are_is_said_of_what_was_sampled():
    rank = RankBatch.__new__(RankBatch)
    batch = TrainBatch.of(packed([TWO, ONE]), 1.0)
    rank.batch, rank.log_probs = batch, batch.rollout_log_probs + np.float32(0.5)
    assert rank.shown(np.array([0, 1]), less_rollout=True).tolist() == [0.5, 0.5, 0, 0, 0.5, 0.5, 0.5]


def test_files_have_the_turns_where_there_are_some(tmp_path):
    rewards = [{"score": 1.0, "reason": "ok"}, {"score": 0.0, "reason": "ok"}]
    write_samples(tmp_path, 1, [packed([TWO]), packed([ONE])], rewards, turns=True)
    first, second = read_samples(tmp_path, 1)
    assert first["sampled"] == [True, True, False, False, True] and second["sampled"] == [True, True]
    assert first["turns"] == [
        {"first_token": 0, "stop_reason": "stop", "calls": 2, "seconds": 0.5, "reward": 0.25},
        {"first_token": 4, "stop_reason": "length", "calls": 0, "seconds": 0.0, "reward": 0.0},
    ]
    assert first["calls"] == [
        {"name": "guess", "reason": "ok", "seconds": 0.5},
        {"name": "", "reason": "unread", "seconds": 0.0},
    ]
    assert second["turns"] == [{"first_token": 0, "stop_reason": "stop", "calls": 0, "seconds": 0.0, "reward": 0.0}]
    assert second["calls"] == []
    other = packed([replace(TWO, turns=tuple(replace(turn, seconds=9.0) for turn in TWO.turns))])
    write_samples(tmp_path, 3, [other], rewards[:1], turns=True)
    (again,) = read_samples(tmp_path, 3)
    assert again != first and of_run(again) == of_run(first)
    write_samples(tmp_path, 2, [packed([ONE])], rewards[1:])
    assert not read_samples(tmp_path, 2)[0].keys() & {"sampled", "turns"}
    kinds = looked_at(tmp_path, 1, None)
    (shown,) = [sample for sample in kinds["best"] if sample.row == 0]
    assert [value is None for value in shown.log_probs] == [False, False, True, True, False]
    said = "turn 1: guess ok 0.50 s, no tool unread 0.00 s · 0.50 s in all · reward 0.25 · ended by stop"
    assert shown.heads == (PartHead(0, said), PartHead(4, "turn 2: no call · ended by length"))


def test_the_command_shows_no_log_prob_of_context(tmp_path, monkeypatch, capsys):
    (tmp_path / "samples").mkdir()
    write_samples(tmp_path / "samples", 1, [packed([TWO])], [{"score": 1.0, "reason": "ok"}], turns=True)
    monkeypatch.setattr(samples_command, "_decoder", lambda config, stored: lambda ids: f"<{ids}>")
    main(["samples", str(tmp_path), "--log-probs"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("     ")]
    assert [" context " in line for line in lines] == [False, False, True, True, False]


def test_the_command_shows_a_response_turn_by_turn(tmp_path, monkeypatch, capsys):
    (tmp_path / "samples").mkdir()
    write_samples(tmp_path / "samples", 1, [packed([TWO])], [{"score": 1.0, "reason": "ok"}], turns=True)
    write_samples(tmp_path / "samples", 2, [packed([ONE])], [{"score": 1.0, "reason": "ok"}])
    monkeypatch.setattr(samples_command, "_decoder", lambda config, stored: lambda ids: f"<{ids}>")
    main(["samples", str(tmp_path), "--turns", "--step", "1"])
    assert capsys.readouterr().out.splitlines()[3:] == [
        "--- turn 1: stop, reward 0.25", "<[1, 2]>", "--- call: guess, ok, 0.50 s",
        "--- call: (of no tool), unread, 0.00 s", "--- context of turn 1, after 0.50 s", "<[5, 6]>",
        "--- turn 2: length", "<[3]>",
    ]  # fmt: skip
    main(["samples", str(tmp_path), "--turns", "--step", "2"])
    assert capsys.readouterr().out.splitlines()[3:] == ["--- turn 1: stop", "<[4, 4]>"]


def test_what_calls_came_to_is_a_column_each_and_is_measured():
    rows = packed(
        [TWO, ONE, replace(TWO, calls=(TurnCall("guess", "timeout", 2.0), TurnCall("look", "refused", 0.25)))]
    )
    metrics = turn_metrics(SampleRows.from_bytes(rows.numbers.to_bytes()))
    assert {name: value for name, value in metrics.items() if name.startswith("tools/")} == {
        "tools/guess/calls": 2.0, "tools/guess/failed": 1.0, "tools/guess/seconds": 2.5,
        "tools/look/calls": 1.0, "tools/look/failed": 0.0, "tools/look/seconds": 0.25,
    }  # fmt: skip
    assert (metrics["turns/calls"], metrics["turns/unread_calls"]) == (4 / 3, 1.0)
    for name in metrics:
        metric_spec(name)


def test_what_an_agent_asked_for_is_no_call_and_is_measured_apart():
    asked = (TurnCall("temperature", "overridden"), TurnCall("top_p", "overridden"), TurnCall("edited", "branch"))
    calls = (*asked, TurnCall("agent", "retry"), TurnCall("agent", "ok", 2.0), *[TurnCall("agent", "untrained")] * 2)
    calls = (*calls, TurnCall("agent", "lost_reward"))
    rows = packed([replace(TWO, calls=calls), ONE])
    metrics = turn_metrics(SampleRows.from_bytes(rows.numbers.to_bytes()))
    assert {name: value for name, value in metrics.items() if name.startswith(("tools/", "endpoint/"))} == {
        "tools/agent/calls": 1.0, "tools/agent/failed": 0.0, "tools/agent/seconds": 2.0,
        "endpoint/overridden": 2.0, "endpoint/retries": 1.0, "endpoint/branches": 1.0,
        "endpoint/untrained_branches": 2.0, "endpoint/lost_rewards": 1.0,
    }  # fmt: skip
    assert metrics["turns/calls"] == 0.5
    for name in metrics:
        metric_spec(name)


def test_what_a_reward_is_told_is_of_its_own_row():
    first, second = outcomes(packed([ONE, TWO]))
    assert first == REWARD_ONE_TURN
    assert second == {
        "num_turns": 2, "turns": [{"calls": 2, "reward": 0.25}, {"calls": 0, "reward": 0.0}],
        "outcome": {"stop_reason": "length", "reward": 0.25, "parts": {"won": 1.0, "tries": 2.0}},
    }  # fmt: skip


def test_an_outcome_has_to_be_of_all_turns():
    with pytest.raises(DataError, match="a response has 2 turns, and calls are given for 1"):
        with_outcome(packed([TWO]), [[]], [0.0], {}, 0.0)


# --- turns as continuations -------------------------------------------------------------------------------------------

ROUTE = (2, 2)


def answered(prompt: list[int], response: list[int], version: int, stop: str, with_routes: bool = True) -> Samples:
    """One request's answer, whose log-probs and routes tell the version and the place."""
    tokens = len(prompt) + len(response)
    routes = np.arange(tokens)[:, None, None] + 40 * version + np.zeros((1, *ROUTE))
    routes[-1] = MISSING
    log_probs = [-(version + token / 100) for token in response]
    made = routes.astype(np.int16) if with_routes else None
    return packed([Sample(7, 1, 3, 11, prompt, response, log_probs, stop, version, routes=made)])


def told(kept: Samples, context: list[int], calls: int = 0, seconds: float = 0.0) -> Samples:
    return with_context(kept, [np.array(context, np.int32)], np.array([calls]), np.array([seconds]))


def goes_on(kept: Samples, response: list[int], version: int, stop: str, with_routes: bool = True) -> Samples:
    asked = continuation(kept, 0, 9)
    return joined(kept, answered(asked.prompt_ids.tolist(), response, version, stop, with_routes))


def test_the_example_of_the_module():
    kept = told(answered([7, 8], [1, 2], 4, "stop"), [5, 6], calls=2, seconds=0.5)
    assert kept.token_ids.tolist() == [7, 8, 1, 2, 5, 6] and kept.sampled.tolist() == [True, True, False, False]
    assert kept.routes[:, 0, 0].tolist() == [160, 161, 162, MISSING, MISSING, MISSING]
    assert continuation(kept, 0, 9).seed == continuation_seed(11, 4)
    both = goes_on(kept, [3], 5, "stop")
    assert both.token_ids.tolist() == [7, 8, 1, 2, 5, 6, 3] and both.sampled_lengths.tolist() == [3]
    np.testing.assert_allclose(both.rollout_log_probs, [-4.01, -4.02, 0, 0, -5.03], rtol=1e-6)
    assert both.routes[:, 0, 0].tolist() == [160, 161, 162, 203, 204, 205, MISSING]
    check_routes(both)
    assert (both.turn_starts.tolist(), both.turn_stops.tolist()) == ([0, 4], [0, 0])
    assert (both.turn_calls.tolist(), both.turn_seconds.tolist()) == ([2, 0], [0.5, 0])
    assert token_versions(both).tolist() == [4, 4, 4, 4, 5]


def test_a_conversation_cut_anywhere_is_that_of_whole_turns():
    """Every turn's sampling in one request or in several, under one version: the same columns."""
    turns, contexts = [[1, 2, 3], [4], [5, 6]], [[20, 21], [22]]

    def conversation(cuts: list[list[int]], with_routes: bool) -> Samples:
        made = None
        for number, (turn, cut) in enumerate(zip(turns, cuts, strict=True)):
            parts = [turn[a:b] for a, b in zip([0, *cut], [*cut, len(turn)], strict=True)]
            for part in parts:
                stop = "stop" if part is parts[-1] else "length"
                if made is None:
                    made = answered([7, 8], part, 4, stop, with_routes)
                else:
                    made = goes_on(made, part, 4, stop, with_routes)
            made = told(made, contexts[number], number + 1, 0.25) if number < 2 else made
        return made

    for with_routes in (True, False):
        whole = conversation([[], [], []], with_routes)
        check_routes(whole)
        assert whole.turn_starts.tolist() == [0, 5, 7] and whole.turn_calls.tolist() == [1, 2, 0]
        assert whole.sampled.tolist() == [True] * 3 + [False] * 2 + [True] + [False] + [True] * 2
        for cuts in ([[1], [], [1]], [[1, 2], [], []], [[], [], [1]]):
            assert same(conversation(cuts, with_routes), whole)


def test_rows_are_told_each_its_own():
    rows = packed([replace(ONE, stop_reason="length"), TWO])
    both = with_context(rows, [np.array([9], np.int32), np.array([], np.int32)], np.array([1, 3]), np.array([0.1, 0.2]))
    assert both.response_lengths.tolist() == [3, 5] and both.turn_counts.tolist() == [2, 3]
    for row, calls in ((0, 1), (1, 3)):
        alone = told(rows.rows(slice(row, row + 1)), [[9], []][row], calls, (0.1, 0.2)[row])
        assert same(both.rows(slice(row, row + 1)), alone)


def test_an_ended_response_goes_on_behind_context_alone():
    ended = answered([7, 8], [1, 2], 4, "stop")
    with pytest.raises(DataError, match="ended"):
        continuation(ended, 0, 3)
    with pytest.raises(DataError, match="ended"):
        joined(ended, answered([7, 8, 1, 2], [3], 5, "stop"))
    assert goes_on(told(ended, [5]), [3], 5, "stop").stop_reason.tolist() == [0]


def test_context_behind_context_and_an_answer_with_turns_of_its_own_are_refused():
    kept = told(answered([7, 8], [1, 2], 4, "stop", False), [5])
    with pytest.raises(DataError, match="without a token"):
        told(kept, [6])
    with pytest.raises(DataError, match="turns of its own"):
        joined(kept, with_turns(answered([7, 8, 1, 2, 5], [3], 5, "stop", False)))
