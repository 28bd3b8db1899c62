"""The CPU worker that sleeps, around a stand-in for vLLM's: what it refuses while memory is away, and storages that
resist.

What the memory of a real model comes to is in tests/real/test_engine_sleep.py.
"""

import importlib.util
import inspect
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mrl.engine import engine_state
from mrl.engine.engine_state import CACHE, WEIGHTS


class SpinCondition:
    """vLLM's, of a reader; `blocked` is what it was asked to wait for when it did not poll."""

    def __init__(self, last_read: float = 0.0, busy_loop_s: float = 1.0):
        self.last_read, self.busy_loop_s, self.blocked = last_read, busy_loop_s, []

    def wait(self, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            raise AssertionError("it polled")
        self.blocked.append(timeout_ms)


class CPUWorker:
    """Of vLLM's worker what mrl's calls; two layers, one of which vLLM has packed out of sight."""

    def __init__(self):
        self.parallel_config = SimpleNamespace(data_parallel_size=1, enable_expert_parallel=False)
        self.model_config, self.steps = SimpleNamespace(use_mla=False, is_hybrid=False, quantization=None), 0
        self.model_config.dtype = torch.bfloat16
        self.vllm_config = SimpleNamespace(speculative_config=None)

    def load_model(self):
        model = nn.ModuleDict(
            {"norm": nn.Linear(2, 3, bias=False), "packed": nn.Linear(4, 5, bias=False), "head": nn.Linear(4, 5)}
        )
        model.requires_grad_(False)
        dispatch(model["packed"], remove_weight=True)
        dispatch(model["head"], remove_weight=False)
        model["tied"] = nn.Embedding(5, 4)
        model["tied"].weight = model["head"].weight
        self.model_runner = SimpleNamespace(
            model=model, get_model=lambda: model, kv_caches=[torch.ones(2, 8), torch.ones(2, 8)]
        )

    def execute_model(self, *scheduled):
        self.steps += 1

    execute_dummy_batch = start_weight_update = execute_model

    def computing_model(self):
        """The worker extension's."""
        return self.model_runner.model


def dispatch(layer, remove_weight):
    """As vLLM's: the packed copy lives in a closure, and its parameter is emptied."""
    packed = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed, bias)
    if remove_weight:
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


PACKED = SimpleNamespace(restore_metadata=({"weight": torch.empty(5, 4, device="meta")}, {}))


