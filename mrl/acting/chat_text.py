"""Turns messages of a chat client into tokens, and sampled tokens into a message.

    first request         the model's own chat template writes it, like any prompt
    later messages        only the text that the template writes behind an answer; the tokens before it stay
    sampled tokens        become thoughts, text and calls; a call that cannot be read, or is not wanted, stays text

A template may write earlier turns differently once something follows. Qwen3's drops thoughts once a user speaks. The
tokens before stay all the same, so the model continues from its own tokens. Texts of messages are plain characters:
`<|im_end|>` in one of them ends nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from mrl.acting.chat_api import BadRequest, ChatCall, ChatMessage, ChatRequest
from mrl.acting.dialects import Dialect, ToolTokenizer
from mrl.data.parameter_types import typed_parameters

# characters of one token, as a mean over a text; a longer text is known to be too long without its tokens
MOST_CHARACTERS = 16
_ANSWER = "\ue000"  # stands for an answer of the model; repeated until no message contains it
_NUMBERED = "add_vision_id"  # argument of Qwen's templates
_FIRST_STAND_IN = 0xE001  # first of the characters that stand for the family's own tokens in texts


class ChatText:
    """Reads and writes messages for one tokenizer."""

    def __init__(
        self,
        dialect: Dialect,
        tokenizer: ToolTokenizer,
        template_arguments: Mapping[str, Any],
        enforces_choice: bool = False,
    ):
        """`template_arguments`: arguments of the chat template beside messages and tools.

        `enforces_choice`: where a client demands a call, the beginning of one is written for the model.
        """
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._arguments = template_arguments
        self._enforces_choice = enforces_choice
        asks = {"role": "user", "content": "question"}
        answers = {"role": "assistant", "content": "answer"}
        system = {"role": "system", "content": _ANSWER}
        # where a conversation may have a message of the system: at its beginning, and later
        self._takes_system = (self._writes([system, asks]), self._writes([asks, answers, system]))

    def _writes(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Tells whether the template writes a message that holds _ANSWER."""
        try:
            return _ANSWER in self._written(messages, ())
        except BadRequest:
            return False

    def overridden(self, asked: ChatRequest, said: ChatMessage, own: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the names of what a request asks for and does not get. `own` as in ChatRequest.overridden."""
        names = dict.fromkeys(asked.overridden(own))
        if any(self._read_as_user(position, message) for position, message in enumerate(asked.messages)):
            names["system"] = None
        if self._enforces_choice and asked.chosen is not None and said.calls:
            names.pop("tool_choice", None)
        return tuple(names)

    def _read_as_user(self, position: int, message: ChatMessage) -> bool:
        return message.role == "system" and not self._takes_system[position > 0]

    def begun(self, asked: ChatRequest) -> list[int]:
        """Returns the tokens with which the answer begins, which are not the model's own: of a demanded call."""
        if not self._enforces_choice or asked.chosen is None or not asked.wants_calls:
            return []
        return self._dialect.beginning(asked.chosen)

    def with_ids(self, asked: ChatRequest, most: int) -> ChatRequest:
        """Returns a request that is no conversation with its prompt as token ids.

        Raises BadRequest for unknown ids, and for a text that is known to have more than `most` tokens.
        """
        if asked.raw is not None:
            if len(asked.raw) > MOST_CHARACTERS * most:
                raise BadRequest(f"the prompt has {len(asked.raw)} characters, and at most {most} tokens are taken")
            asked = replace(asked, ids=tuple(self._dialect.encoded([(asked.raw, True)])), raw=None)
        vocabulary = self._dialect.vocabulary
        unknown = [number for number in asked.ids or () if not 0 <= number < vocabulary]
        if unknown:
            raise BadRequest(f"token {unknown[0]} is none of the {vocabulary} of the vocabulary")
        return asked

    def prompt(self, asked: ChatRequest) -> list[int]:
        """Returns the tokens of a whole conversation. Raises BadRequest where the template refuses it."""
        messages, tools, placeholders = self._marked(asked.messages, asked.tools, 0)
        return self._dialect.encoded(_parts(self._written(messages, tools), placeholders))

    def follow(
        self, turn: Sequence[int], messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Returns the tokens that follow a turn: new messages, and the beginning of the model's next answer.

        A turn without the template's end token is closed by it first. Raises BadRequest where the template refuses the
        messages, or does not write them behind an answer.
        """
        if self._arguments.get(_NUMBERED) and any(message.images for message in messages):
            raise BadRequest(
                f"the chat template numbers images ({_NUMBERED}), and cannot go on with that in later turns"
            )
        new, marked_tools, placeholders = self._marked(messages, tools, 1)
        texts = json.dumps([new, marked_tools], ensure_ascii=False)
        answer = _ANSWER
        while answer in texts:
            answer += _ANSWER
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        _, found, behind = self._written([*before, *new], marked_tools).rpartition(answer)
        if not found:
            raise BadRequest("the model's chat template does not write these messages behind an answer")
        ids = self._dialect.encoded(_parts(behind, placeholders))
        if len(turn) and ids and turn[-1] == ids[0]:
            return ids[1:]
        return ids

    def said(self, turn: Sequence[int], asked: ChatRequest, number: int) -> ChatMessage:
        """Returns the sampled tokens of turn `number` as the message that answers a request."""
        if asked.ids is not None:
            return ChatMessage("assistant", self._dialect.text(turn))
        turn = [*self.begun(asked), *turn]
        functions = {tool["function"]["name"]: tool["function"] for tool in asked.tools}
        parameters = {name: typed_parameters(function["parameters"]) for name, function in functions.items()}
        read = self._dialect.said(turn, parameters, asked.wants_calls)
        calls = []
        for call in read.calls:
            name, arguments = _with_placeholders([call.name, call.arguments or {}], {})
            calls.append(ChatCall(f"call_{number}_{len(calls)}", name, arguments))
        return ChatMessage("assistant", read.content, tuple(calls), thought=read.thought)

    def has_call(self, turn: Sequence[int]) -> bool:
        """Tells whether sampled tokens have a call that can be read, by whomever."""
        return bool(self._dialect.said(turn, {}).calls)

    def _written(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        arguments = dict(self._arguments)
        if tools:
            arguments["tools"] = list(tools)
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **arguments
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise BadRequest(f"the model's chat template refuses the conversation: {error}") from error

    def _marked(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], position: int
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]], dict[str, str]]:
        """Replaces each of the family's own tokens in texts of messages and tools by one character. `position` is that
        of the first message in the conversation.

        Returns messages, tools, and the token behind each character. Raises BadRequest for names in a tool's schema
        that a template could write as such a token, between its <>.
        """
        own_tokens = self._dialect.own_tokens
        for name in _names(tools):
            if f"<{name}>" in own_tokens:
                raise BadRequest(f"a tool's schema has the name {name!r}, and <{name}> is a token of the model's own")
        read = (
            replace(message, role="user") if self._read_as_user(position + number, message) else message
            for number, message in enumerate(messages)
        )
        plain = [[message.for_template for message in read], list(tools)]
        texts = json.dumps(plain, ensure_ascii=False)
        tokens = [token for token in own_tokens if token in texts]
        free = (chr(number) for number in count(_FIRST_STAND_IN) if chr(number) not in texts)
        placeholders = {next(free): token for token in tokens}
        marked_messages, marked_tools = _with_placeholders(plain, placeholders)
        return marked_messages, marked_tools, placeholders


def characters(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Counts the characters that a template is given of messages and tools. Names of the form itself do not count."""
    calls = (text for message in messages for call in message.calls for text in (call.name, call.arguments))
    return sum(len(message.content) for message in messages) + _characters([*calls, *tools])


def _characters(value: Any) -> int:
    """Counts the characters of all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(name) + _characters(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0


def _names(value: Any) -> Iterator[str]:
    """Yields all names of mappings in a JSON value."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _names(each)


def _with_placeholders(value: Any, placeholders: Mapping[str, str]) -> Any:
    """Replaces the tokens in all texts of a JSON value by their placeholders, and lone surrogates by question marks:
    JSON may hold them, and neither tokenizers nor clients write them.
    """
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
        for character, token in placeholders.items():
            value = value.replace(token, character)
        return value
    if isinstance(value, Mapping):
        return {
            _with_placeholders(name, placeholders): _with_placeholders(each, placeholders)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_placeholders(each, placeholders) for each in value]
    return value


def _parts(text: str, placeholders: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Cuts a text at its placeholders. Yields (text, whether the family's tokens in it stand for themselves)."""
    if not placeholders:
        yield text, True
        return
    for part in re.split(f"([{''.join(placeholders)}])", text):
        yield placeholders.get(part, part), part not in placeholders
