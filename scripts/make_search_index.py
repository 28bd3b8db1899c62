"""Writes the index of the shipped tool `search` from JSON lines, each with a title and a text.

python scripts/make_search_index.py passages.jsonl --out passages.sqlite
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mrl.acting.search_tool import write_index


def passages(file: Path) -> Iterator[tuple[str, str]]:
    """Raises ValueError for a line that is none."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("title", "text")):
                raise ValueError(f"{file}, line {number}: no object with the texts title and text")
            yield row["title"], row["text"]


def main() -> None:
    """Prints how many passages there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the index; must not exist")
    options = parser.parse_args()
    if options.out.exists():
        sys.exit(f"--out {options.out} is there already")
    try:
        count = write_index(options.out, passages(options.file))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"{options.out}: {count} passages")


if __name__ == "__main__":
    main()
