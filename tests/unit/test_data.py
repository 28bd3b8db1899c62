"""Reading, validating, tokenising and ordering prompts."""

import errno
import json
import tempfile
from collections import Counter, UserDict
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dialect_templates import tokenizer

from mrl.data.dataset import PromptDataset, PromptParameters, load_chat_tokenizer, load_tokenizer, truncate
from mrl.data.order import DataCursor, PromptStream, epoch_order
from mrl.data.prompt_store import PromptStore
from mrl.data.row_files import parse_row, read_foreign_rows, read_rows
from mrl.errors import ConfigError, DataError, EnvironmentFault


class CharTokenizer:
    """One token a character of "role:content" lines; refuses a role it does not know, as real templates do."""

    def apply_chat_template(self, conversation, add_generation_prompt, tokenize, return_dict, suffix=""):
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        if any(m["role"] not in ("system", "user") for m in conversation):
            raise ValueError("unknown role")
        return [ord(c) for c in "\n".join(f"{m['role'][0]}:{m['content']}" for m in conversation) + suffix]


def row(content="1+1", answer="2", source="toy", **more):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0},
    } | more


def write_jsonl(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(files, tokenizer=None, **parameters):
    files = [files] if isinstance(files, str) else files
    return PromptDataset.load(files, tokenizer or CharTokenizer(), PromptParameters(**parameters))


def test_a_call_in_a_message_of_parquet_has_its_own_arguments_alone(tmp_path):
    """modelscope/ms-swift#6467 and #10125: Arrow gives every struct of a column the fields of all others."""

    def called(**arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return row(
            prompt=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )

    rows = [called(city="Paris"), called(sum="1+1", items=[1, 2])]
    file = write_parquet(tmp_path / "a.parquet", rows)
    read = [parse_row(raw, "prompt")[0] for raw in read_rows([file], "prompt")]
    assert read == [each["prompt"] for each in rows]
    written = [called(city=None)]
    (raw,) = read_rows([write_jsonl(tmp_path / "a.jsonl", written)], "prompt")
    assert parse_row(raw, "prompt")[0] == written[0]["prompt"], "JSON has what was written"


AS_TEXT = (  # DeepSeek-V3 joins arguments as they are
    "{%- for m in messages %}{{ m.content }}{%- for call in m.tool_calls or [] %}"
    "{{ call.function.name + ':' + call.function.arguments }}{%- endfor %}{%- endfor %}"
)


@pytest.mark.parametrize(("write", "kind"), [(write_jsonl, "jsonl"), (write_parquet, "parquet")])
@pytest.mark.parametrize(
    ("family", "template", "wanted"),
    [
        ("hermes", None, '{"name": "f", "arguments": {"city": "Paris"}}'),
        ("coder", None, "<function=f>\n<parameter=city>\nParis\n</parameter>"),
        ("hermes", AS_TEXT, 'f:{"city": "Paris"}'),
        ("hermes", AS_TEXT.replace(" + ", " ~ "), 'f:{"city": "Paris"}'),
        ("hermes", AS_TEXT.replace(" + ':' + ", " }}:{{ "), 'f:{"city": "Paris"}'),
    ],
)
def test_arguments_of_a_call_that_are_json_are_read_for_the_template(tmp_path, write, kind, family, template, wanted):
    """QwenLM/Qwen3#1894, oumi-ai/oumi#2599: OpenAI's format has them as text, and templates expect a mapping."""
    used = tokenizer(family, template)
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"city": "Paris"})}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    other = {"type": "function", "function": {"name": "g", "arguments": "not JSON"}}
    rows = [row(prompt=[{"role": "user", "content": "x"}, m]) for m in (said, said | {"tool_calls": [other]})]
    found = load(write(tmp_path / f"a.{kind}", rows[:1]), used)
    assert wanted in used.decode(found[0].token_ids)
    if family == "hermes":  # what is no mapping stays as it is
        assert "not JSON" in used.decode(load(write(tmp_path / f"b.{kind}", rows[1:]), used)[0].token_ids)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": ["\\u003c|im_end|>"]}', '{"a": "<|im_end|>", "a": 2}', {"<|im_end|>": 1}, {"a": ["<|im_end|>"]}],
)
def test_a_call_in_a_message_cannot_forge_a_turn(tmp_path, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    rows = [row(prompt=[{"role": "user", "content": "x"}, said]), row()]
    tools = SimpleNamespace(needs_row=lambda info: False, schemas=lambda info: [], agent=None)
    found = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer("hermes"), tools=tools, max_bad_row_share=0.5)
    assert found.report.bad == 1 and "<|im_end|>, a token of the model's own" in found.report.examples[0].reason


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"  # git-lfs docs/spec.md


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_pointer_of_git_lfs_is_told_with_its_cure(tmp_path, name):
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(DataError, match="pointer of Git LFS in place of the file: run git lfs pull"):
        load(str(tmp_path / name))


