"""How full an engine's KV cache is, and how often its scheduler dropped a request's part of it for want of room.

vLLM's own statistics tell, as they pass its front end. A request that is preempted is computed anew from its prompt on:
its time is lost, and on most devices its tokens are not the same bits as without.
"""

from collections.abc import Callable
from typing import Any


class CacheUse:
    """What has been seen since the engine was started."""

    def __init__(self) -> None:
        self.share = 0.0  # of the cache's blocks, now
        self.peak = 0.0  # the highest share since `renew`
        self.preemptions = 0  # for want of room
        self._running = 0
        self._waiting = 0
        self._by_pause = 0  # preemptions that are no want of room, and are not told yet

    def paused(self) -> None:
        """vLLM preempted what was running, since its caches are emptied with a pause.

        It tells so with each request's next token; one that is ended before has none.
        """
        self._by_pause = min(self._by_pause + self._running, self._running + self._waiting)

    def renew(self) -> None:
        """New weights: the peak is that of their requests from here on."""
        self.peak = 0.0

    def note(self, share: float, preempted: int, running: int, waiting: int) -> None:
        """Notes one step of the scheduler; `running`, `waiting`: requests that it has."""
        self.share = share
        self.peak = max(self.peak, share)
        self._running = running
        self._waiting = waiting
        by_pause = min(preempted, self._by_pause)
        self._by_pause -= by_pause
        self.preemptions += preempted - by_pause

    def stat_logger(self) -> Callable[[Any, int], Any]:
        """What AsyncLLM's `stat_loggers` takes, in vLLM 0.23 and 0.32: makes a logger that notes here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        note = self.note

        class Watch(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0):
                pass

            def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
                if scheduler_stats is not None:
                    preempted = 0
                    if iteration_stats is not None:
                        preempted = iteration_stats.num_preempted_reqs
                    running = scheduler_stats.num_running_reqs
                    waiting = scheduler_stats.num_waiting_reqs
                    note(scheduler_stats.kv_cache_usage, preempted, running, waiting)

            def log_engine_initialized(self) -> None:
                pass

        return Watch