@pytest.fixture
def module(monkeypatch):
    """mrl.engine.cpu_worker as it is where vLLM is the stand-in."""
    vllm = {
        "vllm.distributed.device_communicators": {"shm_broadcast": SimpleNamespace(SpinCondition=SpinCondition)},
        "vllm._custom_ops": {"onednn_mm": lambda weight, rows, bias: rows},
        "vllm.model_executor.layers.utils": {
            "dispatch_cpu_unquantized_gemm": dispatch,
            "check_cpu_sgl_kernel": lambda n, k, dtype: False,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {"get_layerwise_info": lambda layer: PACKED},
        "vllm.model_executor.model_loader.utils": {"get_model_architecture": lambda config: None},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
    }
    for name, members in vllm.items():
        for part in [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, part, SimpleNamespace(__name__=part, __path__=[]))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    spec = importlib.util.spec_from_file_location(
        "cpu_worker_here", Path(engine_state.__file__).with_name("cpu_worker.py")
    )
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cpu_worker_here", made)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def worker(module):
    made = module.CpuWorker()
    made.load_model()
    return made


def test_processes_nap_between_two_looks_for_a_call_and_block_when_none_comes(module, monkeypatch):
    shm_broadcast = module.shm_broadcast
    assert shm_broadcast.SpinCondition is SpinCondition
    module.CpuWorker()
    naps = []
    monkeypatch.setattr(module.time, "sleep", naps.append)
    shm_broadcast.SpinCondition(last_read=time.monotonic()).wait(7)
    (waiting := shm_broadcast.SpinCondition(last_read=time.monotonic() - 2)).wait(7)
    assert (naps, waiting.blocked) == ([module.NAP_S], [7]) and module.NAP_S < 1e-3


GET_XCOMP_PERM, TILE_DATA = 0x1022, 1 << 18  # of Linux's asm/prctl.h; AMX's tiles among the processor's states
ASK = f"""
import ctypes, sys
sys.modules["vllm"] = None  # nobody but the worker's own function asks
allowed = ctypes.c_ulong()
def tiles():
    assert ctypes.CDLL(None).syscall(158, {GET_XCOMP_PERM}, ctypes.byref(allowed)) == 0
    return bool(allowed.value & {TILE_DATA})
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_a_worker_may_use_tiles_before_any_product(module):
    """vLLM's attention in bfloat16 dies by SIGILL where no product has asked for them before."""
    asked = inspect.getsource(module.allow_tiles)
    code = f"{ASK}\nimport torch\n{asked}\nbefore = tiles()\nallow_tiles()\nprint(before, tiles())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_worker_without_tiles_asks_for_none(module, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(1) or True)
    for has_some, times in ((False, 0), (True, 1)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_some=has_some: has_some)
        module.CpuWorker()
        assert len(asked) == times
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    with pytest.raises(RuntimeError, match="AMX tiles"):
        module.CpuWorker()


def held(worker) -> tuple[int, int]:
    """Bytes below weights and cache."""
    model, caches = worker.model_runner.model, worker.model_runner.kv_caches
    return tuple(sum(t.untyped_storage().nbytes() for t in tensors) for tensors in (model.parameters(), caches))


def test_memory_goes_and_comes_back_in_parts_as_nan_and_as_zeros(worker):
    model, awake = worker.model_runner.model, held(worker)
    parameters = list(model.parameters())
    worker.sleep(level=2)
    assert held(worker) == (0, 0) and awake[0] > 0
    worker.wake_up(tags=[WEIGHTS])
    assert held(worker) == (awake[0], 0)
    assert (
        all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
        and model["tied"].weight is model["head"].weight
    )
    assert all(bool(p.isnan().all()) for p in parameters if p.numel())
    for name in ("packed", "head"):
        assert bool(model[name].cpu_linear(torch.ones(1, 4), None, None).isnan().all())
    worker.wake_up(tags=[CACHE])
    assert held(worker) == awake and not any(bool(cache.any()) for cache in worker.model_runner.kv_caches)


def test_a_packed_linear_refuses_to_compute_while_it_is_away(worker):
    worker.sleep(level=2)
    with pytest.raises(RuntimeError, match="a linear layer was asked to compute while its weights are asleep"):
        worker.model_runner.model["packed"].cpu_linear(torch.ones(1, 4), None, None)


def test_neither_step_nor_update_reaches_memory_that_is_away(worker):
    step, nothing = SimpleNamespace(total_num_scheduled_tokens=3), SimpleNamespace(total_num_scheduled_tokens=0)
    worker.sleep(level=2)
    with pytest.raises(RuntimeError, match="a step was asked of a worker whose weights and kv_cache are asleep"):
        worker.execute_model(step)
    with pytest.raises(RuntimeError, match="a weight update was asked of a worker whose weights are asleep"):
        worker.start_weight_update()
    worker.execute_model(nothing)  # nothing is computed: vLLM tells what has ended
    worker.wake_up(tags=[WEIGHTS])
    worker.start_weight_update()
    for call in (lambda: worker.execute_model(step), worker.execute_dummy_batch):
        with pytest.raises(RuntimeError, match="step was asked of a worker whose kv_cache are asleep"):
            call()
    worker.wake_up(tags=[CACHE])
    worker.execute_model(step)
    assert worker.steps == 3


def test_a_second_sleep_or_wake_changes_nothing(worker):
    awake = held(worker)
    worker.wake_up()
    worker.sleep(level=2)
    worker.sleep(level=2)
    worker.wake_up()
    assert held(worker) == awake and not worker.memory_asleep


def test_a_copy_on_the_host_would_free_nothing(worker):
    with pytest.raises(RuntimeError, match="sleeps at level 2, not 1"):
        worker.sleep()
    assert held(worker)[0] > 0


def test_a_parameter_that_numpy_has_looked_at_leaves_all_the_same_and_a_cache_is_refused(worker):
    norm, cache = worker.model_runner.model["norm"].weight, worker.model_runner.kv_caches[0]
    norm.numpy()
    assert not norm.untyped_storage().resizable()
    worker.sleep(level=2)
    assert norm.untyped_storage().nbytes() == 0
    worker.wake_up()
    cache.numpy()  # other names of its storage would keep the memory, so it cannot move
    with pytest.raises(RuntimeError, match="not resizable"):
        worker.sleep(level=2)


def test_tables_of_angles_are_rounded_once_as_vllm_rounds_them_when_they_are_used(module):
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cos_sin_cache", torch.tensor([0.1, 0.2]), persistent=False)

        def _match_cos_sin_cache_dtype(self, query):
            self.cos_sin_cache = self.cos_sin_cache.to(query.device, dtype=query.dtype)

    model = nn.ModuleList([Rotation(), nn.Linear(2, 2)])
    module.round_angles(model, torch.bfloat16)
    assert model[0].cos_sin_cache.dtype is torch.bfloat16
