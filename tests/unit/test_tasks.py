"""Tasks whose tests are the reward: what the agent did is judged by the image's own tests, and nothing else counts."""

import io
import json
import tarfile
from dataclasses import replace

import pytest
from sandbox_images import BWRAP, root_folder

from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.offer import UnknownChoice
from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.sandbox import SandboxError, SandboxSpec
from mrl.acting.sandboxes.task_rows import harbor, r2e_gym, swe_bench
from mrl.acting.sandboxes.tasks import Task, carried, statuses
from mrl.acting.tool import ToolsSpec

SPEC = SandboxSpec(max_memory_gib=0.2, max_processes=40, max_disk_mib=16.0, max_test_seconds=1.0)
TEST = "sh tests/check"
MENDED = "echo 'expr $1 + $2' > f"


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> str:
    return str(root_folder(tmp_path_factory.mktemp("image") / "root"))


@pytest.fixture(scope="module")
def broker() -> Broker:
    return Broker(SPEC)


def judged(broker, image, does: str, **more) -> tuple[float, dict[str, float]]:
    task = Task.of({"task": {"image": image, "folder": "/repo", "test": TEST} | more})
    with task.begin(broker) as sandbox:
        sandbox.shell(does)
        return task.judged(broker, sandbox)


WELL = (1.0, {"passed": 1.0, "ended": 1.0})
BADLY = (0.0, {"passed": 0.0, "ended": 1.0})
HUNG = (0.0, {"passed": 0.0, "ended": 0.0})
# what an agent does, the task beside the usual one, and what comes of it
DONE = {
    "nothing": ("true", {}, BADLY),
    "mends": (MENDED, {}, WELL),
    "mends in a new file": ("echo 'expr $1 + $2' > g; ln -sf g f", {}, WELL),
    "removes what it should mend": ("rm f", {}, BADLY),
    "removes what is in the way": ("rm in-the-way", {"files": {"in-the-way": ""}, "test": "[ ! -e in-the-way ]"}, WELL),
    "edits the tests": ("echo true > tests/check", {}, BADLY),
    "removes the tests": ("rm -r tests", {}, BADLY),
    "replaces the folder of the tests by a link": (
        "rm -r tests; mkdir o; echo true > o/check; ln -s o tests",
        {},
        BADLY,
    ),
    "puts a file over the tests": ("mkdir -p x; ln tests/check x/l; echo true > x/l", {}, BADLY),
    "adds a configuration of the tests": (
        "echo true > conftest.py",
        {"test": "[ ! -e conftest.py ] && false"},
        BADLY,
    ),
    "stands in for the runner": (
        "mkdir pytest; echo 1 > pytest/__init__.py; echo 1 > json.py",
        {"test": "[ ! -e pytest ] && [ ! -e json.py ]"},
        WELL,
    ),
    "writes the reward": (
        "mkdir -p /tmp/verifier; echo 1 > /tmp/verifier/reward.txt; echo 1 > reward.txt",
        {"reward_file": "/tmp/verifier/reward.txt", "test": "true"},
        BADLY,
    ),
    "leaves a pipe and a link out of its folder": (
        f"mkfifo p; ln -s /etc/passwd e; ln -s ../../.. u; {MENDED}",
        {},
        WELL,
    ),
    "fills its folder": ("dd if=/dev/zero of=big bs=1M count=64", {}, BADLY),
    "makes the tests hang": ("echo 'sleep 60' > f", {}, HUNG),
    "makes the tests flood": ("echo 'while :; do echo x; done' > f", {}, HUNG),
    "finds hidden tests": ("cat tests/check && echo 'echo 8' > f; true", {"hidden": ["/repo/tests"]}, BADLY),
    "is judged by a number": (
        "echo 3 > n",
        {"test": "echo 0.$(cat n) > /logs/reward.txt", "places": ["/logs"], "reward_file": "/logs/reward.txt"},
        (0.3, {"passed": 0.3, "ended": 1.0}),
    ),
    "is judged by names": (
        MENDED,
        {
            "test": "sh tests/check && echo 'PASSED t.py::a' && echo 'FAILED t.py::C::b - no'",
            "expected": {"t.py::a": "PASSED", "C.b": "FAILED", "other": None},
        },
        WELL,
    ),
    "ends the runner early": (
        "echo 'exit 0' > f",
        {"test": "echo 0 > x; exit 0", "expected": {"t.py::a": "PASSED"}},
        BADLY,
    ),
    "is judged by tests that only they see": (MENDED, {"test": "sh late", "tests": {"late": TEST}}, WELL),
}


