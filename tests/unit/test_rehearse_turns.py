"""Rehearsals of runs whose responses have several turns: the user's own tools and environments, called in the place of
random weights, which call nothing.
"""

import asyncio
from pathlib import Path

import environment_classes
import numpy as np
import tool_functions
from test_conversations import PROMPT, SAMPLING, TOKENS, Engine, check_asked, last_calls, spec

from mrl.acting.named import resolve_tools
from mrl.acting.tool import ToolsSpec
from mrl.config.load import load_config
from mrl.data.dataset import load_tokenizer
from mrl.data.samples import STOP_REASONS
from mrl.driver.assemble_data import load_training, offer_of
from mrl.engine.conversations import Conversations
from mrl.engine.requests import Request, turns_spec
from mrl.tools.rehearse.compose import NO_AGENT, NOT_HERE, WorkFolder
from mrl.tools.rehearse.made_up_calls import MadeUpCalls, made_up_calls
from mrl.tools.rehearse.prepare import prepare

TINY = "parallel_configs/tiny-moe/cpu.yaml"
CLASSES = Path(environment_classes.__file__)


def prepared(folder: Path, turns: str, *more: str):
    rewarded = ["reward.function=environment", "reward.custom_reward_function=null"]
    files = ["data.train_files=[nowhere.jsonl]", "data.val_files=[]", "model.path=Qwen/Qwen3-30B-A3B"]
    files += ["trainer.test_freq=-1", "trainer.val_before_train=false"]
    config = load_config(TINY, None, [f"rollout.turns={turns}", *rewarded, *files, *more]).config
    work = WorkFolder(folder)
    return prepare(config, work, cpus=2), work


def test_a_rehearsal_has_the_users_own_tools_and_environments(tmp_path):
    turns = f"{{tools: [calculator], environments: [Stairs, Counted], path: {CLASSES}, max_turns: 9}}"
    found, work = prepared(tmp_path / "work", turns)
    config = load_config(work.config).config
    assert config.rollout.turns.path == str(CLASSES) and config.rollout.turns.max_turns == 3
    assert not [each for each in found.rehearsal.out_of_reach if each.switch == "rollout.turns"]
    tokenizer = load_tokenizer(str(work.model))
    offer = offer_of(turns_spec(config.rollout.turns, config.data).tools, config.reward)
    stream = load_training(config.data, 0, tokenizer, offer)
    assert stream.prompts.report.bad == stream.prompts.report.filtered == 0
    names = [prompt.acting_row["extra_info"]["environment"] for prompt in stream.prompts]
    assert names.count("Stairs") == names.count("Counted") == len(names) // 2


def test_where_its_file_is_not_here_responses_are_of_one_turn_and_it_says_so(tmp_path):
    found, work = prepared(tmp_path / "work", "{environments: [Mine], path: nowhere.py}")
    assert load_config(work.config).config.rollout.turns is None
    assert [each.why for each in found.rehearsal.out_of_reach if each.switch == "rollout.turns"] == [NOT_HERE]


def test_calls_that_are_made_up_fit_what_is_called():
    names = ("calculator", "lookup", "count", "sleeps", "raises")
    tools = resolve_tools(ToolsSpec(names, str(Path(tool_functions.__file__))))
    functions = {name: tool.schema["function"] for name, tool in tools.items()}
    calls = [call for turn in (1, 2, 3) for call in made_up_calls(functions, turn, 2)]
    assert [call.name for call in calls] == [*names, "calculator"]
    assert not any(tools[call.name].problem(call.arguments) for call in calls)
    assert [call.name for call in made_up_calls(functions, 1, 99)] == list(names)


def test_an_agent_is_not_started_in_a_rehearsal_and_it_says_so(tmp_path):
    turns = "{network: true}"
    agent = ["rollout.endpoint=true", "rollout.agent={command: [python, agent.py]}"]
    found, work = prepared(tmp_path / "work", turns, *agent)
    rollout = load_config(work.config).config.rollout
    assert (rollout.turns, rollout.endpoint, rollout.agent) == (None, False, None)
    assert [each.why for each in found.rehearsal.out_of_reach if each.switch == "rollout.turns"] == [NO_AGENT]


def test_in_a_rehearsal_each_turn_but_the_last_calls_and_nothing_that_was_sampled_is_another():
    given = spec(max_turns=3, max_calls=1, names=("calculator", "raises"))
    talks = Conversations(given, TOKENS, reader=MadeUpCalls)
    engine = Engine("One.", "Two.", "Three.")

    async def run():
        request = Request(7, PROMPT, 11, prompt_id=3, group_id=2)
        return [batch async for batch in talks.generate(engine, [request], SAMPLING)]

    (made,) = asyncio.run(run())
    talks.close()
    check_asked(engine, made)
    said = TOKENS.decode(np.concatenate(list(made.responses()))[made.sampled])
    assert said == "One.<|im_end|>Two.<|im_end|>Three.<|im_end|>"
    assert last_calls(made) == [("calculator", "ok"), ("raises", "raised")]
    assert STOP_REASONS[made.stop_reason[0]] == "stop" and made.turn_counts.tolist() == [3]
