#!/usr/bin/env python
"""What `mrl plan` predicts of runs that others have published, beside what they measured.

The runs are those of docs/source/published_runs.yaml, with the configurations of published_bases.yaml.

    python scripts/published_runs.py     prints a row a run, with its phases

docs/predictions.md is made of the same rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mrl.config.schema import RunConfig
from mrl.config.schema_rollout import MTP
from mrl.config.yaml_tree import nested
from mrl.model import known_spec, model_spec
from mrl.model.registry import known_hf_config
from mrl.plan.devices import USUAL, Assumptions, Device, Measured, MeasuredLengths, faster, find_device, slower
from mrl.plan.draft_times import with_drafts
from mrl.plan.generation_times import decode_step, generation_seconds
from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of
from mrl.plan.run_plan import link_of, reshard_plan_of
from mrl.plan.sync_times import reshard_summary
from mrl.plan.times import phase_seconds
from mrl.reshard.plan import ReshardPlan

_SOURCE = Path(__file__).resolve().parents[1] / "docs" / "source"
FILE = _SOURCE / "published_runs.yaml"
DRAFTS = _SOURCE / "published_drafts.yaml"
BASES = yaml.safe_load((_SOURCE / "published_bases.yaml").read_text(encoding="utf-8"))["bases"]
HALF = "half"  # of the limit: the length is unknown, and taken as a plan takes it
# Hosts of others' servers, over the virtual machine's that was measured: one value for all their runs. NeMo-RL's run
# with one step behind has at most 0.8, since its 16 training devices are done in 152 s.
_SERVERS = 0.6
# H800: an H100 with NVLink of 400 GB/s both ways
_H800 = replace(find_device("h100-80g"), name="H800", node_rate=200e9)


@dataclass(frozen=True)
class Compared:
    """One run: seconds as published, and as predicted."""

    row: dict[str, Any]
    low: float
    expected: float
    high: float
    phases: dict[str, float]

    @property
    def error(self) -> float:
        """Of the prediction, over what was measured; below 0 where it is faster."""
        return self.expected / self.row["seconds"] - 1


def compared() -> Iterator[Compared]:
    """Every run of the file."""
    for row in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        sync = _sync(inputs_of(row)) if "phase" not in row else {}
        sides = [_predicted(row, change(USUAL)) | sync for change in (faster, lambda assumed: assumed, slower)]
        low, expected, high = (sum(side.values()) if not row.get("apart") else _apart(side) for side in sides)
        yield Compared(row, low, expected, high, sides[1])


def _apart(phases: dict[str, float]) -> float:
    return max(phases["generation"], sum(phases.values()) - phases["generation"])


def _predicted(row: dict[str, Any], assumed: Assumptions) -> dict[str, float]:
    if row.get("phase") == "decode":
        return {"decode": _decode(assumed, **row["decode"])}
    inputs = inputs_of(row, assumed)
    batch = batch_plan(inputs.config, inputs.train)
    if row.get("phase") == "sync":
        sync = _sync_of(inputs)["seconds_of"]
        return {"wire": sync["wire"], "launches": sync["launches"]}
    phases = phase_seconds(inputs, batch, engine_of(inputs))
    if "phase" in row:
        return {row["phase"]: phases[row["phase"]]}
    passes = row.get("passes", 2)  # grpo_math_1B.yaml: a KL term, so log-probs of a reference beside the old ones
    return phases | {"log_prob": passes * phases["log_prob"]}


def _sync(inputs: PlanInputs) -> dict[str, float]:
    """A verified sync of ours; engines over two nodes cut tensors inside one, and have data parallelism over both."""
    rollout, most = inputs.config.rollout, inputs.config.cluster.n_gpus_per_node
    tensor = min(rollout.tensor_model_parallel_size, most)
    spread = {
        "tensor_model_parallel_size": tensor,
        "data_parallel_size": rollout.tensor_model_parallel_size // tensor,
    }
    config = inputs.config.model_copy(update={"rollout": rollout.model_copy(update=spread)})
    return {"sync": _sync_of(replace(inputs, config=config))["predicted_seconds"]}


_plans: dict[str, ReshardPlan] = {}  # by configuration: runs and sides of one differ in rates alone


def _sync_of(inputs: PlanInputs) -> dict[str, Any]:
    """What `mrl plan` says of one weight sync."""
    key = inputs.config.model_dump_json()
    if key not in _plans:
        _plans[key] = reshard_plan_of(inputs.config, inputs.model, inputs.train)
    device = inputs.device
    rates = {"starts": device.starts, "memory_rate": device.memory_rate}
    return reshard_summary(_plans[key], link_of(inputs), device.sync, **rates)


def inputs_of(row: dict[str, Any], assumed: Assumptions = USUAL) -> PlanInputs:
    """The run as a configuration of ours, with its mean lengths."""
    config = RunConfig.model_validate(
        nested({"cluster.device": "cuda", "cluster.n_gpus_per_node": 8} | BASES[row["base"]] | row.get("set", {}))
    )
    pretraining = row["base"].startswith(("pai", "zoo"))
    limits = config.data
    lengths = {}
    if row.get("response") != HALF:
        lengths["response_share"] = row.get("response", limits.max_response_length) / limits.max_response_length
    if "prompt" in row:
        lengths["prompt_share"] = row["prompt"] / limits.max_prompt_length
    if pretraining:  # balanced, and Megatron's own loss reads logits in 16 bits; what NeMo-RL's does is not known
        lengths |= {"prompt_share": 1.0, "expert_load": 1.0, "logit_passes": 3.0}
    assumed = replace(assumed, host=assumed.host * _SERVERS / USUAL.host)
    assumed = replace(assumed, **lengths, **row.get("assume", {}))
    device = _H800 if row["base"].startswith("pai") else find_device(row.get("device", "h100-80g"))
    return PlanInputs.of(config, known_spec(config.model.path), device, assumed)


def _decode(assumed: Assumptions, model: str, device: str, tensor: int, sequences: int, context: int) -> float:
    found: Device = find_device(device)
    values = {
        "model.path": model,
        "actor.layout.world_size": tensor,
        "actor.ppo_mini_batch_size": 1,
        "actor.ppo_micro_batch_size_per_gpu": 1,
        "rollout.tensor_model_parallel_size": tensor,
        "data.train_batch_size": 1,
        "data.max_prompt_length": context,
        "data.max_response_length": 8,
        "cluster.device": found.platform,
        "cluster.n_gpus_per_node": found.devices_per_node,
    }
    inputs = PlanInputs.of(RunConfig.model_validate(nested(values)), known_spec(model), found, assumed)
    return decode_step(inputs, engine_of(inputs), sequences, context).total


@dataclass(frozen=True)
class ComparedDrafts:
    """One run with and without drafts: how many times as fast its generation is, as published and as predicted."""

    row: dict[str, Any]
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row["published"] - 1


def compared_drafts() -> Iterator[ComparedDrafts]:
    """Every run of the file."""
    for row in yaml.safe_load(DRAFTS.read_text(encoding="utf-8")):
        seconds = []
        for tokens in (0, row["tokens"]):
            inputs = with_drafts(draft_inputs(row), tokens)
            seconds.append(generation_seconds(inputs, batch_plan(inputs.config, inputs.train), engine_of(inputs)))
        yield ComparedDrafts(row, seconds[0] / seconds[1])


def draft_inputs(row: dict[str, Any]) -> PlanInputs:
    """The run as a configuration of ours, of limits of 2,048 and 8,192 tokens."""
    known = known_hf_config(row["like"])
    if "text_config" in known:
        config = known | {"text_config": known["text_config"] | row.get("changed", {})}
    else:
        config = known | row.get("changed", {})
    each = min(8, row["samples"])
    values = row["engines"] | {
        "model.path": row["like"],
        "actor.layout.world_size": 8,
        "actor.layout.tensor_model_parallel_size": 4,
        "actor.ppo_micro_batch_size_per_gpu": 1,
        "actor.ppo_mini_batch_size": row["samples"] // each,
        "rollout.n": each,
        "data.train_batch_size": row["samples"] // each,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 8192,
        "cluster.device": "cuda",
        "cluster.n_gpus_per_node": 8,
        "cluster.placement": "colocated",
    }
    assumed = USUAL
    if "accepted" in row:
        lengths = MeasuredLengths(1024, (4096,), 8192, cut=0.01, accepted=tuple(row["accepted"]), drafted_by=MTP)
        assumed = replace(USUAL, measured=Measured(lengths))
    return PlanInputs.of(
        RunConfig.model_validate(nested(values)), model_spec(config), find_device(row["device"]), assumed
    )


def main() -> None:
    """Prints every run."""
    for run in compared():
        phases = ", ".join(f"{name} {seconds:.3g}" for name, seconds in run.phases.items())
        sides = f"{run.low:.4g} .. {run.expected:.4g} .. {run.high:.4g}"
        print(f"{run.row['run']}: {run.row['seconds']} s, predicted {sides} ({run.error:+.0%}): {phases}")


if __name__ == "__main__":
    main()
