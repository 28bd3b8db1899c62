"""What docs tell of presets with adapters, a critic or a teacher is what a plan says: they fit, and take so long."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.model import planning_model_spec
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, device_for
from mrl.tools.run_search import step_of

ROOT = Path(__file__).resolve().parents[2]
ON_HOST = [f"critic.{what}_offload=true" for what in ("param", "grad", "optimizer")]
TEACHER = ["distillation.teacher_model.param_offload=true"]


def cells(page: str) -> Iterator[list[str]]:
    """The cells of each row of a page that begins with a preset."""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        found = [cell.strip() for cell in line.split("|")[1:-1]]
        if found and re.fullmatch(r"`qwen3-[\w.-]+/[\w-]+`", found[0]):
            yield found


def planned(preset: str, recipe: str | None = None, *settings: str) -> tuple[int, dict[str, float]]:
    """Devices and seconds by phase of a legal run that fits."""
    resolved = load_config(ROOT / "parallel_configs" / f"{preset}.yaml", recipe, list(settings))
    config = resolved.config
    model, device = planning_model_spec(config.model.path)[0], device_for(config)
    assert violations(resolved, model) == []
    assert memory_section(PlanInputs.of(config, model, device))["fits"]
    return config.actor.layout.world_size, step_of(config, model, device)


def seconds_in(cell: str) -> object:
    """The seconds that a cell tells in three digits."""
    return pytest.approx(float(cell.removesuffix(" s").replace(",", "")), rel=6e-3)


def words(cell: str) -> list[str]:
    return [part for part in cell.split("`") if part.strip(", ")]


ADAPTERS, CRITICS, TEACHERS = list(cells("lora.md")), list(cells("algorithms.md")), list(cells("distillation.md"))


def test_each_kind_of_device_is_told_of():
    for rows in (ADAPTERS, CRITICS, TEACHERS):
        assert {re.search(r"/(\w+)-", row[0])[1] for row in rows} == {"h100", "h200", "a3"}
    assert {row[0].partition("/")[0] for row in ADAPTERS} == {"`qwen3-30b-a3b", "`qwen3-235b-a22b"}


@pytest.mark.parametrize("row", ADAPTERS, ids=lambda row: row[0])
def test_steps_with_adapters(row):
    own, devices, step, full, of_full = row
    preset = words(own)[0]
    ranks, seconds = planned(preset)
    assert str(ranks) == devices and sum(seconds.values()) == seconds_in(step)
    beside = f"{preset.partition('/')[0]}/{words(full)[0]}"
    assert sum(planned(beside)[1].values()) == seconds_in(of_full)


@pytest.mark.parametrize("row", CRITICS, ids=lambda row: row[0])
def test_steps_with_a_critic(row):
    preset, beside, devices, step, of_critic, alone = row
    ranks, seconds = planned(words(preset)[0], "ppo", *ON_HOST, *words(beside))
    assert str(ranks) == devices and sum(seconds.values()) == seconds_in(step)
    assert seconds["critic"] + seconds["values"] == seconds_in(of_critic)
    assert sum(planned(words(preset)[0])[1].values()) == seconds_in(alone)


@pytest.mark.parametrize("row", TEACHERS, ids=lambda row: row[0])
def test_steps_with_a_teacher(row):
    preset, teacher, beside, devices, step, of_teacher, alone = row
    model = f"distillation.teacher_model.model_path=Qwen/{words(teacher)[0]}"
    ranks, seconds = planned(words(preset)[0], "distillation", model, *TEACHER, *words(beside))
    assert str(ranks) == devices and sum(seconds.values()) == seconds_in(step)
    assert seconds["teacher"] == seconds_in(of_teacher)
    assert sum(planned(words(preset)[0])[1].values()) == seconds_in(alone)


def test_the_pages_own_command_with_a_teacher_is_legal():
    page = (ROOT / "docs" / "distillation.md").read_text()
    command = re.search(r"```bash\nmrl train parallel_configs/(\S+)\.yaml --recipe distillation(.*?)```", page, re.S)
    settings = re.findall(r"--set '?([^'\n]+?)'?(?: \\|\n)", command[2])
    assert len(settings) == 3
    planned(command[1], "distillation", *settings)
