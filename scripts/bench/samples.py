"""Files of samples at the size of a large run: how fast one core writes a step, bytes a token, reading the worst.

    python scripts/bench/samples.py [--responses 8192] [--json]

Responses have lognormal lengths (mean 7,385 tokens, 1,190 to 20,480), token ids that thin out like words do, and
log-probs of a sharp distribution: most tokens are nearly sure. Written and read in one process; `command`: all of
`mrl samples RUN --worst 5`, its start and a tokenizer of as many words included. `..._busy_seconds`: of a processor,
which is what these take where nobody else computes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from data_plane import PROMPT, lengths_of
from tokenizers import Tokenizer, models

from mrl.data.samples import Sample, Samples, packed
from mrl.record.run_dir import CONFIG, RunDir
from mrl.record.sample_files import ROWS_AT_ONCE, StepFile, write_samples

VOCABULARY = 151_936


def pieces(lengths: np.ndarray) -> Iterator[Samples]:
    """Rows as the writer takes them."""
    for first in range(0, len(lengths), ROWS_AT_ONCE):
        yield packed([response(i, int(lengths[i])) for i in range(first, min(first + ROWS_AT_ONCE, len(lengths)))])


def response(number: int, tokens: int) -> Sample:
    """One of its own seed."""
    rng = np.random.default_rng(number)
    ids = np.minimum(rng.zipf(1.2, tokens), VOCABULARY - 1).astype(np.int32)
    log_probs = -rng.gamma(0.25, 1.0, tokens).astype(np.float32)
    return Sample(number // 16, number // 16, number, number, (7,) * PROMPT, ids, log_probs, "stop", 3)


class Clock:
    """Seconds since it was made: on the wall, and of processors, of this process or (`children`) of those it ran."""

    def __init__(self, children: bool = False):
        self._of = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
        self._begun = self._now()

    def _now(self) -> np.ndarray:
        used = resource.getrusage(self._of)
        return np.array([time.perf_counter(), used.ru_utime + used.ru_stime])

    def seconds(self) -> np.ndarray:
        """float64 [2]."""
        return self._now() - self._begun


def timed_writing(folder: Path, lengths: np.ndarray) -> np.ndarray:
    """Seconds of the writer, making up samples left out; see Clock."""
    making = np.zeros(2)

    def made() -> Iterator[Samples]:
        nonlocal making
        source = pieces(lengths)
        while True:
            clock = Clock()
            piece = next(source, None)
            making += clock.seconds()
            if piece is None:
                return
            yield piece

    scores = np.random.default_rng(0).random(len(lengths))
    clock = Clock()
    write_samples(folder, 1, made(), [{"score": float(score), "reason": "ok"} for score in scores])
    return clock.seconds() - making


def timed_reading(folder: Path) -> np.ndarray:
    """Seconds; see Clock."""
    clock = Clock()
    file = StepFile(folder, 1)
    assert len(file.read(file.worst(5))) == 5
    return clock.seconds()


def timed_command(run: Path) -> np.ndarray:
    """Seconds of the command in a process of its own, the second time: its files are in the page cache."""
    Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, "0")).save(str(run / "tokenizer.json"))
    (run / CONFIG).write_text(f"model: {{path: {run}}}")
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", "samples", str(run), "--worst", "5"]
    for _ in range(2):
        clock = Clock(children=True)
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds = clock.seconds()
    assert shown.count("=== step 1 ") == 5
    return seconds


def main() -> None:
    """Prints lines, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lengths = lengths_of(args.responses)
    with tempfile.TemporaryDirectory() as run:
        folder = RunDir(Path(run)).samples
        folder.mkdir()
        timed = {
            "write": timed_writing(folder, lengths),
            "worst_five": timed_reading(folder),
            "command": timed_command(Path(run)),
        }
        size = next(folder.glob("*.parquet")).stat().st_size
    tokens = int(lengths.sum()) + args.responses * PROMPT
    found = {"responses": args.responses, "tokens": tokens, "bytes": size, "bytes_per_token": size / tokens}
    for name, (wall, busy) in timed.items():
        found |= {f"{name}_seconds": wall, f"{name}_busy_seconds": busy}
    found["tokens_per_busy_second"] = tokens / found["write_busy_seconds"]
    print(json.dumps(found) if args.json else "\n".join(f"{name:24} {value:,.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
