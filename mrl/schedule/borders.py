"""in_order: decides which weights generate each token of a response, from its group and position, without a clock.

A group is issued with the weights of version `begun` and trained by step `trained`. Each version generates `quota`
tokens, and the last one, `trained`, all the rest:

    tokens    0 ...... quota ...... 2 quota ...... its end
    version   begun    begun + 1    ...            trained at most

If nothing is dropped, a step trains on the next `batch` numbers. Then `begun` and `trained` follow from the number
alone.

Requests end at multiples of the quota, even if the weights stay the same. An engine restarts its random numbers with
each request, and the groups of a step are known only when those before them are judged. A response that has its tokens
of this version waits. So weights change only while no request is running, and each request has one version.
"""


def version_of(token: int, begun: int, trained: int, quota: int) -> int:
    """Returns the version of the weights that generate the `token`-th (from 0) token of a response."""
    return min(trained, begun + token // quota)


def request_end(kept: int, quota: int, max_tokens: int) -> int:
    """Returns the length of a response after the request that continues at `kept`, unless it ends earlier by itself."""
    return min(max_tokens, (kept // quota + 1) * quota)
