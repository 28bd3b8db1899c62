"""Permutations that a key decides, the same in every version of numpy."""

from collections.abc import Sequence

import numpy as np


def permutation(key: Sequence[int], size: int) -> np.ndarray:
    """int64 [size]. Sorts raw words of PCG64, a stream that numpy guarantees never to change; `Generator.permutation` is allowed to."""
    words = np.random.PCG64(np.random.SeedSequence(list(key))).random_raw(size)
    return np.argsort(words, kind="stable")
