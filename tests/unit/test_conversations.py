"""Conversations in an engine's process: the engine is asked with the stored row up to there, and nothing is lost."""

import asyncio
import itertools
import json
import threading
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import environment_classes
import numpy as np
import pytest
import tool_functions
from dialect_templates import CODER, tokenizer
from segment_checks import check_routes
from seldom import seldom

from mrl.acting.dialects import dialect_of
from mrl.acting.tool import ToolsSpec, TurnsSpec
from mrl.cluster.scoring import outcomes
from mrl.data.samples import CALL_REASONS, LEFT_OUT, STOP_REASONS, UNJUDGED, Sample, Samples, packed
from mrl.engine.conversations import Conversations
from mrl.engine.requests import Request, Sampling
from mrl.errors import ConfigError, LostProcess
from mrl.reward.builtin_rules import environment
from mrl.reward.items import LEFT_OUT as REWARD_LEFT_OUT
from mrl.reward.items import UNJUDGED as REWARD_UNJUDGED
from mrl.schedule.conversation import Stop
from mrl.schedule.segments import continuation_seed

TOKENS = tokenizer("hermes")
FILE = str(Path(tool_functions.__file__))
NAMES = ("calculator", "hangs", "raises", "floods", "sleeps", "lookup")
SAMPLING = Sampling(1.0, 2000, (TOKENS.convert_tokens_to_ids("<|im_end|>"),), routes=True)


def called(name: str, **arguments) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def ids(text: str) -> list[int]:
    return TOKENS.encode(text, add_special_tokens=False)


class Engine:
    """Answers by what was sampled before: `said` by the number of turns that the prompt has; keeps its requests."""

    def __init__(self, *said: str, cut: int = 1000):
        self.said, self.cut, self.asked, self.last = said, cut, [], 0

    async def generate(self, requests, sampling):
        (request,) = requests
        self.asked.append(request)
        await asyncio.sleep(0)
        prompt = list(request.prompt_ids)
        turn = prompt.count(TOKENS.convert_tokens_to_ids("<|im_start|>")) // 2 - 1
        begun = len(prompt) - self._start(prompt)
        left = ids(self.said[turn] + "<|im_end|>")[begun:]
        response = left[: min(request.max_tokens, self.cut)]
        stop = "stop" if len(response) == len(left) else "length"
        tokens = len(prompt) + len(response)
        routes = np.full((tokens, 1, 2), len(self.asked), np.int16)
        routes[-1] = -1
        log_probs = [-len(self.asked) - i / 1000 for i in range(len(response))]
        given = (request.prompt_id, request.group_id, request.sample_id, request.seed)
        yield packed([Sample(*given, prompt, response, log_probs, stop, 4, routes=routes)])

    @staticmethod
    def _start(prompt: list[int]) -> int:
        """Where the last message of the assistant begins, behind its role."""
        opened = len(prompt) - prompt[::-1].index(TOKENS.convert_tokens_to_ids("<|im_start|>"))
        return opened + len(ids("assistant\n"))


PROMPT = tuple(ids("<|im_start|>user\n12*34?<|im_end|>\n<|im_start|>assistant\n"))


def spec(names=NAMES, **more) -> TurnsSpec:
    given = {
        "max_turns": 4, "max_calls": 2, "max_seconds": 60.0, "max_answer_characters": 120, "timeout_s": 20.0,
        "num_workers": 2, **more,
    }  # fmt: skip
    return TurnsSpec(ToolsSpec(names, FILE), **given)


@pytest.fixture(scope="module")
def talks():
    made = Conversations(spec(), TOKENS)
    yield made
    made.close()


def whole(talks: Conversations, engine: Engine, **more) -> Samples:
    async def run() -> list[Samples]:
        request = Request(7, PROMPT, 11, prompt_id=3, group_id=2, **more)
        return [batch async for batch in talks.generate(engine, [request], SAMPLING)]

    (made,) = asyncio.run(run())
    assert len(made) == 1 and (made.sample_id[0], made.prompt_id[0], made.group_id[0], made.seed[0]) == (7, 3, 2, 11)
    check_asked(engine, made)
    return made


