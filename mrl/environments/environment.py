"""What a model acts on while it answers: begun for a response, acted on by calls, ended.

    class Stairs(Environment):
        \"\"\"Ten steps up, one or two at a time.\"\"\"

        actions = ("climb",)
        repeatable = True

        def reset(self, row, seed):
            self.height = row["extra_info"]["height"]

        def climb(self, steps: int) -> Reply:
            \"\"\"Goes up.

            Args:
                steps: 1 or 2
            \"\"\"
            self.height -= steps
            return Reply(f"{self.height} to go", reward=float(self.height == 0), end=self.height <= 0)

An action is a typed method with a docstring, as a tool is a typed function: the model is told of it alike, calls it
alike, and reads what it returns. Tools are the environment that remembers nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mrl.environments.tool import LONGEST_NAME, Tool
from mrl.errors import ConfigError

LONGEST = 80_000  # characters of an answer, which JSON may make twelve bytes of; the conversation's budget is below
LARGEST_REWARD = 1e30  # as of a score: advantages are float32
MOST_PARTS = 16


@dataclass(frozen=True)
class Action:
    """A call that fits the schema of what it names."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What an action brought. Rewards of a response are summed up; of `parts` of one name the last stays."""

    text: str = ""  # that the model reads
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)  # what the reward is made of, for metrics
    end: bool = False  # it is over: the model reads nothing more


class Environment:
    """Base of environments; an instance is of one response."""

    actions: ClassVar[tuple[str, ...]] = ()  # names of methods that the model may call
    # by name, as chat templates take them: of actions that are no methods, which `step` answers
    schemas: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # whether replies follow from row, seed and actions alone: where its process dies it is begun anew, brought to where
    # it was by the same actions, and acted on again, once
    repeatable: ClassVar[bool] = False
    # what a response has under each name that no reply to it gave: one without a call has these alone
    parts: ClassVar[Mapping[str, float]] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begins. `row`: data_source, ground_truth and extra_info of the data; `seed`: the row's, so that all responses
        to it meet the same.
        """

    def step(self, action: Action) -> Reply | Any:
        """A Reply, or anything that is a text or becomes one as JSON."""
        return getattr(self, action.name)(**action.arguments)

    def close(self) -> None:
        """The response has ended, or this has failed. Not called where its process is lost."""


class ToolBox(Environment):
    """Functions that remember nothing."""

    def __init__(self, tools: Mapping[str, Tool]):
        self._tools = tools

    def step(self, action: Action) -> Any:
        """What the function returns."""
        return self._tools[action.name].function(**action.arguments)


def actions_of(kind: type[Environment], name: str) -> dict[str, Tool]:
    """The actions of an environment, as tools. Raises ConfigError for one that says too little of itself."""
    if not kind.actions and not kind.schemas:
        raise ConfigError(f"environment {name!r} has no actions: name in `actions` the methods that the model may call")
    found = {action: Tool(kind.step, schema) for action, schema in kind.schemas.items()}
    for action in kind.actions:
        method = getattr(kind, action, None)
        if not callable(method):
            raise ConfigError(f"environment {name!r} has no method {action!r}, which its `actions` name")
        found[action] = Tool.of(method.__get__(object()), action)  # bound, so that `self` is no parameter
    return found


def parts_of(kind: type[Environment], name: str) -> dict[str, float]:
    """What an environment declares. Raises ConfigError for what are no parts of a reply."""
    try:
        return dict(reply_of(Reply(parts=kind.parts)).parts)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {name!r} declares `parts` that are none: {error}") from error


def reply_of(value: Any) -> Reply:
    """What was returned as a Reply. Raises TypeError for one of other types, ValueError for a reward that is no
    number.
    """
    reply = value if isinstance(value, Reply) else Reply(value)
    text = reply.text if isinstance(reply.text, str) else _as_json(reply.text)
    if not isinstance(reply.end, bool):
        raise TypeError(f"`end` is {type(reply.end).__name__}, and has to be true or false")
    if not isinstance(reply.parts, Mapping) or len(reply.parts) > MOST_PARTS:
        raise TypeError(f"`parts` have to be at most {MOST_PARTS} numbers by name")
    parts = {_name(name): _number(name, number) for name, number in reply.parts.items()}
    return Reply(text[:LONGEST], _number("reward", reply.reward), parts, reply.end)


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError) as error:
        raise TypeError(f"it is neither a text nor anything that JSON can hold: {error}") from error


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name.encode()) <= LONGEST_NAME:
        raise TypeError(f"a part is named {name!r}; a name is a text of at most {LONGEST_NAME} bytes")
    return name


def _number(name: Any, value: Any) -> float:
    if not isinstance(value, bool | int | float):
        raise TypeError(f"{name!r} is {type(value).__name__} {str(value)[:80]!r}, where a number is expected")
    if not abs(value) <= LARGEST_REWARD:  # an integer may be too large for a float
        said = "too large"
        if isinstance(value, float):
            said = value
        raise ValueError(f"{name!r} is {said}; it has to be finite and at most {LARGEST_REWARD:g}")
    return float(value)
