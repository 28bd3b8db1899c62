"""A task of a row: an image, a setup, and tests whose result is the reward.

    extra_info.task = {
        "image", "folder",                 # by default those of rollout.turns.sandbox
        "files": {path: text},             # written first,
        "setup": script,                   # then run, in the agent's sandbox and in that of the tests
        "test": script,                    # the tests
        "own": [pattern, ...],             # files that stay the image's in the tests' sandbox; by default OWN
        "tests": {path: text},             # files of the tests' sandbox alone
        "hidden": [folder, ...],           # the image's, and empty in the agent's sandbox
        "places": [folder, ...],           # further folders that are written
        "expected": {name: status},        # of pytest -rA (several: PASSED|XFAIL), instead of the script's exit status
        "reward_file": path,               # a number, instead of both
    }

`files`, `tests` and `expected` may be texts of JSON, since a column of mappings has the keys of all rows.

The tests run in a fresh sandbox once the agent has ended. Of the agent's there is nothing in it but its files, without
those that `own` names: tests, their configuration, what runs them, and modules that would stand in for it.
"""

import io
import json
import math
import posixpath
import re
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Protocol

from mrl.acting.sandboxes.sandbox import Ran, Sandbox, SandboxError, SandboxSpec

TASK = "task"  # key of extra_info
OWN = (
    "tests/*", "test/*", "*/tests/*", "*/test/*", "test_*", "*_test.*", "*/test_*", "*/*_test.*", "conftest.py",
    "*/conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "noxfile.py", ".coveragerc",
    "sitecustomize.py", "*/sitecustomize.py", "usercustomize.py", "*/usercustomize.py", "*.pth", "run_tests.sh",
    "*.egg-info/*", ".git/hooks/*", ".git/config",
)  # fmt: skip
# Python modules of this name at the top of a repository would stand in for the runner's own
_RUNNERS = {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "nose", "py", *sys.stdlib_module_names}
_PASSING = ("PASSED", "XFAIL")
_OPTION = re.compile(r"(.*?)\[(.*)\]")
_STATUS = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) +(\S.*)$")
_MOST_OUTPUT = 8 * 2**20  # bytes of the tests' output that are read


class StartsSandboxes(Protocol):
    """What starts sandboxes."""

    spec: SandboxSpec

    def start(
        self,
        image: str | None = None,
        folder: str | None = None,
        endpoint: int | None = None,
        places: Sequence[str] = (),
    ) -> Sandbox:
        """As mrl.acting.sandboxes.starting.start."""