def check_asked(engine: Engine, made: Samples) -> None:
    """Every request was the stored row up to there, with the seed of that place; all tokens are the row's, once."""
    row = made.token_ids.tolist()
    for request in engine.asked:
        kept = len(request.prompt_ids) - len(PROMPT)
        assert list(request.prompt_ids) == row[: len(request.prompt_ids)]
        assert request.seed == continuation_seed(11, kept) and request.max_tokens == 2000 - kept
    of_request = np.floor(-made.rollout_log_probs[made.is_sampled]).astype(int).tolist()
    assert of_request == sorted(of_request) and set(of_request) == set(range(1, len(engine.asked) + 1))
    check_routes(made)


def test_a_call_is_made_and_its_answer_read(talks):
    engine = Engine("I compute. " + called("calculator", expression="12*34"), "It is 408.")
    made = whole(talks, engine)
    assert STOP_REASONS[made.stop_reason[0]] == Stop.STOP and made.turn_counts.tolist() == [2]
    text = TOKENS.decode(made.token_ids)
    assert "<tool_response>\n408\n</tool_response>" in text and text.endswith("It is 408.<|im_end|>")
    sampled = TOKENS.decode(np.concatenate(list(made.responses()))[made.sampled])
    assert sampled == "I compute. " + called("calculator", expression="12*34") + "<|im_end|>It is 408.<|im_end|>"
    assert made.turn_calls.tolist() == [1, 0] and made.turn_starts[1] == (~made.sampled).nonzero()[0][-1] + 1


def test_without_a_call_it_is_the_engines_own_response(talks):
    engine = Engine("It is 408.")
    made = whole(talks, engine)
    assert made.turn_counts.tolist() == [1] and made.sampled.all() and len(engine.asked) == 1


def test_several_calls_are_answered_in_their_order_and_malformed_ones_too(talks):
    said = called("calculator", expression="1+1") + "<tool_call>\n{12*34}\n</tool_call>" + called("compass")
    engine = Engine(said + called("calculator", expression="2+2"), "Done.")
    text = TOKENS.decode(whole(talks, engine).token_ids)
    answers = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    assert answers[0] == "2" and answers[1].startswith("This call cannot be read") and len(answers) == 4
    assert "at most 2 calls at once" in answers[2] and "at most 2 calls at once" in answers[3]


def test_failures_are_answers_and_floods_are_cut(talks):
    engine = Engine(called("raises") + called("floods"), called("compass"), "Done.")
    made = whole(talks, engine)
    text = TOKENS.decode(made.token_ids)
    assert "Error: raises: KeyError: 'no such word'" in text and "[80000 characters, of which 120 are shown]" in text
    assert "Error: there is no tool 'compass'" in text and made.turn_counts.tolist() == [3]


def test_half_a_character_in_a_call_or_an_answer_is_a_question_mark(talks):
    """JSON may say one, and no tokenizer takes it."""
    said = called("lookup", word="\ud800") + called("lookup", word="a", most="\udfff"), called("\ud800"), "Done."
    made = whole(talks, Engine(*said), row=None)
    text = TOKENS.decode(made.token_ids)
    assert '{"word": "?", "most": 3' in text and "'most' is not of the kind integer: ?" in text
    assert "there is no tool" in text and STOP_REASONS[made.stop_reason[0]] == Stop.STOP


def test_half_a_character_in_the_failure_of_an_environment_can_be_logged(tmp_path):
    tools = ToolsSpec(("calculator",), str(Path(environment_classes.__file__)), environments=ENVIRONMENTS)
    games = Conversations(replace(spec(), tools=tools), TOKENS, tmp_path / "log")
    made = whole(games, Engine(called("act", how="half"), "never"), row=row(environment="Trouble"))
    games.close()
    assert last_calls(made) == [("act", "raised")] and "ValueError: ? of it" in (tmp_path / "log").read_text()


