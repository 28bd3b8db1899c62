"""Tool calls and answers in the form of a model's family: token ids in, token ids out.

    sampled ids  --calls-->   the calls, and the problem of a call that cannot be read
    answers      --context--> ids that follow the sampled ones, up to where the model continues

The next prompt is all tokens so far, followed by the context. Sampled tokens are never decoded and tokenised again. An
example of Hermes, with a bracket around each token of the family's own:

    sampled   [<tool_call>] {"name": "calculator", "arguments": {"expression": "12*34"}} [</tool_call>] [<|im_end|>]
    context   \\n [<|im_start|>] user\\n [<tool_response>] \\n408\\n [</tool_response>] [<|im_end|>] \\n [<|im_start|>]
              assistant\\n

A call begins where the model sampled the family's own token. The text of an answer is plain characters, whatever it
contains: `<|im_end|>` in it ends nothing. Only in this does the context differ from what the template would write. A
dialect is recognised by what the tokenizer's own template writes, not by the name of the model.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from mrl.data.dataset import ChatTokenizer
from mrl.data.parameter_types import json_of, types_of, value_of
from mrl.errors import ConfigError

# tool -> parameter -> JSON schema of its value
Parameters = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it. A call with a `problem` calls nothing; the problem is told to the model."""

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
    """The text that a family's template writes around the answers of tools."""

    end: str  # the token that a turn with calls ends with
    begin: str  # before the first answer
    before: str  # before each answer
    after: str  # after each answer
    close: str  # beginning of the text behind the last answer


@dataclass(frozen=True)
class CallForm:
    """The form in which models of a family write calls: the frame, and a reader of the text inside <tool_call>."""

    name: str
    frame: Frame
    read: Callable[[str, Parameters], ToolCall]
    mark: str  # text that the template writes for a call to `tool` with the argument `key`
    example: str  # a call in the family's form
    begins: str  # text inside <tool_call> before a tool's name
    named: str  # text behind the name, up to the arguments


class ToolTokenizer(ChatTokenizer, Protocol):
    """The part of a Hugging Face tokenizer that dialects use."""

    backend_tokenizer: Tokenizer


OPEN = "<tool_call>"
CLOSE = "</tool_call>"
THINK = "<think>"
THOUGHT = "</think>"
_ANSWERS = ("first answer", "second answer")


