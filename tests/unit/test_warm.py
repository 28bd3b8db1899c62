"""Agents are forked from a process that has loaded them: imports are made once, and nothing else is shared."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mrl.acting.agent import AGENT, script_of
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.tool import ToolsSpec
from mrl.reward.items import DIED, OK, RAISED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked so on Linux alone")
HEAVY = """
import os, time
with open({log!r}, "a") as file:
    file.write("imported\\n")
state = []
{more}
"""
BODY = """
heavy.state.append(1)
told = {{"state": len(heavy.state), "pid": os.getpid(), "home": os.environ["HOME"], "row": row["number"]}}
with open(os.path.join({folder!r}, f"told-{{row['number']}}"), "w") as file:
    json.dump(told, file)
if row["number"] == 3:
    sys.exit(5)
if row["number"] == 4:
    os.kill(os.getpid(), 9)
"""
FUNCTION = "import json, os, sys\nimport heavy\n\n\ndef run(url, key, row, seconds):\n"
PROGRAM = "import json, os, sys\nimport heavy\nrow = json.load(sys.stdin)['row']\n"


def write(tmp_path: Path, more: str = "") -> tuple[Path, Path]:
    """An agent as a function and as a program, both with a module beside them."""
    (tmp_path / "heavy.py").write_text(HEAVY.format(log=str(tmp_path / "log"), more=more))
    body = BODY.format(folder=str(tmp_path))
    function = tmp_path / "function.py"
    function.write_text(FUNCTION + "".join(f"    {line}\n" for line in body.splitlines()))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + body)
    return function, program


def specs(tmp_path: Path, kind: str, more: str = "") -> ToolsSpec:
    function, program = write(tmp_path, more)
    given = {"network": True, "folders": (str(tmp_path),)}
    if kind == "program":
        return ToolsSpec((), command=(sys.executable, str(program)), **given)
    sys.path.insert(0, str(tmp_path))  # what PYTHONPATH does for a user
    return ToolsSpec((), str(function), agent="run", environment=("PYTHONPATH",), **given)


def called(pool: EnvironmentPool, number: int):
    told = {"url": "http://127.0.0.1:1", "key": f"key {number}", "row": {"number": number}, "seconds": 9.0}
    return pool.call(AGENT, told | {"reward_key": "r"})


@pytest.mark.parametrize("kind", ["function", "program"])
def test_what_an_agent_imports_is_imported_once_and_its_state_is_its_own(tmp_path, kind):
    spec = specs(tmp_path, kind)
    path = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "PYTHONPATH": str(tmp_path)}
    with EnvironmentPool(spec, 2, 60.0, tmp_path / "tools.log", environment=path) as pool:
        answers = [each.result() for each in [called(pool, number) for number in range(5)]]
    ends = [OK, OK, OK, RAISED, DIED if kind == "function" else RAISED]
    assert [each.reason for each in answers] == ends, (tmp_path / "tools.log").read_text()
    told = [json.loads((tmp_path / f"told-{number}").read_text()) for number in range(5)]
    assert [each["state"] for each in told] == [1] * 5 and len({each["pid"] for each in told}) == 5
    assert len({each["home"] for each in told}) == 5 and not any(Path(each["home"]).exists() for each in told)
    assert (tmp_path / "log").read_text() == "imported\n"


def test_one_that_begins_a_thread_by_an_import_is_started_as_before(tmp_path):
    spec = specs(
        tmp_path, "program", "import threading\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    with EnvironmentPool(spec, 1, 60.0, tmp_path / "tools.log") as pool:
        assert [called(pool, number).result().reason for number in range(2)] == [OK, OK]
    assert "agents are started, not forked: 2 threads" in (tmp_path / "tools.log").read_text()


def test_a_program_is_this_interpreters_where_that_would_run_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("")
    assert script_of([sys.executable, str(program), "-x"]) == [str(program), "-x"]
    for other in (["sh", str(program)], [sys.executable, "-c", "1"], [sys.executable, "missing.py"], ["not-there"]):
        assert script_of(other) is None
    for line, is_own in ((f"#!{sys.executable}\n", True), ("#!/usr/bin/env sh\n", False), ("#!/bin/sh\n", False)):
        command = tmp_path / "command"
        command.write_text(line)
        command.chmod(0o755)
        assert script_of([str(command), "a"]) == ([str(command), "a"] if is_own else None)


def test_nothing_is_left_of_an_agent_that_ends_with_what_forked_it(tmp_path):
    """Its keeper is then killed by the one above, and cannot remove the agent's home."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "heavy.py").write_text("")
    begun = tmp_path / "begun"
    agent = tmp_path / "waiting.py"
    agent.write_text(
        f"import time\n{FUNCTION}"
        f"    with open({str(begun)!r}, 'w') as file:\n        print(os.getppid(), file=file)\n    time.sleep(600)\n"
    )
    named = ("PYTHONPATH", "TMPDIR")
    spec = ToolsSpec((), str(agent), agent="run", network=True, folders=(str(tmp_path),), environment=named)
    given = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "TMPDIR": str(temporary)}
    with EnvironmentPool(spec, 2, 60.0, tmp_path / "tools.log", environment=given) as pool:
        call = called(pool, 0)
        until = time.monotonic() + 60
        while not (begun.exists() and begun.read_text().endswith("\n")):
            assert time.monotonic() < until and not call.done(), (tmp_path / "tools.log").read_text()
            time.sleep(0.02)
        assert len(list(temporary.glob("**/home"))) == 1
        os.kill(int(begun.read_text()), signal.SIGSTOP)  # the keeper is too slow
        pool._warm.kill()
        assert call.result().reason == DIED
    assert list(temporary.iterdir()) == []
