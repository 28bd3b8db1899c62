"""What a plan cannot know and has to assume: shares of peak rates, mean lengths, unevenness. Every plan prints what it used."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Shares are of the peaks in mrl/plan/devices.json. Predicted times are no better than these."""

    # What updates of mixtures of experts in RL report: 0.03 to 0.15 on H100 and H200 (prime-rl's benchmarks), 0.19 for a 671B model and
    # 0.31 to 0.40 on H20, whose peak is a seventh (verl docs/perf/dpsk.md). Pre-training on H100: 0.24 to 0.31 (NVIDIA/Megatron-LM#5728).
    train_mfu: float = 0.15
    log_prob_mfu: float = 0.15
    prefill_mfu: float = 0.15
    # A decode step reads the weights that its tokens touch and their caches, at this share of the memory's rate. Set so that whole steps
    # come out near published ones (NeMo-RL's performance table; tests/unit/test_plan.py has the comparison).
    decode_memory_share: float = 0.35
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
