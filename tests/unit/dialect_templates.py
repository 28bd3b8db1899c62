"""Tokenizers with the framing tokens of five families, and templates that frame conversations as those families do.

Written for these tests: what families publish besides (dates, roles of developers, images) is left out.
"""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERMES = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == "assistant" %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content or loop.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

CODER = """{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user\\n' }}{% endif %}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == "assistant" %}
{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GLM = """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == "assistant" %}
{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) }}
{{- '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}
{%- endfor %}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

_JSON_CALL = HERMES[HERMES.index("{%- if not loop.first or m.content") : HERMES.index("{%- endfor %}{{ '<|im_end|>")]
_XML_CALL = CODER[CODER.index("{{- '\\n<tool_call>") : CODER.index("{%- endfor %}{{ '<|im_end|>")]
_XML_CALL = _XML_CALL.replace("'\\n<tool_call>", "('\\n' if not loop.first or m.content else '') + '<tool_call>")
# answers as Qwen3's template has them without white space around them, calls as Qwen3-Coder's, and the model goes on
# inside of a thought
QWEN35 = (
    HERMES.replace(_JSON_CALL, _XML_CALL)
    .replace("m.content", "m.content|trim")
    .replace("{%- if m.reasoning_content or loop.last %}", "{%- if true %}")
    .replace("</think>\\n\\n' }}{% endif %}", "</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}")
)
# GLM-4.5's without line ends, and with the same
GLM47 = GLM.replace("{{ '\\n' + m.content }}", "{{ m.content }}").replace("\\n", "")
GLM47 = GLM47.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}")

SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
_SAID = (
    "{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}"
    + SHOWN
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)


def seeing(template: str) -> str:
    """The same template, which also writes messages whose contents are parts, as those of Qwen3-VL and Qwen3.5 do."""
    return _SAID + template.replace("m.content", "said(m.content)")


# special ones, and the others
TOKENS = {
    "hermes": (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]),
    "glm": (["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<arg_key>",
            "</arg_key>", "<arg_value>", "</arg_value>"]),
}  # fmt: skip
TEMPLATES = {"hermes": HERMES, "coder": CODER, "glm": GLM, "qwen3.5": QWEN35, "glm-4.7": GLM47}
WORDS = [
    "the",
    "answer",
    "is",
    "12*34",
    "=",
    "408",
    "and",
    "<tool_call>",
    "or",
    "im_end,",
    "tool_response:",
    "{}",
    "[]",
    '"',
    "\n\n",
    "",
    "naïve",
    "café",
    "数学",
    "\\n",
]


@cache
def _trained(family: str) -> str:
    """A BPE of bytes with some hundred merges, and a family's tokens, as JSON."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    special, others = TOKENS[family]
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(token, normalized=False) for token in others])
    return core.to_str()


def tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """One of its own for each call: trained once, and read again."""
    core = Tokenizer.from_str(_trained("glm" if family.startswith("glm") else "hermes"))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    made.chat_template = template or TEMPLATES[family]
    return made
