"""The prefixes that the current weights have computed, to find stale entries of vLLM's prefix cache. No vLLM, no clock.

vLLM reports for each request how many of its tokens came from the cache. At most, these are a prefix that an earlier
request of the same weights had. More are stale: older weights computed them, and the response would continue a mixture
of both. The count is 0 as long as the cache is emptied with every change of weights.
"""

from collections.abc import Iterator, Sequence


class CachedPrefixes:
    """Prefixes of one engine since its weights changed, in blocks of `block` tokens like the cache's."""

    def __init__(self, block: int):
        self.block = block
        self.stale_tokens = 0  # came from the cache since the weights changed
        self._known: set[int] = set()  # hash of each prefix of whole blocks
        # request -> (number of tokens that may come from the cache, prompt)
        self._inside: dict[str, tuple[int, Sequence[int]]] = {}

    def enter(self, name: str, prompt: Sequence[int]) -> None:
        """Notes that a request goes to vLLM. It may find only prefixes of earlier requests."""
        prefixes = list(self._prefixes(prompt))
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in self._known), len(prefixes))
        self._inside[name] = (known * self.block, prompt)
        self._known.update(prefixes)

    def leave(self, name: str, tokens: Sequence[int] = (), cached: int = 0) -> None:
        """Notes that a request has ended, with `tokens` behind its prompt.

        `cached`: tokens of its prompt that came from the cache.
        """
        allowed, prompt = self._inside.pop(name, (cached, ()))
        self.stale_tokens += max(0, cached - allowed)
        self._known.update(self._prefixes([*prompt, *tokens]))

    def renew(self) -> int:
        """Notes new weights and returns the stale tokens until now. Requests under way are computed again by the new
        weights.
        """
        stale = self.stale_tokens
        self.stale_tokens = 0
        self._known = set()
        for _, prompt in self._inside.values():
            self._known.update(self._prefixes(prompt))
        return stale

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[int]:
        prefix = 0
        for start in range(0, len(tokens) - self.block + 1, self.block):
            prefix = hash((prefix, *tokens[start : start + self.block]))
            yield prefix
