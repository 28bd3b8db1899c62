"""What processes of each device are given: environment by kind of process, and nothing of it again in the job's own."""

import asyncio
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from vllm.config.kernel import MoEBackend

from mrl.config.load import load_config
from mrl.engine import vllm_engine as engine
from mrl.engine.handshake import _KEEPING
from mrl.engine.requests import _arguments
from mrl.platforms.hosting import get_hosting, grouped_gemm_text
from mrl.platforms.inventory import device_number
from mrl.platforms.torch_platforms import CudaPlatform
from mrl.process import own
from mrl.rank import rank_worker as workers

ROOT = Path(__file__).parents[2]
ALLOCATOR = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}


def environments(device: str) -> tuple[dict[str, str], dict[str, str]]:
    """Of a rank, and of an engine."""
    hosting = get_hosting(device)
    return hosting.actor_environment(), hosting.engine_environment(0, 1, 2, 1)


@pytest.mark.parametrize("device", ALLOCATOR)
def test_ranks_have_expandable_segments_and_engines_say_that_they_have_none(device):
    actor, engine = environments(device)
    assert actor[ALLOCATOR[device]] == "expandable_segments:True"
    # said: where nothing is, the job's or vllm-ascend's own word holds
    assert engine[ALLOCATOR[device]] == "expandable_segments:False"


def test_the_devices_own_variable_is_the_one_that_torch_believes():
    header = (Path(torch.__file__).parent / "include/c10/cuda/CUDAAllocatorConfig.h").read_text()
    assert header.index('get_env("PYTORCH_CUDA_ALLOC_CONF")') < header.index('get_env("PYTORCH_ALLOC_CONF")')
    assert 'if (!env.has_value()) {\n        env = c10::utils::get_env("PYTORCH_ALLOC_CONF")' in header


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_the_job_does_not_say_again_what_mrl_says_to_each_kind_of_process(device):
    job = yaml.safe_load((ROOT / "launch" / f"runtime_env.{device}.yaml").read_text())["env_vars"]
    own = set().union(*environments(device))
    assert not {name for name in job if "ALLOC_CONF" in name}
    assert set(job) & own <= {"OMP_NUM_THREADS"}  # of the driver too


@pytest.fixture
def deterministic_cuda(monkeypatch):
    """What the CUDA platform sets, undone afterwards."""
    for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    CudaPlatform.deterministic(None)


def test_deterministic_on_cuda_fixes_how_nccl_sums_and_fills_no_memory(deterministic_cuda):
    assert os.environ["NCCL_ALGO"] == "Ring"  # with the choice left to it, sums in switches may come in any order
    assert torch.utils.deterministic.fill_uninitialized_memory is False and torch.backends.cudnn.benchmark is False


def test_an_algorithm_that_somebody_chose_is_left(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    CudaPlatform.deterministic(None)
    assert os.environ["NCCL_ALGO"] == "Tree"


def test_engines_on_cuda_take_moe_kernels_that_keep_experts_as_a_sync_writes_them():
    """Left to itself vLLM takes others on newer devices, and the handshake would refuse the engine.

    The run's word wins.
    """
    chosen = get_hosting("cuda").engine_arguments(4096, None)["moe_backend"]
    assert chosen in typing.get_args(MoEBackend) and chosen.upper() in _KEEPING
    given = {"rollout.engine_kwargs.vllm.moe_backend=batched_triton": "batched_triton", "rollout.n=8": chosen}
    preset = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    for setting, expected in given.items():
        config = load_config(preset, None, ["cluster.device=cuda", setting]).config
        assert _arguments(config, get_hosting("cuda"), 0)["moe_backend"] == expected


def test_devices_with_names_are_numbered_alike_in_every_process():
    uuid, partition = "GPU-4b3c1a2e-0d1f-4a5b-8c9d-112233445566", "MIG-7f1f2d3e-aaaa-bbbb-cccc-001122334455"
    program = f"from mrl.platforms.inventory import device_number as n; print(n('3'), n({uuid!r}), n({partition!r}))"
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    numbers = [device_number(name) for name in ("3", uuid, partition)]
    assert list(map(str, numbers)) == elsewhere
    assert numbers[0] == 3 and len({*numbers, *range(1 << 16, (1 << 16) + 9)}) == 12 and max(numbers) < 1 << 63


def test_sums_in_switches_are_off_and_errors_said_however_a_run_is_started_unless_the_user_says_otherwise(
    monkeypatch, tmp_path
):
    """Where mrl train, Slurm or an own cluster starts it, no runtime environment is read."""
    names = ("NCCL_NVLS_ENABLE", "NCCL_DEBUG")
    job = yaml.safe_load((ROOT / "launch" / "runtime_env.cuda.yaml").read_text())["env_vars"]
    assert not set(names) & set(job)
    monkeypatch.setattr(own, "log_to", lambda path: None)
    config = load_config(ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml").config.model_dump()
    for user, wanted in ((None, ["0", "WARN"]), ("1", ["1", "1"])):
        for name in names:
            monkeypatch.setenv(name, user or "")
            if user is None:
                monkeypatch.delenv(name)
        workers.ActorWorker(config, 0, str(tmp_path / "log"))
        assert [os.environ[name] for name in names] == wanted


CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"


@pytest.mark.parametrize(
    ("device", "degrees", "grouped_gemm", "queues", "cutlass"),
    [
        ("cuda", {}, "cublas", None, "0"),  # Megatron asks for one queue with tensor or context parallelism alone
        ("cuda", {"tensor_model_parallel_size": 2}, "cutlass", "1", "1"),
        ("cuda", {"context_parallel_size": 2}, "cublas", "1", "0"),
        ("cuda", {"pipeline_model_parallel_size": 2}, "cublas", None, "0"),
        ("cpu", {"tensor_model_parallel_size": 2}, "cublas", None, None),
    ],
)
@pytest.mark.parametrize("user", [None, "8"])
def test_a_rank_has_the_queues_and_products_that_its_layout_needs_unless_the_user_says_otherwise(
    device, degrees, grouped_gemm, queues, cutlass, user, monkeypatch, tmp_path
):
    monkeypatch.setattr(own, "log_to", lambda path: None)
    config = load_config(ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml").config.model_dump()
    config["cluster"]["device"] = device
    config["model"]["grouped_gemm"] = grouped_gemm
    config["actor"]["layout"] |= {"world_size": 4, "tensor_model_parallel_size": 1} | degrees
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", CUTLASS):
        monkeypatch.setenv(name, user or "")
        if user is None:
            monkeypatch.delenv(name)
    workers.ActorWorker(config, 0, str(tmp_path / "log"))
    found = [os.environ.get(name) for name in ("CUDA_DEVICE_MAX_CONNECTIONS", CUTLASS)]
    assert found == [user or queues, user or cutlass]


def test_the_kernels_of_a_run_say_who_multiplies_experts(monkeypatch):
    for value, said in (("1", "CUTLASS"), ("0", "one by one by cuBLAS")):
        monkeypatch.setenv(CUTLASS, value)
        assert said in grouped_gemm_text()


def test_an_engine_has_them_before_it_makes_a_process(monkeypatch):
    called = []
    monkeypatch.setattr(engine, "set_communicator_defaults", lambda: called.append("defaults"))
    monkeypatch.setattr(engine, "start_server", lambda folder: called.append("server") or 1 / 0)
    made = engine.VllmEngine.__new__(engine.VllmEngine)
    made.settings = SimpleNamespace(is_on_cpu=True)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(made._start(None, Path()))
    assert called == ["defaults", "server"]
