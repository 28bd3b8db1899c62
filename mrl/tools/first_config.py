"""Makes a first configuration for a model and some devices: the fastest layout found by the search for which the whole
plan fits.

Settings that do not depend on devices are common ones: GSPO for mixtures of experts, GRPO for dense models, actor and
engines alternating on all devices.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mrl.config.rollout_rules import engine_splits_heads
from mrl.config.schema import LayoutConfig, RunConfig
from mrl.config.yaml_tree import nested
from mrl.errors import ConfigError, Violation
from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout
from mrl.plan.devices import Device, device_by_part, devices
from mrl.plan.engine_memory import engine_memory, engine_share
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, recompute_of
from mrl.plan.suggest_fixes import HOST_ADAM
from mrl.platforms.versions import MEGATRON
from mrl.tools.run_search import differing, fastest_run
from mrl.tools.search import Candidate, SearchProblem, SearchResult, search
from mrl.tools.search_report import (
    PROMPT,
    RESPONSE,
    N,
    broken_with,
    fastest_that_fit,
    planned_phase,
    search_problem,
    usual_batch,
)
from mrl.tools.switches import missing_switches
from mrl.units import GIB, MOST_DEVICES

# on a CPU
_FEW_PROMPTS = 16
_FEW_MINI = 8
_SEQUENCES = 8  # longest sequences that an engine's cache should hold at once
_SHARE = 0.7  # of a device's memory, for an engine beside an actor that is on the host meanwhile
_SAID = 3  # reasons of a kind in a refusal
# nodes, devices of each, and their name; 910b and similar names begin with digits
_DEVICES = re.compile(
    r"\s*(?:(\d{1,6})\s*[x*:]\s*)?(?!910[a-z])(\d{1,6})(?:\s*[x*:]\s*|\s+|(?=[a-z]))((?:910)?[a-z][\w.-]*)\s*"
)
_DEGREES = tuple(LayoutConfig.model_fields)
_OFFLOADED = ("actor.param_offload", "actor.grad_offload", "actor.optimizer_offload")  # while engines have the devices


@dataclass(frozen=True)
class DeviceCount:
    """A number of devices of one kind; whole nodes if they are more than one node has."""

    device: Device
    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.total} x {self.device.name}"


@dataclass(frozen=True)
class FirstConfig:
    """The keys of the configuration in writing order, and the reason for its layout."""

    recipe: str
    values: dict[str, Any]  # dotted keys
    why: str


def parse_devices(text: str) -> DeviceCount:
    """Parses `8 x h100-80g`, `32xh200`, or `4x8 a3` for 4 nodes of 8: a device of `mrl plan --device`, or part of its
    name.

    Raises ConfigError.
    """
    match = _DEVICES.fullmatch(text.lower())
    nodes, count = (0, 0) if match is None else (int(match[1] or 1), int(match[2]))
    if match is None or not 1 <= nodes * count <= MOST_DEVICES:
        raise ConfigError(
            f"devices {text!r}: must read NUMBER x NAME, or NODES x NUMBER NAME, as 8 x h100-80g or 4x8 h100-80g; "
            f"at most {MOST_DEVICES}; names: {', '.join(devices())}"
        )
    device = device_by_part(match[3])
    if match[1] is not None:
        return DeviceCount(device, nodes, count)
    per_node = min(count, device.devices_per_node)
    if count % per_node:
        raise ConfigError(
            f"devices {text!r}: a node has {per_node} of them; give a multiple of {per_node}, or nodes of another size "
            f"as 4x8 {match[3]}"
        )
    return DeviceCount(device, count // per_node, per_node)


def first_config(path: str, model: ModelSpec, count: DeviceCount, data: dict[str, Any]) -> FirstConfig:
    """Makes a first configuration. `path` is the model's, `data` has further keys for the user's files.

    The fastest choices are tried first: Adam's states on the devices, small engines. Raises ConfigError if nothing
    fits.
    """
    recipe = "grpo"
    if model.is_moe:
        recipe = "gspo"
    sizes = _engine_sizes(model, count)
    against = _Against()
    for adam in _adam_options(count):
        ways = [_usual(path, model, count, tensor) | adam for tensor in sizes]
        ways = [values | missing_switches(RunConfig.model_validate(nested(values | data)), model) for values in ways]
        configs = [RunConfig.model_validate(nested(values | data)) for values in ways]
        # of the actor alone: the same for engines of every size
        problem = search_problem(configs[0], model, count.device, count.total, count.per_node, MEGATRON)
        result = search(problem)
        against.too_large += result.too_large
        for values, config in zip(ways, configs, strict=True):
            allows = partial(_is_legal, config, model, against.broken)
            best, left_out = fastest_that_fit(config, problem, result, 1, allows)
            for candidate in best:
                faster = _faster(config, problem, result, count)
                found = values | (_layout(candidate) if faster is None else faster)
                planned = _as_planned(_written(result, found, candidate), found | data, problem)
                return FirstConfig(recipe, found | data, planned.reasons(count.per_node))
            against.left_out += left_out
    raise ConfigError(_refusal(path, count, against))


def usual_config(path: str, model: ModelSpec, device: Device, devices: int) -> RunConfig:
    """Returns a first configuration before the search for a layout, for a search without a configuration."""
    per_node = min(devices, device.devices_per_node)
    count = DeviceCount(device, -(-devices // per_node), per_node)
    values = _usual(path, model, count, 1) | {"actor.layout.world_size": devices, "rollout.num_engines": devices}
    return RunConfig.model_validate(nested(values))


def _faster(
    config: RunConfig, problem: SearchProblem, result: SearchResult, count: DeviceCount
) -> dict[str, Any] | None:
    """Returns the keys of the fastest whole step, which also considers engines and micro-batches.

    Returns None where nothing fits, and on a CPU, whose engines have no share of a device.
    """
    best = None
    if count.device.platform != "cpu":
        best = fastest_run(config, problem, result)
    if best is None:
        return None
    return differing(config, best.config)


def _written(result: SearchResult, found: dict[str, Any], first: Candidate) -> Candidate:
    """Returns the candidate whose layout is written, or `first` if it only fits with other micro-batches."""
    degrees = {key: found.get(f"actor.layout.{key}") for key in first.degrees | dict.fromkeys(_DEGREES)}
    wanted = _cutting(degrees)
    fitting = (candidate for candidate in result.fitting if _cutting(candidate.degrees) == wanted)
    return next(fitting, first)


def _cutting(degrees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the degrees that split something: neither left out, nor 1, nor off."""
    return {key: value for key, value in degrees.items() if value not in (None, 1, False)}


