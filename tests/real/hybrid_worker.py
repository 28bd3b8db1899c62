"""One rank: the log-probs of a hybrid as they are, and with each trap that the product keeps out. See test_hybrid."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
from megatron.core.transformer.attention import SelfAttention
from padded import in_rows, read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.rank import gated_delta, torch_spec
from mrl.rank.actor import MegatronActor


@contextmanager
def one_sequence() -> Iterator[None]:
    """States go on over the borders of a pack."""
    with patch.object(gated_delta, "lengths_of", lambda params: (int(params.cu_seqlens_q_padded[-1]),)):
        yield


@contextmanager
def plain_norms() -> Iterator[None]:
    """Norms multiply by their weight itself."""
    normed = torch_spec.normed
    with patch.object(torch_spec, "normed", lambda x, weight, eps, _: normed(x, weight, eps, False)):
        yield


@contextmanager
def no_gate() -> Iterator[None]:
    """Nothing weighs what attention says."""
    with patch.object(SelfAttention, "_apply_output_gate", lambda self, x, gate: x):
        yield


TRAPS = {"none": nullcontext, "one sequence": one_sequence, "plain norms": plain_norms, "no gate": no_gate}


def main(rank: int, world_size: int, out: Path, case_file: Path) -> None:
    case = json.loads(case_file.read_text())
    batch = read_batch(case["batch"])
    actor = MegatronActor(
        RunConfig.model_validate(case["config"]), rank, world_size, "127.0.0.1", agree_on_port(out, rank, 0)
    )
    for name, trap in TRAPS.items():
        with trap():
            result = actor.log_probs(batch)
        np.savez(out / f"{name}.npz", log_probs=in_rows(batch, result.rows, result.log_probs), rows=result.rows)
    actor.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
