"""Figures of devices, and the assumed shares of them that a plan computes with.

Figures are published ones, in mrl/plan/devices.json, each with its source. Every plan prints the assumptions that it
used, and its predicted times are no better than these. Devices of a node may exchange data through host memory. Its
rate is what each device gets when all copy at once: some 500 GB/s of a host, written and read.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from math import expm1
from pathlib import Path

from mrl.errors import ConfigError
from mrl.model.layout import TrainLayout
from mrl.units import GIB, MIB

_FILE = Path(__file__).with_name("devices.json")
# names by server, or by chip (910b1 to 910b4 are its bins); `a3` is part of its devices' own name
_ALSO_CALLED = {"a2": "ascend-910b-64g", "910c": "ascend-a3-64g"} | {f"910b{n}": "ascend-910b-64g" for n in range(1, 5)}


@dataclass(frozen=True)
class SyncRates:
    """Bytes per second at which one process handles weights in a sync, beside moving them.

    The defaults are an H100's. Digests were measured on one: 24 passes over its memory, and NVIDIA's other devices are
    taken to need as many. Reading back is a digest too. Conversions are taken as 4 passes; nobody has measured them.
    """

    digest: float = 138e9  # digesting what is sent or arrives
    finalise: float = 838e9  # vLLM's conversion to the layout of its kernels
    read_back: float = 138e9  # reading and digesting what the engine then holds


@dataclass(frozen=True)
class Starts:
    """Seconds of the host for one copy of a sync, and for one wait for the device; each message has one wait."""

    copy: float = 9e-6
    wait: float = 30e-6


@dataclass(frozen=True)
class Device:
    """One device, as a rank sees it.

    Rates are peaks in one direction. The plan assumes which share of them is reached.
    """

    name: str
    platform: str  # cluster.device
    memory: int  # bytes
    reserved: int  # bytes of the allocator's unused rest; on CPU of imports (an estimate)
    context: int  # bytes that a process takes for its context, beside its tensors (an estimate)
    pair: int  # bytes of a communicator of two processes (an estimate; on NPUs twice P2P_HCCL_BUFFSIZE as mrl sets it)
    # bytes of a communicator of a process group (an estimate; on NPUs twice HCCL_BUFFSIZE as launch/ sets it, on GPUs a
    # ring of 24 channels, each with the buffers of three protocols: 4 MiB, 4.7 and 0.5)
    group: int
    flops: float  # dense bf16 operations per second; a multiply-add counts as two
    memory_rate: float  # bytes per second
    node_rate: float  # bytes per second to a device of the same node
    network_rate: float  # bytes per second to another node
    # bytes per second through host memory to another process of the node, all its devices at once
    host_path_rate: float
    sync: "SyncRates"
    devices_per_node: int
    host_memory: int  # bytes of a node
    source: str
    shown_as: str  # regular expression that matches torch's name of the device
    decode_layer: float  # least seconds for the kernels of one layer in a decode step
    collective: float  # seconds of an exchange of few bytes inside a node
    network_collective: float  # the same between nodes
    starts: "Starts"
    # of a device whose own cores launch what they compute: seconds of a launch, over those of the virtual machine that
    # `Assumptions.host` counts from. Then launches add to computing; 0: another processor launches, beside computing
    own_host: float = 0.0
    vllm_name: str = ""  # in the names of vLLM's tuned configurations; empty where it has none
    communicators: int = 0  # bytes of a configuration's weight syncs: `pair` for each pair of processes
    communicators_of_ranks: int = 0  # bytes of its models' ranks: `group` for each process group

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill on a device with a rank, without that rank's context and communicators."""
        return self.usable_by_engine - self.context - self.communicators_of_ranks

    @property
    def usable_by_engine(self) -> int:
        """Bytes that a plan may fill on a device with an engine alone, which has its context among them."""
        return self.memory - self.reserved - self.communicators


