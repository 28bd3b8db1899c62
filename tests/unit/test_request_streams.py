"""Responses on their way from engines to the driver, with Ray's calls as plain objects."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from mrl.cluster import request_streams
from mrl.cluster.process_logs import concerning
from mrl.cluster.request_streams import REST_S, RequestStreams
from mrl.data.samples import Sample, packed
from mrl.engine.engine_worker import EngineWorker
from mrl.engine.outbox import Outboxes
from mrl.engine.requests import Request, Sampling
from mrl.errors import Interrupted, LostProcess
from mrl.store.response_store import BLOCK_BYTES

LONG = BLOCK_BYTES  # tokens


class Ref:
    """The value of a call, once it is there."""

    def __init__(self, value=None, there=True):
        self.value, self.there = value, there


class Method:
    """A method of an actor: what it is called with, and what it gives back."""

    def __init__(self, answer):
        self._answer, self.returns = answer, 1

    def options(self, num_returns):
        other = Method(self._answer)
        other.returns = num_returns
        return other

    def remote(self, *arguments):
        given = self._answer(*arguments)
        assert self.returns == (len(given) if isinstance(given, list) else 1)
        return given


class Worker:
    """The product's EngineWorker without Ray; its engine answers when it is told to."""

    def __init__(self):
        self.loop, self.worker = asyncio.new_event_loop(), EngineWorker.__new__(EngineWorker)
        self.worker.outboxes, self.worker.engine = Outboxes(), self
        self.lets, self.dies, self.calls = asyncio.Event(), None, []
        self.generate, self.take_finished = Method(self._begun), Method(self._begun_take_finished)
        self.blocks = Method(self._blocks)

    async def _generated(self, requests, sampling):
        for request in requests:
            await self.lets.wait()
            if self.dies:
                raise self.dies
            routes = np.zeros((LONG + 1, 2, 2), np.int8) if sampling.routes else None
            yield packed([
                Sample(0, 0, request.sample_id, 0, (7,), np.arange(LONG), np.zeros(LONG), "stop", 0, routes)
            ])  # fmt: skip

    def _begun(self, *arguments):
        self.worker.engine = SimpleNamespace(generate=self._generated)
        return self._task(self.worker.generate(*arguments))

    def _begun_take_finished(self, *arguments):
        self.calls.append("take_finished")
        return self._task(self.worker.take_finished(*arguments))

    def _task(self, coroutine):
        ref, task = Ref(there=False), self.loop.create_task(coroutine)
        task.add_done_callback(lambda done: setattr(ref, "value", done.exception() or done.result()))
        task.add_done_callback(lambda done: setattr(ref, "there", True))
        return ref

    def _blocks(self, *arguments):
        self.calls.append("blocks")
        return [Ref(value) for value in self.loop.run_until_complete(self.worker.blocks(*arguments))]

    def runs(self, seconds=0.02):
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def close(self):
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.runs(0.0)
        self.loop.close()


@pytest.fixture
def engine():
    made = []
    yield lambda: made.append(Worker()) or made[-1]
    for worker in made:
        worker.close()


@pytest.fixture
def ray(monkeypatch):
    def unwrap(ref, name, phase):
        if isinstance(ref.value, Exception):
            raise concerning(ref.value, name)
        return ref.value

    waits = []

    def wait(refs, num_returns, timeout, fetch_local):
        there = [ref for ref in refs if ref.there]
        waits.append(timeout if len(there) < num_returns else 0.0)
        return there, []

    monkeypatch.setattr(request_streams, "unwrap", unwrap)
    monkeypatch.setattr(request_streams.ray, "wait", wait)
    return waits


def requests(*numbers):
    return [Request(number, (7,), 0) for number in numbers]


def streams_of(**workers):
    return RequestStreams(Fleet(workers), dict, dict.fromkeys(workers, "a node"), limit_s=60.0)


class Fleet:
    """Which workers there are, each with the epoch of its engine."""

    def __init__(self, workers):
        self.there = {name: SimpleNamespace(epoch=0, worker=worker) for name, worker in workers.items()}
        self.does_without, self.asked, self.were_late = False, [], []

    def serving(self):
        return dict(self.there)

    def loses(self, error, asked):
        self.asked.append((str(error), asked))
        return self.does_without

    def late(self, engine, epoch, answers):
        self.were_late.append((engine, epoch, answers))


