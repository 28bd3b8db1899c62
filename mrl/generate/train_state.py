"""The state of a run after a finished step, without weights."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mrl.data.order import DataCursor
from mrl.generate.sampled_by import new_name

if TYPE_CHECKING:
    from mrl.generate.kept_groups import KeptGroups


@dataclass(frozen=True)
class TrainState:
    """The state after a finished step, without weights. It is in every checkpoint."""

    step: int = 0  # finished steps; also the version of the weights
    cursor: DataCursor = field(default_factory=DataCursor)
    # live groups, if generation runs ahead
    ahead: "KeptGroups | None" = field(default=None, compare=False, repr=False)
    weights: str = field(default="", compare=False, repr=False)  # their unique name; empty for the initial weights
    kl_coef: float | None = None  # weight of a KL in the next step's rewards; None: that of the configuration

    def advanced(self, cursor: DataCursor, kl_coef: float | None = None) -> "TrainState":
        """Returns the state after one more update. Generation adds the live groups later."""
        return replace(self, step=self.step + 1, cursor=cursor, ahead=None, weights=new_name(), kl_coef=kl_coef)