def _as_planned(candidate: Candidate, values: dict[str, Any], problem: SearchProblem) -> Candidate:
    """Returns the candidate with `mrl plan`'s values for the file: the actor's fullest phase, and recomputation."""
    config = RunConfig.model_validate(nested(values))
    memory = memory_section(PlanInputs.of(config, problem.model, problem.device))
    return replace(candidate, phase=planned_phase(memory), recompute=recompute_of(config))


@dataclass
class _Against:
    """The reasons against everything that was tried."""

    too_large: Counter[str] = field(default_factory=Counter)  # of actors alone
    left_out: Counter[str] = field(default_factory=Counter)  # of whole runs whose actor fits
    broken: list[Violation] = field(default_factory=list)  # by actors that fit, the fastest first


def _adam_options(count: DeviceCount) -> tuple[dict[str, Any], ...]:
    """Returns keys that put Adam's states on the devices, and on the host; on a CPU both are the same."""
    on_host = {"actor.optim.override_optimizer_config": HOST_ADAM, "actor.optimizer_offload": False}
    if count.device.platform == "cpu":
        return ({},)
    return ({}, on_host)


def _is_legal(config: RunConfig, model: ModelSpec, broken: list[Violation], candidate: Candidate) -> bool:
    """Tells whether a layout satisfies all rules of a configuration. Adds violations to `broken`."""
    violated = broken_with(config, model, candidate)
    broken += violated
    return not violated


