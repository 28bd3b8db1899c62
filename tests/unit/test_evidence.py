"""What the documentation shows is what is stored: results name commits of the history."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/evidence.md", "docs/architecture.md", "docs/algorithms.md")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def linked_files(page: str) -> Iterator[Path]:
    """Files of the repository that a page links to."""
    folder = (ROOT / page).parent
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" not in target:
            yield (folder / target).resolve()


def commits_in(value) -> Iterator[str]:
    """Every `commit` of a stored result."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "commit":
                yield inner
            else:
                yield from commits_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commits_in(inner)


@cache
def in_history(commit: str) -> bool:
    return (
        subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True).returncode
        == 0
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_link_into_the_repository_leads_to_a_file(page):
    assert not [str(path) for path in linked_files(page) if not path.exists()]


RESULTS = sorted((ROOT / "docs" / "results").rglob("*.json*"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_stored_result_names_commits_of_the_history(path):
    if not (ROOT / ".git").exists():
        pytest.skip("no history here")
    text = path.read_text(encoding="utf-8")
    result = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    commits = list(commits_in(result))
    assert commits and not [commit for commit in commits if not in_history(commit)]


def test_a_commit_that_is_not_in_the_history_is_found():
    assert not in_history("ed2d2841718e3385eaf63a8441894bf94c6f944c") and in_history("HEAD")


def test_the_files_of_the_architecture_page_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(mrl/[\w/]+\.py)`", text)) | {
        f"mrl/{name}" for name in re.findall(r"^    \d  (\w+/\w+\.py)", text, re.M)
    }
    assert len(named) > 15 and not [name for name in named if not (ROOT / name).exists()]


def rows_of(title: str) -> list[list[str]]:
    """Cells of the first table below a title of the architecture page."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    below = text.split(f"## {title}\n", 1)[1]
    table = re.search(r"\|---\|.*\n((?:\|.*\n)+)", below)[1]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_what_a_newcomer_asks_is_answered_by_three_files_at_most():
    rows = rows_of("Where a reader finds")
    assert len(rows) >= 12
    for question, where in rows:
        files = re.findall(r"`((?:mrl|docs)/[\w/]+\.\w+)`", where)
        assert len(files) <= 3 and not [file for file in files if not (ROOT / file).exists()], question
        assert files or "mrl " in where, question


def test_the_words_of_the_house_are_few_and_stand_once():
    words = [word for words, _ in rows_of("Words") for word in words.split(", ")]
    assert len(words) == len(set(words)) <= 25


def test_what_stands_side_by_side_is_short_and_names_what_was_read():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Side by side\n", 1)[1]
    assert len(re.findall(r"^\* \[.*\) at `[0-9a-f]{12}`$", text, re.M)) == 3
    rows = rows_of("Side by side")
    assert [row[0] for row in rows] == ["loop", "loss", "weight sync", "configuration"]
    assert all(len(row) == 5 for row in rows)
    assert max(len(cell.split()) for row in rows for cell in row) <= 40
    named = re.findall(r"`(\w+)`", " ".join(row[1] for row in rows))
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mrl").rglob("*.py"))
    assert named and not [name for name in named if not re.search(rf"^(?:def|class) {name}\b", source, re.M)]
