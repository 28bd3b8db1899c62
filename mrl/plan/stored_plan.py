"""plan.json of a run directory: what was planned, against what a run that starts now would plan."""

import json
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.model import ModelSpec
from mrl.plan.devices import Device, devices
from mrl.plan.inputs import device_for
from mrl.plan.run_plan import differences, plan_of, read_plan

_SHOWN = 8


def stored_plan(file: Path) -> dict[str, Any] | None:
    """The plan in `file`; None where there is none. Raises ConfigError for a file that holds something else."""
    return read_plan(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else None


def plan_again(config: RunConfig, model: ModelSpec, file: Path) -> dict[str, Any]:
    """The plan as it is now; where the configuration names no device, for the one that the stored plan was made for."""
    return plan_of(config, model, _device(config, stored_plan(file)))


def plan_report(config: RunConfig, model: ModelSpec, file: Path) -> list[str]:
    """What a run says of its plan before it starts: whether it is the stored one, what changed, and what will not fit."""
    stored, plan = stored_plan(file), plan_again(config, model, file)
    lines = [f"plan: {plan['hash'][:16]} for {plan['device']['name']}{_compared(stored, plan)}"]
    return lines + [f"note: {problem}" for problem in _problems(plan["memory"])]


def plan_text(plan: dict[str, Any]) -> str:
    """As it is stored."""
    return json.dumps(plan, indent=1)


def _device(config: RunConfig, stored: dict[str, Any] | None) -> Device:
    before = devices().get(stored["device"]["name"]) if stored and config.cluster.accelerator is None else None
    return before if before is not None and before.platform == config.cluster.device else device_for(config)


def _compared(stored: dict[str, Any] | None, plan: dict[str, Any]) -> str:
    if stored is None:
        return ""
    changed = differences(stored, plan)
    if not changed:
        return ", as planned before"
    more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return f", not as planned before ({stored['hash'][:16]}): {'; '.join(changed[:_SHOWN])}{more}"


def _problems(memory: dict[str, Any]) -> list[str]:
    """Estimates, so a run starts all the same."""
    phases = [
        f"by the plan's estimate phase {name} takes {phase['bytes'] / 1024**3:.1f} of {phase['device_bytes'] / 1024**3:.1f} GiB, "
        f"most of it {phase['largest']}; change: {phase['change']}"
        for name, phase in memory["phases"].items()
        if not phase["fits"]
    ]
    return [*phases, *(memory[part]["change"] for part in ("kv_cache", "host") if memory[part]["change"])]
