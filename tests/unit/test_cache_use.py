"""What of an engine's preemptions is a want of room in its KV cache."""

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from mrl.engine.cache_use import CacheUse


def test_what_a_pause_preempts_is_no_want_of_room_and_what_comes_after_it_is():
    cache = CacheUse()
    cache.note(0.2, preempted=0, running=6, waiting=3)
    cache.paused()
    cache.note(0.1, preempted=4, running=4, waiting=5)  # two come later than the others
    cache.note(0.1, preempted=2, running=6, waiting=3)
    assert cache.preemptions == 0
    cache.note(0.9, preempted=2, running=4, waiting=5)
    assert cache.preemptions == 2


def test_two_pauses_close_to_each_other_are_both_known():
    cache = CacheUse()
    cache.note(0.2, preempted=0, running=6, waiting=0)
    cache.paused()
    cache.note(0.2, preempted=2, running=2, waiting=4)  # the other four wait to be computed again
    cache.paused()
    cache.note(0.2, preempted=6, running=6, waiting=0)
    assert cache.preemptions == 0


def test_requests_that_ended_under_a_pause_do_not_excuse_others_for_ever():
    cache = CacheUse()
    cache.note(0.2, preempted=0, running=6, waiting=0)
    for _ in range(5):  # of which no token came, so that nothing was told of them
        cache.paused()
    cache.note(0.9, preempted=8, running=1, waiting=9)
    assert cache.preemptions == 2


def test_vllm_tells_each_step_to_the_cache_and_to_nobody_else():
    cache = CacheUse()
    manager = StatLoggerManager(None, [0], [cache.stat_logger()], enable_default_loggers=False)
    assert len(manager.stat_loggers) == 1, "vLLM counts every token for Prometheus too, and nobody reads that"
    manager.log_engine_initialized()
    manager.record_sleep_state(1, 2)
    manager.record_admission_rejection("max_num_queued_reqs")
    step = IterationStats()
    step.num_preempted_reqs = 2
    manager.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.5), step)
    manager.record(SchedulerStats(kv_cache_usage=0.25), None)
    manager.record(None, None)
    assert (cache.share, cache.peak, cache.preemptions) == (0.25, 0.5, 2)
