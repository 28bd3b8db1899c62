"""A real VllmEngine whose KV cache is too small for what it is asked: `engine_pressure.py JOB.json`."""

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from engine_flight import settings_of

from mrl.engine.requests import Request, Sampling
from mrl.engine.vllm_engine import VllmEngine

ASKED = 16


async def main(job: dict) -> list[dict]:
    """The engine's meters before it is asked anything, after one request, and after many at once."""
    engine = VllmEngine(settings_of(job, job["model"]))
    try:
        await engine.start()
        found = [asdict(engine.reading)]
        for count in (1, ASKED):
            began = time.monotonic()
            requests = [Request(i, (3 + i, 4, 5), i) for i in range(count)]
            made = [batch.response_lengths.sum() async for batch in engine.generate(requests, Sampling(1.0, 200, ()))]
            found.append(asdict(engine.reading) | {"asked": int(sum(made)), "seconds": time.monotonic() - began})
        return found
    finally:
        await engine.stop()


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.with_suffix(".out").write_text(json.dumps(asyncio.run(main(json.loads(file.read_text())))))
