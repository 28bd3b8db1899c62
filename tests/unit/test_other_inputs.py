"""A resume with another reward, other sampling or other rows: nothing that was made by both is trained on."""

import time
from dataclasses import replace

import numpy as np
import pytest
from generations import origin_in
from seldom import seldom
from test_generation import AHEAD, N, World, in_memory  # noqa: F401
from test_ready_first import Flight
from test_snapshots import FROM_JSON, read_back

from mrl.generate.train_state import TrainState
from mrl.schedule.groups import State

BOTH = [*AHEAD["two, partial"], *AHEAD["filtered"][2:]]
STARTS = {
    "in order, partial": lambda seed, **more: World(seed, AHEAD["two, partial"], prompts=1000, **more),
    "one step off": lambda seed, **more: World(seed, AHEAD["one step off"], prompts=1000, **more),
    "in order, filtered": lambda seed, **more: World(seed, AHEAD["filtered"], prompts=1000, **more),
    "in order, partial, filtered": lambda seed, **more: World(seed, BOTH, prompts=1000, **more),
    "ready first": lambda seed, **more: Flight(seed, "requeue", **more),
    "patient": lambda seed, **more: Flight(seed, "patient", **more),
    "ready first, filtered": lambda seed, **more: Flight(seed, "filtered", **more),
}


CAUSES = ("sampling", "data", "model")
EACH = [(name, what) for name in STARTS for what in CAUSES]
OFTEN = zip(("one step off", "ready first", "patient", "in order, filtered"), (*CAUSES, "sampling"), strict=True)


def saved(name, seed, tmp_path):
    """A checkpoint with tokens, and prompts that were trained on before it."""
    world = STARTS[name](seed)
    prompts = []
    while world.state.ahead is None or not has_enough(name, world.state.ahead):
        assert world.state.step < 6, "it never has"
        prompts += world.step().samples.read().prompt_id[::N].tolist()
        time.sleep(0.05)  # generation runs ahead
    folder = tmp_path / f"step-{seed}"
    folder.mkdir()
    state = world.state
    said = FROM_JSON(state.ahead.write(folder))
    world.generation.close()
    return state, folder, said, prompts


def has_enough(name, kept) -> bool:
    if name == "in order, filtered":
        return bool(kept.filtered)
    return any(group.tokens for group in kept.ledger.groups)


def going_on(name, seed, state, kept, score):
    state = TrainState(state.step, state.cursor, kept, state.weights)
    return STARTS[name](seed + 10, state=state, spool=kept.spool, score=score)


@pytest.mark.parametrize("name", seldom(STARTS, "in order, partial, filtered", "ready first"))
def test_with_another_reward_all_are_judged_by_it_and_kept_tokens_are_not_generated_twice(name, tmp_path, capsys):
    filtered = tokens = 0
    for seed in range(3):
        state, folder, said, prompts = saved(name, seed, tmp_path)
        kept = read_back(folder, said, tmp_path, replace(origin_in(said), rewards="other"))
        assert not any(parts.results for parts in kept.groups.values()) and not kept.filtered
        assert not any(group.state is State.FINISHED for group in kept.ledger.groups)
        again = {number for number, _ in state.ahead.filtered}
        live = {group.number for group in kept.ledger.groups}
        assert all(number in live or number >= kept.ledger.next_number for number in again)
        filtered += len(again)
        for number, parts in kept.groups.items():
            for index, response in parts.responses.items():
                then = state.ahead.groups[number].responses[index].read()
                np.testing.assert_array_equal(response.read().token_ids, then.token_ids)
                tokens += len(then.token_ids)
        assert kept.groups.keys() == state.ahead.groups.keys() or again, "only filtered ones need room"
        world = going_on(name, seed, state, kept, lambda item: 100.0 + len(item.response_text) % 3)
        for _ in range(4):
            rollouts = world.step()
            assert min(result.score for result in rollouts.results) >= 100.0
            prompts += rollouts.samples.read().prompt_id[::N].tolist()
        world.generation.close()
        assert len(set(prompts)) == len(prompts), "no prompt is trained on twice"
        assert "by other rewards" in capsys.readouterr().out
    assert filtered if name == "in order, filtered" else tokens


@pytest.mark.parametrize(("name", "what"), seldom(EACH, *OFTEN))
def test_with_other_sampling_all_begin_anew_by_the_present_weights(name, what, tmp_path, capsys):
    state, folder, said, prompts = saved(name, 1, tmp_path)
    origin = replace(origin_in(said), **{what: "other"})
    kept = read_back(folder, said, tmp_path, origin)
    assert not kept.groups and not any(group.tokens for group in kept.ledger.groups)
    out = capsys.readouterr().out
    assert "generated again" in out and f"by other {what}" in out
    world = going_on(name, 1, state, kept, None)
    for _ in range(4):
        samples = world.step().samples.read()
        assert samples.span_versions.min() >= state.step
        prompts += samples.prompt_id[::N].tolist()
    world.generation.close()
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("name", STARTS)
def test_with_the_same_inputs_nothing_is_asked_for_again(name, tmp_path, capsys):
    state, folder, said, _ = saved(name, 2, tmp_path)
    kept = read_back(folder, said, tmp_path, origin_in(said))
    assert kept.groups.keys() == state.ahead.groups.keys() and "again" not in capsys.readouterr().out
    assert [number for number, _ in kept.filtered] == [number for number, _ in state.ahead.filtered]
