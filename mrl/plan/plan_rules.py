"""Rules that need a plan's figures of devices: they refuse what does not fit on the named device.

They have the form of the configuration's own rules.
"""

from math import ceil, floor
from typing import Any

from mrl.config.load import ResolvedConfig
from mrl.config.schema import RunConfig, leaf
from mrl.errors import ConfigError, Violation
from mrl.model import ModelSpec
from mrl.plan.calibration_file import KEY, assumptions_of
from mrl.plan.devices import Device, default_device, devices, devices_of
from mrl.plan.engine_memory import BLOCK, graphs_in_share
from mrl.plan.memory import memory_section
from mrl.plan.memory_phases import ACTOR, TERMS
from mrl.plan.plan_inputs import PlanInputs, engine_of
from mrl.units import GIB

_SHARE = "rollout.gpu_memory_utilization"
_STEP = 100  # shares are rounded to hundredths


def accelerator_violations(resolved: ResolvedConfig) -> list[Violation]:
    """Refuses a device without figures here, one of another kind than cluster.device, and another one's calibration."""
    return _unknown_device(resolved) or _calibration_violations(resolved)


def _calibration_violations(resolved: ResolvedConfig) -> list[Violation]:
    """Refuses a calibration that cannot be read, or of another device."""
    platform, name, file = (leaf(resolved.config, f"cluster.{key}") for key in ("device", "accelerator", "calibration"))
    if file is None or platform is None:
        return []
    rule, why = "needs cluster.accelerator beside it", "it holds for one kind of device"
    if name or platform == "cpu":
        try:
            assumptions_of(file, devices()[name] if name else default_device(platform))
            return []
        except ConfigError as error:
            rule, why = "cannot be used", str(error).removeprefix(f"{KEY}: ")
    return [Violation(KEY, rule, why, (), file, resolved.where(KEY))]


def _unknown_device(resolved: ResolvedConfig) -> list[Violation]:
    platform, name = (leaf(resolved.config, f"cluster.{key}") for key in ("device", "accelerator"))
    fitting = ()
    if platform:
        fitting = tuple(device.name for device in devices_of(platform))
    if platform is None or name is None or name in fitting:
        return []
    rule = "is no device that is known"
    if name in devices():
        rule = f"is no {platform} device that is known"
    where = resolved.where("cluster.accelerator")
    why = "a plan needs its memory and rates"
    return [Violation("cluster.accelerator", rule, why, fitting, name, where)]


def share_violations(resolved: ResolvedConfig, model: ModelSpec) -> list[Violation]:
    """Refuses an engine's share of the memory that does not fit, or leaves no cache for a sequence.

    The configuration must have passed all other rules. Where it names no device, a share is refused only if the largest
    device of its kind is too small. An engine on CPU has no share: rollout.cpu_kvcache_gib gives its cache.
    """
    config = resolved.config
    device = _largest_device(config)
    if device.platform == "cpu":
        return []
    inputs = PlanInputs.of(config, model, device)
    memory = memory_section(inputs)
    if not memory["phases"]["rollout"]["fits"]:
        rule, why, allowed = _shortage(inputs, memory)
    elif memory["kv_cache"]["longest_sequences_per_engine"] == 0:
        rule, why, allowed = _no_cache(inputs)
    else:
        return []
    return [Violation(_SHARE, rule, why, allowed, config.rollout.gpu_memory_utilization, resolved.where(_SHARE))]


def _largest_device(config: RunConfig) -> Device:
    named = config.cluster.accelerator
    if named:
        return devices()[named]
    return max(devices_of(config.cluster.device), key=lambda device: device.memory)


def _shortage(inputs: PlanInputs, memory: dict[str, Any]) -> tuple[str, str, tuple[float, ...]]:
    """Returns for a share that does not fit: what must hold, why, and the largest share that fits."""
    device = inputs.device
    phase = memory["phases"]["rollout"]
    graphs = graphs_in_share(device, inputs.config.rollout.enforce_eager)
    outside = phase["bytes"] - engine_of(inputs).total - graphs
    most = floor((device.usable - outside) / device.memory * _STEP) / _STEP
    kept = sum(size for term, size in phase["terms"].items() if TERMS[term].holder == ACTOR)
    why = (
        f"the actor keeps {kept / GIB:.1f} GiB on the device while engines generate; of a {device.name} "
        f"{device.usable / GIB:.1f} GiB can be planned with"
    )
    if most >= _enough(inputs):
        return f"must be at most {most}", why, (most,)
    cure = (
        "let more of the actor leave (actor.param_offload, actor.grad_offload, actor.optimizer_offload), or make its "
        "shards or the engine's smaller"
    )
    return f"cannot fit: {_needs(inputs)}", f"{why}; {cure}", ()


def _no_cache(inputs: PlanInputs) -> tuple[str, str, tuple[float, ...]]:
    """Returns for a share that is too small: what must hold, why, and a share that is enough."""
    enough = _enough(inputs)
    rule = "leaves no cache for one longest sequence"
    if enough > 1:
        return rule, _needs(inputs), ()
    return f"{rule}: must be at least {enough}", _needs(inputs), (enough,)


def _enough(inputs: PlanInputs) -> float:
    """Returns the smallest share, in hundredths, that leaves a cache for one longest sequence."""
    return ceil(_least(inputs) / inputs.device.memory * _STEP) / _STEP


def _needs(inputs: PlanInputs) -> str:
    needed = f"{_least(inputs) / GIB:.1f} GiB"
    return f"an engine needs {needed} for its weights, passes and one longest sequence"


def _least(inputs: PlanInputs) -> int:
    """Returns the smallest share with which each rank of an engine has a cache for one longest sequence."""
    engine = engine_of(inputs)
    tokens = -(-inputs.config.data.max_sample_length // BLOCK) * BLOCK
    graphs = graphs_in_share(inputs.device, inputs.config.rollout.enforce_eager)
    return engine.total - engine.cache + graphs + engine.states + engine.token * tokens
