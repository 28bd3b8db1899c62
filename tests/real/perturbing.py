"""An actor rank that a test can change: its weights, and its layout without a new process."""

import time
from typing import Any

from mrl.config.schema import RunConfig
from mrl.rank.rank_worker import ActorWorker


class PerturbingWorker(ActorWorker):
    """ActorWorker whose weights and layout can be replaced."""

    def scale_weights(self, factor: float) -> None:
        """Multiplies every parameter in place: the same in any sharding."""
        for chunk in self.actor.chunks:
            for parameter in chunk.parameters():
                parameter.data.mul_(factor)

    def spoil_syncs(self, count: int) -> None:
        """Flips one bit of the first message of each of the next `count` syncs, after it was packed."""
        end, left = self.sender.end, [count]
        begin, post = end.begin, end.post

        def begin_spoilt(update, workers):
            begin(update, workers)  # also what an earlier call of this has put there: links outlive syncs
            self.spoils = left[0] > 0
            left[0] -= 1

        def post_spoilt(message):
            if self.spoils:
                self.spoils = False
                end.slot(message)[5] ^= 4
            post(message)

        end.begin, end.post = begin_spoilt, post_spoilt

    def lose_message(self) -> None:
        """The first message of the next sync is packed and never handed over."""
        end, left = self.sender.end, [1]
        post = end.post

        def post_the_others(message):
            if left[0]:
                left[0] = 0
            else:
                post(message)

        end.post = post_the_others

    def stall(self, seconds: float) -> None:
        """The last message of the next sync is late."""
        end = self.sender.end
        post, last = end.post, self.sender._messages[-1]

        def post_late(message):
            if message is last:
                time.sleep(seconds)
            post(message)

        end.post = post_late

    def rebuild(self, config: dict[str, Any], address: str) -> None:
        """The model anew, in another layout of as many ranks, from its Hugging Face weights."""
        if self.sender is not None:
            self.sender.end.close()
            self.sender = None
        self.actor.close()
        self.config = RunConfig.model_validate(config)
        host, _, port = address.rpartition(":")
        self.start(host, int(port), None)
