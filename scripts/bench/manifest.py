"""What saying and reading of a checkpoint's tensors costs: the manifest of Qwen3-235B-A22B on 128 ranks, no weights.

    python scripts/bench/manifest.py [--json]                 no device; about a minute

Ranks hold what Megatron's ranks hold, and of moments and master weights what a distributed optimizer that cuts the
buffer of a rank's parameters into equal parts would. Of each kind of reader, one: a process that reads the manifest and
finds every tensor of one rank, seconds and the most memory of its objects. `one_file`: the same in a manifest of
format 1, which has the entries of all ranks in it. `written` is what one rank and then the driver take, of the same.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mrl.checkpoint.manifest import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    Manifest,
    RankFiles,
    StoredTensor,
    described,
    read_manifest,
    write_manifest,
)
from mrl.checkpoint.stored_boxes import BoxReader, Descriptions
from mrl.cli.convert import parse_layout
from mrl.model import known_spec
from mrl.model.boxes import Box, boxes_of_range
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.registry import known_hf_config

MODEL = "Qwen3-235B-A22B"
WRITTEN = "tp=4,pp=8,ep=16,first=11,last=11,world=128"
OTHER = "tp=8,pp=4,ep=32,first=23,last=23,world=128"
READER = 77
OPTIMIZER = (MASTER, EXP_AVG, EXP_AVG_SQ)
FACTS = {"step": 1.0, "num_updates": 1, "lr": 1e-6, "scheduler": {}}


def layout_of(degrees: str) -> TrainLayout:
    """As `mrl convert --layout` reads them."""
    return TrainLayout.build(parse_layout(degrees), known_spec(MODEL))


def parts(layout: TrainLayout, rank: int) -> Iterator[tuple[Shard, tuple[int, int] | None]]:
    """Parameters of a rank, each with the part whose moments the rank has."""
    shards = source_shards(known_spec(MODEL), layout, rank)
    for is_expert in (False, True):
        group = layout.expert_group(rank, "edp") if is_expert else layout.dense_group(rank, "cp", "dp")
        own = [shard for shard in shards if shard.is_expert == is_expert]
        share = sum(Box.whole(shard.local_shape).volume for shard in own) / len(group)
        begin, end = int(share * group.index(rank)), int(share * (group.index(rank) + 1))
        at = 0
        for shard in own:
            size = Box.whole(shard.local_shape).volume
            flat = max(begin - at, 0), min(end - at, size)
            yield shard, flat if flat[0] < flat[1] else None
            at += size


def rank_files(layout: TrainLayout, rank: int) -> RankFiles:
    """What the rank says of its part of a checkpoint."""
    name = f"rank-{rank:05d}.safetensors"
    entries: list[StoredTensor] = []
    for shard, flat in parts(layout, rank):
        group = layout.expert_group(rank, "edp") if shard.is_expert else layout.dense_group(rank, "cp", "dp")
        key = f"{shard.vp_chunk}.{shard.megatron_name}"
        if shard.primary == rank:
            entries.append(StoredTensor(name, f"{WEIGHT}/{key}", WEIGHT, shard.local_shape, None, shard.pieces))
        if flat is not None and shard.primary in group:
            entries += [
                StoredTensor(name, f"{role}/{key}", role, shard.local_shape, flat, shard.pieces) for role in OPTIMIZER
            ]
    return RankFiles(tuple(entries), {name: {"bytes": 0, "sha256": "0" * 64}}, FACTS)


def write(folder: Path, layout: TrainLayout) -> dict[str, float]:
    """A checkpoint without weights; seconds of the slowest rank and of the driver."""
    slowest, ranks, entries = 0.0, [], 0
    for rank in range(layout.world_size):
        part = rank_files(layout, rank)
        entries += len(part.entries)
        begun = time.perf_counter()
        ranks.append(described(folder, rank, part).to_json())
        slowest = max(slowest, time.perf_counter() - begun)
        (folder / f"rank-{rank:05d}.safetensors").touch()
    begun = time.perf_counter()
    manifest = Manifest(
        1, {}, "bfloat16", known_hf_config(MODEL), tuple(RankFiles.from_json(part) for part in ranks), {}, {}
    )
    write_manifest(folder, manifest)
    return {"entries": entries, "rank_s": slowest, "driver_s": time.perf_counter() - begun}


def write_one_file(folder: Path, source: Path) -> None:
    """The same checkpoint as format 1 has it."""
    manifest = read_manifest(source)
    ranks = [replace(rank, entries=rank.read_entries(source)) for rank in manifest.ranks]
    for rank in ranks:
        for name in rank.files:
            (folder / name).touch()
    data = json.loads((source / "manifest.json").read_text())
    for name in ("hf_files", "digest"):  # format 1 had neither
        del data[name]
    data |= {"format": 1, "ranks": [rank.to_json() for rank in ranks]}
    (folder / "manifest.json").write_text(json.dumps(data))


def read(folder: Path, layout: TrainLayout) -> dict[str, float]:
    """Finds all that one rank of `layout` loads: seconds, bytes of Python's objects at most, descriptions read."""
    wanted = list(parts(layout, READER))
    begun = time.perf_counter()
    found_in(folder, wanted)
    seconds = time.perf_counter() - begun
    tracemalloc.start()  # slows it down, so it is another time
    descriptions = found_in(folder, wanted)
    return {"seconds": seconds, "memory_bytes": tracemalloc.get_traced_memory()[1], "descriptions": descriptions}


