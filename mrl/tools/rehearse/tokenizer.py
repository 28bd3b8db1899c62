"""Provides the user's tokenizer where there is one, otherwise one with a token a byte and a ChatML template.

The template has the thinking switch of Qwen3's templates, so that data.enable_thinking works with it.
"""

import json
import shutil
from pathlib import Path

from mrl.model.hf_files import HF_FILES

END = "<|im_end|>"
START = "<|im_start|>"
PAD = "<|endoftext|>"
_WHOLE = (PAD, START, END, "<think>", "</think>", "system", "user", "assistant")  # one token each
_OF_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_OWN = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")  # any of them makes a tokenizer
_MULTIPLE = 64  # the vocabulary's size divides by it, because tensor ranks share its rows
_MESSAGE = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
_GENERATION = (
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' "
    "}}{%- endif %}{%- endif %}"
)
_TEMPLATE = f"{{%- for message in messages %}}{_MESSAGE}{{%- endfor %}}{_GENERATION}"
_CALLS = (
    "{{ '<|im_start|>assistant\\n' + message['content'] }}{%- for call in message['tool_calls'] %}"
    "{{ '\\n<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' "
    "+ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
)
_ANSWER = (
    "{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
)
_TOOL_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message['role'] == 'tool' %}"
    f"{_ANSWER}{{%- elif message['tool_calls'] %}}{_CALLS}{{%- else %}}{_MESSAGE}{{%- endif %}}{{%- endfor %}}"
    f"{_GENERATION}"
)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model's folder has a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _OWN)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a model's tokenizer, without its configuration and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in HF_FILES:
        for file in source.glob(pattern):
            if file.name not in ("config.json", "generation_config.json") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder / file.name)


def write_tokenizer(folder: Path, with_tools: bool = False) -> None:
    """Writes mrl's own tokenizer in the format of transformers.

    `with_tools` adds the tokens of calls, and a template that has them in Hermes' format.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _WHOLE[:5]])
    core.add_tokens([AddedToken(word, normalized=False) for word in (*_WHOLE[5:], *(_OF_TOOLS if with_tools else ()))])
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TOOL_TEMPLATE if with_tools else _TEMPLATE, encoding="utf-8")


def vocabulary_size(tokenizer, least: int = 0) -> int:
    """Returns the rows that an embedding needs for a tokenizer. `least` is the model's own number."""
    needed = max(len(tokenizer), least)
    return -(-needed // _MULTIPLE) * _MULTIPLE