def test_a_tokenizer_that_is_a_pointer_of_git_lfs_is_told_with_its_cure(tmp_path):
    (tmp_path / "tokenizer.json").write_text(POINTER)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(EnvironmentFault, match=r"tokenizer\.json is a pointer of Git LFS"):
        load_tokenizer(str(tmp_path))


def test_a_ground_truth_is_found_by_the_prompts_id_also_of_a_part_and_behind_bad_rows(tmp_path):
    rows = [row(f"{i}+1", str(i + 1)) for i in range(9)]
    rows[4] = "{broken"
    found = load(write_jsonl(tmp_path / "a.jsonl", rows), max_bad_row_share=0.5)
    for part in (found, found.sample(5, 0)):
        assert {prompt.prompt_id: part.ground_truth(prompt.prompt_id) for prompt in part} == {
            prompt.prompt_id: prompt.ground_truth for prompt in part
        }
    assert found.ground_truth(8) == "9" and found.ground_truth(4) is None and found.ground_truth(99) is None


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_verls_schema_is_read_from_either_format(tmp_path, write):
    suffix = ".jsonl" if write is write_jsonl else ".parquet"
    data = load(write(tmp_path / f"a{suffix}", [row("1+1", "2"), row("2+2", "4")]))
    prompt = data[1]
    assert "".join(map(chr, prompt.token_ids)) == "u:2+2"
    assert (prompt.prompt_id, prompt.data_source, prompt.ground_truth, prompt.extra_info) == (
        1,
        "toy",
        "4",
        {"index": 0},
    )
    assert (len(data), data.data_sources) == (2, {"toy"})


def test_a_string_is_one_message_of_the_user_and_said_to_be(tmp_path):
    rows = [row("1+1", "2"), row("2+2", "4", prompt="2+2"), row("3+3", "6", prompt="3+3")]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert "".join(map(chr, data[1].token_ids)) == "u:2+2"
    assert "; the prompt of 2 is a string, taken as one user message" in str(data.report)
    assert "string" not in str(load(write_jsonl(tmp_path / "b.jsonl", rows[:1])).report)


def test_both_formats_give_the_same_data_set(tmp_path):
    rows = [row(str(i), str(i)) for i in range(7)]
    one, other = load(write_jsonl(tmp_path / "a.jsonl", rows)), load(write_parquet(tmp_path / "a.parquet", rows))
    assert list(one) == list(other)
    assert one.fingerprint == other.fingerprint


def test_the_fingerprint_follows_the_tokens_and_their_place(tmp_path):
    rows = [row("a"), row("b")]
    prints = {
        load(write_jsonl(tmp_path / "a.jsonl", r)).fingerprint
        for r in (rows, rows[::-1], rows[:1], [row("a"), row("c")])
    }
    assert len(prints) == 4


def test_prompt_ids_run_over_all_files_and_count_bad_rows(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [row("a"), "{broken", row("c")])
    second = write_parquet(tmp_path / "b.parquet", [row("d")])
    data = load([first, second], max_bad_row_share=0.5)
    assert [(p.prompt_id, chr(p.token_ids[-1])) for p in data] == [(0, "a"), (2, "c"), (3, "d")]


def test_a_large_file_keeps_its_rows_over_chunk_borders(tmp_path):
    data = load(write_jsonl(tmp_path / "a.jsonl", [row(str(i), i) for i in range(4100)]))
    assert [data[i].ground_truth for i in (0, 4095, 4096, 4099)] == [0, 4095, 4096, 4099]


