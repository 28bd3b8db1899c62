"""mrl explain asks tools again, and says whose answers a run's responses have."""

import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from report_run import World, write_run

from mrl.data.samples import Sample, Turn, TurnCall, packed
from mrl.errors import EnvironmentFault
from mrl.record.sample_files import write_samples
from mrl.tools.explain import asked_tools
from mrl.tools.explain.asked_tools import ToolAsker, of_tools, tool_asker
from mrl.tools.explain.replay import StoredRun

ROOT = Path(__file__).resolve().parents[2]
TOOLS = '''
import random
import time


def product(left: int, right: int) -> int:
    """Multiplies.

    Args:
        left: a number
        right: a number
    """
    return left * right


def coin(of: int) -> str:
    """Throws a coin.

    Args:
        of: which one
    """
    return random.choice("ht")


def order(of: int) -> str:
    """Lists names.

    Args:
        of: how many
    """
    return str(set("abcdefgh"))


def now() -> str:
    """Tells the time."""
    return str(time.perf_counter_ns())
'''
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call><|im_end|>'
CONTEXT = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """What asks a run's tools, and what writes a step of it: name, arguments, answer and reason of each response."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_tool_world

    folder = tmp_path_factory.mktemp("asked")
    (folder / "my_tools.py").write_text(TOOLS)
    settings = ["rollout.turns.tools=[product,now,coin,order]", f"rollout.turns.path={folder / 'my_tools.py'}"]
    run = write_run(folder / "run", World(settings=[*settings, "data.max_response_length=96"]))
    tokenizer = make_tool_world.make_tokenizer()
    tokenizer.save_pretrained(folder / "model")

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def write(step, said):
        samples = []
        for number, (name, arguments, answer, reason) in enumerate(said):
            parts = [ids(CALL.format(name, arguments)), ids(CONTEXT.format(answer)), ids("4<|im_end|>")]
            sampled = np.repeat([True, False, True], [len(part) for part in parts])
            samples.append(
                Sample(
                    prompt_id=number, group_id=number, sample_id=number, seed=0, prompt_ids=ids("4*4="),
                    response_ids=np.concatenate(parts), rollout_log_probs=np.zeros(len(sampled)), stop_reason="stop",
                    weight_version=0, sampled=sampled, calls=(TurnCall(name, reason),),
                    turns=(Turn(0, "stop", calls=1), Turn(len(parts[0]) + len(parts[1]), "stop")),
                )
            )  # fmt: skip
        rewards = [{"score": 0.0, "reason": "ok"}] * len(samples)
        write_samples(run.samples, step, [packed(samples)], rewards, turns=True)

    asker = tool_asker(StoredRun.read(run.path), repeats_calls=True)
    assert isinstance(asker, ToolAsker)
    with asker:
        yield asker, write


def calls_of(numbers, answers):
    return [
        ("product", f'{{"left": {n}, "right": 7}}', answer, "ok") for n, answer in zip(numbers, answers, strict=True)
    ]


def test_answers_of_other_calls_are_told_from_right_ones_and_from_others(asked):
    asker, write = asked
    numbers = [3, 14, 159, 26]
    right = [7 * number for number in numbers]
    write(1, calls_of(numbers, right))
    assert len(asker.turns(1)) == 4 and of_tools(1, asker) is None
    write(2, calls_of(numbers, [right[-1], *right[:-1]]))
    found = of_tools(2, asker)
    assert found.is_fault and found.cause == "tools answered other calls than they were asked"
    assert found.evidence.startswith("4 of 4 turns") and "responses 0, 1, 2, 3" in found.evidence


def test_answers_that_no_call_gives_now_are_told_where_there_are_many_of_a_tool_that_does_not_draw(asked):
    asker, write = asked
    write(3, calls_of(range(40), [*(7 * number for number in range(37)), 1001, 1002, 1003]))
    assert of_tools(3, asker) is None  # 3 of 40
    write(3, calls_of(range(20), [*(7 * number for number in range(17)), 1001, 1002, 1003]))
    found = of_tools(3, asker)
    assert not found.is_fault and found.cause == "tools answered otherwise than they do now"
    assert "3 of 20 turns" in found.evidence
    write(3, calls_of([*range(17), 3, 3, 3], [*(7 * number for number in range(17)), 1001, 1002, 1003]))
    assert of_tools(3, asker) is None  # the run itself has other answers to one call


@pytest.mark.parametrize("name", ("coin", "order"))
def test_a_tool_whose_answers_are_not_a_function_of_the_call_is_left_out_whole(asked, name):
    """`order` prints a set: what hashes give, which each process has of its own."""
    asker, write = asked
    calls = [(name, f'{{"of": {number % 3}}}', answer, "ok") for number, answer in enumerate("hthhtthtabba")]
    write(5, calls)
    assert len(asker.turns(5)) == len(calls)
    assert asker.answers(asker.turns(5)) == {} and of_tools(5, asker) is None


def test_what_tools_do_not_repeat_and_calls_that_failed_are_left_out(asked):
    asker, write = asked
    write(4, [("now", "{}", "12", "ok"), ("product", '{"left": 1, "right": 2}', "Error: too slow", "timeout")])
    assert [turn.calls[0].name for turn in asker.turns(4)] == ["now"]
    assert of_tools(4, asker) is None


def test_runs_without_tools_and_tools_that_use_the_network_are_not_asked(tmp_path):
    assert tool_asker(StoredRun.read(write_run(tmp_path / "plain" / "run").path)) == ""
    for number, acts in enumerate(("network=true", f"folders=[{tmp_path}]")):
        settings = ["rollout.turns.tools=[calculator]", f"rollout.turns.{acts}", "data.max_response_length=96"]
        run = StoredRun.read(write_run(tmp_path / str(number) / "run", World(settings=settings)).path)
        assert "are not asked again" in tool_asker(run) and acts.split("=")[0] in tool_asker(run)


def test_where_no_file_is_kept_from_functions_they_are_not_asked_unless_one_says_so(asked, monkeypatch):
    asker, _ = asked
    monkeypatch.setattr(asked_tools, "landlock_version", lambda: 0)
    assert "no Landlock" in tool_asker(asker._run)
    monkeypatch.setattr(asked_tools, "ToolAsker", lambda run, end: end)
    assert tool_asker(asker._run, 4.0, repeats_calls=True) == 4.0


def test_calls_end_when_their_time_does(asked, monkeypatch):
    asker, write = asked
    write(6, calls_of([901, 902], [1, 2]))
    monkeypatch.setattr(asker, "_pools", [SimpleNamespace(call=lambda *_: Future())])  # of calls that never end
    for left in ([0.0], [1.0, 0.01]):  # none from the start; gone while the first call is waited for
        told = iter(left)
        monkeypatch.setattr(asker, "_left", lambda told=told: next(told))
        with pytest.raises(EnvironmentFault, match="share of the time"):
            of_tools(6, asker)
