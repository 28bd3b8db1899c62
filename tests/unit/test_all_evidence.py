"""`scripts/evidence/all.sh`: what is stale is made anew, the short ones first; it goes on after one that fails."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, path: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


claims = load("claims", "scripts/claims.py")
stamp = load("stamp", "scripts/evidence/stamp.py")
evidence = load("all_evidence", "scripts/evidence/all.py")
HEAD = "f" * 40


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Stores a result of a commit; lines change with every commit but HEAD."""
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    monkeypatch.setattr(claims, "head", lambda: HEAD)
    monkeypatch.setattr(claims, "changed_lines", lambda commit, as_of, sources: 0 if commit == as_of else 3)

    def store(name: str, commit: str, minutes: float = 1, **more) -> claims.Result:
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit, "command": f"make {name}"}))
        claims.forget()
        return claims.Result(name, f"{name}.json", ("setup.py",), minutes, **more)

    return store


def test_what_is_stale_is_chosen_the_short_ones_first(stored):
    made = [
        stored("slow", "a" * 40, 30), stored("fresh", HEAD), stored("past", "a" * 40, once=True),
        stored("quick", "b" * 40, 2), stored("far", "a" * 40, needs="the network"),
    ]  # fmt: skip
    known = {result.name: result for result in made}
    known["new"] = claims.Result("new", "new.json", ("setup.py",), 5)
    assert [result.name for result in evidence.chosen(known, [], ["network"])] == ["quick", "new", "slow"]
    assert [result.name for result in evidence.chosen(known, [], [])] == ["far", "quick", "new", "slow"]
    assert [result.name for result in evidence.chosen(known, ["fresh"], [])] == ["fresh"]


def test_the_time_is_told_beforehand(stored):
    told = evidence.lines([stored("quick", HEAD, 30), stored("slow", HEAD, 90, needs="root")])
    assert told[0].startswith("2 results, about 2.0 hours")
    assert told[1].split() == ["30.0", "min", "quick", "make", "quick"] and "needs root" in told[2]


def test_a_result_is_made_anew_where_its_file_names_this_commit(stored, tmp_path):
    text = json.dumps({"commit": HEAD, "command": "x"})
    good = stored("good", "a" * 40, command=f"echo '{text}' > {tmp_path}/good.json")
    assert evidence.renewed(good, tmp_path / "work")
    missed = stored("missed", "a" * 40, command=f"echo '{text}' > {tmp_path}/missed.json; exit 1")
    assert evidence.renewed(missed, tmp_path / "work")  # a goal that was missed is a result too
    unwritten = stored("unwritten", "a" * 40, command="echo said")
    assert not evidence.renewed(unwritten, tmp_path / "work")
    assert (tmp_path / "work" / "unwritten.log").read_text() == "said\n"
    failing = stored("failing", HEAD, command="exit 3")
    assert not evidence.renewed(failing, tmp_path / "work")


def test_every_result_has_a_command_and_a_time():
    known = claims.results(claims.load())
    assert all(result.minutes > 0 and evidence.command(result, Path("work")) for result in known.values())
    scripts = {word for result in known.values() for word in evidence.command(result, Path("work")).split()}
    named = {word for word in scripts if word.startswith("scripts/") and word.endswith((".py", ".sh"))}
    assert len(named) > 20 and not [name for name in named if not (ROOT / name).exists()]


def test_changes_outside_of_docs_are_refused_by_name(tmp_path):
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    script = tmp_path / "scripts" / "evidence" / "stamp.py"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "scripts" / "evidence" / "stamp.py").read_text())
    result = tmp_path / "docs" / "results" / "one.json"
    result.parent.mkdir(parents=True)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "c")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, input='{"seconds": 2}', capture_output=True, text=True)

    assert run(str(result), "scripts/x.sh", "--at", "part").returncode == 0
    found = json.loads(result.read_text())["part"]
    assert len(found["commit"]) == 40 and found["command"] == "scripts/x.sh" and found["seconds"] == 2
    assert {"date", "cpus", "load"} <= found.keys()
    assert run("--clean").returncode == 0  # a result alone is no change of what is measured
    (tmp_path / "mrl.py").write_text("x = 1")
    refused = run(str(result), "scripts/x.sh")
    assert refused.returncode == 2 and "mrl.py" in refused.stderr and len(refused.stderr.splitlines()) == 2
    assert "part" in json.loads(result.read_text())