def test_prompts_come_back_by_position_whatever_their_length_and_words():
    store, prompts = (
        PromptStore(),
        [([1, 2, 3], "a"), ([], ""), ([2**31 - 1, 0], '{"é": "\U0001f600\n"}'), (list(range(1000)), "x" * 9999)],
    )
    for tokens, rest in prompts:
        store.add(tokens, rest)
    store.finish()
    expected = [(tuple(tokens), rest) for tokens, rest in prompts]
    assert [store[i] for i in (3, 0, 2, 1)] == [expected[i] for i in (3, 0, 2, 1)]
    assert store[-1] == expected[3] and list(store) == expected
    with pytest.raises(IndexError):
        store[4]


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(PromptStore, "finish", lambda self: self._written(lambda: full(self)))
    with pytest.raises(
        EnvironmentFault, match=rf"{tmp_path}: prompts cannot be kept there \(No space left on device\); set TMPDIR"
    ):
        load(write_jsonl(tmp_path / "a.jsonl", [row("a")]))


@pytest.mark.parametrize("rows", [1, 400])
def test_a_folder_that_is_full_is_the_environments_fault_and_closing_does_not_hide_it(tmp_path, monkeypatch, rows):
    """/dev/full refuses every byte: 1 row meets that at the flush, 400 in the midst of writing;
    close() flushes the buffer again.
    """
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "wb"))  # noqa: SIM115  the store closes it
    with pytest.raises(EnvironmentFault, match="set TMPDIR to a folder with room"):
        load(write_jsonl(tmp_path / "a.jsonl", [row(f"{i} {'x' * 100}") for i in range(rows)]))


