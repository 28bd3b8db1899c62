"""`mrl family check` of every family.

Three families a run, drawn by the day, without the step; all of them with it are long.
"""

import datetime
import json
import random

import pytest
from world import mrl

from mrl.model import known_spec
from mrl.model.registry import FAMILIES
from mrl.tools.family.check import CHECKS

pytestmark = pytest.mark.real

# known models, one of each family at least: of DeepSeek-V3's one has yarn and groups of experts
MODELS = (
    "Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "GLM-4.6", "DeepSeek-V3", "Moonlight-16B-A3B",
    "GLM-4.7-Flash", "Qwen3-Next-80B-A3B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Llama-3.1-8B", "Mistral-7B-v0.3",
    "Mixtral-8x7B", "phi-4", "Seed-OSS-36B", "OLMoE-1B-7B", "MiniMax-M2", "gpt-oss-20b", "Hy3",
)  # fmt: skip
DRAWN = random.Random(datetime.date.today().toordinal()).sample(MODELS, 3)


def test_every_family_is_checked():
    assert {known_spec(name).family for name in MODELS} == {family.model_type for family in FAMILIES.values()}


def checked(models: list[str], *names: str) -> list[dict]:
    """Returns the checks of families, which share their processes."""
    done = mrl("family", "check", *models, "--json", *(word for name in names for word in ("--only", name)))
    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode == 0) == found["ok"]
    assert {(check["model"], check["name"]): check["faults"] for check in found["checks"] if check["faults"]} == {}
    return found["checks"]


def test_three_families_are_right():
    names = [name for name in CHECKS if name != "step"]
    found = checked(DRAWN, *names)
    assert [(check["name"], check["model"]) for check in found] == [(name, model) for name in names for model in DRAWN]


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_a_family_trains_with_an_engine(model):
    assert [check["name"] for check in checked([model])] == list(CHECKS)
