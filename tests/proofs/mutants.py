"""Puts mutants into the code, one at a time, and looks which unit test sees each.

    python tests/proofs/mutants.py [WORD ...]     those with a WORD in file or reason; none: all of them (25 minutes)
    python tests/proofs/mutants.py --list

The mutants are in tests/proofs/mutants/ROOM.toml: a file, a text that stands in it exactly once, what stands there
instead, and why that is wrong; with `equivalent`, why nobody can see it. One whose text is not there exactly once is
stale and ends the script before anything runs.

Each is put into a clone of the committed tree. First those unit tests run whose files name the mutated module. Then
come those whose helpers name it, and those that name another module of its package, until one fails. The module's own
file is before all others, and then those that have seen mutants of its room. Tests of the mutants' own texts are not
among them: they would fail for each. Tests that fail without any mutant are left out, and named: such as hold seconds
on a machine that others use.
"""

import argparse
import ast
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants")
CODE = ("mrl", "tests/unit")
_SOME_FAILED, _INTERRUPTED, _NONE_RAN = 1, 2, 5  # exit codes of pytest
_TOO_LONG = -1
_STARTING = Lock()
LIMIT_S = 900  # of one run of pytest; a mutant that never ends is seen
# what takes long to import is imported once, and nothing of mrl; Ray reads then what the tests' conftest sets too late
FORKS = get_context("forkserver")
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
HEAVY = ["pytest", "hypothesis", "ray", "torch", "torch._dynamo", "transformers", "megatron.core.models.gpt"]
OF_MUTANTS = ("test_mutants",)  # tests of the texts that mutants change
OWN_NAME = re.compile(r"mrl(?:\.\w+)+")


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` stands exactly once in `file`."""

    file: str
    old: str
    new: str
    why: str
    equivalent: str = ""  # why no test can see it

    @cached_property
    def key(self) -> str:
        """A digest of what is changed."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:16]

    @property
    def module(self) -> str:
        """Dotted name of the mutated module."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        """The package below mrl."""
        return _room(self.file)

    def applied(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError where the mutant is stale."""
        if (count := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"{self.file}: {self.why!r} is stale: its text is there {count} times, not once")
        changed = text.replace(self.old, self.new)
        ast.parse(changed)
        return changed


def _room(file: str) -> str:
    return file.split("/")[1]


def read(path: Path) -> list[Mutant]:
    """Those of one room."""
    return [Mutant(**row) for row in tomllib.loads(path.read_text())["mutant"]]


def mutants() -> list[Mutant]:
    """All of them, in the order of files. Raises SystemExit naming those that are stale."""
    listed = [
        Mutant(**row) for path in sorted(MUTANTS.glob("*.toml")) for row in tomllib.loads(path.read_text())["mutant"]
    ]
    wrong = []
    for mutant in listed:
        try:
            mutant.applied((ROOT / mutant.file).read_text())
        except (ValueError, OSError, SyntaxError) as error:
            wrong.append(f"{mutant.file}: {mutant.why!r}: {error}")
    twice = [key for key, count in Counter(mutant.key for mutant in listed).items() if count > 1]
    if wrong or twice:
        raise SystemExit("\n".join([*wrong, *(f"a mutant is listed twice: {key}" for key in twice)]))
    return listed


# ---------------------------------------------------------------- which tests


def named_modules(path: Path) -> set[str]:
    """Modules of mrl, and other modules of the tests, that a file of tests imports or names in a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)):
                found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.Constant(value=str(text)):
                found |= {".".join(name.split(".")[:count]) for name in OWN_NAME.findall(text) for count in (2, 3)}
    return found


@dataclass(frozen=True)
class Named:
    """Modules that a file of tests names."""

    itself: set[str]
    reached: set[str]  # through helpers of the tests too


def modules_of_tests(folder: Path) -> dict[str, Named]:
    """By file of tests."""
    named = {path.stem: named_modules(path) for path in folder.glob("*.py")}

    def reached(stem: str, seen: set[str]) -> set[str]:
        seen.add(stem)
        further = [reached(other, seen) for other in sorted(named[stem] & named.keys() - seen)]
        return named[stem].union(*further)

    tests = [stem for stem in named if stem.startswith("test_") and stem not in OF_MUTANTS]
    return {f"{stem}.py": Named(named[stem], reached(stem, set())) for stem in tests}


def stages(mutant: Mutant, modules: dict[str, Named]) -> Iterator[tuple[str, list[str]]]:
    """("direct", files that name the module), ("helper", those whose helpers do), ("package", those that name another
    module of its package).
    """
    package = mutant.module.rpartition(".")[0] + "."
    direct = [file for file, named in modules.items() if mutant.module in named.itself]
    helper = [file for file, named in modules.items() if mutant.module in named.reached]
    near = [file for file, named in modules.items() if any(name.startswith(package) for name in named.itself)]
    yield "direct", direct
    yield "helper", [file for file in helper if file not in direct]
    yield "package", [file for file in near if file not in (*direct, *helper)]


# ---------------------------------------------------------------- runs


class Copy:
    """A clone of the committed tree, in which one mutant at a time is put."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._changes = 0
        _git("clone", "--quiet", "--shared", str(ROOT), str(folder))

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """While it lasts the mutant is there."""
        path = self.folder / mutant.file
        text = path.read_text()
        self._write(path, mutant.applied(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Compiled files go by whole seconds and sizes, so each content has a second of its own."""
        path.write_text(text)
        self._changes += 1
        os.utime(path, (self._changes * 10, self._changes * 10))

    def pytest(self, files: Iterable[str], *arguments: str, limit_s: float | None = None) -> tuple[int, str]:
        """Exit code and output; _TOO_LONG where it takes longer than it may. Whatever it started has ended.

        The process writes its code itself: what multiprocessing tells of it is wrong at times, where two threads ask.
        Raises RuntimeError where it wrote none.
        """
        words = ["-q", "-m", "not long", "-W", "ignore", "-p", "no:cacheprovider", *arguments]
        words += [f"tests/unit/{file}" for file in files]
        with TemporaryDirectory() as told:
            output, code = Path(told, "output"), Path(told, "code")
            process = FORKS.Process(target=_in_copy, args=(self.folder, words, output, code))
            with _STARTING:
                process.start()
            is_over = wait([process.sentinel], limit_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said = output.read_text(errors="replace")
            if not is_over:
                return _TOO_LONG, said
            if not code.exists():
                raise RuntimeError(f"a run of pytest died:\n{said[-4000:]}")
            return int(code.read_text()), said


def _in_copy(folder: Path, words: list[str], output: Path, code: Path) -> None:
    """Runs pytest in this process, which has imported nothing of mrl yet."""
    import pytest

    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    own = str(Path(__file__).parent)  # tests have modules of the same names
    sys.path[:] = [str(folder), *(path for path in sys.path if path != own)]
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    ended = int(pytest.main(words))
    code.write_text(str(ended))


@dataclass(frozen=True)
class Baseline:
    """What tests come to without any mutant."""

    seconds: dict[str, float]  # by file
    left_out: list[str]  # tests that fail
    # (room, file): mutants that its tests have seen so far; only the order of files depends on it
    seeing: Counter[tuple[str, str]] = field(default_factory=Counter)


def baseline(copy: Copy, files: list[str]) -> Baseline:
    """Of some files of tests. Raises SystemExit where they cannot be run."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code, output = copy.pytest(files, f"--junitxml={report}")
        if code not in (0, _SOME_FAILED):
            raise SystemExit(f"without any mutant:\n{output[-4000:]}")
        seconds: Counter[str] = Counter()
        for case in xml.parse(report).getroot().iter("testcase"):
            seconds[f"{case.get('classname').split('.')[2]}.py"] += float(case.get("time"))
    return Baseline(dict(seconds), re.findall(r"^FAILED (\S+)", output, re.M))


def seen_by(code: int, output: str) -> str:
    """The test that failed; empty where none did. Raises RuntimeError for a run that says nothing of the mutant."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    if code == _TOO_LONG:
        return f"{LIMIT_S} seconds without an end"
    if code in (_SOME_FAILED, _INTERRUPTED) and failed:
        return failed[1]
    if code in (0, _NONE_RAN):
        return ""
    raise RuntimeError(f"pytest ended with {code}:\n{output[-4000:]}")


def judged(copy: Copy, mutant: Mutant, modules: dict[str, Named], known: Baseline) -> dict:
    """The row of a mutant: which test sees it, if any does."""
    began = time.monotonic()
    own = mutant.module.rpartition(".")[2]
    row = {"file": mutant.file, "why": mutant.why, "key": mutant.key, "result": "survived", "by": ""}
    with copy.mutated(mutant):
        for stage, files in stages(mutant, modules):
            if not files:
                continue
            own_first = sorted(
                files,
                key=lambda file: (own not in file, -known.seeing[mutant.room, file], known.seconds.get(file, 0.0)),
            )
            left_out = [f"--deselect={test}" for test in known.left_out]
            code, output = copy.pytest(own_first, "-x", *left_out, limit_s=LIMIT_S)
            if by := seen_by(code, output):
                row |= {"result": "killed", "stage": stage, "by": by}
                known.seeing[mutant.room, by.partition("::")[0].rpartition("/")[2]] += 1
                break
    if mutant.equivalent:
        row |= {"equivalent": mutant.equivalent, "result": "equivalent" if row["result"] == "survived" else "killed"}
    return row | {"seconds": round(time.monotonic() - began, 1), "left_out": known.left_out}


# ---------------------------------------------------------------- all of them


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Exit code 1 where one is not seen, or one is that is said to be equivalent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    arguments = parser.parse_args()
    listed = mutants()
    if arguments.words:
        listed = [m for m in listed if any(word in f"{m.file} {m.why}" for word in arguments.words)]
    if arguments.list:
        print(*(f"{mutant.file}: {mutant.why}" for mutant in listed), sep="\n")
        return 0
    return int(bool(wrong(listed, arguments.jobs)))


def wrong(todo: list[Mutant], jobs: int) -> list[str]:
    """Which of them no test sees, and which one does that is said to be equivalent; several at once.

    Raises SystemExit where changes are not committed: mutants are put into a clone.
    """
    if changed := _git("status", "--porcelain", "--", *CODE):
        raise SystemExit(f"commit these first:\n{changed}")
    FORKS.set_forkserver_preload(HEAVY)
    modules = modules_of_tests(ROOT / "tests" / "unit")
    found = []
    with TemporaryDirectory() as folder:
        copies = Queue[Copy]()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))
        needed = sorted({file for m in todo for _, files in stages(m, modules) for file in files})
        known = baseline(copies.queue[0], needed)
        print("left out:", *(known.left_out or ["none"]), flush=True)

        def judge(mutant: Mutant) -> None:
            copy = copies.get()
            row = judged(copy, mutant, modules, known)
            copies.put(copy)
            line = f"{row['result']:12}{row['seconds']:6.1f} s  {mutant.file}: {mutant.why}  {row['by']}"
            print(line, flush=True)
            if row["result"] != ("equivalent" if mutant.equivalent else "killed"):
                found.append(line)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(judge, todo))
    return found


if __name__ == "__main__":
    sys.exit(main())
