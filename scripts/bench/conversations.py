"""What conversations with tools cost beside their generation: one engine, tools that take a while, and nothing else.

    python scripts/bench/conversations.py [--conversations 64] [--turns 4] [--slots 16] [--rounds 3] [--json]

The same turns, by their seeds, are made in four ways, each from an empty cache, one after the other in each round:

    alone       each turn as soon as the one before has ended; no tool
    talked      by mrl.engine.conversations: while tools of one work, the engine samples others
    lock-step   all conversations' turns, then all their tools, then all next turns
    one         a single conversation, talked

`over`: what `talked` takes, less `one`, over the larger of `alone` and the longest chain of tools. Goal: at most 1.15.
`recomputed` is, of any request, prompt tokens that were computed and not new, in blocks of the cache; goal: at most 1.
A turn is new from the last token that was sampled on. Medians of all rounds; ids of all ways are compared.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "scripts")]

PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
TAKES_S = (0.0, 0.2, 1.0)  # a call
POSITIONS = 2048
STOPS = "0123"  # beside the end of a turn: a random model says one of the five in some 25 tokens
TOOL = '''import time


def wait() -> str:
    """Waits."""
    time.sleep({})
    return "408"
'''


class Counted:
    """An engine, with what its cache had of each request."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._asked: dict[str, tuple[int, ...]] = {}
        self.read: list[tuple[tuple[int, ...], int]] = []  # prompts, and how many of their tokens the cache had
        prefixes = engine._prefixes
        enter = prefixes.enter
        leave = prefixes.leave

        def entered(name: str, prompt_ids: Sequence[int]) -> None:
            self._asked[name] = tuple(prompt_ids)
            enter(name, prompt_ids)

        def left(name: str, *ended: Any) -> None:
            if ended:
                self.read.append((self._asked.pop(name), ended[1]))
            leave(name, *ended)

        prefixes.enter = entered
        prefixes.leave = left
        self.block = prefixes.block

    async def generate(self, requests: Sequence[Any], sampling: Any) -> AsyncIterator[Any]:
        """As the engine's."""
        async for batch in self._engine.generate(list(requests), sampling):
            yield batch

    async def forget(self) -> None:
        """Empties the cache."""
        await self._engine._scheduler.drop_cache()


