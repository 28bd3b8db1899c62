"""Slips in the rows of a family are all named by what `mrl family check` runs on one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import RUN_S

from mrl.model.registry import known_hf_config, own_config
from mrl.platforms.hosting import get_hosting
from mrl.tools.family.drawn import PLAIN, drawn_configs

pytestmark = [pytest.mark.real, pytest.mark.long]
HERE = Path(__file__).parent
MODELS = (
    "Qwen2.5-0.5B", "Llama-3.1-8B", "Qwen3-30B-A3B", "GLM-4.6", "Mixtral-8x7B", "OLMoE-1B-7B", "MiniMax-M2",
    "Moonlight-16B-A3B", "GLM-4.7-Flash", "Qwen3-Next-80B-A3B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "phi-4",
    "gpt-oss-20b", "Hy3",
)  # fmt: skip
EACH = 10  # mutants of a family, of those that there are


def run(program: list[str], job: Path, suffix: str) -> dict:
    environment = os.environ | get_hosting("cpu").actor_environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, *program, str(job)], env=environment, capture_output=True, text=True, timeout=4 * RUN_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(job.with_suffix(suffix).read_text())


def test_a_hundred_slips_are_named(tmp_path):
    cases = []
    for name in MODELS:
        config = drawn_configs(own_config(known_hf_config(name)))[PLAIN]
        case = {"name": name, "config": config, "folder": str(tmp_path / name), "words": config["vocab_size"]}
        cases.append(case | {"mutants": EACH})
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"cases": cases}))
    run(["-m", "mrl.rank.family_reference"], job, ".out")
    judges = [run([str(HERE / "family_mutants.py"), judge], job, f".{judge}") for judge in ("loader", "ranks")]
    found = {name: [said for judge in judges if (said := judge[name])] for name in judges[0]}
    plain = {name: faults for name, faults in found.items() if name.endswith(": none")}
    assert list(plain.values()) == [[]] * len(MODELS)
    named = {name: faults for name, faults in found.items() if name not in plain}
    assert [name for name, faults in named.items() if not faults] == []
    assert len(named) >= 145
