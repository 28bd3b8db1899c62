"""Makes the prompts of a rehearsal: the first rows of the user's files, cut to fit.

Where a file is not there, synthetic rows take their place.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.data.dataset import BadRow, ChatTokenizer, PromptParameters, parse_row
from mrl.data.row_files import read_rows
from mrl.environments.offer import ENVIRONMENT, Offer
from mrl.errors import DataError
from mrl.tools.rehearse.scoring import ROW

TRAIN_ROWS = 32
VAL_ROWS = 8
_AFTER_TEMPLATE = 16  # tokens for a prompt's own words
Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Rows of one file in verl's schema, and their origin."""

    rows: tuple[Row, ...]
    synthetic: bool
    cut: int  # number of rows whose text was shortened


def least_prompt(tokenizer: ChatTokenizer, parameters: PromptParameters, offer: Offer | None = None) -> int:
    """Returns the tokens of a prompt of a few words under the chat template, with all that may be called."""
    arguments = replace(parameters, tools=None).template_arguments()
    if offer is not None:
        arguments["tools"] = list(offer.all_schemas)
    return _length([{"role": "user", "content": ""}], tokenizer, arguments) + _AFTER_TEMPLATE


def rows_of(
    files: Sequence[str],
    count: int,
    tokenizer: ChatTokenizer,
    parameters: PromptParameters,
    data_source: str,
    first: int = 0,
) -> list[Rows]:
    """Returns rows for each file, about `count` / files of them, whose prompts fit `parameters.max_prompt_length`.

    `data_source` is that of synthetic rows, `first` the number of the first row. Raises DataError as `mrl train` does.
    """
    each = -(-count // max(len(files), 1))
    starts = range(first, first + each * max(len(files), 1), each)
    return [
        _of_file(file, start, each, tokenizer, parameters, data_source)
        for file, start in zip(files or ("",), starts, strict=True)
    ]


def _of_file(
    file: str, start: int, count: int, tokenizer: ChatTokenizer, parameters: PromptParameters, data_source: str
) -> Rows:
    synthetic = not Path(file).is_file()
    made = _synthetic(start, count, data_source, parameters.tools) if synthetic else _read(file, count, parameters)
    conversations = list(made)
    if not conversations:
        raise DataError(f"{file}: no row of it can be used; mrl train says why of each")
    rows = []
    cut = 0
    for number, (messages, rest) in enumerate(conversations, start):
        arguments = parameters.template_arguments(rest["extra_info"])
        fitting = _fitted(messages, number, tokenizer, parameters.max_prompt_length, arguments)
        cut += fitting is not messages
        rows.append(_row(fitting, rest, number, parameters))
    return Rows(tuple(rows), synthetic, cut)


def _read(file: str, count: int, parameters: PromptParameters) -> Iterator[tuple[list[dict[str, str]], Row]]:
    """Yields usable rows from the beginning of a file. `mrl train` reports faults of the others."""
    for raw in read_rows([file], parameters.prompt_key, parameters.reward_fn_key):
        if not count:
            return
        try:
            parsed = parse_row(raw, parameters.prompt_key, parameters.reward_fn_key)
            parameters.template_arguments(parsed[1]["extra_info"])
        except BadRow:
            continue
        count -= 1
        yield parsed


def _synthetic(
    start: int, count: int, data_source: str, offer: Offer | None
) -> Iterator[tuple[list[dict[str, str]], Row]]:
    """Makes up rows. The environments take turns."""
    environments = []
    if offer is not None:
        environments = list(offer.environments)
    for number in range(start, start + count):
        extra_info = {}
        if environments:
            extra_info = {ENVIRONMENT: environments[number % len(environments)]}
        question = f"What is {number} + {2 * number + 1}?"
        answer = str(3 * number + 1)
        yield (
            [{"role": "user", "content": question}],
            {"data_source": data_source, "ground_truth": answer, "extra_info": extra_info},
        )


def _row(messages: list[dict[str, str]], rest: Row, number: int, parameters: PromptParameters) -> Row:
    return {
        parameters.reward_fn_key: rest["data_source"],
        parameters.prompt_key: messages,
        "reward_model": {"style": "rule", "ground_truth": rest["ground_truth"]},
        "extra_info": {**rest["extra_info"], ROW: number},
    }


def _fitted(
    messages: list[dict[str, str]], number: int, tokenizer: ChatTokenizer, longest_prompt: int, arguments: Row
) -> list[dict[str, str]]:
    """Cuts the longest messages from their beginning until the prompt fits.

    A cut prompt begins with its row's number, so that prompts stay different.
    """
    excess = _length(messages, tokenizer, arguments) - longest_prompt
    if excess <= 0:
        return messages
    texts = [message["content"] for message in messages]
    mark = f"{number}: "
    while excess > 0:
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        if not texts[longest]:
            raise DataError(f"the chat template alone takes more than {longest_prompt} tokens (data.max_prompt_length)")
        texts[longest] = texts[longest][max(excess, 1) :]
        marked = [*texts[:-1], mark + texts[-1]]
        cut = [{**message, "content": text} for message, text in zip(messages, marked, strict=True)]
        excess = _length(cut, tokenizer, arguments) - longest_prompt
    return cut


def _length(messages: list[dict[str, str]], tokenizer: ChatTokenizer, arguments: Row) -> int:
    out = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
    )
    return len(out["input_ids"] if isinstance(out, Mapping) else out)


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Writes rows as a JSONL file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")


def synthetic_source(config: RunConfig) -> str:
    """Returns a data source that `reward.function: auto` has a rule for.

    It has parts where the configuration asks for parts.
    """
    asks_for_parts = (
        config.algorithm.filter_groups.metric not in ("score", "reward") or config.algorithm.gdpo_reward_keys
    )
    if asks_for_parts:
        return "math_dapo"
    return "openai/gsm8k"
