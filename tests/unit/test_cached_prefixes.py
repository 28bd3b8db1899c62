"""What may come out of a prefix cache, held against one that is kept: every hit of the same weights, none of others."""

import random

import pytest

from mrl.engine.cache_use import CachedPrefixes

BLOCK = 4


class Cache:
    """Whole blocks of what was computed, as an engine keeps them."""

    def __init__(self):
        self.held = set()

    def hit(self, tokens):
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return next((end for end in reversed(ends) if tuple(tokens[:end]) in self.held), 0)

    def fill(self, tokens):
        self.held |= {tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}


def counted(cleared: bool, seed: int) -> int:
    """Stale tokens over five versions of requests that share prefixes and go on from earlier answers."""
    rng, cache, ledger, stale, known = random.Random(seed), Cache(), CachedPrefixes(BLOCK), 0, [[]]
    for _ in range(5):
        for number in range(20):
            prompt = [*rng.choice(known), *(rng.randrange(2) for _ in range(rng.randrange(6)))]
            answer = [rng.randrange(2) for _ in range(rng.randrange(6))]
            ledger.enter(str(number), prompt)
            found = cache.hit(prompt)
            cache.fill([*prompt, *answer])
            ledger.leave(str(number), answer, found)
            known.append([*prompt, *answer][:40])
        stale += ledger.renew()
        if cleared:
            cache.held.clear()
    return stale


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_that_is_emptied_gives_no_stale_token_and_one_that_is_not_does(seed):
    assert counted(True, seed) == 0 < counted(False, seed)


def test_what_is_under_way_is_computed_by_the_new_weights():
    ledger = CachedPrefixes(BLOCK)
    ledger.enter("a", range(8))
    ledger.renew()
    ledger.enter("b", range(10))
    ledger.leave("b", cached=8)
    ledger.leave("a", cached=0)
    assert ledger.renew() == 0
    ledger.enter("c", range(10))
    ledger.leave("c", cached=8)
    assert ledger.renew() == 8, "both have ended by the weights before"


def test_a_request_does_not_explain_its_own_hit():
    ledger = CachedPrefixes(BLOCK)
    ledger.enter("a", range(8))
    ledger.leave("a", cached=4)
    assert ledger.renew() == 4