def test_cut_anywhere_by_the_engine_it_is_the_same_row(talks):
    said = "First " + called("calculator", expression="12*34"), called("calculator", expression="1+1"), "It is 408."
    uncut = whole(talks, Engine(*said))
    for cut in (1, 3, 20):
        assert_same(gone_on(talks, Engine(*said, cut=cut)), uncut)


ROW = {f.name for f in fields(Samples)} - {"rollout_log_probs", "routes", "turn_seconds", "call_seconds"}


def assert_same(made: Samples, other: Samples) -> None:
    for name in ROW:
        np.testing.assert_array_equal(getattr(made, name), getattr(other, name), err_msg=name)


def gone_on(
    talks: Conversations, engine: Engine, border: int | None = None, change=lambda kept: kept, **more
) -> Samples:
    """Until it has ended: each time from what is kept of it, up to the next multiple of `border`."""
    kept = {}
    for _ in range(300):
        length = int(kept[7].response_lengths[0]) if kept else 0
        most = None if border is None else border - length % border

        async def run(most=most) -> list[Samples]:
            request = Request(7, PROMPT, 11, prompt_id=3, group_id=2, max_tokens=most, **more)
            return [batch async for batch in talks.generate(engine, [request], SAMPLING, kept)]

        (made,) = asyncio.run(run())
        if not made.truncated[0] or made.response_lengths[0] == SAMPLING.max_tokens:
            return made
        assert border is None or made.response_lengths[0] >= length + most
        kept[7] = change(made)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("border", [7, 50, 90])
def test_held_at_borders_it_is_the_same_row(talks, border):
    """Wherever they fall: into what is sampled, or into answers, which are read whole."""
    said = "First " + called("calculator", expression="12*34"), called("compass") + "<tool_call>\n{1", "It is 408."
    assert_same(gone_on(talks, Engine(*said), border), whole(talks, Engine(*said)))


def test_budgets_end_it_each_by_its_own_reason(talks):
    again = called("calculator", expression="1+1")
    turns = whole(talks, Engine(*[again] * 9))
    assert STOP_REASONS[turns.stop_reason[0]] == Stop.TURNS and turns.turn_counts.tolist() == [4]
    assert turns.sampled[-1]
    assert turns.turn_calls.tolist() == [1] * 4 and last_calls(turns) == [("calculator", "ok")] * 3 + [
        ("calculator", "not_called")
    ]
    short = Engine(again, "x" * 1000)
    with_limit = asyncio.run(_one(talks, short, Sampling(1.0, len(ids(again + "<|im_end|>")) + 5, ())))
    assert STOP_REASONS[with_limit.stop_reason[0]] == Stop.CONTEXT and with_limit.sampled.all()
    long = asyncio.run(_one(talks, Engine(again + "x" * 1000), Sampling(1.0, len(ids(again)) + 20, ())))
    assert STOP_REASONS[long.stop_reason[0]] == Stop.LENGTH and not last_calls(long)


async def _one(talks: Conversations, engine: Engine, sampling: Sampling) -> Samples:
    (made,) = [batch async for batch in talks.generate(engine, [Request(7, PROMPT, 11)], sampling)]
    return made


def test_time_in_the_engines_line_takes_no_call_away():
    """Each turn an hour in the line, and an answer in two seconds of the sixty."""
    times = itertools.accumulate(itertools.chain.from_iterable(itertools.repeat((3600.0, 0.0, 2.0, 0.0))))
    talks = Conversations(spec(), TOKENS, clock=lambda: next(times))
    again = called("calculator", expression="1+1")
    made = asyncio.run(_one(talks, Engine(again, again, "Done."), SAMPLING))
    talks.close()
    assert STOP_REASONS[made.stop_reason[0]] == Stop.STOP and last_calls(made) == [("calculator", "ok")] * 2
    assert made.turn_seconds.tolist() == [2.0, 2.0, 0.0]


