"""A look at all processes while engines generate: once a step, at the first answers that come back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mrl.driver.assemble import Run


@contextmanager
def at_first_answers(run: Run, look: Callable[[], None]) -> Iterator[None]:
    """Calls `look`, in the thread of generation, when the first answers of a step have come."""
    streams = run.generation.streams
    take = streams.take
    looked_at: set[int] = set()  # versions of the weights

    def take_watched(timeout_s):
        arrived = take(timeout_s)
        versions = {int(version) for part in arrived for version in part.samples.rows.weight_version}
        if versions - looked_at:
            looked_at.update(versions)
            look()
        return arrived

    streams.take = take_watched
    try:
        yield
    finally:
        streams.take = take
