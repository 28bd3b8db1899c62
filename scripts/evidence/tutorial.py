"""Every command of the tutorial as a newcomer runs it: in a fresh clone, page after page, each block as it is written.

    scripts/evidence/tutorial.sh [--work FOLDER]

The clone is made of this repository's HEAD; nothing is installed in it before the first page's first command, the
quickstart, which is what its seconds count. A block that ends with another code than 0 ends everything. What each block
took goes to docs/results/tutorial.json.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stamp import facts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "tutorial.json"
PAGES = (
    "own_data", "own_reward", "first_run", "one_node", "to_a_cluster", "from_verl", "first_hour",
    "own_tool", "own_agent", "own_loss",
)  # fmt: skip
BLOCK_S = 1200.0  # deadline of one block
_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Lines of bash of one page."""

    page: str
    text: str


@dataclass(frozen=True)
class Ran:
    page: str
    first_line: str
    seconds: float


def blocks(root: Path) -> Iterator[Block]:
    """Of all pages, in the order in which they are read."""
    for page in PAGES:
        text = (root / "docs" / "tutorial" / f"{page}.md").read_text(encoding="utf-8")
        yield from (Block(page, found[1]) for found in _BLOCK.finditer(text))


def run(clone: Path, block: Block) -> tuple[Ran, str]:
    """Its time, and what it printed. Raises SystemExit with the end of that where it fails."""
    began, activate = time.monotonic(), clone / ".venv" / "bin" / "activate"
    text = f"source {activate}\n{block.text}" if activate.exists() else block.text
    clean = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=clone, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BLOCK_S, check=False,
    )  # fmt: skip
    ran = Ran(block.page, block.text.splitlines()[0], round(time.monotonic() - began, 1))
    print(f"{ran.page}: {ran.first_line}: {ran.seconds} s", flush=True)
    if ended.returncode:
        raise SystemExit(f"ended with {ended.returncode}:\n{block.text}\n{ended.stdout[-4000:]}")
    return ran, ended.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "tutorial", help="an empty or new folder")
    clone = parser.parse_args().work / "mrl"
    if clone.exists():
        raise SystemExit(f"{clone} exists: a newcomer's folder is empty")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    ran, printed = zip(*(run(clone, block) for block in blocks(clone)), strict=True)
    quickstart = json.loads(printed[0].splitlines()[-1])
    result = facts("scripts/evidence/tutorial.sh") | {
        "machine": platform.machine(),
        "quickstart": {key: quickstart[key] for key in ("before", "after", "steps", "seconds")},
        "seconds": round(sum(each.seconds for each in ran), 1),
        "blocks": [asdict(each) for each in ran],
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(clone)


if __name__ == "__main__":
    main()
