"""Plants one fault in the processes of a run: Python imports this file at its start, where it is on PYTHONPATH.

MRL_PLANTED=NAME@STEP@RESPONSES names the fault, the first step that has it, and the responses of a step; MRL_MARKS is a
folder of the run for notes of processes to each other. The tool that is to find the fault runs without all this. The
faults themselves are in planted_ranks.py, planted_engines.py and planted_scores.py, beside this file.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys

# name of a fault -> module that it changes, once that is imported; file that has it
PLANTS = {
    "learning_rate": ("mrl.rank.rank_step", "planted_ranks"),
    "adam_lost": ("mrl.rank.rank_step", "planted_ranks"),
    "softmax": ("mrl.rank.rank_step", "planted_ranks"),
    "tensor_scale": ("mrl.rank.rank_step", "planted_ranks"),
    "router_bits": ("mrl.rank.rank_step", "planted_ranks"),
    "rank_temperature": ("mrl.rank.rank_step", "planted_ranks"),
    "gradients": ("mrl.rank.rank_step", "planted_ranks"),
    "not_a_number": ("mrl.rank.rank_step", "planted_ranks"),
    "clip": ("mrl.rank.rank_step", "planted_ranks"),
    "kl_sign": ("mrl.rank.rank_step", "planted_ranks"),
    "routes": ("mrl.rank.rank_batch", "planted_ranks"),
    "old_weights": ("mrl.rank.rank_worker", "planted_ranks"),
    "temperature": ("mrl.engine.completions", "planted_engines"),
    "truncated": ("mrl.generate.generation", "planted_scores"),
    "lone": ("mrl.store.response_store", "planted_scores"),
    "tool": ("mrl.engine.conversations", "planted_engines"),
    "yarn": ("vllm.model_executor.models.qwen3_moe", "planted_engines"),
    "router": ("vllm.model_executor.models.qwen3_moe", "planted_engines"),
    "stale_expert": ("vllm.model_executor.models.qwen3_moe", "planted_engines"),
    "pays_length": ("mrl.cluster.scoring", "planted_scores"),
    "pays_format": ("mrl.cluster.scoring", "planted_scores"),
    "flipped": ("mrl.cluster.scoring", "planted_scores"),
    "truths": ("mrl.cluster.scoring", "planted_scores"),
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
    where, file = PLANTS[which]

    def plant(module):
        getattr(importlib.import_module(file), which)(module, int(begins), int(size))

    sys.meta_path.insert(0, Planter(where, plant))
