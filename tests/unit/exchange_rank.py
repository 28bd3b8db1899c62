"""Three ranks over gloo, of which the first is of an earlier stage; see test_exchange. They are forks of one process,
which loaded torch for all.
"""

import json
import multiprocessing
import sys
from functools import partial

import numpy as np
import torch
from torch import distributed

from mrl.errors import NumericAbort
from mrl.rank.exchange import Exchange, gather_bytes

ROWS = 5
OWN = [None, np.array([0, 3, 4]), np.array([1, 2])]


def rank_says(rank: int, port: str) -> dict:
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    wished = []
    exchange = partial(Exchange, partial(gather_bytes, device=torch.device("cpu")), rank, ROWS, lambda: bool(wished))
    own = OWN[rank]
    columns = None
    if own is not None:
        lots = np.array([2**64 - 1, 2**53 + 1, 3, 4, 5], np.uint64)
        floats = np.array([0.1, -0.0, np.nan, np.inf, 1e-310])
        columns = {"lots": lots[own], "floats": floats[own], "flags": own > 2, "small": own.astype(np.float16)}
    whole = exchange().rows(own, columns)
    said = {name: [values.dtype.str, values.tobytes().hex()] for name, values in whole.items()}
    said["parts"] = [{k: v.tolist() for k, v in part.items()} for part in exchange().parts(_uneven(rank))]
    for failing, error in ((0, NumericAbort("not finite")), (2, ValueError("a defect"))):
        said[f"rank {failing} fails"] = ended(exchange(), error if rank == failing else None)
    if rank == 1:
        wished.append(True)
    said["stops"] = ended(exchange(), None)
    distributed.destroy_process_group()
    return said


def _uneven(rank: int) -> dict[str, np.ndarray] | None:
    """Nothing of the first rank, no column of the second, an empty one and one of a table of the third."""
    return (None, {}, {"none": np.zeros(0, np.int32), "table": np.arange(4).reshape(2, 2)})[rank]


def ended(exchange: Exchange, error: Exception | None) -> str:
    """How a rank ends that fails with `error`, or comes to the exchange."""
    try:
        with exchange.joined():
            if error is not None:
                raise error
            exchange.parts()
            exchange.parts()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(json.dumps(pool.starmap(rank_says, [(rank, sys.argv[1]) for rank in range(3)], chunksize=1)))
