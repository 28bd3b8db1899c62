"""The use of an engine's KV cache: its share, preemptions because it was full, and prefixes found in it.

The numbers come from vLLM's own statistics in its front end. A preempted request is computed again from its prompt on.
This costs time, and on most devices it also changes bits of its tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mrl.engine.requests import DraftCounts


class CacheUse:
    """Counts since the engine was started."""

    def __init__(self) -> None:
        self.share = 0.0  # share of the cache's blocks in use now
        self.peak = 0.0  # highest share since `renew`
        self.preemptions = 0  # because the cache was full
        self.drafts = DraftCounts()  # since `renew`
        self._running = 0
        self._waiting = 0
        self._by_pause = 0  # preemptions by a pause that vLLM has not reported yet

    def paused(self) -> None:
        """Notes that vLLM preempted all running requests, because a pause empties its caches.

        vLLM reports this with each request's next token. A request that ends before is never reported.
        """
        self._by_pause = min(self._by_pause + self._running, self._running + self._waiting)

    def renew(self) -> None:
        """Notes new weights: from here on peak and drafts are those of their requests."""
        self.peak = 0.0
        self.drafts = DraftCounts()

    def note(self, share: float, preempted: int, running: int, waiting: int) -> None:
        """Notes one step of the scheduler. `running` and `waiting` are its numbers of requests."""
        self.share = share
        self.peak = max(self.peak, share)
        self._running = running
        self._waiting = waiting
        by_pause = min(preempted, self._by_pause)
        self._by_pause -= by_pause
        self.preemptions += preempted - by_pause

    def note_drafts(self, step: Any) -> None:
        """Notes what one step of the scheduler did with drafts. `step`: vLLM's SpecDecodingStats."""
        self.drafts += DraftCounts(
            step.num_drafts, tuple(step.num_draft_tokens_per_pos), tuple(step.num_accepted_tokens_per_pos)
        )

    def note_decoded(self, requests: int) -> None:
        """Notes for how many requests a step decoded tokens."""
        if requests:
            self.drafts += DraftCounts(decoded=requests)

    def stat_logger(self) -> Callable[[Any, int], Any]:
        """Returns a class for AsyncLLM's `stat_loggers`, in vLLM 0.23 and 0.32, whose loggers write here.

        vLLM adds its own logger for Prometheus, unless it is given one of that kind. Nobody asks for its histograms
        here, and each token would be counted in them.
        """
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        note = self.note
        note_drafts = self.note_drafts
        note_decoded = self.note_decoded

        class Watch(PrometheusStatLogger):
            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None):
                pass  # the base class would make the histograms

            def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
                if iteration_stats is not None:
                    note_decoded(len(iteration_stats.inter_token_latencies_iter))
                if scheduler_stats is not None:
                    preempted = 0
                    if iteration_stats is not None:
                        preempted = iteration_stats.num_preempted_reqs
                    running = scheduler_stats.num_running_reqs
                    waiting = scheduler_stats.num_waiting_reqs
                    note(scheduler_stats.kv_cache_usage, preempted, running, waiting)
                    if scheduler_stats.spec_decoding_stats is not None:
                        note_drafts(scheduler_stats.spec_decoding_stats)

            def log_engine_initialized(self) -> None:
                pass

            def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
                pass

            def record_admission_rejection(self, reason: str) -> None:
                pass

        return Watch


class CachedPrefixes:
    """Prefixes of one engine since its weights changed, in blocks like the cache's, to find stale entries of vLLM's.

    vLLM reports for each request how many of its tokens came from the cache. At most, these are a prefix that an
    earlier request of the same weights had. More are stale: older weights computed them, and the response would
    continue a mixture of both. The count is 0 as long as the cache is emptied with every change of weights.
    """

    def __init__(self, block: int):
        self.block = block  # tokens
        self.stale_tokens = 0  # came from the cache since the weights changed
        self._known: set[int] = set()  # hash of each prefix of whole blocks
        # request -> (number of tokens that may come from the cache, prompt)
        self._inside: dict[str, tuple[int, Sequence[int]]] = {}

    def enter(self, name: str, prompt: Sequence[int]) -> None:
        """Notes that a request goes to vLLM. It may find only prefixes of earlier requests."""
        prefixes = list(self._prefixes(prompt))
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in self._known), len(prefixes))
        self._inside[name] = (known * self.block, prompt)
        self._known.update(prefixes)

    def leave(self, name: str, tokens: Sequence[int] = (), cached: int = 0) -> None:
        """Notes that a request has ended, with `tokens` behind its prompt.

        `cached`: tokens of its prompt that came from the cache.
        """
        allowed, prompt = self._inside.pop(name, (cached, ()))
        self.stale_tokens += max(0, cached - allowed)
        self._known.update(self._prefixes([*prompt, *tokens]))

    def renew(self) -> int:
        """Notes new weights and returns the stale tokens until now. Requests under way are computed again by the new
        weights.
        """
        stale = self.stale_tokens
        self.stale_tokens = 0
        self._known = set()
        for _, prompt in self._inside.values():
            self._known.update(self._prefixes(prompt))
        return stale

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[int]:
        prefix = 0
        for start in range(0, len(tokens) - self.block + 1, self.block):
            prefix = hash((prefix, *tokens[start : start + self.block]))
            yield prefix
