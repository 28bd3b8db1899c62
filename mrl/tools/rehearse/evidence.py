"""Reads what a rehearsal left behind: names of code that ran, metrics, checkpoints, samples, calls of the reward."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.checkpoint.manifest import WEIGHT, Manifest, StoredTensor, read_manifest
from mrl.errors import EnvironmentFault
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sample_files import read_samples, steps_with_responses
from mrl.tools.rehearse.scoring import CALL

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_CUT_OVER_TENSOR = "self_attn.o_proj.weight"
_CUT_OVER_EXPERT_TENSOR = "mlp.experts.0.down_proj.weight"


@dataclass(frozen=True)
class Evidence:
    """Reads what a run left behind. Missing parts are empty."""

    run: RunDir
    folder: Path  # one file a process, with names of code that ran

    @cached_property
    def exercised(self) -> Counter[str]:
        """Number of processes in which code of a name ran."""
        names: Counter[str] = Counter()
        for file in self.folder.glob("*.txt"):
            whole_lines = file.read_text(encoding="utf-8").split("\n")[:-1]
            names.update(set(whole_lines))
        return names

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of metrics of finished steps."""
        return [row for row in self.lines if row["training/global_step"] > 0]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics."""
        return read_metrics(self.run.metrics)

    def metric(self, name: str) -> float | None:
        """Returns the newest value of a metric. A `*` in the name matches any text."""
        pattern = re.compile(re.escape(name).replace(r"\*", ".+"))
        return next((row[key] for row in reversed(self.lines) for key in row if pattern.fullmatch(key)), None)

    def largest(self, name: str) -> float:
        """Returns the largest value of a metric; 0 where it was never written."""
        return max((row[name] for row in self.lines if name in row), default=0.0)

    @cached_property
    def manifests(self) -> dict[int, Manifest]:
        """Manifests of complete checkpoints, by step."""
        manifests = {}
        for folder in self.run.checkpoints.glob("step-*"):
            with suppress(EnvironmentFault):  # an incomplete checkpoint is no mark
                manifest = read_manifest(folder)
                manifests[manifest.step] = manifest
        return manifests

    @cached_property
    def degrees(self) -> Mapping[str, int]:
        """Ranks of the first checkpoint, and the parts of its tensors in each direction of parallelism."""
        manifest = self.manifests.get(1)
        if manifest is None:
            return {}
        folder = self.run.checkpoints / "step-1"
        weights = [_weights(rank.read_entries(folder)) for rank in manifest.ranks]
        layers = [_numbers(rank, _LAYER) for rank in weights]
        experts = [_experts_of_first_layer(rank) for rank in weights]
        return {
            "ranks": len(manifest.ranks),
            "tensor": _boxes(weights, _CUT_OVER_TENSOR),
            "pipeline": len({frozenset(found) for found in layers if found}),
            "expert": max(len({part for part in experts if part}), 1),
            "expert_tensor": _boxes(weights, _CUT_OVER_EXPERT_TENSOR),
        }

    @cached_property
    def reward_calls(self) -> list[dict[str, Any]]:
        """Notes on each call of the reward."""
        return [json.loads(line)[CALL] for line in self._lines_of("reward.log") if line.startswith(f'{{"{CALL}"')]

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Training samples of all steps."""
        folder = self.run.samples
        return [sample for step in steps_with_responses(folder) for sample in read_samples(folder, step)]

    def _lines_of(self, log: str) -> Iterator[str]:
        file = self.run.logs / log
        return iter(file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ())


def evidence_of(run: Path, exercised: Path) -> Evidence:
    """Reads a run directory, and the folder in which its processes recorded what code ran."""
    return Evidence(RunDir(run), exercised)


def _weights(entries: Iterable[StoredTensor]) -> list[StoredTensor]:
    return [entry for entry in entries if entry.role == WEIGHT]


def _numbers(entries: list[StoredTensor], pattern: re.Pattern) -> set[int]:
    return {int(found[1]) for entry in entries for piece in entry.pieces if (found := pattern.search(piece.hf_name))}


def _experts_of_first_layer(entries: list[StoredTensor]) -> frozenset[int]:
    """Returns the experts that a rank wrote, in the lowest layer of which it wrote any."""
    pairs = {
        (int(f[1]), int(f[2])) for entry in entries for piece in entry.pieces if (f := _EXPERT.search(piece.hf_name))
    }
    lowest = min((layer for layer, _ in pairs), default=None)
    return frozenset(expert for layer, expert in pairs if layer == lowest)


def _boxes(ranks: list[list[StoredTensor]], name: str) -> int:
    """Returns the parts in which the first tensor of that name is stored; 1 where there is none."""
    parts: dict[str, set] = {}
    for entry in (entry for rank in ranks for entry in rank):
        for piece in entry.pieces:
            if piece.hf_name.endswith(name):
                parts.setdefault(piece.hf_name, set()).add(str(piece.hf_box))
    return max(map(len, parts.values()), default=1)
