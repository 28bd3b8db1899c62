"""Which prefixes the weights of now have computed, to tell what of vLLM's prefix cache is theirs. No vLLM, no clock.

vLLM says of each request how many of its tokens came out of the cache. They can only be those of a prefix that a
request of the same weights had before. More are stale: they were computed by weights that are gone, and a response
would go on from what no weights ever computed. The count is 0 as long as the cache is emptied with every change of
weights.
"""

from collections.abc import Iterator, Sequence


class CachedPrefixes:
    """Prefixes of one engine since its weights changed; blocks of `block` tokens, as the cache has them."""

    def __init__(self, block: int):
        self.block = block
        self.stale_tokens = 0  # that came out of the cache since the weights changed
        self._known: set[int] = set()  # hash of each prefix of whole blocks
        self._inside: dict[
            str, tuple[int, Sequence[int]]
        ] = {}  # request -> tokens that may be cached for it, its prompt

    def enter(self, name: str, prompt: Sequence[int]) -> None:
        """A request goes to vLLM. What it may find is what others brought before it."""
        prefixes = list(self._prefixes(prompt))
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in self._known), len(prefixes))
        self._inside[name] = (known * self.block, prompt)
        self._known.update(prefixes)

    def leave(self, name: str, tokens: Sequence[int] = (), cached: int = 0) -> None:
        """Notes that a request has ended, with `tokens` behind its prompt.

        `cached`: tokens of its prompt that came out of the cache.
        """
        allowed, prompt = self._inside.pop(name, (cached, ()))
        self.stale_tokens += max(0, cached - allowed)
        self._known.update(self._prefixes([*prompt, *tokens]))

    def renew(self) -> int:
        """Weights have changed; the stale tokens until now. What is under way is computed anew, by the new ones."""
        stale = self.stale_tokens
        self.stale_tokens = 0
        self._known = {prefix for _, prompt in self._inside.values() for prefix in self._prefixes(prompt)}
        return stale

    def _prefixes(self, tokens: Sequence[int]) -> Iterator[int]:
        prefix = 0
        for start in range(0, len(tokens) - self.block + 1, self.block):
            prefix = hash((prefix, *tokens[start : start + self.block]))
            yield prefix