class Dialect:
    """One family, in the tokens of one tokenizer."""

    def __init__(
        self,
        family: CallForm,
        tokenizer: Tokenizer,
        goes_on: str,
        image: str | None = None,
        strips: bool = False,
        between: str = "",
    ):
        """`goes_on`: the text that the template writes behind the answers. `image`: what it writes for an image in an
        answer; None: nothing that is known. `strips`: it writes answers without white space around them. `between`:
        what it writes between a thought and a call. Raises ConfigError where a token is missing.
        """
        self.image = image
        self._strips = strips
        self._between = between
        self.name = family.name
        self.family = family
        self.goes_on = goes_on
        self._begins_in_thought = goes_on.rfind(THINK) > goes_on.rfind(THOUGHT)  # the template opens a thought
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: number for number, token in added.items()}
        self._ends = {number for number, token in added.items() if token.special}  # tokens that may end a turn
        self._plain = Tokenizer.from_str(
            json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": [], "post_processor": None})
        )
        # the longest first, so that no token matches as a part of another
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
        """Returns the calls of a turn, in order. Calls in its thoughts do not count."""
        _, ids = self._without_thought(ids)
        calls = []
        while self._added[OPEN] in ids:
            ids = ids[ids.index(self._added[OPEN]) + 1 :]
            calls.append(self._call(self._until_closed(ids), parameters))
        return calls

    def said(self, ids: Sequence[int], parameters: Parameters, with_calls: bool = True) -> Said:
        """Returns a turn as a message: its thoughts, its text and its calls.

        Calls that cannot be read stay in the text, and without `with_calls` all do.
        """
        if len(ids) and ids[-1] in self._ends:
            ids = ids[:-1]
        thought, ids = self._without_thought(ids)
        content = ""
        calls = []
        while with_calls and self._added[OPEN] in ids:
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
        """Returns the thoughts of a turn, and its other tokens.

        Thoughts end with the last </think> that is no part of a call's arguments. Without any, those that the template
        or the turn's first token opens end where the first call begins, as in vLLM's parsers.
        """
        ids = list(ids)
        thinks = self._begins_in_thought
        if (think := self._added.get(THINK)) in ids:
            thinks = thinks or not self._text(ids[: ids.index(think)]).strip()
        if (end := self._thought_end(ids, thinks)) is not None:
            return ids[:end], ids[end + 1 :]
        end = ids.index(self._added[OPEN]) if self._added[OPEN] in ids else len(ids)
        return (ids[:end], ids[end:]) if thinks else ([], ids)

    def _thought_end(self, ids: list[int], thinks: bool) -> int | None:
        """Returns where the last </think> outside of closed calls is. A call in a thought is none: the first </think>
        of a turn that begins with a thought ends it.
        """
        thought = self._added.get(THOUGHT)
        if thought not in ids:
            return None
        end, position = None, 0
        if thinks:
            end = position = ids.index(thought)
        while position < len(ids):
            if ids[position] == thought:
                end = position
            elif ids[position] == self._added[OPEN]:
                position += len(self._until_closed(ids[position + 1 :]) or ())
            position += 1
        return end

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _until_closed(self, ids: list[int]) -> list[int] | None:
        """Returns the tokens of one call; None where another call begins, or the turn ends, before it is closed."""
        for position, number in enumerate(ids):
            if number == self._added[CLOSE]:
                return ids[:position]
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

    def beginning(self, name: str) -> list[int]:
        """Returns the ids with which a call of that tool begins; without a name, those of any call.

        A thought that the template opens is closed before.
        """
        thought = [(THOUGHT + self._between, True)] if self._begins_in_thought else []
        behind = ""
        if name:
            behind = self.family.named
        return self.encoded([*thought, (OPEN, True), (self.family.begins + name + behind, False)])

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def text(self, ids: Sequence[int]) -> str:
        """Returns a turn as text, without the token that ended it."""
        ids = list(ids)
        if ids and ids[-1] in self._ends:
            ids = ids[:-1]
        return self._text(ids)

    def context(self, ids: Sequence[int], answers: Sequence[str], images: Sequence[int] = ()) -> list[int]:
        """Returns the ids that follow a turn `ids`: the answers of its tools, up to where the model continues.

        The answers are in the order of the calls. `images`: how many each begins with; empty for none. Each stands as
        the template writes it (`image`, which then has to be known), with one token of an image. A turn that did not
        end with the family's token is closed by it first. A lone surrogate, which JSON may hold and no tokenizer takes,
        becomes a question mark.
        """
        frame = self.family.frame
        ended = len(ids) > 0 and ids[-1] == self.end
        parts = [(frame.begin if ended else frame.end + frame.begin, True)]
        for answer, count in zip_longest(answers, images, fillvalue=0):
            valid = answer.encode("utf-8", "replace").decode()
            shown = (self.image or "") * count
            if self._strips:
                valid = valid.rstrip() if shown else valid.strip()
            parts += [(frame.before, True), (shown, True), (valid, False), (frame.after, True)]
        return self.encoded([*parts, (self.goes_on, True)])

    def encoded(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Encodes texts one behind the other. Only in marked ones do the family's tokens stand for themselves."""
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
        """Encodes text without any token of the family's own. Where a vocabulary holds one as a word, that word is
        cut.
        """
        if not text:
            return []
        # of `encode` and this, only this one lets other threads of the process run meanwhile
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids = encoded.ids
        if not self._added.keys() & {self._plain.id_to_token(number) for number in set(ids)}:
            return ids
        token = self._own.search(text)
        middle = token.start() + 1 if token else len(text) // 2
        return self._plainly(text[:middle]) + self._plainly(text[middle:])


def dialect_of(tokenizer: ToolTokenizer, template_arguments: Mapping[str, Any]) -> Dialect:
    """Returns the dialect whose frame the tokenizer's template writes around answers.

    Raises ConfigError for an unknown frame. It does so too where the template rewrites a turn with calls once it is
    answered: the next prompt would not continue the tokens before it.
    """
    call = {"type": "function", "function": {"name": "tool", "arguments": {"key": 1}}}
    # with thoughts: without any, a template may write the last turn differently
    turn = {"role": "assistant", "content": "", "reasoning_content": "thought", "tool_calls": [call] * 2}
    conversation = [{"role": "user", "content": "question"}, turn]
    answers = [{"role": "tool", "content": answer} for answer in _ANSWERS]
    try:
        before = tokenizer.apply_chat_template(conversation, tokenize=False, **template_arguments)
        after = tokenizer.apply_chat_template(
            conversation + answers, tokenize=False, add_generation_prompt=True, **template_arguments
        )
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"model.path: the chat template cannot write calls of tools and their answers: {error}"
        ) from error
    for family in FAMILIES:
        goes_on = _goes_on(family.frame, before, after)
        if goes_on is not None and family.mark in before:
            image = _image_in(family.frame, before, tokenizer, conversation, template_arguments)
            wide = [answer | {"content": f"\n {answer['content']} \n"} for answer in answers]
            stripped = tokenizer.apply_chat_template(
                conversation + wide, tokenize=False, add_generation_prompt=True, **template_arguments
            )
            between = before.rpartition(THOUGHT)[2].partition(OPEN)[0]
            return Dialect(family, tokenizer.backend_tokenizer, goes_on, image, stripped == after, between)
    raise ConfigError(
        "model.path: the chat template writes answers of tools in no form that is known "
        f"({', '.join(family.name for family in FAMILIES)}); or it rewrites the turn with the calls once it is answered"
    )


