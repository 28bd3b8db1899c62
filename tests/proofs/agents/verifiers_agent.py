"""Plays one row with the environment of products.py, as `verifiers` does anywhere: its endpoint is what OPENAI_BASE_URL
names. Started as a command, in a virtual environment that has verifiers; the row comes on standard input.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig

sys.path.append(str(Path(__file__).resolve().parent))
from products import ProductData, ProductTask


async def main() -> int:
    row = json.load(sys.stdin)["row"]
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    harness = vf.HarnessConfig(id="products")
    config = vf.AgentConfig(harness=harness, runtime=SubprocessConfig(), model="policy", client=client)
    task = ProductTask(ProductData(idx=0, prompt=row["prompt"][-1]["content"], answer=str(row["ground_truth"])))
    trace = await vf.make_agent(config).run(task)
    if not trace.ok:
        print(*trace.errors, sep="\n", file=sys.stderr)
    return int(not trace.ok)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
