"""Reads a rank's routes: those of its layers and tokens, cut out on the nodes where they are stored.

    rank                                              reader, a process on a node of engines
    its rows, layers, tokens of them --RouteReader--> routes of whole responses, all layers
    [its tokens, its layers, topk]  <---------------

A step's routes take hundreds of bytes a token, more than all else that engines return. A pipeline stage receives only
its layers, a context-parallel rank only its tokens. Where a rank computes all layers of all tokens, nothing is cut out
and there is no reader.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from mrl.data.routes import RoutesHere, end_to_end, missing_in, recoded
from mrl.data.samples import Samples
from mrl.process.ray_nodes import on_node
from mrl.store.response_store import ResponseStore

Readers = Mapping[str, Any]  # by node, the handle of a RouteReader


class RouteReader:
    """The process that cuts routes out on its node."""

    def read(self, layers: np.ndarray, wanted: Sequence[np.ndarray], *routes: np.ndarray | None) -> np.ndarray | None:
        """Returns the routes of the tokens `wanted` in the given layers, [tokens, layers, topk], end to end.

        Tokens of an array that is None get the value for missing routes. Returns None where all arrays are None.
        """
        known = next((each for each in routes if each is not None), None)
        if known is None:
            return None
        filled = np.full((sum(map(len, wanted)), len(layers), known.shape[2]), missing_in(known.dtype), known.dtype)
        ends = np.cumsum([len(tokens) for tokens in wanted])
        for tokens, end, each in zip(wanted, ends, routes, strict=True):
            if each is None:
                continue
            for first, run in _runs(layers):
                part = slice(first, first + run.stop - run.start)
                filled[end - len(tokens) : end, part] = recoded(each[_as_slice(tokens), run], known.dtype)
        return filled


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yields runs of consecutive values in ascending numbers: the position of each run, and the run as a slice."""
    for run in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers) != 1) + 1):
        if len(run):
            yield int(run[0]), slice(int(numbers[run[0]]), int(numbers[run[-1]]) + 1)


def _as_slice(numbers: np.ndarray) -> np.ndarray | slice:
    """Returns numbers as a slice where each follows the one before, because a slice copies faster.

    A step's rows may stand in a block in another order. So the first and last number alone do not tell.
    """
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def start_readers(nodes: Iterable[str]) -> dict[str, Any]:
    """Starts a reader on each node."""
    kind = ray.remote(RouteReader)
    return {node: kind.options(**on_node(node)).remote() for node in dict.fromkeys(nodes)}


def read_routes(
    stored: ResponseStore, blocks: Sequence[Samples], needed: np.ndarray, layers: np.ndarray, readers: Readers
) -> RoutesHere | None:
    """Returns routes of the `needed` tokens, bool [tokens], in `layers`, or None where no engine returned routes.

    `layers` int64 are columns among those that engines return. `blocks` are those of `stored`, fetched. Raises
    Interrupted when a node is gone that held some.
    """
    tokens = np.flatnonzero(needed)
    lengths = [block.lengths for block in blocks]
    of_rows, within = _within_blocks(stored, lengths)
    by_block = tokens_by_block(tokens, np.repeat(stored.block, of_rows)[tokens], len(stored.blocks))
    parts = []
    order = []
    for node, numbers in _by_node(stored).items():
        own = [by_block[number] for number in numbers]
        routes = [stored.blocks[number].routes for number in numbers]
        parts.append(_asked(stored, readers.get(node), layers, [within[each] for each in own], routes))
        order.append(np.concatenate(own))
    fetched = [stored.fetched([part])[0] if pending else part for part, pending in parts]
    if all(part is None for part in fetched):
        return None
    return _together(len(needed), order, fetched)


def tokens_by_block(tokens: np.ndarray, block_of_token: np.ndarray, blocks: int) -> list[np.ndarray]:
    """Divides `tokens` among their blocks, in order. `block_of_token` is int64, as long as `tokens`.

    All are sorted once. Otherwise each of a step's thousands of blocks would search through millions of tokens.
    """
    order = np.argsort(block_of_token, kind="stable")
    return np.split(tokens[order], np.searchsorted(block_of_token[order], np.arange(1, blocks)))


def _by_node(stored: ResponseStore) -> dict[str, list[int]]:
    """Returns the numbers of blocks that have routes, by node."""
    found: dict[str, list[int]] = {}
    for number, block in enumerate(stored.blocks):
        if block.routes is not None:
            found.setdefault(block.node, []).append(number)
    return found


def _asked(
    stored: ResponseStore, reader: Any, layers: np.ndarray, wanted: list[np.ndarray], routes: list[Any]
) -> tuple[Any, bool]:
    """Returns routes of one node's blocks, and whether they are a reference. Without a reader they are cut out here."""
    if reader is not None:
        return reader.read.remote(layers, wanted, *routes), True
    return RouteReader().read(layers, wanted, *stored.fetched(routes)), False


def _together(size: int, order: list[np.ndarray], parts: list[np.ndarray | None]) -> RoutesHere:
    """Joins parts of several nodes. Each has the routes of the tokens in `order`."""
    known = [(tokens, part) for tokens, part in zip(order, parts, strict=True) if part is not None]
    value_rows = np.full(size, -1, np.int64)
    value_rows[np.concatenate([tokens for tokens, _ in known])] = np.arange(sum(len(tokens) for tokens, _ in known))
    return RoutesHere(value_rows, known[0][1] if len(known) == 1 else end_to_end([part for _, part in known]))


def _within_blocks(stored: ResponseStore, lengths: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of each row, int64 [rows], and each token's position in its block, int64 [tokens].

    `lengths` are those of each block's rows.
    """
    starts = [np.cumsum(each) - each for each in lengths]
    rows = list(zip(stored.block.tolist(), stored.block_row.tolist(), strict=True))
    own = np.array([lengths[block][row] for block, row in rows], np.int64)
    first = np.array([starts[block][row] for block, row in rows], np.int64)
    ends = np.cumsum(own)
    return own, np.repeat(first - (ends - own), own) + np.arange(int(ends[-1]))
