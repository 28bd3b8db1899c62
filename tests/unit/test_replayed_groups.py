"""Which groups of an earlier start stand for new ones: those that answer exactly what would be asked now."""

from types import SimpleNamespace

import numpy as np
import pytest

from mrl.generate.replays import Replays
from mrl.generate.rollouts import prompt_seed
from mrl.schedule.groups import State

SEED = 7
REPLAYED = "trainer/replayed_responses"


class Prompts:
    """One prompt, which group 4 asks for."""

    def __getitem__(self, number: int):
        assert number == 4
        return SimpleNamespace(prompt_id=40), 0

    def draw_of(self, number: int) -> int:
        return 1


def taken(group_changes: dict, response_changes: dict, version: int) -> bool:
    """Whether a group of two responses that an earlier start finished is taken, with changes to what is asked for or
    to what is there. The first response was begun before: 2 of its tokens are kept.
    """
    prompts = Prompts()
    started = []
    asked = {"number": 4, "attempts": 1, "state": None, "ended": [False, False], "lengths": [2, 0], "begun": 9}
    group = SimpleNamespace(**asked | group_changes)
    responses = {}
    for index in range(2):
        columns = {"response_lengths": 5, "prompt_id": 40, "seed": prompt_seed(SEED, prompts, 4, index)}
        if index == 1:
            columns |= response_changes
        rows = SimpleNamespace(**{name: np.array([value]) for name, value in columns.items()})
        responses[index] = SimpleNamespace(rows=rows, versions=np.array([3, 2]), lengths=(0, rows.response_lengths[0]))
    parts = SimpleNamespace(attempt=1, responses=responses, newest=3)
    given_up = []
    spool = SimpleNamespace(give_up=given_up.extend)
    replays = Replays({4: parts}, spool, prompts, SEED, given_up.append)
    added = []
    buffer = SimpleNamespace(
        step=version, start=started.append, add=lambda number, index, more, ended: added.append((number, index, more))
    )
    judged = SimpleNamespace(take_over=lambda *given: added.append("judged"))
    is_taken = replays.take_over(group, buffer, judged)
    if is_taken:
        ended = group.ended
        expected = [(4, index, 5 - group.lengths[index]) for index in range(2) if not ended[index]]
        assert added == ["judged", *expected] and started == [4] and group.begun == 2
        assert replays.metrics() == {"trainer/replayed_responses": float(len(expected))} and replays.metrics() == {
            "trainer/replayed_responses": 0.0
        }
        assert not given_up
    else:
        assert not added and not started
        assert given_up in ([4, 1], []), "its place is given back, and one group is counted"
    assert not replays.take_over(group, buffer, judged), "once"
    return is_taken


@pytest.mark.parametrize(
    ("asked", "found", "version", "is_taken"),
    [
        ({}, {}, 3, True),
        ({}, {}, 4, True),
        ({"ended": [True, False], "lengths": [5, 0]}, {}, 3, True),
        ({"attempts": 0}, {}, 3, False),  # an earlier attempt's
        ({"attempts": 2}, {}, 3, False),
        ({"ended": [False] * 3, "lengths": [2, 0, 0]}, {}, 3, False),  # one response is missing
        ({"ended": [False], "lengths": [2]}, {}, 3, False),  # one too many
        ({"ended": [True, False], "lengths": [4, 0]}, {}, 3, False),  # goes on behind its end
        ({"lengths": [6, 0]}, {}, 3, False),  # shorter than what is kept
        ({}, {"prompt_id": 41}, 3, False),
        ({}, {"seed": 0}, 3, False),
        ({}, {}, 2, False),  # tokens of later weights
        ({"state": State.FINISHED}, {}, 3, False),
    ],
)
def test_groups_must_answer_what_is_asked(asked, found, version, is_taken):
    assert taken(asked, found, version) == is_taken


def test_what_is_left_when_weights_change_is_given_up_once():
    counted = []
    replays = Replays({1: None, 2: None}, None, None, SEED, counted.append)
    replays.give_up()
    replays.give_up()
    assert counted == [2] and not replays.take_over(SimpleNamespace(number=1), None, None)