def _refusal(path: str, count: DeviceCount, against: _Against) -> str:
    if against.broken and not against.left_out:
        first = replace(against.broken[0], where="")  # nobody has written it yet
        return f"{path} on {count}: every layout that fits breaks a rule, the fastest this: {first}"
    host = ", also with its optimizer on the host"
    if count.device.platform == "cpu":
        host = ""
    weighs = [what for found in (against.left_out, against.too_large) for what, _ in found.most_common(_SAID)]
    most = ""
    if weighs:
        most = f"; what weighs most: {'; '.join(dict.fromkeys(weighs))}"
    return f"{path} does not fit on {count}{host}{most}; give more devices, or larger ones"


def _usual(path: str, model: ModelSpec, count: DeviceCount, tensor: int) -> dict[str, Any]:
    prompt, response = usual_lengths(model)
    on_cpu = count.device.platform == "cpu"
    prompts, mini = usual_prompts(count)
    values = {
        "model.path": path,
        "cluster.device": count.device.platform,
        "cluster.accelerator": count.device.name,
        "cluster.nnodes": count.nodes,
        "cluster.n_gpus_per_node": count.per_node,
        "cluster.placement": "colocated",
        "actor.layout.world_size": count.total,
        "actor.optim.lr": 1e-6,
        "actor.ppo_mini_batch_size": mini,
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_gpu": prompt + response,
        "rollout.num_engines": count.total // tensor,
        "rollout.tensor_model_parallel_size": tensor,
        "rollout.n": N,
        "rollout.gpu_memory_utilization": _SHARE,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "trainer.experiment_name": f"first-{path.rstrip('/').rpartition('/')[2].lower()}",
        "trainer.save_freq": 20,
    }
    if model.is_hybrid or (model.is_latent and on_cpu):
        values["rollout.enable_prefix_caching"] = False  # engines have none for them
    if on_cpu:
        return values | _on_cpu(count)
    return values | dict.fromkeys(_OFFLOADED, True)


def _on_cpu(count: DeviceCount) -> dict[str, Any]:
    """Returns settings with which ranks and engines of a small machine share its cores."""
    share = round(1 / count.total, 2)
    return {
        "model.dtype": "float32",
        "cluster.cpus_per_actor": share,
        "cluster.cpus_per_engine": share,
        "rollout.enforce_eager": True,
    }


def usual_prompts(count: DeviceCount) -> tuple[int, int]:
    """Returns the usual prompts of a step and of an update."""
    if count.device.platform == "cpu":
        return _FEW_PROMPTS, _FEW_MINI
    return usual_batch(count.total)


def usual_lengths(model: ModelSpec) -> tuple[int, int]:
    """Returns the longest prompt and response. If a model has few positions, a fifth is for the prompt."""
    positions = model.longest_sample
    prompt = min(PROMPT, positions // 5)
    return prompt, min(RESPONSE, positions - prompt)


def _engine_sizes(model: ModelSpec, count: DeviceCount) -> list[int]:
    """Returns tensor degrees of engines within a node that hold the model and some sequences, smallest first."""
    share = engine_share(count.device, _SHARE)
    legal = [n for n in range(1, count.per_node + 1) if count.per_node % n == 0 and engine_splits_heads(n, model)]
    wanted = _SEQUENCES * sum(usual_lengths(model))
    fitting = [n for n in legal if engine_memory(model, RolloutLayout(1, n), share).cache_tokens >= wanted]
    if not fitting:
        largest = engine_memory(model, RolloutLayout(1, legal[-1]), share).weights / GIB
        raise ConfigError(
            f"no engine in a node of {count.per_node} x {count.device.name} holds the model and {_SEQUENCES} "
            f"sequences; weights alone take {largest:.0f} GiB a device; give larger devices"
        )
    return fitting


def _layout(candidate: Candidate) -> dict[str, Any]:
    values = {f"actor.layout.{key}": value for key, value in candidate.degrees.items()}
    settings = candidate.recompute.settings
    return values | {f"model.override_transformer_config.{key}": value for key, value in settings.items()}
