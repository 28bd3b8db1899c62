"""The engine's door and its control verbs against a vLLM (a stand-in) that pauses, aborts and generates as it does.

Weights that change under requests: test_engine_flight.py.
"""

import asyncio
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest

from mrl.engine import engine_scheduler
from mrl.engine.admission import Admission
from mrl.engine.engine_state import ASLEEP, AWAKE, DEAD, FENCED, WEIGHTS_AWAKE
from mrl.engine.requests import Request, Sampling
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import Interrupted
from mrl.platforms.process_memory import ProcessMemory
from mrl.platforms.versions import vllm_generation

MEMORY = {"live_bytes": 5, "free_bytes": None, "resident_bytes": 9, "baseline_bytes": 2}


class Llm:
    """Of AsyncLLM what the engine asks for.

    A request takes a step a token, in which it is held while the scheduler is paused.
    """

    errored = False

    def __init__(self):
        self.said, self.paused, self.aborted, self.running = [], None, set(), set()
        self.failing: dict[str, str] = {}  # method of a worker -> what it raises
        self.slow = 0.0  # seconds from a request to its arrival in vLLM's core
        self.length, self.cached = 8, 0
        self.made: dict[str, list] = {}  # by request

    async def collective_rpc(self, method, args=()):
        name = args[0]
        self.said.append(name if not args[1] else f"{name} {args[1][0]}" if isinstance(args[1][0], str) else name)
        value = MEMORY if name == "held_memory" else None
        return [{"error": self.failing[name]} if name in self.failing else {"value": value}] * 2

    async def pause_generation(self, mode, clear_cache):
        assert clear_cache
        self.said.append(f"pause {mode}")
        self.paused = mode
        if mode == "abort":
            self.aborted |= self.running

    async def resume_generation(self):
        self.said.append("resume")
        self.paused = None

    async def abort(self, names):
        self.aborted |= set(names)

    async def reset_prefix_cache(self):
        return True

    async def update_weight_version(self, version):
        self.version = version

    async def generate(self, prompt, parameters, request_id):
        await asyncio.sleep(self.slow)
        self.running.add(request_id)
        made_by = self.made[request_id] = []  # version of each token
        while len(made_by) < self.length:
            await asyncio.sleep(0.002)
            while self.paused and request_id not in self.aborted:
                await asyncio.sleep(0.001)
            if request_id in self.aborted:
                break
            made_by.append(self.version)
        self.running.discard(request_id)
        starts = [i for i, version in enumerate(made_by) if i == 0 or made_by[i - 1] != version]
        pairs = list(pairwise([*starts, len(made_by)]))
        tokens = range(len(made_by))
        yield SimpleNamespace(
            num_cached_tokens=self.cached,
            outputs=[
                SimpleNamespace(
                    token_ids=list(tokens), finish_reason="abort" if request_id in self.aborted else "length",
                    weight_versions=[SimpleNamespace(version=made_by[a], start=a, end=b) for a, b in pairs],
                    logprobs=SimpleNamespace(start_indices=list(tokens), logprobs=[-float(v) for v in made_by]),
                    routed_experts=None,
                )
            ],
        )  # fmt: skip


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """An engine that serves version 4."""
    dead = type("EngineDeadError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", SimpleNamespace(EngineDeadError=dead))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **named: named))
    monkeypatch.setitem(
        sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0))
    )
    settings = SimpleNamespace(
        engine_id=3,
        name="engine 3",
        data_ranks=1,
        arguments={},
        captures_routes=False,
        syncs_tower=False,
        segments_file=str(tmp_path / "segments"),
        expected=(),
    )
    made = VllmEngine(settings)
    made._calls.llm, made._generation = Llm(), vllm_generation("0.32.0")
    made._calls.llm.version = "4"
    made._machine.serve(4)
    made._newest = 4
    made._door.open()
    return made


async def generated(engine: VllmEngine, numbers=range(3)) -> list:
    sampling = Sampling(temperature=1.0, max_tokens=2, stop_token_ids=())
    requests = [Request(i, (1, 2), i) for i in numbers]
    done = [(batch.sample_id, batch.weight_version) async for batch in engine.generate(requests, sampling)]
    return [
        SimpleNamespace(sample_id=i, weight_version=v)
        for ids, versions in done
        for i, v in zip(ids, versions, strict=True)
    ]


def run(steps) -> None:
    asyncio.run(asyncio.wait_for(steps, 20))


async def synced(engine: VllmEngine, version: int) -> None:
    await engine.receive_weights(1, True)
    await engine.commit(version)


