"""An agent that knows the `openai` package and nothing else: it offers a calculator, and calls it for the model."""

import json
import re

from openai import OpenAI

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


def run(url: str, key: str, row: dict, seconds: float) -> None:
    """Asks until nothing more is called. Address and key are found by the client itself."""
    client = OpenAI(timeout=seconds)
    messages = list(row["prompt"])
    for _ in range(TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        messages += [{"role": "tool", "tool_call_id": call.id, "content": product(call)} for call in said.tool_calls]


def product(call) -> str:
    """The product that a call asks for; `?` where it asks for something else."""
    factors = re.fullmatch(r"(\d+)\*(\d+)", str(json.loads(call.function.arguments).get("expression", "")))
    if factors is None:
        return "?"
    return str(int(factors[1]) * int(factors[2]))
