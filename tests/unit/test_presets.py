"""Every preset that ships is read, breaks no rule, fits the device that it is for,
and says where it comes from and whether it was run.
"""

import datetime
import json
from pathlib import Path

import pytest
import yaml
from test_sync_order import SLOW, SMALLER

from mrl.cli.main import main
from mrl.config.load import RECIPES, available_recipes, load_config
from mrl.config.rules import violations
from mrl.model import known_name, planning_model_spec
from mrl.plan import run_plan

FOLDER = Path(__file__).parents[2] / "parallel_configs"
PRESETS = sorted(FOLDER.glob("*/*.yaml"))
IDS = [f"{p.parent.name}/{p.stem}" for p in PRESETS]
SYNCED = {preset for preset in SMALLER if preset not in SLOW}
ON_CLUSTERS = [p for p in PRESETS if not p.stem.startswith("cpu")]
# (model, devices, where): what has to be there
WANTED = {
    ("qwen3-30b-a3b", 32, "a2"), ("qwen3-30b-a3b", 16, "a2"), ("qwen3-30b-a3b", 16, "a3"), ("qwen3-30b-a3b", 8, "h100"),
    ("qwen3-30b-a3b", 32, "h100"), ("qwen3-30b-a3b", 8, "h200"), ("qwen3-30b-a3b", 32, "h200"),
    ("qwen3-235b-a22b", 128, "a3"),
    ("qwen3-235b-a22b", 128, "h100"), ("qwen3-235b-a22b", 64, "h200"), ("qwen3-32b", 64, "a3"), ("qwen3-8b", 16, "a3"),
    ("qwen3-8b", 8, "h100"), ("qwen2.5-7b", 8, "h100"), ("qwen2.5-3b", 8, "a2"),
}  # fmt: skip


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    try:
        main([*arguments, "--json"])
        code = 0
    except SystemExit as end:
        code = end.code
    return code, json.loads(capsys.readouterr().out)


def test_there_is_a_preset_for_every_system_of_the_sources():
    found = set()
    for path in PRESETS:
        cluster = load_config(path).config.cluster
        found.add((path.parent.name, cluster.nnodes * cluster.n_gpus_per_node, path.stem.split("-")[0]))
    assert found >= WANTED
    assert FOLDER / "tiny-moe" / "cpu.yaml" in PRESETS


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_a_preset_says_where_it_comes_from_and_whether_it_was_run(path):
    head = path.read_text().partition("\nextends")[0].partition("\n\n")[0].lower()
    assert ("run on:" in head) != ("planned arithmetic only" in head)
    assert "provenance:" in head or "made by:" in head


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_a_preset_breaks_no_rule(path, tiny_worlds, capsys):
    code, found = answer(capsys, "validate", str(path))
    assert (code, found["violations"]) == (0, [])
    assert any(note.startswith("batch: ") for note in found["notes"])


def pairs():
    """Each preset with each recipe: a third of them a day, the others are long."""
    today = datetime.date.today().toordinal()
    for place, path in enumerate(PRESETS):
        for number, recipe in enumerate(available_recipes()):
            marks = [] if (place + number + today) % 3 == 0 else [pytest.mark.long]
            yield pytest.param(path, recipe, marks=marks, id=f"{IDS[place]}-{recipe}")


