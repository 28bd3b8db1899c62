"""Turns a RewardSpec into a function. Runs in the workers; a user's file is imported nowhere else."""

import difflib
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.errors import ConfigError
from mrl.reward.builtin_rules import RULE_OF_DATA_SOURCE, RULE_OF_PREFIX, RULES, RewardFunction, Score, rule_name
from mrl.reward.items import ACC, RewardSpec
from mrl.reward.math_verifier import load_math_verify
from mrl.reward.reasoning_rule import REASONING, load_reasoning_gym
from mrl.reward.truths import AUTO
from mrl.reward.verl_modules import SCORES, missing, mock_verl

MATH = "math"
PATH_KEY = "reward.custom_reward_function.path"
CALLED_WITH = ("data_source", "solution_str", "ground_truth", "extra_info")  # verl's names


def resolve(spec: RewardSpec) -> RewardFunction:
    """Returns the function of `spec` with its bonus rules, ready to run.

    Raises ConfigError for an unknown name, and for a user's file that is missing, fails or lacks the name. It also does
    if math-verify is needed but missing.
    """
    function = _main_function(spec)
    for rule, load in ((MATH, load_math_verify), (REASONING, load_reasoning_gym)):
        if rule in _rules_used(spec):
            try:
                load()  # now, not within the first sample's deadline
            except ImportError as error:
                raise ConfigError(f"reward.function: {error}") from error
    for name in spec.bonus_rules:
        _known_rule(name, "reward.bonus_rules")
    if spec.bonus_rules:
        return _with_bonus(function, spec.bonus_rules)
    return function


def _main_function(spec: RewardSpec) -> RewardFunction:
    if spec.path is not None:
        path = Path(spec.path)
        where = f"{PATH_KEY}: {path}"
        function = load_function(load_module(path, PATH_KEY), spec.name, where)
        _check_call(function, spec, where)
        if spec.kwargs:
            return functools.partial(function, **spec.kwargs)
        return function
    if spec.function == AUTO:
        return _by_data_source
    return _known_rule(spec.function, "reward.function")


def _check_call(function: Callable[..., Any], spec: RewardSpec, where: str) -> None:
    """Raises ConfigError for a function that does not take the names of a row, and for an async one."""
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__):
        raise ConfigError(
            f"{where}: {spec.name} is async, and a reward is a plain function; put asyncio.run(...) inside of one: "
            "reward.num_workers responses are judged beside each other"
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a function of C has none that can be read
        return
    try:
        signature.bind(**{**dict.fromkeys(CALLED_WITH), **spec.kwargs})
    except TypeError as error:
        raise ConfigError(
            f"{where}: {spec.name}{signature} is called for one response at a time, by the names "
            f"{', '.join(CALLED_WITH)} and those under reward.custom_reward_function.reward_kwargs: {error}"
        ) from None


def _rules_used(spec: RewardSpec) -> set[str]:
    main = ()
    if spec.path is None:
        main = map(rule_name, spec.data_sources) if spec.function == AUTO else (spec.function,)
    return {*main, *spec.bonus_rules}


def _known_rule(name: str, key: str) -> RewardFunction:
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1)
        hint = ""
        if near:
            hint = f" (nearest: {near[0]})"
        raise ConfigError(
            f"{key}: {name!r} is unknown{hint}; allowed: {AUTO}, {', '.join(RULES)}, or a custom_reward_function"
        )
    return RULES[name]


def _with_bonus(function: RewardFunction, weights: Mapping[str, float]) -> RewardFunction:
    """Returns a function that adds weight x score of each bonus rule. Each is kept as a part with its rule's name.

    The function's own score becomes the part `main`. `acc` stays unchanged, so a bonus does not make an answer more
    right.
    """

    def score(**row: Any) -> Score:
        value = function(**row)
        parts = dict(value) if isinstance(value, dict) else {"score": value, ACC: value}
        extra = {name: float(_plain(RULES[name](**row))) for name in weights}
        if not isinstance(parts.get("score"), bool | int | float):
            return value  # it is judged, and refused, unchanged
        total = float(parts["score"]) + math.fsum(weight * extra[name] for name, weight in weights.items())
        return {**parts, **extra, "main": float(parts["score"]), "score": total}

    return score


def _plain(value: Score) -> float:
    if isinstance(value, dict):
        return value["score"]
    return value


def check_data_sources(spec: RewardSpec, data_sources: Iterable[str]) -> None:
    """Raises ConfigError if `auto` has no rule for one of the data's sources. Call it before generating responses."""
    if spec.path is not None or spec.function != AUTO:
        return
    unknown = sorted(source for source in data_sources if rule_name(source) not in RULES)
    if unknown:
        raise ConfigError(_no_rule(", ".join(map(repr, unknown))))


def _no_rule(sources: str) -> str:
    known = ", ".join([*RULES, *RULE_OF_DATA_SOURCE, *(f"{prefix}..." for prefix in RULE_OF_PREFIX)])
    return (
        f"reward.function is auto and data_source {sources} has no rule; name a rule in "
        f"reward.function, or use one of: {known}"
    )


def _by_data_source(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Score:
    rule = RULES.get(rule_name(data_source))
    if rule is None:
        raise ConfigError(_no_rule(repr(data_source)))
    return rule(data_source, solution_str, ground_truth, extra_info)


def load_module(path: Path, key: str) -> ModuleType:
    """Loads the user's Python file at `path`, which `key` names. The file can import modules in its folder, and scores
    of verl.
    """
    mock_verl(SCORES)
    where = f"{key}: {path}"
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
        raise ConfigError(f"{where}: importing it failed: {type(error).__name__}: {error}{missing(error)}") from error
    return module


def load_function(module: ModuleType, name: str, where: str) -> Callable[..., Any]:
    """Returns `name` from a user's file. Raises ConfigError."""
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__
        )
        raise ConfigError(f"{where}: no function {name!r}; the file defines: {', '.join(defined) or 'no function'}")
    return function
