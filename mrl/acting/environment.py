"""An environment on which a model acts while it answers: it begins with a response, acts on calls, and ends.

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

An action is a typed method with a docstring, just as a tool is a typed function. The model sees it, calls it and reads
its result in the same way. Tools are an environment without memory.
"""

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, ClassVar

from mrl.acting.tool import IMAGES_BYTES, LONGEST_NAME, TYPES, Tool, generator_fault
from mrl.errors import ConfigError

# characters of an answer, which JSON may extend to twelve bytes each; the conversation's budget is lower
LONGEST = 80_000
LARGEST_REWARD = 1e30  # as for a score: advantages are float32
MOST_PARTS = 16
IMAGES = "images"  # of a row for an environment: files of its prompt's images


@dataclass(frozen=True)
class Action:
    """A call that fits the schema of its action."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The result of an action. Rewards of a response are added; of equally named `parts` the last one counts."""

    text: str = ""  # for the model
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward, for metrics
    end: bool = False  # the environment has ended: the model reads nothing more
    # the model sees them before the text: PIL's images, or encoded bytes as of a file
    images: Sequence[Any] = ()


def given_by(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a row's extra_info gives. A parquet file gives every row all keys, with None where it has none."""
    return {key: value for key, value in row["extra_info"].items() if value is not None}


class Environment:
    """Base class of environments. An instance belongs to one response."""

    actions: ClassVar[tuple[str, ...]] = ()  # names of methods that the model may call
    # by name, for chat templates: actions that are not methods, which `step` answers
    schemas: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Tells whether replies depend only on row, seed and actions. If its process dies, such an environment begins again,
    # repeats its former actions, and is asked once more.
    repeatable: ClassVar[bool] = False
    # Tells whether each row needs a task with tests (mrl.acting.sandboxes.tasks).
    has_task: ClassVar[bool] = False
    # values of parts that no reply gave; a response without calls has only these
    parts: ClassVar[Mapping[str, float]] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begins. `row` has data_source, ground_truth and extra_info of the data, and where its prompt shows images
        `images`, a list of files that hold them.

        `seed` belongs to the row, so that all responses to it meet the same environment.
        """

    def step(self, action: Action) -> Reply | Any:
        """Returns a Reply, or a text, or anything that JSON can turn into one."""
        return getattr(self, action.name)(**action.arguments)

    def judge(self) -> Reply | None:
        """Gives a last reward once the response has ended, however it ended. Its text is read by nobody."""
        return None

    def close(self) -> None:
        """Ends, because the response has ended or this has failed. Not called if its process is lost."""


class ToolBox(Environment):
    """Functions without memory."""

    def __init__(self, tools: Mapping[str, Tool]):
        self._tools = tools

    def step(self, action: Action) -> Any:
        """Returns the function's result."""
        return self._tools[action.name].function(**action.arguments)


async def _result(called: Awaitable[Any]) -> Any:
    return await called


_loops: list[Any] = []  # one for this process, because a tool may keep objects bound to it


def settled(value: Any) -> Any:
    """Returns what a call comes to: for a coroutine or another awaitable what it returns, else the value itself."""
    if not inspect.isawaitable(value):
        return value
    if not _loops:
        import asyncio  # here: a fifth of the time in which any process of tools starts

        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(_result(value))


def actions_of(kind: type[Environment], name: str) -> dict[str, Tool]:
    """Returns an environment's actions as tools. Raises ConfigError for an incomplete declaration."""
    if not kind.actions and not kind.schemas:
        raise ConfigError(f"environment {name!r} has no actions: name in `actions` the methods that the model may call")
    if not isinstance(kind.repeatable, bool):
        raise ConfigError(f"environment {name!r}: `repeatable` is {kind.repeatable!r}, and has to be True or False")
    found = {action: Tool(kind.step, _checked(name, action, schema)) for action, schema in kind.schemas.items()}
    for action in kind.actions:
        method = getattr(kind, action, None)
        if not callable(method):
            raise ConfigError(f"environment {name!r} has no method {action!r}, which its `actions` name")
        found[action] = Tool.of(method.__get__(object()), action)  # bound, so that `self` is no parameter
    for method in ("reset", "step", "judge", "close"):
        if fault := generator_fault(getattr(kind, method)):
            raise ConfigError(f"environment {name!r}: {method} {fault}")
    return found


def _checked(name: str, action: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an action's schema. Raises ConfigError where calls of it could not be read."""
    own = schema.get("function", {})
    given = own.get("parameters", {})
    properties = given.get("properties", {})
    if own.get("name") != action or len(action.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"environment {name!r}: the schema of {action!r} is named {own.get('name')!r}; both need one name of at "
            f"most {LONGEST_NAME} bytes"
        )
    if "properties" not in given or "required" not in given:
        raise ConfigError(f"environment {name!r}: the schema of {action!r} needs `properties` and `required`")
    for parameter, described in properties.items():
        kind = described.get("type")
        if not isinstance(kind, str) or kind not in TYPES:
            raise ConfigError(
                f"environment {name!r}: parameter {parameter!r} of {action!r} needs a type: {', '.join(TYPES)}"
            )
    return schema


def parts_of(kind: type[Environment], name: str) -> dict[str, float]:
    """Returns the parts that an environment declares. Raises ConfigError for invalid ones."""
    try:
        return dict(reply_of(Reply(parts=kind.parts)).parts)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {name!r} declares invalid `parts`: {error}") from error


def reply_of(value: Any) -> Reply:
    """Turns a returned value into a Reply. Raises TypeError for wrong types, ValueError for a reward that is not a
    number.
    """
    reply = value if isinstance(value, Reply) else Reply(value)
    text = reply.text if isinstance(reply.text, str) else _as_json(reply.text)
    if not isinstance(reply.end, bool):
        raise TypeError(f"`end` is {type(reply.end).__name__}, and has to be true or false")
    if not isinstance(reply.parts, Mapping) or len(reply.parts) > MOST_PARTS:
        raise TypeError(f"`parts` have to be at most {MOST_PARTS} numbers by name")
    parts = {_name(name): _number(name, number) for name, number in reply.parts.items()}
    return Reply(text[:LONGEST], _number("reward", reply.reward), parts, reply.end, encoded(reply.images))


def encoded(images: Sequence[Any]) -> tuple[bytes, ...]:
    """Returns images as bytes of files: PIL's as PNG, which keeps all pixels. Raises TypeError for anything else, and
    for more than IMAGES_BYTES.
    """
    if not isinstance(images, list | tuple):
        raise TypeError(f"`images` is {type(images).__name__}, and has to be a list")
    found = tuple(_encoded(image, number) for number, image in enumerate(images, 1))
    if (size := sum(map(len, found))) > IMAGES_BYTES:
        raise TypeError(f"its images have {size} bytes, and at most {IMAGES_BYTES} are taken")
    return found


def _encoded(image: Any, number: int) -> bytes:
    if isinstance(image, bytes):
        return image
    from PIL.Image import Image  # here: few tools answer images

    if not isinstance(image, Image):
        raise TypeError(f"image {number} is {type(image).__name__}: images of PIL and encoded bytes are taken")
    out = BytesIO()
    try:
        image.save(out, "PNG", compress_level=1)
    except Exception as error:  # an image that is read only now, or of colours that PNG does not have
        raise TypeError(f"image {number} cannot be written as PNG: {error}") from error
    return out.getvalue()


def _as_text(value: Any) -> str:
    """Returns the text of a value that JSON does not know. Raises TypeError for one whose text says nothing."""
    if isinstance(value, Iterator | AsyncIterator | Awaitable | Callable):
        raise TypeError(f"it has a {type(value).__name__}, which is no answer yet: return what that gives")
    return str(value)


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_text)
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
        problem = "too large"
        if isinstance(value, float):
            problem = value
        raise ValueError(f"{name!r} is {problem}; it has to be finite and at most {LARGEST_REWARD:g}")
    return float(value)
