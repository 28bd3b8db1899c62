"""One table says what a run does without: the page of asynchronous runs and the message of a start go by it."""

import re
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.survived import SURVIVED, ends_in_words, restart_limit, survives

ROOT = Path(__file__).parents[2]
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
PAGE = ROOT / "docs" / "asynchronous.md"


def config_of(*overrides: str):
    return load_config(TINY, None, ["trainer.schedule=sync", *overrides]).config


def test_every_schedule_of_a_placement_is_a_row_of_its_own():
    assert len({row[:3] for row in SURVIVED}) == len(SURVIVED) == 5
    assert survives("engines", "separate", "sync") and survives("ranks", "separate", "sync")
    assert not survives("engines", "colocated", "one_step_off"), "which no configuration may ask for"


@pytest.mark.parametrize("row", SURVIVED, ids=lambda row: f"{row.placement} {row.schedule} {row.order}")
def test_the_page_says_what_the_table_says(row):
    name = row.schedule if row.schedule != "bounded" else f"bounded, {row.order}"
    words = {True: "comes back", False: "ends the run"}
    line = rf"^\| {row.placement} \| {name} \| {words[row.engines]} \| {words[row.ranks]} \|$"
    assert re.search(line, PAGE.read_text(encoding="utf-8"), re.MULTILINE), line


def test_limits_are_those_of_the_configuration_where_a_run_does_without(monkeypatch):
    rows = tuple(row._replace(engines=row.placement == "separate", ranks=False) for row in SURVIVED)
    monkeypatch.setattr("mrl.config.survived.SURVIVED", rows)
    config = config_of("rollout.restart_limit=2", "trainer.restart_limit=5")
    assert restart_limit("engines", config) == 2 and restart_limit("ranks", config) == 0
    assert ends_in_words(config).startswith("ranks (separate, sync, in_order) are not started again inside the run")
    assert ends_in_words(config_of("trainer.restart_limit=0")) is None, "nobody asked for it"
    both = ends_in_words(
        config.model_copy(update={"cluster": config.cluster.model_copy(update={"placement": "colocated"})})
    )
    assert both.startswith("engines and ranks (colocated, sync, in_order)")
