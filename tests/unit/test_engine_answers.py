"""What an engine makes of its workers' answers. vLLM's executor is played: a queue of answers a worker, read until one failed."""

import asyncio
from collections import deque

import pytest

from mrl.rollout.engine import VllmEngine


class Worker:
    """As mrl.reshard.vllm_shared.WorkerExtension answers."""

    def __init__(self, number: int):
        self.number, self.fails = number, ""

    def answer(self, method, arguments=()):
        if method == "update_weights" and self.fails:
            return {"error": self.fails}
        return {"value": (self.number, method, *arguments)}


class Llm:
    """Of AsyncLLM what an engine asks; `collective_rpc` as MultiprocExecutor has it in 0.23 and 0.32."""

    errored = False

    def __init__(self):
        self.workers = [Worker(0), Worker(1)]
        self.answers = [deque(), deque()]

    async def collective_rpc(self, method, args=()):
        for worker, queue in zip(self.workers, self.answers, strict=True):
            try:
                queue.append((True, getattr(worker, method)(*args)))
            except Exception as error:
                queue.append((False, error))
        found = []
        for queue in self.answers:
            fine, answer = queue.popleft()
            if not fine:
                raise RuntimeError(f"Worker failed with error '{answer}'")
            found.append(answer)
        return found


@pytest.fixture
def engine():
    made = VllmEngine(settings=None)
    made._llm = Llm()
    return made


def test_each_worker_answers_for_itself(engine):
    assert asyncio.run(engine._workers("weight_bytes", 7)) == [(0, "weight_bytes", 7), (1, "weight_bytes", 7)]


def test_after_a_failure_the_next_call_gets_its_own_answers(engine):
    for worker, error in zip(engine._llm.workers, ("engine 0 worker 0: rank 1 gave up", "engine 0 worker 1: no memory"), strict=True):
        worker.fails = error
    with pytest.raises(RuntimeError) as told:
        asyncio.run(engine._workers("update_weights", {"update": 3}))
    assert str(told.value) == "engine 0 worker 1: no memory; engine 0 worker 0: rank 1 gave up", "causes, then effects"
    assert asyncio.run(engine._workers("weight_update_report")) == [(0, "weight_update_report"), (1, "weight_update_report")]


def test_a_worker_that_raises_would_leave_the_others_answers_behind(engine):
    """Why no method is called but through `answer`."""
    engine._llm.workers[0].other = lambda: 1 / 0
    engine._llm.workers[1].other = lambda: "late"
    with pytest.raises(RuntimeError, match="division"):
        asyncio.run(engine._llm.collective_rpc("other"))
    assert asyncio.run(engine._llm.collective_rpc("answer", ("weight_bytes",)))[1] == "late"
