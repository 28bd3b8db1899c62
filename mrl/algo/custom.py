"""A user's loss, loaded from the Python file that the configuration names."""

import hashlib
import importlib.util
import sys
from pathlib import Path

from mrl.algo.losses import TOKEN_LOSSES
from mrl.errors import ConfigError

FIELD = "algorithm.policy_loss.custom.path"


def load_custom_loss(path: str, loss_mode: str) -> None:
    """Runs the file at `path`, once a process, which must bind a function to `loss_mode` with @register_loss. Raises ConfigError."""
    file = Path(path).resolve()
    module = f"mrl_custom_loss_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    before = set(TOKEN_LOSSES)
    if module not in sys.modules:
        _run(file, module)
    if loss_mode not in TOKEN_LOSSES:
        found = ", ".join(sorted(set(TOKEN_LOSSES) - before)) or "nothing"
        raise ConfigError(f'{FIELD}: {file} registers {found}, not {loss_mode!r}; put @register_loss("{loss_mode}") on the function')


def _run(file: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{FIELD}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{FIELD}: {file} cannot be loaded: {type(error).__name__}: {error}") from error
