"""How families call tools: conversations go on token for token as their templates write them, and no text of a tool
becomes a token of the family's own.
"""

import json

import pytest
from dialect_conversations import (
    BORDER,
    FORGED,
    KINDS,
    PARAMETERS,
    SPACE,
    TEXT_OF_TOOLS,
    THOUGHTS,
    UNEXPLAINED,
    Family,
    causes,
)
from dialect_templates import HERMES, TEMPLATES, tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mrl.acting.dialects import Dialect, ToolCall, dialect_of
from mrl.errors import ConfigError

FAMILIES = list(TEMPLATES)
TOOLS = {family: tokenizer(family) for family in FAMILIES}
SPEAKERS = {family: Family(tokens) for family, tokens in TOOLS.items()}
DIALECTS = {family: speaker.dialect for family, speaker in SPEAKERS.items()}
EACH = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_conversations_go_on_as_the_template_writes_them(family, kind):
    """Old tokens stand in front, byte for byte, and all of it is the template's rendering of the whole.

    Every round that is not has a cause that was looked for. Conversations that are only answered have one cause at
    most: a family that writes a call on a line of its own begins a turn of calls alone with a line end, which merges,
    as does a thought with the beginning that a prompt has of it.
    """
    found = causes(SPEAKERS[family], seed=0, conversations=17, kinds=(kind,))[kind]
    assert found["conversations"] == 17 < found["rounds"] and found[UNEXPLAINED] == 0
    if kind == "answered":
        assert found["rounds"] == found["equal"] + found[BORDER] and (
            family in ("coder", "qwen3.5") or not found[BORDER]
        )
    if kind == "forged":
        assert found[TEXT_OF_TOOLS] == found["rounds"], "the template makes tokens of every one of these answers"
    assert found[SPACE] + found[BORDER] <= found["rounds"] // 5


def test_where_a_model_is_not_to_think_the_prompt_holds_an_empty_thought_that_a_template_drops_later():
    speaker = Family(TOOLS["hermes"], enable_thinking=False)
    for found in causes(speaker, seed=0, conversations=17).values():
        assert found[THOUGHTS] == found["rounds"] > 0


class Careless(Family):
    """Text of tools as the family's tokens, or a turn that is closed twice."""

    def __init__(self, wrong):
        super().__init__(TOOLS["hermes"])
        context = self.dialect.context
        if wrong == "tokens":
            self.dialect._plainly = self.ids
        else:
            self.dialect.context = lambda turn, told: [self.dialect.end, *context(turn, told)]


@pytest.mark.parametrize(("wrong", "kind"), [("tokens", "forged"), ("closed twice", "answered")])
def test_what_is_written_wrongly_is_seen(wrong, kind):
    """Where a tool's text becomes tokens, no round has the cause that is expected of each."""
    found = causes(Careless(wrong), seed=0, conversations=8, kinds=(kind,))[kind]
    assert found[TEXT_OF_TOOLS] == 0 < found["rounds"]
    if wrong == "closed twice":
        assert found[UNEXPLAINED] == found["rounds"]


@pytest.mark.parametrize(("said", "value"), [("True", True), ("False", False), ("true", True)])
def test_values_are_read_as_qwen3_coders_own_template_writes_them(said, value):
    written = f"<tool_call>\n<function=calculator>\n<parameter=exact>\n{said}\n</parameter>\n</function>\n</tool_call>"
    ids = TOOLS["coder"].encode(written, add_special_tokens=False)
    assert DIALECTS["coder"].calls(ids, PARAMETERS) == [ToolCall("calculator", {"exact": value})]


@EACH
def test_text_of_a_tool_is_plain_characters_whatever_it_says(family):
    """Against the template, which makes tokens of it: the one listed cause of a difference."""
    tokens, dialect = TOOLS[family], DIALECTS[family]
    sampled = [tokens.convert_tokens_to_ids(dialect.family.frame.end)]
    added = set(tokens.get_added_vocab().values())
    harmless, forged = (dialect.context(sampled, [answer, "17"]) for answer in ("408", FORGED))
    assert [i for i in forged if i in added] == [i for i in harmless if i in added]
    assert FORGED in tokens.decode(forged) and dialect.calls(forged, PARAMETERS) == []
    alone = tokens.encode(FORGED, add_special_tokens=False)
    assert len([i for i in alone if i in added]) >= 5


def test_of_tokens_that_begin_alike_the_longest_is_taken_as_by_the_tokenizer_itself():
    tokens = tokenizer("hermes")
    tokens.add_tokens([AddedToken(word, normalized=False) for word in ("<tool_call>s", "<tool_", "<|im_end|>|")])
    dialect = dialect_of(tokens, {})
    for text in ("<tool_call>s", "a <tool_ b <tool_call> c", "<|im_end|>|<|im_end|>", "<tool_call>sx"):
        assert dialect.encoded([(text, True)]) == tokens.encode(text, add_special_tokens=False)


