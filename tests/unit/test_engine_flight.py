"""Weights that change under requests, against a vLLM (a stand-in) that says which version made which token."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from segment_checks import token_versions
from test_engine_sleep import engine, run, synced  # noqa: F401

from mrl.data.samples import Samples
from mrl.engine.completions import stamped_spans, unstamped_spans
from mrl.engine.engine_state import AWAKE, HOLDING
from mrl.engine.requests import Request, Sampling
from mrl.platforms.versions import vllm_generation

SAMPLING = Sampling(temperature=1.0, max_tokens=30, stop_token_ids=())


async def responses(engine, numbers) -> Samples:  # noqa: F811
    parts = [batch async for batch in engine.generate([Request(i, (1, 2), i, handle=i) for i in numbers], SAMPLING)]
    return Samples.joined(parts)


async def under_way(engine, count) -> None:  # noqa: F811
    while len(engine._calls.llm.running) < count:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)


def assert_each_token_has_its_weights(samples: Samples) -> None:
    """The stand-in's log-probs are the versions."""
    np.testing.assert_array_equal(token_versions(samples), -samples.rollout_log_probs)
    assert samples.finite.all()


def test_what_is_held_goes_on_by_the_new_weights_and_each_token_says_by_which_it_was_made(engine):  # noqa: F811
    engine._calls.llm.length = 30

    async def steps():
        asked = asyncio.create_task(responses(engine, range(3)))
        await under_way(engine, 3)
        for version in (5, 6):
            assert await engine.pause_for_update(give_back=False) is False
            late = asyncio.create_task(responses(engine, [7]))
            await engine.receive_weights(1, True)
            assert engine._machine.state is HOLDING and engine.version is None
            later = asyncio.create_task(responses(engine, [8]))
            await asyncio.sleep(0.01)
            assert not asked.done() and not late.done() and not later.done()
            await engine.commit(version)
            await asyncio.sleep(0.01)
        done = await asked
        assert (
            sorted(done.sample_id) == [0, 1, 2] and set(done.span_counts) == {3} and set(done.response_lengths) == {30}
        )
        assert_each_token_has_its_weights(done)
        for one in (await late, await later):
            assert one.span_versions.tolist() == [6]

    run(steps())
    assert [word for word in engine._calls.llm.said if word in ("pause keep", "resume")] == ["pause keep", "resume"] * 2


@pytest.mark.parametrize("version", ["0.32.0", "0.23.0"])
def test_what_is_given_back_has_all_its_tokens_and_nobody_is_left_inside(engine, version):  # noqa: F811
    engine._calls.llm.length, engine._generation = 1000, vllm_generation(version)

    async def steps():
        asked = asyncio.create_task(responses(engine, range(3)))
        await under_way(engine, 3)
        assert await engine.pause_for_update(give_back=version != "0.23.0") is True
        late = asyncio.create_task(responses(engine, [7]))  # on its way when the door was shut
        done = await asked
        assert engine._door.inside == set() and done.truncated.all() and (done.response_lengths > 0).all()
        assert done.span_versions.tolist() == [4, 4, 4] and (done.rollout_log_probs == -4).all()
        nothing = await late
        assert nothing.response_lengths.tolist() == [0] and nothing.truncated.all() and len(nothing.token_ids) == 2
        await engine.receive_weights(1, True)
        await engine.commit(5)
        engine._calls.llm.length = 3
        assert (await responses(engine, [0])).span_versions.tolist() == [5]

    run(steps())


def test_requests_that_nobody_waits_for_are_ended_and_others_go_on(engine):  # noqa: F811
    engine._calls.llm.length = 40

    async def steps():
        asked = asyncio.create_task(responses(engine, range(3)))
        await under_way(engine, 3)
        await engine.end_requests([1, 99])
        done = await asked
        assert sorted(np.array(done.sample_id)[done.response_lengths < 40]) == [1]
        await engine.pause()
        waiting = asyncio.create_task(responses(engine, [5]))
        await asyncio.sleep(0.005)
        await engine.end_requests([5])
        assert (await waiting).response_lengths.tolist() == [0]
        await engine.resume()

    run(steps())
    assert engine._handles == {}


def test_a_request_whose_end_comes_with_it_is_ended(engine):  # noqa: F811
    """Both calls are in the event loop at once; a request that went on would keep the weights from changing."""
    engine._calls.llm.length = 40

    async def steps():
        asked = asyncio.create_task(responses(engine, range(2)))
        await asyncio.create_task(engine.end_requests([1]))
        done = await asked
        assert sorted(np.array(done.sample_id)[done.response_lengths < 40]) == [1]

    run(steps())
    assert engine._handles == {} and engine._door.inside == set()


def test_an_update_under_requests_that_nobody_paused_is_refused_and_hurts_nobody(engine):  # noqa: F811
    engine._calls.llm.length = 10

    async def steps():
        asked = asyncio.create_task(responses(engine, range(2)))
        await under_way(engine, 2)
        for update in (engine.receive_weights(1, True), engine.begin_update()):
            with pytest.raises(RuntimeError, match="2 requests are under way; first pause it"):
                await update
        assert engine._machine.state is AWAKE and engine.version == 4
        assert (await asked).span_versions.tolist() == [4, 4]

    run(steps())


@pytest.mark.parametrize("cleared", [True, False])
def test_a_cache_that_keeps_what_old_weights_computed_is_counted(engine, cleared):  # noqa: F811
    engine._calls.llm.length = 3
    engine._prefixes.block = 2

    async def steps():
        await responses(engine, [0])
        await engine.receive_weights(1, True)
        assert (await engine.commit(5)).stale_tokens == 0
        engine._calls.llm.cached = 0 if cleared else 2  # of the prompt's two tokens
        await responses(engine, [1])
        engine._calls.llm.cached = 2
        await responses(engine, [2])
        await engine.receive_weights(2, True)
        assert (await engine.commit(6)).stale_tokens == (0 if cleared else 2)

    run(steps())


class Answer:
    def __init__(self, tokens, *spans):
        self.token_ids = list(range(tokens))
        self.weight_versions = [
            type("Span", (), dict(start=a, end=b, version=v)) for (a, v), (b, _) in pairwise([*spans, (tokens, "")])
        ]


def test_spans_that_cannot_be_are_refused():
    assert stamped_spans(Answer(5, (0, "3"), (2, "4")), 3, 4) == ((0, 3), (2, 4))
    assert stamped_spans(Answer(0), 3, 4) == ((0, 4),)
    wrong = [
        Answer(5),
        Answer(5, (1, "3")),
        Answer(5, (0, "2")),
        Answer(5, (0, "3"), (2, "5")),
        Answer(5, (0, "4"), (2, "3")),
        Answer(5, (0, "default")),
    ]
    for answer in wrong:
        with pytest.raises(RuntimeError, match="its 5 tokens are of weight versions"):
            stamped_spans(answer, 3, 4)
    gap = Answer(5, (0, "3"), (2, "4"))
    gap.weight_versions[0].end = 1
    with pytest.raises(RuntimeError, match="not of 3 to 4"):
        stamped_spans(gap, 3, 4)


def test_where_vllm_says_nothing_a_request_has_one_version():
    assert unstamped_spans(4, 4) == ((0, 4),)
    with pytest.raises(RuntimeError, match="begun by weight version 4 and ended by 5"):
        unstamped_spans(4, 5)
