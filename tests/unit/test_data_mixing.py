"""Mixing, duplicates, the thinking switch, rows that are no text, and what a large file costs."""

import json
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import CharTokenizer, load, row, write_jsonl, write_parquet

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.data.order import DataCursor, PromptStream, epoch_counts, mixed_order
from mrl.data.prompt_store import SeenPrompts
from mrl.errors import ConfigError, DataError
from mrl.model import known_spec


def text(prompt) -> str:
    return "".join(map(chr, prompt.token_ids)).removeprefix("u:")


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (10, (1, 1), [5, 5]),
        (10, (3, 1), [8, 2]),
        (10, (1, 1, 1), [4, 3, 3]),
        (7, (0, 1), [0, 7]),
        (3, (0.2, 0.2, 0.6), [1, 0, 2]),
    ],
)
def test_shares_of_an_epoch_add_up(total, weights, counts):
    assert epoch_counts(total, weights) == counts


def test_an_epoch_holds_each_file_in_its_share_and_a_files_prompts_evenly():
    # sizes 4 and 8, weights 2:1 -> of 12 draws 8 of the first (each of its prompts twice) and 4 of the second (half of
    # them, once)
    order = mixed_order(seed=3, epoch=0, sizes=(4, 8), weights=(2.0, 1.0), shuffle=True)
    drawn = Counter(order.tolist())
    assert [drawn[i] for i in range(4)] == [2, 2, 2, 2]
    assert sorted(drawn[i] for i in range(4, 12)) == [0] * 4 + [1] * 4
    following = mixed_order(seed=3, epoch=1, sizes=(4, 8), weights=(2.0, 1.0), shuffle=True)
    # two epochs have shown the second file once
    assert {i for i in [*order, *following] if i >= 4} == set(range(4, 12))


def test_mixing_is_a_pure_function_of_seed_and_epoch():
    def order(*key):
        mixed_order.cache_clear()
        return tuple(mixed_order(*key, sizes=(50, 70), weights=(1.0, 1.0), shuffle=True).tolist())

    assert order(1, 2) == order(1, 2)
    assert len({order(1, 2), order(1, 3), order(2, 2)}) == 3


def test_without_shuffle_files_alternate_in_file_order():
    # six draws of the first at 1/12, 3/12, ... 11/12 of the epoch, two of the second at 1/4 and 3/4; the first goes
    # first where they meet
    order = mixed_order(seed=0, epoch=0, sizes=(4, 4), weights=(3.0, 1.0), shuffle=False)
    assert order.tolist() == [0, 1, 4, 2, 3, 0, 5, 1]


def test_a_mixed_order_is_resumed_exactly_from_json(tmp_path):
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [row(f"{name}{i}") for i in range(n)])
        for name, n in (("a", 5), ("b", 9))
    ]

    def stream():
        data = load(files)
        return PromptStream(data, 3, seed=7, sizes=data.sizes, weights=(2.0, 1.0))

    whole, states, cursor = [], [], DataCursor()
    for _ in range(12):
        states.append(json.dumps(vars(cursor)))
        batch, cursor = stream().next_batch(cursor)
        whole.append([text(p) for p in batch])
    assert {t[0] for batch in whole for t in batch} == {"a", "b"}
    mixed_order.cache_clear()
    cursor = DataCursor(**json.loads(states[6]))
    for expected in whole[6:]:
        batch, cursor = stream().next_batch(cursor)
        assert [text(p) for p in batch] == expected


def test_a_weighted_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(DataError, match="file number 2"):
        PromptStream(list(range(4)), 2, seed=0, sizes=(4, 0), weights=(1.0, 1.0))


@pytest.mark.parametrize(
    ("weights", "message"),
    [("[1.0]", "has 1 weights for 2 train_files"), ("[1.0, -1.0]", "at least 0"), ("[0, 0]", "one of them more")],
)
def test_weights_that_do_not_fit_the_files_are_refused(weights, message):
    overrides = ["data.train_files=[a.jsonl, b.jsonl]", f"data.train_weights={weights}"]
    broken = violations(load_config("parallel_configs/tiny-moe/cpu.yaml", None, overrides), known_spec("Qwen3-30B-A3B"))
    assert any(v.field == "data.train_weights" and message in v.rule for v in broken)


def test_duplicates_are_dropped_over_all_files_and_counted(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [row("a"), row("b"), row("a", answer="other")])
    second = write_parquet(tmp_path / "b.parquet", [row("b"), row("c")])
    data = load([first, second])
    assert [text(p) for p in data] == ["a", "b", "c"]
    assert (data.report.rows, data.report.kept, data.report.duplicates, data.sizes) == (5, 3, 2, (2, 1))
    assert data[0].ground_truth == "2"  # the first row's
    assert "2 duplicates" in str(data.report)
    assert load([first, second], drop_duplicates=False).sizes == (3, 2)