@pytest.mark.parametrize(("path", "recipe"), pairs())
def test_every_recipe_goes_with_every_preset_by_its_name(path, recipe, tiny_worlds):
    """One word changes the algorithm: what the recipe says stands, whatever recipe the preset was made with,
    and no rule is broken, but that critics are not built for every family.
    """
    teacher = [f"distillation.teacher_model.model_path={load_config(path).config.model.path}"]
    resolved = load_config(path, recipe, teacher if recipe == "distillation" else ())
    model = planning_model_spec(resolved.config.model.path)[0]
    broken = [violation.field for violation in violations(resolved, model)]
    lacks = recipe == "ppo" and (model.is_latent or model.is_hybrid or model.attention_sinks)
    assert broken == ["algorithm.adv_estimator"] * lacks
    said = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["algorithm"]
    # null in a recipe: derived from data
    kept, settled = resolved.config.algorithm.model_dump(), {"loss_scale_factor", "len"}
    for name, value in said.items():
        wanted = {name: value} if not isinstance(value, dict) else {k: v for k, v in value.items() if k not in settled}
        found = kept if not isinstance(value, dict) else kept[name]
        assert {k: found[k] for k in wanted} == {k: float(v) if k.startswith("clip_") else v for k, v in wanted.items()}


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_a_preset_fits_the_device_that_it_is_for(path, tiny_worlds, capsys, monkeypatch):
    config = load_config(path).config
    if f"{path.parent.name}/{path.stem}" in SYNCED:  # test_sync_order plans its weight sync
        monkeypatch.setattr(run_plan, "sync_of", lambda inputs: {})
    code, plan = answer(capsys, "plan", str(path))
    assert code == 0
    assert plan["device"]["name"] == (config.cluster.accelerator or "cpu")
    phases = plan["memory"]["phases"]
    assert phases and not {name: phase for name, phase in phases.items() if not phase["fits"]}


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_a_preset_uses_the_devices_that_it_asks_for(path):
    config = load_config(path).config
    engines = config.rollout.num_engines * config.rollout.tensor_model_parallel_size * config.rollout.data_parallel_size
    devices = config.cluster.nnodes * config.cluster.n_gpus_per_node
    world = config.actor.layout.world_size
    assert (world + engines if config.cluster.placement == "separate" else world) == devices
    assert config.cluster.placement == "separate" or engines == devices


@pytest.mark.parametrize("path", ON_CLUSTERS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_preset_is_of_a_model_that_can_be_planned_without_its_weights(path):
    assert known_name(load_config(path).config.model.path).lower() == path.parent.name


def test_every_number_of_a_preset_is_a_number():
    """PyYAML would read 1e-6 as text."""
    for path in PRESETS:
        config = load_config(path).config
        numbers = [
            config.actor.optim.lr,
            config.algorithm.policy_loss.clip_ratio_low,
            config.rollout.gpu_memory_utilization,
        ]
        assert all(type(n) is float for n in (*numbers, *config.actor.optim.betas)), path


def test_the_layout_of_source_004_is_what_the_source_says():
    config = load_config(FOLDER / "qwen3-30b-a3b" / "a2-4x8.yaml").config
    layout, loss = config.actor.layout, config.algorithm.policy_loss
    assert (layout.world_size, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (32, 4, 4)
    assert (layout.expert_model_parallel_size, layout.expert_tensor_parallel_size) == (8, 1)
    assert (config.rollout.tensor_model_parallel_size, config.rollout.data_parallel_size, config.rollout.n) == (4, 8, 2)
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (32, 4)
    assert (loss.loss_mode, loss.loss_agg_mode, loss.clip_ratio_low, loss.clip_ratio_high) == (
        "gspo",
        "seq-mean-token-mean",
        3e-4,
        4e-4,
    )


def test_dapo_presets_have_the_settings_of_source_001():
    for name in ("qwen3-235b-a22b/a3-8x16", "qwen3-235b-a22b/h100-16x8", "qwen3-235b-a22b/h200-8x8"):
        algorithm = load_config(FOLDER / f"{name}.yaml").config.algorithm
        loss = algorithm.policy_loss
        assert (loss.loss_mode, loss.loss_agg_mode, loss.clip_ratio_low, loss.clip_ratio_high) == (
            "vanilla",
            "token-mean",
            0.2,
            0.28,
        )
        assert (algorithm.use_kl_loss, algorithm.use_kl_in_reward, algorithm.entropy_coeff) == (False, False, 0.0)
        assert (algorithm.filter_groups.enable, algorithm.overlong_buffer.len) == (True, 4096)


def test_the_tiny_preset_is_what_its_comments_say():
    config = load_config(FOLDER / "tiny-moe" / "cpu.yaml").config
    assert config.data.train_batch_size // config.actor.ppo_mini_batch_size == 4
    assert config.actor.ppo_micro_batch_size_per_gpu == config.actor.ppo_mini_batch_size * config.rollout.n
    # twice the band of 1,000 tokens carried to 3 tokens by 1/sqrt(length), within a tenth
    assert config.algorithm.policy_loss.clip_ratio_low == pytest.approx(2 * 3e-4 * (1000 / 3) ** 0.5, rel=0.1)