def test_a_tool_that_hangs_is_an_answer_or_the_end_by_whichever_comes_first():
    for timeout_s, seconds, stop in ((0.3, 60.0, Stop.STOP), (60.0, 0.3, Stop.SECONDS)):
        talks = Conversations(spec(timeout_s=timeout_s, max_seconds=seconds), TOKENS)
        made = asyncio.run(_one(talks, Engine(called("hangs"), "Done."), SAMPLING))
        assert STOP_REASONS[made.stop_reason[0]] == stop
        talks.close()


def test_a_call_that_the_clock_ends_took_what_it_was_waited_for():
    talks = Conversations(spec(timeout_s=60.0, max_seconds=0.3), TOKENS)
    made = asyncio.run(_one(talks, Engine(called("hangs")), SAMPLING))
    talks.close()
    assert last_calls(made) == [("hangs", "unanswered")]
    assert 0.3 <= made.call_seconds[0] < 30 and made.turn_seconds.tolist() == made.call_seconds.tolist()


def test_many_at_once_are_those_of_one_after_the_other(talks):
    """Whatever takes its time: answers come in another order, rows are the same."""
    said = called("sleeps", seconds=0.2) + called("calculator", expression="3*3"), "Done."

    async def together() -> dict[int, Samples]:
        requests = [Request(i, PROMPT, 11 + i) for i in range(6)]
        made = [batch async for batch in talks.generate(Engine(*said), requests, SAMPLING)]
        return {int(one.sample_id[0]): one for one in made}

    found = asyncio.run(together())
    alone = asyncio.run(_one(talks, Engine(*said), SAMPLING))
    assert sorted(found) == list(range(6))
    for one in found.values():
        np.testing.assert_array_equal(one.token_ids, alone.token_ids)
        np.testing.assert_array_equal(one.sampled, alone.sampled)


class Held(Engine):
    """Answers nothing until it is told to; then with what is cut off, as one whose requests were ended."""

    async def generate(self, requests, sampling):
        self.asked += requests
        await self.lets.wait()
        prompt = list(requests[0].prompt_ids)
        yield packed([Sample(0, 0, requests[0].sample_id, 11, prompt, [], [], "length", 4)])


@pytest.mark.parametrize("named", [[5], None], ids=["by name", "all"])
def test_an_ended_conversation_asks_for_nothing_more_and_its_tool_is_let_go(named):
    """One is at the engine, one at a tool that hangs; the only process of tools is free again for another."""
    talks = Conversations(spec(num_workers=1, timeout_s=500.0, max_seconds=600.0), TOKENS)

    async def ended(engine: Engine, is_there) -> None:
        made = asyncio.create_task(_all(talks, engine, Request(7, PROMPT, 11, handle=5)))
        while not is_there():
            await asyncio.sleep(0.01)
        await talks.end(named)
        if isinstance(engine, Held):
            engine.lets.set()
        assert await asyncio.wait_for(made, 20.0) == [] and len(engine.asked) == 1

    async def run() -> None:
        hangs, held = Engine(called("hangs")), Held()
        held.lets = asyncio.Event()
        await ended(hangs, lambda: talks.all_act)
        await ended(held, lambda: held.asked)
        other = Engine(called("calculator", expression="1+1"), "Done.")
        (made,) = await asyncio.wait_for(_all(talks, other, Request(8, PROMPT, 11, handle=6)), 60.0)
        assert last_calls(made) == [("calculator", "ok")]

    asyncio.run(run())
    talks.close()


async def _all(talks: Conversations, engine: Engine, *requests: Request) -> list[Samples]:
    return [batch async for batch in talks.generate(engine, requests, SAMPLING)]


def test_one_that_is_ended_before_it_began_brings_nothing(talks):
    async def run() -> None:
        engine = Engine("Done.")
        made = asyncio.create_task(_all(talks, engine, Request(7, PROMPT, 11, handle=5)))
        await asyncio.sleep(0)
        await talks.end()
        assert await made == [] and not engine.asked

    asyncio.run(run())


