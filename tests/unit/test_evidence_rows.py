"""The rows of the evidence page: each has a command that is there, and a figure of a commit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "evidence"))
import evidence_page  # noqa: E402
import release  # noqa: E402
import rows  # noqa: E402

HELD = json.loads(rows.STORED.read_text(encoding="utf-8"))
PATH = re.compile(r"(?:tests|scripts)/[\w/.-]+")
REPORT = (
    '<testsuites><testsuite tests="9" failures="{failed}" errors="0" skipped="3" time="4.2"></testsuite></testsuites>'
)


def test_there_are_30_rows_at_most_each_asked_once_and_a_release_takes_two_hours():
    assert len(rows.ROWS) <= 30
    assert len({row.key for row in rows.ROWS}) == len({row.asked for row in rows.ROWS}) == len(rows.ROWS)
    assert sum(row.minutes or 0 for row in rows.ROWS) <= release.MOST_MINUTES


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.key)
def test_what_a_rows_command_names_is_there(row):
    named = PATH.findall(row.command)
    assert named and all((ROOT / path).exists() for path in named)
    of_tests = [Path(path).name for path in named if path.endswith(".py")]
    assert len({*of_tests}) == len(of_tests), "pytest collects no two files of one name together"
    if "-k" in (words := row.command.split()):
        text = "".join((ROOT / path).read_text() for path in named)
        assert re.search(rf"^def test_\w*{words[words.index('-k') + 1]}", text, re.MULTILINE)


def test_everything_that_the_front_page_promises_has_a_row():
    promised = re.findall(r"^(\d+)\. ", (ROOT / "README.md").read_text().split("## What you can rely on")[1], re.M)
    shown = {number for row in rows.ROWS for number in row.guarantees}
    assert {int(number) for number in promised} == shown | {10}, "the last is of the page itself"


@pytest.mark.parametrize("key", [key for key in HELD if key != "release"])
def test_a_figure_says_its_date_its_machine_and_a_commit_of_the_history(key):
    found = HELD[key]
    assert key in {row.key for row in rows.ROWS} and found["figure"] and found["machine"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and isinstance(found["met"], bool)
    if (ROOT / ".git").exists():
        asked = ["git", "merge-base", "--is-ancestor", found["commit"], "HEAD"]
        assert subprocess.run(asked, cwd=ROOT, capture_output=True).returncode == 0


def test_a_goal_that_is_missed_says_so_and_why(monkeypatch):
    for row in rows.ROWS:
        assert HELD.get(row.key, {"met": True})["met"] or row.why, row.key
    (row,) = [row for row in rows.ROWS if row.key == "trl"]
    found = {"figure": "half", "met": False, "commit": "a" * 12, "date": "2026-11-28", "machine": "one"}
    assert evidence_page._cells(row, found)[2] == f"**missed:** half; {row.why}"


def test_what_a_release_did_not_make_is_named_in_one_line(monkeypatch):
    one, other, absent = rows.ROWS[:3]
    monkeypatch.setattr(evidence_page, "ROWS", (one, other, absent))
    held = {"release": {"commit": "a"}, one.key: {"commit": "a"}, other.key: {"commit": "b"}}
    said = evidence_page._left_out(held)
    assert (
        f"of the commits that they name: {other.key}. " in said
        and said.endswith(f"{absent.asked}.")
        and "\n" not in said
    )


def test_the_page_is_short_and_nothing_of_it_is_long():
    page = evidence_page.page()
    assert len(page.encode()) < 17_000
    assert all(
        len(cell.split()) <= 45 for line in page.splitlines() if line.startswith("|") for cell in line.split(" | ")
    )


@pytest.mark.parametrize(
    ("failed", "figure"), [(0, ("6 passed, 3 skipped", True)), (2, ("4 passed, 2 failed, 3 skipped", False))]
)
def test_the_figure_of_tests_is_what_their_report_counts(tmp_path, failed, figure):
    (tmp_path / "report.xml").write_text(REPORT.format(failed=failed))
    assert release.of_tests(tmp_path / "report.xml") == figure


def test_an_answer_is_the_json_that_a_command_prints_last():
    assert release.answer('{"a": 1}\n') == {"a": 1} == release.answer('training\n{"a": 1}\n')
    assert release.answer("no json\n") == "no json\n"


def test_a_command_that_fails_is_a_goal_that_is_missed():
    row = rows.Row("x", "?", "1 s", f"{sys.executable} -c 'raise SystemExit(3)'", 1, lambda found: ("never", True))
    assert (made := release.made(row))["figure"] == "exit code 3" and not made["met"]


def test_figures_of_benches_are_read_off_their_answers():
    assert rows._peers({"short": {"trl_over_mrl": 1.2}, "long": {"trl_over_mrl": 1.5}})[1] is False
    assert rows._peers({"short": {"trl_over_mrl": 1.2}, "long": {"trl_over_mrl": 2.5}}) == (
        "1.20 times as fast at 3 tokens, 2.50 at 300", True,
    )  # fmt: skip
    sync = {"bytes_moved": 4_000_000, "bytes_required": 4_000_000, "shm": {"total_s": 0.4, "total_ratio": 0.11}}
    assert rows._reshard(sync) == ("0.40 s, 0.110 of the export; 4 of 4 MB moved", True)
    assert not rows._reshard(sync | {"bytes_moved": 5_000_000})[1]
    step = {"driver_peak_bytes": 50, "tokens": 100, "driver_busy_s": 9.0}
    assert rows._data_plane({"rows": [step]}) == ("0.50 bytes a token; busy 3.0 % of 300 s", False)
