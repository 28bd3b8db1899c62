"""What the chat endpoint costs: agents that ask at once, an engine that answers at once, and nothing else.

python scripts/bench/endpoint.py [--sessions 64] [--turns 4] [--json]

`cpu_ms` is of the endpoint's process, a turn: reading the request, finding what of it is kept, tokens of what is new,
the row, the answer. `slowest_over_median` is of equal requests, turn by turn, the worst of them. Goals: 5 ms, and 10.
"""

import argparse
import asyncio
import http.client
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "scripts")]

SAID = "It is 408."
ASKED = "And the product of 123 and 456, which is not much larger?"
PATH = "/v1/chat/completions"
_PRINTING = threading.Lock()


class Engine:
    """Answers at once, always the same."""

    def __init__(self, tokenizer):
        self._ids = tokenizer.encode(f"{SAID}<|im_end|>", add_special_tokens=False)

    async def generate(self, requests, sampling):
        """Yields one answer."""
        from mrl.data.samples import Sample, packed

        (request,) = requests
        given = (request.prompt_id, request.group_id, request.sample_id, request.seed, request.prompt_ids)
        yield packed([Sample(*given, self._ids, [-1.0] * len(self._ids), "stop", 1)])


class Clients:
    """Stands in the place of the pool of processes: all agents are threads of one other process."""

    def __init__(self, *_, **__):
        from mrl.acting.offer import Offer

        self.offer = Offer((), agent=True)
        self.turns = 0
        self.waited: list[list[float]] = []  # of each session, by turn
        self._ends: dict[str, Future] = {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--clients"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, name, told) -> Future:
        """Starts a client."""
        end = self._ends[told["key"]] = Future()
        end.set_running_or_notify_cancel()
        self._process.stdin.write(json.dumps({"url": told["url"], "key": told["key"], "turns": self.turns}) + "\n")
        self._process.stdin.flush()
        return end

    def _listen(self) -> None:
        from mrl.acting.environment_pool import CallAnswer

        for line in self._process.stdout:
            ended = json.loads(line)
            self.waited.append(ended["waited"])
            self._ends.pop(ended["key"]).set_result(CallAnswer("ok", ""))

    def log(self, line: str) -> None:
        """Says what went wrong."""
        print(line, file=sys.stderr)

    def close(self) -> None:
        """Ends the clients."""
        self._process.stdin.close()
        self._process.wait(10)


def clients() -> None:
    """The other process: a thread a line of standard input."""
    threads = []
    for line in sys.stdin:
        threads.append(threading.Thread(target=_client, args=(json.loads(line),)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _client(told: dict) -> None:
    connection = http.client.HTTPConnection(told["url"].removeprefix("http://"), timeout=120)
    headers = {"Authorization": f"Bearer {told['key']}", "Content-Type": "application/json"}
    messages = []
    waited = []
    for _ in range(told["turns"]):
        messages.append({"role": "user", "content": ASKED})
        body = json.dumps({"model": "m", "messages": messages})
        began = time.perf_counter()
        connection.request("POST", PATH, body, headers)
        answer = json.loads(connection.getresponse().read())
        waited.append(time.perf_counter() - began)
        messages.append(answer["choices"][0]["message"])
    with _PRINTING:
        print(json.dumps({"key": told["key"], "waited": waited}), flush=True)


def measured(sessions: int, turns: int) -> dict[str, float]:
    """Figures of so many sessions at once."""
    from make_tool_world import make_tokenizer

    from mrl.acting.tool import ToolsSpec, TurnsSpec
    from mrl.engine.conversations import Conversations
    from mrl.engine.requests import Request, Sampling

    tokenizer = make_tokenizer()
    tools = ToolsSpec((), command=("none",))
    spec = TurnsSpec(tools, turns + 1, 1, 1e4, 1000, 1e3, sessions, max_prompt_length=1000)
    with patch("mrl.engine.conversations.EnvironmentPool", Clients):
        talks = Conversations(spec, tokenizer)
    talks._pool.turns = turns
    engine = Engine(tokenizer)
    sampling = Sampling(1.0, 100_000, ())

    async def run() -> float:
        """CPU seconds of the second half: imports and caches are of the first."""
        spent = []
        for _ in range(2):
            requests = [Request(i, (1,), i, row={"prompt": []}) for i in range(sessions)]
            before = resource.getrusage(resource.RUSAGE_SELF)
            talks._pool.waited = []
            made = [batch async for batch in talks.generate(engine, requests, sampling)]
            after = resource.getrusage(resource.RUSAGE_SELF)
            assert all(batch.turn_counts[0] == turns for batch in made)
            spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return spent[-1]

    seconds = asyncio.run(run())
    waited = talks._pool.waited
    talks.close()
    by_turn = list(zip(*waited, strict=True))
    worst = max(max(each) / statistics.median(each) for each in by_turn)
    return {
        "cpu_ms": 1000 * seconds / (sessions * turns),
        "median_ms": 1000 * statistics.median(each for times in waited for each in times),
        "slowest_over_median": worst,
    }


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clients:
        clients()
        return
    result = measured(args.sessions, args.turns)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value:8.2f}")


if __name__ == "__main__":
    main()
