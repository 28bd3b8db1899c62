"""Routes of a rank: its layers, of the tokens that it computes, cut out on the nodes where they lie.

    rank                                              reader, a process on a node of engines
    its rows, layers, tokens of them --RouteReader--> routes of whole responses, all layers
    [its tokens, its layers, topk]  <---------------

Hundreds of bytes a token, a step's routes are by far the largest of what engines hand on. A pipeline stage needs its
part of the layers, a context-parallel rank its part of the tokens, and neither receives anything else. Where a rank
computes all layers of all tokens there is nothing to cut out, and no reader.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from mrl.data.routes import RoutesHere, end_to_end, missing_in, recoded
from mrl.data.samples import Samples
from mrl.flow.response_store import ResponseStore
from mrl.remote.helper_actors import on_node

Readers = Mapping[str, Any]  # by node, the handle of a RouteReader


class RouteReader:
    """The process."""

    def read(self, layers: np.ndarray, wanted: Sequence[np.ndarray], *routes: np.ndarray | None) -> np.ndarray | None:
        """[tokens, layers, topk], end to end: of each array of routes the given layers of the tokens `wanted`.

        Missing ones of an array that is None; None where all are.
        """
        known = next((each for each in routes if each is not None), None)
        if known is None:
            return None
        filled = np.full((sum(map(len, wanted)), len(layers), known.shape[2]), missing_in(known.dtype), known.dtype)
        ends = np.cumsum([len(tokens) for tokens in wanted])
        for tokens, end, each in zip(wanted, ends, routes, strict=True):
            for first, run in _runs(layers) if each is not None else ():
                part = slice(first, first + run.stop - run.start)
                filled[end - len(tokens) : end, part] = recoded(each[_as_slice(tokens), run], known.dtype)
        return filled


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Consecutive ones among ascending numbers: where each run begins, and the run."""
    for run in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers) != 1) + 1):
        if len(run):
            yield int(run[0]), slice(int(numbers[run[0]]), int(numbers[run[-1]]) + 1)


def _as_slice(numbers: np.ndarray) -> np.ndarray | slice:
    """Ascending numbers as a slice where they are consecutive: copied at once."""
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def start_readers(nodes: Iterable[str]) -> dict[str, Any]:
    """A reader on each node."""
    kind = ray.remote(RouteReader)
    return {node: kind.options(**on_node(node)).remote() for node in dict.fromkeys(nodes)}


def read_routes(
    stored: ResponseStore, blocks: Sequence[Samples], needed: np.ndarray, layers: np.ndarray, readers: Readers
) -> RoutesHere | None:
    """Routes of `needed`, bool [tokens], in `layers`, int64: columns among those that an engine tells of.

    `blocks`: those of `stored`, as they were fetched. None where no engine told of any. Raises Interrupted when the
    node is gone that held some.
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
    """Deals `tokens` to their blocks, in their order; `block_of_token`: int64, as long as `tokens`.

    All of them are sorted once: a step has thousands of blocks, and each would look through millions of tokens.
    """
    order = np.argsort(block_of_token, kind="stable")
    return np.split(tokens[order], np.searchsorted(block_of_token[order], np.arange(1, blocks)))


def _by_node(stored: ResponseStore) -> dict[str, list[int]]:
    """Numbers of blocks that have routes."""
    found: dict[str, list[int]] = {}
    for number, block in enumerate(stored.blocks):
        if block.routes is not None:
            found.setdefault(block.node, []).append(number)
    return found


def _asked(
    stored: ResponseStore, reader: Any, layers: np.ndarray, wanted: list[np.ndarray], routes: list[Any]
) -> tuple[Any, bool]:
    """Routes of blocks of one node, and whether they are a reference; without a reader there they are cut out here."""
    if reader is not None:
        return reader.read.remote(layers, wanted, *routes), True
    return RouteReader().read(layers, wanted, *stored.fetched(routes)), False


def _together(size: int, order: list[np.ndarray], parts: list[np.ndarray | None]) -> RoutesHere:
    """Parts of several nodes, each the routes of the tokens in `order`."""
    known = [(tokens, part) for tokens, part in zip(order, parts, strict=True) if part is not None]
    places = np.full(size, -1, np.int64)
    places[np.concatenate([tokens for tokens, _ in known])] = np.arange(sum(len(tokens) for tokens, _ in known))
    return RoutesHere(places, known[0][1] if len(known) == 1 else end_to_end([part for _, part in known]))


def _within_blocks(stored: ResponseStore, lengths: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [rows]: tokens of each. int64 [tokens]: place of each among the tokens of its block.

    `lengths`: of the rows of each block.
    """
    starts = [np.cumsum(each) - each for each in lengths]
    places = list(zip(stored.block.tolist(), stored.place.tolist(), strict=True))
    own = np.array([lengths[block][place] for block, place in places], np.int64)
    first = np.array([starts[block][place] for block, place in places], np.int64)
    ends = np.cumsum(own)
    return own, np.repeat(first - (ends - own), own) + np.arange(int(ends[-1]))
