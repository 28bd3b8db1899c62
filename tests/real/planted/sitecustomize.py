"""Plants one fault in the processes of a run: Python imports this file at its start, where it is on PYTHONPATH.

MRL_PLANTED=NAME@STEP@RESPONSES names the fault, the first step that has it, and the responses of a step. The tool that
is to find it runs without it.
"""

import importlib.abc
import importlib.util
import os
import sys


def _rank_step(module, change) -> None:
    """Calls `change(actor, step, phase)` before a rank scores a step, and before it updates."""
    kind = module.RankStep
    score, update = kind.score, kind.update
    count = {"steps": 0}

    def scored(self, *arguments):
        if not self._rows.only_gaps:
            count["steps"] += 1
            change(self._actor, count["steps"], "score")
        return score(self, *arguments)

    def updated(self):
        change(self._actor, count["steps"], "update")
        return update(self)

    kind.score, kind.update = scored, updated


def learning_rate(module, first, _):
    def change(actor, step, phase):
        if phase == "update" and step == first:
            for group in actor.optimizer.param_groups:
                group["max_lr"] *= 10
                group["min_lr"] *= 10
            actor.scheduler.step(0)

    _rank_step(module, change)


def adam_lost(module, first, _):
    def change(actor, step, phase):
        if phase == "update" and step == first:
            from mrl.rank.rank_parameters import rank_parameters

            for each in rank_parameters(actor):
                if each.optimizer is not None:
                    for values in each.adam.moments(each.main()).values():
                        if values.is_floating_point() and values.dim():
                            values.zero_()

    _rank_step(module, change)


def softmax(module, first, _):
    """A wrong scale of attention on the last rank."""

    def change(actor, step, phase):
        if phase == "score" and step == first and actor.rank == actor.layout.world_size - 1:
            from mrl.rank.attention import CausalAttention

            for chunk in actor.chunks:
                for layer in chunk.modules():
                    if isinstance(layer, CausalAttention):
                        layer.softmax_scale = 0.1

    _rank_step(module, change)


def gradients(module, first, _):
    """The last replica's gradients are lost before they are summed."""
    from megatron.core.distributed import DistributedDataParallel

    lost = {"now": False}
    finish = DistributedDataParallel.start_grad_sync

    def finished(self, *arguments, **named):
        if lost["now"]:
            for buffer in (*self.buffers, *self.expert_parallel_buffers):
                buffer.grad_data.zero_()
        return finish(self, *arguments, **named)

    def change(actor, step, phase):
        lost["now"] = step >= first and actor.rank == actor.layout.world_size - 1

    DistributedDataParallel.start_grad_sync = finished
    _rank_step(module, change)


def temperature(module, first, responses):
    """Engines sample at another temperature than the ranks compute with."""
    made = module.sampling_parameters
    count = {"asked": 0}

    def colder(request, sampling):
        parameters = made(request, sampling)
        if count["asked"] >= (first - 1) * responses:
            parameters.temperature = 0.6 * sampling.temperature
        count["asked"] += 1
        return parameters

    module.sampling_parameters = colder


PLANTS = {
    "learning_rate": ("mrl.rank.rank_step", learning_rate),
    "adam_lost": ("mrl.rank.rank_step", adam_lost),
    "softmax": ("mrl.rank.rank_step", softmax),
    "gradients": ("mrl.rank.rank_step", gradients),
    "temperature": ("mrl.engine.completions", temperature),
}


class Planter(importlib.abc.MetaPathFinder):
    """Finds one module as Python would, and changes it when it has been executed."""

    def __init__(self, name, plant):
        self._name, self._plant = name, plant

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            self._plant(module)

        spec.loader.exec_module = executed
        return spec


if given := os.environ.get("MRL_PLANTED"):
    which, begins, size = given.split("@")
    where, plant = PLANTS[which]
    sys.meta_path.insert(0, Planter(where, lambda module: plant(module, int(begins), int(size))))
