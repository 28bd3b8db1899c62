"""What the hosts of a run can compute and hold: peaks, the share of them that a step reached, the fullest host."""

import mmap
from collections.abc import Collection
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_model import SIZES

from mrl.cluster import hosts as module
from mrl.cluster.engine_fleet import ServingProcess
from mrl.cluster.hosts import Hosts, Peak, Speed, first_of_each
from mrl.config.deployment import Deployment
from mrl.config.load import load_config
from mrl.driver.reporting import mfu_metrics
from mrl.errors import Interrupted
from mrl.model import forward_flops, forward_flops_per_token, known_spec, model_spec
from mrl.plan.devices import published_flops
from mrl.platforms import get_platform
from mrl.platforms.process_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from mrl.platforms.speed import SIZE, product_rate
from mrl.units import GIB, MIB

TINY = "parallel_configs/tiny-moe/cpu.yaml"


@pytest.mark.parametrize(
    ("shown", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312),
     ("Ascend910B3", 354),
     ("Ascend910_9392", 376), ("NVIDIA H100 PCIe", None), ("NVIDIA H200 NVL", None), ("AMD EPYC", None)],
)  # fmt: skip
def test_a_device_has_the_published_figure_of_its_own_kind_and_a_slower_variant_has_none(shown, tflops):
    assert published_flops(shown) == (tflops * 1e12 if tflops else None)


def test_peaks_are_of_the_devices_that_are_used_and_on_cpu_of_hosts():
    gpu = load_config("parallel_configs/qwen3-30b-a3b/h100-4x8-separate.yaml").config
    ranks = gpu.actor.layout.world_size
    peak = Peak.of(Deployment.of(gpu), [Speed("NVIDIA H100 80GB HBM3", 600e12)] * ranks)
    assert (peak.actor, peak.run) == (
        ranks * 989e12,
        32 * 989e12,
    )  # four nodes of eight, actor and engines beside each other
    assert Peak.of(Deployment.of(gpu), [Speed("unheard of", 5e12)] * ranks).actor == ranks * 5e12
    cpu = load_config(TINY).config
    # its ranks and engines share one host's cores
    assert Peak.of(Deployment.of(cpu), [Speed("AMD EPYC", 1e11)]) == Peak(1e11, 1e11)


def test_a_pass_costs_what_its_sequences_cost_one_by_one_and_the_output_layer_for_predicted_tokens():
    model = known_spec("Qwen3-30B-A3B")
    both = forward_flops(model, [100, 700], 800)
    assert both == pytest.approx(
        100 * forward_flops_per_token(model, 50.5) + 700 * forward_flops_per_token(model, 350.5)
    )
    assert both - forward_flops(model, [100, 700], 300) == pytest.approx(500 * 2 * 151936 * 2048)
    # 3.35 billion active parameters without the embedding's 0.31: two operations each, and little attention at this
    # length
    assert forward_flops(model, [1], 1) == pytest.approx(2 * (3.35e9 - 0.31e9), rel=0.01)


def test_mfu_by_hand():
    """One sequence of 3 prompt and 1 response tokens at 4 (update) and 7 passes (with reference and old log-probs) of
    one forward.
    """
    model = model_spec(SIZES)
    rows = SimpleNamespace(sequence_lengths=np.array([4]), sampled_lengths=np.array([1]))
    forward = forward_flops(model, [4], 1)
    peak, seconds = Peak(actor=forward, run=2 * forward), {"update": 6.0, "step": 5.0}

    def algorithm_of(on_policy: bool, needs_reference: bool, needs_critic: bool = False) -> SimpleNamespace:
        return SimpleNamespace(on_policy=on_policy, needs_reference=needs_reference, needs_critic=needs_critic)

    def of(*named: bool, **more: bool) -> tuple[float, float]:
        algorithm = algorithm_of(*named, **more)
        found = mfu_metrics(algorithm, model, rows, peak, seconds)
        return found["perf/mfu/actor"], found["perf/mfu/step"]

    assert of(on_policy=False, needs_reference=False) == (0.5, 0.5)  # 3 of 6; 1 + 1 + 3 of 10
    assert of(on_policy=True, needs_reference=False) == (0.5, 0.4)
    assert of(on_policy=False, needs_reference=True) == (0.5, 0.6)
    assert of(on_policy=False, needs_reference=False, needs_critic=True) == (0.5, 0.9)  # 1 + 3 more
    alone = SimpleNamespace(on_policy=False, needs_reference=True, use_kl_in_reward=False, needs_critic=True)
    found = mfu_metrics(alone, model, rows, peak, seconds | {"update": 0.0}, teacher=model)
    repeated = mfu_metrics(algorithm_of(True, False), model, rows, peak, seconds, epochs=(2, 1))
    assert repeated == {"perf/mfu/actor": 1.0, "perf/mfu/step": 0.7}  # 6 of 6; 1 + 6 of 10
    assert found == {"perf/mfu/step": 0.6}  # 1 + 1, and 1 + 3 of the critic; neither reference nor teacher


