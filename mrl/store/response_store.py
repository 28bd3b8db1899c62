"""Stores responses in the object store of the node where they were generated. The driver holds numbers and references.

    engine's process            object store of its node            driver                       rank
    Samples, as they finish --> blocks: a few short responses, <--- ResponseStore: SampleRows,   its rows' ResponseStore
                                or one long one                     block and its row of each row --read--> Samples
                                beside each its routes                                           --routes.py--> layers

A long response is a block of its own, so a rank that needs it receives nothing else with it. Routes take hundreds of
bytes a token. They are a separate object beside their block, so that readers of tokens fetch no routes. Ray moves
blocks between nodes. It spills them to disk when a store is full. It deletes a block with its last reference.

An engine returns a block as one value of a call. So the driver owns it, and it outlives the engine's process.
References that an engine made with ray.put and returned inside a value were lost: Ray 2.60 forgot that the driver had
borrowed them. Ray would copy values of up to 100 KB into the driver's memory. `SMALL_OBJECTS` in the engine's process
lowers that limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from mrl.data.samples import SampleRows, Samples
from mrl.errors import Interrupted

_FIRST = np.zeros(1, np.int64)  # one array for all rows that are the first of their block
_FIRST.flags.writeable = False
BLOCK_BYTES = 16 * 1024  # responses that are reported together share a block up to this size
SMALL_OBJECTS = {"RAY_max_direct_call_object_size": "1024"}  # bytes; larger values stay where they are made


def in_blocks(batches: Sequence[Samples]) -> list[Samples]:
    """Cuts batches into blocks, each of which becomes an object, with its routes as another. Rows stay in order.

    Batches that are small together form one block. Otherwise each small batch is a block, and so is each response of a
    large batch.
    """
    if len(batches) > 1 and sum(batch.nbytes for batch in batches) <= BLOCK_BYTES:
        batches = [Samples.joined(batches)]
    return [block for batch in batches for block in _alone_where_long(batch)]


def _alone_where_long(samples: Samples) -> list[Samples]:
    if samples.nbytes <= BLOCK_BYTES:
        return [samples]
    return [samples.rows(slice(i, i + 1)) for i in range(len(samples))]


@dataclass(frozen=True)
class ResponseBlock:
    """Responses that are stored together. The driver holds only these references."""

    samples: Any  # to Samples without routes
    routes: Any = None  # to their routes, integers [tokens, MoE layers, topk]; None: there are none
    node: str = ""  # Ray's id of the node where they were made


@dataclass(frozen=True)
class ResponseStore:
    """Responses in some order. Row i is row `block_row[i]` of `blocks[block[i]]`.

    The driver keeps each response of a step alone until its group is taken. Columns of its own would be two thousand
    bytes a response. So a row that is kept alone shares the columns of those that were told with it.
    """

    numbers: SampleRows  # of these responses, or of some more; see `only`
    block: np.ndarray  # int64 [rows]
    block_row: np.ndarray  # int64 [rows]
    blocks: tuple[ResponseBlock, ...]
    only: int | None = None  # the row of `numbers` that is the only response here; None: all are

    def __len__(self) -> int:
        return len(self.block)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"numbers": self.rows, "only": None}  # another process gets no other rows

    @property
    def rows(self) -> SampleRows:
        """The numbers of these responses alone."""
        if self.only is None:
            return self.numbers
        return self.numbers.rows(slice(self.only, self.only + 1))

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt and of the response in the first row, without a look at the other columns."""
        row = self.only or 0
        return int(self.numbers.prompt_lengths[row]), int(self.numbers.response_lengths[row])

    @property
    def versions(self) -> np.ndarray:
        """Versions of the weights that made the first row's spans, without a look at the other columns."""
        row = self.only or 0
        first = int(self.numbers.span_counts[:row].sum())
        return self.numbers.span_versions[first : first + int(self.numbers.span_counts[row])]

    @classmethod
    def of(cls, rows: SampleRows, block: ResponseBlock) -> "ResponseStore":
        """Returns all rows of one block."""
        return cls.of_blocks(rows, [len(rows)], [block])

    @classmethod
    def of_blocks(cls, rows: SampleRows, sizes: Sequence[int], blocks: Sequence[ResponseBlock]) -> "ResponseStore":
        """Returns all rows of several blocks. `sizes` are the numbers of their rows."""
        block_row = np.concatenate([np.arange(size) for size in sizes])
        return cls(rows, np.repeat(np.arange(len(sizes)), sizes), block_row, tuple(blocks))

    @classmethod
    def put_here(cls, samples: Samples) -> "ResponseStore":
        """Puts all rows as one block into the object store of this node."""
        routes = None
        if samples.routes is not None:
            routes = ray.put(samples.routes)
        block = ResponseBlock(ray.put(replace(samples, routes=None)), routes, ray.get_runtime_context().get_node_id())
        return cls.of(samples.numbers, block)

    @classmethod
    def joined(cls, parts: Sequence["ResponseStore"]) -> "ResponseStore":
        """Joins the rows of all parts in their order. A block that several parts share is there once.

        Raises ValueError where there is no part.
        """
        if not parts:
            raise ValueError("no parts to join")
        blocks = {id(block): block for part in parts for block in part.blocks}
        number = {identity: number for number, identity in enumerate(blocks)}
        numbers = [np.array([number[id(block)] for block in part.blocks]) for part in parts]
        return type(parts[0])(
            _joined_rows(parts),
            np.concatenate([own[part.block] for part, own in zip(parts, numbers, strict=True)]),
            np.concatenate([part.block_row for part in parts]),
            tuple(blocks.values()),
        )

    def take(self, index: np.ndarray) -> "ResponseStore":
        """Returns the given rows only, with blocks in the order of their first rows.

        References to blocks without any of these rows are dropped.
        """
        used, first, block = np.unique(self.block[index], return_index=True, return_inverse=True)
        order = np.argsort(first)
        blocks = tuple(self.blocks[i] for i in used[order])
        return type(self)(self.rows.rows(index), np.argsort(order)[block], self.block_row[index], blocks)

    def row(self, index: int) -> "ResponseStore":
        """Returns one row, as `take` does, in a tenth of the time. It shares all columns until they are read."""
        (block,) = self.block[index : index + 1]
        block_row = self.block_row[index : index + 1]
        if not block_row[0]:
            block_row = _FIRST
        only = self.only
        if only is None:
            only = index
        return type(self)(self.numbers, _FIRST, block_row, (self.blocks[block],), only)

    def renumbered(self, group_id: np.ndarray, sample_id: np.ndarray) -> "ResponseStore":
        """Returns the responses under other ids. Ids inside the blocks stay unchanged."""
        return self._with_rows(replace(self.rows, group_id=group_id, sample_id=sample_id))

    def as_context(self, rows: np.ndarray) -> "ResponseStore":
        """Returns the responses, with some rows as context, which counts nowhere. The blocks stay unchanged."""
        return self._with_rows(self.rows.as_context(rows))

    def _with_rows(self, rows: SampleRows) -> "ResponseStore":
        return replace(self, numbers=rows, only=None)

    def read(self, with_routes: bool = False) -> Samples:
        """Fetches the responses to this node, under the ids of `rows`, with routes if asked.

        Raises Interrupted when a node is gone that held some of them.
        """
        blocks = self.fetched([block.samples for block in self.blocks])
        if with_routes:
            routes = self.fetched([block.routes for block in self.blocks])
            blocks = [replace(block, routes=own) for block, own in zip(blocks, routes, strict=True)]
        return self.assembled(blocks)

    def assembled(self, blocks: Sequence[Samples]) -> Samples:
        """Builds the responses from fetched `blocks`."""
        lengths = [len(block) for block in blocks]
        index = (np.cumsum(lengths) - lengths)[self.block] + self.block_row
        whole = Samples.joined(blocks)
        if not np.array_equal(index, np.arange(len(whole))):  # long responses are in order already
            whole = whole.rows(index)
        return replace(whole, group_id=self.rows.group_id, sample_id=self.rows.sample_id)

    @classmethod
    def fetched(cls, references: Sequence[Any]) -> list[Any]:
        """Fetches the values of references, None for None. Raises Interrupted when a node is gone that held some of
        them.
        """
        values = iter(cls._get([each for each in references if each is not None]))
        return [None if each is None else next(values) for each in references]

    @staticmethod
    def _get(references: Sequence[Any]) -> list[Any]:
        try:
            return ray.get(list(references))
        except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
            raise Interrupted(
                "responses of the step have no room on this node: its object store and the disk that Ray spills to "
                "are full; make room and resume"
            ) from error
        except (ray.exceptions.ObjectLostError, ray.exceptions.ObjectFetchTimedOutError) as error:
            raise Interrupted(
                f"responses of the step are lost with the node that held them ({error}); "
                "resumed, it generates them again"
            ) from error


def _joined_rows(parts: Sequence[ResponseStore]) -> SampleRows:
    """Joins the numbers of all parts. Columns that several parts share are joined once."""
    shared = {id(part.numbers): part.numbers for part in parts}
    whole = SampleRows.joined(list(shared.values()))
    lengths = [len(numbers) for numbers in shared.values()]
    before = dict(zip(shared, np.cumsum([0, *lengths]).tolist(), strict=False))
    index = [_rows_in(part, before[id(part.numbers)]) for part in parts]
    return whole.rows(np.concatenate(index))


def _rows_in(part: ResponseStore, before: int) -> np.ndarray:
    """Returns where the rows of a part are, `before` rows behind the first of all."""
    if part.only is None:
        return np.arange(before, before + len(part))
    return np.array([before + part.only])