def finished_of(streams):
    found = streams.take(0.0)
    return [(each.engine, each.samples.rows.sample_id.tolist()) for each in found]


@pytest.mark.parametrize("routed", [False, True])
def test_responses_of_several_calls_come_by_one_message_and_one_call_for_their_blocks(engine, ray, routed):
    worker = engine()
    streams, sampling = streams_of(a=worker), Sampling(1.0, LONG, (), routes=routed)
    streams.send("a", requests(0, 1), sampling)
    streams.send("a", requests(2), sampling)
    worker.runs()
    assert finished_of(streams) == [] and streams.waiting_for == ["a"]
    worker.lets.set()
    worker.runs()
    (arrived,) = streams.take(0.0)
    assert sorted(arrived.samples.rows.sample_id.tolist()) == [0, 1, 2] and worker.calls == ["take_finished", "blocks"]
    assert streams.waiting_for == []
    for row, number in enumerate(arrived.samples.rows.sample_id.tolist()):  # each long one an object
        block = arrived.samples.blocks[arrived.samples.block[row]]
        assert block.samples.value.sample_id.tolist() == [number] and block.samples.value.routes is None
        assert (block.routes is None) != routed and block.node == "a node"


def test_an_engine_that_still_makes_its_blocks_is_waited_for(engine, ray):
    worker = engine()
    streams = streams_of(a=worker, b=(other := engine()))
    for name in ("a", "b"):
        streams.send(name, requests(0), Sampling(1.0, LONG, ()))
    there = Ref(None, there=False)
    worker.blocks = Method(lambda *_: [there, Ref()])
    for each in (worker, other):
        each.lets.set()
        each.runs()
    assert [each.engine for each in streams.take(20.0)] == ["b"] and streams.waiting_for == ["a"]
    assert 0.0 < sum(ray) <= REST_S  # b's are not kept back
    there.there = True
    assert finished_of(streams) == [("a", [0])] and streams.waiting_for == []


@pytest.mark.parametrize("at", ["generation", "blocks"])
def test_an_engine_that_dies_is_told_and_what_it_did_not_hand_over_is_not_taken(engine, ray, at):
    worker, died = engine(), Interrupted("engine 0 died")
    streams = streams_of(a=worker)
    streams.send("a", requests(0), Sampling(1.0, LONG, ()))
    if at == "generation":
        worker.dies = died
    else:
        worker.blocks = Method(lambda *_: [Ref(died), Ref(died)])
    worker.lets.set()
    worker.runs()
    with pytest.raises(Interrupted, match="engine 0 died"):
        streams.take(0.0)


def test_of_a_lost_engine_nothing_is_awaited_and_the_one_started_for_it_is_asked_anew(engine, ray):
    before, after, other = engine(), engine(), engine()
    streams, sampling = streams_of(a=before, b=other), Sampling(1.0, LONG, ())
    fleet = streams._fleet
    fleet.does_without = True
    streams.send("a", requests(0, 1), sampling)
    streams.send("b", requests(2), sampling)
    before.dies = LostProcess("engine a died")
    for one in (before, other):
        one.lets.set()
        one.runs()
    arrived = [each for _ in range(3) for each in finished_of(streams)]
    assert arrived == [("b", [2])] and fleet.asked == [("engine a died", {"a": 0, "b": 0})]
    del fleet.there["a"]
    assert streams.follow() == (["a"], []) and streams.waiting_for == [] and streams.names == ["b"]
    fleet.there["a"] = SimpleNamespace(epoch=1, worker=after)
    assert streams.follow() == ([], ["a"]) and streams.follow() == ([], [])
    streams.send("a", requests(0, 1), sampling)
    after.lets.set()
    after.runs()
    assert finished_of(streams) == [("a", [0, 1])] and fleet.were_late == []


def test_what_an_engine_told_before_it_was_lost_is_taken(engine, ray):
    """Its front end tells what it holds and makes the blocks; then comes the loss."""
    worker = engine()
    streams = streams_of(a=worker)
    streams._fleet.does_without = True
    streams.send("a", requests(0), Sampling(1.0, LONG, ()))
    worker.lets.set()
    worker.runs()
    blocks, worker.blocks = worker.blocks, Method(lambda *given: waits_for(blocks._answer(*given)))
    coming = []

    def waits_for(refs):
        coming.append(refs[0])
        refs[0].there = False
        return refs

    assert finished_of(streams) == [] and streams.waiting_for == ["a"]
    coming[0].there = True
    streams.send("a", requests(1), Sampling(1.0, LONG, ()))
    worker.dies = LostProcess("engine a died")
    worker.runs()
    assert finished_of(streams) == [("a", [0])] and streams._fleet.asked == [("engine a died", {"a": 0})]