def test_others_go_on_beside_one_that_is_ended(talks):
    async def run() -> list[Samples]:
        engine = Engine(called("sleeps", seconds=0.2), "Done.")
        requests = [Request(number, PROMPT, 11, handle=number) for number in range(3)]
        made = asyncio.create_task(_all(talks, engine, *requests))
        while not talks.all_act:
            await asyncio.sleep(0.01)
        await talks.end([1, 99])
        return await made

    assert sorted(int(one.sample_id[0]) for one in asyncio.run(run())) == [0, 2]


def row(**extra_info) -> dict:
    return {"data_source": "here", "ground_truth": "", "extra_info": extra_info}


ENVIRONMENTS = ("Stairs", "Counted", "Forgetful", "Trouble")


@pytest.fixture(scope="module")
def games():
    tools = ToolsSpec(("calculator",), str(Path(environment_classes.__file__)), environments=ENVIRONMENTS)
    made = Conversations(replace(spec(timeout_s=1.0), tools=tools), TOKENS)
    yield made
    made.close()


def last_calls(made: Samples) -> list[tuple[str, str]]:
    return [
        (name.decode(), CALL_REASONS[reason])
        for name, reason in zip(made.call_names.tolist(), made.call_reasons.tolist(), strict=True)
    ]


def test_an_environment_is_acted_on_and_ends_it(games):
    """By hand: three steps, a quarter each; the last is not told of, and nothing is sampled after it."""
    said = [called("climb", steps=1) + called("calculator", expression="2+2"), called("climb", steps=2)]
    made = whole(games, Engine(*said, "never"), row=row(environment="Stairs", height=3))
    assert STOP_REASONS[made.stop_reason[0]] == Stop.CLOSED and made.turn_counts.tolist() == [2] and made.sampled[-1]
    text = TOKENS.decode(made.token_ids)
    assert "2 to go, seed 3" in text and "\n4\n" in text and "0 to go" not in text
    assert made.turn_rewards.tolist() == [0.25, 0.5] and made.turn_calls.tolist() == [2, 1]
    assert last_calls(made) == [("climb", "ok"), ("calculator", "ok"), ("climb", "ok")]
    assert (made.part_names.tolist(), made.part_values.tolist()) == ([b"left"], [0.0])
    (outcome,) = outcomes(made)
    assert outcome["num_turns"] == 2 and outcome["outcome"]["reward"] == 0.75


def test_one_that_the_model_leaves_alone_gives_what_it_gave(games):
    made = whole(games, Engine(called("climb", steps=1), "Enough."), row=row(environment="Stairs", height=3))
    assert STOP_REASONS[made.stop_reason[0]] == Stop.STOP and made.turn_rewards.tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("said", "left"), [(["It is 408."], 3.0), ([called("climb", steps=1), "Enough."], 2.0)], ids=["no call", "one"]
)
def test_a_response_has_the_parts_that_its_environment_declares(games, said, left):
    """So that a metric that names one finds it in every response: three stairs, and nobody ever falls."""
    (outcome,) = outcomes(whole(games, Engine(*said), row=row(environment="Counted", height=3)))
    assert outcome["outcome"]["parts"] == {"left": left, "falls": 0.0}
    scored = environment("", "", None, outcome)
    assert (scored["left"], scored["falls"], scored["acc"]) == (left, 0.0, outcome["outcome"]["reward"])


@pytest.mark.parametrize(
    ("how", "reason"), [("raises", "raised"), ("hangs", "timeout"), ("dies", "died"), ("words", "wrong_type")]
)
def test_a_failing_environment_is_no_answer_and_no_reward_of_nothing(games, how, reason):
    engine = Engine(called("count"), called("act", how=how), "never")
    made = whole(games, engine, row=row(environment="Trouble"))
    assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT and len(engine.asked) == 2
    assert last_calls(made) == [("count", "ok"), ("act", reason)]
    assert "Error" not in TOKENS.decode(made.token_ids)


