"""Messages of a chat client as tokens, and tokens that the model sampled as a message.

    the first request     the model's own chat template, as of any prompt
    what comes later      what the template writes behind an answer of the model: the tokens before stay as they are
    what was sampled      thoughts, text and calls; a call that cannot be read stays text

Where a template would write earlier turns otherwise once something follows (Qwen3's leaves thoughts out once a user
speaks), the tokens before stay all the same: the model goes on from what it said. Texts of messages are plain
characters: `<|im_end|>` in one ends nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from mrl.data.chat_api import BadRequest, ChatCall, ChatMessage, ChatRequest
from mrl.data.dialects import Dialect, ToolTokenizer

_ANSWER = "\ue000"  # stands for one of the model's, while a template writes what follows; as many as no message has
_FIRST_STAND_IN = 0xE001  # of the characters that stand for tokens of the family's own in texts


class ChatText:
    """Reads and writes messages for one tokenizer."""

    def __init__(self, dialect: Dialect, tokenizer: ToolTokenizer, template_arguments: Mapping[str, Any]):
        """`template_arguments`: of the chat template, beside messages and tools."""
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._arguments = template_arguments

    def prompt(self, asked: ChatRequest) -> list[int]:
        """The tokens of a whole conversation. Raises BadRequest where the template refuses it."""
        messages, tools, own = self._marked(asked.messages, asked.tools)
        return self._dialect.encoded(_parts(self._written(messages, tools), own))

    def follow(
        self, turn: Sequence[int], messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The tokens that go behind a turn: new messages, and where the model goes on.

        A turn that did not end with the token that the template ends it with is closed by that first. Raises
        BadRequest where the template refuses the messages, or does not write them behind an answer.
        """
        new, marked_tools, own = self._marked(messages, tools)
        texts = json.dumps([new, marked_tools], ensure_ascii=False)
        answer = _ANSWER
        while answer in texts:
            answer += _ANSWER
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        _, found, behind = self._written([*before, *new], marked_tools).rpartition(answer)
        if not found:
            raise BadRequest("the model's chat template does not write these messages behind an answer")
        ids = self._dialect.encoded(_parts(behind, own))
        if len(turn) and ids and turn[-1] == ids[0]:
            return ids[1:]
        return ids

    def said(self, turn: Sequence[int], tools: Sequence[Mapping[str, Any]], number: int) -> ChatMessage:
        """What was sampled in turn `number`, as a message."""
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        parameters = {name: _read_as(function["parameters"]["properties"]) for name, function in functions.items()}
        read = self._dialect.said(turn, parameters)
        numbers = count()
        calls = [ChatCall(f"call_{number}_{next(numbers)}", call.name, call.arguments or {}) for call in read.calls]
        return ChatMessage("assistant", read.content, tuple(calls), thought=read.thought)

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
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]], dict[str, str]]:
        """Messages and tools with a character in the place of each token of the family's own in their texts; and which
        of these characters stands for which.

        Raises BadRequest for names in a tool's schema that a template could write as such a token, between its <>.
        """
        own_tokens = self._dialect.own_tokens
        for name in _names(tools):
            if f"<{name}>" in own_tokens:
                raise BadRequest(f"a tool's schema has the name {name!r}, and <{name}> is a token of the model's own")
        said = [[message.for_template for message in messages], list(tools)]
        texts = json.dumps(said, ensure_ascii=False)
        tokens = [token for token in own_tokens if token in texts]
        free = (chr(number) for number in count(_FIRST_STAND_IN) if chr(number) not in texts)
        own = {next(free): token for token in tokens}
        marked = _with_stand_ins(said, own)
        return marked[0], marked[1], own


def _names(value: Any) -> Iterator[str]:
    """All names of mappings in a value of JSON."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _names(each)


def _read_as(properties: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The one type that a value of each parameter is read as: a text where it may be one."""
    found = {}
    for name, schema in properties.items():
        kinds = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
        is_text = "string" in kinds if isinstance(kinds, list) else kinds == "string"
        found[name] = {"type": "string" if is_text else str(kinds)}
    return found


def _with_stand_ins(value: Any, own: Mapping[str, str]) -> Any:
    """A value of JSON, in whose texts each token is its stand-in."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()  # halves of characters, which JSON may have
        for character, token in own.items():
            value = value.replace(token, character)
        return value
    if isinstance(value, Mapping):
        return {_with_stand_ins(name, own): _with_stand_ins(each, own) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_stand_ins(each, own) for each in value]
    return value


def _parts(text: str, own: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Cuts a text at its stand-ins: (text, whether tokens of the family stand for themselves in it)."""
    if not own:
        yield text, True
        return
    for part in re.split(f"([{''.join(own)}])", text):
        yield own.get(part, part), part not in own
