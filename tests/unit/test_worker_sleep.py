"""What a worker extension does around a worker's sleep, on stand-ins; with vllm-ascend's wake in it, which transposes
experts.

The stand-ins have the signatures of vllm-ascend v0.23.0 (vllm_ascend/worker/worker.py, device_allocator/camem.py);
tests/unit/test_stand_ins.py compares them with what was read from its wheel."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mrl.engine import ascend_wake
from mrl.engine.constants import Constants
from mrl.engine.drafter import ModelThatDrafts
from mrl.engine.engine_state import CACHE, SYNCS_TOWER, WEIGHTS
from mrl.engine.sleeping import NEEDS_WEIGHTS, SleepingExtension, check_layout, layout_of


class Pool:
    """CaMemAllocator: what is asleep by tag."""

    one: "Pool"

    def __init__(self):
        self.asleep, self.said = set(), []
        sizes = {1: (64, WEIGHTS), 2: (32, WEIGHTS), 3: (128, CACHE)}
        self.pointer_to_data = {p: SimpleNamespace(handle=(0, size, p, p), tag=tag) for p, (size, tag) in sizes.items()}

    @classmethod
    def get_instance(cls):
        return cls.one

    def sleep(self, offload_tags=None):
        assert offload_tags == ()  # nothing is copied to the host at level 2
        self.asleep = {WEIGHTS, CACHE}

    def wake_up(self, tags=None):
        self.said.append(tags)
        self.asleep -= set(tags)


class NPUWorker:
    """The worker: its sleep saves buffers, its own wake transposes experts."""

    def __init__(self):
        self.model = nn.Module()
        self.model.w13_weight = nn.Parameter(torch.arange(24.0).view(2, 3, 4), requires_grad=False)
        self.model.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.model.register_buffer("cos_sin_cache", torch.ones(4))
        self.model_runner = SimpleNamespace(
            model=self.model, get_model=lambda: self.model, kv_caches=[(torch.zeros(2), torch.zeros(2))]
        )
        self.vllm_config = SimpleNamespace(additional_config={"weight_nz_mode": 0})
        self.device = SimpleNamespace(type="npu")
        self.model_config = SimpleNamespace(enable_sleep_mode=True, hf_config=SimpleNamespace())

    def sleep(self, level=1):
        assert level == 2
        self._sleep_saved_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        Pool.one.sleep(offload_tags=())
        self.model.cos_sin_cache.fill_(-1)

    def wake_up(self, tags=None):
        Pool.one.wake_up(tags)
        self.model.w13_weight = nn.Parameter(self.model.w13_weight.transpose(1, 2), requires_grad=False)


class Worker(NPUWorker, SleepingExtension):
    """As vLLM mixes them."""

    adapter = SimpleNamespace(
        packed_bytes=lambda model: 10,
        bytes_asleep=lambda parts: sum(d.handle[1] for d in Pool.one.pointer_to_data.values() if d.tag in parts),
    )
    given_up = 0

    def abandon_update(self):
        self.given_up += 1


class Ascend(Worker):
    """As v0_23 wakes it."""

    def restore_part(self, part):
        ascend_wake.wake(self, part)


SAID = []  # what the device was asked


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    Pool.one = Pool()
    SAID.clear()
    device = SimpleNamespace(
        empty_cache=lambda: SAID.append(f"empty {sorted(Pool.one.asleep)}"),
        memory_allocated=lambda: 300, memory_reserved=lambda: 320, mem_get_info=lambda: (70, 400),
    )  # fmt: skip
    monkeypatch.setattr(torch, "npu", device, raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: SAID.append(f"wait {sorted(Pool.one.asleep)}"))
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm_ascend.device_allocator", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm_ascend.device_allocator.camem", SimpleNamespace(CaMemAllocator=Pool))
    return Pool.one


def test_weights_come_back_as_nan_in_the_layout_of_before_and_buffers_as_they_were(pool):
    worker = Ascend()
    before = layout_of(worker.model)
    worker.give_memory()
    assert pool.asleep == {WEIGHTS, CACHE} == worker.parts_asleep and worker.given_up == 1
    worker.take_memory(WEIGHTS)
    assert layout_of(worker.model) == before and bool(worker.model.w13_weight.isnan().all())
    assert worker.model.cos_sin_cache.tolist() == [1, 1, 1, 1] and worker.model.count.tolist() == [0, 1, 2]
    assert worker.parts_asleep == {CACHE} == pool.asleep
    for cache in worker.model_runner.kv_caches[0]:
        cache.fill_(torch.nan)  # what a device leaves there
    worker.take_memory(CACHE)
    assert [cache.tolist() for cache in worker.model_runner.kv_caches[0]] == [[0, 0], [0, 0]]
    assert pool.said == [[WEIGHTS], [CACHE]] and worker.parts_asleep == frozenset()


@pytest.mark.parametrize("trained", [False, True])
def test_a_vision_tower_comes_back_as_it_was_unless_a_sync_brings_it(trained):
    worker = Ascend()
    setattr(worker.model_config.hf_config, SYNCS_TOWER, trained)
    worker.model.visual = nn.Linear(2, 2).requires_grad_(False)
    worker.model.language_model = nn.Module()
    worker.model.language_model.layer = nn.Module()
    worker.model.language_model.layer.w13_weight = worker.model.w13_weight
    stored = {name: parameter.clone() for name, parameter in worker.model.visual.named_parameters()}
    worker.give_memory()
    for parameter in worker.model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(7)  # what others write there
    worker.take_memory(WEIGHTS)
    found = dict(worker.model.visual.named_parameters())
    same = [torch.equal(parameter, stored[name]) for name, parameter in found.items()]
    assert all(parameter.isnan().all() for parameter in found.values()) if trained else all(same)
    assert bool(worker.model.w13_weight.isnan().all()) and not worker.tower_awake


def test_a_model_that_drafts_sleeps_with_the_other_and_waits_for_a_sync_as_it_does():
    worker = Ascend()
    worker.model.lm_head = nn.Linear(2, 2).requires_grad_(False)
    worker.model.load_weights = None
    drafting = nn.Module()
    drafting.model = nn.Module()
    drafting.model.layers = nn.ModuleDict({"7": nn.Linear(2, 2)})
    drafting.model.layers["7"]._k_scale = torch.tensor(0.5)
    drafting.load_weights = None
    worker.drafted = ModelThatDrafts(worker.model, drafting)
    own = set(drafting.parameters())
    assert own <= {tensor for tensor in worker.known_tensors() if isinstance(tensor, nn.Parameter)}
    worker.give_memory()
    drafting.model.layers["7"]._k_scale.fill_(-5)  # what is found in the pages that come back
    worker.take_memory(WEIGHTS)
    assert all(bool(parameter.isnan().all()) for parameter in (worker.model.lm_head.weight, *own))
    assert drafting.model.layers["7"]._k_scale == 0.5
    worker.give_memory()
    drafting.model.layers["7"].weight = nn.Parameter(torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match=r"drafts\.model\.layers\.7\.weight is .* after the wake"):
        worker.take_memory(WEIGHTS)


def test_tensors_that_are_no_buffers_come_back_too(monkeypatch):
    """A layer's own, and those that vllm-ascend keeps in modules, as pull requests 17217 and 13012 found them."""
    kept = SimpleNamespace(_cos_cache=torch.arange(3.0), _sin_cache=None)
    numbers = torch.tensor([0, 1, 0, 1])
    ways = {
        "ALLTOALL": SimpleNamespace(token_dispatcher=SimpleNamespace(expert_ids_per_ep_rank=numbers)),
        "ALLGATHER": SimpleNamespace(token_dispatcher=SimpleNamespace()),
    }
    of_experts = "vllm_ascend.ops.fused_moe.moe_comm_method"
    monkeypatch.setitem(sys.modules, "vllm_ascend.ops.rotary_embedding", kept)
    monkeypatch.setitem(sys.modules, of_experts, SimpleNamespace(_MoECommMethods=ways))
    worker = Ascend()
    worker.model._k_scale, worker.model._expert_map = torch.tensor(0.5), torch.tensor([-1, 0, 1, -1])
    worker.give_memory()
    for tensor in (worker.model._k_scale, worker.model._expert_map, kept._cos_cache, numbers):
        tensor.fill_(-5)  # what is found in the pages that come back
    worker.take_memory(WEIGHTS)
    assert worker.model._k_scale == 0.5 and kept._cos_cache.tolist() == [0, 1, 2]
    assert worker.model._expert_map.tolist() == [-1, 0, 1, -1] and numbers.tolist() == [0, 1, 0, 1]
    noted = Constants.of(worker.model)
    noted.check(worker.model, ())
    for tensor, name in (
        (kept._cos_cache, r"vllm_ascend\.ops\.rotary_embedding\._cos_cache"),
        (numbers, rf"{of_experts}\._MoECommMethods\[ALLTOALL\]\.expert_ids_per_ep_rank"),
        (worker.model._expert_map, r"\._expert_map"),
    ):
        before = tensor.clone()
        tensor.fill_(7)
        with pytest.raises(RuntimeError, match=rf"when the engine started: {name}; no sync brings it"):
            noted.check(worker.model, ())
        tensor.copy_(before)


