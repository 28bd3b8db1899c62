"""An engine's slots: as many conversations as it has, later turns first, and none is lost to a cancelled one."""

import asyncio

from mrl.engine.conversations import TurnGate


def noted(slots: int | None, *asked: bool) -> tuple[list[int], int]:
    """The order in which conversations get a slot that all ask for at once (True: their first turn), and the most
    that had one at the same time. The first `slots` keep theirs until all others have asked.
    """
    order, holding, most = [], set(), [0]

    async def one(gate: TurnGate, number: int, is_first: bool) -> None:
        async with gate.slot(is_first):
            order.append(number)
            holding.add(number)
            most[0] = max(most[0], len(holding))
            for _ in range(5):
                await asyncio.sleep(0)
            holding.discard(number)

    async def all_of_them() -> None:
        gate = TurnGate(slots)
        await asyncio.gather(*(one(gate, number, is_first) for number, is_first in enumerate(asked)))

    asyncio.run(all_of_them())
    return order, most[0]


def test_no_more_have_a_slot_than_there_are_and_all_get_one():
    for slots in (1, 2, 3):
        order, most = noted(slots, *[True] * 7)
        assert (order, most) == (list(range(7)), slots)
    assert noted(None, *[True] * 7)[1] == 7


def test_later_turns_go_first_and_then_earlier_arrivals():
    """The example of the module: c's and d's first turns wait; a later turn goes before both."""
    assert noted(2, True, True, True, True, False)[0] == [0, 1, 4, 2, 3]
    assert noted(1, True, True, False, True, False, False)[0] == [0, 2, 4, 5, 1, 3]


async def held(gate: TurnGate, entered: asyncio.Event, leave: asyncio.Event) -> None:
    async with gate.slot(True):
        entered.set()
        await leave.wait()


async def waiting_behind(gate: TurnGate) -> tuple[asyncio.Task, asyncio.Task, asyncio.Event]:
    """Somebody who has the only slot, and somebody who waits for it; the event lets the first leave."""
    entered, leave = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(held(gate, entered, leave))
    await entered.wait()
    second = asyncio.create_task(held(gate, asyncio.Event(), leave))
    await asyncio.sleep(0)
    return first, second, leave


async def is_free(gate: TurnGate, slots: int = 1) -> bool:
    """Whether as many as `slots` can be taken at once."""
    try:
        async with asyncio.timeout(1):
            for _ in range(slots):
                await gate._take(True)
    except TimeoutError:
        return False
    return gate._free == 0


def test_one_that_is_cancelled_while_it_waits_takes_no_slot():
    async def run() -> bool:
        gate = TurnGate(1)
        first, second, leave = await waiting_behind(gate)
        second.cancel()
        await asyncio.wait([second])
        leave.set()
        await first
        return await is_free(gate)

    assert asyncio.run(run())


def test_one_that_is_cancelled_in_the_moment_it_gets_a_slot_gives_it_on():
    """Its future is done, but it has not run since."""

    async def run() -> bool:
        gate = TurnGate(1)
        first, second, leave = await waiting_behind(gate)
        leave.set()
        while not first.done():  # its slot is given to the second, which is cancelled before it runs
            await asyncio.sleep(0)
            second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        return await is_free(gate)

    assert asyncio.run(run())


def test_one_that_is_cancelled_with_a_slot_gives_it_to_the_next():
    async def run() -> bool:
        gate = TurnGate(2)
        entered, leave = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(held(gate, entered, leave))
        await entered.wait()
        first.cancel()
        await asyncio.wait([first])
        return await is_free(gate, 2)

    assert asyncio.run(run())
