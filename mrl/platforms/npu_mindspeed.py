"""Prepares MindSpeed in a Megatron rank's process: imports it before Megatron, then applies it for the run's sizes.

Importing `mindspeed.megatron_adaptor` replaces parts of torch and Megatron with NPU versions. It decides what to
replace from `sys.argv`, which does not hold the run's settings. So at import it sees a context-parallel size of 1 and
leaves those features out. `repatch` with the real sizes adds them. It must come before `initialize_model_parallel`,
which is one of the replaced functions.

Source: MindSpeed core_r0.16.0, mindspeed/megatron_adaptor.py (`patch_features`, `repatch`), mindspeed/args_utils.py
(`get_mindspeed_args` parses `sys.argv`; `get_full_args`, which `repatch` takes, gives the same where Megatron's
training script is not installed), features_manager/context_parallel/context_parallel_feature.py. Never run on hardware.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mrl.errors import EnvironmentFault
from mrl.platforms.patching import refuse_beside_vllm

ADAPTOR = "mindspeed.megatron_adaptor"
BRANCH = "core_r0.16.0"
DEFAULTS = {
    "use_flash_attn": True,  # the only attention of MindSpeed's packed and context-parallel paths
    "use_distributed_optimizer": True,
    "context_parallel_algo": "megatron_cp_algo",  # ring attention, which matches how mrl cuts batches
}
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
# Fields of a transformer config that only MindSpeed knows. It takes them when it is applied; Megatron's own class lacks
# them.
MINDSPEED_FIELDS = frozenset(
    (
        "use_flash_attn",
        "use_fused_rmsnorm",
        "use_fused_swiglu",
        "use_fused_rotary_pos_emb",
        "fused_permute_unpermute",
        "swap_optimizer",
    )
)


def adapt(layout: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Applies MindSpeed to this process. Later calls apply it again.

    `layout` has Megatron's names of parallel sizes; other keys are ignored, and None means Megatron's default.
    `overrides` are fields of its transformer config. Raises EnvironmentFault if Megatron was imported or initialised
    too early, if vLLM was imported, and for another release of MindSpeed.
    """
    refuse_beside_vllm()
    _refuse_too_late()
    if ADAPTOR not in sys.modules:
        _import_first()
    sizes = {name: layout[name] for name in SIZES if layout.get(name) is not None}
    sys.modules[ADAPTOR].repatch(DEFAULTS | dict(overrides) | sizes)


def _import_first() -> None:
    if early := sorted(name for name in sys.modules if name.split(".")[0] == "megatron"):
        raise EnvironmentFault(
            f"{early[0]} was imported before MindSpeed, which then cannot replace what others have already taken from "
            "it; in the process of an NPU rank nothing may import Megatron before mrl.platforms.prepare_process"
        )
    if importlib.util.find_spec("megatron_adaptor"):
        raise EnvironmentFault(
            "the installed MindSpeed is core_r0.17.0 or newer, which comes in three packages; this version "
            f"of mrl supports {BRANCH}"
        )
    try:
        with _hidden_arguments():
            importlib.import_module(ADAPTOR)
    except ImportError as error:
        raise EnvironmentFault(
            f"cluster.device=npu needs MindSpeed {BRANCH} ({error}); it is on no package index: "
            f"pip install git+https://gitcode.com/Ascend/MindSpeed.git@{BRANCH}"
        ) from error


def _refuse_too_late() -> None:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        raise EnvironmentFault(
            "Megatron's process groups exist already, and MindSpeed replaces the function that makes them; "
            "mrl.platforms.prepare_process has to be called first"
        )


@contextmanager
def _hidden_arguments() -> Iterator[None]:
    """Hides the command line: MindSpeed parses it at import and fails on arguments of Ray or pytest."""
    kept = sys.argv[:]
    sys.argv[:] = kept[:1]
    try:
        yield
    finally:
        sys.argv[:] = kept