def test_a_validation_file_loses_no_row_to_the_one_before_it(tmp_path):
    from mrl.driver.assemble_data import load_training, load_validation

    first = write_jsonl(tmp_path / "a.jsonl", [row("a"), row("b"), row("a")])
    second = write_jsonl(tmp_path / "b.jsonl", [row("b"), row("c"), row("c")])
    files = f"[{first}, {second}]"
    overrides = [f"data.train_files={files}", f"data.val_files={files}", "data.train_batch_size=2"]
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", None, overrides).config
    held_out = load_validation(config.data, CharTokenizer())
    assert [text(p) for p in held_out] == ["a", "b", "b", "c"]
    assert (held_out.sizes, held_out.report.duplicates) == ((2, 2), 2)
    assert load_training(config.data, config.trainer.seed, CharTokenizer()).prompts.sizes == (2, 1)


def test_the_same_words_from_another_role_are_another_prompt(tmp_path):
    system = row(prompt=[{"role": "system", "content": "a"}])
    assert len(load(write_jsonl(tmp_path / "a.jsonl", [row("a"), system]))) == 2


def test_seen_prompts_are_a_set():
    seen, reference = SeenPrompts(), set()
    words = [str(i * i % 7919) for i in range(20_000)]
    for word in words:
        assert seen.add(word) == (word not in reference)
        reference.add(word)


class Thinker(CharTokenizer):
    chat_template = "{% if enable_thinking is defined and not enable_thinking %}..."

    def apply_chat_template(self, conversation, enable_thinking=True, **kwargs):
        return super().apply_chat_template(conversation, suffix="" if enable_thinking else "<think></think>", **kwargs)


@pytest.mark.parametrize(("switch", "tail"), [(None, ""), (True, ""), (False, "<think></think>")])
def test_the_thinking_switch_reaches_the_template(tmp_path, switch, tail):
    file = write_jsonl(tmp_path / "a.jsonl", [row("a")])
    assert text(load(file, tokenizer=Thinker(), enable_thinking=switch)[0]) == "a" + tail


def test_a_template_without_the_switch_is_refused_instead_of_ignoring_it(tmp_path):
    class Plain(CharTokenizer):
        chat_template = "{{ messages }}"

    file = write_jsonl(tmp_path / "a.jsonl", [row("a")])
    with pytest.raises(ConfigError, match=r"data\.enable_thinking: the chat template of this model has no such switch"):
        load(file, tokenizer=Plain(), enable_thinking=False)


def test_two_switches_that_contradict_each_other_are_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("a")])
    with pytest.raises(ConfigError, match=r"enable_thinking is False and data\.apply_chat_template_kwargs says True"):
        load(file, tokenizer=Thinker(), enable_thinking=False, apply_chat_template_kwargs={"enable_thinking": True})


def test_a_row_that_is_no_utf8_costs_itself_only(tmp_path):
    good = json.dumps(row("a")).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + b'{"prompt": "\xff"}\n')
    report = load(str(tmp_path / "a.jsonl"), max_bad_row_share=0.5).report
    assert (report.kept, report.bad) == (1, 1)
    assert "utf-8" in str(report)
    broken = pa.array([b"fine", b"\xff\xfe", b"good"], pa.binary()).view(pa.string())
    answers = pa.array([{"ground_truth": "1"}] * 3)
    pq.write_table(
        pa.table({"prompt": broken, "data_source": ["toy"] * 3, "reward_model": answers}), tmp_path / "b.parquet"
    )
    data = load(str(tmp_path / "b.parquet"), max_bad_row_share=0.5)
    assert [text(p) for p in data] == ["fine", "good"]
    assert "row 2: not UTF-8" in str(data.report)


MEASURE = """
import sys
from mrl.data.dataset import PromptDataset, PromptParameters
class Bytes:
    def apply_chat_template(self, conversation, **_): return list(conversation[0]["content"].encode())
def peak():  # getrusage would give the parent's peak, which a process inherits
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
data = PromptDataset.load([sys.argv[1]], Bytes(), PromptParameters())
print(data.report.kept, data.report.duplicates, peak() - before)
"""


def growth(path) -> tuple[int, int, int]:
    """(prompts kept, duplicates, KiB of peak memory beyond the imports) of a fresh process that loads the file."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=300, check=True
    )
    kept, duplicates, kib = done.stdout.split()
    return int(kept), int(duplicates), int(kib)


def write_large(path, rows: int) -> None:
    """A parquet of `rows` different prompts with 4000 bytes of solution each, written a slice at a time."""
    writer = None
    for begin in range(0, rows, 4000):
        table = pa.Table.from_pylist(
            [row(str(i), extra_info={"solution": f"{i:04000d}"}) for i in range(begin, min(begin + 4000, rows))]
        )
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Five times the rows, all different: what grows is the table of prompts seen, 16 to 32 bytes a prompt,
    not the prompts.
    """
    write_large(tmp_path / "small.parquet", 8_000)
    write_large(tmp_path / "large.parquet", 40_000)
    small, large = growth(tmp_path / "small.parquet"), growth(tmp_path / "large.parquet")
    assert (small[0], large[0]) == (8_000, 40_000)
    solutions_kib = 32_000 * 4000 / 1024  # what the large file's rows hold more: 122 MiB
    assert large[2] - small[2] < 0.2 * solutions_kib
