"""in_order: by which weights each token of a response is made. A function of its group and its place, of no clock.

A group that is issued with the weights of version `begun` and trained on by step `trained` has `quota` tokens by each
version, and by the last, `trained`, all the rest:

    tokens    0 ...... quota ...... 2 quota ...... its end
    version   begun    begun + 1    ...            trained at most

Where nothing is dropped a step trains on the next `batch` numbers, so that `begun` and `trained` follow from the
number alone.

Requests end at multiples of the quota, also where the weights stay the same: an engine begins its random numbers anew
with each request, and which groups a step trains on is known only when those before them are judged. A response that
has the tokens of this version waits; so weights change only while no request is under way, and each request is of one
version from end to end.
"""


def version_of(token: int, begun: int, trained: int, quota: int) -> int:
    """The version of the weights that make the `token`-th (from 0) token of a response."""
    return min(trained, begun + token // quota)


def request_end(kept: int, quota: int, max_tokens: int) -> int:
    """Tokens that a response has after the request that goes on from `kept`, unless it ends by itself before."""
    return min(max_tokens, (kept // quota + 1) * quota)