def _goes_on(frame: Frame, before: str, after: str, images: Sequence[str] = ("", "")) -> str | None:
    """Returns the text behind the answers, where `after` is `before` followed by the frame; None where it is not.

    `images`: what stands in front of each answer.
    """
    stem = before.rstrip("\n").removesuffix(frame.end)
    shown = zip(images, _ANSWERS, strict=True)
    answered = frame.end + frame.begin + "".join(frame.before + image + answer + frame.after for image, answer in shown)
    goes_on = after.removeprefix(stem + answered)
    if after.startswith(stem + answered) and goes_on.startswith(frame.close):
        return goes_on
    return None


def _image_in(
    frame: Frame,
    before: str,
    tokenizer: ToolTokenizer,
    conversation: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any],
) -> str | None:
    """Returns the text that the template writes for an image in an answer, wherever it stands; None where there is no
    such text.
    """
    counts = (2, 1)
    answers = [
        {"role": "tool", "content": [*[{"type": "image"}] * count, {"type": "text", "text": answer}]}
        for count, answer in zip(counts, _ANSWERS, strict=True)
    ]
    try:
        after = tokenizer.apply_chat_template(
            [*conversation, *answers], tokenize=False, add_generation_prompt=True, **template_arguments
        )
    except Exception:  # a template of text raises what it likes
        return None
    last = after.partition(_ANSWERS[0])[2].partition(frame.after + frame.before)[2]
    image = last.partition(_ANSWERS[1])[0]
    if not image or _goes_on(frame, before, after, [image * count for count in counts]) is None:
        return None
    return image


# --- how calls are read -----------------------------------------------------------------------------------------------


def _read_json(text: str, parameters: Parameters) -> ToolCall:
    """Reads a call of the form {"name": ..., "arguments": {...}}."""
    try:
        call = json_of(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"it is no JSON ({str(error) or type(error).__name__})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='it is no object with a "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(problem='its "arguments" are no object')
    return ToolCall(call["name"], arguments)


_FUNCTION = re.compile(r"<function=([^<>\n]+)>\n?(.*?)\n?</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_OPENS_PARAMETER = re.compile(r"<parameter=[^<>\n]+>")
_OPENS_ARGUMENT = re.compile(r"<arg_key>|<arg_value>")
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_functions(text: str, parameters: Parameters) -> ToolCall:
    """Reads a call of the form <function=NAME>, lines of <parameter=KEY>, a value and </parameter>, </function>."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return ToolCall(problem="it is no <function=...> that ends with </function>")
    return _of_pairs(function[1], function[2], _PARAMETER, _OPENS_PARAMETER, parameters)


def _read_pairs(text: str, parameters: Parameters) -> ToolCall:
    """Reads a call of the form NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument."""
    name, mark, rest = text.partition("<arg_key>")
    if not name.strip():
        return ToolCall(problem="it has no name")
    return _of_pairs(name.strip(), mark + rest, _ARGUMENT, _OPENS_ARGUMENT, parameters)


def _of_pairs(name: str, text: str, pair: re.Pattern[str], opens: re.Pattern[str], parameters: Parameters) -> ToolCall:
    """Reads a call whose values are texts, by the schemas of its parameters. `opens` begins an argument."""
    left = pair.sub("", text).strip()
    if left:
        return ToolCall(problem=f"{left[:60]!r} is not an argument")
    arguments: dict[str, Any] = {}
    for key, value in pair.findall(text):
        key = key.strip()
        if key in arguments:
            return ToolCall(problem=f"it names {key!r} twice")
        if begun := opens.search(key) or opens.search(value):
            return ToolCall(problem=f"{key!r} is not closed: {begun[0]} begins inside it")
        types = types_of(parameters.get(name, {}).get(key), {})
        try:
            arguments[key] = value_of(value, types)
        except (ValueError, RecursionError):
            return ToolCall(problem=f"{key!r} is no {' or '.join(sorted(types))}: {value[:60]!r}")
    return ToolCall(name, arguments)


_JSON = CallForm(
    "Hermes JSON (Qwen3)",
    Frame("<|im_end|>", "\n<|im_start|>user", "\n<tool_response>\n", "\n</tool_response>", "<|im_end|>\n"),
    _read_json,
    '{"name": "tool"',
    '<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call>',
    '\n{"name": "',
    '", "arguments":',
)
_XML = CallForm(
    "XML (Qwen3-Coder)",
    Frame("<|im_end|>", "\n<|im_start|>user\n", "<tool_response>\n", "\n</tool_response>\n", "<|im_end|>\n"),
    _read_functions,
    "<function=tool>",
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "\n<function=",
    ">\n",
)
_PAIRS = CallForm(
    "GLM-4.5",
    Frame("<|observation|>", "", "\n<tool_response>\n", "\n</tool_response>", "<|assistant|>"),
    _read_pairs,
    "<arg_key>key</arg_key>",
    "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "",
    "\n",
)
_OTHER_FRAMES = (
    replace(_XML, name="XML (Qwen3.5)", frame=_JSON.frame),
    replace(
        _PAIRS,
        name="GLM-4.7",
        frame=Frame("<|observation|>", "", "<tool_response>", "</tool_response>", "<|assistant|>"),
        example="<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
        named="",
    ),
)
FAMILIES = (_JSON, _XML, _PAIRS, *_OTHER_FRAMES)
