"""The state of an agent's session: the example of the module, and what ends it."""

import pytest

from mrl.schedule.agent_talk import AgentTalk
from mrl.schedule.conversation import Stop

START = AgentTalk(3, 10.0)


def test_the_example_of_the_module():
    two = START.asked(2.0).asked(2.5)
    assert (two.open, two.turns_left, two.seconds_left) == (2, 1, 10.0)
    one = two.answered(4.0, has_call=True)
    none = one.answered(5.0, has_call=False)
    assert (one.open, none.open, none.deadline, none.stop) == (1, 0, 15.0, None)
    last = none.asked(6.0)
    assert (last.open, last.turns_left, last.seconds_left) == (1, 0, 9.0)
    assert last.answered(9.0, has_call=True).stop is Stop.TURNS and last.answered(9.0, has_call=False).stop is Stop.STOP
    assert last.left(9.0).stop is Stop.TURNS and last.answered(9.0, has_call=True).has_ended
    with pytest.raises(ValueError, match="without turns left"):
        last.asked(7.0)


def test_the_last_open_request_ends_what_has_no_turns_left():
    three = START.asked(0.0).asked(0.0).asked(0.0)
    two = three.answered(1.0, has_call=True)
    assert two.stop is None and two.answered(2.0, has_call=False).stop is None
    assert two.answered(2.0, has_call=False).answered(3.0, has_call=False).stop is Stop.STOP


def test_a_full_branch_ends_the_session_once_all_open_requests_are_answered():
    full = START.asked(0.0).asked(0.0).answered(1.0, has_call=False, is_full=True)
    assert full.stop is Stop.LENGTH and not full.has_ended
    assert full.answered(2.0, has_call=True).has_ended and full.answered(2.0, has_call=True).stop is Stop.LENGTH
    assert full.refused(2.0, Stop.CONTEXT).stop is Stop.LENGTH, "the first reason stays"
    assert full.ended(Stop.ENVIRONMENT).stop is Stop.ENVIRONMENT
    with pytest.raises(ValueError, match="without turns left"):
        full.asked(3.0)
