"""Exchanges numbers a row between all ranks of the actor, so that each of them has those of the whole step.

    rank of a replica's results    columns of its rows  --+
    other ranks                    nothing              --+--> every rank: columns of all rows, in the step's order

Every rank comes to every exchange, also one before the last pipeline stage, which gives nothing. What is exchanged are
bytes with their dtype, so no number changes. Each exchange also tells of errors: a rank that fails between two of them
comes to the next with its error, and all ranks end there with the same message. The wish to stop travels the same way,
so all ranks stop at the same place. A rank that fails within a pass of the model comes to none, since others may wait
for it in the pass: it fails at once, and ends the run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mrl import errors
from mrl.algo.rows import RowValues
from mrl.errors import Interrupted, MrlError, described

ROWS = "rows"  # the column of row numbers
Part = Mapping[str, np.ndarray]


class FailedElsewhere(RuntimeError):
    """Another rank failed, by a defect of which it tells more."""


class Exchange:
    """One rank's end. Every method is collective over all ranks."""

    def __init__(
        self, gather: Callable[[bytes], list[bytes]], rank: int, rows: int, stops: Callable[[], bool] = lambda: False
    ) -> None:
        """`gather` returns what every rank gave, in rank order. `rows`: number of rows of the step.

        `stops` tells whether this rank was asked to stop.
        """
        self._gather = gather
        self._rank = rank
        self._rows = rows
        self._stops = stops
        self._has_ended = False  # by an error or a stop of which all ranks know

    def parts(self, given: Part | None = None) -> list[Part]:
        """Returns the columns of all ranks that gave some, in rank order.

        Raises what another rank failed with. Raises Interrupted where a rank was asked to stop.
        """
        answers = [_read(data) for data in self._gather(_packed({"stops": self._stops()}, given))]
        failed = [(rank, head["error"]) for rank, (head, _) in enumerate(answers) if "error" in head]
        stops = any(head["stops"] for head, _ in answers)
        self._has_ended = bool(failed) or stops
        if failed:
            raise _made(*failed[0])
        if stops:
            raise Interrupted("the ranks were asked to stop")
        return [part for _, part in answers if part is not None]

    def rows(self, numbers: np.ndarray, of_rows: RowValues | None) -> RowValues:
        """Returns numbers of all rows, in the order of the step.

        `of_rows` are those of rows `numbers`, int64; None on ranks whose rows another rank gives.
        """
        return self.in_order(self.parts(None if of_rows is None else {ROWS: numbers, **of_rows}))

    def in_order(self, parts: Sequence[Part]) -> RowValues:
        """Puts the columns of `parts`, by their ROWS, into the order of the step.

        Raises RuntimeError for a missing row.
        """
        columns: RowValues = {}
        filled = np.zeros(self._rows, bool)
        for part in parts:
            filled[part[ROWS]] = True
            for name, values in part.items():
                if name != ROWS:
                    columns.setdefault(name, np.zeros(self._rows, values.dtype))[part[ROWS]] = values
        if not filled.all():
            raise RuntimeError(f"no rank answered for rows {np.flatnonzero(~filled)[:8].tolist()}")
        return columns

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Comes to the others' next exchange with what the block raises, and so ends it there on all ranks."""
        try:
            yield
        except Exception as error:
            if not self._has_ended:
                kind = type(error).__name__ if isinstance(error, MrlError) else ""
                self._gather(_packed({"stops": False, "error": [kind, described(error)]}, None))
            raise


def _made(rank: int, answers: tuple[str, str]) -> Exception:
    """Returns an error as another rank raised it."""
    kind, text = answers
    if kind and issubclass(made := getattr(errors, kind, MrlError), MrlError):
        return made(text)
    return FailedElsewhere(f"rank {rank} failed: {text}")


def _packed(head: dict[str, Any], given: Part | None) -> bytes:
    if given is None:
        return json.dumps(head).encode() + b"\n"
    columns = {name: np.ascontiguousarray(values) for name, values in given.items()}
    head["columns"] = [[name, values.dtype.str, values.shape] for name, values in columns.items()]
    return b"\n".join([json.dumps(head).encode(), b"".join(values.tobytes() for values in columns.values())])


def _read(data: bytes) -> tuple[dict[str, Any], Part | None]:
    text, _, rest = data.partition(b"\n")
    head = json.loads(text)
    if "columns" not in head:
        return head, None
    part = {}
    begin = 0
    for name, dtype, shape in head["columns"]:
        count = int(np.prod(shape))
        part[name] = np.frombuffer(rest, dtype, count, begin).reshape(shape)
        begin += part[name].nbytes
    return head, part


def gather_bytes(data: bytes, device: Any) -> list[bytes]:
    """Returns what every rank gave, in rank order. Collective over all ranks, through memory of `device`."""
    import torch  # the driver imports this module, and must not load it
    from torch import distributed

    own = torch.tensor([len(data)], device=device)
    sizes = own.new_empty(distributed.get_world_size())
    distributed.all_gather_into_tensor(sizes, own)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = torch.empty(len(sizes) * longest, dtype=torch.uint8, device=device)
    distributed.all_gather_into_tensor(gathered, padded.to(device))
    every = gathered.cpu().numpy().reshape(len(sizes), longest)
    return [row[:size].tobytes() for row, size in zip(every, sizes.tolist(), strict=True)]
