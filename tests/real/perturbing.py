"""An actor rank that a test can change: every weight times a constant, which is the same in any sharding."""

from mrl.cluster.workers import ActorWorker


class PerturbingWorker(ActorWorker):
    """ActorWorker with a method that moves every weight."""

    def scale_weights(self, factor: float) -> None:
        """Multiplies every parameter in place."""
        for chunk in self.actor.chunks:
            for parameter in chunk.parameters():
                parameter.data.mul_(factor)
