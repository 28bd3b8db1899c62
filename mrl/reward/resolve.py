"""From a RewardSpec to a function. Runs in the workers; a user's file is imported nowhere else."""

import functools
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.reward.items import RewardSpec
from mrl.reward.rules import RULE_OF_DATA_SOURCE, RULES, RewardFunction, Score

AUTO = "auto"


def resolve(spec: RewardSpec) -> RewardFunction:
    """The function of `spec`. Raises ConfigError for an unknown name, and for a user's file that is missing, fails or lacks the name."""
    if spec.path is not None:
        function = _load(Path(spec.path).expanduser(), spec.name)
        return functools.partial(function, **spec.kwargs) if spec.kwargs else function
    if spec.function == AUTO:
        return _by_data_source
    if spec.function not in RULES:
        raise ConfigError(
            f"reward.function: {spec.function!r} is unknown; allowed: {AUTO}, {', '.join(RULES)}, or a custom_reward_function"
        )
    return RULES[spec.function]


def check_data_sources(spec: RewardSpec, data_sources: Iterable[str]) -> None:
    """Raises ConfigError if `auto` has no rule for one of the data's sources; call it before the first response is generated."""
    if spec.path is not None or spec.function != AUTO:
        return
    unknown = sorted(source for source in data_sources if _rule_name(source) not in RULES)
    if unknown:
        raise ConfigError(_no_rule(", ".join(map(repr, unknown))))


def _rule_name(data_source: str) -> str:
    return RULE_OF_DATA_SOURCE.get(data_source, data_source)


def _no_rule(sources: str) -> str:
    known = ", ".join([*RULES, *RULE_OF_DATA_SOURCE])
    return f"reward.function is auto and data_source {sources} has no rule; name a rule in reward.function, or use one of: {known}"


def _by_data_source(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Score:
    rule = RULES.get(_rule_name(data_source))
    if rule is None:
        raise ConfigError(_no_rule(repr(data_source)))
    return rule(data_source, solution_str, ground_truth, extra_info)


def _load(path: Path, name: str) -> RewardFunction:
    """`name` out of the Python file at `path`; modules beside the file can be imported by it."""
    where = f"reward.custom_reward_function.path: {path}"
    if not path.is_file():
        raise ConfigError(f"{where}: no such file (working directory: {Path.cwd()})")
    module_spec = importlib.util.spec_from_file_location("mrl_user_reward", path)
    if module_spec is None:
        raise ConfigError(f"{where}: not a Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    sys.path.append(str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:  # a user's file may even call sys.exit
        raise ConfigError(f"{where}: importing it failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
        raise ConfigError(f"{where}: no function {name!r}; the file defines: {', '.join(defined) or 'no function'}")
    return function
