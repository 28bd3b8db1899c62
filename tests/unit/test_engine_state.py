"""Every verb in every state: where it leads, or how it is refused."""

import itertools

import pytest

from mrl.engine.engine_state import (
    ASLEEP,
    AWAKE,
    DEAD,
    FENCED,
    HOLDING,
    PAUSED,
    REFUSES_REQUESTS,
    VERBS,
    WEIGHTS_AWAKE,
    EngineMachine,
    EngineState,
)
from mrl.errors import Interrupted

# how a fresh engine gets into each state
WAYS = {
    AWAKE: ["serve"],
    PAUSED: ["serve", "pause"],
    HOLDING: ["serve", "pause", "receive_weights"],
    ASLEEP: ["serve", "sleep"],
    WEIGHTS_AWAKE: ["serve", "sleep", "wake_weights"],
    FENCED: ["serve", "receive_weights"],
    DEAD: ["serve", "die"],
}
# written out by hand from what each verb touches: memory that is there, a version, a whole update
LEADS = {
    "generate": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING},
    "end_requests": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING},
    "pause": {AWAKE: PAUSED},
    "pause_for_update": {AWAKE: PAUSED},
    "resume": {PAUSED: AWAKE},
    "sleep": {AWAKE: ASLEEP, PAUSED: ASLEEP, HOLDING: ASLEEP, FENCED: ASLEEP},
    "give_up": {
        AWAKE: FENCED,
        PAUSED: FENCED,
        HOLDING: FENCED,
        FENCED: FENCED,
        ASLEEP: ASLEEP,
        WEIGHTS_AWAKE: WEIGHTS_AWAKE,
    },
    "wake_weights": {ASLEEP: WEIGHTS_AWAKE},
    "wake_cache": {WEIGHTS_AWAKE: FENCED},
    "agree_on_sync": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "connect_sync": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "release_arenas": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "receive_weights": {AWAKE: FENCED, PAUSED: HOLDING, HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "begin_update": {AWAKE: FENCED, PAUSED: HOLDING, HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "load_bucket": {HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "finish_update": {HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "commit": {},  # not even FENCED: nothing was received
    "fingerprints": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING, FENCED: FENCED, WEIGHTS_AWAKE: WEIGHTS_AWAKE},
    "memory": {
        AWAKE: AWAKE,
        PAUSED: PAUSED,
        HOLDING: HOLDING,
        ASLEEP: ASLEEP,
        WEIGHTS_AWAKE: WEIGHTS_AWAKE,
        FENCED: FENCED,
    },
}


def machine(*way: str) -> EngineMachine:
    made = EngineMachine("engine 3")
    for verb in way:
        {"serve": lambda: made.serve(7), "die": made.die, "received": made.received}.get(
            verb, lambda verb=verb: made.enter(verb)
        )()
    return made


def test_the_table_knows_every_verb_of_the_engine_and_no_other():
    assert LEADS.keys() == VERBS.keys()


@pytest.mark.parametrize(
    ("verb", "state"), list(itertools.product(LEADS, EngineState)), ids=lambda one: getattr(one, "name", one)
)
def test_each_verb_in_each_state_leads_on_or_is_refused_by_name(verb, state):
    made = machine(*WAYS[state])
    assert made.state is state
    if target := LEADS[verb].get(state):
        made.enter(verb)
        assert made.state is target
        assert (made.version == 7) == (target in (AWAKE, PAUSED))
        return
    before = vars(made).copy()
    with pytest.raises(Interrupted if state is DEAD else RuntimeError) as refused:
        made.enter(verb)
    said = str(refused.value)
    assert verb in said and "engine 3" in said and (state is DEAD or "first: " in said or "first bring weights" in said)
    assert state is DEAD or state.name in said or verb == "commit"
    assert vars(made) == before


def test_a_refusal_says_where_the_verb_is_legal_and_how_to_get_on():
    legal = "AWAKE, PAUSED, HOLDING, FENCED, WEIGHTS_AWAKE"
    how = "wake_weights, bring weights, wake_cache, commit"
    with pytest.raises(
        RuntimeError, match=f"engine 3 is ASLEEP and refuses receive_weights, legal in {legal}; first: {how}"
    ):
        machine("serve", "sleep").check("receive_weights")
    with pytest.raises(RuntimeError, match="engine 3 is FENCED and refuses generate"):
        machine("serve", "sleep", "wake_weights", "wake_cache").check("generate")
    with pytest.raises(Interrupted, match=r"generate was asked, but vLLM's processes below it died; .*--resume"):
        machine("serve", "die").check("generate")


@pytest.mark.parametrize(
    "update", [["receive_weights"], ["begin_update", "load_bucket", "finish_update"]], ids=["fast", "slow"]
)
@pytest.mark.parametrize("before", [[], ["pause"], ["sleep", "wake_weights"]], ids=["awake", "paused", "slept"])
def test_only_a_whole_update_with_all_memory_there_is_committed(before, update):
    made = machine("serve", *before, *update)
    refused = ("commit",) if before == ["pause"] else ("commit", "generate")  # a pause holds requests until the commit
    for verb in refused:
        with pytest.raises(RuntimeError):
            made.check(verb)
    made.received()
    if before and before[0] == "sleep":
        with pytest.raises(RuntimeError, match="WEIGHTS_AWAKE and refuses commit, legal in HOLDING, FENCED"):
            made.check("commit")
        made.enter("wake_cache")
    if "generate" in refused:
        with pytest.raises(RuntimeError, match="refuses generate"):
            made.check("generate")
    made.enter("commit")
    made.serve(8)
    assert (made.state, made.version, made.has_received) == (AWAKE, 8, False)


def test_a_forgotten_sync_is_refused_by_the_fence():
    made = machine("serve", "sleep", "wake_weights", "wake_cache")
    with pytest.raises(RuntimeError, match="refuses commit: no whole update has reached it"):
        made.check("commit")
    with pytest.raises(RuntimeError, match="is FENCED and refuses generate"):
        made.check("generate")


def test_a_sync_that_came_before_the_sleep_does_not_count_after_it():
    made = machine("serve", "receive_weights", "received", "sleep", "wake_weights", "wake_cache")
    with pytest.raises(RuntimeError, match="refuses commit"):
        made.check("commit")


def test_an_update_that_fails_after_one_that_was_whole_leaves_nothing_to_commit():
    made = machine("serve", "receive_weights", "received", "receive_weights")
    with pytest.raises(RuntimeError, match="refuses commit"):
        made.check("commit")
    assert made.holds_weights  # a mixture, of numbers


def test_weights_are_somebodys_from_the_first_whole_update_after_a_sleep():
    made = machine("serve", "sleep", "wake_weights", "receive_weights")
    assert not made.holds_weights
    made.received()
    assert made.holds_weights


def test_a_fresh_engine_serves_nothing():
    made = EngineMachine("engine 0")
    assert (made.state, made.version) == (FENCED, None)
    for verb in ("generate", "commit"):
        with pytest.raises(RuntimeError):
            made.check(verb)


def test_an_engine_that_loaded_nothing_serves_nothing_until_weights_came():
    made = machine("serve")
    made.await_weights()
    assert (made.state, made.version) == (FENCED, None)
    assert made.holds_weights, "numbers of nobody can be read back as well"
    for verb in ("generate", "commit"):
        with pytest.raises(RuntimeError):
            made.check(verb)
    made.enter("receive_weights")
    made.received()
    made.check("commit")


@pytest.mark.parametrize("verb", ["sleep", "give_up", "agree_on_sync", "receive_weights", "begin_update"])
def test_an_engine_that_loaded_nothing_does_what_brings_it_weights(verb):
    made = machine("serve")
    made.await_weights()
    made.enter(verb)


def test_requests_are_refused_without_memory_or_without_a_version_that_is_promised():
    assert {ASLEEP, WEIGHTS_AWAKE, FENCED} == REFUSES_REQUESTS
