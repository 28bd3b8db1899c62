"""One real vLLM engine that is asked for its routes: `python engine_routes.py CONFIG.json OUT.npz`.

See test_engine_routes.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from mrl.config.schema import RunConfig
from mrl.data.samples import Samples
from mrl.engine.requests import Request, engine_settings, training_sampling, validation_sampling
from mrl.engine.vllm_engine import VllmEngine
from mrl.model import load_model_spec

LONG = 200  # tokens of a prompt that fills a block of the prefix cache


async def main(config: RunConfig, out: Path) -> None:
    rng = np.random.default_rng(5)
    vocab = 127
    sampling = training_sampling(config.rollout, config.data, config.actor, config.model.path)
    engine = VllmEngine(engine_settings(config, load_model_spec(config.model.path), 0, out.parent))
    short = [Request(i, tuple(rng.integers(1, vocab, 3 + 4 * i).tolist()), i) for i in range(8)]
    long = tuple(rng.integers(1, vocab, LONG).tolist())
    try:
        await engine.start()
        found: list[Samples] = []
        for requests in (short, [Request(8, long, 8)], [Request(9, long, 9)]):
            async for batch in engine.generate(requests, sampling):
                found += [batch.rows(slice(row, row + 1)) for row in range(len(batch))]
        async for batch in engine.generate(
            short[:1], validation_sampling(config.rollout, config.data, config.model.path)
        ):
            assert batch.routes is None
    finally:
        await engine.stop()
    arrays = {}
    for one in found:
        arrays[f"ids-{one.sample_id[0]}"] = one.token_ids.astype(np.int64)
        arrays[f"routes-{one.sample_id[0]}"] = one.routes
    np.savez(out, **arrays)


if __name__ == "__main__":
    asyncio.run(main(RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2])))
