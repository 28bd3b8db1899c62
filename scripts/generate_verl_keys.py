"""Writes mrl/tools/import_verl/verl_keys.txt: every key that a release of verl's trainer has, with its releases.

    python -m pip download --no-deps -d FOLDER verl==0.9.1        # each release that the table shall have
    python scripts/generate_verl_keys.py FOLDER/verl-*.whl

Read from each wheel, and never imported: the configurations of its trainers (`*trainer.yaml`), the fields of the
dataclasses that they name by `_target_`, and the keys that its sources read by `config.SECTION.get("name")`. A key
whose value is a free mapping (`{}`, or a field of type dict) ends in `.*`: verl takes any name below it.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "mrl" / "tools" / "import_verl" / "verl_keys.txt"
_TRAINERS = re.compile(
    r"verl/(trainer|experimental/(fully_async_policy|one_step_off_policy))/config/\w*ppo\w*trainer.yaml"
)
_READ = re.compile(r"config\.((?:\w+\.)+)get\(\s*[\"'](\w+)[\"']")
_READ_OF_DATA = re.compile(r"config\.get\(\s*[\"'](\w+)[\"']")
_DATA_SETS = "verl/utils/dataset/rl_dataset.py"  # its `config` is the section data
# Mappings that verl hands on as they are, although a release writes some of their names down.
_HANDED_ON = re.compile(r"(^|\.)(override_\w+|ray_init|kw_args|(?!val_|ray_)\w+_kwargs)$")
# Keys that a script gives as mappings of names of its own.
_NAMED_BY_THE_USER = (
    "custom_reward_function.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
    "distillation.teacher_models",
    "hydra",
)


@dataclass(frozen=True)
class Fields:
    """A dataclass of verl's: its bases, and its fields with the names that stand in their annotations."""

    bases: tuple[str, ...]
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)


def main(wheels: Sequence[str]) -> None:
    """Writes the table of the wheels."""
    keys: dict[str, list[str]] = {}
    releases = sorted(map(Path, wheels), key=lambda wheel: _ordered(_release(wheel)))
    for wheel in releases:
        for key in sorted(_keys(wheel)):
            keys.setdefault(key, []).append(_release(wheel))
    head = [
        "# verl's keys: first release, last release, key. Made by scripts/generate_verl_keys.py: do not edit.",
        f"# releases: {' '.join(map(_release, releases))}",
    ]
    table = {key: keys.get(key) or keys[f"{key.removesuffix('*')}?"] for key in _without_closed(keys)}
    lines = [f"{known[0]} {known[-1]} {key}" for key, known in table.items()]
    TARGET.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    print(f"{TARGET}: {len(lines)} keys of {len(releases)} releases")


def _release(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _ordered(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _keys(wheel: Path) -> set[str]:
    """Returns the keys of one release: free mappings with `.*` behind them, fields of type dict with `.?`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sources = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
        trees = [yaml.safe_load(archive.read(name)) for name in names if _TRAINERS.fullmatch(name)]
    classes = {name: fields for text in sources.values() for name, fields in _dataclasses(text)}
    keys: set[str] = {f"{name}.*" for name in _NAMED_BY_THE_USER}
    for tree in trees:
        tree.pop("defaults", None)
        tree.pop("hydra", None)
        keys |= set(_of_mapping(tree, "", classes))
    sections = {key.partition(".")[0] for key in keys}
    for name, text in sources.items():
        read = [chain + key for chain, key in _READ.findall(text) if chain.partition(".")[0] in sections]
        if name == _DATA_SETS:
            read += [f"data.{key}" for key in _READ_OF_DATA.findall(text)]
        keys |= {f"{key}.*" if _HANDED_ON.search(key) else key for key in read}
    return keys


def _without_closed(keys: Iterable[str]) -> list[str]:
    """Returns the keys of all releases in order, where `?` marks a field of type dict.

    Such a field is a free mapping unless a configuration writes names below it down. Names below a free mapping, and
    sections that sources read as a whole, are left out.
    """
    plain = {key for key in keys if not key.endswith(".?")}
    open_ones = {key for key in plain if key.endswith(".*")}
    for key in keys:
        section = key.removesuffix("?")
        if key.endswith(".?") and not any(other.startswith(section) for other in plain):
            open_ones.add(f"{section}*")
    free = tuple(key.removesuffix("*") for key in open_ones)
    closed = {key for key in plain - open_ones if not key.startswith(free) and f"{key}." not in free}
    sections = {".".join(key.split(".")[:count]) for key in closed for count in range(1, key.count(".") + 1)}
    return sorted(open_ones | closed - sections)


def _dataclasses(text: str) -> Iterator[tuple[str, Fields]]:
    if "@dataclass" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
            own = {
                each.target.id: tuple(re.findall(r"\w+", ast.unparse(each.annotation)))
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            yield node.name, Fields(tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases), own)


def _of_mapping(tree: dict[str, Any], above: str, classes: dict[str, Fields]) -> Iterator[str]:
    """Yields the keys of a mapping of a configuration, and those of its dataclass."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if name == "_target_":
            yield from _of_class(str(value).rpartition(".")[2], above, classes, ())
        elif value == {} or _HANDED_ON.search(key):
            yield f"{key}.*"
        elif isinstance(value, dict):
            yield from _of_mapping(value, f"{key}.", classes)
        else:
            yield key


def _of_class(name: str, above: str, classes: dict[str, Fields], inside: tuple[str, ...]) -> Iterator[str]:
    if name not in classes or name in inside:
        return
    for base in classes[name].bases:
        yield from _of_class(base, above, classes, (*inside, name))
    for own, types in classes[name].fields.items():
        nested = [each for each in types if each in classes]
        if own.startswith("_"):
            continue
        if _HANDED_ON.search(own):
            yield f"{above}{own}.*"
        elif {"dict", "Dict", "DictConfig"} & set(types):
            yield f"{above}{own}.?"
        elif nested:
            for each in nested:
                yield from _of_class(each, f"{above}{own}.", classes, (*inside, name))
        else:
            yield above + own


if __name__ == "__main__":
    main(sys.argv[1:])
