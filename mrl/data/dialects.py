"""How a model's family writes calls of tools and reads their answers: token ids in, token ids out.

    sampled ids  --calls-->   what was called, and what is wrong with a call
    answers      --context--> ids that go behind the sampled ones, so that the model may go on

The next prompt is all tokens so far and the context behind them: nothing that was sampled is decoded and tokenised
again. An example of Hermes, with a bracket around each token of the family's own:

    sampled   [<tool_call>] {"name": "calculator", "arguments": {"expression": "12*34"}} [</tool_call>] [<|im_end|>]
    context   \\n [<|im_start|>] user\\n [<tool_response>] \\n408\\n [</tool_response>] [<|im_end|>] \\n [<|im_start|>]
              assistant\\n

A call is one where the model sampled the family's own token, and the text of an answer is plain characters, whatever it
says: `<|im_end|>` in it ends nothing. That alone differs from what the template makes of such an answer. A dialect is
found by what the tokenizer's own template writes of a conversation, not by the name of the model.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from mrl.data.dataset import ChatTokenizer
from mrl.errors import ConfigError

# of each tool its parameters, each the JSON schema of its value
Parameters = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it. `problem`: what is wrong with it, for the model; it then calls nothing."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    problem: str | None = None


class Said(NamedTuple):
    """A turn as a message."""

    thought: str
    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Frame:
    """What a family's template writes around the answers of tools."""

    end: str  # the token that a turn with calls ends with
    begin: str  # before the first answer
    before: str  # each answer
    after: str
    close: str  # how what is behind the last begins


@dataclass(frozen=True)
class CallForm:
    """How the models of a family write calls: the frame, and how the text inside <tool_call> is read."""

    name: str
    frame: Frame
    read: Callable[[str, Parameters], ToolCall]
    mark: str  # what the template writes of a call to `tool` with the argument `key`
    example: str  # of a call in the family's form


class ToolTokenizer(ChatTokenizer, Protocol):
    """What is needed of a Hugging Face tokenizer."""

    backend_tokenizer: Tokenizer


OPEN = "<tool_call>"
CLOSE = "</tool_call>"
THINK = "<think>"
THOUGHT = "</think>"
_ANSWERS = ("first answer", "second answer")