def test_the_workers_own_wake_is_caught_by_the_layout():
    worker = Worker()
    worker.give_memory()
    with pytest.raises(
        RuntimeError,
        match=r"w13_weight is \(\(2, 4, 3\), \(12, 1, 4\), torch.float32\) after the wake, \(\(2, 3, 4\), ",
    ):
        worker.take_memory(WEIGHTS)
    assert WEIGHTS in worker.parts_asleep  # nothing is written into it


def test_a_parameter_that_is_lost_or_new_is_named():
    layout = {"a": ((1,), (1,), torch.float32)}
    with pytest.raises(RuntimeError, match="a is None after the wake"):
        check_layout(layout, {})
    with pytest.raises(RuntimeError, match=r"a is .* None before the sleep"):
        check_layout({}, layout)


def test_a_part_that_is_awake_is_not_taken_twice(pool):
    worker = Ascend()
    worker.take_memory(CACHE)
    worker.give_memory()
    worker.take_memory(CACHE)
    worker.take_memory(CACHE)
    assert pool.said == [[CACHE]]


@pytest.mark.parametrize("method", NEEDS_WEIGHTS)
def test_what_touches_weights_is_refused_while_they_sleep_and_only_then(method):
    worker = Ascend()
    worker.refuse_asleep(method)
    worker.give_memory()
    with pytest.raises(RuntimeError, match=f"{method}: this worker's weights are asleep; first wake_weights"):
        worker.refuse_asleep(method)
    worker.refuse_asleep("take_memory")
    worker.take_memory(WEIGHTS)
    worker.refuse_asleep(method)