@pytest.mark.parametrize(
    "beside", seldom(["", called("calculator", expression="1+1")], 1), ids=["alone", "beside a tool"]
)
def test_one_that_hangs_until_all_time_is_up_has_failed_and_is_no_reward_of_nothing(beside):
    tools = ToolsSpec(("calculator",), str(Path(environment_classes.__file__)), environments=ENVIRONMENTS)
    games = Conversations(replace(spec(max_seconds=2.0), tools=tools), TOKENS)
    engine = Engine(called("act", how="hangs") + beside, "never")
    made = whole(games, engine, row=row(environment="Trouble"))
    games.close()
    assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT and len(engine.asked) == 1
    assert last_calls(made)[0] == ("act", "unanswered")


def test_a_reply_after_all_time_is_up_is_none(games, monkeypatch):
    """Its reward and its end do not count: the clock stands behind the deadline when it comes."""
    clock = iter([0.0, 0.0])
    monkeypatch.setattr(games, "_clock", lambda: next(clock, 1e6))
    made = whole(games, Engine(called("climb", steps=3), "never"), row=row(environment="Stairs", height=3))
    assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT
    assert last_calls(made) == [("climb", "unanswered")] and made.turn_rewards.tolist() == [0.0]


def test_one_that_does_not_begin_has_failed_whatever_the_model_says(games):
    for said in (["It is 408."], [called("count"), "Done."]):
        made = whole(games, Engine(*said), row=row(environment="Trouble", begins=False))
        assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT


@pytest.mark.parametrize("border", [9, 60])
def test_the_environment_of_one_that_was_held_is_brought_to_where_it_was(games, border):
    """By hand: two steps, a quarter each, and one that is refused; rewards, parts and calls are kept with the row."""
    said = [
        called("climb", steps=1),
        called("calculator", expression="2+2") + called("climb", high=2),
        called("climb", steps=1),
    ]
    given = row(environment="Counted", height=9)
    made = gone_on(games, Engine(*said, "Enough."), border, row=given)
    assert_same(made, whole(games, Engine(*said, "Enough."), row=given))
    assert made.turn_rewards.tolist() == [0.25, 0.0, 0.25, 0.0] and made.call_counts.tolist() == [4]
    (outcome,) = outcomes(made)
    assert outcome["outcome"]["parts"] == {"left": 7.0, "falls": 0.0}


def test_one_that_replies_otherwise_when_it_is_begun_anew_has_failed(games):
    """And one that cannot be begun anew at all."""

    def changed(kept: Samples) -> Samples:
        return replace(kept, call_replies=kept.call_replies ^ 2)

    said = [called("climb", steps=1), "Enough."]
    given = row(environment="Stairs", height=9)
    assert STOP_REASONS[gone_on(games, Engine(*said), 20, row=given).stop_reason[0]] == Stop.STOP
    made = gone_on(games, Engine(*said), 20, changed, row=given)
    assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT
    made = gone_on(games, Engine(*said), 20, row=row(environment="Forgetful", height=9))
    assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT


class Counting(Engine):
    """Notes who is sampled, and how many at once; a request takes a while."""

    def __init__(self, *said: str):
        super().__init__(*said)
        self.now, self.most, self.order = 0, 0, []

    async def generate(self, requests, sampling):
        self.now += 1
        self.most = max(self.most, self.now)
        self.order.append((requests[0].sample_id, len(requests[0].prompt_ids) > len(PROMPT)))
        await asyncio.sleep(0.03)
        async for batch in super().generate(requests, sampling):
            self.now -= 1
            yield batch


