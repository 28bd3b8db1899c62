"""What was generated and how it was scored, one file a step, for people and for audits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mrl.data.batch import Sample
from mrl.record.run_dir import write_text
from mrl.record.sinks import json_line

RewardParts = Mapping[str, float]  # `score` and whatever else the reward function returned


def write_samples(folder: Path, step: int, samples: Sequence[Sample], rewards: Sequence[RewardParts], limit: int | None = None) -> Path:
    """Writes `folder/step-N.jsonl`, a line a sample: token ids, log-probs, stop reason, weight version, seed, and `reward` parts.

    Routes are left out: they are hundreds of bytes a token, and an engine of that weight version would give them again.
    `limit` keeps only the first so many. The file appears whole or not at all.
    """
    pairs = list(zip(samples, rewards, strict=True))[:limit]
    path = folder / f"step-{step}.jsonl"
    write_text(path, "".join(json_line(_fields(sample) | {"reward": dict(reward)}) for sample, reward in pairs))
    return path


def _fields(sample: Sample) -> dict:
    return {name: value for name, value in vars(sample).items() if name != "routes"}