def test_the_temporary_file_has_no_name(tmp_path, monkeypatch):
    """So nothing is left behind, however the process ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = load(write_jsonl(tmp_path / "a.jsonl", [row("a")]))
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"] and len(data) == 1


def test_answers_of_any_json_type_survive(tmp_path):
    answers = ["4", 4, 0.5, ["a", "b"], {"x": 1}, False]
    assert [
        p.ground_truth for p in load(write_jsonl(tmp_path / "a.jsonl", [row(str(i), a) for i, a in enumerate(answers)]))
    ] == answers


def test_a_plain_string_is_one_user_message(tmp_path):
    assert (
        "".join(
            map(chr, load(write_jsonl(tmp_path / "a.jsonl", [row(question="hi")]), prompt_key="question")[0].token_ids)
        )
        == "u:hi"
    )


def test_template_arguments_reach_the_tokenizer_and_ours_cannot_be_overridden(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("a")])
    assert load(file, apply_chat_template_kwargs={"suffix": "!"})[0].token_ids[-1] == ord("!")
    with pytest.raises(ConfigError, match="tokenize"):
        load(file, apply_chat_template_kwargs={"tokenize": False})


def test_a_mapping_from_the_tokenizer_is_understood(tmp_path):
    class Encoding(CharTokenizer):
        def apply_chat_template(self, *args, **kwargs):
            return UserDict(input_ids=super().apply_chat_template(*args, **kwargs))

    assert load(write_jsonl(tmp_path / "a.jsonl", [row("a")]), tokenizer=Encoding())[0].token_ids == (
        ord("u"),
        ord(":"),
        ord("a"),
    )


BAD_ROWS = [
    ("{broken", "not JSON"),
    ("[1]", "a JSON list"),
    ({"prompt": "x"}, "no column data_source, reward_model; found: prompt"),
    (row(source=3), "data_source is int '3'"),
    (row(reward_model={"style": "rule"}), "ground_truth is missing"),
    (row(reward_model=None), "ground_truth is missing"),
    (row(answer=None), "ground_truth is missing"),
    (row(answer=float("nan")), "ground_truth is missing"),
    (row(extra_info=[1]), "extra_info is list"),
    (row(prompt=[]), "prompt is empty"),
    (row(prompt=5), "prompt is int '5'"),
    (row(prompt=[{"role": "user"}]), "holds a message"),
    (row(prompt=[{"role": "alien", "content": "x"}]), "prompt has a message of the role 'alien': roles are system"),
    (row(prompt=[{"role": "observation", "content": "x"}]), "chat template refused it: ValueError: unknown role"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_row_is_set_aside_with_its_place_and_reason(tmp_path, bad, reason):
    data = load(write_jsonl(tmp_path / "a.jsonl", [row("a"), bad, row("c")]), max_bad_row_share=0.4)
    assert (data.report.rows, data.report.kept, data.report.bad) == (3, 2, 1)
    (example,) = data.report.examples
    assert example.row == 2
    assert reason in str(data.report)


def test_too_many_bad_rows_stop_the_run_and_ten_are_named(tmp_path):
    """Ten of what is wrong, each with how many rows are wrong in that way."""
    broken_at_other_places = ["[" + " " * number + "}" for number in range(15)]
    file = write_jsonl(tmp_path / "a.jsonl", [row("a")] * 80 + ["{"] * 5 + broken_at_other_places)
    with pytest.raises(DataError, match="max_bad_row_share") as error:
        load(file, max_bad_row_share=0.19)
    assert str(error.value).count("a.jsonl, row") == 10
    assert "a.jsonl, row 81: not JSON" in str(error.value) and "(and 4 more rows of the file)" in str(error.value)
    assert load(file, max_bad_row_share=0.2).report.bad == 20


@pytest.mark.parametrize(
    "wrong",
    [{"prompt": 7}, {"data_source": 7}, {"extra_info": 7}, {"reward_model": 7}, {"prompt": [{"from": 7}]}],
    ids=lambda each: next(iter(each)),
)
def test_rows_of_one_fault_are_one_line_whatever_value_each_has(tmp_path, wrong):
    rows = [json.loads(json.dumps(row("a") | wrong).replace("7", str(number))) for number in range(20, 26)]
    report = load(write_jsonl(tmp_path / "a.jsonl", [row("a"), *rows]), max_bad_row_share=1.0).report
    (line,) = report.examples
    assert "20" in line.reason and (line.row, line.others, report.bad) == (2, 5, 6)


def test_messages_that_are_written_as_text_are_no_prompt_and_other_brackets_are(tmp_path):
    rows = [row("a") | {"prompt": text} for text in ("[1, 2] sorted?", '["role", "content"]', "[", "[]")]
    messages = [{"role": "user", "content": "b"}]
    written = [row("a") | {"prompt": text} for text in (json.dumps(messages), str(messages), f" {messages}\n")]
    report = load(write_jsonl(tmp_path / "a.jsonl", [*rows, *written]), max_bad_row_share=1.0).report
    (line,) = report.examples
    assert (report.kept, report.bad, line.row) == (4, 3, 5) and "store the list itself" in line.reason


def test_a_line_beyond_the_limit_costs_itself_alone_at_the_end_of_a_file_too(tmp_path, monkeypatch):
    monkeypatch.setattr("mrl.data.row_files.ROW_BYTES", 64)
    long = json.dumps({"question": "?" * 300})
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([long, '{"question": "a"}', long]))
    rows = list(read_foreign_rows(str(file)))
    assert [row.value for row in rows] == [None, {"question": "a"}, None]
    assert [row.problem for row in rows] == ["more than 64 bytes", None, "more than 64 bytes"]


@pytest.mark.parametrize(("truncation", "expected"), [("left", "cdef"), ("right", "u:ab"), ("middle", "u:ef")])
def test_long_prompts_are_truncated_where_asked(tmp_path, truncation, expected):
    file = write_jsonl(tmp_path / "a.jsonl", [row("abcdef"), row("a")])
    data = load(file, max_prompt_length=4, filter_overlong_prompts=False, truncation=truncation)
    assert "".join(map(chr, data[0].token_ids)) == expected
    assert (data.report.truncated, data.report.kept) == (1, 2)


def test_the_middle_of_an_odd_length_keeps_the_longer_end():
    assert truncate([1, 2, 3, 4, 5, 6], 3, "middle") == [1, 5, 6]
    assert truncate([1, 2, 3], 1, "middle") == [3]


def test_long_prompts_are_filtered_and_counted_or_stop_the_run(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("abcdef"), row("a")])
    assert load(file, max_prompt_length=4).report.filtered == 1
    with pytest.raises(
        DataError, match=r"1 prompts are over data.max_prompt_length \(4 tokens\)[\s\S]*row 1: 8 tokens"
    ):
        load(file, max_prompt_length=4, filter_overlong_prompts=False)
    with pytest.raises(DataError, match="no prompt is left"):
        load(file, max_prompt_length=2)


def three_files(tmp_path, sizes=(60, 30, 10)):
    names = [tmp_path / f"{name}.jsonl" for name in "abc"]
    return load(
        [write_jsonl(file, [row(f"{file.stem}{i}") for i in range(n)]) for file, n in zip(names, sizes, strict=True)]
    )


def test_a_sample_is_drawn_by_its_seed_without_replacement_and_of_each_file_its_share(tmp_path):
    data = three_files(tmp_path)
    drawn = data.sample(50, seed=7)
    places = [p.prompt_id for p in drawn]
    assert (len(drawn), drawn.sizes) == (50, (30, 15, 5)) and places == sorted(set(places))
    assert list(drawn) == [p for p in data if p.prompt_id in set(places)]
    assert places == [p.prompt_id for p in data.sample(50, seed=7)] != [p.prompt_id for p in data.sample(50, seed=8)]
    assert places[:30] != list(range(30))


def test_every_prompt_is_as_likely_in_a_sample(tmp_path):
    """400 samples of 5 of 20 in one file: each prompt 100 times, standard deviation sqrt(400 x 1/4 x 3/4) = 8.7."""
    data = load(write_jsonl(tmp_path / "a.jsonl", [row(str(i)) for i in range(20)]))
    counts = Counter(p.prompt_id for seed in range(400) for p in data.sample(5, seed))
    assert len(counts) == 20 and all(abs(n - 100) < 5 * 8.7 for n in counts.values())


def test_without_a_seed_the_first_prompts_are_taken(tmp_path):
    first = three_files(tmp_path).sample(65, seed=None)
    assert ([p.prompt_id for p in first], first.sizes) == (list(range(65)), (60, 5, 0))


def test_a_sample_is_data_of_its_own_and_one_of_everything_is_not(tmp_path):
    data = three_files(tmp_path)
    assert data.sample(100, 1) is data and data.sample(None, 1) is data
    assert (
        len(
            {
                data.fingerprint,
                data.sample(99, 1).fingerprint,
                data.sample(99, 2).fingerprint,
                data.sample(98, 1).fingerprint,
            }
        )
        == 4
    )


def test_a_sample_names_the_data_sources_that_it_holds(tmp_path):
    data = load(write_jsonl(tmp_path / "a.jsonl", [row("x", source="one"), row("y", source="two")]))
    assert (data.data_sources, data.sample(1, None).data_sources) == ({"one", "two"}, {"one"})


def test_a_stream_of_a_sample_goes_through_the_sample_alone(tmp_path):
    drawn = three_files(tmp_path).sample(40, seed=1)
    cursor, seen = DataCursor(), []
    for _ in range(4):
        batch, cursor = PromptStream(drawn, 10, 3, sizes=drawn.sizes).next_batch(cursor)
        seen += [p.prompt_id for p in batch]
    assert sorted(seen) == [p.prompt_id for p in drawn]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_another_column_can_say_where_a_row_is_from(tmp_path, write):
    suffix = ".jsonl" if write is write_jsonl else ".parquet"
    rows = [{"kind": "openai/gsm8k", **row()}, {"kind": "math_dapo", **row("2+2")}]
    assert load(write(tmp_path / f"a{suffix}", rows), reward_fn_key="kind").data_sources == {
        "openai/gsm8k",
        "math_dapo",
    }
    without = [{"kind": "math_dapo", "prompt": "a", "reward_model": {"ground_truth": "1"}}]
    assert load(write(tmp_path / f"b{suffix}", without), reward_fn_key="kind")[0].data_source == "math_dapo"
    with pytest.raises(DataError, match=r"no column sort[\s\S]*data\.reward_fn_key"):
        load(write(tmp_path / f"c{suffix}", rows), reward_fn_key="sort")


def test_a_parquet_file_whose_column_has_a_name_that_is_no_text_is_refused_by_name(tmp_path):
    file = tmp_path / "named.parquet"
    pq.write_table(pa.table({"question": ["1 + 1?"]}), file)
    schema, other = b"\x18\x08question", b"\x18\x08\x80uestion"
    assert schema in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(schema, other))
    with pytest.raises(DataError, match=r"named\.parquet: not readable as parquet: 'utf-8' codec"):
        list(read_foreign_rows(str(file)))


def test_unusable_files_are_named(tmp_path):
    empty, wrong, broken = tmp_path / "empty.jsonl", tmp_path / "wrong.parquet", tmp_path / "broken.parquet"
    empty.write_text("")
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), wrong)
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"no prompt is left to train on; 0 rows read of \S+/empty\.jsonl"):
        load(str(empty))
    (tmp_path / "parquet.jsonl").write_bytes(wrong.read_bytes())
    with pytest.raises(DataError, match=r"parquet\.jsonl: this is a parquet file: name it \.parquet"):
        load(str(tmp_path / "parquet.jsonl"))
    with pytest.raises(DataError, match=r": is a folder; name the files in it"):
        load(str(tmp_path))
    with pytest.raises(
        DataError, match=r"wrong\.parquet: no column prompt, .*found: question, answer; expected: prompt, data_source"
    ):
        load(str(wrong))
    with pytest.raises(DataError, match=r"broken\.parquet: not readable as parquet"):
        load(str(broken))
    with pytest.raises(DataError, match="no such file"):
        load(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match=r"unknown kind of data file '\.csv'"):
        load(str(tmp_path / "a.csv"))


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch_only():
    orders = {(s, e): epoch_order(s, e, 100).tolist() for s in (0, 1) for e in (0, 1)}
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    epoch_order.cache_clear()
    assert epoch_order(1, 1, 100).tolist() == orders[1, 1]


def test_every_position_is_equally_likely_to_come_first():
    """4000 seeds over 4 places: 1000 each, standard deviation 27."""
    counts = Counter(int(epoch_order(seed, 0, 4)[0]) for seed in range(4000))
    assert all(abs(n - 1000) < 5 * 27 for n in counts.values())


def test_an_epoch_shows_every_prompt_once_and_drops_the_rest():
    stream, cursor, seen = PromptStream(list(range(10)), 3, seed=0), DataCursor(), []
    assert stream.steps_per_epoch == 3
    for _ in range(6):
        batch, cursor = stream.next_batch(cursor)
        seen.append((cursor.epoch, batch))
    for epoch in (0, 1):
        drawn = [p for e, batch in seen for p in batch if e == epoch]
        assert len(drawn) == len(set(drawn)) == 9


def test_resuming_from_json_continues_the_very_same_order():
    stream, cursor = PromptStream(list(range(17)), 4, seed=3), DataCursor()
    whole, states = [], []
    for _ in range(11):
        states.append(json.dumps(vars(cursor)))
        batch, cursor = stream.next_batch(cursor)
        whole.append(batch)
    epoch_order.cache_clear()
    cursor = DataCursor(**json.loads(states[5]))
    for expected in whole[5:]:
        batch, cursor = PromptStream(list(range(17)), 4, seed=3).next_batch(cursor)
        assert batch == expected


def test_batches_are_counted_over_epochs_by_their_places_alone():
    """Seven prompts, two a batch: three batches an epoch."""
    stream, cursor = PromptStream(list(range(7)), 2, seed=3), DataCursor()
    for number in range(9):
        assert stream.batch_number(cursor) == number
        _, cursor = stream.next_batch(cursor)


def test_without_shuffle_the_order_is_the_files():
    batch, cursor = PromptStream(list(range(4)), 2, seed=0, shuffle=False).next_batch(DataCursor())
    assert (batch, cursor) == ([0, 1], DataCursor(0, 2))


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match="train_batch_size is 5 prompts and the data has 4"):
        PromptStream(list(range(4)), 5, seed=0)


def test_a_tokenizer_is_loaded_from_a_checkpoint_folder_or_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({"<unk>": 0, "u": 1, "7": 2, "<eos>": 3}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "bare")
    tokenizer.chat_template = "{% for m in messages %}u {{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "good")
    loaded = load_tokenizer(str(tmp_path / "good"))
    assert load(write_jsonl(tmp_path / "a.jsonl", [row("7")]), tokenizer=loaded)[0].token_ids == (1, 2)
    of_no_type = {"model_type": "kimi_k2", "rope_scaling": {"type": "yarn", "factor": 32}}
    (tmp_path / "good" / "config.json").write_text(json.dumps(of_no_type))  # transformers alone stops at its scaling
    assert load_tokenizer(str(tmp_path / "good")).chat_template == tokenizer.chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        load_chat_tokenizer(str(tmp_path / "bare"), {})
    # a template of the user's gives what transformers gives by a tokenizer that has it, which is verl's way
    given = {"chat_template": tokenizer.chat_template}
    bare = load_chat_tokenizer(str(tmp_path / "bare"), given)
    file = write_jsonl(tmp_path / "b.jsonl", [row("7 u")])
    assert load(file, tokenizer=bare, apply_chat_template_kwargs=given)[0].token_ids == (1, 2, 1)
    with pytest.raises(ConfigError, match="no folder"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "good" / "tokenizer.json").write_text("{")
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        load_tokenizer(str(tmp_path / "good"))
