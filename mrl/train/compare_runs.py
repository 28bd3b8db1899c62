"""Whether two runs ended alike, bit by bit, and the first place where they did not. Times are no part of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.checkpoint.manifest import Manifest, check_digests, read_manifest

# what a clock or the state of the machine decides
CLOCK = ("timing_", "perf/", "reshard/seconds", "reshard/peak_staging_bytes")


def checkpoint_difference(one: Path, other: Path) -> str | None:
    """The first difference of two checkpoints of the same layout: weights, optimizer, random states, place in the data. None: no bit.

    Raises EnvironmentFault for one that is damaged.
    """
    first, second = read_manifest(one), read_manifest(other)
    for folder, manifest in ((one, first), (other, second)):
        check_digests(folder, manifest)
    return next((text for text in _differences(one, other, first, second) if text), None)


def metrics_difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str | None:
    """The first difference of two lists of metrics lines, steps in order; None when all numbers are the same."""
    steps = [[row["training/global_step"] for row in rows] for rows in (one, other)]
    if steps[0] != steps[1]:
        return f"metrics: steps {steps[0]} and {steps[1]}"
    for a, b in zip(one, other, strict=True):
        for name in sorted(a.keys() | b.keys()):
            if not name.startswith(CLOCK) and not _same(a.get(name), b.get(name)):
                return f"metrics: {name} of step {a['training/global_step']} is {a.get(name)!r} and {b.get(name)!r}"
    return None


def _same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)  # NaN is like NaN


def _differences(one: Path, other: Path, first: Manifest, second: Manifest) -> Iterator[str | None]:
    for name in ("step", "layout", "dtype"):
        yield _unlike(name, getattr(first, name), getattr(second, name))
    for name in sorted(first.optimizer.keys() | second.optimizer.keys()):
        yield _unlike(f"optimizer {name}", first.optimizer.get(name), second.optimizer.get(name))
    yield _unlike("place in the data", first.trainer.get("cursor"), second.trainer.get("cursor"))
    yield _unlike("files", sorted(first.files()), sorted(second.files()))
    for file, facts in first.files().items():
        if facts != second.files()[file]:
            yield _tensor_difference(one / file, other / file, first)


def _unlike(what: str, a: Any, b: Any) -> str | None:
    return None if a == b else f"{what}: {a} and {b}"


def _tensor_difference(one: Path, other: Path, manifest: Manifest) -> str:
    """Names the first tensor of two files that differs, what it is in the model, and where."""
    from safetensors import safe_open

    names = {(e.file, e.key): sorted({p.hf_name for p in e.pieces}) for e in manifest.entries()}
    with safe_open(one, "pt") as a, safe_open(other, "pt") as b:
        if sorted(a.keys()) != sorted(b.keys()):
            return f"{one.name}: tensors {sorted(set(a.keys()) ^ set(b.keys()))[:4]} are in one of the two only"
        for key in sorted(a.keys()):
            x, y = a.get_tensor(key), b.get_tensor(key)
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"{one.name}, {key}: {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}"
            unlike = (x != y) & ~((x != x) & (y != y))
            if unlike.any():
                where = unlike.nonzero()[0].tolist()
                known = ", ".join(names.get((one.name, key), ())[:2])
                return (
                    f"{one.name}, {key}{f' ({known})' if known else ''}: {int(unlike.sum())} of {x.numel()} elements, first {where}: "
                    f"{x[tuple(where)].item()!r} and {y[tuple(where)].item()!r}"
                )
    return f"{one.name}: bytes differ and no number does (a sign of zero, or another order of tensors)"
