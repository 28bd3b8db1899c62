"""What a resume reads: digests of a checkpoint's files and its tensors, by one thread and by several, alternated.

    python scripts/bench/resume.py [--rounds 3] [--experts 64] [--json]

The checkpoint is of a synthetic Qwen3-MoE of random bits, in files of two pipeline stages x two expert ranks, and lies
in the page cache, so that it is the processor that is measured. Digests are checked by the function that ranks and
driver call, tensors filled by the reader of a rank; several stand for several ranks, with tensors of their own.
`predicted`: seconds that `mrl plan` says of the 235B preset on 16 nodes, at its assumed rate of one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from convert import LAYOUT, make_model

from mrl.checkpoint.manifest import Manifest, check_files, read_manifest
from mrl.checkpoint.open_checkpoint import SafetensorsFiles
from mrl.checkpoint.stored_boxes import BoxReader
from mrl.model.boxes import Box

ROOT = Path(__file__).resolve().parents[2]
PRESET = "parallel_configs/qwen3-235b-a22b/h100-16x8.yaml"
MRL = Path(sys.executable).with_name("mrl")


def checkpoint(work: Path, experts: int) -> Path:
    """A step's folder, converted from random weights."""
    make_model(work / "model", experts)
    command = [MRL, "convert", "hf-to-megatron", work / "model", "-o", work / "ours", "--layout", LAYOUT, "--json"]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return next(work.glob("ours/**/manifest.json")).parent


def load(folder: Path, manifest: Manifest, readers: int) -> int:
    """Fills every tensor of the checkpoint, each reader its share; bytes read."""

    def read(own: int) -> int:
        files = SafetensorsFiles(folder, manifest.files(), False, when_needed=True)
        reader = BoxReader(folder, manifest.read_entries(folder), files)
        for (role, name), boxes in list(reader.boxes.of_tensor.items())[own::readers]:
            ends = [[end for _, end in stored.piece.hf_box.ranges] for stored in boxes]
            whole = Box.whole([max(of_axis) for of_axis in zip(*ends, strict=True)])
            reader.fill(role, name, whole, np.empty(whole.shape, np.int16))  # bfloat16, all of them
        reader.close()
        return reader.bytes_read

    with ThreadPoolExecutor(readers) as pool:
        return sum(pool.map(read, range(readers)))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(work: Path, rounds: int, experts: int, threads: int) -> dict:
    folder = checkpoint(work, experts)
    manifest = read_manifest(folder)
    files = manifest.files()
    sides = {
        "digests, one thread": lambda: check_files(folder, files, 1),
        f"digests, {threads} threads": lambda: check_files(folder, files, threads),
        "tensors, one reader": lambda: load(folder, manifest, 1),
        f"tensors, {threads} readers": lambda: load(folder, manifest, threads),
    }
    loaded = load(folder, manifest, 1)  # and the page cache is warm
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(timed(side))
    nbytes = {name: sum(facts["bytes"] for facts in files.values()) if "digests" in name else loaded for name in sides}
    rates = {name: nbytes[name] / median(values) for name, values in seconds.items()}
    one, several, reader, readers = rates.values()
    answer = subprocess.run([str(MRL), "plan", PRESET, "--json"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {
        "files": len(files), "bytes": nbytes, "seconds": seconds, "bytes_per_s": rates,
        "times_faster": {"digests": several / one, "tensors": readers / reader},
        "predicted": {"preset": PRESET, "resume_seconds": json.loads(answer.stdout)["times"]["resume_seconds"]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts", type=int, default=64, help="in a layer; 64 make 2 GB, 16 make 0.65 GB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(Path(work), options.rounds, options.experts, len(os.sched_getaffinity(0)))
    if options.json:
        print(json.dumps(found))
        return
    for name, seconds in found["seconds"].items():
        rounds = " ".join(f"{s:6.2f}" for s in seconds)
        print(f"{name:22} {rounds}   {found['bytes_per_s'][name] / 1e9:5.2f} GB/s")
    print(f"several over one: {found['times_faster']}")
    print(f"predicted for {PRESET}: {found['predicted']['resume_seconds']:.0f} s")


if __name__ == "__main__":
    main()