class Dialect:
    """One family, in the tokens of one tokenizer."""

    def __init__(self, family: CallForm, tokenizer: Tokenizer, goes_on: str):
        """`goes_on`: what the template writes behind the answers. Raises ConfigError where a token is missing."""
        self.name = family.name
        self.family = family
        self.goes_on = goes_on
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: number for number, token in added.items()}
        self._ends = {number for number, token in added.items() if token.special}  # of any turn
        self._plain = _without_added_tokens(tokenizer)
        # the longest first, so that none is taken for a part of another
        self._own = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        missing = [token for token in (OPEN, CLOSE, family.frame.end) if token not in self._added]
        if missing:
            raise ConfigError(
                f"model.path: the tokenizer has no token {missing[0]}, and tools are called in the form of "
                f"{family.name}; add it to the tokenizer, or take a model that was trained to call tools"
            )

    @property
    def end(self) -> int:
        """Id of the token that a turn with calls ends with."""
        return self._added[self.family.frame.end]

    @property
    def own_tokens(self) -> Sequence[str]:
        """The family's own tokens, the longest first."""
        return sorted(self._added, key=len, reverse=True)

    def calls(self, ids: Sequence[int], parameters: Parameters) -> list[ToolCall]:
        """What a turn calls, in order; calls that it thought of, before the last </think>, are none."""
        _, ids = self._without_thought(ids)
        found = []
        while self._added[OPEN] in ids:
            ids = ids[ids.index(self._added[OPEN]) + 1 :]
            found.append(self._call(self._until_closed(ids), parameters))
        return found

    def said(self, ids: Sequence[int], parameters: Parameters) -> Said:
        """A turn as a message: its thoughts, its text, in which calls that cannot be read stay, and the other calls."""
        thought, ids = self._without_thought(ids)
        if ids and ids[-1] in self._ends:
            ids = ids[:-1]
        content = ""
        calls = []
        while self._added[OPEN] in ids:
            start = ids.index(self._added[OPEN])
            inside = self._until_closed(ids[start + 1 :])
            call = self._call(inside, parameters)
            end = start + 1
            if call.problem is None:
                calls.append(call)
                content += self._text(ids[:start])
                end += len(inside) + 1
            else:
                content += self._text(ids[:end])
            ids = ids[end:]
        content += self._text(ids)
        return Said(self._text(thought).replace(THINK, "").strip(), content.strip(), tuple(calls))

    def _without_thought(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens before the last </think>, and those behind it."""
        ids = list(ids)
        thought = self._added.get(THOUGHT)
        if thought not in ids:
            return [], ids
        end = len(ids) - ids[::-1].index(thought)
        return ids[: end - 1], ids[end:]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _until_closed(self, ids: list[int]) -> list[int] | None:
        """The tokens of one call; None where another call begins, or the turn ends, before this one is closed."""
        for place, number in enumerate(ids):
            if number == self._added[CLOSE]:
                return ids[:place]
            if number == self._added[OPEN]:
                return None
        return None

    def _call(self, ids: list[int] | None, parameters: Parameters) -> ToolCall:
        if ids is None:
            return self._malformed(f"it is not closed by {CLOSE}")
        call = self.family.read(self._tokenizer.decode(ids, skip_special_tokens=False).strip(), parameters)
        if call.problem is None:
            return call
        return self._malformed(call.problem)

    def _malformed(self, why: str) -> ToolCall:
        return ToolCall(problem=f"This call cannot be read: {why}. A call has the form {self.family.example}")

    def context(self, ids: Sequence[int], answers: Sequence[str]) -> list[int]:
        """Ids behind a turn `ids`: the answers of its tools, in the order of its calls, and where the model goes on.

        A turn that did not end with the family's token is closed by it first. Half a character, as JSON may have it and
        no tokenizer takes it, is a question mark.
        """
        frame = self.family.frame
        ended = len(ids) > 0 and ids[-1] == self.end
        parts = [(frame.begin if ended else frame.end + frame.begin, True)]
        for answer in answers:
            whole = answer.encode("utf-8", "replace").decode()
            parts += [(frame.before, True), (whole, False), (frame.after, True)]
        return self.encoded([*parts, (self.goes_on, True)])

    def encoded(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Encodes texts one behind the other; only in marked ones do tokens of the family stand for themselves."""
        ids: list[int] = []
        plain = ""
        for text, has_tokens in parts:
            start = 0
            for token in self._own.finditer(text) if has_tokens else ():
                ids += self._plainly(plain + text[start : token.start()])
                ids.append(self._added[token[0]])
                plain = ""
                start = token.end()
            plain += text[start:]
        return ids + self._plainly(plain)

    def _plainly(self, text: str) -> list[int]:
        """Encodes text without any token of the family's own; where a vocabulary has one as a word, that is cut."""
        if not text:
            return []
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._added.keys() & {self._plain.id_to_token(number) for number in ids}:
            return ids
        token = self._own.search(text)
        middle = token.start() + 1 if token else len(text) // 2
        return self._plainly(text[:middle]) + self._plainly(text[middle:])


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": [], "post_processor": None}))


def dialect_of(tokenizer: ToolTokenizer, template_arguments: Mapping[str, Any]) -> Dialect:
    """The dialect whose frame the tokenizer's template writes around answers.

    Raises ConfigError for a frame that is not known. It does so too where the template writes a turn with calls
    otherwise once it is answered: the next prompt would not go on from the tokens before it.
    """
    call = {"type": "function", "function": {"name": "tool", "arguments": {"key": 1}}}
    # thoughts too: a template may write a turn without any otherwise while it is the last
    turn = {"role": "assistant", "content": "", "reasoning_content": "thought", "tool_calls": [call] * 2}
    asked = [{"role": "user", "content": "question"}, turn]
    told = [{"role": "tool", "content": answer} for answer in _ANSWERS]
    try:
        before = tokenizer.apply_chat_template(asked, tokenize=False, **template_arguments)
        after = tokenizer.apply_chat_template(
            asked + told, tokenize=False, add_generation_prompt=True, **template_arguments
        )
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"model.path: the chat template cannot write calls of tools and their answers: {error}"
        ) from error
    for family in FAMILIES:
        goes_on = _goes_on(family.frame, before, after)
        if goes_on is not None and family.mark in before:
            return Dialect(family, tokenizer.backend_tokenizer, goes_on)
    raise ConfigError(
        "model.path: the chat template writes answers of tools in no form that is known "
        f"({', '.join(family.name for family in FAMILIES)}), or does not go on from the turn that called"
    )


