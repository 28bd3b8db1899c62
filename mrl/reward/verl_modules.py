"""Replaces modules of verl that a user's file imports: its functions that score responses. For hosts without verl.

The scores come from the rules of mrl.reward.builtin_rules.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from mrl.reward.builtin_rules import GSM8K_TAIL, RULES, gsm8k, math_dapo, rule_name

ROOT = "verl"
Lookup = Callable[[str], Any]  # from a name in a module to its value; raises AttributeError or KeyError
_NUMBER = re.compile(r"-?[0-9.,]+")


class StandIn(ModuleType):
    """A module in place of one of verl."""

    def __init__(self, name: str, lookup: Lookup | None = None):
        """Without `lookup` the module has submodules alone."""
        super().__init__(name, "Stands in for a module of verl, which is not installed.")
        self._lookup = lookup
        self.__path__: list[str] = []  # a package, so that a missing submodule is reported by its name

    def __getattr__(self, name: str) -> Any:
        if self._lookup is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._lookup(name)
        except KeyError:
            raise AttributeError(name) from None


def stand_in(modules: Mapping[str, Lookup]) -> None:
    """Makes these modules importable, by their full names. Does nothing if verl is installed."""
    if not isinstance(sys.modules.get(ROOT), StandIn) and _is_there():
        return
    for full_name, lookup in modules.items():
        parts = full_name.split(".")
        for length in range(1, len(parts)):
            _add(".".join(parts[:length]), None)
        _add(full_name, lookup)


def _is_there() -> bool:
    return ROOT in sys.modules or importlib.util.find_spec(ROOT) is not None


def _add(full_name: str, lookup: Lookup | None) -> None:
    known = sys.modules.get(full_name)
    if known is not None:
        known._lookup = known._lookup or lookup
        return
    module = sys.modules[full_name] = StandIn(full_name, lookup)
    parent, _, own = full_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def _gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Returns `score` for the right number, `format_score` for another one, 0 for none."""
    if method == "flexible":
        numbers = [number for number in _NUMBER.findall(solution_str[-GSM8K_TAIL:]) if number not in ("", ".")]
        is_answered = bool(numbers)
        is_right = is_answered and numbers[-1] == ground_truth
    else:
        judged = gsm8k("", solution_str, ground_truth)
        is_answered = bool(judged["answered"])
        is_right = bool(judged["score"])
    if is_right:
        return score
    return format_score * is_answered


def _math_dapo_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """Returns verl's three values. Raises ValueError for the strict box, which mrl lacks."""
    if strict_box_verify:
        raise ValueError("math_dapo with strict_box_verify needs verl itself")
    judged = math_dapo("", solution_str, ground_truth)
    return {"score": judged["score"], "acc": bool(judged["acc"]), "pred": judged["pred"]}


def _default_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> float | dict[str, Any]:
    """Scores by data source. Raises NotImplementedError, as verl does, for one without a rule."""
    rule = RULES.get(rule_name(data_source))
    if rule is None:
        raise NotImplementedError(f"no rule for data_source {data_source!r}")
    if rule is math_dapo:
        return _math_dapo_score(solution_str, ground_truth)
    judged = rule(data_source, solution_str, ground_truth, extra_info)
    if isinstance(judged, Mapping):
        judged = judged["score"]
    return float(judged)


_SCORES = f"{ROOT}.utils.reward_score"
SCORES: dict[str, Lookup] = {
    _SCORES: {"default_compute_score": _default_score, "_default_compute_score": _default_score}.__getitem__,
    f"{_SCORES}.gsm8k": {"compute_score": _gsm8k_score}.__getitem__,
    f"{_SCORES}.math_dapo": {"compute_score": _math_dapo_score}.__getitem__,
}
