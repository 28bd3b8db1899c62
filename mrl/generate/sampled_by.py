"""The origin of responses. A later start compares it to decide whether it may use them instead of new ones.

Files of the spool carry it, and so do the live groups of a checkpoint.

    version, weights     which weights, by the name that their checkpoint has for them; layouts have no say
    data, model          tokens of the prompts; config.json
    sampling             temperature, limits, stop tokens, routes, seed, words of engines, arguments for vLLM alone but
                         for VLLM_SPEED; tools, their files, and with tools the rows
    rewards              the section `reward` but for SAME_REWARDS, the user's file, answers and extra_info of the rows

Tokens are reused if all except the last are equal. Rewards are reused if the last is equal too. What has no such name
is not reused. An engine's layout,
devices and speed do not change the distribution of responses, and are left out.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.config.override_fields import VLLM_SPEED
from mrl.config.schema import RunConfig
from mrl.config.schema_rollout import TurnsConfig
from mrl.engine.requests import training_sampling, turns_spec
from mrl.model import read_hf_config

REWARD_FILE = "reward."  # keys of plug-ins that judge, as in mrl.driver.preflight.plug_ins
ROLLOUT_FILE = "rollout."  # keys of plug-ins that contribute to responses
SAME_REWARDS = {"num_workers", "timeout_s", "max_failure_share"}  # keys of `reward` that change no reward


@dataclass(frozen=True)
class SampledBy:
    """The origin of responses. `version` is the number of the step whose weights generated them."""

    version: int
    weights: str
    data: str
    model: str
    sampling: str
    rewards: str

    def differing(self, other: "SampledBy") -> list[str]:
        """Returns names of the differences that forbid the use of the other's tokens."""
        names = ("version", "weights", "data", "model", "sampling")
        return [name for name in names if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True)
class Sources:
    """The common inputs of all responses of a run, without the weights. All are digests."""

    start: str = ""  # of the run's initial weights, if no checkpoint names them
    data: str = ""
    model: str = ""
    sampling: str = ""
    rewards: str = ""

    def by(self, version: int, weights: str) -> SampledBy:
        """Returns the origin of responses of these weights; without a name, of the initial weights."""
        return SampledBy(version, weights or self.start, self.data, self.model, self.sampling, self.rewards)


UNKNOWN = Sources()


def sources_of(config: RunConfig, data: str, rows: str, files: Sequence[Mapping[str, str]]) -> Sources:
    """Returns the inputs of a run with this configuration.

    `data`: digest of the prompts' tokens, and so also of the tokenizer, the template and their order. `rows`: digest of
    what training rows have beside tokens. `files`: its plug-ins, with their digests.
    """
    rollout = config.rollout
    arguments = {name: value for name, value in rollout.vllm_kwargs.items() if name not in VLLM_SPEED}
    turns = turns_spec(rollout.turns, config.data, rollout.agent)
    sampling = {
        "sampling": asdict(training_sampling(rollout, config.data, config.actor, config.model.path)),
        "seed": config.trainer.seed,
        "words": [rollout.dtype, rollout.quantization, rollout.quantization_block, arguments],
        "turns": turns and [asdict(turns), rows, *_of_index(rollout.turns)],  # tools and environments see the rows
        "endpoint": rollout.endpoint,
        "files": _digests(files, ROLLOUT_FILE),
    }
    reward = config.reward.model_dump(mode="json", exclude=SAME_REWARDS)
    judged = [
        part.model_dump(mode="json") for part in (config.algorithm.filter_groups, config.algorithm.overlong_buffer)
    ]
    rewards = {"reward": reward, "judged": judged, "rows": rows, "files": _digests(files, REWARD_FILE)}
    adapter = config.actor.lora.path
    start = [_weight_files(config.model.path), adapter and _weight_files(adapter)]
    return Sources(
        _digest(start), data, _digest(read_hf_config(config.model.path)), _digest(sampling), _digest(rewards)
    )


def new_name() -> str:
    """Returns a unique name for weights."""
    return secrets.token_hex(8)


def _digests(files: Sequence[Mapping[str, str]], keys: str) -> list[str]:
    return [each["sha256"] for each in files if each["key"].startswith(keys)]


def _weight_files(folder: str | Path) -> list[list[Any]]:
    """Returns path, size and time of each weight file. Reading a large model completely would take minutes."""
    return [_file_facts(file) for file in sorted(Path(folder).resolve().glob("*.safetensors"))]


def _of_index(turns: TurnsConfig | None) -> list[Any]:
    """Returns path, size and time of the index that the tool search reads; nothing without one."""
    if turns is None or turns.index is None or not Path(turns.index).is_file():
        return []
    return _file_facts(Path(turns.index))


def _file_facts(file: Path) -> list[Any]:
    known = file.stat()
    return [str(file), known.st_size, known.st_mtime_ns]


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
