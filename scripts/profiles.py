"""Text of docs/profiles.md: where the time of a missed goal goes, by stored results, and what was tried."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from claims import load, markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
SOURCE = ROOT / "docs" / "source" / "profiles.yaml"
LEAST = 0.03  # of a process's seconds: parts below it are one row
SHOWN = 12  # parts of a start

Rows = list[list[str]]


def page() -> str:
    """The whole page."""
    source = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    return "\n".join([source["intro"], *(text for entry in source["profiles"] for text in section(entry))])


def section(entry: dict[str, Any]) -> list[str]:
    """One profile: its goals, its table, and what was tried."""
    data = json.loads((RESULTS / entry["result"]).read_text(encoding="utf-8"))
    goals = "; ".join(map(_goal, entry["goals"]))
    found = [f"## {entry['title']}\n", f"Missed: {goals}.\n", _origin(entry, data) + "\n"]
    heads, rows = TABLES[entry["table"]](data, entry)
    found += [markdown(heads, rows) + "\n", entry["reading"].strip() + "\n", "Tried:\n"]
    return [*found, *(f"* {text}" for text in entry["tried"]), ""]


def _goal(begin: str) -> str:
    """A missed goal and its bound. Raises ValueError unless one claim that is missed begins so."""
    missed = [claim for claim in load()["measured"] if "missed" in claim and claim["claim"].startswith(begin)]
    if len(missed) != 1:
        raise ValueError(f"docs/source/profiles.yaml: {len(missed)} missed goals begin with {begin!r}")
    return f"{begin} ({missed[0]['bound']})"


def _origin(entry: dict[str, Any], data: dict[str, Any]) -> str:
    name = entry["result"]
    return f"`{data['command']}`, [{name}](results/{name}), at `{data['commit'][:7]}`, load {data['load']}."


def sampled(data: dict[str, Any], entry: dict[str, Any]) -> tuple[list[str], Rows]:
    """A case of scripts/bench/step_profile.py."""
    rows = []
    for role, parts in data[entry["case"]]["busy_s"].items():
        whole = sum(parts.values())
        shown = {part: seconds for part, seconds in parts.items() if seconds >= LEAST * whole}
        told = [f"{part} {seconds:.2f}" for part, seconds in shown.items()]
        if len(shown) < len(parts):
            told.append(f"{len(parts) - len(shown)} smaller {whole - sum(shown.values()):.2f}")
        rows.append([role, f"{whole:.2f}", ", ".join(told)])
    return ["process", "seconds of a processor, a step", "of which"], rows


def counted(data: dict[str, Any], entry: dict[str, Any]) -> tuple[list[str], Rows]:
    """Processor seconds of a sync over shared memory, by side and by what is done there."""
    processor = data["shm"]["processor"]
    rows = []
    for side in ("ranks", "engine"):
        parts = {name.partition(".")[2]: value for name, value in processor.items() if name.startswith(f"{side}.")}
        parts.pop("complete", None)  # processing and digests of the engine, which stand beside it
        told = ", ".join(f"{part} {seconds:.3f}" for part, seconds in sorted(parts.items(), key=lambda row: -row[1]))
        rows.append([side, f"{sum(parts.values()):.3f}", told])
    return ["side", "seconds of a processor, a sync", "of which"], rows


def started(data: dict[str, Any], entry: dict[str, Any]) -> tuple[list[str], Rows]:
    """The longest parts of a start, before and now; parts of several processes lie beside each other."""
    parts, before = data["after"]["parts"], data["before"]["parts"]
    longest = sorted(parts, key=lambda name: -parts[name]["seconds"])[:SHOWN]
    rows = [
        [
            f"`{name}`",
            f"{parts[name]['began']:.1f}",
            f"{parts[name]['seconds']:.1f}",
            f"{before[name]['seconds']:.1f}" if name in before else "",
            str(parts[name]["processes"]),
        ]
        for name in longest
    ]
    return ["part", "begins, s", "takes, s", "took before, s", "processes"], rows


TABLES: dict[str, Callable[[dict[str, Any], dict[str, Any]], tuple[list[str], Rows]]] = {
    "sampled": sampled,
    "counted": counted,
    "started": started,
}
