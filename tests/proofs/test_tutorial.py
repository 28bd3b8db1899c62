"""Every command of the tutorial as a newcomer runs it: in a fresh clone, page after page, each block as it is written.

Nothing is installed in the clone before the first page's first command, the quickstart.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3 * 3600)]

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "own_data", "own_reward", "first_run", "one_node", "to_a_cluster", "from_verl", "first_hour",
    "own_tool", "own_agent", "own_loss",
)  # fmt: skip
BLOCK_S = 1200.0  # deadline of one block
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Lines of bash of one page."""

    page: str
    text: str


def blocks(root: Path) -> Iterator[Block]:
    """Blocks of all pages, in the order in which they are read."""
    for page in PAGES:
        text = (root / "docs" / "tutorial" / f"{page}.md").read_text(encoding="utf-8")
        yield from (Block(page, found[1]) for found in BLOCK.finditer(text))


def test_each_command_of_the_tutorial_runs_as_it_is_written(tmp_path):
    clone = tmp_path / "mrl"
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not changed.stdout, f"commit these first, the clone does not have them:\n{changed.stdout}"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    clean = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
    activate = clone / ".venv" / "bin" / "activate"
    for block in blocks(clone):
        began = time.monotonic()
        text = f"source {activate}\n{block.text}" if activate.exists() else block.text
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=clone, env=clean, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=BLOCK_S, check=False,
        )  # fmt: skip
        print(f"{block.page}: {block.text.splitlines()[0]}: {time.monotonic() - began:.1f} s", flush=True)
        assert done.returncode == 0, f"{block.text}\n{done.stdout[-4000:]}"
