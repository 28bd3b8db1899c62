"""One real vLLM engine that drafts: `python engine_drafts.py JOB.json`. See test_engine_drafts.

The job has the configuration and the requests; what it writes has tokens, log-probs, routes and counts of drafts.
"""

import asyncio
import json
import sys
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.data.samples import Samples
from mrl.engine.requests import Request, engine_settings, training_sampling
from mrl.engine.vllm_engine import VllmEngine
from mrl.model import load_model_spec


async def main(job: dict, out: Path) -> None:
    config = RunConfig.model_validate(job["config"])
    sampling = training_sampling(config.rollout, config.data, config.actor, config.model.path)
    engine = VllmEngine(engine_settings(config, load_model_spec(config.model.path), 0, out.parent))
    requests = [Request(number, tuple(prompt), number) for number, prompt in enumerate(job["prompts"])]
    try:
        await engine.start()
        rounds = []
        for order in (requests, requests[::-1]):
            found = Samples.joined([batch async for batch in engine.generate(order, sampling)])
            by_sample = {}
            for row in range(len(found)):
                one = found.rows(slice(row, row + 1))
                (response,) = one.responses()
                by_sample[int(one.sample_id[0])] = (
                    response.tolist(),
                    one.rollout_log_probs.tolist(),
                    one.routes.tolist(),
                )
            rounds.append([by_sample[number] for number in range(len(requests))])
        drafts = engine._cache.drafts
    finally:
        await engine.stop()
    counts = {"steps": drafts.steps, "drafted": drafts.drafted, "accepted": drafts.accepted}
    out.write_text(json.dumps({"rounds": rounds, "drafts": counts}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).with_suffix(".out")))
