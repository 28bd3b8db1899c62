"""Harnesses by name, on this host and in sandboxes: their command lines, files and variables, and how they end."""

import json
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from sandbox_images import BWRAP, root_folder
from test_conversations import TOKENS, spec
from test_endpoint import Engine, heard, lent_pools, row, rows, sampled_of, stop_of, text_of, turn  # noqa: F401

from mrl.acting import plain_loop
from mrl.acting.environment_pool import check_tools, try_environments
from mrl.acting.harnesses import merged, toml
from mrl.acting.offer import UnknownChoice
from mrl.acting.tool import ToolsSpec
from mrl.cluster.scoring import outcomes
from mrl.engine.conversations import Conversations
from mrl.errors import ConfigError

CALL = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "{}"}}}}\n</tool_call>'
# stands in for a program of others: writes down how it was started, and asks once
PROGRAM = """#!{python}
import json, os, sys, urllib.request
from pathlib import Path
home = Path(os.environ["HOME"])
files = {{str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}}
told = dict(argv=sys.argv[1:], input=sys.stdin.read(), files=files, cwd=os.getcwd(), home=str(home))
told["variables"] = dict(os.environ)
Path({folder!r}, "told").write_text(json.dumps(told))
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
body = json.dumps({{"messages": [{{"role": "user", "content": "Hm?"}}]}}).encode()
urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()
"""


def talks(tools: ToolsSpec, log: Path | None = None, **more) -> Conversations:
    given = spec(**{"max_prompt_length": 900, "max_turns": 4, "num_workers": 1, **more})
    return Conversations(replace(given, tools=tools), TOKENS, log)


def started(tmp_path: Path, name: str, **more) -> dict:
    """What a harness's program is told."""
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    tools = ToolsSpec((), network=True, harness=name, program=str(program), folders=(str(tmp_path),), **more)
    (made,) = rows(Engine("Four."), talks(tools), [row({})])
    assert stop_of(made) == "closed" and sampled_of(made) == "Four.<|im_end|>"
    context = json.loads((tmp_path / "told").read_text())
    assert context["cwd"] == f"{context['home']}/work" and not Path(context["home"]).exists()
    return context


def test_claude_code_is_told_of_the_endpoint_by_variables_and_of_the_task_by_its_input(tmp_path):
    context = started(
        tmp_path, "claude_code", harness_config={"permissions": {"deny": ["WebFetch"]}}, arguments=("--x",)
    )
    assert context["argv"] == ["-p", "--permission-mode", "bypassPermissions", "--output-format", "json", "--x"]
    assert context["input"] == "12*34?" and context["variables"]["ANTHROPIC_MODEL"] == "policy"
    assert context["variables"]["ANTHROPIC_API_KEY"] == context["variables"]["OPENAI_API_KEY"]
    assert json.loads(context["files"][".claude/settings.json"]) == {"permissions": {"deny": ["WebFetch"]}}
    assert json.loads(context["files"][".claude.json"])["hasCompletedOnboarding"] is True


def test_codex_is_told_of_the_endpoint_by_its_configuration(tmp_path):
    more = {"model_providers": {"mrl": {"request_max_retries": 0}}, "features": {"a.b": True}}
    context = started(tmp_path, "codex", harness_config=more)
    assert context["argv"] == ["exec", "--skip-git-repo-check", "-"] and context["input"] == "12*34?"
    config = tomllib.loads(context["files"][".codex/config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (context["variables"]["OPENAI_BASE_URL"], "responses")
    assert provider["env_key"] == "OPENAI_API_KEY" and provider["request_max_retries"] == 0
    assert config["features"] == {"a.b": True} and context["variables"]["CODEX_HOME"] == f"{context['home']}/.codex"


def test_mini_swe_agent_finds_the_task_in_its_configuration(tmp_path):
    context = started(tmp_path, "mini_swe_agent", harness_config={"agent": {"step_limit": 3}})
    name = context["argv"][context["argv"].index("-c", 2) + 1]
    config = yaml.safe_load(context["files"][name.removeprefix(f"{context['home']}/")])
    assert config["run"]["task"] == "12*34?" and config["model"]["model_name"] == "openai/policy"
    assert config["agent"] == {"cost_limit": 0, "mode": "yolo", "confirm_exit": False, "step_limit": 3}


def test_configurations_are_merged_and_written_as_others_read_them():
    values = {"a": 1, "b": {"c": [True, 2.5, "x"], "d e": {"f.g": 'q"\n\x7fü'}}, "": False}
    assert tomllib.loads(toml(values)) == values
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "d": {"e": 5}}) == {
        "a": {"b": 4, "c": 2},
        "d": {"e": 5},
    }


