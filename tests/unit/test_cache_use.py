"""What of an engine's preemptions is a want of room in its KV cache."""

from mrl.vllm.cache_use import CacheUse


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
