"""Rules of a device and of the versions installed on it, and of what fails on Ascend NPUs.

Versions that cluster.versions does not name are those of the tested row.
"""

from collections.abc import Callable, Iterator
from typing import Any

from mrl.config.rule_row import Rule, RuleRow, on_only_where
from mrl.config.schema import RunConfig, leaf
from mrl.errors import Violation, did_you_mean
from mrl.model import ModelSpec
from mrl.platforms.hosting import get_hosting
from mrl.platforms.versions import (
    ASCEND_CONFIG,
    RETURNS_ROUTES,
    ROUTES_BY_BLOCK,
    TORCH_NPU,
    VLLM_ASCEND,
    VLLM_GENERATIONS,
    release_of,
    row_of,
    shares_key_value_heads,
    vllm_generation,
    vllm_package,
)

_KEY = "cluster.versions"
_VLLM = "rollout.engine_kwargs.vllm"
_TRANSFORMER = "model.override_transformer_config"
_TOOLKIT = "CANN"


def _tested(config: RunConfig) -> dict[str, str]:
    """Returns the version of each package in the tested row of the device."""
    row = row_of(config.cluster.device)
    return {**row.packages, **row.loose, **({_TOOLKIT: row.toolkit} if row.toolkit else {})}


def _assumed(config: RunConfig) -> dict[str, str]:
    """Returns the versions that the cluster has. Without a known device these are only the ones that are named."""
    tested = {}
    if leaf(config, "cluster.device") is not None:
        tested = _tested(config)
    return tested | config.cluster.versions


def _on_npu(config: RunConfig) -> bool:
    return config.cluster.device == "npu"


