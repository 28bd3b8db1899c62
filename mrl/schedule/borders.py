"""in_order: by which weights each token of a response is made. A function of its group and its place, of no clock.

A group that is issued with the weights of version `begun` and trained on by step `due` has `quota` tokens by each version,
and by the last, `due`, all the rest:

    tokens    0 ...... quota ...... 2 quota ...... max_tokens
    version   begun    begun + 1    ...            due at most

An engine that has made a response's tokens of this version gives the response back, and it goes on with the next weights.
So weights change only while no request is under way, and each request is of one version from end to end.
"""

from collections.abc import Iterator


def version_of(token: int, begun: int, due: int, quota: int) -> int:
    """Of the weights that make the `token`-th (from 0) token of a response."""
    return min(due, begun + token // quota)


def border(version: int, begun: int, due: int, quota: int, max_tokens: int) -> int:
    """Tokens that a response has at most when the weights of `version` are done with it."""
    if version >= due:
        return max_tokens
    return min(max_tokens, max(0, version - begun + 1) * quota)


def segments(begun: int, due: int, quota: int, length: int) -> Iterator[tuple[int, int]]:
    """(first token, version) of each span of a response of `length` tokens, as the columns of samples have them."""
    start = 0
    for version in range(begun, due + 1):
        yield start, version
        start = border(version, begun, due, quota, length)
        if start >= length:
            return
