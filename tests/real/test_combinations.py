"""Features beside each other: rows of the table of combinations with every end and everything that follows, and each
value of trainer.schedule and trainer.order.

Each is held to the invariants of tests/proofs/combination_run.py: exit codes, bits of the undisturbed run, every
response in one step, staleness, verified syncs, log-probs of transformers, nothing left behind.
"""

import datetime
import shutil
import sys
from pathlib import Path

import pytest
from seeing_world import make_seeing_world
from tiny_models import tiny_glm, with_head
from world import make_world, put_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "proofs"))

from combination_axes import AXES, DRAFTING, SETTINGS, folder_of, refusal
from combination_run import GONE_S, RUN_S, THEN, RowRun
from combinations import row_of
from own_memory import is_possible

from mrl.record.run_dir import METRICS, read_metrics

pytestmark = [pytest.mark.real, pytest.mark.timeout(4 * (RUN_S + GONE_S))]
EARLY = 1  # the number of a row whose end comes 0.13 s behind the line of step 2: two steps need what it loses
UNDISTURBED = "undisturbed"  # equals the run that finishes
# each with what follows beside its own
ROWS = {
    "sync | separate | TP2 | TP2 EP2 | Qwen3-MoE | none | one | none | GRPO | off | R2 | KL | off | float32 | "
    "meanwhile | engine lost | report": (UNDISTURBED, "other schedule"),
    "in order, partial | separate | two | PP2 | Qwen3-MoE | none | one | none | GSPO | token | R3 | none | off | "
    "float32 | meanwhile | SIGTERM | resume": ("convert",),
    "one step off | separate | TP2 | DP2 | Qwen3-MoE | LoRA | one | none | GRPO | off | off | none | on | "
    "float32 | waits | SIGKILL | other layout": ("eval",),
    "ready first | separate | TP2 | TP2 | Qwen3-MoE | none | one | none | DAPO with filtering | off | off | none | "
    "off | float32 | meanwhile | rank lost | other schedule": (),
    "sync | colocated | TP2 | CP2 | GLM, drafting | none | one | none | GSPO | off | off | none | on | float32 | "
    "waits | SIGKILL | resume": ("convert",),
    "in order, partial | separate | two | PP2 | GLM, drafting | none | one | none | GSPO | token | off | none | "
    "off | float32 | meanwhile | SIGTERM | other layout": (),
    "one step off | separate | DP2 EP2 | PP2 | Qwen3-MoE | LoRA | calculator | frozen tower | GRPO | token | R3 | KL | "
    "on | float32 | meanwhile | SIGKILL | resume": ("convert", "eval"),
    "sync | colocated | TP2 | TP2 EP2 | Qwen3-MoE | none | one | trained tower | GSPO | off | R2 | KL | on | float32 | "
    "waits | SIGTERM | resume": ("convert", "eval", "other layout"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = make_world(tmp_path_factory.mktemp("world"), prompts=64)
    (folder / "Qwen3-MoE").symlink_to(folder / "model")
    drafting = folder / folder_of(DRAFTING)
    shutil.copytree(folder / "model", drafting / "model")
    put_model(drafting, tiny_glm)
    with_head(drafting / "model")
    for file in (drafting / "model").iterdir():
        file.rename(drafting / file.name)
    return folder


def test_every_schedule_end_and_what_follows_is_there():
    rows = [row_of(text) for text in ROWS]
    schedules = {key for row in rows for key in SETTINGS["schedule"][row["schedule"]].values()}
    assert {"one_step_off", "bounded", "ready_first"} <= schedules and "sync" in {row["schedule"] for row in rows}
    assert {row["end"] for row in rows} | {"finished"} == set(AXES["end"]), "the undisturbed run is one that finishes"
    assert {row["then"] for row in rows} | {name for more in ROWS.values() for name in more} == {*THEN, UNDISTURBED}


often = list(ROWS)[:3]  # a lost rank: test_rank_restart.py
DRAWN = often[datetime.date.today().toordinal() % len(often)]  # one a day: each costs four runs; all of them are long


def name_of(text: str) -> str:
    """Schedule and end of a row."""
    schedule, *_, end, _ = text.split(" | ")
    return f"{schedule}-{end}"


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[] if text == DRAWN else [pytest.mark.long]) for text in ROWS], ids=name_of
)
def test_a_row_holds(world, tmp_path, text):
    row = row_of(text)
    if row["images"] != "none" and not (world / "images").exists():
        make_seeing_world(world / "images", experts=8, calls=True)
    assert refusal(row, world) is None
    run = RowRun(EARLY, row, world, tmp_path / "row", tmp_path / "wholes", has_own_memory=is_possible())
    run.do()
    assert run.problems == []
    for name in ROWS[text]:
        if name == UNDISTURBED:
            run.be_the_undisturbed()
        else:
            THEN[name](run)
    assert run.problems == []
    if row["end"] == "engine lost":
        check_that_an_engine_was_missed(read_metrics(run.run / METRICS))


def check_that_an_engine_was_missed(rows: list[dict]) -> None:
    """It was lost in a step, and came back: a later step needs it."""
    lost, restarted = (sum(step.get(f"fleet/{name}", 0) for step in rows) for name in ("lost", "restarted"))
    assert lost == restarted == 1 or rows[-1]["trainer/restarts"] == 1
