"""Writes down what each engine of a run was asked, and what it made of it; for trajectories.py alone.

Python imports this module as it starts, where its folder is in PYTHONPATH. It changes nothing of what it looks at. Each
line of the file in MRL_TURN_MARKS is {"before", "after"}: digests of the ids that vLLM says it was given, and of those
with the ones that it sampled behind them.
"""

import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import struct
import sys

FILE = "MRL_TURN_MARKS"
MODULE = "mrl.engine.vllm_engine"


def digest(ids) -> str:
    """A digest of token ids."""
    return hashlib.blake2b(struct.pack(f"<{len(ids)}q", *ids), digest_size=16).hexdigest()


def write(given, sampled) -> None:
    """Appends a line, in one write."""
    line = {"before": digest(given), "after": digest([*given, *sampled])}
    file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


class _Noting(importlib.abc.MetaPathFinder):
    """Finds the engine's module as everybody would, and has its class noted."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_executed, spec.loader.exec_module)
        return spec


def _executed(run, module) -> None:
    run(module)
    answered = module.VllmEngine._final_output

    @functools.wraps(answered)
    async def noted(engine, name, request, sampling):
        final = await answered(engine, name, request, sampling)
        if sampling.stop_token_ids and final.outputs[0].token_ids:  # the start-up check has no stops
            write(final.prompt_token_ids, final.outputs[0].token_ids)
        return final

    module.VllmEngine._final_output = noted


if FILE in os.environ:
    sys.meta_path.insert(0, _Noting())