@BWRAP
@pytest.mark.parametrize("name", DONE)
def test_the_reward_is_what_the_images_own_tests_say(broker, image, name):
    does, more, wanted = DONE[name]
    assert judged(broker, image, does, **more) == wanted


@BWRAP
def test_hidden_folders_are_empty_for_the_agent(broker, image):
    task = Task.of({"task": {"image": image, "folder": "/repo", "test": TEST, "hidden": ["/etc"]}})
    with task.begin(broker) as sandbox:
        assert sandbox.shell("ls /etc").text == ""


@BWRAP
def test_a_setup_that_fails_is_nobodys_reward(broker, image):
    task = Task.of({"task": {"image": image, "folder": "/repo", "test": TEST, "setup": "echo why; exit 3"}})
    with pytest.raises(SandboxError, match="setup failed: why"):
        task.begin(broker)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "has no `test`"),
        ({"task": {"image": "x"}}, "has no `test`"),
        ({"task": "x"}, "has no `test`"),
        ({"task": {"test": "true", "imag": "x"}}, "has 'imag'; known: test, image"),
        ({"task": {"test": 3}}, "expected a text"),
    ],
)
def test_a_row_without_tests_is_told(given, why):
    with pytest.raises(ValueError, match=why):
        Task.of(given)


def test_names_of_an_archive_stay_in_the_folder():
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as out:
        for name in ("/abs", "../up", "a/../../up", "./ok", "a/./b", "tests/x"):
            out.addfile(tarfile.TarInfo(name), io.BytesIO())
        device = tarfile.TarInfo("dev")
        device.type = tarfile.CHRTYPE
        out.addfile(device)
    with tarfile.open(fileobj=io.BytesIO(carried(made.getvalue(), lambda name: not name.startswith("tests")))) as kept:
        assert kept.getnames() == ["ok", "a/b"]


def test_statuses_are_those_of_pytests_summary():
    output = (
        "\x1b[32mPASSED\x1b[0m a.py::C::test_x\nFAILED a.py::test_y[1 - 2] - assert 1 - 2\nERROR b.py\nnothing PASSED\n"
    )
    found = statuses(output)
    assert (found["a.py::C::test_x"], found["C.test_x"], found["b.py"]) == ("PASSED", "PASSED", "ERROR")
    assert "nothing" not in found


@BWRAP
def test_a_response_acts_on_its_task_and_is_judged_by_it(image):
    """By the pool of processes, which are confined themselves."""
    sandbox = {"image": image, "folder": "/repo", "max_memory_gib": 0.2, "max_command_seconds": 2.0}
    spec = ToolsSpec((), environments=("repository",), sandbox=sandbox)
    row = {"data_source": "", "ground_truth": "", "extra_info": {"task": {"test": TEST}}}
    with EnvironmentPool(spec, 1, 20.0) as pool:
        with pytest.raises(UnknownChoice, match="has no `test`"):
            pool.offer.schemas({})
        (schema,) = pool.offer.schemas(row["extra_info"])
        assert schema["function"]["name"] == "run"
        session, other = (pool.session("repository", row, 0) for _ in range(2))
        assert session.step("run", {"command": "sh f 5 3; exit 4"}).result().text == "2\n\n(it ended by status 4)"
        assert "ended: too much of seconds" in session.step("run", {"command": "sleep 9"}).result().text
        session.step("run", {"command": MENDED}).result()
        assert [each.judge().result()[2:4] for each in (session, other)] == [(1.0, WELL[1]), (0.0, BADLY[1])]
        for each in (session, other):
            each.close()
        lost = pool.session("repository", {**row, "extra_info": {"task": {"test": TEST, "image": "/not/there"}}}, 0)
        assert lost.judge().result().failed and "no root folder" in lost.ready.result().text
        assert replace(spec, sandbox=None).judge_s == 0