def test_while_tools_work_others_are_sampled_and_a_turn_of_one_that_has_begun_goes_first():
    """2 slots: 0 and 1, others while tools work for those; answered, they go before 19, which waited longer."""
    talks = Conversations(spec(), TOKENS, slots=2)
    for answer in [talks._pool.call("sleeps", {"seconds": 0.05}) for _ in range(2)]:
        answer.result(60)  # its processes are there
    engine = Counting(called("sleeps", seconds=0.01), "Done.")

    async def run() -> int:
        requests = [Request(i, PROMPT, 11 + i) for i in range(20)]
        return len([made async for made in talks.generate(engine, requests, SAMPLING)])

    assert asyncio.run(run()) == 20 and engine.most == 2
    talks.close()
    first = [number for number, goes_on in engine.order if not goes_on]
    assert first == list(range(20))
    begun = {number: place for place, (number, goes_on) in enumerate(engine.order) if not goes_on}
    again = {number: place for place, (number, goes_on) in enumerate(engine.order) if goes_on}
    assert 2 <= begun[2] < again[0] and again[0] < begun[19] > again[1]


def test_one_that_is_ended_while_it_waits_for_a_seat_is_never_sampled():
    talks = Conversations(spec(), TOKENS, slots=1)
    engine = Counting("It is 408.")

    async def run() -> dict[int, Samples]:
        requests = [Request(i, PROMPT, 11, handle=i) for i in range(3)]
        found = talks.generate(engine, requests, SAMPLING)
        first = asyncio.ensure_future(anext(found))
        while not engine.order:
            await asyncio.sleep(0.01)
        await talks.end([1])
        made = [await first, *[each async for each in found]]
        return {int(one.sample_id[0]): one for one in made}

    made = asyncio.run(run())
    talks.close()
    assert [number for number, _ in engine.order] == [0, 2] == sorted(made)


def test_a_row_that_selects_no_tool_has_none(games):
    given = row(environment="Stairs", tool_selection=[], height=9)
    text = TOKENS.decode(whole(games, Engine(called("calculator", expression="1"), "Done."), row=given).token_ids)
    assert "Error: there is no tool 'calculator'; there are: climb" in text


def test_calls_that_nobody_can_make_have_no_name(games):
    said = [called("compass") + "<tool_call>\n{12*34}\n</tool_call>" + called("climb", steps=1), "Done."]
    made = whole(games, Engine(*said), row=row(environment="Stairs", height=9))
    assert last_calls(made) == [("", "refused"), ("", "unread"), ("climb", "not_called")]


def test_a_tokenizer_that_cannot_call_leaves_no_process_behind():
    before = set(threading.enumerate())
    silent = tokenizer("hermes", CODER.replace("tool_response", "result"))
    with pytest.raises(ConfigError, match="in no form that is known"):
        Conversations(spec(), silent)
    assert set(threading.enumerate()) <= before, "each of a pool has a process"


def test_an_engine_that_fails_ends_all_of_it(talks):
    class Broken(Engine):
        async def generate(self, requests, sampling):
            raise RuntimeError("the engine is asleep")
            yield

    with pytest.raises(RuntimeError, match="asleep"):
        asyncio.run(_one(talks, Broken(), SAMPLING))


class Dying(Engine):
    """Its processes die at a request, after which it answers none."""

    def __init__(self, *said: str, at: int):
        super().__init__(*said)
        self.at = at

    async def generate(self, requests, sampling):
        if len(self.asked) >= self.at:
            self.asked.append(requests[0])
            raise LostProcess("engine-0: vLLM's process below it died")
        async for batch in super().generate(requests, sampling):
            yield batch


def until_lost(talks: Conversations, engine: Engine, *requests: Request, kept=MappingProxyType({})) -> list[Samples]:
    """What is held of them; the loss comes behind it."""

    async def run() -> list[Samples]:
        held = []
        with pytest.raises(LostProcess, match="below it died"):
            async for batch in talks.generate(engine, requests, SAMPLING, kept):
                held.append(batch)
        return held

    return asyncio.run(run())


