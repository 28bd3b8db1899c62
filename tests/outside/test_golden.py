"""Golden files are whole: each topic has its adapter, its file and its test, and each difference says who is right."""

from pathlib import Path

import pytest
import yaml
from golden import DIFFERENCES, golden

HERE = Path(__file__).resolve().parent
TOPICS = sorted(path.stem for path in (HERE / "peers").glob("*.py") if not path.stem.startswith("_"))


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_has_cases_and_a_test(topic):
    assert golden(topic)
    assert (HERE / f"test_outside_{topic}.py").is_file()  # a name that no file of tests/unit has


def test_no_golden_file_is_without_its_adapter():
    assert sorted(path.name.removesuffix(".json.gz") for path in (HERE / "golden").glob("*.json.gz")) == TOPICS


def test_every_difference_says_what_differs_and_who_is_right():
    rows = yaml.safe_load(DIFFERENCES.read_text())
    for row in rows:
        assert row.keys() == {"topic", "name", "peer", "what", "right", "cases"}, row
        assert row["topic"] in TOPICS, row
        assert row["cases"] > 0, row
    names = [(row["topic"], row["name"]) for row in rows]
    assert len(set(names)) == len(names)
