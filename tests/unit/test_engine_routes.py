"""Routes are asked of vLLM's workers by the one way in which nothing is raised inside vLLM. A stand-in for AsyncLLM."""

import asyncio
from types import SimpleNamespace as Record

import numpy as np
import pytest

from mrl.data.routes import RouteShape
from mrl.engine.requests import Request
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import EnvironmentFault
from mrl.platforms.versions import vllm_generation

ROUTES = np.array([[[0, 1]], [[1, 2]]], np.int16)  # of two tokens


class Llm:
    """Knows `answer` alone; `error` is what the workers raise."""

    def __init__(self, error: str = ""):
        self.error, self.asked = error, []

    async def collective_rpc(self, method, args):
        assert method == "answer"
        self.asked.append(args)
        value = (list(ROUTES.shape), ROUTES.tobytes()) if args[0] == "take_routes" else None
        return [{"error": self.error}] if self.error else [{"value": value}]

    async def reset_prefix_cache(self):
        return True


async def answer_of(call):
    return await call


def engine(llm, captures=True):
    routes = RouteShape(num_layers=1, moe_layers=(0,), topk=2, num_experts=4)
    made = VllmEngine(
        Record(engine_id=3, name="engine 3", data_ranks=1, captures_routes=captures, routes=routes, syncs_tower=False)
    )
    made._calls.llm, made._calls.ask = llm, answer_of
    made._machine.enter("receive_weights")
    made._machine.received()
    made._generation = vllm_generation("0.23.0")
    return made


def test_routes_are_taken_by_the_guarded_way():
    llm = Llm()
    taken = asyncio.run(engine(llm)._routes("7-0", Request(7, (1, 2), 0), Record(token_ids=(3,), routed_experts=None)))
    assert llm.asked == [("take_routes", ("7-0", 2))] and np.array_equal(taken[:2], ROUTES)


def test_what_the_workers_raise_is_raised_here():
    with pytest.raises(RuntimeError, match="layer 2"):
        asyncio.run(
            engine(Llm("layer 2"))._routes("7-0", Request(7, (1, 2), 0), Record(token_ids=(3,), routed_experts=None))
        )
    with pytest.raises(EnvironmentFault, match=r"engine 3 cannot return routes .*: unset it"):
        asyncio.run(engine(Llm("unset it"))._capture_routes())


@pytest.mark.parametrize("captures", [True, False])
def test_new_weights_make_workers_forget_what_nobody_took(captures):
    llm = Llm()
    asyncio.run(engine(llm, captures).commit(5))
    assert llm.asked == ([("forget_routes", ())] if captures else [])