def test_an_engine_that_dies_costs_the_turn_that_it_sampled(talks):
    said = "First " + called("calculator", expression="12*34"), called("calculator", expression="1+1"), "It is 408."
    undisturbed = whole(talks, Engine(*said))
    request = Request(7, PROMPT, 11, prompt_id=3, group_id=2, max_tokens=SAMPLING.max_tokens)
    assert until_lost(talks, Dying(*said, at=0), request) == [], "nothing was sampled"
    for at in (1, 2):
        (held,) = until_lost(talks, Dying(*said, at=at), request)
        assert held.turn_counts.tolist() == [at + 1] and held.truncated.all() and not held.sampled[-1]
        nothing_new = until_lost(talks, Dying(*said, at=0), request, kept={7: held})
        assert nothing_new == [], "its former row is held where it was"
        other = Engine(*said)
        rest = replace(request, max_tokens=SAMPLING.max_tokens - int(held.response_lengths[0]))
        (made,) = asyncio.run(_kept_on(talks, other, rest, {7: held}))
        assert_same(made, undisturbed)
        assert len(other.asked) == 3 - at, "the turns before are not sampled again"


async def _kept_on(talks, engine, request, kept) -> list[Samples]:
    return [batch async for batch in talks.generate(engine, [request], SAMPLING, kept)]


def test_a_response_that_validation_asks_for_is_never_held(talks):
    said = called("calculator", expression="12*34"), "It is 408."
    assert until_lost(talks, Dying(*said, at=1), Request(7, PROMPT, 11, prompt_id=3)) == []


class DyingBesideOneThatHangs(Dying):
    """The response 8 has a turn, and then calls a tool that hangs."""

    def __init__(self, *said: str, at: int):
        super().__init__(*said, at=at)
        self.other = Engine(called("calculator", expression="1+1"), called("hangs"))

    async def generate(self, requests, sampling):
        calls = self.other if requests[0].sample_id == 8 else super()
        async for batch in calls.generate(requests, sampling):
            yield batch


def test_after_a_loss_tools_have_a_moment_to_answer_and_no_more():
    requests = [Request(n, PROMPT, 11, prompt_id=3, max_tokens=SAMPLING.max_tokens) for n in (7, 8)]
    said = called("calculator", expression="1+1"), called("sleeps", seconds=0.2), "It is 2."
    talks = Conversations(spec(timeout_s=500.0, max_seconds=600.0), TOKENS)
    held = until_lost(talks, Dying(*said, at=2), *requests)
    assert sorted(int(made.sample_id[0]) for made in held) == [7, 8]
    begun = time.monotonic()
    held = until_lost(talks, DyingBesideOneThatHangs(*said, at=2), *requests)
    assert {int(made.sample_id[0]): made.turn_counts.tolist() for made in held} == {7: [3], 8: [2]}
    assert time.monotonic() - begun < 60
    talks.close()


def test_a_conversation_is_handed_over_before_its_environment_has_begun():
    tools = ToolsSpec(("calculator",), str(Path(environment_classes.__file__)), environments=("Trouble",))
    talks = Conversations(replace(spec(timeout_s=500.0), tools=tools), TOKENS)
    talked = row(environment="Trouble", begins_after=300)
    request = Request(7, PROMPT, 11, prompt_id=3, max_tokens=SAMPLING.max_tokens, row=talked)
    begun = time.monotonic()
    (held,) = until_lost(talks, Dying(called("calculator", expression="1+1"), "It is 2.", at=1), request)
    assert held.turn_counts.tolist() == [2] and time.monotonic() - begun < 60
    talks.close()


def test_an_environment_that_cannot_be_repeated_begins_again_with_its_response(games):
    request = Request(7, PROMPT, 11, prompt_id=3, max_tokens=SAMPLING.max_tokens)
    engine = partial(Dying, called("climb", steps=1), "There.", at=1)
    (held,) = until_lost(games, engine(), replace(request, row=row(environment="Stairs")))
    assert held.turn_counts.tolist() == [2]
    assert until_lost(games, engine(), replace(request, row=row(environment="Forgetful"))) == []


def test_reasons_of_conversations_are_reasons_of_rows():
    assert {stop.value for stop in Stop} == set(STOP_REASONS)
    assert LEFT_OUT == REWARD_LEFT_OUT and UNJUDGED == REWARD_UNJUDGED
    assert dialect_of(TOKENS, {}).end == SAMPLING.stop_token_ids[0]