def test_a_program_that_is_not_there_is_told_with_its_cure():
    with pytest.raises(ConfigError, match=r"harness: codex needs the program .*npm install -g @openai/codex@"):
        check_tools(ToolsSpec((), network=True, harness="codex", program="no-such-codex"))


CHECKS = """#!{python}
import runpy, sys
from pydantic import BaseModel, ConfigDict
class Agent(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_turns: int = 1
class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    taskset: dict
    agent: Agent = Agent()
loop = runpy.run_path(sys.argv[1])
loop["main"].__globals__["environment"] = Config.model_validate  # verifiers reads its own by pydantic too
sys.argv[:] = sys.argv[1:]
loop["main"]()
"""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"taskset": {"id": "sums"}, "agent": {"max_turns": 4}}, None),
        ({"taskset": {"id": "sums"}, "agnet": {}}, "agnet: Extra inputs are not permitted"),
        (
            {"taskset": 3, "agent": {"max_turns": "many", "max_turn": 3}},
            "taskset: Input should be a valid dictionary; agent.max_turns: Input should be a valid integer.*; "
            "agent.max_turn: Extra",
        ),
    ],
)
def test_a_configuration_that_the_harnesss_package_does_not_take_is_told_before_the_first_row(tmp_path, config, why):
    program = tmp_path / "python"
    program.write_text(CHECKS.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    spec = ToolsSpec((), network=True, harness="verifiers", program=str(program), harness_config=config)
    if why is None:
        assert check_tools(spec).agent
        return
    with pytest.raises(ConfigError, match=f"harness_config: verifiers does not take it: {why}"):
        check_tools(spec)


def test_the_plain_loop_runs_what_is_called_until_nothing_is():
    tools = ToolsSpec((), network=True, harness="plain")
    said = (CALL.format("echo 408; exit 3"), "Four.")
    (made,) = rows(Engine(*said), talks(tools), [row({})])
    assert stop_of(made) == "closed"
    answer = "<tool_response>\n408\n\n(it ended by status 3)\n</tool_response>"
    assert text_of(made).endswith(turn(said[0]) + heard(answer) + turn(said[1]))


def test_the_plain_loop_ends_with_the_conversation(tmp_path):
    tools = ToolsSpec((), network=True, harness="plain")
    (made,) = rows(Engine(CALL.format("true")), talks(tools, tmp_path / "log", max_turns=2), [row({})])
    assert stop_of(made) == "turns" and not (tmp_path / "log").read_text()


def test_what_a_shell_prints_is_cut_and_what_hangs_is_ended():
    asked = json.dumps({"command": "echo began; sleep 60"})
    assert plain_loop.ran(asked, 0.3, 100) == "began\n\n(it was ended after 0.3 s)"
    flood = plain_loop.ran(json.dumps({"command": "yes | head -c 5000"}), 10.0, 100)
    assert len(flood) < 150 and "[4900 characters are left out]" in flood
    for bad in ("[]", "x", '{"command": 1}', "{}"):
        assert plain_loop.ran(bad, 1.0, 100).startswith("Error: ")


# --- in sandboxes

ASKS = (
    'wget -q -O- --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" '
    """--post-data '{"messages": [{"role": "user", "content": "Mend it."}]}' "$OPENAI_BASE_URL/chat/completions" """
    "> /tmp/a; "
)
MENDS = ASKS + (  # and edits the tests, which stay the image's own
    "grep -q Mended /tmp/a && grep -q '\"reward_key\": \"\"' && echo 'expr $1 + $2' > f; echo sh >> tests/check"
)
TEST = "sh tests/check"
WELL = {"passed": 1.0, "ended": 1.0}


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> str:
    return str(root_folder(tmp_path_factory.mktemp("image") / "root"))


def boxed(image: str, does: str, backend: dict | None = None) -> ToolsSpec:
    sandbox = {"image": image, "folder": "/repo", "max_memory_gib": 0.2, "max_disk_mib": 8.0} | (backend or {})
    return ToolsSpec((), command=("sh", "-c", does), in_sandbox=True, sandbox=sandbox)


def judged(
    image: str, does: str, log: Path | None = None, task: dict | None = None, backend: dict | None = None, **more
) -> tuple:
    """How a response ended, and what its environment said."""
    given = row({"task": {"test": TEST} | (task or {})})
    spec = boxed(image, does, backend)
    (made,) = rows(Engine("Mended."), talks(spec, log, **{"needs_reward": True, **more}), [given])
    (outcome,) = outcomes(made)
    return stop_of(made), outcome["outcome"]["reward"], outcome["outcome"]["parts"]


@BWRAP
def test_an_agent_in_a_sandbox_asks_the_endpoint_and_is_judged_by_the_rows_tests(image, tmp_path):
    """It has no network beside, and the key of the reward is not given to it."""
    # a command's standard input is what it is told
    assert judged(image, MENDS, tmp_path / "log") == ("closed", 1.0, WELL), (tmp_path / "log").read_text()
    assert judged(image, ASKS) == ("closed", 0.0, {"passed": 0.0, "ended": 1.0})
    nowhere = "wget -q -T 2 -O- http://127.0.0.2:80 && echo 'expr $1 + $2' > f; true; "
    assert judged(image, nowhere + ASKS)[1] == 0.0


@BWRAP
def test_an_agent_in_a_sandbox_is_given_the_rows_images_as_files_that_it_can_open(image, tmp_path):
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        file.write_text(f"picture {file.name}")
    reads = (
        """grep -q '"images": ."/tmp/images/1", "/tmp/images/2".' && [ "$(cat /tmp/images/1)" = "picture one" ] && """
        """[ "$(cat /tmp/images/2)" = "picture two" ] && """
    )
    given = row({"task": {"test": TEST}}) | {"images": [str(file) for file in files]}
    mends = reads + ASKS + "echo 'expr $1 + $2' > f"
    (made,) = rows(Engine("Mended."), talks(boxed(image, mends), tmp_path / "log", needs_reward=True), [given])
    (outcome,) = outcomes(made)
    assert outcome["outcome"]["reward"] == 1.0, (tmp_path / "log").read_text()


@BWRAP
def test_one_that_does_not_end_with_the_conversation_is_ended_and_judged(image):
    mends = ASKS + "echo 'expr $1 + $2' > f; sleep 4321"
    assert judged(image, mends, max_turns=1, timeout_s=1.0) == ("stop", 1.0, WELL)
    left = subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "sleep 4321" not in left


@BWRAP
@pytest.mark.parametrize(
    ("does", "task", "why"),
    [
        (ASKS + "exit 7", {}, "it ended by exit status 7"),
        (ASKS, {"image": "/not/there"}, "there is no root folder '/not/there'"),
        (ASKS, {"setup": "exit 1"}, "setup failed"),
    ],
)
def test_what_is_not_the_models_doing_is_a_failed_environment(image, tmp_path, does, task, why):
    assert judged(image, does, tmp_path / "log", task)[0] == "environment"
    assert why in (tmp_path / "log").read_text()


@BWRAP
def test_an_image_without_the_program_is_told_before_anything_starts(image):
    sandbox = {"image": image, "folder": "/repo"}
    lacks = ToolsSpec((), harness="codex", in_sandbox=True, sandbox=sandbox)
    offer = check_tools(lacks)
    assert offer.agent and offer.schemas({}) == ()
    with pytest.raises(UnknownChoice, match="has no `test`"):
        offer.schemas({"task": {}})
    with pytest.raises(ConfigError, match=r"in_sandbox: .*the image has no program 'codex': npm install"):
        try_environments(lacks, offer, [row({})])
    try_environments(boxed(image, ASKS), offer, [row({"task": {"test": TEST}})])