class Bench:
    """The conversations of one engine."""

    def __init__(self, engine: Counted, tokenizer: Any, options: argparse.Namespace):
        from make_tool_world import PROMPT

        from mrl.engine.requests import Request, Sampling

        self._engine = engine
        self._tokenizer = tokenizer
        self._turns = options.turns
        stops = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(STOPS))]
        self._sampling = Sampling(1.0, POSITIONS // 2, tuple(stops))
        prompts = (PROMPT.format(100 + i, 900 - i) for i in range(options.conversations))
        ids = [tuple(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
        self.requests = [Request(i, prompt, 1000 + i, prompt_id=i) for i, prompt in enumerate(ids)]
        self._slots = options.slots
        self.rows: dict[int, Any] = {}  # of the conversations, by number, once they have been talked
        self.recomputed = 0  # tokens, the most of any request

    @asynccontextmanager
    async def talks(self, folder: Path, takes_s: float) -> AsyncIterator[Any]:
        """Conversations whose tool takes so long, with a process for each of them."""
        from mrl.acting.tool import ToolsSpec, TurnsSpec
        from mrl.engine.conversations import Conversations
        from mrl.tools.rehearse.made_up_calls import MadeUpCalls

        file = folder / f"tool-{takes_s}.py"
        file.write_text(TOOL.format(takes_s))
        spec = TurnsSpec(ToolsSpec(("wait",), str(file)), self._turns, 1, 1e4, 100, 100.0, len(self.requests))
        talks = Conversations(spec, self._tokenizer, slots=self._slots, reader=MadeUpCalls)
        try:
            yield talks
        finally:
            talks.close()

    async def talked(self, talks: Any, requests: Sequence[Any]) -> None:
        """Has conversations, and holds them against those before."""
        async for made in talks.generate(self._engine, requests, self._sampling):
            number = int(made.sample_id[0])
            known = self.rows.setdefault(number, made)
            assert made.turn_counts[0] == self._turns, "a conversation ended early"
            assert made.token_ids.tolist() == known.token_ids.tolist(), "other tokens than before"

    def turns_of(self, number: int) -> list[tuple[Any, list[int]]]:
        """Of a conversation that was talked, each turn's request, and what is sampled for it."""
        from dataclasses import replace

        from mrl.schedule.segments import continuation_seed

        row = self.rows[number]
        prompt = int(row.prompt_lengths[0])
        ids = row.token_ids.tolist()
        starts = [*row.turn_starts.tolist(), int(row.response_lengths[0])]
        found = []
        for start, end in pairwise(starts):
            begin = start + int(row.sampled[start:end].argmax())  # behind the context that the turn begins with
            end = begin + int(row.sampled[begin:end].sum())
            request = self.requests[number]
            asked = replace(
                request, prompt_ids=tuple(ids[: prompt + begin]), seed=continuation_seed(request.seed, begin)
            )
            found.append((asked, ids[prompt + begin : prompt + end]))
        return found

    async def turn(self, asked: Any, expected: list[int]) -> None:
        """Makes one turn again."""
        (made,) = [batch async for batch in self._engine.generate([asked], self._sampling)]
        (response,) = made.responses()
        assert response.tolist() == expected, "other tokens than in the conversation"

    async def alone(self) -> None:
        """All turns, without tools."""

        async def chain(number: int) -> None:
            for asked, expected in self.turns_of(number):
                await self.turn(asked, expected)

        await asyncio.gather(*map(chain, self.rows))

    async def lock_step(self, talks: Any) -> None:
        """All turns, tools between them."""
        turns = [self.turns_of(number) for number in self.rows]
        for number, each in enumerate(zip(*turns, strict=True)):
            await asyncio.gather(*(self.turn(asked, expected) for asked, expected in each))
            if number < self._turns - 1:
                calls = [talks._pool.call("wait", {}) for _ in each]
                await asyncio.gather(*map(asyncio.wrap_future, calls))

    async def timed(self, way: Callable[[], Awaitable[None]]) -> float:
        """Seconds of one way, from an empty cache."""
        await self._engine.forget()
        self._engine.read = []
        began = time.perf_counter()
        await way()
        return time.perf_counter() - began

    def count_recomputed(self) -> None:
        """Notes what the newest way computed though an earlier turn of the conversation had."""
        new = {}
        for number in self.rows:
            turns = self.turns_of(number)
            first = turns[0][0].prompt_ids
            new[first] = len(first)
            for (before, said), (asked, _) in pairwise(turns):
                new[asked.prompt_ids] = len(asked.prompt_ids) - len(before.prompt_ids) - len(said) + 1
        for prompt, cached in self._engine.read:
            self.recomputed = max(self.recomputed, len(prompt) - cached - new[prompt])


async def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures of all rounds."""
    from make_tiny_world import make_model
    from make_tool_world import make_tokenizer, write_model

    from mrl.config.load import load_config
    from mrl.engine.requests import engine_settings
    from mrl.engine.vllm_engine import VllmEngine
    from mrl.model import load_model_spec

    tokenizer = make_tokenizer()
    tokenizer.model_max_length = POSITIONS
    write_model(make_model(0, POSITIONS), tokenizer, folder / "model")
    given = {"model.path": folder / "model", "data.max_prompt_length": 64, "rollout.max_num_seqs": options.slots,
             "data.max_response_length": POSITIONS - 64}  # fmt: skip
    config = load_config(PRESET, None, [f"{key}={value}" for key, value in given.items()]).config
    engine = VllmEngine(engine_settings(config, load_model_spec(config.model.path), 0, folder))
    await engine.start()
    try:
        return await figures(Bench(Counted(engine), tokenizer, options), folder, options)
    finally:
        await engine.stop()


async def figures(bench: Bench, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Of an engine that is there."""
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for takes_s in TAKES_S:
            async with bench.talks(folder, takes_s) as talks:
                await bench.talked(talks, bench.requests)  # which starts the processes of tools, and warms up
                ways: dict[str, Callable[[], Awaitable[None]]] = {
                    "alone": bench.alone,
                    "talked": lambda talks=talks: bench.talked(talks, bench.requests),
                    "lock_step": lambda talks=talks: bench.lock_step(talks),
                    "one": lambda talks=talks: bench.talked(talks, bench.requests[:1]),
                }
                for name, way in ways.items():
                    took = await bench.timed(way)
                    if name == "talked":
                        bench.count_recomputed()
                    found.setdefault(f"{name} {takes_s}", []).append(took)
    return summary(bench, {name: statistics.median(times) for name, times in found.items()}, options)


def summary(bench: Bench, took: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    """What is stored."""
    tools = {}
    for takes_s in TAKES_S:
        ways = {name: took[f"{name} {takes_s}"] for name in ("alone", "talked", "lock_step", "one")}
        most = max(ways["alone"], takes_s * (options.turns - 1))
        tools[str(takes_s)] = {f"{name}_s": round(seconds, 3) for name, seconds in ways.items()} | {
            "over": round((ways["talked"] - ways["one"]) / most, 3),
            "lock_step_over": round((ways["lock_step"] - ways["one"]) / most, 3),
        }
    sampled = [int(row.sampled_lengths[0]) for row in bench.rows.values()]
    return {
        "conversations": options.conversations,
        "turns": options.turns,
        "slots": options.slots,
        "rounds": options.rounds,
        "sampled_tokens": sum(sampled),
        "tools": tools,
        "block_tokens": bench._engine.block,
        "recomputed_tokens": bench.recomputed,
        "recomputed": round(bench.recomputed / bench._engine.block, 3),
    }


def inside(options: argparse.Namespace) -> None:
    """Measures in a process that has an engine's environment."""
    with TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measured(options, Path(folder)))))


def started(arguments: list[str]) -> dict[str, Any]:
    """The figures, from a process of its own."""
    from mrl.platforms.hosting import get_hosting

    environment = os.environ | get_hosting("cpu").engine_environment(0, 1, 1, 1) | {
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "--inside", *arguments], env=environment, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return
    result = started(sys.argv[1:])
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'tool':>6} {'alone':>8} {'talked':>8} {'over':>6} {'lock-step':>9} {'over':>6} {'one':>8}   seconds")
    for takes_s, row in result["tools"].items():
        print(
            f"{takes_s:>6} {row['alone_s']:8.2f} {row['talked_s']:8.2f} {row['over']:6.2f} {row['lock_step_s']:9.2f} "
            f"{row['lock_step_over']:6.2f} {row['one_s']:8.2f}"
        )
    print(f"recomputed, of any request: {result['recomputed_tokens']} tokens, {result['recomputed']} blocks")


if __name__ == "__main__":
    main()
