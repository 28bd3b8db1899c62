"""Tries a user's loss before anything is started, in a process of its own that loads torch.

The driver has no other use for torch. Without torch on this host nothing is tried, and the ranks tell.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.config.schema import AlgorithmConfig, DistillationConfig
from mrl.errors import ConfigError
from mrl.platforms.imports import needs_ranks
from mrl.rank.loss_parameters import loss_parameters
from mrl.reward.process import PACKAGE_ROOT

if TYPE_CHECKING:
    from mrl.algo.losses import LossInputs  # imports torch

PATIENCE_S = 120.0  # torch alone may take half a minute from a shared folder
_LENGTHS = (3, 1)  # response tokens of the made-up micro-batch


def try_loss(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
    """Loads the user's loss, if there is one on this host, and asks it about a made-up micro-batch.

    Raises ConfigError if it cannot be loaded or fails. If the process itself fails, this is printed and nothing is
    refused.
    """
    own = algorithm.policy_loss.custom
    if own is None or not Path(own.path).is_file() or importlib.util.find_spec("torch") is None:
        return
    asked = {"algorithm": algorithm, "distillation": distillation}
    # ranks find modules in the current directory too, after all others
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "mrl.driver.own_loss"],
            input=json.dumps({name: section.model_dump(mode="json") for name, section in asked.items()}),
            capture_output=True,
            text=True,
            env=environment,
            timeout=PATIENCE_S,
            check=True,
        )
        refused = json.loads(ended.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        print(f"{own.path} was not tried before the start ({error}); the ranks load it", file=sys.stderr)
        return
    if refused is not None:
        raise ConfigError(refused)


def refusal(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> str | None:
    """Returns why the user's loss cannot be trained with; None if it can."""
    try:
        _ask(loss_parameters(algorithm, distillation), algorithm, distillation.enabled)
    except ConfigError as error:
        return str(error)
    return None


def _ask(parameters: PolicyLossParameters, algorithm: AlgorithmConfig, has_teacher: bool) -> None:
    """Computes loss and gradient of a made-up micro-batch.

    Raises ConfigError if the user's function fails, unless it needs a device or process groups, which only ranks have.
    """
    from mrl.algo.losses import CUSTOM_LOSS_KEY, policy_loss

    inputs = _made_up(algorithm, has_teacher)
    try:
        made = policy_loss(parameters, inputs, Denominators(sum(_LENGTHS), len(_LENGTHS)))
        made.loss.backward()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        if needs_ranks(error):
            return
        raise ConfigError(
            f"{CUSTOM_LOSS_KEY}: {algorithm.policy_loss.custom.path}: asked about a made-up micro-batch of "
            f"{len(_LENGTHS)} responses, {parameters.loss_mode} raised {type(error).__name__}: {error}; constants "
            "are read from algorithm.policy_loss.custom.parameters"
        ) from error


def _made_up(algorithm: AlgorithmConfig, has_teacher: bool) -> "LossInputs":
    """Makes a micro-batch of responses with all columns that an update would have."""
    import torch

    from mrl.algo.losses import LossInputs

    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    log_probs = -1.0 - torch.arange(mask.numel(), dtype=torch.float32).reshape(mask.shape) / 10
    current = log_probs.clone().requires_grad_()
    columns: dict[str, Any] = {}
    if algorithm.needs_reference:
        columns["ref_log_probs"] = log_probs - 0.2
    if algorithm.rollout_correction.level is not None:
        columns["weights"] = torch.ones(mask.shape)
    if has_teacher:
        columns["teacher_log_probs"] = log_probs - 0.3
        columns["teacher_top_log_probs"] = torch.stack([log_probs - 1, log_probs - 2], -1)
        columns["top_log_probs"] = torch.stack([current - 2, current - 1], -1)
    return LossInputs(
        current,
        old_log_probs=None if algorithm.on_policy else log_probs - 0.1,
        advantages=torch.tensor([[1.0], [-1.0]]).expand(mask.shape),
        response_mask=mask,
        entropy=1 - current,
        **columns,
    )


def main() -> None:
    """Runs the process with torch.

    Reads two sections of a configuration from standard input and prints the answer as JSON.
    """
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the user's file may print, and what it starts may, too
    algorithm = AlgorithmConfig.model_validate(asked["algorithm"])
    refused = refusal(algorithm, DistillationConfig.model_validate(asked["distillation"]))
    print(json.dumps(refused), file=answers, flush=True)


if __name__ == "__main__":
    main()
