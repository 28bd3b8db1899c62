"""Sees in the processes of a rehearsal which code ran behind a switch; the trainer knows nothing of it.

The folder of `write_hook` is first in the PYTHONPATH of a rehearsal's commands. Python imports `sitecustomize` from it
at the start of every process below them, and `begin` has each module wrap its watched functions when it is loaded.
A process writes each name that it saw into its own file, once: the switch, or switch=value where the value selects
the code. Random weights call no tool, so `MadeUpCalls` take the place of the calls' reader in the same way.
"""

import functools
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_ADAM = "actor.optim.override_optimizer_config"
_READER = ("mrl.engine.call_reader", "DialectReader")


@dataclass(frozen=True)
class Sighting:
    """A function whose return shows that the code of a switch ran.

    `seen` gets its arguments by name, and its result. It returns the value whose code ran, True where on is all there
    is to say, and None where this call shows nothing.
    """

    switch: str
    module: str
    function: str  # its qualified name
    seen: Callable[[Any, Any], Any]


def _always(*_: Any) -> bool:
    return True


def _replayed(given: Any, _: Any) -> str | None:
    """The update chose experts that something else had chosen; gaps are only in those of engines."""
    if not (given.training and given.wanted):
        return None
    return "R3" if given.has_gaps else "R2"


def _frozen_router(given: Any, _: Any) -> bool | None:
    from mrl.rank.parameter_marks import is_frozen

    named = (pair for chunk in given.chunks for pair in chunk.named_parameters())
    return any(name.endswith("router.weight") and is_frozen(parameter) for name, parameter in named) or None


def _saw(given: Any, placed: Any) -> str | None:
    """An update put the features of an image in the places of its tokens, by a tower that nothing trains."""
    return "frozen" if given.training and placed is not None and given.self._learning is None else None


def _trained_part(given: Any, _: Any) -> str | None:
    """A gradient reached the tower's parameters."""
    from mrl.rank.parameter_marks import is_frozen

    parameters = list(given.self._tower.parameters())
    reached = [p for p in parameters if getattr(p, "main_grad", None) is not None and bool(p.main_grad.any())]
    if not reached:
        return None
    return "projector" if any(map(is_frozen, parameters)) else "trained"


def _tower_rate(given: Any, made: Any) -> float | None:
    rates = {group.get("max_lr") for part in made.chained_optimizers for group in part.param_groups}
    return given.config.vision_lr if given.config.vision_lr in rates else None


def _teacher_leaves(given: Any, _: Any) -> bool | None:
    return (given.section == "distillation.teacher_model" and bool(given.switched)) or None


