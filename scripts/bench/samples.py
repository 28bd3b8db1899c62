"""Files of samples at the size of a large run: how fast one core writes a step, bytes a token, reading the worst.

    python scripts/bench/samples.py [--responses 8192] [--json]

Responses have lognormal lengths (mean 7,385 tokens, 1,190 to 20,480), token ids that thin out like words do, and
log-probs of a sharp distribution: most tokens are nearly sure. Written and read in one process; `command`: all of
`mrl samples RUN --worst 5`, its start and a tokenizer of as many words included.
"""

import argparse
import json
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


def timed_writing(folder: Path, lengths: np.ndarray) -> float:
    """Seconds of the writer, making up samples left out."""
    making = 0.0

    def made() -> Iterator[Samples]:
        nonlocal making
        source = pieces(lengths)
        while True:
            begun = time.perf_counter()
            piece = next(source, None)
            making += time.perf_counter() - begun
            if piece is None:
                return
            yield piece

    scores = np.random.default_rng(0).random(len(lengths))
    begun = time.perf_counter()
    write_samples(folder, 1, made(), [{"score": float(score), "reason": "ok"} for score in scores])
    return time.perf_counter() - begun - making


def timed_command(run: Path) -> float:
    """Seconds of the command in a process of its own, the second time: its files are in the page cache."""
    Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, "0")).save(str(run / "tokenizer.json"))
    (run / CONFIG).write_text(f"model: {{path: {run}}}")
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", "samples", str(run), "--worst", "5"]
    for _ in range(2):
        begun = time.perf_counter()
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds = time.perf_counter() - begun
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
        seconds = timed_writing(folder, lengths)
        begun = time.perf_counter()
        file = StepFile(folder, 1)
        worst = file.read(file.worst(5))
        found = {
            "responses": args.responses,
            "tokens": int(lengths.sum()) + args.responses * PROMPT,
            "write_seconds": seconds,
            "worst_five_seconds": time.perf_counter() - begun,
            "bytes": next(folder.glob("*.parquet")).stat().st_size,
            "command_seconds": timed_command(Path(run)),
        }
        assert len(worst) == 5
    found |= {"bytes_per_token": found["bytes"] / found["tokens"], "tokens_per_second": found["tokens"] / seconds}
    print(json.dumps(found) if args.json else "\n".join(f"{name:20} {value:,.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