@dataclass(frozen=True)
class Task:
    """A row's task. Fields are the keys above."""

    test: str
    image: str | None = None
    folder: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    own: tuple[str, ...] = OWN
    tests: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    reward_file: str | None = None

    @classmethod
    def of(cls, extra_info: Mapping[str, Any]) -> "Task":
        """Reads a row's task. Raises ValueError for one that has no tests, or has what is not known here."""
        given = extra_info.get(TASK)
        if not isinstance(given, Mapping) or not given.get("test"):
            raise ValueError(f"extra_info.{TASK} has no `test`, the script whose result is the reward")
        known = {each.name: each.type for each in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"extra_info.{TASK} has {unknown[0]!r}; known: {', '.join(known)}")
        values = {name: value for name, value in given.items() if value is not None}
        for name, value in values.items():
            if name in ("files", "tests", "expected"):
                values[name] = _mapping(name, value)
            elif name in ("own", "hidden", "places"):
                values[name] = tuple(value)
            elif not isinstance(value, str):
                raise ValueError(f"extra_info.{TASK}.{name} is {str(value)[:60]!r}, expected a text")
        return cls(**values)

    def begin(self, starter: StartsSandboxes, endpoint: int | None = None) -> Sandbox:
        """StartsSandboxes the agent's sandbox. Raises SandboxError, for a setup that fails too."""
        sandbox = starter.start(self.image, self.folder, endpoint, (*self.places, *self.hidden))
        return self._begun(sandbox, starter.spec, self.hidden)

    def _begun(self, sandbox: Sandbox, spec: SandboxSpec, hidden: Sequence[str] = ()) -> Sandbox:
        try:
            if hidden:  # one inside of the folder came with it
                sandbox.run(["sh", "-c", 'for each; do rm -rf "$each"/* "$each"/.[!.]*; done', "sh", *hidden])
            for path, text in self.files.items():
                sandbox.write(path, text.encode())
            if self.setup:
                ran = sandbox.shell(self.setup, seconds=spec.max_test_seconds)
                if not ran.is_well:
                    raise SandboxError(f"extra_info.{TASK}.setup failed: {ran.reason or ran.text[-300:]}")
        except BaseException:
            sandbox.end()
            raise
        return sandbox

    def judged(self, starter: StartsSandboxes, agents: Sandbox) -> tuple[float, dict[str, float]]:
        """Returns the reward of what the agent did, and parts: `passed`, a share of the tests, and `ended`, whether
        they ended within their limits.

        Raises SandboxError where the tests could not be run, which is not the agent's fault.
        """
        try:
            archive = agents.packed()
        except SandboxError:  # it filled its folder beyond all bounds, or broke it
            return 0.0, {"passed": 0.0, "ended": 0.0}
        with starter.start(self.image, self.folder, None, self.places) as fresh:
            self._begun(fresh, starter.spec)
            try:
                self._carry(archive, fresh)
            except SandboxError:  # files that cannot stand there
                return 0.0, {"passed": 0.0, "ended": 0.0}
            for path, text in self.tests.items():
                fresh.write(path, text.encode())
            ran = fresh.shell(self.test, seconds=starter.spec.max_test_seconds, most=_MOST_OUTPUT)
            reward = self._reward(ran, fresh)
        return reward, {"passed": self.share(ran, reward), "ended": float(not ran.reason)}

    def _carry(self, archive: bytes, fresh: Sandbox) -> None:
        """Brings the agent's files into the fresh sandbox, and removes what the agent removed."""
        image = _names(fresh.packed())
        theirs = _names(archive)
        files = {name for name, is_folder in image.items() if not is_folder}
        own = {name for name in files if self.is_own(name, files)}
        # a folder with files of the image's own stays one
        kept = own | {name for name in image if any(each.startswith(f"{name}/") for each in own)}
        gone = [name for name, is_folder in image.items() if name not in kept and theirs.get(name) is not is_folder]
        if gone:
            fresh.run(["xargs", "-0", "rm", "-rf", "--"], "\0".join(gone).encode())
        fresh.unpack(
            carried(
                archive,
                lambda name: not self.is_own(name, files) and (name not in kept or theirs[name] is image.get(name)),
            )
        )

    def is_own(self, name: str, image: set[str]) -> bool:
        """Whether a file stays as the image has it. `image`: names of its files."""
        path = posixpath.join(self.folder or "", name)
        if any(fnmatchcase(name, pattern) for pattern in self.own) or path.startswith(self.hidden):
            return True
        top = name.split("/")[0].removesuffix(".py")
        return top in _RUNNERS and (name not in image or name.count("/") == 0)

    def _reward(self, ran: Ran, fresh: Sandbox) -> float:
        if ran.reason:
            return 0.0
        if self.reward_file is not None:
            return _number_in(fresh, self.reward_file)
        if self.expected:
            return float(self.share(ran, 0.0) == 1.0)
        return float(ran.status == 0)

    def share(self, ran: Ran, reward: float) -> float:
        """Returns the share of `expected` results that were met; without any, the reward between 0 and 1."""
        if not self.expected:
            return min(1.0, max(0.0, reward))
        found = statuses(ran.text)
        met = [_status_of(name, found) in ends.split("|") for name, ends in self.expected.items()]
        return sum(met) / len(met)


