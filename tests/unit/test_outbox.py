"""What finishes in an engine is told once, few messages at a time, and nobody waits long for it."""

import asyncio
import selectors

import numpy as np
import pytest

from mrl.data.samples import Sample, SampleRows, packed
from mrl.engine import outbox
from mrl.engine.outbox import HELD_S, LOSS_S, MANY, SHARE, Outbox, Outboxes
from mrl.errors import Interrupted, LostProcess


class Clock(asyncio.SelectorEventLoop):
    """A loop whose waits take no time: its clock goes on to the next of them."""

    def __init__(self):
        super().__init__(_NoWait(self))
        self.now = 1.0

    def time(self):
        return self.now


class _NoWait(selectors.SelectSelector):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def select(self, timeout=None):
        if timeout:
            self.loop.now += timeout
        return super().select(0)


@pytest.fixture
def clock(monkeypatch):
    loop = Clock()
    monkeypatch.setattr(outbox.time, "monotonic", loop.time)
    yield loop
    loop.close()


def response(number: int, tokens: int = 4000):
    """More than a block of short ones takes."""
    return packed([Sample(0, 0, number, 0, (7,), np.arange(tokens), np.zeros(tokens), "stop", 0)])


async def a_call(box: Outbox, number: int, ends: dict[int, float], sizes=lambda number: 4000) -> None:
    """Responses that finish so many seconds after it was begun."""
    with box.call(number):
        begun = asyncio.get_running_loop().time()
        for each in sorted(ends, key=ends.get):
            await asyncio.sleep(begun + ends[each] - asyncio.get_running_loop().time())
            box.add(number, response(each, sizes(each)), routed=False)


async def heard(box: Outbox, calls: dict[int, dict[int, float]], **how) -> list[tuple[float, list[int]]]:
    """When the client was told, and of which responses; their blocks are the same ones."""
    tasks = [asyncio.create_task(a_call(box, number, ends, **how)) for number, ends in calls.items()]
    awaited, found = set(calls), []
    while awaited:
        finished = await box.take_finished(tuple(awaited))
        awaited -= set(finished.ended)
        if finished.sizes:
            rows, blocks = SampleRows.from_bytes(finished.rows).sample_id.tolist(), box.take_blocks(finished.ticket)
            assert [row for block in blocks for row in block.sample_id.tolist()] == rows
            assert [len(block) for block in blocks] == list(finished.sizes)
            found.append((asyncio.get_running_loop().time(), rows))
    await asyncio.gather(*tasks)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_each_response_is_told_once_and_after_a_hundredth_of_what_its_call_took(seed, clock):
    rng, box = np.random.default_rng(seed), Outbox()
    calls = {
        call: {100 * call + i: float(rng.exponential(60)) for i in range(rng.integers(1, 40))} for call in range(5)
    }
    found = clock.run_until_complete(heard(box, calls))
    begun, ends = 1.0, {number: end for call in calls.values() for number, end in call.items()}
    finished = {number: at - begun for at, rows in found for number in rows}
    assert sorted(finished) == sorted(ends) and sum(len(rows) for _, rows in found) == len(ends)
    for number, at in finished.items():
        assert -1e-9 <= at - ends[number] <= min(HELD_S, SHARE * ends[number]) + 1e-9
    assert finished[last := max(ends, key=ends.get)] == pytest.approx(ends[last])  # nobody is left to wait for
    assert box.is_idle


def test_an_engine_of_a_large_step_sends_a_message_for_several_responses(clock):
    """8,192 in 200 s by two engines, 4,096 each, in calls of all sizes: as places get free."""
    rng, numbers = np.random.default_rng(0), iter(range(4096))
    sizes = [2000, *rng.integers(1, 20, 1000)]
    calls = {}
    for call, size in enumerate(sizes):
        own = {number: float(rng.uniform(0, 200)) for number, _ in zip(numbers, range(size), strict=False)}
        calls |= {call: own} if own else {}
    found = clock.run_until_complete(heard(Outbox(), calls, sizes=lambda number: 1))
    assert 4096 / len(found) > MANY / 2
    assert np.median([len(rows) for at, rows in found if at > 100]) == MANY


def test_an_error_is_raised_after_what_came_before_it(clock):
    async def run():
        box = Outbox()
        with box.call(0):
            box.add(0, response(3), routed=True)
            raise Interrupted("engine 0 was put to sleep")
        finished = await box.take_finished((0,))
        assert finished.routed and SampleRows.from_bytes(finished.rows).sample_id.tolist() == [3]
        assert finished.ended == ()  # so the client goes on asking, and hears of the error
        with pytest.raises(Interrupted, match="put to sleep"):
            await box.take_finished((0,))

    clock.run_until_complete(run())


@pytest.mark.parametrize(("seconds", "is_reported"), [(LOSS_S / 2, True), (LOSS_S * 2, False)])
def test_a_loss_waits_for_other_calls_but_not_for_long(clock, seconds, is_reported):
    box = Outbox()

    async def fails():
        with box.call(0):
            raise LostProcess("the engine is lost")

    async def run():
        calls = [asyncio.create_task(each) for each in (fails(), a_call(box, 1, {5: seconds}))]
        begun = clock.time()
        if is_reported:
            finished = await box.take_finished([0, 1])
            assert SampleRows.from_bytes(finished.rows).sample_id.tolist() == [5] and finished.ended == ()
        with pytest.raises(LostProcess, match="is lost"):
            await box.take_finished([0, 1])
        assert clock.time() - begun == pytest.approx(min(seconds, LOSS_S))
        await asyncio.wait(calls)

    clock.run_until_complete(run())


def test_who_asks_before_the_call_has_begun_waits_for_it(clock):
    async def run():
        boxes = Outboxes()
        asked = asyncio.create_task(boxes.of(7).take_finished((0,)))
        await asyncio.sleep(1)
        boxes.of(8)  # an idle one would be forgotten now
        await a_call(boxes.of(7), 0, {5: 30.0})
        return await asked

    finished = clock.run_until_complete(run())
    assert (finished.sizes, finished.ended) == ((1,), (0,))


def test_short_responses_that_are_told_together_are_one_block_and_long_ones_their_own(clock):
    calls = {0: dict.fromkeys(range(8), 30.0)}

    async def sizes(tokens):
        box = Outbox()
        task = asyncio.create_task(a_call(box, 0, calls[0], sizes=lambda number: tokens))
        finished = await box.take_finished((0,))
        await task
        return finished.sizes

    assert clock.run_until_complete(sizes(10)) == (8,)
    assert clock.run_until_complete(sizes(3000)) == (1,) * 8


def test_boxes_of_idle_clients_are_forgotten_and_those_with_blocks_are_not(clock):
    async def run():
        boxes = Outboxes()
        first = boxes.of(0)
        await a_call(first, 0, {1: 1.0})
        finished = await first.take_finished((0,))
        boxes.of(1)
        assert boxes.of(0) is first and len(first.take_blocks(finished.ticket)) == 1
        boxes.of(1)
        assert boxes.of(0) is not first

    clock.run_until_complete(run())


def test_a_call_that_is_cancelled_is_told_as_an_error_and_not_as_answered(clock):
    async def run():
        box = Outbox()
        task = asyncio.create_task(a_call(box, 0, {1: 10.0}))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(Interrupted, match="call 0 was cancelled"):
            await box.take_finished((0,))
        assert task.cancelled() or await asyncio.gather(task, return_exceptions=True)

    clock.run_until_complete(run())
