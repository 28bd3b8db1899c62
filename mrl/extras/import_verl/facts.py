"""What a whole set of overrides says, for keys whose meaning depends on others."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mrl.extras.import_verl.keys import MEGATRON, TRANSFORMER, A, M, R
from mrl.extras.import_verl.overrides import Override, VerlCommand
from mrl.model import ModelSpec
from mrl.model.layout import LayoutDegrees


@dataclass(frozen=True)
class Facts:
    """`degrees`: of the layout that the actor gets, from the script or chosen for it. `model`: None where it is not known."""

    command: VerlCommand
    keys: Mapping[str, Override]
    model: ModelSpec | None
    degrees: Mapping[str, Any]
    as_written: bool

    def value(self, key: str, default: Any) -> Any:
        """The value of a key of verl's; `default` (verl's) where it is not set, or not known."""
        override = self.keys.get(key)
        return default if override is None or override.missing else override.value

    @property
    def megatron(self) -> bool:
        """Whether verl would train with Megatron."""
        return says_megatron(self.command, self.keys)

    @property
    def device(self) -> str:
        return self.value("trainer.device", "cuda")

    @property
    def estimator(self) -> str:
        return self.value("algorithm.adv_estimator", "gae")

    @property
    def devices(self) -> int:
        return self.value("trainer.nnodes", 1) * self.value("trainer.n_gpus_per_node", 8)

    @property
    def dense(self) -> bool:
        return self.model is not None and not self.model.is_moe

    @property
    def loss_mode(self) -> str:
        return self.value(A + "policy_loss.loss_mode", "vanilla")

    @property
    def updates(self) -> int:
        """Optimizer updates of one training step."""
        batch, mini = self.value("data.train_batch_size", 1024), self.value(A + "ppo_mini_batch_size", 256)
        whole = isinstance(batch, int) and isinstance(mini, int) and mini > 0
        return max(1, -(-batch // mini)) if whole else 1

    @property
    def context_parallel(self) -> int:
        return self.degrees.get("context_parallel_size") or 1

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample, padded as the layout cuts it; 0 where the limits are not known."""
        prompt = self.value(R + "prompt_length", self.value("data.max_prompt_length", 512))
        response = self.value(R + "response_length", self.value("data.max_response_length", 512))
        if not isinstance(prompt, int) or not isinstance(response, int):
            return 0
        cuts = LayoutDegrees.of({**self.degrees, "world_size": 1}).sequence_parts
        return -(-(prompt + response) // cuts) * cuts

    @property
    def model_path(self) -> str | None:
        """The model's path, also where a part of it is not known: its last part names the model."""
        path = self.keys[M + "path"].value if M + "path" in self.keys else None
        return path if isinstance(path, str) else None


def says_megatron(command: VerlCommand, keys: Mapping[str, Override]) -> bool:
    """By the configuration's name, the engine, the strategy, or a degree of Megatron's."""
    named = "megatron" in command.config_name
    said = any(key in keys and keys[key].value == "megatron" for key in ("model_engine", A + "strategy"))
    return named or said or any((key.startswith(MEGATRON) and key.endswith("parallel_size")) or key.startswith(TRANSFORMER) for key in keys)
