"""verl's classes of tools without verl: its file of them, their lives, and what of them is refused by name."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from test_import_verl import from_overrides

from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.offer import name_of
from mrl.acting.python_tool import fault
from mrl.acting.sandbox import PythonLimits
from mrl.acting.tool import ToolsSpec
from mrl.acting.verl_environment import verl_environment
from mrl.acting.verl_tool_config import GSM8K, SANDBOX, SEARCH_R1, VERL_TOOLS, read_tool_config
from mrl.config.load import load_config
from mrl.data.samples import KnownImage
from mrl.driver.preflight import plug_in_lines, plug_ins
from mrl.errors import ConfigError
from mrl.reward.resolve import load_module
from mrl.reward.verl_modules import default_score

SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts on.",
        "parameters": {
            "type": "object",
            "properties": {"by": {"type": "integer", "description": "how far"}},
            "required": ["by"],
        },
    },
}
ANSWER = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Judges.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}
CODE = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def written(folder: Path, *tools: dict, file: str = "config/tools.yaml") -> str:
    """verl's file of these tools, with the classes of tests in a package of the folder."""
    (folder / "mine").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("verl_classes.py"), folder / "mine" / "classes.py")
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"tools": list(tools)}))
    return str(path)


def spec(path: str, **more) -> ToolsSpec:
    return ToolsSpec((), environments=(VERL_TOOLS,), tool_config=path, **more)


def counter(folder: Path) -> dict:
    config = {"type": "native", "most": 100, "log": str(folder / "released.txt")}
    return {"class_name": "mine.classes.Counter", "config": config, "tool_schema": SCHEMA}


OLD = {"class_name": "mine.classes.Old", "config": {}}
SMALL = {"tools_kwargs": {"count": {"create_kwargs": {"start": 3}, "execute_kwargs": {"factor": 2}}, "shout": None}}
LARGE = {"tools_kwargs": {"count": {"create_kwargs": {"start": 90}}}}


def test_an_instance_lives_as_long_as_its_response_and_is_told_of_the_row(tmp_path):
    path = written(tmp_path, counter(tmp_path), OLD)
    with EnvironmentPool(spec(path), 1, 30.0) as pool:
        assert [name_of(schema) for schema in pool.offer.environments[VERL_TOOLS]] == ["count", "shout"]
        assert pool.offer.environments[VERL_TOOLS][0] == SCHEMA
        small, large = (pool.session(VERL_TOOLS, {"extra_info": each}, 0) for each in (SMALL, LARGE))
        first = small.step("count", {"by": 1}).result(60)
        assert first[:4] == ("ok", "at 5", 0.25, {"count": 5.0})
        assert large.step("count", {"by": 2}).result(60).text == "at 92"
        assert small.step("count", {"by": 1}).result(60)[1:4] == ("at 7", 0.25, {"count": 7.0})
        assert small.step("shout", {"word": "ah"}).result(60)[:4] == ("ok", "AH", 0.0, {"shout": 0.0})
        assert small.step("count", {"by": "a"}).result(60).reason == "refused"
        failed = large.step("count", {"by": 50}).result(60)
        assert failed[:3] == ("ok", "Error: count: ValueError: too far", 0.0), "a tool that raises costs its call"
        assert not failed.failed
        small.close()
        large.close()
        pool.session(VERL_TOOLS, {"extra_info": {}}, 0).ready.result(60)
    assert (tmp_path / "released.txt").read_text().split() == ["7", "142"]


def test_a_picture_is_a_failure_and_no_answer(tmp_path):
    path = written(tmp_path, OLD | {"class_name": "mine.classes.Pictures"})
    with EnvironmentPool(spec(path), 1, 30.0) as pool:
        answer = pool.session(VERL_TOOLS, {"extra_info": {}}, 0).step("shout", {"word": "a"}).result(60)
    assert answer.failed and "picture" in answer.text


def test_a_model_that_sees_is_given_the_pictures_of_answers_and_tools_that_of_the_prompt(tmp_path):
    picture = Image.new("RGB", (40, 20), "red")
    picture.save(tmp_path / "of the prompt.png")
    seen: list[bytes] = []

    def see(images):
        seen.extend(images)
        return [KnownImage("a", (1, 2, 2), 1)] * len(images)

    path = written(tmp_path, OLD | {"class_name": "mine.classes.Crops"})
    row = {"extra_info": {}, "images": [str(tmp_path / "of the prompt.png")]}
    with EnvironmentPool(replace(spec(path), sees=True), 1, 30.0, see=see) as pool:
        session = pool.session(VERL_TOOLS, row, 0)
        shown = session.step("shout", {"word": "crop"}).result(60)
        film = session.step("shout", {"word": "film"}).result(60)
    assert (shown.text, shown.reward, shown.images) == ("a part", 0.5, [KnownImage("a", (1, 2, 2), 1)])
    (part,) = seen
    assert np.array_equal(np.asarray(Image.open(BytesIO(part))), np.asarray(picture.crop((0, 0, 8, 16))))
    assert film.text.startswith("Error: shout: TypeError: it answers with a video") and not film.failed


