"""The unit tests that a change concerns: `python scripts/changed_tests.py [COMMIT]` prints their files, one a line.

Changed is what differs from the commit at which this branch left COMMIT (`main` where none is given), committed or not.
A file of tests is concerned if it changed, or if a changed module is in its import closure: the modules of `mrl` and
helpers that it imports or names in a string, what these import at once, and, of those that the test names itself, what
their functions import too; of the commands that `mrl` has, those whose word is in the test. A changed file
that is no module concerns the tests that have its name in their text, or the name of its top folder if that is one of
presets, pages or starters; a table of `mrl` concerns those of the modules beside it. What all tests share concerns all.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
from house import House, closure  # noqa: E402

FOLDERS = ("tests/unit", "tests/outside")
SHARED = re.compile(r"tests/\w+/conftest\.py|tests/unit/small_model\.py|pyproject\.toml|setup\.py")
WHOLE_TREE = "tests/unit/test_house.py"  # reads every module
COMMANDS = "mrl.cli.main"  # imports every command, and a test runs one
READ_AS_A_FOLDER = ("parallel_configs", "docs", "launch")
MODULE = re.compile(r"mrl(?:\.\w+)+")


def changed_files(since: str) -> list[str]:
    """Paths below the root. Raises subprocess.CalledProcessError for a commit that is not known."""
    base = _git("merge-base", since, "HEAD")
    lines = [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]
    return sorted(set(lines))


def _git(*arguments: str) -> str | list[str]:
    told = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return told.strip() if arguments[0] == "merge-base" else told.splitlines()


def concerned(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Files of tests below `root` that any of the changed files concerns."""
    changed = set(changed)
    texts = {
        path.relative_to(root).as_posix(): path.read_text() for name in FOLDERS for path in (root / name).glob("*.py")
    }
    tests = sorted(path for path in texts if Path(path).name.startswith("test_"))
    if any(SHARED.fullmatch(path) for path in changed):
        return tests
    house = House.of_folder(root)
    named = {path: _named(text) for path, text in texts.items()}
    helpers = {Path(path).stem: path for path in texts}
    modules = {module for path in changed for module in _modules(path, house)}
    words = {word for path in changed for word in _words(path)}
    found = [WHOLE_TREE] if changed and WHOLE_TREE in tests else []
    for test in tests:
        own = _with_helpers(test, named, helpers)
        text = "\n".join(texts[path] for path in own)
        reached = _reached(house, set().union(*(named[path] for path in own)), text)
        if own & changed or reached & modules or any(_is_word(word, text) for word in words):
            found.append(test)
    return sorted(set(found))


def _modules(path: str, house: House) -> set[str]:
    """Modules of `mrl` that a file is, or that stand beside a table."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if path.endswith(".py") or not path.startswith("mrl/"):
        return {module}
    beside = {name for name in house.modules if name.rpartition(".")[0] == str(Path(path).parent).replace("/", ".")}
    return beside or {str(Path(path).parent.parent).replace("/", ".")}


def _words(path: str) -> set[str]:
    """By what the text of a test names a file that is no module."""
    if path.endswith(".py") and path.startswith(("mrl/", *FOLDERS)):
        return set()
    name, top = Path(path).name, path.split("/")[0]
    if path.startswith("tests/outside/golden/"):
        return {f"""{quote}{name.split(".")[0]}{quote}""" for quote in "'\""}
    return {name, top} if top in READ_AS_A_FOLDER else {name}


def _named(text: str) -> set[str]:
    """Dotted names that a file imports, or has in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=str(module)):
                found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.Constant(value=str(words)):
                for parts in (name.split(".") for name in MODULE.findall(words)):
                    found |= {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
    return found


def _with_helpers(test: str, named: dict[str, set[str]], helpers: dict[str, str]) -> set[str]:
    """A file of tests and those beside it that it imports, through each other too."""
    seen, todo = set(), {test}
    while todo:
        seen.add(path := todo.pop())
        todo |= {helpers[name] for name in named[path] & helpers.keys()} - seen
    return seen


def _reached(house: House, names: set[str], text: str) -> set[str]:
    """Modules that a test with this text runs, by the names in it."""
    first = names & house.modules.keys()
    first = first.union(*(house.graph[name] for name in first - {COMMANDS}))
    commands = {name for name in house.graph[COMMANDS] if not name.startswith("mrl.cli.") or _is_command(name, text)}
    return closure(first, house.graph_at_import | {COMMANDS: commands})


def _is_command(module: str, text: str) -> bool:
    return _is_word(module.rpartition(".")[2].replace("_", "-"), text)


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


if __name__ == "__main__":
    print("\n".join(concerned(changed_files(*(sys.argv[1:] or ["main"])))))