@cache
def devices() -> dict[str, Device]:
    """Returns all known devices by name."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: _device(name, row) for name, row in rows.items()}


def devices_of(platform: str) -> tuple[Device, ...]:
    """Returns all known devices of a cluster.device."""
    return tuple(device for device in devices().values() if device.platform == platform)


def find_device(name: str) -> Device:
    """Returns a device by name. Raises ConfigError with all names for an unknown one."""
    if name not in devices():
        raise ConfigError(f"device {name}: is not known; known: {', '.join(devices())}")
    return devices()[name]


def device_by_part(text: str) -> Device:
    """Returns the device for a name, for a part of it, or for the beginning of either: `h100`, `a3`, `910b`.

    Raises ConfigError, which names the devices that would fit.
    """
    text = re.sub(r"(?<=\d)gb$", "g", _ALSO_CALLED.get(text, text))
    whole = [name for name in devices() if text == name or text in name.split("-")]
    begun = [name for name in devices() if name.startswith(text)]
    fitting = whole or begun
    if len(fitting) > 1:
        raise ConfigError(f"device {text}: is not known; it may be {' or '.join(fitting)}")
    return find_device(fitting[0] if fitting else text)


def published_flops(name: str) -> float | None:
    """Returns dense bf16 operations per second of the device that torch calls `name`; None where the figure is
    unknown.
    """
    return next((device.flops for device in devices().values() if re.search(device.shown_as, name)), None)


def default_device(platform: str) -> Device:
    """Returns the device that a plan assumes where only `cluster.device` is given.

    It is the one with the smallest memory, so that a plan that fits it fits the others.
    """
    return min(devices_of(platform), key=lambda device: (device.memory, -device.flops))


def _device(name: str, row: dict) -> Device:
    return Device(
        name=name,
        platform=row["platform"],
        memory=row["memory_mib"] * MIB,
        reserved=row["reserved_mib"] * MIB,
        context=row["context_mib"] * MIB,
        pair=row["pair_mib"] * MIB,
        group=row["group_mib"] * MIB,
        flops=row["bf16_tflops"] * 1e12,
        memory_rate=row["memory_gb_per_s"] * 1e9,
        node_rate=row["node_link_gb_per_s"] * 1e9,
        network_rate=row["network_gb_per_s"] * 1e9,
        host_path_rate=row["host_path_gb_per_s"] * 1e9,
        sync=SyncRates(*(row[f"{step}_gb_per_s"] * 1e9 for step in ("digest", "finalise", "read_back"))),
        devices_per_node=row["devices_per_node"],
        host_memory=row["host_memory_gib"] * GIB,
        source=row["source"],
        shown_as=row["shown_as"],
        decode_layer=row["decode_layer_us"] * 1e-6,
        collective=row["collective_us"] * 1e-6,
        network_collective=row["network_collective_us"] * 1e-6,
        starts=Starts(row["launch_us"] * 1e-6, row["wait_us"] * 1e-6),
        own_host=row.get("own_host", 0.0),
        vllm_name=row.get("vllm_name", ""),
    )


@dataclass(frozen=True)
class Assumptions:
    """Inputs of a plan that are unknown: reached shares of peak rates, mean lengths, imbalance."""

    # Share of the peak that a matrix product reaches. Memory traffic between products, exchanges, launches and waits
    # are counted beside it. One H100 with micro-batches of 32,768 tokens, which wait for no host, gives it: forward and
    # update alike (actor_32k). The ladder's rung `grouped_products` measures it by itself.
    compute_share: float = 0.6
    # Share of the peak that the output layer reaches, one large product.
    head_share: float = 0.65
    # How often mrl's output layer reads or writes its logits in float32, in a forward pass (mrl/rank/logprob.py).
    # One H100 took 34 ms for a forward pass of 8,192 tokens and 91 ms with its backward, of which one and three
    # products are 8 and 24 (docs/results/hardware/h100.jsonl, by hand): 13 times, and 34 for the three passes of an
    # update. Megatron's own loss over logits in 16 bits has 3.
    logit_passes: float = 11.0
    # Share of the peak for an engine's tokens where computing takes longer than reading weights.
    prefill_mfu: float = 0.3
    # Share of the memory's rate for reading weights, caches and activations: kernels that read in order lose a quarter.
    decode_memory_share: float = 0.75
    # Factor on a device's `decode_layer`. On NVIDIA that is what one H100 took with vLLM 0.32, 87 us; published
    # single-sequence steps on A100 and H20 leave room for 60 (docs/predictions.md).
    decode_layers: float = 1.0
    # Factor on reading experts where vLLM's kernel of fused experts has no tuned configuration of their shape:
    # vllm-project/vllm#35457 has 1.20 to 1.24 for 16 to 64 tokens on H200, less for fewer.
    untuned_experts: float = 1.2
    # Seconds of vLLM's host for a decode step, and for each of its sequences: scheduler, sampler's rows, output. They
    # fit steps with many and with few sequences (docs/predictions.md). The ladder's rung `decode` measures the first.
    step_host: float = 2e-3
    sequence_host: float = 60e-6
    # Share of the first drafted tokens that the model accepts, and of each further one if those before it were. SkyRL's
    # Qwen3.5-9B has 0.886, 0.869 and 0.861 (its page spec_decode); vllm-project/recipes and #25993 tell of less for the
    # second token of GLM's layer, which was trained for one.
    draft_acceptance: float = 0.8
    # Seconds of the host for one pass of the drafting layer: inputs of the next position, launches outside of graphs.
    draft_host: float = 0.5e-3
    # Seconds of a step beside its phases: rewards, batches, advantages. NVIDIA-NeMo/RL#959 has 3, 3, 4 and 8 s.
    rest: float = 3.0
    # Host of a rank: seconds that it takes for what follows, over those of the one that was measured, a virtual machine
    # with an H100 that takes 8.4 us for the smallest launch. Servers take less (docs/predictions.md).
    host: float = 1.0
    # Least seconds of the host for one layer of experts in one forward pass, beside its grouped products: launches from
    # Python, and a wait for the experts' counts. With the two below it gives what one H100 took for log-probs and
    # updates with 16 and 128 experts (actor lines of docs/results/hardware/h100.jsonl; tests/unit/test_predictions.py).
    moe_launch: float = 5.0e-3
    # Seconds of the host for one expert's part of a grouped product: Transformer Engine's default launches one cuBLASLt
    # product an expert and asks its heuristic each time.
    expert_launch: float = 0.062e-3
    # What a layer's backward takes of the host beside its products, over its forward: autograd's nodes launch more and
    # smaller kernels, and each expert's weight has a gradient to hand over.
    backward_launches: float = 3.0
    # The same where one kernel computes a grouped product (actor.grouped_gemm: cutlass), as measured.
    backward_launches_grouped: float = 1.4
    dense_launch: float = 0.3e-3
    # A 400 Gb/s adapter reaches 46 of 50 GB/s.
    link_share: float = 0.92
    # Mean lengths, divided by the limits of the configuration.
    prompt_share: float = 0.5
    response_share: float = 0.5
    # Tokens of the busiest expert rank, divided by the mean. RL has no balancing loss.
    expert_load: float = 1.25
    # Bytes per second of SHA-256 on a core with instructions for it.
    hash_rate: float = 1.5e9
    # vLLM's level of sleep: 2 drops the weights, which the next sync brings; 1 would keep a copy on the host.
    sleep_level: int = 2
    # Share of a device's rates that a sync's digests, conversions and starts reach, and that moves between a device
    # and its host reach. Devices' rates are what one of them showed.
    sync_share: float = 1.0
    host_path_share: float = 1.0
    # What runs of this cluster say instead; None before a calibration.
    measured: "Measured | None" = None

    def expert_load_in(self, layout: TrainLayout) -> float:
        """Returns tokens of the busiest expert rank, divided by the mean; 1 where every rank has all experts."""
        if layout.expert > 1:
            return self.expert_load
        return 1.0


@dataclass(frozen=True)
class MeasuredLengths:
    """Tokens of prompts and responses, as runs had them.

    `response`: equally likely lengths, ascending, of responses within `limit` tokens; `cut`: the share that the limit
    ended; `hazard`: how likely a response ends at one of its tokens, which tells of longer limits. `spread`: the mean
    square of a whole sample's tokens, divided by the square of their mean. `accepted`: share of decode steps in which
    a drafted first, second, ... token was accepted, with all before it; empty where nothing was drafted. `drafted_by`:
    rollout.speculation.method of these steps.
    """

    prompt: float
    response: tuple[float, ...]
    limit: int
    cut: float = 0.0
    hazard: float = 0.0
    spread: float = 1.0
    accepted: tuple[float, ...] = ()
    drafted_by: str = ""

    def mean_response(self, limit: int) -> float:
        """Returns the mean tokens of responses within another limit.

        Beyond the limit of the runs, those that it cut end as often at each token as the others did.
        """
        within = sum(min(tokens, limit) for tokens in self.response) / len(self.response)
        beyond = max(limit - self.limit, 0)
        if self.hazard * beyond < 1e-6:
            return within + self.cut * beyond
        return within + self.cut * -expm1(-self.hazard * beyond) / self.hazard

    def longest_response(self, limit: int) -> float:
        """Returns the tokens of the longest response of a step: the limit, where it cuts some."""
        if self.cut > 0:
            return limit
        return min(limit, self.response[-1])


@dataclass(frozen=True)
class Measured:
    """What runs say of their cluster, made by mrl/plan/calibration.py.

    `ends`: name, better and worse end of each assumption that they determine. `phases`: name and factor of phases whose
    seconds no determined assumption explains.
    """

    lengths: MeasuredLengths | None = None
    ends: tuple[tuple[str, float, float], ...] = ()
    phases: tuple[tuple[str, float], ...] = ()

    def corrected(self, seconds: dict[str, float]) -> dict[str, float]:
        """Returns seconds of phases times their factors."""
        factors = dict(self.phases)
        return {phase: spent * factors.get(phase, 1.0) for phase, spent in seconds.items()}


USUAL = Assumptions()
# Low and high predictions use the better and the worse end of what published runs leave open, for every assumption.
_FASTER = {
    "compute_share": 0.65,
    "head_share": 0.75,
    "prefill_mfu": 0.4,
    "decode_memory_share": 0.85,
    "decode_layers": 0.69,
    "untuned_experts": 1.05,
    "step_host": 1e-3,
    "sequence_host": 30e-6,
    "draft_acceptance": 0.9,
    "draft_host": 0.2e-3,
    "host": 0.6,
    "expert_launch": 0.0,  # one launch for all experts: CUTLASS' or torch's grouped product
    "backward_launches": 1.4,
    "link_share": 0.95,
    "expert_load": 1.1,
    "rest": 1.0,
}
_SLOWER = {
    "compute_share": 0.45,
    "head_share": 0.5,
    "logit_passes": 13.0,
    "prefill_mfu": 0.15,
    "decode_memory_share": 0.55,
    "untuned_experts": 1.4,
    "step_host": 3e-3,
    "sequence_host": 90e-6,
    "draft_acceptance": 0.6,
    "draft_host": 1e-3,
    "host": 1.25,
    "expert_launch": 0.1e-3,
    "link_share": 0.7,
    "expert_load": 1.5,
    "rest": 8.0,
}


def faster(assumed: Assumptions) -> Assumptions:
    """Returns assumptions that give the low prediction."""
    return replace(assumed, **_FASTER | {name: end for name, end, _ in _ends(assumed)})


def slower(assumed: Assumptions) -> Assumptions:
    """Returns assumptions that give the high prediction."""
    return replace(assumed, **_SLOWER | {name: end for name, _, end in _ends(assumed)})


def usual_ends(name: str) -> tuple[float, float]:
    """Returns the better and the worse end of an assumption, as published runs leave them open."""
    usual = getattr(USUAL, name)
    return _FASTER.get(name, usual), _SLOWER.get(name, usual)


def _ends(assumed: Assumptions) -> tuple[tuple[str, float, float], ...]:
    return assumed.measured.ends if assumed.measured else ()