WATCHED = (
    Sighting(
        "actor.layout.virtual_pipeline_model_parallel_size", "mrl.rank.forward", "loss_pass",
        lambda given, _: len(given.chunks),
    ),
    Sighting(
        "model.override_transformer_config.recompute_granularity", "mrl.rank.forward", "loss_pass",
        lambda given, _: f"{given.chunks[0].config.recompute_granularity}",
    ),
    Sighting(f"{_ADAM}.optimizer_cpu_offload", "mrl.rank.adam_state", "AdamState.__init__",
            lambda given, _: given.self._hybrid or None),
    Sighting("actor.mtp.train", "mrl.rank.predicting", "PredictingLayer.make_trained", _always),
    Sighting("actor.override_ddp_config.overlap_grad_reduce", "mrl.rank.overlap", "set_gradient_reduction",
            lambda given, _: given.chunks[0].ddp_config.overlap_grad_reduce or None),
    Sighting("actor.router_replay", "mrl.rank.routing", "_choosing", _replayed),
    Sighting("actor.freeze_router", "mrl.rank.optimizer", "build_optimizer", _frozen_router),
    Sighting("actor.lora.rank", "mrl.rank.lora_layers", "Adapter.__init__", lambda given, _: given.lora.rank),
    Sighting("actor.lora.dropout", "mrl.rank.lora_layers", "drawing_noise", lambda given, _: given.dropout or None),
    Sighting("model.vision", "mrl.rank.vision", "Vision._of_micro_batch", _saw),
    Sighting("model.vision", "mrl.rank.tower_training", "TowerGradients.backward", _trained_part),
    Sighting("actor.optim.vision_lr", "mrl.rank.optimizer", "build_optimizer", _tower_rate),
    Sighting("rollout.quantization", "mrl.reshard.quantise", "block_scales", lambda *_: "fp8"),
    Sighting("algorithm.adv_estimator", "mrl.algo.advantages", "response_advantages",
            lambda given, _: given.adv_estimator),
    Sighting("algorithm.adv_estimator", "mrl.rank.critic", "value_loss_pass", lambda *_: "gae"),
    Sighting("critic.layout", "mrl.rank.critic", "MegatronCritic.__init__",
            lambda given, _: given.self._has_own_groups or None),
    # by ranks alone: before the start a user's loss is tried without them
    Sighting("algorithm.policy_loss.loss_mode", "mrl.rank.forward", "_loss",
            lambda given, _: given.parameters.loss_mode),
    Sighting("algorithm.anchor", "mrl.rank.forward", "_loss",
            lambda given, _: "on_policy" if given.inputs.old_log_probs is None else None),
    Sighting("algorithm.anchor", "mrl.rank.rank_batch", "RankBatch._take_anchor",
            lambda given, taken: "rollout" if taken and given.self._algorithm.anchor == "rollout" else None),
    Sighting("ref.param_offload", "mrl.rank.actor", "MegatronActor._load_reference",
            lambda given, made: (given.self.config.ref.param_offload and made is not given.self.adapters) or None),
    Sighting("distillation.teacher_model.param_offload", "mrl.rank.offload", "Residence.__init__", _teacher_leaves),
)  # fmt: skip


def write_hook(folder: Path, notes: Path) -> None:
    """Writes the module that Python imports first into `folder`. Processes will write what they saw into `notes`."""
    folder.mkdir(exist_ok=True)
    notes.mkdir(exist_ok=True)
    lines = ("from mrl.tools.rehearse.watched import begin", "", f"begin({str(folder)!r}, {str(notes)!r})", "")
    (folder / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")


def begin(hook: str, notes: str) -> None:
    """Watches what this process will load. Runs the host's own sitecustomize too, which that of `hook` hides."""
    sys.meta_path.insert(0, _Watching(_Notes(Path(notes))))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != hook])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


class _Notes:
    """Writes each name once. A forked process has its own file, and a killed one loses no name."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._seen: set[tuple[int, str]] = set()

    def add(self, switch: str, value: Any) -> None:
        name = switch if value is True else f"{switch}={value}"
        process = os.getpid()
        if (process, name) in self._seen:
            return
        self._seen.add((process, name))
        with (self._folder / f"{process}.txt").open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


class _Watching(MetaPathFinder):
    """Finds modules with watched functions as Python does, and wraps those functions once they are loaded."""

    def __init__(self, notes: _Notes):
        self._notes = notes
        self._rows: dict[str, list[Sighting]] = defaultdict(list)
        for row in WATCHED:
            self._rows[row.module].append(row)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._rows and name != _READER[0]:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._load, spec.loader)
        return spec

    def _load(self, loader: Loader, module: ModuleType) -> None:
        type(loader).exec_module(loader, module)
        for row in self._rows[module.__name__]:
            owner, _, name = row.function.rpartition(".")
            holder = getattr(module, owner) if owner else module
            setattr(holder, name, self._noting(row, getattr(holder, name)))
        if module.__name__ == _READER[0]:
            from mrl.tools.rehearse.made_up_calls import MadeUpCalls

            setattr(module, _READER[1], MadeUpCalls)

    def _noting(self, row: Sighting, function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            value = row.seen(SimpleNamespace(**given.arguments), result)
            if value is not None:
                self._notes.add(row.switch, value)
            return result

        return noted
