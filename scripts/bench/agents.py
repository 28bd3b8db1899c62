"""How busy agents keep an engine: sessions of a framework, whose turns are answered by a script after a fixed time.

    python scripts/bench/agents.py [--agent FILE] [--sessions 16] [--turns 3] [--at-once 8] [--turn-s 0.5] [--json]

The endpoint, the pool of processes and all that an agent imports are real. The engine is not: it waits, as for a device
elsewhere, and takes no processor. An agent is a program, `python FILE`, that is told as every one is (JSON on standard
input, the address in its variables) and asks at least --turns times, its row's `turns`. Without FILE it is a loop of
`openai`'s client.

`busy` is the share of a step in which a request was open at the engine, from the moment the step's sessions were asked
for until the last has ended. Goal: 0.9 from the second step on. `mean_open` is how many requests the engine had at once
on average; the most are --at-once.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "scripts")]

SAID = "It is 408."
OPENAI = """import json, sys

import openai

told = json.load(sys.stdin)
client = openai.OpenAI()
messages = list(told["row"]["prompt"])
for turn in range(told["row"]["turns"]):
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "And the product of 123 and 456?"}]
"""


class ScriptedEngine:
    """Says the same to everything, after `turn_s`. Counts when a request is open."""

    def __init__(self, tokenizer: Any, turn_s: float):
        self._ids = tokenizer.encode(f"{SAID}<|im_end|>", add_special_tokens=False)
        self._turn_s = turn_s
        self._open = 0
        self._since = 0.0
        self.busy_s = 0.0
        self.asked_s = 0.0  # of all requests together

    @contextmanager
    def _counted(self):
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        now = time.perf_counter()
        self.busy_s += (now - self._since) * (self._open > 0)
        self.asked_s += (now - self._since) * self._open
        self._since = now
        self._open += more

    async def generate(self, requests, sampling):
        """Yields one answer."""
        from mrl.data.samples import Sample, packed

        (request,) = requests
        with self._counted():
            await asyncio.sleep(self._turn_s)
        given = (request.prompt_id, request.group_id, request.sample_id, request.seed, request.prompt_ids)
        yield packed([Sample(*given, self._ids, [-1.0] * len(self._ids), "stop", 1)])


def measured(options: argparse.Namespace, agent: Path) -> list[dict[str, float]]:
    """Figures of each step."""
    from make_tool_world import make_tokenizer

    from mrl.acting.tool import ToolsSpec, TurnsSpec
    from mrl.engine.conversations import Conversations
    from mrl.engine.requests import Request, Sampling

    tokenizer = make_tokenizer()
    tools = ToolsSpec((), network=True, command=(sys.executable, str(agent)))
    spec = TurnsSpec(tools, 1000, 1, 1e4, 1000, 1e3, options.at_once, max_prompt_length=10_000)
    log = agent.with_name("tools.log")
    talks = Conversations(spec, tokenizer, log)
    engine = ScriptedEngine(tokenizer, options.turn_s)
    row = {"prompt": [{"role": "user", "content": "What is 12*34?"}], "turns": options.turns}

    async def steps() -> list[dict[str, float]]:
        found = []
        for _ in range(options.steps):
            requests = [Request(i, (1,), i, row=row) for i in range(options.sessions)]
            engine.busy_s = engine.asked_s = 0.0
            began = time.perf_counter()
            made = [batch async for batch in talks.generate(engine, requests, Sampling(1.0, 100_000, ()))]
            took = time.perf_counter() - began
            turns = sum(int(each.turn_counts[0]) for each in made)
            if turns < options.turns * options.sessions:
                sys.exit(f"{turns} turns instead of {options.turns} of each session:\n{log.read_text()[-2000:]}")
            found.append(
                {
                    "seconds": round(took, 2),
                    "busy": round(engine.busy_s / took, 3),
                    "mean_open": round(engine.asked_s / took, 2),
                    "turns": turns,
                }
            )
        return found

    try:
        return asyncio.run(steps())
    finally:
        talks.close()


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", type=Path, help="a program; by default a loop of openai's client")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3, help="of a session, at least")
    parser.add_argument("--at-once", type=int, default=8, help="sessions")
    parser.add_argument("--turn-s", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        agent = options.agent
        if agent is None:
            agent = Path(folder) / "agent.py"
            agent.write_text(OPENAI)
        found = measured(options, agent.resolve())
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "steps": found}))
        return
    print("\t".join(found[0]))
    for step in found:
        print("\t".join(map(str, step.values())))


if __name__ == "__main__":
    main()