def test_a_word_of_the_vocabulary_that_is_a_token_of_the_familys_own_is_cut():
    words = ["<unk>", "<|im_end|>", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|im_end|>", "<tool_call>", "</tool_call>"])
    dialect = Dialect(DIALECTS["hermes"].family, core, "")
    assert 1 in core.encode("<|im_end|>").ids
    assert 1 not in dialect._plainly("a <|im_end|> b")


SAID = {
    "hermes": [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": 12*34}}\n</tool_call>', "no JSON"),
        ('<tool_call>\n{"name": "calculator", "arguments": {"digits": NaN}}\n</tool_call>', "NaN"),
        ('<tool_call>\n{"name": "calculator", "arguments": {"digits": [-1e999]}}\n</tool_call>', "-1e999 is no value"),
        ('<tool_call>\n{"name": "calculator", "arguments": "{}"}\n</tool_call>', "no object"),
        ('<tool_call>["calculator"]</tool_call>', "name"),
        ("<tool_call>" + "[" * 100000 + "</tool_call>", "cannot be read"),
        ('<tool_call>\n{"name": "calculator", "arguments": {}}', "not closed"),
        ("<tool_call></tool_call>", "no JSON"),
    ],
    "coder": [
        ("<tool_call><function=calculator><parameter=digits>\nmany\n</parameter>\n</function></tool_call>", "integer"),
        ("<tool_call><function=calculator><parameter=digits>\n1e999\n</parameter>\n</function></tool_call>", "integer"),
        ("<tool_call>\n<function=calculator>\n</tool_call>", "</function>"),
        ("<tool_call>\n<function=calculator>\n12*34\n</function>\n</tool_call>", "is not an argument"),
        ("<tool_call>\n<function=calculator>\n" + "<parameter=digits>\n1\n</parameter>\n" * 2
            + "</function>\n</tool_call>", "twice"),
        ("<tool_call>\n<function=calculator>", "not closed"),
    ],
    "glm": [
        ("<tool_call>calculator\n<arg_key>digits</arg_key>\n<arg_value>1e999</arg_value>\n</tool_call>", "integer"),
        ("<tool_call>calculator\n<arg_key>digits</arg_key>\n<arg_value>many</arg_value>\n</tool_call>", "integer"),
        ("<tool_call>\n<arg_key>digits</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "no name"),
        ("<tool_call>calculator\n<arg_key>digits</arg_key>\n</tool_call>", "is not an argument"),
        ("<tool_call>calculator", "not closed"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("family", "said", "why"), [(f, *case) for f, cases in SAID.items() for case in cases])
def test_a_malformed_call_is_answered_by_what_is_wrong_with_it(family, said, why):
    ids = TOOLS[family].encode(said, add_special_tokens=False)
    (call,) = DIALECTS[family].calls(ids, PARAMETERS)
    assert call.arguments is None and why in call.problem and "This call cannot be read" in call.problem


@EACH
def test_an_unclosed_call_before_another_is_answered_too_and_thoughts_call_nothing(family):
    dialect, tokens = DIALECTS[family], TOOLS[family]
    message = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "calculator", "arguments": {}}}]}  # fmt: skip
    good = SPEAKERS[family].called([{"role": "user", "content": "?"}], message)
    opened = tokens.convert_tokens_to_ids("<tool_call>")
    start = good.index(opened)
    twice = good[start : start + 2] + good[start:]
    assert [call.problem is None for call in dialect.calls(twice, PARAMETERS)] == [False, True]
    thought = tokens.convert_tokens_to_ids("</think>")
    assert dialect.calls([*twice, thought, *good[start:]], PARAMETERS) == [ToolCall("calculator", {})]
    assert dialect.calls(tokens.encode("no call"), PARAMETERS) == []


def test_calls_count_behind_the_last_thought_alone():
    tokens, dialect = TOOLS["hermes"], DIALECTS["hermes"]
    call = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
    said = f"<think>{call.format(1)}</think>{call.format(2)}</think>so {call.format(3)}<|im_end|>"
    ids = tokens.encode(said, add_special_tokens=False)
    assert [each.arguments for each in dialect.calls(ids, PARAMETERS)] == [{"expression": "3"}]
    turn = dialect.said(ids, PARAMETERS)
    assert (turn.content, [each.arguments for each in turn.calls]) == ("so", [{"expression": "3"}])
    assert turn.thought.startswith("<tool_call>") and turn.thought.endswith("</tool_call>")


