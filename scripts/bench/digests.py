"""How fast a checkpoint is verified before a resume: by one thread and by several, of files that the page cache holds.

python scripts/bench/digests.py [--files 8] [--mib 128] [--json]
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from mrl.checkpoint import manifest
from mrl.checkpoint.manifest import check_digests, file_facts


def rate(folder: Path, facts: dict, readers: int) -> float:
    """Bytes a second."""
    manifest.MOST_READERS = readers
    checked = SimpleNamespace(all_files=lambda: facts)
    begun = time.perf_counter()
    check_digests(folder, checked)
    return sum(each["bytes"] for each in facts.values()) / (time.perf_counter() - begun)


def main() -> None:
    """Prints lines, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(args.files):
            (folder / f"rank-{number}").write_bytes(os.urandom(args.mib * 2**20))
        facts = {file.name: file_facts(file) for file in sorted(folder.iterdir())}
        found = {
            f"{readers} thread{'s' * (readers > 1)}": rate(folder, facts, readers)
            for readers in (1, min(args.files, os.cpu_count() or 1))
        }
    print(json.dumps(found) if args.json else "\n".join(f"{k:12} {v / 1e9:.2f} GB/s" for k, v in found.items()))


if __name__ == "__main__":
    main()
