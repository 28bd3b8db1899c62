"""What trainer and engines must agree on before a weight sync, as plain data: both sides build the same plan from it. No torch."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec, model_spec
from mrl.model.device_grid import Place
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.reshard.messages import Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard


@dataclass(frozen=True)
class SyncSetup:
    """Inputs of the plan, and where the two sides meet."""

    hf_config: dict[str, Any]  # the model's config.json
    train: dict[str, Any]  # degrees of the actor under their Megatron names
    rollout: dict[str, int]  # fields of RolloutLayout
    dialect: str  # how vLLM lays weights out: "cpu", "cuda" or "npu"
    dtype: str  # of the engines: what travels
    topology: dict[str, list[list[int]]]  # "ranks" and "workers": [node, device] of each
    budget_bytes: int  # of one worker's or one rank's data in one round
    timeout_s: float  # longest wait for one peer
    transport: dict[str, Any]  # see mrl.reshard.transport

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SyncSetup":
        """From `to_json`."""
        return cls(**data)

    @cached_property
    def model(self) -> ModelSpec:
        return model_spec(self.hf_config)

    @cached_property
    def train_layout(self) -> TrainLayout:
        return TrainLayout.build(self.train, self.model)

    @cached_property
    def rollout_layout(self) -> RolloutLayout:
        return RolloutLayout(**self.rollout)

    @cached_property
    def places(self) -> Topology:
        return Topology(*(tuple(Place(*place) for place in self.topology[side]) for side in ("ranks", "workers")))

    def plan(self) -> ReshardPlan:
        """The plan; built once in a process."""
        return _plan(json.dumps(self.to_json(), sort_keys=True))

    def check_hash(self, expected: str, who: str) -> None:
        """Raises EnvironmentFault when this process comes to another plan than the driver did."""
        if self.plan().hash != expected:
            raise EnvironmentFault(
                f"{who} plans the weight sync as {self.plan().hash[:12]}, the driver as {expected[:12]}: they do not run the same mrl; "
                "install one version on every host"
            )

    def worker(self, engine: int, position: int) -> int:
        """Number among all workers of the worker at `position` in its engine: data-parallel rank, then tensor rank."""
        return engine * self.rollout_layout.workers_per_engine + position

    def engine_of(self, worker: int) -> int:
        return self.rollout_layout.coords(worker).engine


@lru_cache(maxsize=2)
def _plan(text: str) -> ReshardPlan:
    setup = SyncSetup.from_json(json.loads(text))
    return plan_reshard(
        setup.model, setup.train_layout, setup.rollout_layout, dialect=setup.dialect, dtype=setup.dtype, topology=setup.places,
        budget_bytes=setup.budget_bytes,
    )  # fmt: skip
