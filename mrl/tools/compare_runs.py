"""Tells whether two runs ended equal, bit by bit, or where they first differ.

`verify_resume` uses this to prove that a run resumes exactly. Times are not compared.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from mrl.checkpoint.manifest import Manifest, check_digests, read_manifest
from mrl.config.load import ResolvedConfig
from mrl.config.run_rules import run_dir as run_dir_of
from mrl.errors import MrlError
from mrl.record.run_dir import RunDir, read_metrics
from mrl.tools.own_command import run_mrl, stopped_by_sigterm

# Prefixes of metrics that depend on a clock or the state of the machine, see is_of_clock. Drafts are counted in all
# answers since the sync before, also in those of a validation, which a run that resumes does not repeat.
CLOCK = (
    "timing_", "perf/", "switch/", "reshard/seconds", "reshard/peak_staging_bytes", "trainer/restarts",
    "trainer/replayed_responses", "fleet/", "drafts/",
)  # fmt: skip
OUTPUT_TAIL = 1500  # limit of shown characters of a failed run's output


def checkpoint_difference(first: Path, second: Path) -> str | None:
    """Returns the first difference of two checkpoints of the same layout: weights, optimizer, random states, data
    position.

    Returns None if all bits are equal. Raises EnvironmentFault for a damaged one.
    """
    first_manifest = read_manifest(first)
    second_manifest = read_manifest(second)
    for folder, manifest in ((first, first_manifest), (second, second_manifest)):
        check_digests(folder, manifest)
    return next((text for text in _differences(first, second, first_manifest, second_manifest) if text), None)


def metrics_difference(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the first difference of two lists of metrics lines, steps in order; None if all numbers are equal."""
    first_steps = [row["training/global_step"] for row in first]
    second_steps = [row["training/global_step"] for row in second]
    if first_steps != second_steps:
        return f"metrics: steps {first_steps} and {second_steps}"
    for a, b in zip(first, second, strict=True):
        for name in sorted(a.keys() | b.keys()):
            # counts of a weight sync are lower with fewer engines, although the weights are equal
            if is_of_clock(name) or (name.startswith("reshard/") and lacked_engines(a, b)):
                continue
            if not _same(a.get(name), b.get(name)):
                return f"metrics: {name} of step {a['training/global_step']} is {a.get(name)!r} and {b.get(name)!r}"
    return None


def is_of_clock(name: str) -> bool:
    """Tells whether a metric depends on a clock or the state of the machine."""
    return name.startswith(CLOCK) or (name.startswith("tools/") and name.endswith("/seconds"))


