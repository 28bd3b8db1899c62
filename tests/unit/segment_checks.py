"""What tests read off responses that were made in segments."""

import numpy as np

from mrl.data.routes import is_missing
from mrl.data.samples import Samples
from mrl.errors import DataError


def check_routes(samples: Samples) -> None:
    """Raises DataError if a response has not prompt + tokens - 1 routes: those of all tokens but the last."""
    if samples.routes is None:
        return
    known = ~is_missing(samples.routes).any(1)
    ends = np.cumsum(samples.lengths)
    expected = np.ones(len(known), bool)
    expected[ends[samples.lengths > 0] - 1] = False
    if len(wrong := np.flatnonzero(known != expected)):
        row = int(np.searchsorted(ends, wrong[0], side="right"))
        raise DataError(f"sample {samples.sample_id[row]}: routes are not those of all its tokens but the last")


def token_versions(samples: Samples) -> np.ndarray:
    """Returns the version of the weights that generated each response token, int64."""
    counts = samples.span_counts.astype(np.int64)
    last = np.cumsum(counts) - 1
    ends = np.append(samples.span_starts[1:], 0).astype(np.int64)
    ends[last] = samples.response_lengths
    return np.repeat(samples.span_versions, ends - samples.span_starts)