def test_ranks_that_step_together_stand_still_before_an_update_and_resume_once(engine):
    engine.settings.data_ranks = 2

    async def steps():
        await synced(engine, 5)
        assert engine._calls.llm.said[0] == "pause keep" and engine._calls.llm.said[1] == "start_weight_update"
        assert engine._calls.llm.said.count("resume") == 1 and engine._calls.llm.said[-1] == "resume"
        await engine.pause()
        await synced(engine, 6)
        assert engine._calls.llm.said.count("pause keep") == engine._calls.llm.said.count("resume") == 2
        assert engine.version == 6

    run(steps())


def test_a_cycle_of_sleep_and_sync_asks_vllm_in_the_one_order_that_is_safe(engine):
    async def steps():
        report = await engine.sleep()
        assert (report.aborted, report.left) == (0, (ProcessMemory(**MEMORY),) * 2)
        assert (engine._machine.state, engine.version) == (ASLEEP, None)
        await engine.wake_weights()
        assert engine._machine.state is WEIGHTS_AWAKE
        await engine.receive_weights(1, True)
        await engine.wake_cache()
        assert engine._machine.state is FENCED
        await engine.commit(5)
        assert (engine._machine.state, engine.version) == (AWAKE, 5)
        assert [done.weight_version for done in await generated(engine)] == [5, 5, 5]

    run(steps())
    update = ["start_weight_update", "update_weights", "finish_weight_update", "weight_update_report"]
    assert engine._calls.llm.said == [
        "pause abort", "give_memory", "held_memory", "take_memory weights", *update, "take_memory kv_cache", "resume",
    ]  # fmt: skip


def test_requests_in_flight_are_ended_by_a_sleep_and_both_sides_are_told(engine):
    async def steps():
        asked, made = asyncio.create_task(generated(engine)), engine._calls.llm.made
        while len(made) < 3 or not all(made.values()):
            await asyncio.sleep(0)
        assert (await engine.sleep()).aborted == 3
        assert engine._door.inside == set()  # before memory was given away
        said = r"sample \d: engine 3 was put to sleep while it generated; [1-8] tokens are lost"
        with pytest.raises(Interrupted, match=said):
            await asked

    run(steps())


def test_a_request_on_its_way_to_vllm_when_it_is_paused_is_ended_too(engine):
    engine._calls.llm.slow = 0.05

    async def steps():
        asked = asyncio.create_task(generated(engine, [0]))
        await asyncio.sleep(0.01)
        assert engine._calls.llm.running == set()
        assert (await engine.sleep()).aborted == 1
        assert engine._calls.llm.running == set()
        with pytest.raises(Interrupted, match="put to sleep"):
            await asked

    run(steps())


def test_a_request_that_does_not_end_keeps_the_memory_where_it_is(engine, monkeypatch):
    monkeypatch.setattr(engine_scheduler, "EMPTY_S", 0.05)

    async def steps():
        await engine._door.enter("stuck")
        with pytest.raises(Interrupted, match=r"engine 3: 1 aborted requests did not end in 0\.05 s"):
            await engine.sleep()
        assert "give_memory" not in engine._calls.llm.said and engine.version is None

    run(steps())


def test_requests_that_arrive_during_a_pause_wait_and_lose_nothing(engine):
    async def steps():
        before = asyncio.create_task(generated(engine, [0]))
        await asyncio.sleep(0.003)
        await engine.pause()
        during = asyncio.create_task(generated(engine, [1, 2]))
        await asyncio.sleep(0.03)
        assert not before.done() and not during.done() and len(engine._calls.llm.running) == 1
        await engine.resume()
        assert [d.sample_id for d in await before + await during] == [0, 1, 2]
        assert engine.version == 4

    run(steps())
    assert engine._calls.llm.said == ["pause keep", "resume"]


def test_requests_that_wait_go_to_the_new_weights_of_a_sync_made_in_the_pause(engine):
    async def steps():
        await engine.pause()
        waiting = asyncio.create_task(generated(engine, [1]))
        await asyncio.sleep(0.005)
        await synced(engine, 9)
        assert [d.weight_version for d in await waiting] == [9]

    run(steps())
    assert engine._calls.llm.said.count("resume") == 1


def test_requests_that_wait_are_sent_away_by_a_sleep(engine):
    async def steps():
        await engine.pause()
        waiting = asyncio.create_task(generated(engine, [1, 2]))
        await asyncio.sleep(0.005)
        assert (await engine.sleep()).aborted == 2
        with pytest.raises(Interrupted, match="engine 3 was put to sleep"):
            await waiting

    run(steps())


def test_a_sleeping_or_fenced_engine_refuses_requests_at_once(engine):
    async def steps():
        await engine.sleep()
        with pytest.raises(RuntimeError, match="engine 3 is ASLEEP and refuses generate"):
            await generated(engine)
        await engine.wake_weights()
        await engine.wake_cache()
        with pytest.raises(RuntimeError, match="engine 3 is FENCED and refuses generate"):
            await generated(engine)
        with pytest.raises(RuntimeError, match="no whole update has reached it"):
            await engine.commit(5)
        assert "resume" not in engine._calls.llm.said

    run(steps())