def test_what_a_peer_of_the_lost_rank_has_told_is_taken(engine, ray):
    lost, peer = engine(), engine()
    streams = streams_of(**{"engine 0 rank 0": lost, "engine 0 rank 1": peer})
    streams._fleet.does_without = True
    streams.send("engine 0 rank 0", requests(0), Sampling(1.0, LONG, ()))
    streams.send("engine 0 rank 1", requests(1), Sampling(1.0, LONG, ()))
    peer.lets.set()
    peer.runs()
    lost.dies = LostProcess("its process died")
    lost.lets.set()
    lost.runs()
    assert finished_of(streams) == [("engine 0 rank 1", [1])]


def test_another_engine_that_fails_beside_a_lost_one_is_not_forgotten(engine, ray):
    """Its blocks fail while the loss is handled: the next take says so."""
    lost, other = engine(), engine()
    streams = streams_of(a=lost, b=other)
    streams._fleet.does_without = True
    streams.send("b", requests(1), Sampling(1.0, LONG, ()))
    other.lets.set()
    other.runs()
    blocks = Ref(there=False)
    other.blocks = Method(lambda *given: [blocks, Ref()])
    assert finished_of(streams) == []
    streams.send("a", requests(0), Sampling(1.0, LONG, ()))
    lost.dies = LostProcess("its process died")
    lost.lets.set()
    lost.runs()
    blocks.value = Interrupted("the object store is full")
    blocks.there = True
    assert finished_of(streams) == [] and streams.waiting_for == ["a", "b"]
    del streams._fleet.there["a"]
    streams.follow()
    with pytest.raises(Interrupted, match="is full"):
        finished_of(streams)


def test_what_an_engine_says_after_it_was_taken_for_lost_is_dropped_and_counted(engine, ray):
    hung, after = engine(), engine()
    streams, sampling = streams_of(a=hung), Sampling(1.0, LONG, ())
    streams.send("a", requests(0, 1), sampling)
    hung.runs()
    streams._fleet.there["a"] = SimpleNamespace(epoch=3, worker=after)
    assert streams.follow() == (["a"], ["a"])
    hung.lets.set()
    hung.runs()
    assert finished_of(streams) == [] and streams.follow() == ([], [])
    assert streams._fleet.were_late == [("a", 0, 2)]


def test_an_engine_that_fails_while_a_response_is_held_is_told_after_it(engine, ray):
    worker = engine()
    streams = streams_of(a=worker)

    async def generated(requests, sampling):
        await asyncio.sleep(0.5)  # so it is held for 5 ms
        yield packed([Sample(0, 0, 0, 0, (7,), np.arange(LONG), np.zeros(LONG), "stop", 0)])
        raise Interrupted("engine 0 died")

    worker._generated = generated
    streams.send("a", requests(0, 1), Sampling(1.0, LONG, ()))
    worker.runs(0.6)
    assert finished_of(streams) == [("a", [0])] and streams.waiting_for == ["a"]
    worker.runs()
    with pytest.raises(Interrupted, match="engine 0 died"):
        streams.take(0.0)


@pytest.mark.parametrize(("held_s", "rests_s"), [(0.005, 0.005), (0.07, 0.07), (2.0, REST_S)])
def test_between_takes_the_driver_rests_a_little_where_responses_take_long(engine, ray, held_s, rests_s, monkeypatch):
    """So few takes are for one engine alone."""
    slept, streams = [], streams_of(a=engine())
    clock = SimpleNamespace(monotonic=lambda: 100.0, sleep=slept.append)
    monkeypatch.setattr(request_streams, "time", clock)
    streams._calls = {"a": {0: Ref(), 1: Ref()}}
    for _ in range(2):
        streams._asked = {Ref((b"", (), False, 1, (), held_s)): "a"}
        streams.take(0.0)
    assert slept == pytest.approx([0.0, rests_s])
