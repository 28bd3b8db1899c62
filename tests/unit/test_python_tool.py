"""The tool `python`: what a program may do, and what it tries against the machine, row by row."""

import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_model import SIZES

from mrl.acting import python_tool, sandbox, system_calls
from mrl.acting.environment import LONGEST
from mrl.acting.environment_pool import EnvironmentPool, check_tools
from mrl.acting.python_tool import NOTHING, ProgramEnded, fault, run_program
from mrl.acting.sandbox import PythonLimits
from mrl.acting.tool import ToolsSpec
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import ConfigError
from mrl.model import model_spec

LIMITS = PythonLimits(max_seconds=20.0, max_memory_gib=0.5, max_files_mib=8.0)
SHORT = PythonLimits(max_seconds=0.3)
DEADLINE_S = 30.0
CONFINED = pytest.mark.skipif(
    bool(sys.platform != "linux" or fault()), reason="this machine cannot confine a program: mrl doctor says why"
)

WORKS = {
    "prints": ("print(6 * 7)", "42\n"),
    "prints nothing": ("6 * 7", NOTHING),
    "libraries": ("import numpy, decimal, zoneinfo; print(numpy.ones((20, 20)).dot(numpy.ones(20)).sum())", "400.0\n"),
    "a file of its own": (
        "open('a.txt', 'w').write('x' * 9)\nopen('a.txt', 'a').write('y')\nprint(open('a.txt').read())",
        "xxxxxxxxxy\n",
    ),
    "an error": (
        "def f():\n    1 / 0\nf()",
        'Traceback (most recent call last):\n  File "program.py", line 3, in <module>\n    f()\n  File "program.py", '
        "line 2, in f\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n",
    ),
    "no Python": ("if", '  File "program.py", line 1\n    if\n      ^\nSyntaxError: invalid syntax\n'),
    "an exit status": ("import sys; sys.exit(3)", "(it printed nothing, and ended by status 3)"),
    "an exit status that was another's": ("import sys; print('my own'); sys.exit(97)", "my own\n"),
    "an alarm of its own": (
        "import signal, time\nsignal.signal(14, lambda *_: print('rings'))\nsignal.setitimer(0, 0.01)\ntime.sleep(0.1)",
        "rings\n",
    ),
    "a set, whose order is alike in all processes": (
        "import sys\nprint(sys.flags.hash_randomization, sys.flags.safe_path, sys.flags.no_user_site)",
        "0 True 1\n",
    ),
    "other letters": ("print('\\ud83d\\ude00'.encode('utf-16', 'surrogatepass').decode('utf-16'), 'ü')", "😀 ü\n"),
}


@CONFINED
@pytest.mark.parametrize("name", WORKS)
def test_a_program_says_what_it_prints(name):
    code, said = WORKS[name]
    assert run_program(code, LIMITS) == said