# of the forms that swebench 5.0.2 and R2E-Gym have
SWE_BENCH = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "problem_statement": "It adds wrongly.",
    "image": "swebench/sweb.eval.x86_64.a__b-1:latest",
    "eval_script": "git apply -v - <<'EOF'\nEOF\npytest -rA t.py",
    "test_patch": "--- a/t.py\n+++ b/t.py\n@@\n",
    "FAIL_TO_PASS": '["t.py::test_a[x"]',
    "PASS_TO_PASS": '["t.py::test_b", "t.py::test_c"]',
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}
R2E_GYM = {
    "docker_image": "namanjain12/x:1",
    "repo_name": "x",
    "problem_statement": "Read [ISSUE]\nIt adds wrongly.\n[/ISSUE]",
    "expected_output_json": '{"C.test_a": "PASSED", "test_b - why": "FAILED"}',
}


def test_rows_of_others_data_sets_are_tasks():
    made = swe_bench(SWE_BENCH)
    task = Task.of(made["extra_info"])
    assert (task.image, task.folder) == (SWE_BENCH["image"], "/testbed")
    assert made["prompt"][0]["content"] == "It adds wrongly."
    assert task.expected == {
        "t.py::test_a[x": "PASSED|XFAIL",
        "t.py::test_b": "PASSED|XFAIL|SKIPPED",
        "t.py::test_c": "PASSED|XFAIL|SKIPPED",
    }
    assert task.is_own("t.py", set()) and task.is_own("conftest.py", set()) and not task.is_own("src/a.py", set())
    r2e = r2e_gym(R2E_GYM)
    task = Task.of(r2e["extra_info"])
    assert r2e["prompt"][0]["content"] == "It adds wrongly." and task.hidden == ("/r2e_tests",)
    assert task.expected == {"C.test_a": "PASSED", "test_b": "FAILED"}


@pytest.mark.parametrize(
    ("reads", "given", "missing", "why"),
    [(swe_bench, SWE_BENCH, name, name) for name in ("image", "eval_script", "FAIL_TO_PASS", "problem_statement")]
    + [(r2e_gym, R2E_GYM, name, name) for name in R2E_GYM if name != "repo_name"]
    + [(swe_bench, SWE_BENCH, "log_parser", "those of pytest are")],
)
def test_rows_of_others_without_what_they_need_are_told(reads, given, missing, why):
    with pytest.raises(ValueError, match=why):
        reads({**given, missing: ""})


def test_a_task_of_harbors_has_its_own_files_and_none_that_a_link_leads_to(tmp_path):
    (tmp_path / "secret").write_text("of the machine")
    folder = tmp_path / "task"
    (folder / "tests" / "deep").mkdir(parents=True)
    (folder / "instruction.md").write_text("Mend it.")
    (folder / "task.toml").write_text("")
    (folder / "tests" / "test.sh").write_text("true")
    (folder / "tests" / "deep" / "helper.py").write_text("pass")
    (folder / "tests" / "link").symlink_to(tmp_path / "secret")
    tests = json.loads(harbor(folder, "an image")["extra_info"]["task"]["tests"])
    assert tests == {"/tests/test.sh": "true", "/tests/deep/helper.py": "pass"}


@BWRAP
def test_a_task_of_harbors_is_judged_by_the_number_that_its_tests_write(image, broker, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "instruction.md").write_text("Mend it.\n")
    (tmp_path / "task.toml").write_text('schema_version = "1.4"\n[environment]\nworkdir = "/repo"\n')
    with pytest.raises(ValueError, match=r"tests/test\.sh"):
        harbor(tmp_path, image)
    script = 'sh tests/check && n=1 || n=0\necho "{\\"reward\\": 0.$n}" > /logs/verifier/reward.json\n'
    (tmp_path / "tests" / "test.sh").write_text(script)
    with pytest.raises(ValueError, match="names no docker_image"):
        harbor(tmp_path)
    task = Task.of(harbor(tmp_path, image)["extra_info"])
    task = replace(task, test=task.test.replace("bash", "sh"))  # busybox has no bash
    for does, reward in (("true", 0.0), (MENDED, 0.1)):
        with task.begin(broker) as sandbox:
            assert sandbox.shell("ls /tests").text == ""
            sandbox.shell(does)
            assert task.judged(broker, sandbox)[0] == reward