def _goes_on(frame: Frame, before: str, after: str) -> str | None:
    """What stands behind the answers, where `after` is `before` and the frame; None where it is not."""
    stem = before.rstrip("\n").removesuffix(frame.end)
    told = frame.end + frame.begin + "".join(frame.before + answer + frame.after for answer in _ANSWERS)
    goes_on = after.removeprefix(stem + told)
    if after.startswith(stem + told) and goes_on.startswith(frame.close):
        return goes_on
    return None


# --- how calls are read -----------------------------------------------------------------------------------------------


def _read_json(text: str, parameters: Parameters) -> ToolCall:
    """Reads a call of the form {"name": ..., "arguments": {...}}."""
    try:
        said = _json_of(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"it is no JSON ({str(error) or type(error).__name__})")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return ToolCall(problem='it is no object with a "name"')
    arguments = said.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(problem='its "arguments" are no object')
    return ToolCall(said["name"], arguments)


def _json_of(text: str) -> Any:
    """The value of a text of JSON. Raises ValueError for numbers that JSON cannot write, and RecursionError."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is no value: it is beyond all floating-point numbers")
    return value


_FUNCTION = re.compile(r"<function=([^<>\n]+)>\n?(.*?)\n?</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_functions(text: str, parameters: Parameters) -> ToolCall:
    """<function=NAME>, a line <parameter=KEY>, the value, </parameter>, ..., </function>"""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return ToolCall(problem="it is no <function=...> that ends with </function>")
    return _of_pairs(function[1], function[2], _PARAMETER, parameters)


def _read_pairs(text: str, parameters: Parameters) -> ToolCall:
    """NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument"""
    name, mark, rest = text.partition("<arg_key>")
    if not name.strip():
        return ToolCall(problem="it has no name")
    return _of_pairs(name.strip(), mark + rest, _ARGUMENT, parameters)


def _of_pairs(name: str, text: str, pair: re.Pattern[str], parameters: Parameters) -> ToolCall:
    """Reads a call whose values are texts; those of parameters of another type are read as JSON."""
    left = pair.sub("", text).strip()
    if left:
        return ToolCall(problem=f"{left[:60]!r} stands between its arguments")
    arguments: dict[str, Any] = {}
    for key, value in pair.findall(text):
        key = key.strip()
        if key in arguments:
            return ToolCall(problem=f"it names {key!r} twice")
        kind = parameters.get(name, {}).get(key, {}).get("type", "string")
        try:
            arguments[key] = value if kind == "string" else _json_of(value)
        except (ValueError, RecursionError):
            return ToolCall(problem=f"{key!r} is no {kind}: {value[:60]!r}")
    return ToolCall(name, arguments)


FAMILIES = (
    CallForm(
        "Hermes JSON (Qwen3)",
        Frame("<|im_end|>", "\n<|im_start|>user", "\n<tool_response>\n", "\n</tool_response>", "<|im_end|>\n"),
        _read_json,
        '{"name": "tool"',
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call>',
    ),
    CallForm(
        "XML (Qwen3-Coder)",
        Frame("<|im_end|>", "\n<|im_start|>user\n", "<tool_response>\n", "\n</tool_response>\n", "<|im_end|>\n"),
        _read_functions,
        "<function=tool>",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    ),
    CallForm(
        "GLM-4.5",
        Frame("<|observation|>", "", "\n<tool_response>\n", "\n</tool_response>", "<|assistant|>"),
        _read_pairs,
        "<arg_key>key</arg_key>",
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    ),
)
