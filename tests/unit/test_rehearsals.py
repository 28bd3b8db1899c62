"""What is said to have been rehearsed was: headers of presets are those of the stored results."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "evidence"))  # what its scripts import of each other
_spec = importlib.util.spec_from_file_location("rehearsals", ROOT / "scripts" / "evidence" / "rehearsals.py")
rehearsals = importlib.util.module_from_spec(_spec)
sys.modules["rehearsals"] = rehearsals
_spec.loader.exec_module(rehearsals)

PRESETS = sorted((ROOT / "parallel_configs").glob("*/*.yaml"))
REHEARSED = re.compile(re.escape(rehearsals.HEADER) + r"(\S+):")


def in_history(commit: str) -> bool:
    return (
        subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True).returncode
        == 0
    )


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_preset_that_says_it_was_rehearsed_has_a_stored_result_of_that_commit(path):
    found, result = REHEARSED.search(path.read_text()), rehearsals.stored().get(f"{path.parent.name}/{path.stem}")
    if found is None:
        assert result is None or not result["ok"], "python scripts/evidence/rehearsals.py --headers"
        return
    assert result is not None and result["ok"] and result["commit"] == found[1]
    assert not (ROOT / ".git").exists() or in_history(found[1])


def test_every_stored_result_is_of_a_configuration_and_of_a_commit():
    for name, result in rehearsals.stored().items():
        assert re.fullmatch("[0-9a-f]{40}", result["commit"]), name
        assert result["ok"] == (not result["failed"]) and result["exercised"], name


def test_the_header_is_written_once_behind_the_comments():
    text = "# A preset.\n#\n# Provenance: ours.\nextends: x.yaml\n"
    once = rehearsals.with_header(text, "a" * 40)
    assert (
        once == f"# A preset.\n#\n# Provenance: ours.\n{rehearsals.HEADER}{'a' * 40}: in small, on two CPU "
        "cores.\nextends: x.yaml\n"
    )
    assert rehearsals.with_header(once, "b" * 40) == once.replace("a" * 40, "b" * 40)


def test_all_presets_and_scripts_have_names():
    known = rehearsals.configs()
    assert len(known) == len(PRESETS) + len(list(rehearsals.SCRIPTS.glob("*.sh"))) and "qwen3-30b-a3b/h100-4x8" in known


def test_a_script_that_names_a_reward_file_is_given_the_one_beside_it(tmp_path):
    from mrl.cli.main import main

    script = rehearsals.SCRIPTS / "dapo_8b_custom_reward.sh"
    config = rehearsals.Config(script.stem, script)
    given = [text for name, value in rehearsals.VARIABLES.items() for text in ("--set", f"{name}={value}")]
    main(["import-verl", str(script), "-o", str(tmp_path / "imported.yaml"), *given])
    wanted = f"reward.custom_reward_function.path={script.parent / 'reward_score.py'}"
    assert rehearsals.own_reward(config, tmp_path / "imported.yaml") == ["--set", wanted]
    elsewhere = rehearsals.Config(script.stem, tmp_path / script.name)
    assert rehearsals.own_reward(elsewhere, tmp_path / "imported.yaml") == ["--set", wanted]
    preset = PRESETS[0]
    assert rehearsals.own_reward(rehearsals.Config("preset", preset), preset) == []


def test_what_a_script_is_given_to_be_legal_is_said():
    given = {script.stem: rehearsals.given_to(script) for script in rehearsals.SCRIPTS.glob("*.sh")}
    assert {name for name, values in given.items() if values} == {"gspo_30b_megatron"}
    assert given["gspo_30b_megatron"] == {"NNODES": "4"}


def test_a_result_is_kept_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsals, "RESULTS", tmp_path / "rehearsals.json")
    for name in ("b", "a"):
        rehearsals.store(name, {"ok": True, "commit": name})
    assert list(rehearsals.stored()) == ["a", "b"] and json.loads((tmp_path / "rehearsals.json").read_text())["command"]


@pytest.mark.parametrize("script", sorted(rehearsals.SCRIPTS.glob("*.sh")), ids=lambda p: p.stem)
def test_a_script_imports_to_what_can_be_rehearsed(script, tmp_path):
    """Its small form breaks no rule."""
    from mrl.cli.main import main
    from mrl.config.load import load_config
    from mrl.config.rules import violations
    from mrl.model import model_spec
    from mrl.tools.rehearse.compose import WorkFolder, compose
    from mrl.tools.rehearse.prepare import original_hf_config
    from mrl.tools.rehearse.small_model import small_hf_config

    given = [text for name, value in rehearsals.VARIABLES.items() for text in ("--set", f"{name}={value}")]
    main(["import-verl", str(script), "-o", str(tmp_path / "imported.yaml"), *given])
    resolved = load_config(tmp_path / "imported.yaml")
    rehearsal = compose(resolved.config, WorkFolder(tmp_path / "work"), cpus=2)
    (tmp_path / "rehearsal.yaml").write_text(rehearsal.to_yaml())
    small = small_hf_config(original_hf_config(resolved.config.model.path), rehearsal.layout.layers, 320, 512)
    assert violations(load_config(tmp_path / "rehearsal.yaml"), model_spec(small)) == []
