"""Tests marked `long` run in named pieces: each of them in exactly one,
and what a piece came to is stored beside the others.
"""

import ast
import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REAL = ROOT / "tests" / "real"
REPORT = """<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3" time="4.2"></testsuite></testsuites>"""


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("long_tests", ROOT / "scripts" / "long_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_long_tests(file: Path) -> bool:
    """Whether the mark stands in it, as `pytest.mark.long`."""
    text = file.read_text()
    return ".long" in text and any(
        ast.unparse(node) == "pytest.mark.long" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)
    )


def test_each_file_with_long_tests_is_in_exactly_one_piece(script):
    in_pieces = Counter(name for names in script.PIECES.values() for name in names)
    assert in_pieces == Counter(file.stem for file in REAL.glob("test_*.py") if has_long_tests(file))


def test_no_other_test_is_marked_long():
    assert [file.name for file in (ROOT / "tests" / "unit").glob("*.py") if has_long_tests(file)] == []


def test_a_pieces_summary_takes_the_place_of_its_last_one(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "RESULTS", tmp_path / "long_tests.json")
    monkeypatch.setattr(script, "commit", lambda: "abc")
    made = {"command": "scripts/test.sh long:runs", "date": "2026-11-22", "load": 0.4}
    monkeypatch.setattr(script, "facts", lambda command: made | {"command": command, "commit": "without changes"})
    (tmp_path / "report.xml").write_text(REPORT)
    (tmp_path / "long_tests.json").write_text(
        json.dumps({"sync": {"seconds": 1}, "runs": {"seconds": 2}, "gone": {"seconds": 3}})
    )
    script.store("runs", script.summary(tmp_path / "report.xml", 61.7, made["command"]))
    stored = json.loads((tmp_path / "long_tests.json").read_text())
    result = made | {"commit": "abc", "passed": 3, "failed": 3, "skipped": 3, "seconds": 62}
    assert stored == {"sync": {"seconds": 1}, "runs": result}


def test_what_passed_at_another_commit_or_failed_or_ran_nothing_is_run_again(script, tmp_path, monkeypatch, capsys):
    results = {
        "sync": {"commit": "abc", "passed": 2, "failed": 0}, "runs": {"commit": "abc", "passed": 2, "failed": 1},
        "routes": {"commit": "before", "passed": 2, "failed": 0}, "memory": {"commit": "abc", "passed": 0, "failed": 0},
    }  # fmt: skip
    monkeypatch.setattr(script, "RESULTS", tmp_path / "long_tests.json")
    monkeypatch.setattr(script, "unchanged_since", lambda commit: commit == "abc")
    monkeypatch.setattr("sys.argv", ["long_tests.py", "--list", "--resume", "sync", "runs", "routes", "memory"])
    (tmp_path / "long_tests.json").write_text(json.dumps(results))
    assert script.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "long:runs",
        "long:routes",
        "long:memory",
    ]


def test_no_piece_took_more_than_twenty_minutes(script):
    stored = json.loads(script.RESULTS.read_text()) if script.RESULTS.exists() else {}
    assert [piece for piece, result in stored.items() if result["seconds"] > 1200] == []


def test_an_unknown_piece_is_refused_with_those_there_are(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["long_tests.py", "synk"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and "no piece synk; there are sync, " in capsys.readouterr().err


def test_a_commit_that_is_unknown_or_had_changes_is_no_ground_to_leave_a_piece_out(script):
    assert not script.unchanged_since("0" * 40)
    assert not script.unchanged_since(f"{'0' * 40} with changes")