def test_an_update_into_a_sleeping_engine_does_not_reach_vllm(engine):
    async def steps():
        await engine.sleep()
        for update in (
            engine.receive_weights(1, True),
            engine.begin_update(),
            engine.agree_on_sync({}, ""),
            engine.connect_sync(),
            engine.fingerprints(),
        ):
            with pytest.raises(RuntimeError, match="engine 3 is ASLEEP and refuses"):
                await update

    run(steps())
    assert engine._calls.llm.said[-1] == "held_memory"


def test_control_verbs_that_are_asked_at_once_run_one_after_the_other(engine):
    async def steps():
        slept, received = await asyncio.gather(engine.sleep(), engine.receive_weights(1, True), return_exceptions=True)
        assert slept.aborted == 0 and "ASLEEP and refuses receive_weights" in str(received)

    run(steps())


def test_a_wake_that_one_worker_could_not_do_can_be_asked_again(engine):
    async def steps():
        await engine.sleep()
        engine._calls.llm.failing["take_memory"] = "out of memory"
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.wake_weights()
        assert engine._machine.state is ASLEEP
        engine._calls.llm.failing.clear()
        await engine.wake_weights()
        assert engine._machine.state is WEIGHTS_AWAKE

    run(steps())


def test_without_a_pause_of_ours_vllm_is_not_resumed(engine):
    run(synced(engine, 5))
    assert "resume" not in engine._calls.llm.said and engine.version == 5


def test_a_dead_vllm_leaves_the_engine_dead_and_nobody_waiting(engine):
    async def steps():
        await engine.pause()
        waiting = asyncio.create_task(generated(engine, [1]))
        await asyncio.sleep(0.005)

        async def dies(*_, **__):
            raise sys.modules["vllm.v1.engine.exceptions"].EngineDeadError

        engine._calls.llm.collective_rpc = dies
        with pytest.raises(Interrupted, match="vLLM's process below it died"):
            await engine.receive_weights(1, True)
        assert engine._machine.state is DEAD
        with pytest.raises(Interrupted, match="below engine 3 died"):
            await waiting
        with pytest.raises(Interrupted, match=r"generate was asked, but vLLM's processes below it died"):
            await generated(engine)

    run(steps())


def test_the_door_forgets_who_gave_up_waiting():
    async def steps():
        door = Admission()
        gave_up, opened = asyncio.create_task(door.enter("a")), asyncio.create_task(door.enter("b"))
        await asyncio.sleep(0)
        gave_up.cancel()
        await asyncio.sleep(0)
        door.open()
        opened.cancel()  # after the door was opened for it, before it went through
        await asyncio.gather(gave_up, opened, return_exceptions=True)
        assert door.inside == set() and door.send_away("") == 0

    run(steps())


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_is_given_up_ends_every_request_and_goes_back_to_an_older_version(engine, paused):
    """Also requests that a pause holds, and those that wait at the door: their tokens are of weights that are lost."""

    async def steps():
        asked, made = asyncio.create_task(generated(engine)), engine._calls.llm.made
        while len(made) < 3 or not all(made.values()):
            await asyncio.sleep(0)
        waiting = None
        if paused:
            await engine.pause_for_update(give_back=False)
            waiting = asyncio.create_task(generated(engine, [7]))
            await asyncio.sleep(0.005)
        assert await engine.give_up() is FENCED and engine.version is None
        assert engine._door.inside == set() and engine._calls.llm.running == set()
        for stream in (asked, *([waiting] if paused else [])):
            with pytest.raises(Interrupted):
                await stream
        with pytest.raises(RuntimeError, match="FENCED and refuses generate"):
            await generated(engine)
        await synced(engine, 2)
        assert [done.weight_version for done in await generated(engine)] == [2, 2, 2]

    run(steps())
    assert engine._calls.llm.said.count("resume") == 1


def test_an_engine_that_was_given_weights_by_ranks_that_are_lost_must_be_given_all_again(engine):
    async def steps():
        await engine.receive_weights(1, True)
        assert await engine.give_up() is FENCED
        with pytest.raises(RuntimeError, match="no whole update has reached it"):
            await engine.commit(5)
        await synced(engine, 2)
        assert engine.version == 2

    run(steps())


def test_a_sleeping_engine_that_is_given_up_sleeps_on(engine):
    async def steps():
        await engine.sleep()
        assert await engine.give_up() is ASLEEP
        await engine.wake_weights()
        await engine.receive_weights(1, True)
        assert await engine.give_up() is WEIGHTS_AWAKE
        await engine.wake_cache()
        with pytest.raises(RuntimeError, match="no whole update has reached it"):
            await engine.commit(5)

    run(steps())
