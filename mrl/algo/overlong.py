"""What is done with responses that are too long (DAPO, arXiv:2503.14476); numpy."""

import numpy as np


def soft_overlong_penalty(response_lengths: np.ndarray, max_response_length: int, buffer_length: int, factor: float) -> np.ndarray:
    """float64 [batch], to be added to the scores (the paper's soft punishment, times `factor`).

    0 up to max_response_length - buffer_length tokens, from there linearly down to -factor at max_response_length, and -factor beyond.
    """
    into_buffer = np.asarray(response_lengths, np.float64) - (max_response_length - buffer_length)
    return -factor * np.clip(into_buffer / buffer_length, 0.0, 1.0)


def without_truncated(mask: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """The mask [batch, response_length] without the rows of responses that were cut off ([batch] bool): DAPO's over-long filter.

    A response that ends by itself on the last token that it may have is whole.
    """
    return mask & ~np.asarray(truncated, bool)[:, None]
