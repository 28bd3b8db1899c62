"""`mrl data`: rows as data sets publish them become rows that the trainer reads, and the report accounts for each."""

import json
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_data import CharTokenizer

import mrl.data.prepare as preparing
from mrl.cli.main import main
from mrl.data.dataset import PromptDataset, PromptParameters
from mrl.data.prepare import prepare
from mrl.data.sources import SOURCES
from mrl.errors import DataError
from mrl.reward.items import RewardSpec
from mrl.reward.resolve import check_data_sources, resolve

GSM8K = {"question": "How many?", "answer": "12 * 100 = <<12*100=1200>>1200\n#### 1,200"}
MATH500 = {
    "problem": "Half?",
    "solution": "It is \\boxed{\\frac12}.",
    "answer": "\\frac{1}{2}",
    "subject": "Algebra",
    "level": 1,
}
AIME = {"ID": "2024-I-1", "Problem": "Find n.", "Solution": "...", "Answer": 73}
DAPO = {
    "data_source": "math_dapo", "prompt": [{"content": "Solve", "role": "user"}], "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"},
}  # fmt: skip
DIANJIN = {
    "instruction": "单选题 A. 1 B. 2",
    "output": "<think>\\boxed{A}?</think>\n<answer>答案选项为\\boxed{B}。</answer>",
}
CASES = [  # source, file, row, data_source, truth, a right and a wrong response
    ("gsm8k", "train.jsonl", GSM8K, "openai/gsm8k", "1200", "#### 1200", "#### 1201"),
    ("math-500", "test.jsonl", MATH500, "HuggingFaceH4/MATH-500", "\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{2}"),
    ("aime", "aime_2024.jsonl", AIME, "aime2024", "73", "Answer: 73", "Answer: 37"),
    ("aime", "test.jsonl", {"problem": "Find m.", "answer": "073"}, "aime", "73", "Answer: 73", "73"),
    # pandas makes doubles of a column of integers in which one is missing
    ("aime", "test.jsonl", {"problem": "Find m.", "Answer": 73.0}, "aime", "73", "Answer: 73", "73"),
    ("math-500", "t.jsonl", MATH500 | {"answer": 5.0}, "HuggingFaceH4/MATH-500", "5", "\\boxed{5}", "\\boxed{2}"),
    ("dapo-math-17k", "d.parquet", DAPO, "math_dapo", "34", "Answer: 34", "Answer: 35"),
    ("dapo-math-17k", "d.jsonl", {"prompt": "Solve", "solution": "34"}, "math_dapo", "34", "Answer: 34", "Answer: 35"),
    ("dianjin-r1", "cflue_mcq.json", DIANJIN, "dianjin/cflue_mcq", "B", "\\boxed{B}", "\\boxed{A}"),
    ("verl", "v.jsonl", DAPO, "math_dapo", "34", "Answer: 34", "Answer: 35"),
]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("source", "name", "row", "data_source", "truth", "right", "wrong"), CASES)
def test_a_published_row_is_read_by_the_trainer_and_scored_by_its_own_rule(
    tmp_path, source, name, row, data_source, truth, right, wrong
):
    report = prepare(SOURCES[source], [write(tmp_path / name, [row])], tmp_path / "out.parquet", "train")
    assert (report.read, report.written, dict(report.data_sources)) == (1, 1, {data_source: 1})
    data = PromptDataset.load([str(tmp_path / "out.parquet")], CharTokenizer(), PromptParameters())
    assert (data[0].data_source, data[0].ground_truth) == (data_source, truth)
    check_data_sources(RewardSpec(), data.data_sources)
    scores = [resolve(RewardSpec())(data_source, response, truth, {})["score"] for response in (right, wrong)]
    assert scores[0] == 1 > scores[1]


def test_the_prompt_asks_for_the_answer_in_the_form_that_its_rule_reads(tmp_path):
    asked = {
        name: SOURCES[name].convert(row, "f").prompt[0]["content"]
        for name, row in (("gsm8k", GSM8K), ("math-500", MATH500), ("aime", AIME))
    }
    assert '"####"' in asked["gsm8k"] and asked["gsm8k"].startswith("How many? ")
    assert "\\boxed{}" in asked["math-500"]
    assert asked["aime"].endswith('on its own line after "Answer:".') and "\n\nFind n.\n\n" in asked["aime"]


