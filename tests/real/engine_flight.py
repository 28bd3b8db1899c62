"""A real VllmEngine whose weights change under requests, then fresh ones of each version: `engine_flight.py JOB.json`.

Border 1 is a pause under which requests are held, border 2 one at which they are given back and sent again, behind
their tokens.
"""

import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import vllm.envs

from mrl.data.samples import Samples
from mrl.engine import engine_scheduler
from mrl.engine.requests import EngineSettings, Request, Sampling
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import Interrupted
from mrl.schedule.segments import continuation, continuation_seed, joined

LENGTH, BORDERS = 160, (30, 80)  # tokens of a response, and of all before each pause at least
SAMPLED = [Request(i, tuple(3 + (7 * i + j) % 100 for j in range(3 + i % 9)), 1000 + i, handle=i) for i in range(8)]
GREEDY = [
    replace(request, sample_id=100 + request.sample_id, handle=100 + request.sample_id) for request in SAMPLED[:4]
]
TEMPERATURE = {True: 1.0, False: 0.0}  # by whether it is sampled
LONG_PROMPT = tuple(3 + i % 100 for i in range(150))


def sampling_of(request: Request) -> Sampling:
    return Sampling(TEMPERATURE[request.sample_id < 100], LENGTH, ())


async def responses(engine: VllmEngine, requests: list[Request]) -> Samples:
    """Of sampled and greedy requests at once, in the order of their ids."""

    async def some(sampled: bool) -> list[Samples]:
        own = [request for request in requests if (request.sample_id < 100) == sampled]
        return [batch async for batch in engine.generate(own, sampling_of(own[0]))] if own else []

    sampled, greedy = await asyncio.gather(some(True), some(False))
    found = Samples.joined([*sampled, *greedy])
    return found.rows(np.argsort(found.sample_id))