def _names(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    row = row_of(config.cluster.device)
    tested = _tested(config)
    for name in config.cluster.versions:
        if name not in tested:
            rule = f"{name} is no part of the {row.name} row; {did_you_mean(name, tested)}"
            yield Violation(_KEY, rule, "only packages of the row are compared", tuple(tested))
    for name, version in config.cluster.versions.items():
        if name in tested and release_of(version) is None and name != _TOOLKIT:
            yield Violation(
                f"{_KEY}.{name}", "is no version", "it is compared with what layout and engines need", (tested[name],)
            )


def version_notes(config: RunConfig) -> Iterator[str]:
    """Yields a note where versions differ from the row that mrl is tested with."""
    row = row_of(config.cluster.device)
    off = {n: v for n, v in config.cluster.versions.items() if v != (row.packages | row.loose).get(n, row.toolkit)}
    if off:
        listed = ", ".join(f"{name} {version}" for name, version in off.items())
        yield f"{_KEY}: {listed} differ from the {row.name} row ({row.tested}); mrl doctor compares what is installed"


def _megatron(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    tp = config.actor.layout.tensor_model_parallel_size
    heads = model.num_key_value_heads
    version = _assumed(config).get("megatron-core")
    if version is not None and heads % tp and not shares_key_value_heads(version):
        rule = f"must divide num_key_value_heads = {heads} with megatron-core {version}"
        why = "it asserts that; 0.16 and later share a head among tensor ranks"
        yield Violation(
            "actor.layout.tensor_model_parallel_size",
            rule,
            why,
            tuple(v for v in range(1, heads + 1) if heads % v == 0),
        )


def _completed_on_cpu(name: str) -> Rule:
    """Builds the rule that a parallel size is 1 on CPU, unless mrl adds what vLLM's CPU platform lacks."""
    able = [generation for generation in VLLM_GENERATIONS if generation.completed_on_cpu]

    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        version = vllm_package(_assumed(config))[1]
        above = config.cluster.device == "cpu" and getattr(config.rollout, name) != 1
        if above and vllm_generation(version) not in (None, *able):
            needed = " or ".join(generation.name for generation in able)
            rule = f"above 1 on cpu needs vLLM {needed}, and {version} is to run"
            why = "mrl adds what vLLM's CPU platform lacks for it, in a way that depends on the release"
            yield Violation(f"rollout.{name}", rule, why, (1,))

    return judge


def _drafts(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that this release of vLLM drafts as was tried."""
    if config.rollout.speculation is None:
        return
    version = vllm_package(_assumed(config))[1]
    able = [generation for generation in VLLM_GENERATIONS if generation.drafts]
    if vllm_generation(version) not in (None, *able):
        needed = " or ".join(generation.name for generation in able)
        why = "sampled tokens and their log-probs were compared with the model's in that release alone"
        yield Violation("rollout.speculation", f"needs vLLM {needed}, and {version} is to run", why, (None,))


def _adapters(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    name, version = vllm_package(_assumed(config))
    if release_of(version) not in (*(generation.release for generation in VLLM_GENERATIONS), None):
        allowed = tuple(generation.name for generation in VLLM_GENERATIONS)
        rule = f"{version} is a generation of vLLM that the weight sync is not written for"
        yield Violation(
            f"{_KEY}.{name}", rule, "it writes through functions of vLLM that change between releases", allowed
        )


def _release_for_routes(config: RunConfig) -> tuple[str, tuple[int, ...] | None]:
    """Returns vLLM's version, and its release where engines' routes are replayed, else None."""
    _name, version = vllm_package(_assumed(config))
    if config.actor.router_replay != "R3":
        return version, None
    return version, release_of(version)


def _routes(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that this release of vLLM returns the experts that it chose."""
    version, release = _release_for_routes(config)
    if release is None:
        return
    capturing = [generation for generation in VLLM_GENERATIONS if generation.captures_routes]
    if release < RETURNS_ROUTES:
        rule = f"R3 needs vLLM 0.14 or later, and {version} is to run"
        yield Violation(
            "actor.router_replay", rule, "older engines do not return the experts that they chose", ("disabled", "R2")
        )
    elif config.cluster.device == "cpu" and release not in [generation.release for generation in capturing]:
        rule = (
            f"R3 on cpu needs vLLM {' or '.join(generation.name for generation in capturing)}, and {version} is to run"
        )
        why = (
            "vLLM returns routes only where Triton runs; on cpu mrl collects them inside vLLM, in ways of that release"
        )
        yield Violation("actor.router_replay", rule, why, ("disabled", "R2"))


def _routes_by_block(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    version, release = _release_for_routes(config)
    if release is None or release < ROUTES_BY_BLOCK:
        return
    if config.cluster.device != "cpu" and not config.rollout.enable_prefix_caching:
        why = f"vLLM {version} keeps routes by the blocks of its prefix cache and refuses to return any without one"
        yield Violation("rollout.enable_prefix_caching", "must be true with actor.router_replay R3", why, (True,))


def _routes_in_turn(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    version, release = _release_for_routes(config)
    if release is not None and release < ROUTES_BY_BLOCK and config.rollout.vllm_kwargs.get("async_scheduling"):
        key = "rollout.engine_kwargs.vllm.async_scheduling"
        why = "vLLM refuses its buffer of routes together with it"
        yield Violation(key, f"must be false with actor.router_replay R3 and vLLM {version}", why, (False,))


def _ascend(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if not _on_npu(config):
        return
    versions = _assumed(config)
    pair = VLLM_ASCEND.get(versions["vllm-ascend"])
    if pair is None:
        rule = "is no release of vllm-ascend that is known"
        yield Violation(
            f"{_KEY}.vllm-ascend", rule, "each is made for one vLLM, CANN and torch_npu", tuple(VLLM_ASCEND)
        )
    elif pair[0] != versions["vllm"]:
        rule = f"must be {pair[0]} with vllm-ascend {versions['vllm-ascend']}"
        yield Violation(
            f"{_KEY}.vllm", rule, "the pairing is strict: vllm-ascend replaces functions of that release", (pair[0],)
        )
    toolkit = versions[_TOOLKIT]
    torch_npu = versions["torch-npu"]
    if toolkit not in TORCH_NPU:
        yield Violation(
            f"{_KEY}.{_TOOLKIT}", "is no CANN release that is known", "torch_npu is built for one", tuple(TORCH_NPU)
        )
    elif torch_npu not in TORCH_NPU[toolkit]:
        rule = f"is not released for CANN {toolkit}"
        yield Violation(f"{_KEY}.torch-npu", rule, "torch_npu is built against one CANN", TORCH_NPU[toolkit])


_BLOCK = 16  # numbers of 16 bits


def adapted_once(field: str, is_there: Callable[[RunConfig], bool]) -> Rule:
    """The rule of another layout on the actor's ranks, under `field`: it needs no other patches than the actor's."""

    def is_adapted_otherwise(config: RunConfig, _: ModelSpec) -> bool:
        own = leaf(config, field)
        if own is None or not is_there(config) or not _on_npu(config):
            return False
        return own.context_parallel_size != config.actor.layout.context_parallel_size

    return RuleRow(
        field,
        is_adapted_otherwise,
        "must have the actor's context_parallel_size on npu",
        "MindSpeed adapts a process once, by what the actor has",
    )


def npu_notes(config: RunConfig) -> Iterator[str]:
    """Yields what users of NPUs have to know."""
    if _on_npu(config):
        yield (
            "cluster.device npu: written against the documented interfaces and never run on hardware; begin with few "
            "steps, and read the metrics of mismatch between engine and trainer"
        )


def narrow_experts(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Warns where experts on NPUs are cut to a width that is no multiple of the matrix unit's block."""
    if not _on_npu(config) or not model.is_moe:
        return
    rollout = config.rollout
    actor = config.actor.layout
    widths = {
        "rollout.expert_parallel_size": max(1, rollout.workers_per_engine // rollout.expert_parallel_size),
        "actor.layout.expert_tensor_parallel_size": actor.expert_tensor,
    }
    for key, parts in widths.items():
        if (model.moe_intermediate_size // parts) % _BLOCK:
            yield (
                f"{key}: each expert is cut {parts} times, to a width of {model.moe_intermediate_size // parts}, which "
                f"is no multiple of {_BLOCK}: an NPU's matrix unit works on blocks of {_BLOCK}, so this is slow at best"
            )


_CUT_OTHERWISE = "cut otherwise than the plan of the weight sync has them"
_APART = "vllm-ascend starts with it only where prefill and decoding are engines of their own (vllm_ascend/platform.py)"
# fields of vllm-ascend's additional_config: the value that each must have, and the reason
_NEVER_ON_ASCEND: dict[str, tuple[Any, str]] = {
    "weight_nz_mode": (0, "weights in FRACTAL_NZ cannot be updated in place"),
    "enable_fused_mc2": (0, "it keeps copies of the expert weights that no update reaches"),
    "enable_reduce_sample": (
        False,
        "log-probs of sampled tokens would be taken over a part of the vocabulary (its documentation says so)",
    ),
    "finegrained_tp_config": ({}, f"single modules would be {_CUT_OTHERWISE}"),
    "enable_flashcomm2_parallel_size": (0, f"the attention's output projection would be {_CUT_OTHERWISE}"),
    "enable_shared_expert_dp": (False, f"shared experts would be whole on every worker, {_CUT_OTHERWISE}"),
    "mix_placement": (False, f"shared experts would lie among the others, {_CUT_OTHERWISE}"),
    "layer_sharding": (None, _APART),
    "recompute_scheduler_enable": (False, _APART),
}
_FLASHCOMM = "enable_flashcomm1"


def _npu_engines(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if not _on_npu(config):
        return
    given = config.rollout.vllm_kwargs
    additional = given.get("additional_config") or {}
    if (additional.get("eplb_config") or {}).get("dynamic_eplb"):
        why = "redundant experts move between workers, and the sync's plan would be wrong"
        yield Violation(f"{_VLLM}.additional_config.eplb_config.dynamic_eplb", "must be false", why, (False,))
    key = f"{_VLLM}.additional_config"
    for name in sorted(additional.keys() - ASCEND_CONFIG):
        rule = f"vllm-ascend {_assumed(config)['vllm-ascend']} ignores it; {did_you_mean(name, ASCEND_CONFIG)}"
        yield Violation(f"{key}.{name}", rule, "it would have no effect, and nothing would say so", ())
    for name, (value, why) in _NEVER_ON_ASCEND.items():
        if additional.get(name, value) != value:
            yield Violation(f"{key}.{name}", f"must be {value}, or left out", why, (value,))


def _npu_flashcomm(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks what vllm-ascend 0.23 (platform.py) asserts late, when an engine starts."""
    if not _on_npu(config):
        return
    rollout = config.rollout
    given = rollout.vllm_kwargs.get("additional_config") or {}
    spread = rollout.expert_parallel_size > 1 or not model.is_moe
    if given.get(_FLASHCOMM) and (rollout.tensor_model_parallel_size == 1 or not spread):
        why = "it cuts the tokens of a step over tensor ranks, and vllm-ascend asserts as much when an engine starts"
        needs = "rollout.tensor_model_parallel_size above 1" + (" and expert_parallel_size too" if model.is_moe else "")
        yield Violation(f"{_VLLM}.additional_config.{_FLASHCOMM}", f"needs {needs}", why, (False,))


DEVICE_RULES = (
    _names,
    _megatron,
    _routes,
    _routes_by_block,
    _routes_in_turn,
    *map(_completed_on_cpu, ("data_parallel_size", "expert_parallel_size")),
    _drafts,
    _adapters,
    _ascend,
    RuleRow(
        "actor.layout.virtual_pipeline_model_parallel_size",
        lambda c, m: c.actor.layout.virtual_pipeline > 1 and not get_hosting(c.cluster.device).interleaves_stages,
        "must be left out on npu",
        "mbridge and virtual pipeline stages exclude each other on NPU: MindSpeed's schedule builds chunks that "
        "mbridge cannot map",
        (None,),
    ),
    RuleRow(
        f"{_TRANSFORMER}.use_flash_attn",
        lambda c, m: _on_npu(c) and c.model.override_transformer_config.get("use_flash_attn") is False,
        "must be true on npu, or left out",
        "MindSpeed's packed and context-parallel attention exist in that form only",
        (True,),
    ),
    on_only_where(
        "actor.optimizer_offload",
        lambda c, m: not (_on_npu(c) and c.model.override_transformer_config.get("swap_optimizer")),
        f"must be false with {_TRANSFORMER}.swap_optimizer",
        "both would move the same memory",
    ),
    _npu_engines,
    _npu_flashcomm,
)
