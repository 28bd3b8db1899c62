"""Collects what readers noted who had not seen the code: for each question the files that they opened, and seconds.

scripts/evidence/readers.py FOLDER COMMIT    prints JSON; FOLDER has one file a reader: before-NAME.json, now-NAME.json

COMMIT is the one that those of "now" read; before is that before the house was said plainly. A reader has README and
docs first, opens what they name, and notes every file of which lines were read. A file holds a list under "questions":
name (of QUESTIONS), opened, seconds, sure. Seconds are of a quick reader's clock: they compare two trees, and say
nothing of a person.
"""

import json
import sys
from pathlib import Path
from statistics import median

BEFORE = "8480244"
QUESTIONS = {
    "clips": "which line clips the ratio of GSPO",
    "bytes": "which bytes go from rank 3 to worker 1",
    "refuses": "what refuses a layout, all of it",
    "sleeping": "what a sleeping engine may be asked",
    "family": "how to add a family",
    "loss": "how to add a loss",
    "checkpoint": "how a checkpoint is written, from the loop to bytes",
    "metric_where": "where a metric is declared and described",
    "add_loss": "sketch a loss with a wider clip for positive advantages",
    "add_column": "sketch a reward column of the stored samples",
    "add_metric": "sketch a metric: share of responses with advantage zero",
}


def noted(folder: Path, side: str) -> dict:
    """Median files and seconds of each question over the readers of a side, and in all."""
    readers = [
        json.loads(file.read_text(encoding="utf-8"))["questions"] for file in sorted(folder.glob(f"{side}-*.json"))
    ]
    found = {}
    for name, text in QUESTIONS.items():
        answers = [each for reader in readers for each in reader if each["name"] == name]
        found[name] = {
            "question": text,
            "files": [len(each["opened"]) for each in answers],
            "opened": [each["opened"] for each in answers],
            "seconds": [each["seconds"] for each in answers],
            "sure": sum(bool(each["sure"]) for each in answers),
        }
    return {
        "readers": len(readers),
        "questions": found,
        "median_files": sum(median(each["files"]) for each in found.values()),
        "median_minutes": sum(median(each["seconds"]) for each in found.values()) / 60,
    }


def main() -> None:
    """Prints both sides."""
    folder = Path(sys.argv[1])
    sides = {"before": noted(folder, "before"), "now": noted(folder, "now")}
    print(json.dumps({"commit_before": BEFORE, "commit_read": sys.argv[2]} | sides))


if __name__ == "__main__":
    main()
