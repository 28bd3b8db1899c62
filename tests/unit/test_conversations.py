"""Conversations in an engine's process: the engine is asked with the stored row up to there, and nothing is lost."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import environment_classes
import numpy as np
import pytest
import tool_functions
from dialect_templates import tokenizer

from mrl.data.dialects import dialect_of
from mrl.data.samples import CALL_REASONS, LEFT_OUT, STOP_REASONS, Sample, Samples, packed
from mrl.environments.tool import ToolsSpec, TurnsSpec
from mrl.flow.conversations import Conversations
from mrl.flow.scoring import outcomes
from mrl.reward.builtin_rules import environment
from mrl.reward.items import LEFT_OUT as REWARD_LEFT_OUT
from mrl.schedule.conversation import Stop
from mrl.schedule.segments import check_routes, continuation_seed
from mrl.vllm.requests import Request, Sampling

TOKENS = tokenizer("hermes")
FILE = str(Path(tool_functions.__file__))
NAMES = ("calculator", "hangs", "raises", "floods", "sleeps")
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


def spec(**more) -> TurnsSpec:
    given = {
        "max_turns": 4, "max_calls": 2, "max_seconds": 60.0, "max_answer_characters": 120, "timeout_s": 20.0,
        "num_workers": 2, **more,
    }  # fmt: skip
    return TurnsSpec(ToolsSpec(NAMES, FILE), **given)


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


def test_cut_anywhere_by_the_engine_it_is_the_same_row(talks):
    said = "First " + called("calculator", expression="12*34"), called("calculator", expression="1+1"), "It is 408."
    uncut = whole(talks, Engine(*said))
    for cut in (1, 3, 20):
        made = whole(talks, Engine(*said, cut=cut))
        for name in ("token_ids", "sampled", "turn_starts", "turn_stops", "turn_calls", "stop_reason"):
            np.testing.assert_array_equal(getattr(made, name), getattr(uncut, name), err_msg=name)


def test_budgets_end_it_each_by_its_own_reason(talks):
    again = called("calculator", expression="1+1")
    turns = whole(talks, Engine(*[again] * 9))
    assert STOP_REASONS[turns.stop_reason[0]] == Stop.TURNS and turns.turn_counts.tolist() == [4]
    assert turns.sampled[-1]
    short = Engine(again, "x" * 1000)
    with_limit = asyncio.run(_one(talks, short, Sampling(1.0, len(ids(again + "<|im_end|>")) + 5, ())))
    assert STOP_REASONS[with_limit.stop_reason[0]] == Stop.CONTEXT and with_limit.sampled.all()
    long = asyncio.run(_one(talks, Engine("x" * 1000), Sampling(1.0, 20, ())))
    assert STOP_REASONS[long.stop_reason[0]] == Stop.LENGTH and long.response_lengths.tolist() == [20]


async def _one(talks: Conversations, engine: Engine, sampling: Sampling) -> Samples:
    (made,) = [batch async for batch in talks.generate(engine, [Request(7, PROMPT, 11)], sampling)]
    return made


def test_a_tool_that_hangs_is_an_answer_or_the_end_by_whichever_comes_first():
    for timeout_s, seconds, stop in ((1.0, 60.0, Stop.STOP), (60.0, 1.0, Stop.SECONDS)):
        talks = Conversations(spec(timeout_s=timeout_s, max_seconds=seconds), TOKENS)
        made = asyncio.run(_one(talks, Engine(called("hangs"), "Done."), SAMPLING))
        assert STOP_REASONS[made.stop_reason[0]] == stop
        talks.close()


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


def row(**extra_info) -> dict:
    return {"data_source": "here", "ground_truth": "", "extra_info": extra_info}


ENVIRONMENTS = ("Stairs", "Counted", "Trouble")


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


def test_one_that_does_not_begin_has_failed_whatever_the_model_says(games):
    for said in (["It is 408."], [called("count"), "Done."]):
        made = whole(games, Engine(*said), row=row(environment="Trouble", begins=False))
        assert STOP_REASONS[made.stop_reason[0]] == Stop.ENVIRONMENT


def test_a_row_that_selects_no_tool_has_none(games):
    given = row(environment="Stairs", tool_selection=[], height=9)
    text = TOKENS.decode(whole(games, Engine(called("calculator", expression="1"), "Done."), row=given).token_ids)
    assert "Error: there is no tool 'calculator'; there are: climb" in text


def test_calls_that_nobody_can_make_have_no_name(games):
    said = [called("compass") + "<tool_call>\n{12*34}\n</tool_call>" + called("climb", steps=1), "Done."]
    made = whole(games, Engine(*said), row=row(environment="Stairs", height=9))
    assert last_calls(made) == [("", "refused"), ("", "unread"), ("climb", "not_called")]


def test_an_engine_that_fails_ends_all_of_it(talks):
    class Broken(Engine):
        async def generate(self, requests, sampling):
            raise RuntimeError("the engine is asleep")
            yield

    with pytest.raises(RuntimeError, match="asleep"):
        asyncio.run(_one(talks, Broken(), SAMPLING))


def test_reasons_of_conversations_are_reasons_of_rows():
    assert {stop.value for stop in Stop} == set(STOP_REASONS)
    assert LEFT_OUT == REWARD_LEFT_OUT
    assert dialect_of(TOKENS, {}).end == SAMPLING.stop_token_ids[0]