def test_a_measured_rate_is_one_that_a_product_reached_and_threads_are_put_back():
    """No product of that size, timed from outside, is faster than the fastest that was measured by much."""
    before = torch.get_num_threads()
    rate = product_rate(get_platform("cpu"), torch.float32, threads=2, seconds=0.01)
    assert torch.get_num_threads() == before
    assert 1e9 < rate < 1e14 and SIZE["cpu"] == 1024


def test_a_peak_of_memory_begins_anew():
    reset_peak_resident()
    before = peak_resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as large:  # of no heap, where room may be free
        for page in range(0, len(large), mmap.PAGESIZE):
            large[page] = 1
        assert peak_resident_bytes() - before >= 60 * MIB
    reset_peak_resident()
    assert peak_resident_bytes() <= resident_bytes() + 8 * MIB


class Process:
    """A Ray actor's handle whose calls answer at once."""

    def __init__(self, node: str, used: float | None):
        place = [(node, None)]
        self.devices = lambda: place
        self.host_bytes_used = SimpleNamespace(remote=lambda: None if used is None else used * GIB)


def hosts_of(monkeypatch, ranks: list[Process], engines: list[Process], starting: Collection[int] = ()) -> Hosts:
    def answered(refs, timeout_s, what):
        if None in refs.values():
            raise Interrupted(f"{what}: somebody died")
        return refs

    monkeypatch.setattr(module, "gather", answered)
    monkeypatch.setattr(module, "host_bytes_used", lambda: 2 * GIB)  # of the driver's host
    actor = SimpleNamespace(
        call=lambda method: [rank.devices() for rank in ranks],
        answers=lambda method, phase, asked: answered({i: getattr(ranks[i], method).remote() for i in asked}, 1, phase),
    )
    serving = {f"engine {i}": ServingProcess(0, engine) for i, engine in enumerate(engines) if i not in starting}
    group = SimpleNamespace(
        fleet=SimpleNamespace(serving=lambda: serving),
        nodes={f"engine {i}": engine.devices()[0][0] for i, engine in enumerate(engines)},
    )
    return Hosts(Deployment.of(load_config(TINY).config), actor, group)


def test_the_fullest_host_counts_whoever_is_on_it(monkeypatch):
    ranks = [Process("a", 3), Process("a", 99), Process("b", 4)]  # one of each host is asked, the first
    engines = [Process("b", 98), Process("c", 9), Process("c", 97)]
    assert hosts_of(monkeypatch, ranks, engines).memory_used() == 9 * GIB
    assert hosts_of(monkeypatch, ranks, []).memory_used() == 4 * GIB
    assert hosts_of(monkeypatch, [Process("a", 1)], []).memory_used() == 2 * GIB


def test_a_lost_engine_does_not_end_a_run_for_a_metric_and_a_lost_rank_does(monkeypatch):
    assert hosts_of(monkeypatch, [Process("a", 3)], [Process("c", None)]).memory_used() == 3 * GIB
    with pytest.raises(Interrupted):
        hosts_of(monkeypatch, [Process("a", None)], []).memory_used()


def test_an_engine_that_starts_is_not_waited_for_and_another_of_its_node_is_asked_for_it(monkeypatch):
    """It answers nothing before it has started."""
    ranks, unheard = [Process("a", 3)], Process("c", None)
    assert hosts_of(monkeypatch, ranks, [unheard, Process("c", 9)], starting=[0]).memory_used() == 9 * GIB
    hosts = hosts_of(monkeypatch, ranks, [unheard], starting=[0])
    monkeypatch.setattr(module, "gather", lambda refs, *_: pytest.fail("it is waited for") if refs else {})
    assert hosts.memory_used() == 3 * GIB


def test_the_first_of_each():
    assert first_of_each(["b", "a", "b", "c", "a"]) == [0, 1, 3]


def test_devices_of_two_kinds_are_told():
    alike = module._describe([Speed("NVIDIA H200", 700e12), Speed("NVIDIA H200", 710e12)])
    assert alike == ["2 x NVIDIA H200: 700 to 710 TFLOP/s in products, 989 published"]
    assert "several kinds" in module._describe([Speed("NVIDIA H200", 7e14), Speed("NVIDIA H100 80GB HBM3", 7e14)])[-1]
