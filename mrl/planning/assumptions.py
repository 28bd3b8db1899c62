"""What a plan cannot know and has to assume: shares of peak rates, mean lengths, unevenness. Every plan prints what it used."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Shares are of the peaks in mrl/memory/devices.json. Predicted times are no better than these."""

    # Pre-training on H100 reaches 0.24 (30B-A3B) to 0.31 (235B) (NVIDIA/Megatron-LM#5728); RL on H20 0.31 to 0.40 (verl docs/perf/dpsk.md).
    train_mfu: float = 0.25
    log_prob_mfu: float = 0.25
    prefill_mfu: float = 0.25
    # A decode step reads the weights that its tokens touch and their caches; kernels reach about this share of the memory's rate.
    decode_memory_share: float = 0.6
    # 46 of 50 GB/s of a 400 Gb/s adapter.
    link_share: float = 0.92
    # Mean lengths over the limits of the configuration.
    prompt_share: float = 0.5
    response_share: float = 0.5
    # Without a balancing loss, which RL leaves out, the busiest expert rank gets more than the mean.
    expert_load: float = 1.25
    # Bytes that a sleeping engine keeps on its device: context and graphs (vLLM sleep level 2).
    engine_asleep: int = 2 * 1024**3


USUAL = Assumptions()