def of_run(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a response of `read_samples` without what depends on the machine: the engine, which is unknown where a
    checkpoint or a restart brought the response, and the seconds of turns and calls.
    """
    parts = {name: [{**part, "seconds": 0.0} for part in row[name]] for name in ("turns", "calls") if name in row}
    return {name: value for name, value in row.items() if name != "engine"} | parts


def lacked_engines(*rows: Mapping[str, Any]) -> bool:
    """Tells whether an engine was missing in one of these steps."""
    ready = {row.get("fleet/engines_ready") for row in rows}
    return len(ready) > 1 or any(row.get("fleet/lost") or row.get("fleet/restarted") for row in rows)


def _same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)  # NaN equals NaN


def _differences(
    first: Path, second: Path, first_manifest: Manifest, second_manifest: Manifest
) -> Iterator[str | None]:
    for name in ("step", "layout", "dtype"):
        yield _unlike(name, getattr(first_manifest, name), getattr(second_manifest, name))
    for name in sorted(first_manifest.optimizer.keys() | second_manifest.optimizer.keys()):
        yield _unlike(f"optimizer {name}", first_manifest.optimizer.get(name), second_manifest.optimizer.get(name))
    yield _unlike("place in the data", first_manifest.trainer.get("cursor"), second_manifest.trainer.get("cursor"))
    yield _unlike("files", sorted(first_manifest.files()), sorted(second_manifest.files()))
    yield _unlike("groups on their way", first_manifest.files_beside(), second_manifest.files_beside())
    if first_manifest.critic or second_manifest.critic:
        yield from _differences(first, second, first_manifest.of_critic, second_manifest.of_critic)
    for file, facts in first_manifest.files().items():
        if facts != second_manifest.files()[file]:
            yield _tensor_difference(first / file, second / file, first_manifest)


def _unlike(what: str, a: Any, b: Any) -> str | None:
    if a == b:
        return None
    return f"{what}: {a} and {b}"


def _tensor_difference(first: Path, second: Path, manifest: Manifest) -> str:
    """Names the first tensor of two files that differs, its name in the model, and where."""
    from safetensors import safe_open

    names = {}
    for entry in manifest.read_entries(first.parent):
        names[entry.file, entry.key] = sorted({piece.hf_name for piece in entry.pieces})
    with safe_open(first, "pt") as a, safe_open(second, "pt") as b:
        if sorted(a.keys()) != sorted(b.keys()):
            return f"{first.name}: tensors {sorted(set(a.keys()) ^ set(b.keys()))[:4]} are in only one of the two"
        for key in sorted(a.keys()):
            x = a.get_tensor(key)
            y = b.get_tensor(key)
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"{first.name}, {key}: {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}"
            unlike = (x != y) & ~((x != x) & (y != y))
            if unlike.any():
                where = unlike.nonzero()[0].tolist()
                known = ", ".join(names.get((first.name, key), ())[:2])
                return (
                    f"{first.name}, {key}{f' ({known})' if known else ''}: {int(unlike.sum())} of {x.numel()} "
                    f"elements, first {where}: {x[tuple(where)].item()!r} and {y[tuple(where)].item()!r}"
                )
    return f"{first.name}: bytes differ, but no value does (a sign of zero, or another order of tensors)"


@dataclass(frozen=True)
class ResumeVerdict:
    """What was compared, and the first difference; None if there is none."""

    difference: str | None
    steps: int  # before the save, and again after it
    bytes: int  # of the compared checkpoint
    lines: int  # of metrics
    seconds: float


def verify_resume(resolved: ResolvedConfig, steps: int) -> ResumeVerdict:
    """Trains 2 x `steps` steps with a checkpoint in the middle. Then resumes from it in a new process, and compares the
    ends.

    Works in a temporary folder beside the configured run directory. Raises what the runs end with.
    """
    begun = perf_counter()
    run_dir = run_dir_of(resolved.config.trainer).resolve()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}.verify-resume-", dir=run_dir.parent))
    try:
        run = RunDir(work / "run")
        whole = work / "whole"
        config = work / "config.yaml"
        config.write_text(resolved.to_yaml())
        _train(config, run, steps, work / "whole.log")
        whole.mkdir()
        last = run.checkpoints / f"step-{2 * steps}"
        last.rename(whole / last.name)  # the resumed run finds the one in the middle
        run.metrics.rename(whole / run.metrics.name)
        shutil.copy(whole / run.metrics.name, run.metrics)
        _train(config, run, steps, work / "resumed.log", "--resume")
        lines = read_metrics(whole / run.metrics.name)
        difference = metrics_difference(lines, read_metrics(run.metrics)) or checkpoint_difference(
            whole / last.name, last
        )
        size = sum(facts["bytes"] for facts in read_manifest(last).files().values())
        return ResumeVerdict(difference, steps, size, len(lines), perf_counter() - begun)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _train(config: Path, run: RunDir, steps: int, log: Path, *more: str) -> None:
    """Runs `mrl train` in a new process, because memory of a process must not help a resume."""
    settings = {
        "trainer.total_training_steps": 2 * steps,
        "trainer.save_freq": steps,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.val_before_train": "false",
        "trainer.val_only": "false",
        "trainer.test_freq": -1,
        "trainer.logger": "[console]",
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": "null",
    }
    overrides = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    with stopped_by_sigterm():
        code = run_mrl(["train", str(config), "--run-dir", str(run.path), *overrides, *more], log)
    if code:
        output = log.read_text(errors="replace")[-OUTPUT_TAIL:]
        kind = next((k for k in MrlError.__subclasses__() if k.exit_code == code), MrlError)
        raise kind(
            f"the run that was to be {'resumed' if more else 'compared with'} ended with exit code {code}:\n{output}"
        )