@EACH
def test_a_thought_that_is_not_closed_is_no_text_and_ends_with_a_call(family):
    """As vLLM's parsers of reasoning have it (Qwen3ParserReasoningAdapter, glm45), for turns that their limit cut."""
    tokens, dialect = TOOLS[family], DIALECTS[family]
    message = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "calculator", "arguments": {}}}]}  # fmt: skip
    called = SPEAKERS[family].called([{"role": "user", "content": "?"}], message)
    call = tokens.decode(called[called.index(tokens.convert_tokens_to_ids("<tool_call>")) :])
    opened = family in ("qwen3.5", "glm-4.7")  # by the template: then all is thought until its end
    for said, thought, content in (
        ("<think>\nhm", "hm", ""),
        ("Write <think> first.", *(("Write  first.", "") if opened else ("", "Write <think> first."))),
        ("<think>\nhm</think>\n\nSo:", "hm", "So:"),
        ("hm", *(("hm", "") if opened else ("", "hm"))),
    ):
        ids = tokens.encode(said, add_special_tokens=False)
        assert dialect.said([*ids, dialect.end], PARAMETERS) == (thought, content, ())
        cut = tokens.encode(said + call, add_special_tokens=False)
        assert dialect.said(cut, PARAMETERS) == (thought, content, (ToolCall("calculator", {}),))
        assert dialect.said(cut, PARAMETERS, with_calls=False).thought == thought
    # and in an argument none begins or ends
    for argument in ("<think>", "a</think>b"):
        message["tool_calls"][0]["function"]["arguments"] = {"expression": argument}
        called = SPEAKERS[family].called([{"role": "user", "content": "?"}], message)
        called = called[called.index(tokens.convert_tokens_to_ids("<tool_call>")) :]
        call = ToolCall("calculator", {"expression": argument})
        if argument == "<think>" or not opened:
            assert dialect.said(called, PARAMETERS) == ("", "", (call,))
        thinks = tokens.encode("<think>hm</think>", add_special_tokens=False)
        assert dialect.calls([*thinks, *called], PARAMETERS) == [call]
        assert dialect.said([*thinks, *called], PARAMETERS) == ("hm", "", (call,))


@EACH
def test_answers_stand_as_the_template_writes_them(family):
    """Qwen3.5's own template writes no white space around them, the others do."""
    tokens, dialect = TOOLS[family], DIALECTS[family]
    message = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "calculator", "arguments": {}}}]}  # fmt: skip
    asked = [{"role": "user", "content": "?"}]
    turn = SPEAKERS[family].called(asked, message)
    answers = ["\ttotal 8\nfile\n", " "]
    told = [{"role": "tool", "content": answer} for answer in answers]
    whole = tokens.apply_chat_template([*asked, message, *told], tokenize=False, add_generation_prompt=True)
    assert whole.endswith(tokens.decode(dialect.context([*turn, dialect.end], answers)))


@EACH
def test_text_that_looks_like_a_call_is_none(family):
    """Sampled as characters, not as the family's token."""
    dialect = DIALECTS[family]
    plain = dialect._plainly('<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>')
    assert dialect.calls(plain, PARAMETERS) == []


def test_a_turn_that_did_not_end_as_the_family_ends_it_is_closed_first():
    dialect, tokens = DIALECTS["hermes"], TOOLS["hermes"]
    other = [tokens.convert_tokens_to_ids("<|endoftext|>")]
    end = tokens.convert_tokens_to_ids("<|im_end|>")
    assert dialect.context(other, ["1"]) == [end, *dialect.context([end], ["1"])]


def test_what_the_template_writes_where_the_model_goes_on_is_kept():
    off = dialect_of(TOOLS["hermes"], {"enable_thinking": False})
    assert off.goes_on.endswith("assistant\n<think>\n\n</think>\n\n")
    end = [TOOLS["hermes"].convert_tokens_to_ids("<|im_end|>")]
    think = TOOLS["hermes"].convert_tokens_to_ids("<think>")
    assert off.context(end, ["1"]).count(think) == 1 and DIALECTS["hermes"].context(end, ["1"]).count(think) == 0
    names = ["Hermes JSON (Qwen3)", "XML (Qwen3-Coder)", "GLM-4.5", "XML (Qwen3.5)", "GLM-4.7"]
    assert [DIALECTS[family].name for family in FAMILIES] == names


REFUSED = {
    "drops thoughts once answered": (
        HERMES.replace("m.reasoning_content or loop.last", "loop.last"),
        "rewrites the turn",
    ),
    "another form": (HERMES.replace("tool_response", "result"), "no form that is known"),
    "no tools": ("{% for m in messages %}{{ m.content }}{% endfor %}", "no form that is known"),
    "raises": ("{{ raise_exception('no tools here') }}", "no tools here"),
}


@pytest.mark.parametrize(("template", "why"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_does_not_go_on_is_refused(template, why):
    with pytest.raises(ConfigError, match=why):
        dialect_of(tokenizer("hermes", template), {})


def test_a_tokenizer_without_the_framing_tokens_is_refused():
    bare = tokenizer("hermes")
    said = json.loads(bare.backend_tokenizer.to_str())
    said["added_tokens"] = [token for token in said["added_tokens"] if "tool_call" not in token["content"]]
    core = Tokenizer.from_str(json.dumps(said))
    with pytest.raises(ConfigError, match="no token <tool_call>"):
        Dialect(DIALECTS["hermes"].family, core, "")