def _mapping(name: str, value: Any) -> dict[str, str]:
    """Returns a mapping of texts, which may be written as JSON. Raises ValueError for anything else."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"extra_info.{TASK}.{name} is {str(value)[:60]!r}, expected a mapping, or one as JSON")
    # a column of mappings with different keys is read with all keys, and None where a row has none
    found = {key: text for key, text in value.items() if text is not None}
    if not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"extra_info.{TASK}.{name} has values that are no texts")
    return found


def _names(archive: bytes) -> dict[str, bool]:
    """Returns what is in an archive: by name, whether it is a folder."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        found = {posixpath.normpath(member.name): member.isdir() for member in packed}
    found.pop(".", None)
    return found


def carried(archive: bytes, wanted: Callable[[str], bool]) -> bytes:
    """Returns a tar archive of the wanted files, links and folders, by name, under names within the folder alone."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed, tarfile.open(fileobj=made, mode="w") as out:
        for member in packed:
            name = posixpath.normpath(member.name)
            if name.startswith(("/", "..")) or name == "." or not wanted(name):
                continue
            fresh = tarfile.TarInfo(name)
            fresh.mode = member.mode & 0o755 | 0o600
            fresh.mtime = member.mtime
            content = None
            if member.isdir():
                fresh.type = tarfile.DIRTYPE
                fresh.mode |= 0o700
            elif member.issym():
                fresh.type = tarfile.SYMTYPE
                fresh.linkname = member.linkname
            elif member.isfile() or member.islnk():
                content = packed.extractfile(member)  # of a hard link what it leads to
                if content is None:
                    continue
                content = io.BytesIO(content.read())
                fresh.size = len(content.getbuffer())
            else:  # a pipe, a socket, a device
                continue
            out.addfile(fresh, content)
    return made.getvalue()


def statuses(output: str) -> dict[str, str]:
    """Reads the result of each test from what `pytest -rA` prints: by its name, and by the names that R2E-Gym
    (`Class.test`) and the parsers of swebench give it. Of two equal names the later one counts.
    """
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m|\r", "", output).splitlines():
        if match := _STATUS.match(line.strip()):
            status, whole = match.groups()
            name = whole
            if status != "PASSED":  # a message may stand behind
                name = whole.split(" - ")[0].strip()
            for each in (whole, _dotted(name), name, *_of_swebench(name)):
                found[each] = status
    return found


def _of_swebench(name: str) -> Iterator[str]:
    """Yields a name up to its first space, and so with a path among its parameters cut to its last part."""
    first = name.split()[0]
    yield first
    if match := _OPTION.match(first):
        test, option = match.groups()
        if option.startswith("/") and not option.startswith("//") and "*" not in option:
            yield f"{test}[/{option.split('/')[-1]}]"


def _status_of(name: str, found: Mapping[str, str]) -> str | None:
    """Returns the result of a test. A name that is cut off within its parameters, as 676 of SWE-bench Verified's are,
    stands for the tests that begin so, where they agree on whether they pass (swebench's _resolve_case).
    """
    if name in found or name.count("[") <= name.count("]"):
        return found.get(name)
    begin_so = [status for each, status in found.items() if each.startswith(name)]
    if len({status in _PASSING for status in begin_so}) != 1:
        return None
    return begin_so[0]


def _dotted(name: str) -> str:
    """The name without its file, as R2E-Gym writes it."""
    return ".".join(name.split("::")[1:]) or name


def _number_in(fresh: Sandbox, path: str) -> float:
    """Returns the number in a file of the tests, or under `reward` of a JSON object; 0 without one."""
    for each in (path, f"{posixpath.splitext(path)[0]}.json"):
        try:
            value = json.loads(fresh.read(each))
        except (SandboxError, ValueError):
            continue
        if isinstance(value, Mapping):
            value = value.get("reward")
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return 0.0
