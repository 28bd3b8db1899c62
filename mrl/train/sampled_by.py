"""What responses were made by and from, so that a later start knows whether they may stand for those it would make.

    version, weights     which weights, by the name that their checkpoint has for them; layouts have no say
    data, model          tokens of the prompts; config.json
    sampling             temperature, limits, stop tokens, routes, seed, words of engines, arguments for vLLM alone;
                         tools and their files, and then the rows
    rewards              the section `reward` but for SAME_REWARDS, the user's file, answers and extra_info of the rows

Where all but the last are equal, tokens are taken; where the last is equal too, rewards as well. An engine's layout,
its seats in memory and its speed change no response's distribution, and are left out.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.schedule.ledger import Fingerprint
from mrl.vllm.requests import training_sampling, turns_spec

REWARD_FILE = "reward."  # keys of plug-ins that judge; see mrl.train.preflight.plug_ins
SAME_REWARDS = {"num_workers", "timeout_s", "max_failure_share"}  # keys of `reward` that change none that was given
ROLLOUT_FILE = "rollout."  # and of those that speak in a response


@dataclass(frozen=True)
class SampledBy:
    """What made responses. `version` is the number of the step whose weights they are by."""

    version: int
    weights: str
    data: str
    model: str
    sampling: str
    rewards: str

    def differing(self, other: "SampledBy") -> list[str]:
        """Names of what forbids tokens of the other to stand for tokens of this."""
        names = ("version", "weights", "data", "model", "sampling")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True)
class Sources:
    """What all responses of a run are made from, beside the weights. All are digests."""

    start: str = ""  # of the weights that the run starts from, where no checkpoint names them
    data: str = ""
    model: str = ""
    sampling: str = ""
    rewards: str = ""

    def by(self, version: int, weights: str) -> SampledBy:
        """The origin of responses by these weights; without a name, by those of the start."""
        return SampledBy(version, weights or self.start, self.data, self.model, self.sampling, self.rewards)


UNKNOWN = Sources()


def sources_of(config: RunConfig, made_by: Fingerprint, rows: str, files: Sequence[Mapping[str, str]]) -> Sources:
    """The sources of a run with this configuration.

    `rows`: digest of what its rows have beside tokens. `files`: its plug-ins, with their digests.
    """
    rollout = config.rollout
    turns = turns_spec(rollout.turns, config.data, rollout.agent)
    sampling = {
        "sampling": asdict(training_sampling(rollout, config.data, config.actor, config.model.path)),
        "seed": config.trainer.seed,
        "words": [rollout.dtype, rollout.quantization, rollout.quantization_block, rollout.vllm_kwargs],
        "turns": turns and [asdict(turns), rows],  # tools and environments see the rows
        "endpoint": rollout.endpoint,
        "files": _digests(files, ROLLOUT_FILE),
    }
    reward = config.reward.model_dump(mode="json", exclude=SAME_REWARDS)
    rewards = {"reward": reward, "rows": rows, "files": _digests(files, REWARD_FILE)}
    adapter = config.actor.lora.path
    start = [_weight_files(config.model.path), adapter and _weight_files(adapter)]
    return Sources(_digest(start), made_by.data, made_by.model, _digest(sampling), _digest(rewards))


def new_name() -> str:
    """A name of weights that no others have."""
    return secrets.token_hex(8)


def _digests(files: Sequence[Mapping[str, str]], keys: str) -> list[str]:
    return [each["sha256"] for each in files if each["key"].startswith(keys)]


def _weight_files(folder: str | Path) -> list[list[Any]]:
    """Path, size and time of each weight file: to read all of a large model would take minutes."""
    found = []
    for file in sorted(Path(folder).resolve().glob("*.safetensors")):
        known = file.stat()
        found.append([str(file), known.st_size, known.st_mtime_ns])
    return found


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
