"""Requests that are spread over engines, and responses as they come back; more may be asked meanwhile."""

from collections.abc import Callable, Sequence

from mrl.cluster.request_streams import Arrived, RequestStreams
from mrl.errors import Interrupted
from mrl.schedule.request_routing import Queued, RequestRouting
from mrl.vllm.requests import Request, Sampling

WAIT_S = 0.5


class EngineAnswers:
    """To requests by their sample_id, which is unique."""

    def __init__(self, streams: RequestStreams, routing: RequestRouting, sampling: Sampling, poll: Callable[[], None]):
        """`poll` may raise, which is how a signal ends a wait."""
        self._streams, self._routing, self._sampling, self._poll = streams, routing, sampling, poll
        self._asked: dict[int, Request] = {}

    @property
    def unanswered(self) -> int:
        """Requests."""
        return self._routing.unanswered

    def ask(self, requests: Sequence[Request]) -> None:
        """They are sent by the next `take`, or when an engine has a place for them."""
        longest = self._sampling.max_tokens
        self._asked |= {request.sample_id: request for request in requests}
        self._routing.add(
            Queued(r.sample_id, r.prompt_ids, len(r.prompt_ids) + (r.max_tokens or longest)) for r in requests
        )

    def take(self, wait_s: float = WAIT_S) -> list[Arrived]:
        """What has come back, after a wait at most. Raises Interrupted when an engine died or stands still, or when
        requests are with nobody any more.
        """
        for engine, numbers in self._routing.assignments().items():
            self._streams.send(engine, [self._asked.pop(number) for number in numbers], self._sampling)
        self._poll()
        if self.unanswered and not self._streams.waiting_for:
            raise Interrupted(f"generation: {self.unanswered} requests are unanswered, and no engine has them")
        arrived = self._streams.take(wait_s)
        for part in arrived:
            self._routing.answered(part.samples.rows.sample_id.tolist())
        return arrived