def test_a_worker_of_known_source_may_sleep_and_another_may_not(monkeypatch):
    worker = Ascend()
    with pytest.raises(RuntimeError, match=r"sleeps or wakes differently from release v0\.23\.0 .*known 91aa42257a7c"):
        ascend_wake.check_worker(worker)
    monkeypatch.setattr(
        ascend_wake, "KNOWN_SOURCE", ascend_wake.source_digest(NPUWorker.sleep, NPUWorker.wake_up, Pool.wake_up)
    )
    ascend_wake.check_worker(worker)
    worker.vllm_config.additional_config["enable_sleep_mode_extra_cleanup"] = True
    with pytest.raises(RuntimeError, match="enable_sleep_mode_extra_cleanup takes communicators and graphs apart"):
        ascend_wake.check_worker(worker)


def test_only_vllm_ascends_workers_are_taken_for_them(monkeypatch):
    assert not ascend_wake.is_ascend(Ascend())
    monkeypatch.setattr(NPUWorker, "__module__", "vllm_ascend.worker.worker")
    assert ascend_wake.is_ascend(Ascend())


def test_the_device_is_waited_for_before_memory_goes_and_its_cache_emptied_after():
    Ascend().give_memory()
    assert ["wait []", f"empty {[CACHE, WEIGHTS]}"] == SAID


def test_what_is_mapped_nowhere_is_not_counted_as_live():
    worker = Ascend()
    awake = worker.held_memory()
    worker.give_memory()
    asleep = worker.held_memory()
    # 224 of its 320 bytes are in blocks that were given away
    assert (awake["live_bytes"], asleep["live_bytes"], asleep["free_bytes"]) == (310, 96, 70)


def test_an_engine_whose_memory_does_not_come_from_the_pool_is_refused():
    worker = Ascend()
    worker.model_config.enable_sleep_mode = False
    with pytest.raises(RuntimeError, match="started without enable_sleep_mode"):
        worker.give_memory()
    assert worker.parts_asleep == frozenset()


def test_on_the_cpu_tensors_and_packed_linears_are_counted():
    worker = Ascend()
    worker.device = torch.device("cpu")
    kv = sum(tensor.nbytes for tensor in worker.model_runner.kv_caches[0])
    held = {id(tensor) for tensor in worker.known_tensors()}
    assert len(held) == 5 and kv == 16
    assert worker.packed_bytes() == 10
    worker.give_memory()
    assert worker.packed_bytes() == 0 and worker.held_memory()["free_bytes"] is None