async def bring(engine: VllmEngine, folder: str) -> None:
    """A checkpoint's weights, through vLLM's own loader."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    await engine.begin_update()
    await engine.load_bucket(np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest())
    await engine.finish_update()


async def until_each_has(engine: VllmEngine, count: int, tokens: int) -> None:
    """Waits until as many requests as `count` have so many tokens each."""
    for _ in range(20_000):
        states = engine._calls.llm.output_processor.request_states.values()
        if len(states) == count and min(state.detokenizer.num_output_tokens() for state in states) >= tokens:
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


async def fly(engine: VllmEngine, models: list[str]) -> Samples:
    """All requests, begun by version 0, held over version 1, given back and sent again to version 2."""
    requests = [*SAMPLED, *GREEDY]
    asked = asyncio.create_task(responses(engine, requests))
    await until_each_has(engine, len(requests), BORDERS[0])
    assert await engine.pause_for_update(give_back=False) is False
    await bring(engine, models[1])
    assert (await engine.commit(1)).stale_tokens == 0
    await until_each_has(engine, len(requests), BORDERS[1])
    assert await engine.pause_for_update(give_back=True) is True
    kept = await asked
    await bring(engine, models[2])
    assert (await engine.commit(2)).stale_tokens == 0
    rows = [continuation(kept, i, LENGTH - int(kept.response_lengths[i])) for i in range(len(kept))]
    again = [
        replace(request, prompt_ids=tuple(row.prompt_ids.tolist()), seed=row.seed, max_tokens=row.max_tokens)
        for request, row in zip(requests, rows, strict=True)
    ]
    return joined(kept, await responses(engine, again))


def told(samples: Samples) -> list[dict]:
    """Each response with its spans: [first token, version]."""
    probs = np.split(samples.rollout_log_probs, np.cumsum(samples.response_lengths)[:-1])
    spans = np.split(np.stack([samples.span_starts, samples.span_versions], 1), np.cumsum(samples.span_counts)[:-1])
    rows = zip(samples.sample_id.tolist(), samples.prompts(), samples.responses(), probs, spans, strict=True)
    names = ("prompt", "tokens", "log_probs", "spans")
    return [
        {"id": number, **{name: each.tolist() for name, each in zip(names, row, strict=True)}} for number, *row in rows
    ]


async def made_again(engine: VllmEngine, flown: list[dict], version: int) -> list[dict]:
    """The spans of one version by a fresh engine, as far as seeds allow.

    Where a sampled request was held its random stream went on in its engine.
    """
    asked, places = [], []
    for one in flown:
        ends = [start for start, _ in one["spans"][1:]] + [len(one["tokens"])]
        for (start, made_by), end in zip(one["spans"], ends, strict=True):
            sampled = one["id"] < 100
            if made_by == version and not (sampled and version == 1):
                prompt = tuple(one["prompt"] + one["tokens"][:start])
                seed = continuation_seed(SAMPLED[one["id"] % 100].seed, start)
                asked.append(Request(one["id"], prompt, seed, max_tokens=end - start))
                places.append({"id": one["id"], "start": start, "end": end})
    found = {one["id"]: one for one in told(await responses(engine, asked))}
    return [place | {name: found[place["id"]][name] for name in ("tokens", "log_probs")} for place in places]


async def stale_tokens(engine: VllmEngine, models: list[str], cleared: bool) -> int:
    """Of a version after one whose cache was emptied, or was not."""
    prompt = [Request(1, LONG_PROMPT, 1, max_tokens=4)]
    await responses(engine, prompt)
    if not cleared:
        engine._scheduler.drop_cache = _nothing
    await bring(engine, models[0])
    await engine.commit(engine._newest + 1)
    vars(engine._scheduler).pop("drop_cache", None)
    await responses(engine, prompt)
    await bring(engine, models[2])
    return (await engine.commit(engine._newest + 1)).stale_tokens


async def _nothing() -> None:
    pass


async def kept_with_its_cache(engine: VllmEngine, models: list[str]) -> str:
    """What becomes of a pause that lets requests keep what old weights computed."""
    llm, engine_scheduler.DROP_S = engine._calls.llm, 0.5
    real = llm.pause_generation
    llm.pause_generation = lambda mode, clear_cache: real(mode=mode, clear_cache=False)
    asked = asyncio.create_task(responses(engine, SAMPLED))
    await until_each_has(engine, len(SAMPLED), 5)
    await engine.pause()
    await bring(engine, models[0])
    try:
        await engine.commit(engine._newest + 1)
    except Interrupted as refused:
        return str(refused)
    finally:
        asked.cancel()
    return ""


def settings_of(job: dict, model: str) -> EngineSettings:
    """Of an engine that starts from the folder."""
    expected = tuple((name, tuple(shape)) for name, shape in job["expected"])
    file = str(Path(tempfile.mkdtemp()) / "segments")
    return EngineSettings(0, job["arguments"] | {"model": model}, False, job["vocab_size"], expected, file)


async def with_engine(job: dict, model: str, use: Callable) -> object:
    """What `use` gives for a fresh engine."""
    vllm.envs.disable_envs_cache()  # switched on by the first engine here; each has a folder for sockets of its own
    engine = VllmEngine(settings_of(job, model))
    try:
        await engine.start()
        return await use(engine)
    finally:
        await engine.stop()


async def main(job: dict) -> dict:
    models, found = job["models"], {}

    async def flight(engine: VllmEngine) -> None:
        found["undisturbed"] = told(await responses(engine, [*SAMPLED, *GREEDY]))
        found["flown"] = told(await fly(engine, models))
        found["block"] = engine._prefixes.block
        found["stale"] = [await stale_tokens(engine, models, cleared) for cleared in (True, False)]
        found["kept_cache"] = await kept_with_its_cache(engine, models)

    await with_engine(job, models[0], flight)
    found["again"] = {
        version: await with_engine(job, models[version], lambda e, v=version: made_again(e, found["flown"], v))
        for version in (1, 2)
    }
    return found


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.with_suffix(".out").write_text(json.dumps(asyncio.run(main(json.loads(file.read_text())))))