REFUSED = "PermissionError: [Errno 13]"
# what it tries, and what is said of it: by itself, or in the place of an answer
ATTACKS = {
    "forks without end": ("while True: os.fork()", REFUSED),
    "starts a program": ("subprocess.run(['/bin/true'])", REFUSED),
    "starts threads without end": ("while True: threading.Thread(target=time.sleep, args=(9,)).start()", "new thread"),
    "opens a socket": ("socket.create_connection(('127.0.0.1', 22))", REFUSED),
    "opens a socket of this machine": ("socket.socket(socket.AF_UNIX)", REFUSED),
    "reads the run directory": ("open({run!r} + '/samples').read()", REFUSED),
    "lists the run directory": ("os.listdir({run!r})", REFUSED),
    "writes into the run directory": ("open({run!r} + '/more', 'w')", REFUSED),
    "shuts the run directory": ("os.chmod({run!r}, 0)", REFUSED),
    "reads the key": ("open(f'/proc/{{os.getppid()}}/environ').read()", REFUSED),
    "reads memory": ("open(f'/proc/{{os.getppid()}}/mem', 'rb')", REFUSED),
    "prints its environment": ("print(sorted(os.environ))", "['LC_CTYPE', 'MKL_NUM_THREADS', 'OMP_NUM_THREADS', "),
    "looks for others' folders": ("os.listdir(os.path.dirname(os.getcwd()))", REFUSED),
    "reads another's folder": ("open({other!r} + '/program.py').read()", REFUSED),
    "signals whoever started it": ("os.kill(os.getppid(), 9)", REFUSED),
    "signals its group": ("os.kill(0, 9)", REFUSED),
    "has a pipe signal others": ("fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())", REFUSED),
    "makes a folder": ("os.mkdir('a')", REFUSED),
    "hides a file": ("os.open('.', os.O_TMPFILE | os.O_RDWR)", REFUSED),
    "empties a file past Landlock": ("os.open({other!r} + '/program.py', 3 | os.O_TRUNC)", REFUSED),
    "removes what holds room": ("open('a', 'w'); os.remove('a')", REFUSED),
    "keeps bytes in memory that has no limit": ("os.memfd_create('a')", REFUSED),
    "leaves its namespaces": ("print(ctypes.CDLL(None).unshare(0x10000000))", "-1\n"),
    "changes limits": ("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "not allowed to raise maximum limit"),
    "takes memory": ("bytearray(2**30)", "MemoryError"),
    "writes a large file": (
        "open('a', 'wb').write(bytes(2**24))",
        ProgramEnded("its files came to more than 8 MiB"),
    ),
    "fills the disk": (
        "for i in range(99): open(str(i), 'wb').write(bytes(2**20))\ntime.sleep(9)",
        ProgramEnded("its files came to more than 8 MiB"),
    ),
    "makes files without end": (
        "import itertools\nfor i in itertools.count(): open(str(i), 'w').close()",
        ProgramEnded("it made more than 256 files"),
    ),
    "ends by a signal": (
        "print('so far'); os.kill(os.getpid(), 9)",
        ProgramEnded("it was ended by SIGKILL; it had printed"),
    ),
    "breaks the interpreter": ("ctypes.string_at(0)", ProgramEnded("it was ended by SIGSEGV")),
}
IMPORTS = "import ctypes, fcntl, os, resource, socket, subprocess, threading, time\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Where folders of programs are made."""
    monkeypatch.setenv(python_tool.SCRATCH, str(tmp_path / "scratch"))
    return tmp_path


def left_of(folder: Path) -> list[str]:
    """Processes that work in the folder, or below it."""
    at = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            at.append(os.readlink(process / "cwd"))
        except OSError:
            continue
    return [each for each in at if each.startswith(str(folder))]


@CONFINED
@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_program_tries_is_refused_and_leaves_nothing(name, here):
    code, expected = ATTACKS[name]
    run = here / "run"
    other = here / "scratch" / "other"
    for folder, file in ((run, "samples"), (other, "program.py")):
        folder.mkdir(parents=True)
        (folder / file).write_text("secret")
    code = IMPORTS + code.format(run=str(run), other=str(other))
    if isinstance(expected, ProgramEnded):
        with pytest.raises(ProgramEnded, match=re.escape(str(expected))):
            run_program(code, LIMITS)
    else:
        said = run_program(code, LIMITS)
        assert expected in said and "secret" not in said
    assert sorted(os.listdir(here / "scratch")) == ["other"] and not left_of(here)
    assert (run / "samples").read_text() == (other / "program.py").read_text() == "secret"
    assert os.listdir(run) == ["samples"] and os.access(run, os.W_OK) and run.stat().st_mode & 0o700 == 0o700


@CONFINED
@pytest.mark.parametrize("code", ["while True: pass", "import os, time; os.close(1); os.close(2); time.sleep(60)"])
def test_a_program_that_hangs_is_ended(code, here):
    began = time.monotonic()
    with pytest.raises(ProgramEnded, match=r"it had not ended after 0\.3 s"):
        run_program(code, SHORT)
    assert time.monotonic() - began < 10 and not left_of(here) and not os.listdir(here / "scratch")


@CONFINED
def test_both_ends_of_a_flood_are_kept():
    said = run_program("print('begin')\nfor _ in range(100): print('x' * 10**6)\nprint('end')", LIMITS)
    assert said.startswith("begin\nxxx") and said.endswith("xxx\nend\n") and len(said) <= LONGEST
    (left_out,) = re.findall(r"\n\[(\d+) bytes are left out\]\n", said)
    assert int(left_out) + len(said) - len(f"\n[{left_out} bytes are left out]\n") == 100 * (10**6 + 1) + 10


@CONFINED
def test_the_pool_ends_a_program_with_its_process_and_removes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    limits = {"max_seconds": 3600.0}
    pool = EnvironmentPool(ToolsSpec(("python",), python=limits), 1, 3600.0)
    assert pool.call("python", {"code": "print(1 + 1)"}).result(60)[:2] == ("ok", "2\n")
    assert pool.call("python", {"code": "import os; os.abort()"}).result(60)[:2] == (
        "raised", "Error: python: ProgramEnded: it was ended by SIGABRT",
    )  # fmt: skip
    hanging = pool.call("python", {"code": "import time; time.sleep(3600)"})
    end = time.monotonic() + 20
    while not list(tmp_path.glob("mrl-scratch-*/mrl-python-*")) and time.monotonic() < end:
        time.sleep(0.01)
    assert list(tmp_path.glob("mrl-scratch-*/mrl-python-*"))
    pool.close()
    assert hanging.result(20).reason == "died" and not list(tmp_path.iterdir()) and not left_of(tmp_path)


def test_a_machine_that_cannot_confine_is_refused_unless_it_is_forced(monkeypatch):
    monkeypatch.setattr(python_tool, "fault", lambda: "the kernel has no Landlock")
    with pytest.raises(ConfigError, match=r"cannot confine it: the kernel has no Landlock.*python\.unconfined"):
        python_tool.python_tool(LIMITS)
    forced = PythonLimits(unconfined=True)
    assert python_tool.python_tool(forced).function("print(1)") == "1\n"


UNFIT = """import mrl.acting.sandbox as box
box.give_up = lambda limits: 'rights stay'
box.main()"""


@pytest.mark.parametrize(("unconfined", "said"), [(False, ProgramEnded("rights stay")), (True, "9\n")])
def test_what_could_not_be_given_up_is_said_in_the_place_of_an_answer(monkeypatch, unconfined, said):
    """And the program has not run; where it may run unconfined, it is all the same and said nowhere."""
    start = f"import sys; sys.path.insert(0, {str(python_tool.PACKAGE_ROOT)!r}); exec({UNFIT!r})"
    monkeypatch.setattr(python_tool, "_START", start)
    limits = PythonLimits(unconfined=unconfined)
    if not unconfined:
        with pytest.raises(ProgramEnded, match=f"^{said}$"):
            run_program("print(9); open('ran', 'w')", limits)
    else:
        assert run_program("print(9)", limits) == said


@CONFINED
def test_the_program_has_no_way_to_say_that_it_was_not_confined():
    """The descriptor for that is shut before it begins."""
    code = """
import os
for number in range(3, 4096):
    try:
        os.write(number, b"x")
    except OSError:
        continue
    print(number)
"""
    assert run_program(code, LIMITS) == NOTHING


def test_a_fault_is_what_the_probe_could_do(monkeypatch):
    """An unconfined probe finds all of it."""
    monkeypatch.setattr(python_tool, "_START", "exec(compile(open('program.py').read(), 'program.py', 'exec'))")
    found = fault()
    assert "another folder is not refused" in found and "a signal is not refused" in found


PYTHON = ["rollout.turns={tools: [python], timeout_s: 5}"]


def test_a_program_has_to_end_before_its_call_does():
    model = model_spec(SIZES | {"num_hidden_layers": 4, "num_experts": 8})
    for overrides, refused in ((PYTHON, True), ([*PYTHON, "rollout.turns.python.max_seconds=4"], False)):
        resolved = load_config("parallel_configs/tiny-moe/cpu.yaml", None, overrides)
        fields = [each.field for each in violations(resolved, model)]
        assert ("rollout.turns.python.max_seconds" in fields) == refused


@CONFINED
def test_the_model_is_told_of_the_program_it_writes():
    (schema,) = check_tools(ToolsSpec(("python",))).tools
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


@CONFINED
def test_a_program_ends_with_the_process_that_watches_it(tmp_path):
    """Nobody else would end one that takes no processor time."""
    code = f"import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep({DEADLINE_S})"
    watcher = f"from mrl.acting.python_tool import *; run_program({code!r}, PythonLimits({DEADLINE_S}))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", watcher], env=environment) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := [file.read_text() for file in tmp_path.glob("*/pid")]) or not found[0]:
            assert time.monotonic() < deadline, "it never began"
            time.sleep(0.02)
        process.kill()
    while Path(f"/proc/{found[0]}").exists():
        assert time.monotonic() < deadline, "it outlives who watches it"
        time.sleep(0.02)


