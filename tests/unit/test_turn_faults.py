"""What goes wrong with tools, programs and environments, a row each: the answer that it must have, no reward, and
nothing left behind. Faults of engines, clients and histories are rows of test_conversations.py and test_endpoint.py.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import environment_classes
import pytest
import tool_functions

from mrl.acting.environment import LONGEST
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.python_tool import fault
from mrl.acting.tool import ToolsSpec

TOOLS = ToolsSpec(("hangs", "raises", "floods", "dies", "prints", "python"), str(tool_functions.__file__))
WITHOUT_PYTHON = ToolsSpec(TOOLS.names[:-1], TOOLS.path)
GAMES = ToolsSpec((), str(environment_classes.__file__), environments=("Trouble", "Forgetful"))
CONFINED = not fault()


@dataclass(frozen=True)
class Fault:
    """What is called, and what its answer has to be."""

    name: str  # of a tool, or of an environment's action
    arguments: dict
    reason: str
    said: str
    environment: str | None = None  # whose action it is
    row: dict | None = None
    reward: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the response is left out: a tool costs its call, an environment the response."""
        return self.environment is not None and self.reason != "ok"


def program(code: str) -> dict:
    return {"code": code}


FAULTS = {
    "a tool hangs": Fault("hangs", {}, "timeout", "Error: hangs: no answer within 0.5"),
    "a tool raises": Fault("raises", {}, "raised", "Error: raises: KeyError"),
    "a tool floods": Fault("floods", {}, "ok", "x" * LONGEST),
    "a tool is killed": Fault("dies", {}, "died", "Error: dies: "),
    "code forks": Fault("python", program("import os\nwhile True: os.fork()"), "ok", "PermissionError"),
    "code opens a socket": Fault("python", program("import socket; socket.socket()"), "ok", "PermissionError"),
    "code reads the run": Fault("python", program(f"open({__file__!r}).read()"), "ok", "PermissionError"),
    "code reads the key": Fault(
        "python", program("import os; open(f'/proc/{os.getppid()}/environ').read()"), "ok", "PermissionError"
    ),
    "an environment hangs": Fault("act", {"how": "hangs"}, "timeout", "Error: act: ", "Trouble", {}),
    "its process dies": Fault("act", {"how": "dies"}, "died", "Error: act: ", "Trouble", {}),
    "its process dies once": Fault("act", {"how": "dies"}, "ok", "well, after 0", "Trouble", {"once": "ONCE"}, 1.0),
    "its reward is no number": Fault("act", {"how": "nan"}, "not_a_number", "Error: act: ", "Trouble", {}),
}


def left_in(folder: Path) -> list[str]:
    """Processes whose temporary files are there: all that the pool started."""
    wanted = f"TMPDIR={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:
            continue
    return found


def ended(folder: Path) -> bool:
    """Whether all of them are gone; a keeper may take a moment."""
    deadline = time.monotonic() + 10
    while left_in(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left_in(folder)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_answer_and_leaves_nothing(name, tmp_path, monkeypatch):
    row = FAULTS[name]
    if row.name == "python" and not CONFINED:
        pytest.skip("this machine cannot confine a program")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    timeout_s = 0.5 if row.reason == "timeout" else 20.0
    tools = TOOLS if row.name == "python" else WITHOUT_PYTHON
    with EnvironmentPool(GAMES if row.environment else tools, 1, timeout_s) as pool:
        assert left_in(tmp_path)
        if row.environment:
            extra_info = {key: str(tmp_path / value) for key, value in row.row.items()}
            session = pool.session(row.environment, {"extra_info": extra_info}, 0)
            answer = session.step(row.name, row.arguments).result(60)
            session.close()
        else:
            answer = pool.call(row.name, row.arguments).result(60)
        assert (answer.reason, answer.failed, answer.reward) == (row.reason, row.failed, row.reward)
        assert answer.text.startswith(row.said) or (row.said in answer.text and row.name == "python")
        assert len(answer.text) <= LONGEST
    assert ended(tmp_path)
    assert [each for each in os.listdir(tmp_path) if each != "ONCE"] == []