def found_in(folder: Path, wanted: list[tuple[Shard, tuple[int, int] | None]]) -> int:
    """Finds parameters of a rank; the number of descriptions that were read."""
    manifest = read_manifest(folder)
    known = [entry for part in manifest.ranks for entry in part.entries or ()]
    more = Descriptions(folder, manifest.ranks, READER)
    reader = BoxReader(folder, known, None, more)
    reader.boxes.check_whole(folder)
    for shard, flat in wanted:
        find(reader, shard, flat)
    return len(manifest.ranks) - more.unread


def find(reader: BoxReader, shard: Shard, flat: tuple[int, int] | None) -> None:
    """Finds the weights of a parameter, and the part of it whose moments the rank has."""
    for piece in shard.pieces:
        list(reader.overlaps(WEIGHT, piece.hf_name, piece.hf_box))
    boxes = boxes_of_range(shard.local_shape, *flat) if flat is not None else []
    common = [(piece, piece.local_box.intersect(box)) for piece in shard.pieces for box in boxes]
    for piece, box in ((piece, box) for piece, box in common if box is not None):
        for role in OPTIMIZER:
            list(reader.overlaps(role, piece.hf_name, box.rebase(piece.local_box, piece.hf_box)))


def read_in_a_process(folder: Path, layout: str) -> dict[str, float]:
    """Whose memory nothing else has grown."""
    command = [sys.executable, __file__, "--read", str(folder), "--layout", layout]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(work: Path) -> dict:
    parted, single = work / "parted", work / "single"
    for folder in (parted, single):
        folder.mkdir()
    written = write(parted, layout_of(WRITTEN))
    write_one_file(single, parted)
    begun = time.perf_counter()
    read_manifest(parted)
    driver_s = time.perf_counter() - begun
    descriptions = [file.stat().st_size for file in parted.glob("rank-*.json")]
    return {
        "model": MODEL, "written_at": WRITTEN, "other": OTHER, "written": written, "driver_reads_s": driver_s,
        "bytes": {
            "manifest": (parted / "manifest.json").stat().st_size, "descriptions": sum(descriptions),
            "largest_description": max(descriptions), "one_file": (single / "manifest.json").stat().st_size,
        },
        "same_layout": read_in_a_process(parted, WRITTEN), "other_layout": read_in_a_process(parted, OTHER),
        "one_file": read_in_a_process(single, WRITTEN),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(read(options.read, layout_of(options.layout))))
        return
    with tempfile.TemporaryDirectory() as work:
        found = measure(Path(work))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:15} {value}")


if __name__ == "__main__":
    main()
