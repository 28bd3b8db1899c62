"""Replaces modules of verl that a user's file imports: its functions that score responses. For hosts without verl.

The replacements are found last: a verl that is installed, or that a user's file puts on its path, is taken instead.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mrl.reward.builtin_rules import DAPO_BOX_TAIL, GSM8K_ANSWER, GSM8K_TAIL, dapo_judged
from mrl.reward.verl_math_reward import math_reward_score

ROOT = "verl"
Lookup = Callable[[str], Any]  # from a name in a module to its value; raises AttributeError or KeyError
_NUMBER = re.compile(r"-?[0-9.,]+")
# data sources that verl's default_compute_score judges by math_reward, and by math_dapo
_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math", "math_dapo_reasoning")


class MockModule(ModuleType):
    """A module in place of one of verl."""

    lookup: Lookup | None = None  # None: it has submodules alone

    def __getattr__(self, name: str) -> Any:
        if self.lookup is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.lookup(name)
        except KeyError:
            raise AttributeError(name) from None


class Finder(MetaPathFinder, Loader):
    """Finds and makes the replacements of this process."""

    def __init__(self) -> None:
        self.modules: dict[str, Lookup] = {}  # by full name

    def find_spec(
        self, full_name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a replaced module, or of a package of some; None below a verl that is not replaced."""
        if full_name != ROOT and not isinstance(sys.modules.get(ROOT), MockModule):
            return None
        if any(f"{module}.".startswith(f"{full_name}.") for module in self.modules):
            return ModuleSpec(full_name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> MockModule:
        """Returns the replacement."""
        return MockModule(spec.name, "Replaces a module of verl, which is not installed.")

    def exec_module(self, module: ModuleType) -> None:
        """Gives the replacement its names."""
        module.lookup = self.modules.get(module.__name__)


_FINDER = Finder()


def mock_verl(modules: Mapping[str, Lookup]) -> None:
    """Makes these modules importable, by their full names, where nothing else has them."""
    _FINDER.modules |= modules
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def missing(error: Exception) -> str:
    """Returns what to add to the message of a failed import of verl's; empty for another error."""
    is_verls = isinstance(error, ImportError) and str(error.name).partition(".")[0] == ROOT
    if not is_verls or not isinstance(sys.modules.get(ROOT, MockModule(ROOT)), MockModule):
        return ""
    return f"; of verl mrl replaces only {', '.join(sorted(_FINDER.modules))}"


def gsm8k_answer(solution_str: str, method: str = "strict") -> str | None:
    """Returns verl's answer: the number after the last `####`, or with "flexible" the last number; None without one."""
    tail = solution_str[-GSM8K_TAIL:]
    if method == "strict":
        return next((number.replace(",", "") for number in reversed(GSM8K_ANSWER.findall(tail))), None)
    if method != "flexible":
        raise ValueError(f"method {method!r}: must be strict or flexible")
    numbers = _NUMBER.findall(tail)
    without_stops = [number for number in numbers if number != "."]
    return next(iter([*without_stops[-1:], *numbers]), None)  # full stops alone are an answer, as verl has it


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Returns `score` for the right number, `format_score` for another one, 0 for none."""
    answer = gsm8k_answer(solution_str, method)
    if answer is None:
        return 0
    if answer == ground_truth:
        return score
    return format_score


def math_dapo_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns verl's three values. With `strict_box_verify` only the last box counts.

    `pause_tokens_index`: four positions; boxes are searched from 100 characters before the last one.
    """
    boxes_from = -DAPO_BOX_TAIL
    if pause_tokens_index is not None:
        boxes_from += pause_tokens_index[3]
    correct, pred = dapo_judged(solution_str, ground_truth, strict_box_verify, boxes_from)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def default_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **_: Any,
) -> float | dict[str, Any]:
    """Scores by data source as verl does.

    Raises NotImplementedError for sources that verl does not know, and for those that need its own verifiers.
    """
    if data_source == "openai/gsm8k":
        return float(gsm8k_score(solution_str, ground_truth))
    if data_source in _DAPO or data_source.startswith("aime"):
        return math_dapo_score(solution_str, ground_truth)
    if data_source in _MATH:
        return math_reward_score(solution_str, ground_truth)
    raise NotImplementedError(f"no score of verl's is replaced for data_source {data_source!r}")


_SCORES = f"{ROOT}.utils.reward_score"
SCORES: dict[str, Lookup] = {
    _SCORES: {"default_compute_score": default_score, "_default_compute_score": default_score}.__getitem__,
    f"{_SCORES}.gsm8k": {"compute_score": gsm8k_score, "extract_solution": gsm8k_answer}.__getitem__,
    f"{_SCORES}.math_dapo": {"compute_score": math_dapo_score}.__getitem__,
    f"{_SCORES}.math_reward": {"compute_score": math_reward_score}.__getitem__,
}
