"""vLLM's scheduler for engines whose data-parallel ranks draft, where a response's bits must not depend on others.

For the sake of captured graphs vLLM gives a new request of one token drafts that are always rejected, where others are
decoded. They take random numbers, so its tokens would depend on the others. It does not with a schedule of drafts by
batch size. But it drops such a schedule in engines with data-parallel ranks, because ranks could choose different
numbers and wait for each other for ever (config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel). This schedule
has one number.

Private in vLLM 0.32: `Scheduler.dynamic_sd_lookup`, the number of drafted tokens by the requests of a step.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class DraftingScheduler(Scheduler):
    """Schedules as vLLM does, but drafts for no request that has no token of its own yet."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)
