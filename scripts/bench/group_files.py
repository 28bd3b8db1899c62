"""What it costs to write the groups that generation was ahead with: 16 responses of 7,385 tokens, without and with the
routes of Qwen3-235B-A22B (94 layers, 8 experts a token).

    python scripts/bench/group_files.py [--groups 4] [--json]        no device; half a minute

One process writes them, as one of at most four writers of a run does (mrl/generate/group_writer.py). `step_s` is what
512 such groups take of it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from mrl.checkpoint.group_files import GroupRecord, write_group
from mrl.data.samples import Sample, Samples, packed
from mrl.generate.group_writer import MOST_WRITERS

PROMPT, RESPONSE, N = 300, 7385, 16
LAYERS, EXPERTS, TOP_K = 94, 128, 8
STEP = 512  # groups


def group(rng: np.random.Generator, with_routes: bool) -> Samples:
    """Responses of random tokens, which nothing compresses."""
    rows = []
    for index in range(N):
        routes = None
        if with_routes:
            routes = rng.integers(0, EXPERTS, (PROMPT + RESPONSE, LAYERS, TOP_K)).astype(np.uint8)
        prompt, response = rng.integers(0, 150_000, PROMPT), rng.integers(0, 150_000, RESPONSE)
        log_probs = np.log(rng.random(RESPONSE)).astype(np.float32)
        rows.append(Sample(index, 0, index, 0, prompt, response, log_probs, "stop", 0, routes=routes))
    return packed(rows)


def measured(groups: int, with_routes: bool) -> dict[str, float]:
    """Bytes and seconds of a group, the disk's waiting included, and seconds of a step's groups."""
    record = GroupRecord(0, 0, group(np.random.default_rng(0), with_routes), {})
    with tempfile.TemporaryDirectory() as folder:
        began, worked = time.perf_counter(), time.process_time()
        size = sum(write_group(Path(folder, f"{number}.npz"), record)["bytes"] for number in range(groups))
        seconds, busy = time.perf_counter() - began, time.process_time() - worked
    return {
        "group_bytes": size // groups,
        "group_s": seconds / groups,
        "group_busy_s": busy / groups,
        "step_s": seconds / groups * STEP,
    }


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {name: measured(args.groups, name == "routes") for name in ("plain", "routes")} | {"writers": MOST_WRITERS}
    if args.json:
        print(json.dumps(found))
        return
    for name in ("plain", "routes"):
        row = found[name]
        print(f"{name}: {row['group_bytes'] / 1e6:.1f} MB a group in {row['group_s']:.2f} s")
        print(f"    a step of {STEP} groups: {row['step_s']:.0f} s of one writer, of which there may be {MOST_WRITERS}")


if __name__ == "__main__":
    main()
