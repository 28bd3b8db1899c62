"""After one of an engine's workers failed, every worker's next answer is to the next question.

vLLM's own executor calls the product's own worker extension; only the queues between processes are lists.
"""

import asyncio
import importlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.engine.engine_calls import EngineCalls
from mrl.engine.receive import adapter_module

pytestmark = pytest.mark.real


def worker(number: int) -> Any:
    """A worker whose `update_weights` can be made to fail."""

    class Worker(importlib.import_module(adapter_module()).WorkerExtension):
        fails = ""

        def update_weights(self, info):
            if self.fails:
                raise ValueError(self.fails)

        def weight_update_report(self):
            return {"worker": number}

        def weight_bytes(self):
            return 100 + number

    return Worker()


class Llm:
    """Of AsyncLLM what an engine asks, over vLLM's executor of several processes."""

    errored = False

    def __init__(self):
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self.workers, self.answers = [worker(0), worker(1)], [deque(), deque()]
        self.executor = object.__new__(MultiprocExecutor)
        self.executor.is_failed, self.executor.futures_queue = False, deque()
        self.executor.rpc_broadcast_mq = SimpleNamespace(enqueue=self.everybody_answers)
        self.executor.response_mqs = [
            SimpleNamespace(dequeue=lambda timeout, q=queue: q.popleft()) for queue in self.answers
        ]

    def everybody_answers(self, call: tuple) -> None:
        """As WorkerProc.worker_busy_loop."""
        from vllm.v1.executor.multiproc_executor import WorkerProc

        method, args, kwargs, _ = call
        for one, queue in zip(self.workers, self.answers, strict=True):
            try:
                queue.append((WorkerProc.ResponseStatus.SUCCESS, getattr(one, method)(*args, **kwargs)))
            except Exception as error:
                queue.append((WorkerProc.ResponseStatus.FAILURE, str(error)))

    async def collective_rpc(self, method, args=()):
        return self.executor.collective_rpc(method, args=args)


@pytest.fixture
def calls() -> EngineCalls:
    made = EngineCalls("0")
    made.llm = Llm()
    for number, (one, error) in enumerate(zip(made.llm.workers, ("rank 1 gave up", "no memory"), strict=True)):
        one.fails = f"engine 0 worker {number}: {error}"
    return made


def test_each_worker_answers_for_itself(calls):
    assert asyncio.run(calls.workers("weight_bytes")) == [100, 101]


def test_after_a_failure_the_next_call_gets_its_own_answers(calls):
    with pytest.raises(RuntimeError) as told:
        asyncio.run(calls.workers("update_weights", {"update": 3}))
    assert str(told.value) == "engine 0 worker 1: no memory; engine 0 worker 0: rank 1 gave up", "causes, then effects"
    assert asyncio.run(calls.workers("weight_update_report")) == [{"worker": 0}, {"worker": 1}]
    assert asyncio.run(calls.workers("weight_bytes")) == [100, 101]


def test_what_a_worker_raises_itself_would_be_taken_for_its_next_answer(calls):
    """Why nothing is asked but through `answer`. When this fails vLLM has mended it."""
    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        asyncio.run(calls.llm.collective_rpc("update_weights", ({},)))
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(calls.llm.collective_rpc("weight_bytes"))


def test_an_error_whose_text_says_nothing_is_told_with_its_type(calls):
    calls.llm.workers[0].weight_bytes = lambda: {}["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"^KeyError: 'model\.norm\.weight'$"):
        asyncio.run(calls.workers("weight_bytes"))