@pytest.mark.parametrize(
    ("source", "row", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, "no number behind ####"),
        ("gsm8k", {"question": "q", "answer": "#### many"}, "no number behind ####"),
        (
            "gsm8k",
            {"question": "q", "answer": "#### ٣"},
            "no number behind ####",
        ),  # verl finds [0-9] alone
        ("gsm8k", {"answer": "#### 1"}, "no text under question"),
        ("aime", {"problem": "p", "answer": "1000"}, "no integer from 0 to 999"),
        ("math-500", {"problem": "p", "answer": None}, "no text under answer"),
        ("dianjin-r1", {"instruction": "i", "output": "<answer>text</answer>"}, "boxes no letter"),
        ("dapo-math-17k", {"reward_model": None, "prompt": []}, "ground_truth is no text"),
        ("verl", DAPO | {"prompt": "text"}, "no list of"),
        ("verl", DAPO | {"reward_model": {"ground_truth": float("nan")}}, "ground_truth is no text"),
        ("math-500", {"problem": "p", "answer": float("nan")}, "no text under answer"),
    ],
)
def test_a_row_that_is_not_what_was_promised_is_counted_with_its_reason(tmp_path, source, row, reason):
    good = {s: r for s, _, r, *_ in CASES}[source]
    file = write(tmp_path / "a.jsonl", [good, row])
    report = prepare(SOURCES[source], [file], tmp_path / "out.parquet", "train", max_bad_share=0.5)
    assert (report.read, report.written, report.bad) == (2, 1, 1)
    assert reason in report.examples[0] and "row 2" in report.examples[0]
    with pytest.raises(DataError, match="1 of 2 rows are bad"):
        prepare(SOURCES[source], [file], tmp_path / "other.parquet", "train")
    assert not (tmp_path / "other.parquet").exists()


def test_rows_repeated_by_accident_are_written_once(tmp_path):
    rows = [DAPO | {"prompt": [{"content": f"Solve {i % 7}", "role": "user"}]} for i in range(700)]
    rows[699]["reward_model"] = {"ground_truth": "35", "style": "rule"}
    report = prepare(SOURCES["dapo-math-17k"], [write(tmp_path / "d.parquet", rows)], tmp_path / "out.parquet", "train")
    assert (report.written, report.duplicates, report.conflicts) == (7, 693, 1)


def test_the_command_prints_a_schema_report(tmp_path, capsys):
    file = write(tmp_path / "train.jsonl", [GSM8K])
    main(["data", "gsm8k", file, "-o", str(tmp_path / "a" / "out.parquet"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["schema"]["reward_model"] == "struct<style: string, ground_truth: string>"
    assert report["first"]["reward_model"]["ground_truth"] == "1200"
    main(["data", "gsm8k", file, "-o", str(tmp_path / "b.parquet")])
    assert "1 row read: 1 written, 0 bad, 0 duplicates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "absent.jsonl", "-o", "new.parquet"], "no such file"),
        (["gsm8k", "{dir}", "-o", "new.parquet"], "is a folder; name the files in it"),
        (["gsm8k", "{dir}/train.csv", "-o", "new.parquet"], "unknown kind"),
        (["gsm8k", "{dir}/train.jsonl", "-o", "{dir}/train.jsonl"], "is there already"),
        (["gsm8k", "{dir}/empty.jsonl", "-o", "{dir}/new.parquet"], "no row is left"),
    ],
)
def test_what_cannot_be_converted_ends_with_exit_code_3(tmp_path, capsys, arguments, message):
    write(tmp_path / "train.jsonl", [GSM8K])
    (tmp_path / "train.csv").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["data", *(a.format(dir=tmp_path) for a in arguments)])
    assert ended.value.code == 3
    assert message in capsys.readouterr().err


def picture(shade: int) -> dict:
    out = BytesIO()
    Image.new("RGB", (40, 30), (shade, 0, 0)).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": f"{shade}.png"}


def geometry(*images, problem="<image>Find x.", answer="2 \\sqrt { 221 }") -> dict:
    return {"images": list(images), "problem": problem, "answer": answer}


def test_rows_with_pictures_keep_them_and_are_scored_by_the_rule_of_their_source(tmp_path):
    rows = [
        geometry(picture(1)),
        geometry(picture(2)),  # the same words about another picture
        geometry(picture(1)),
        geometry(picture(3), picture(4), problem="<image> or <image>?"),
        geometry(picture(5), problem="no mark"),
        geometry({"bytes": picture(6)["bytes"][:-40], "path": None}),
        geometry(problem="without"),
    ]
    file = write(tmp_path / "train.parquet", rows)
    report = prepare(SOURCES["geo3k"], [file], tmp_path / "out.parquet", "train", max_bad_share=0.5)
    assert (report.read, report.written, report.bad, report.duplicates, report.images) == (7, 3, 3, 1, 4)
    assert [text.partition(": ")[2].partition(" ")[0] for text in report.examples] == ["the", "image", "no"]
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [[image["bytes"] for image in row["images"]] for row in found] == [
        [picture(1)["bytes"]], [picture(2)["bytes"]], [picture(3)["bytes"], picture(4)["bytes"]],
    ]  # fmt: skip
    assert found[0]["data_source"] == "hiyouga/geometry3k" and found[0]["prompt"][0]["content"].startswith("<image>")
    spec = RewardSpec("auto")
    check_data_sources(spec, {"hiyouga/geometry3k"})
    scored = resolve(spec)(data_source="hiyouga/geometry3k", solution_str="\\boxed{2\\sqrt{221}}",
                           ground_truth=found[0]["reward_model"]["ground_truth"])  # fmt: skip
    assert scored["acc"] == 1.0