def test_a_kernel_that_lets_files_be_emptied_confines_nobody(monkeypatch):
    monkeypatch.setattr(sandbox, "_limit", lambda limits: None)
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 2)
    assert "version 2" in sandbox.give_up(PythonLimits())


@CONFINED
def test_a_signal_without_a_name_is_told_by_its_number():
    with pytest.raises(ProgramEnded, match="signal 40"):
        run_program("import os; os.kill(os.getpid(), 40)", PythonLimits())


# ---------------------------------------------------------------- the filter itself


def verdict(program: bytes, audit: int, number: int, arguments: tuple[int, ...] = ()) -> bool:
    """Whether a filter allows a call: an interpreter of the few instructions that are used."""
    data = struct.pack("<iIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    at = 0
    value = 0
    while True:
        code, so, otherwise, k = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
        elif code == 0x15:
            at += so if value == k else otherwise
        elif code == 0x45:
            at += so if value & k else otherwise
        elif code == 0x54:
            value &= k
        else:
            assert code == 0x06
            return k == 0x7FFF0000


# by machine: read, socket, clone, kill, fcntl, openat, unlinkat, and a call that nobody knows yet
NUMBERS = {"x86_64": (0, 41, 56, 62, 72, 257, 263, 9999), "aarch64": (63, 198, 220, 129, 25, 56, 35, 9999)}


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_filter_allows_what_is_listed_and_nothing_else(machine):
    read, socket, clone, kill, fcntl, openat, unlinkat, unknown = NUMBERS[machine]
    audit, _ = system_calls.MACHINES[machine]
    program = system_calls.rules(machine, 77)
    allowed = [(read,), (kill, (77, 9)), (fcntl, (3, 1030)), (openat, (3, 0, os.O_RDWR | os.O_CREAT))]
    refused = [(socket,), (clone,), (unlinkat,), (unknown,), (kill, (78, 9)), (kill, (0, 9)), (fcntl, (3, 8, 5))]
    refused += [(openat, (3, 0, 0o20200002)), (fcntl, (3, 10, 9)), (openat, (3, 0, 3 | os.O_TRUNC))]
    assert all(verdict(program, audit, *call) for call in allowed)
    assert not any(verdict(program, audit, *call) for call in refused)
    assert not verdict(program, audit + 1, read)
    assert not verdict(program, audit, read | 0x40000000 if machine == "x86_64" else unknown)
    assert system_calls.rules("riscv64", 1) is None


HEADERS = {
    0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    1: Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_are_those_of_the_kernel(column):
    if not HEADERS[column].is_file():
        pytest.skip("no headers of the kernel here")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text())
    known = {name: int(number) for name, number in lines}
    known.setdefault("newfstatat", known.get("fstatat"))
    listed = system_calls.ALLOWED | system_calls.SIGNALS
    listed |= {name: row[0] for name, row in (system_calls.CHECKED | system_calls.OPENING).items()}
    for name, numbers in listed.items():
        assert known.get(name) == numbers[column], name