def test_a_tool_is_given_the_prompts_picture_only_where_its_create_takes_one(tmp_path):
    Image.new("RGB", (40, 20)).save(tmp_path / "picture.png")
    said = {}
    with_own = {"tools_kwargs": {"shout": {"create_kwargs": {"image": "its own"}}}}
    of_parquet = {"tools_kwargs": {"shout": {"create_kwargs": {"image": None}}}}  # another row has one
    for name, extra_info in (("Strict", {}), ("Old", {}), ("Named", of_parquet), ("Named", with_own)):
        path = written(tmp_path, OLD | {"class_name": f"mine.classes.{name}"})
        row = {"extra_info": extra_info, "images": [str(tmp_path / "picture.png")]}
        with EnvironmentPool(replace(spec(path), sees=True), 1, 30.0) as pool:
            answer = pool.session(VERL_TOOLS, row, 0).step("shout", {"word": "a"}).result(60)
        said[name, extra_info is with_own] = answer.text
    assert said == {
        ("Strict", False): "A", ("Old", False): "A", ("Named", False): "(40, 20)", ("Named", True): "its own"
    }  # fmt: skip


def test_verls_judge_of_gsm8k_has_a_stand_in(tmp_path):
    """Texts and rewards are those of verl's class: a second answer that is no better costs 0.05."""
    path = written(tmp_path, {"class_name": GSM8K, "config": {"type": "native"}, "tool_schema": ANSWER})
    row = {"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}}
    with EnvironmentPool(spec(path), 1, 30.0) as pool:
        session = pool.session(VERL_TOOLS, row, 0)
        replies = [
            session.step("calc_gsm8k_reward", {"answer": each}).result(60) for each in ("7", "72", "#### 72", "")
        ]
    assert [(each.text, each.reward) for each in replies] == [
        ("Current parsed answer='7' reward=0.0", -0.05), ("Current parsed answer='72' reward=1.0", 0.0),
        ("Current parsed answer='#### 72' reward=1.0", -0.05), ("Current parsed answer='' reward=0.0", -0.05),
    ]  # fmt: skip
    assert [each.parts["calc_gsm8k_reward"] for each in replies] == [0.0, 1.0, 1.0, 0.0]


REWARD = "reward.custom_reward_function.path"
SHAPED = """from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.gsm8k import compute_score as judged

def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict"):
    shaped = judged(solution_str, ground_truth, method, 0.1, 2.0) + 0.5 * ("<tool_call>" in solution_str)
    return {"score": shaped, "plain": default_compute_score(data_source, solution_str, ground_truth, None, "url")}
"""


@pytest.mark.parametrize(
    ("said", "truth", "method", "shaped", "plain"),
    [
        ("so #### 1,234", "1234", "strict", 2.0, 1.0),
        ("<tool_call> #### 7", "1234", "strict", 0.6, 0.0),
        ("it is 1234", "1234", "strict", 0.0, 0.0),
        ("#### 1000", "1,000", "strict", 0.1, 0.0),
        ("it is 1234 .", "1234", "flexible", 2.0, 0.0),
        ("no number.", "5", "flexible", 0.1, 0.0),
        ("none", "1234", "flexible", 0.0, 0.0),
    ],
)
def test_a_reward_may_use_verls_scores(tmp_path, said, truth, method, shaped, plain):
    """As verl's examples shape the reward of gsm8k; values are those of its compute_score."""
    (tmp_path / "shaped.py").write_text(SHAPED)
    scored = load_module(tmp_path / "shaped.py", REWARD).compute_score("openai/gsm8k", said, truth, method=method)
    assert scored == {"score": pytest.approx(shaped), "plain": plain}


@pytest.mark.parametrize("source", ["math", "math_dapo", "aime2024"])
def test_verls_default_judges_a_source_by_the_rule_that_verl_takes(source):
    assert default_score(source, "Answer: 6", "5") == {"score": -1.0, "acc": False, "pred": "6"}
    assert default_score(source, "\\boxed{5}", "5") == {"score": 1.0, "acc": True, "pred": "5"}
    for unknown in ("gsm8k", "exact_match", "multiple_choice", "codecontests"):
        with pytest.raises(NotImplementedError):
            default_score(unknown, "5", "5")


def loaded_apart(folder: Path, text: str) -> str:
    """Loads the text as a reward's file in a process of its own; what it prints, or the refusal."""
    (folder / "own.py").write_text(text)
    code = (
        "import sys\nfrom pathlib import Path\nfrom mrl.errors import ConfigError\n"
        "from mrl.reward.resolve import load_module\n"
        f"try:\n    load_module(Path(sys.argv[1]), {REWARD!r})\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder / "own.py")], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_a_verl_that_the_file_brings_is_taken(tmp_path):
    gsm8k = tmp_path / "checkout" / "verl" / "utils" / "reward_score"
    gsm8k.mkdir(parents=True)
    (gsm8k / "gsm8k.py").write_text("def compute_score(*_):\n    return 42.0\n")
    text = "import sys\nsys.path.insert(0, CHECKOUT)\n" + "from verl.utils.reward_score.gsm8k import compute_score\n"
    text = text.replace("CHECKOUT", repr(str(tmp_path / "checkout")))
    assert loaded_apart(tmp_path, text + "print(compute_score('', ''))") == "42.0"
    other = text.replace(".gsm8k import compute_score", ".math_dapo import compute_score")
    assert loaded_apart(tmp_path, other).endswith("No module named 'verl.utils.reward_score.math_dapo'")


def test_a_module_of_verl_that_is_not_replaced_is_named_with_those_that_are(tmp_path):
    said = loaded_apart(tmp_path, "from verl.utils.reward_score import prime_code")
    assert "cannot import name 'prime_code'" in said and "of verl mrl replaces only" in said
    said = loaded_apart(tmp_path, "import verl.workers.fsdp_workers")
    assert "No module named 'verl.workers'" in said and "verl.utils.reward_score.gsm8k" in said
    looked = "import importlib.util\nprint(importlib.util.find_spec('verl').name)\nimport verl"
    assert loaded_apart(tmp_path, looked) == "verl"


@pytest.mark.skipif(bool(fault()), reason="this machine cannot confine a program")
def test_verls_sandbox_is_the_one_of_the_tool_python(tmp_path):
    path = written(tmp_path, {"class_name": SANDBOX, "config": {"sandbox_fusion_url": "x"}, "tool_schema": CODE})
    with EnvironmentPool(spec(path, python={"max_seconds": 10.0}), 1, 30.0) as pool:
        session = pool.session(VERL_TOOLS, {"extra_info": {}}, 0)
        assert session.step("code_interpreter", {"code": "print(6*7)"}).result(60).text == "42\n"
        refused = session.step("code_interpreter", {"code": "import os; os.fork()"}).result(60)
        assert "PermissionError" in refused.text and not refused.failed


class Service(BaseHTTPRequestHandler):
    """Finds for each query what it asks for, as Search-R1's service answers."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [
            [{"document": {"contents": f"{each}\nof {asked['topk']}"}, "score": 1}] * 2 for each in asked["queries"]
        ]
        body = json.dumps({"result": found}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Says nothing."""


def test_verls_search_asks_its_service_and_answers_in_its_words(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {"type": "native", "retrieval_service_url": f"http://127.0.0.1:{server.server_port}/", "topk": 2}
        parameters = {"type": "object", "properties": {"query_list": {"type": "array"}}, "required": ["query_list"]}
        function = {"name": "search", "description": "Finds.", "parameters": parameters}
        schema = {"type": "function", "function": function}
        path = written(tmp_path, {"class_name": SEARCH_R1, "config": config, "tool_schema": schema})
        with EnvironmentPool(spec(path, network=True), 1, 30.0) as pool:
            session = pool.session(VERL_TOOLS, {"extra_info": {}}, 0)
            answers = [session.step("search", {"query_list": each}).result(60).text for each in (["a", "b"], [])]
        server.shutdown()
    one = "Doc 1 (Title: {0})\nof 2\n\nDoc 2 (Title: {0})\nof 2"
    assert json.loads(answers[0]) == {"result": one.format("a") + "\n---\n" + one.format("b")}
    assert "'query_list' is missing" in answers[1]
    values, lost = imported(f"tool_config_path={path}")
    assert not lost and values["rollout.turns.network"] is True


NEEDS = "from verl.tools.base_tool import BaseTool\nfrom verl.utils.dataset import helper\nclass A(BaseTool): ...\n"
REFUSED = {
    "no file": (None, "No such file"),
    "no list": ("tool: 1", "has no list `tools`"),
    "no class": ("tools: [{config: {}}]", "tool 1 has no class_name"),
    "of verl": ("tools: [{class_name: verl.tools.geo3k_tool.Geo3kTool, config: {type: native}}]", "has no replacement"),
    "without a network": (f"tools: [{{class_name: {SEARCH_R1}, config: {{type: native}}}}]", "network to true"),
    "of MCP": ("tools: [{class_name: a.B, config: {type: mcp}}]", "is of type mcp"),
    "nowhere": ("tools: [{class_name: nowhere.B, config: {}}]", "no file was found for the module nowhere"),
    "no such class": ("tools: [{class_name: mine.classes.Nobody}]", "has no attribute 'Nobody'"),
    "needs verl": (
        "tools: [{class_name: needs.A, config: {}}]",
        "needs verl.utils.dataset, .*of verl mrl",
    ),
    "no schema": ("tools: [{class_name: plain.A, config: {}}]", "has no tool_schema"),
    "odd schema": (
        yaml.safe_dump({"tools": [{"class_name": "mine.classes.Old", "tool_schema": SCHEMA | {"function": 1}}]}),
        "it cannot be created",
    ),
    "two of a name": (
        "tools: [{class_name: mine.classes.Old}, {class_name: mine.classes.Pictures}]",
        "two tools have the name",
    ),
    "no YAML": ("tools: [", "tools.yaml"),
}


def test_files_that_run_for_it_are_named_with_their_digest(tmp_path):
    path = written(tmp_path, counter(tmp_path), OLD, {"class_name": GSM8K})
    turns = f"rollout.turns={{environments: [verl_tools], tool_config_path: {path}}}"
    found = plug_ins(load_config("parallel_configs/tiny-moe/cpu.yaml", None, [turns]).config)
    named = [(each["key"].rpartition(".")[2], each["path"]) for each in found if "turns" in each["key"]]
    files = (Path(path), tmp_path / "mine" / "classes.py")
    assert named == [("tool_config_path", str(file.resolve())) for file in files]
    digest = hashlib.sha256(files[1].read_bytes()).hexdigest()
    assert found[-1]["sha256"] == digest and digest in plug_in_lines(found)[-1]


@pytest.fixture
def apart(monkeypatch):
    """What a worker loads is not left in this process."""
    others = [place for place in sys.path if not any(Path(place).glob("mine*"))]  # where other tests have one
    monkeypatch.setattr(sys, "path", others)
    for name in written_modules():  # of other tests
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in written_modules():
        del sys.modules[name]


def written_modules():
    return [name for name in sys.modules if name.partition(".")[0] in ("verl", "mine", "needs", "plain")]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(name, tmp_path, apart):
    text, why = REFUSED[name]
    path = Path(written(tmp_path, file="tools.yaml"))
    (tmp_path / "needs.py").write_text(NEEDS)
    (tmp_path / "plain.py").write_text("from verl.tools.base_tool import BaseTool\nclass A(BaseTool): ...\n")
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=why) as refused:
        verl_environment(str(path), PythonLimits(), network=False)
    assert str(path) in str(refused.value)


MULTI = "actor_rollout_ref.rollout.multi_turn."


def imported(*words: str):
    out = from_overrides(f"{MULTI}enable=True", *(f"{MULTI}{word}" for word in words))
    lost = [(each.key.removeprefix(MULTI), each.why) for each in out.of("unsupported") if "turn" in each.key]
    return {key: value for key, value in out.values.items() if "turns" in key}, lost


@pytest.mark.parametrize("entry", [counter(Path()), {"class_name": GSM8K, "config": {}, "tool_schema": ANSWER}])
def test_the_file_is_carried_over_where_its_classes_can_be_had(entry, tmp_path):
    path = written(tmp_path, entry)
    values, lost = imported(f"tool_config_path={path}", "max_parallel_calls=2", "format=hermes")
    assert not lost and values == {
        "rollout.turns.tool_config_path": path, "rollout.turns.environments": [VERL_TOOLS],
        "rollout.turns.max_calls": 2, "rollout.turns.max_turns": 1000, "rollout.turns.max_answer_characters": 256,
    }  # fmt: skip
    assert read_tool_config(Path(path))[0].class_name == entry["class_name"]


def test_a_class_that_cannot_be_had_is_a_loss_by_name(tmp_path):
    path = written(tmp_path, {"class_name": "verl.tools.geo3k_tool.Geo3kTool", "config": {"type": "native"}})
    values, lost = imported(f"tool_config_path={path}")
    ((key, why),) = lost
    assert not values and key == "enable" and "verl.tools.geo3k_tool.Geo3kTool" in why