def test_files_in_verls_schema_keep_their_pictures_and_files_of_text_their_columns(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(9)["bytes"])
    seen = DAPO | {"prompt": [{"content": "<image>?", "role": "user"}], "images": ["a.png"]}
    prepare(SOURCES["verl"], [write(tmp_path / "seen.jsonl", [seen, DAPO])], tmp_path / "seen.parquet", "train")
    found = pq.read_table(tmp_path / "seen.parquet").to_pylist()
    assert [len(row["images"]) for row in found] == [1, 0] and found[0]["images"][0]["bytes"] == picture(9)["bytes"]
    prepare(SOURCES["verl"], [write(tmp_path / "text.jsonl", [DAPO])], tmp_path / "text.parquet", "train")
    assert "images" not in pq.read_schema(tmp_path / "text.parquet").names


@pytest.mark.parametrize("first", [DAPO, DAPO | {"reward_model": None}, None], ids=["text", "bad row", "no JSON"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pictures_are_kept_whatever_the_first_row_is(tmp_path, first, kind):
    seen = DAPO | {"prompt": [{"content": "<image>?", "role": "user"}], "images": [picture(9)]}
    if kind == "parquet":
        files = [write(tmp_path / "late.parquet", [(first or DAPO) | {"images": []}, *[seen] * 3])]
    else:
        (tmp_path / "a.png").write_bytes(picture(9)["bytes"])
        files = [write(tmp_path / "late.jsonl", [first or DAPO, *[seen | {"images": ["a.png"]}] * 3])]
        if first is None:
            (tmp_path / "late.jsonl").write_text("{\n" + (tmp_path / "late.jsonl").read_text())
    report = prepare(SOURCES["verl"], files, tmp_path / "out.parquet", "train", max_bad_share=0.5)
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [image["bytes"] for row in found for image in row["images"]] == [picture(9)["bytes"]]
    assert report.images == 1 and report.duplicates == 2


ASKED = [{"content": "<image>what?", "role": "user"}]


@pytest.mark.parametrize(
    ("source", "row", "words"),
    [
        ("verl", DAPO | {"videos": [{"video": "a.mp4"}]}, "videos are not read: give single images"),
        ("verl", DAPO | {"video": "a.mp4"}, "videos are not read"),
        ("verl", DAPO | {"prompt": ASKED, "image": ["a.png"]}, "its column image is not empty and would be lost"),
        ("verl", DAPO | {"image": "a.png"}, "its column image is not empty and would be lost"),
        ("verl", DAPO | {"prompt": ASKED}, "the prompt has 1 images .*, and the row has 0"),
        ("math-500", MATH500 | {"images": ["a.png"]}, "its column images is not empty and would be lost"),
        ("gsm8k", GSM8K | {"image": "a.png"}, "its column image is not empty"),
        ("verl", DAPO | {"images": [], "videos": None, "image": None}, None),
    ],
)
def test_what_a_prompt_shows_is_not_dropped_without_a_word(tmp_path, source, row, words):
    file = write(tmp_path / "rows.jsonl", [row])
    if words is None:
        assert prepare(SOURCES[source], [file], tmp_path / "out.parquet", "train").written == 1
        return
    with pytest.raises(DataError, match=words):
        prepare(SOURCES[source], [file], tmp_path / "out.parquet", "train")


def test_rows_of_many_bytes_are_written_in_several_groups(tmp_path, monkeypatch):
    rows = [geometry(picture(shade)) for shade in range(7)]
    monkeypatch.setattr(preparing, "BATCH_BYTES", 2 * len(picture(0)["bytes"]))
    prepare(SOURCES["geo3k"], [write(tmp_path / "in.parquet", rows)], tmp_path / "out.parquet", "train")
    groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert groups.num_rows == 7 and 3 <= groups.num_row_groups <= 7
