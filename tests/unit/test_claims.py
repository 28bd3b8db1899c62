"""The table of claims: a figure is a stored result's, meets its bound or is a missed goal, and says what made it."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
claims = importlib.util.module_from_spec(_spec)
sys.modules["claims"] = claims
_spec.loader.exec_module(claims)

COMMIT = "91eebfc6bb2f8844ecbd474b8edf71ea2411d969"
ASKED = "dca999c7"  # the newest commit whose scripts made results without a date or a load
TOLD = {"date": "2026-11-22", "load": 0.4}


def table(tmp_path, monkeypatch, stored, name="one.json", **claim) -> dict:
    """A table of one claim over one stored result."""
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    (tmp_path / name).write_text(stored if isinstance(stored, str) else json.dumps(stored))
    claims._stored.cache_clear()
    row = {"claim": "It is fast", "result": "one", "figure": "{seconds:.1f} s"} | claim
    return {
        "sources": {},
        "results": {"one": {"file": name, "sources": ["setup.py"], "minutes": 1}},
        "held": [],
        "mended": [],
        "measured": [row],
    }


STORED = {"commit": COMMIT, "command": "scripts/x.sh", "seconds": 2.0, "update": {"values": [1, 2]}} | TOLD


def test_every_claim_meets_its_bound_or_is_a_missed_goal():
    assert claims.faults(claims.load()) == []


def test_a_claim_that_holds_has_no_fault(tmp_path, monkeypatch):
    good = table(tmp_path, monkeypatch, STORED, bound="3 s", holds="seconds <= 3")
    assert claims.faults(good) == []


FAULTS = {
    "a bound that is not met": ({"bound": "1 s", "holds": "seconds <= 1"}, "2.0 s does not meet the bound"),
    "a missed goal that is met": ({"bound": "3 s", "holds": "seconds <= 3", "missed": "slow"}, "meets the bound"),
    "a missed goal without a bound": ({"missed": "slow"}, "without `holds`"),
    "a bound without words": ({"holds": "seconds <= 3"}, "a bound that is not said"),
    "no figure": ({"figure": ""}, "no figure"),
    "no such result": ({"result": "two"}, "no result two"),
    "a key that is gone": ({"figure": "{minutes}"}, "NameError"),
    "a long cell": ({"claim": "so " * 41}, "more than 40 words"),
    "a long figure": ({"figure": "{'so ' * 41}"}, "more than 40 words"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_claim_is_one_message(name, tmp_path, monkeypatch):
    claim, message = FAULTS[name]
    (found,) = claims.faults(table(tmp_path, monkeypatch, STORED, **claim))
    assert message in found


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"command": "x", "seconds": 2.0}, "no commit"),
        ({"commit": COMMIT, "seconds": 2.0} | TOLD, "no command"),
        ({"commit": f"{COMMIT} with changes", "command": "x", "seconds": 2.0} | TOLD, "a tree that no commit names"),
        ({"commit": COMMIT, "command": "x", "seconds": 2.0, "date": "2026-11-22"}, "no date or no load"),
        ({"commit": COMMIT, "command": "x", "seconds": 2.0, "load": 0.4}, "no date or no load"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_result_is_one_message(stored, message, tmp_path, monkeypatch):
    (found,) = claims.faults(table(tmp_path, monkeypatch, stored))
    assert message in found and "one.json" in found


def test_each_part_of_a_result_says_its_date_and_load_or_the_whole_file_does(tmp_path, monkeypatch):
    parts = {"command": "x", "seconds": 2.0, "rows": [{"commit": COMMIT} | TOLD, {"commit": COMMIT}]}
    (found,) = claims.faults(table(tmp_path, monkeypatch, parts))
    assert found == "docs/results/one.json: no date or no load of what was made at 91eebfc"
    assert claims.faults(table(tmp_path, monkeypatch, parts | TOLD)) == []


def test_an_older_result_may_lack_date_and_load_and_one_that_has_them_is_not_older(tmp_path, monkeypatch):
    untold = {"commit": COMMIT, "command": "x", "seconds": 2.0}
    found = table(tmp_path, monkeypatch, untold)
    found["results"]["one"]["older"] = True
    assert claims.faults(found) == []
    found = table(tmp_path, monkeypatch, untold | TOLD)
    found["results"]["one"]["older"] = True
    assert claims.faults(found) == [
        "docs/results/one.json: says its date and load; take `older` out of its row in claims.yaml"
    ]


def test_no_result_is_older_that_was_made_after_date_and_load_were_asked_for():
    git = ["git", "rev-list", ASKED]
    told = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        pytest.skip("no history here")
    before = told.stdout.split()
    made = {stamp["commit"] for result in claims.results(claims.load()).values() for stamp in result.untold()}
    assert [one for one in made if not any(commit.startswith(one) for commit in before)] == []


def test_lines_of_checks_are_results_too(tmp_path, monkeypatch):
    lines = [{"commit": COMMIT, "command": "x"} | TOLD, {"status": "ok"}, {"status": "failed"}]
    text = "\n".join(map(json.dumps, lines))
    figure = "{sum(line.get('status') == 'ok' for line in lines)} hold"
    found = table(tmp_path, monkeypatch, text, "one.jsonl", figure=figure)
    assert claims.faults(found) == []
    assert claims.figure(found["measured"][0], claims.results(found)["one"]) == "1 hold"
    (tmp_path / "one.jsonl").write_text(text.partition("\n")[2])
    claims._stored.cache_clear()
    assert [fault.partition(": ")[2] for fault in claims.faults(found)] == ["no commit", "no command"]


def test_a_stored_file_that_nobody_claims_from_is_found(tmp_path, monkeypatch):
    found = table(tmp_path, monkeypatch, STORED)
    (tmp_path / "two.json").write_text("{}")
    assert claims.faults(found) == ["docs/results/two.json: no result of claims.yaml"]


def test_a_source_that_is_gone_is_found(tmp_path, monkeypatch):
    found = table(tmp_path, monkeypatch, STORED)
    found["results"]["one"]["sources"] = ["mrl/no_such_file.py"]
    assert claims.faults(found) == ["docs/results/one.json: depends on mrl/no_such_file.py, which is not there"]


def test_a_result_that_names_a_folder_of_its_machine_is_found(tmp_path, monkeypatch):
    found = table(tmp_path, monkeypatch, STORED | {"why": "in /srv/own/clone/parallel_configs/tiny-moe/cpu.yaml:25"})
    fault = "docs/results/one.json: names where the repository lay: /srv/own/clone/parallel_configs/"
    assert claims.faults(found) == [fault]
    assert claims.faults(table(tmp_path, monkeypatch, STORED | {"why": "in parallel_configs/tiny-moe/cpu.yaml"})) == []


def test_keys_that_are_methods_of_a_dictionary_are_keys(tmp_path, monkeypatch):
    found = table(
        tmp_path, monkeypatch, STORED, figure="{sum(update.values)} of {top}", let={"top": "max(update.values)"}
    )
    assert claims.figure(found["measured"][0], claims.results(found)["one"]) == "3 of 2"


def test_changed_lines_are_those_that_git_counts_in_the_named_files(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "ROOT", tmp_path)

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    commits = []
    for one, other in (("a\n", "x\n"), ("b\nc\n", "x\n"), ("b\nc\n", "y\n")):
        (tmp_path / "one.py").write_text(one)
        (tmp_path / "other.py").write_text(other)
        git("add", ".")
        git("commit", "-qm", "c")
        commits.append(git("rev-parse", "HEAD").strip())
    counted = [claims.changed_lines(commit, commits[2], ("one.py",)) for commit in commits]
    assert counted == [3, 0, 0]
    assert claims.changed_lines("0" * 40, commits[2], ("one.py",)) is None


def test_a_figure_says_its_commits_and_when_it_was_made():
    old, new = {"commit": COMMIT}, {"commit": ASKED, "date": "2026-11-22"}
    assert claims.made_at([old], {}) == "`91eebfc`"
    assert claims.made_at([old], {"date": "2026-11-20 10:00"}) == "`91eebfc`, 2026-11-20"
    assert claims.made_at([new, new], {}) == "`dca999c`, 2026-11-22"
    assert claims.made_at([old, new], {"date": "2026-11-20"}) == "`91eebfc` and 1 more, 2026-11-20 to 2026-11-22"


def test_figures_of_a_page_are_those_of_the_results():
    table = claims.load()
    seconds = json.loads((claims.RESULTS / "tutorial.json").read_text())["quickstart"]["seconds"]
    mark = "<!-- figure tutorial: {quickstart.seconds:.0f} s -->"
    filled = claims.filled(f"It takes {mark}9 s<!-- end -->.\n<!-- table older -->\n\n\n<!-- end -->", table)
    assert f"{mark}{seconds:.0f} s<!-- end -->" in filled
    assert filled.count("\n| ") == 5 and claims.filled(filled, table) == filled


def test_a_test_that_is_left_out_of_continuous_integration_says_so():
    assert claims.with_long("tests/real/test_memory_truth.py") == "`tests/real/test_memory_truth.py` (long)"
    assert claims.with_long("tests/real/test_sync.py") == "`tests/real/test_sync.py` (partly long)"
    assert claims.with_long("tests/unit/test_claims.py") == "`tests/unit/test_claims.py`"


def test_a_missed_goal_without_a_stored_figure_says_its_bound_its_reason_and_its_command(tmp_path, monkeypatch):
    found = table(tmp_path, monkeypatch, STORED)
    goal = {"claim": "All die", "bound": "95 %", "missed": "not run", "by": "scripts/evidence/mutants.sh"}
    found["unmeasured"] = [goal]
    assert claims.faults(found) == []
    for key, fault in (("bound", "no bound"), ("missed", "no missed"), ("by", "no test or command")):
        found["unmeasured"] = [{name: words for name, words in goal.items() if name != key}]
        assert claims.faults(found) == [f"All die: {fault}"]
    found["unmeasured"] = [goal | {"by": "scripts/evidence/no_more.sh"}]
    assert claims.faults(found) == ["All die: no scripts/evidence/no_more.sh"]


def test_a_row_whose_test_is_gone_is_found():
    table = copy.deepcopy(claims.load())
    table["held"][0]["tests"] = "tests/real/test_no_more.py"
    assert [fault for fault in claims.faults(table) if "no tests/real/test_no_more.py" in fault]


def test_goals_that_were_missed_stand_on_the_page_with_figure_and_reason():
    missed = claims.page().partition("## Goals missed")[2].partition("## Never run")[0]
    for words in (
        "export",
        "sleeping engine",
        "Rehearsals",
        "Random rewards",
        "with routes",
        "50 cycles",
        "two longest samples",
        "quantised once",
    ):
        (row,) = [line for line in missed.splitlines() if words in line.split(" | ")[0]]
        assert all(cell.strip() for cell in row.split(" | "))
    assert sum(line.startswith("| Digests of a sync, a side |") for line in claims.page().splitlines()) == 1, "now met"
