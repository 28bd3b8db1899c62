"""The shipped search: passages of a file, found by words, whatever the words are."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import SIZES

from mrl.acting.environment_pool import EnvironmentPool, check_tools
from mrl.acting.search_tool import LONGEST_PASSAGE, write_index
from mrl.acting.tool import ToolsSpec
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import ConfigError
from mrl.model import model_spec

ROOT = Path(__file__).resolve().parents[2]
PASSAGES = [
    ("Rhine", "The Rhine flows from Switzerland to the North Sea."),
    ("Danube", "The Danube flows to the Black Sea. It passes four capitals."),
    ("Sea", "Sea sea sea."),
    ("Long", "word " * 1000),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("index") / "passages.sqlite"
    assert write_index(path, PASSAGES) == len(PASSAGES)
    return path


@pytest.fixture(scope="module")
def pool(index):
    with EnvironmentPool(ToolsSpec(("search",), index=str(index)), 1, 20.0) as pool:
        yield pool


def found(pool, query: str, **more) -> list[str]:
    answer = pool.call("search", {"query": query, **more}).result(60)
    assert answer.reason == "ok", answer
    return [passage["title"] for passage in json.loads(answer.text)]


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("capitals", {"Danube"}),
        ("the Black Sea, North", {"Rhine", "Danube", "Sea"}),
        ('flows" OR NEAR(* ^title:', {"Rhine", "Danube"}),
        ("nothing of this", set()),
        ("Switzerland\u0000 AND NOT", {"Rhine"}),
    ],
)
def test_passages_with_words_of_the_query_are_found(pool, query, titles):
    assert set(found(pool, query)) == titles


def test_the_best_come_first_and_no_more_than_asked_for(pool):
    assert found(pool, "sea", most=1) == ["Sea"] and len(found(pool, "flows sea", most=99)) == 3
    (passage,) = json.loads(pool.call("search", {"query": "word"}).result(60).text)
    assert len(passage["text"]) == LONGEST_PASSAGE


def test_a_query_without_a_word_is_answered_so(pool):
    assert pool.call("search", {"query": " ?! "}).result(60)[:2] == (
        "raised", "Error: search: ValueError: the query has no word",
    )  # fmt: skip


def test_files_that_are_no_index_are_refused(tmp_path, index):
    other = tmp_path / "other.sqlite"
    sqlite3.connect(other).execute("CREATE TABLE passages (title, text)").connection.close()
    (tmp_path / "text.sqlite").write_text("not a database, by far" * 100)
    for path in (other, tmp_path / "text.sqlite"):
        with pytest.raises(ConfigError, match="is not an index written by"):
            check_tools(ToolsSpec(("search",), index=str(path)))
    with pytest.raises(ConfigError, match="index: /nowhere: no such file"):
        check_tools(ToolsSpec(("search",), index="/nowhere"))


def test_search_needs_its_file():
    resolved = load_config("parallel_configs/tiny-moe/cpu.yaml", None, ["rollout.turns={tools: [search]}"])
    model = model_spec(SIZES | {"num_hidden_layers": 4, "num_experts": 8})
    fields = [each.field for each in violations(resolved, model)]
    assert "rollout.turns.index" in fields


def test_the_script_writes_the_index_whole_or_not_at_all(tmp_path):
    lines = [json.dumps({"title": title, "text": text}) for title, text in PASSAGES]
    (tmp_path / "good.jsonl").write_text("\n".join(lines))
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, '{"title": 1}']))
    script = [sys.executable, str(ROOT / "scripts" / "make_search_index.py")]
    for name, code in (("good", 0), ("bad", 1)):
        out = tmp_path / f"{name}.sqlite"
        done = subprocess.run([*script, tmp_path / f"{name}.jsonl", "--out", out], capture_output=True, text=True)
        assert done.returncode == code and out.exists() == (code == 0)
    assert "bad.jsonl, line 5" in done.stderr
