"""An environment of `verifiers` 0.4: a task that asks for a product, and a harness that offers a calculator."""

import json
import re

import verifiers.v1 as vf
from openai import AsyncOpenAI

TURNS = 3
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes a product.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "like 12*34"}},
            "required": ["expression"],
        },
    },
}


class ProductData(vf.TaskData):
    """One product."""

    answer: str = ""


class ProductTask(vf.Task[ProductData]):
    """Right is what was said last."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """1 for the product."""
        return float(trace.last_reply.strip() == self.data.answer)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """Asks until nothing more is called."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """Speaks to the model where verifiers says."""
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[CALCULATOR])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": product(call)} for call in said.tool_calls
            ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def product(call) -> str:
    """The product that a call asks for; `?` where it asks for something else."""
    factors = re.fullmatch(r"(\d+)\*(\d+)", str(json.loads(call.function.arguments).get("expression", "")))
    if factors is None:
        return "?"
    return str(int(factors[1]) * int(factors[2]))


__all__ = ["CalculatorHarness", "ProductTask"]
