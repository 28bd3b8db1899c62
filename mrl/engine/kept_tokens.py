"""Continues responses, in an engine's process, from tokens that were generated earlier, maybe by another engine.

    kept row, fetched by reference --> request: prompt and kept tokens, what they may add, a seed of its own
    what the engine adds           --> one row again

Log-probs, versions and routes of kept tokens stay as they were.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mrl.data.samples import Samples, row_images
from mrl.engine.requests import Request
from mrl.schedule.segments import continuation, joined
from mrl.store.response_store import ResponseBlock


async def fetched(kept: Mapping[int, tuple[ResponseBlock, int]]) -> dict[int, Samples]:
    """Fetches one row a sample_id, under that id, from references to blocks and rows in them."""
    wanted = list({block for block, _ in kept.values()})
    blocks = dict(zip(wanted, await asyncio.gather(*map(_whole, wanted)), strict=True))
    rows = {number: blocks[block].rows(slice(row, row + 1)) for number, (block, row) in kept.items()}
    return {number: replace(row, sample_id=np.array([number])) for number, row in rows.items()}


async def _whole(block: ResponseBlock) -> Samples:
    samples = await block.samples
    if block.routes is None:
        return samples
    return replace(samples, routes=await block.routes)


def going_on(request: Request, kept: Samples | None) -> Request:
    """Appends the kept tokens, with images among them, to the request's prompt. `max_tokens` then limits the tokens
    that it may add.
    """
    if kept is None:
        return request
    more = continuation(kept, 0, request.max_tokens)
    images = row_images(kept, 0)
    return replace(request, prompt_ids=tuple(more.prompt_ids.tolist()), seed=more.seed, images=images)


def with_kept(kept: Mapping[int, Samples], batch: Samples) -> Samples:
    """Joins each row of `batch` to what was kept of it."""
    if not kept:
        return batch
    rows = (batch.rows(slice(i, i + 1)) for i in range(len(batch)))
    return Samples.joined(
        [joined(kept[number], row) if (number := int(row.sample_id[0])) in kept else row for row in rows]
    )
