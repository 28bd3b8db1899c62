"""Ground truths as tables make them: what a built-in rule can never find is a bad row, told by row, before a start."""

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config.load import load_config
from mrl.data.dataset import PromptDataset
from mrl.data.row_files import BadRow, RawRow, parse_row, read_rows
from mrl.driver import first_look
from mrl.driver.assemble_data import prompt_parameters
from mrl.driver.first_look import look
from mrl.errors import ConfigError, DataError
from mrl.reward.items import RewardItem, RewardSpec
from mrl.reward.pool import RewardPool
from mrl.reward.truths import unmatched

TINY = Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"


class _Words:
    def apply_chat_template(self, messages, **_):
        return [1] * len(messages[0]["content"].split())


def write(path: str, source: str, truths: list) -> None:
    rows = [
        {"data_source": source, "prompt": f"question {i}", "reward_model": {"ground_truth": truth, "style": "rule"}}
        for i, truth in enumerate(truths)
    ]
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("source", "truths", "response"),
    [
        ("openai/gsm8k", [42.0, None], "#### 42"),  # whole numbers of a table with a gap
        ("openai/gsm8k", [1000.0], "#### 1,000"),
        ("openai/gsm8k", [Decimal("42.00")], "#### 42"),
        ("openai/gsm8k", [2**62 + 1], f"#### {2**62 + 1}"),
        ("openai/gsm8k", [18.5], "#### 18.5"),
        ("math_dapo", [34.0], "Answer: 34"),
        ("math_dapo", [34.0], r"\boxed{34}"),
        ("math_dapo", [1e22], "Answer: 10000000000000000000000"),
        ("HuggingFaceH4/MATH-500", [34.0], r"\boxed{34}"),
        ("HuggingFaceH4/MATH-500", [["34", "35"]], r"\boxed{35}"),
        ("HuggingFaceH4/MATH-500", [["5}", "35"]], r"\boxed{35}"),  # one of two alternatives can be said
        ("dianjin/x", [["A", "C"]], r"\boxed{AC}"),
        ("exact_match", [42.0], "42"),
    ],
)
def test_a_right_answer_is_right_whatever_kind_of_column_holds_the_truth(source, truths, response):
    write("rows.parquet", source, truths)
    row = parse_row(next(read_rows(["rows.parquet"], "prompt")), "prompt")[1]
    assert unmatched("auto", source, row["ground_truth"]) is None
    with RewardPool(RewardSpec("auto", data_sources=(source,)), num_workers=1) as pool:
        (result,) = pool.score([RewardItem(0, source, response, row["ground_truth"])])
    assert (result.reason, result.score) == ("ok", 1.0)


@pytest.mark.parametrize(
    ("source", "truth", "why"),
    [
        ("openai/gsm8k", ["42"], "is list"),
        (
            "openai/gsm8k",
            "because 40 + 2\n#### 42",
            "is of another form; it takes a number, such as 42; mrl data gsm8k",
        ),
        ("openai/gsm8k", "", "is empty"),
        ("openai/gsm8k", "42 apples", "is of another form"),
        ("math_dapo", ["34"], "is list"),
        ("math_dapo", '["34"]', "is a list written as text"),
        ("aime2024", " ", "is empty"),
        ("math_dapo", "because\n#### 42", "is a whole solution"),
        ("math_dapo", "x" * 400, "is of another form"),
        ("HuggingFaceH4/MATH-500", "", "is empty"),
        ("HuggingFaceH4/MATH-500", [], "is empty"),
        ("HuggingFaceH4/MATH-500", {"answer": 5}, "is dict"),
        ("HuggingFaceH4/MATH-500", "5}", "is of another form"),
        ("dianjin/x", "b", "is of another form; it takes letters"),
        ("dianjin/x", [1], "is of another form; it takes letters"),
        ("exact_match", {}, "is dict"),
        ("exact_match", "", "is empty"),
    ],
)
def test_a_truth_that_no_response_can_match_is_a_bad_row(source, truth, why):
    write("rows.jsonl", source, [truth, truth])
    parameters = prompt_parameters(config("reward.function=auto").data, rule="auto")
    with pytest.raises(DataError) as refused:
        PromptDataset.load(["rows.jsonl"], _Words(), parameters)
    said = str(refused.value)
    assert "rows.jsonl, row 1: rule" in said and why in said and said.endswith("(and 1 more row of the file)")


@pytest.mark.parametrize("rule", ["think_format", "boxed_format", "environment"])
def test_a_rule_that_reads_no_truth_takes_any(rule):
    assert unmatched(rule, "mine", "") is None


def test_a_truth_of_bytes_is_no_truth():
    row = {"data_source": "mine", "prompt": "question", "reward_model": {"ground_truth": b"42"}}
    with pytest.raises(BadRow, match="ground_truth is bytes"):
        parse_row(RawRow("rows.parquet", 0, row), "prompt")


def config(*overrides: str):
    given = ["model.path=Qwen/Qwen3-30B-A3B", "data.train_files=rows.parquet", "data.val_files=rows.parquet"]
    return load_config(TINY, overrides=[*given, *overrides]).config


@pytest.mark.parametrize("whole", [True, False], ids=["all rows", "too many rows"])
def test_validate_says_that_no_answer_can_match(monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(first_look, "READ_WHOLE_BYTES", 0)
    write("rows.parquet", "openai/gsm8k", [f"because {i}+{i}\n#### {2 * i}" for i in range(100)])
    with pytest.raises(DataError, match=r"row 1: rule gsm8k finds no response right: ground_truth 'because 0\+0"):
        look(config("reward.function=auto"))
    write("rows.parquet", "openai/gsm8k", [float(2 * i) for i in range(100)])
    assert look(config("reward.function=auto")).fingerprint is None


def test_a_function_of_ones_own_gets_any_truth():
    Path("own.py").write_text("def compute_score(ground_truth, **_):\n    return float(ground_truth == ['x'])\n")
    write("rows.parquet", "openai/gsm8k", [["x"], ["y"]])
    own = "reward.custom_reward_function={path: own.py, name: compute_score}"
    assert look(config("reward.function=auto", own)).fingerprint is None


def test_a_built_in_rule_is_tried_before_a_start(monkeypatch):
    """As a user's function is: what it needs may not be installed, and its rows may lack what it reads."""
    write("rows.parquet", "reasoning_gym/chain_sum", ["5", "6"])
    with pytest.raises((ConfigError, DataError), match=r"mrl\[games\]|was not made by scripts/make_rows"):
        look(config("reward.function=auto"))
