"""Composition, origins and messages of a run's configuration."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import ValidationError

from mrl.algo.spec import LOSSES
from mrl.config.load import available_recipes, load_config
from mrl.config.schema import OTHER_LAYOUTS, leaf, schema_keys, verl_names
from mrl.config.section import notes_of
from mrl.errors import ConfigError, InvalidConfig

TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
SMALL = """\
model: {path: m}
actor: {ppo_mini_batch_size: 4, layout: {world_size: 1}}
data: {train_batch_size: 8}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return name

    return write


@pytest.fixture
def small(write):
    return write("small.yaml", SMALL)


def problems(path, *overrides) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, overrides=overrides)
    return [str(v) for v in caught.value.violations]


# --- composition ------------------------------------------------------------------------------------------------------


def test_preset_is_beaten_by_recipe_and_recipe_by_set(write):
    path = write(
        "p.yaml", SMALL + "algorithm: {policy_loss: {clip_ratio_low: 0.01, clip_ratio_c: 5.0}}\nrollout: {n: 4}\n"
    )
    resolved = load_config(path, recipe="gspo", overrides=["algorithm.policy_loss.clip_ratio_high=7e-4"])
    loss = resolved.config.algorithm.policy_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high, resolved.config.rollout.n) == (3e-4, 7e-4, 4)
    wanted = {
        "algorithm.policy_loss.clip_ratio_low": "recipe gspo",
        "algorithm.policy_loss.clip_ratio_high": "--set",
        "rollout.n": "p.yaml:5",
        "rollout.temperature": "default",
        "actor.layout.world_size": "p.yaml:2",
    }
    assert {key: resolved.where(key) for key in wanted} == wanted
    assert resolved.recipe == "gspo"


def test_a_files_own_keys_win_over_the_recipe_it_names_and_that_over_its_base(write):
    write("base.yaml", SMALL + "algorithm: {policy_loss: {clip_ratio_low: 0.5, clip_ratio_high: 0.5}}\n")
    path = write("p.yaml", "extends: base.yaml\nrecipe: grpo\nalgorithm: {policy_loss: {clip_ratio_high: 0.28}}\n")
    loss = load_config(path).config.algorithm.policy_loss
    assert (loss.loss_mode, loss.clip_ratio_low, loss.clip_ratio_high) == ("vanilla", 0.2, 0.28)


def test_the_recipe_of_the_command_line_takes_the_place_of_the_presets():
    resolved = load_config(TINY, recipe="grpo")
    assert resolved.recipe == "grpo"
    assert resolved.config.algorithm.policy_loss.clip_ratio_low == 0.2
    assert "recipe gspo" not in set(map(str, resolved.origins.values()))


def test_extends_is_relative_to_the_file_and_later_bases_win(write):
    write("base/a.yaml", SMALL + "rollout: {n: 2, max_num_seqs: 5}\n")
    write("base/b.yaml", "rollout: {n: 3}\n")
    path = write("presets/p.yaml", "extends: [../base/a.yaml, ../base/b.yaml]\ndata: {max_prompt_length: 7}\n")
    resolved = load_config(path)
    assert (resolved.config.rollout.n, resolved.config.rollout.max_num_seqs) == (3, 5)
    assert resolved.where("rollout.n") == "base/b.yaml:1"
    assert resolved.files == ("base/a.yaml", "base/b.yaml", "presets/p.yaml")


def test_two_ways_to_one_base_are_no_circle(write):
    write("root.yaml", SMALL)
    write("a.yaml", "extends: root.yaml\n")
    write("b.yaml", "extends: root.yaml\n")
    assert load_config(write("p.yaml", "extends: [a.yaml, b.yaml]\n")).config.data.train_batch_size == 8


def test_a_circle_is_refused_with_its_chain(write):
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: sub/../a.yaml\n")
    write("sub/x.yaml", "")
    with pytest.raises(ConfigError, match=r"circle: a.yaml -> b.yaml -> a.yaml"):
        load_config("a.yaml")


def test_a_missing_file_is_refused_with_the_chain_that_led_to_it(write):
    write("a.yaml", "extends: b.yaml\n")
    with pytest.raises(ConfigError, match=r"^a.yaml -> b.yaml: cannot be read: No such file"):
        load_config("a.yaml")
    with pytest.raises(ConfigError, match="extends must be a file name or a list"):
        load_config(write("c.yaml", "extends: {a: b}\n"))
    with pytest.raises(ConfigError, match=r"l.yaml: must be a mapping"):
        load_config(write("l.yaml", "[a]\n"))


def test_the_recipe_for_tools_leaves_a_presets_tools_and_punishes_no_length():
    """Length is the answers' too; sampled tokens of all responses have one denominator."""
    preset = str(Path(TINY).parents[1] / "tool-moe" / "cpu.yaml")
    resolved = load_config(preset, recipe="tools", overrides=["rollout.turns.max_turns=5"])
    algorithm = resolved.config.algorithm
    assert resolved.config.rollout.turns.tools == ("calculator",) and resolved.config.rollout.turns.max_turns == 5
    assert not algorithm.overlong_buffer.enable and not algorithm.overlong_filter
    assert algorithm.policy_loss.loss_agg_mode == "token-mean"
    assert load_config(TINY, recipe="tools").config.rollout.turns is None


def test_an_unknown_recipe_is_refused_with_the_nearest_name(small, write):
    with pytest.raises(ConfigError, match=r"--recipe: no recipe gpso; did you mean gspo\?"):
        load_config(small, recipe="gpso")
    with pytest.raises(
        ConfigError, match=r"p.yaml:1: no recipe \.\./x; known: dapo, distillation, dr_grpo, grpo, gspo, ppo, tools"
    ):
        load_config(write("p.yaml", "recipe: ../x\n"))


@pytest.mark.parametrize("name", available_recipes())
def test_every_recipe_loads_and_names_a_known_loss_with_one_of_its_aggregations(name, small):
    loss = load_config(small, recipe=name).config.algorithm.policy_loss
    assert loss.loss_agg_mode in LOSSES[loss.loss_mode].aggregations


def test_dr_grpo_divides_by_the_longest_response_unless_told_otherwise(small):
    resolved = load_config(small, recipe="dr_grpo", overrides=["data.max_response_length=300"])
    assert resolved.config.algorithm.policy_loss.loss_scale_factor == 300
    assert resolved.where("algorithm.policy_loss.loss_scale_factor") == "data.max_response_length"
    told = load_config(small, recipe="dr_grpo", overrides=["algorithm.policy_loss.loss_scale_factor=64"])
    assert told.config.algorithm.policy_loss.loss_scale_factor == 64
    # the schema's default length
    assert load_config(small, recipe="dr_grpo").config.algorithm.policy_loss.loss_scale_factor == 1024
    assert not load_config(small, recipe="dr_grpo").config.algorithm.norm_adv_by_std_in_grpo


# --- --set ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "section", "value"),
    [
        ("data.train_files=[a,b]", "data.train_files", ("a", "b")),
        ("data.train_files=a.parquet", "data.train_files", ("a.parquet",)),
        ("actor.optim.lr=1e-5", "actor.optim.lr", 1e-5),
        ("actor.optim.betas=[0.8, 0.9]", "actor.optim.betas", (0.8, 0.9)),
        ("trainer.deterministic=yes", "trainer.deterministic", True),
        ("trainer.experiment_name=a=b", "trainer.experiment_name", "a=b"),
        ("trainer.run_dir=null", "trainer.run_dir", None),
        ("cluster={nnodes: 3}", "cluster.nnodes", 3),
        ("rollout.engine_kwargs={vllm: {block_size: 16}}", "rollout.engine_kwargs", {"vllm": {"block_size": 16}}),
        ("actor.layout.pipeline_layers=[1, 3]", "actor.layout.pipeline_layers", (1, 3)),
    ],
)
def test_set_takes_yaml_values(small, override, section, value):
    assert leaf(load_config(small, overrides=[override]).config, section) == value


def test_later_sets_win(small):
    assert load_config(small, overrides=["rollout.n=2", "rollout.n=3"]).config.rollout.n == 3


@pytest.mark.parametrize("override", ["rollout.n", "rollout.n=", "=3", "rollout..n=3", "rollout.n=[1"])
def test_a_malformed_set_is_refused_and_quoted(small, override):
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides=[override])
    assert f"--set {override}" in str(caught.value)


# --- types ------------------------------------------------------------------------------------------------------------

FLOATS = [key for key, field in schema_keys().items() if field.annotation in (float, float | None)]
# these cannot be as small as the numbers tried
NEGATIVE = ("distillation.distillation_loss.log_prob_min_clamp",)
LARGER = ("algorithm.policy_loss.clip_ratio_c", "rollout.temperature", "rollout.turns.sandbox.max_disk_mib")


def test_the_schema_has_the_floats_that_are_tested():
    assert {"actor.optim.lr", "algorithm.policy_loss.clip_ratio_low", "algorithm.policy_loss.loss_scale_factor"} < set(
        FLOATS
    )


@pytest.mark.parametrize("key", [key for key in FLOATS if key not in (*LARGER, *NEGATIVE)])
@pytest.mark.parametrize("written", ["3e-4", "'3e-4'", "1e-6"])
def test_every_float_reads_exponents_without_a_dot(small, key, written):
    assert leaf(load_config(small, overrides=[f"{key}={written}"]).config, key) == float(written.strip("'"))


@pytest.mark.parametrize(("key", "written"), [*((key, "3e1") for key in LARGER), *((key, "-3e1") for key in NEGATIVE)])
def test_floats_that_cannot_be_small_read_exponents_too(small, key, written):
    assert leaf(load_config(small, overrides=[f"{key}={written}"]).config, key) == float(written)


def test_a_temperature_that_vllm_would_silently_raise_is_refused(small):
    with pytest.raises(ConfigError, match=r"rollout.temperature = 0.001 .*>= 0.01"):
        load_config(small, overrides=["rollout.temperature=0.001"])


def test_numbers_inside_free_mappings_are_numbers(small):
    resolved = load_config(small, overrides=["model.override_transformer_config.moe_z_loss_coeff=1e-3"])
    assert resolved.config.model.override_transformer_config == {"moe_z_loss_coeff": 1e-3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.optim.lr=fast", "actor.optim.lr = fast (--set): must be a number > 0"),
        ("actor.optim.lr=.nan", "actor.optim.lr = .nan (--set): must be a number > 0"),
        ("actor.optim.lr=.inf", "actor.optim.lr = .inf (--set): must be a number > 0"),
        ("actor.optim.lr=true", "actor.optim.lr = true (--set): must be a number > 0"),
        ("rollout.n=true", "rollout.n = true (--set): must be a whole number >= 1"),
        ("record.samples=true", "record.samples = true (--set): must be one of all, none or a whole number"),
        ("actor.optim.betas=[true, 0.9]", "actor.optim.betas = [true, 0.9] (--set): must be"),
        ("actor.layout.pipeline_layers=[true, 3]", "actor.layout.pipeline_layers = [true, 3] (--set): must be"),
        ("data.train_weights=[1, true]", "data.train_weights = [1, true] (--set): must be"),
        (
            "reward.bonus_rules={think_format: true}",
            "reward.bonus_rules = {think_format: true} (--set): must be a mapping, each value a number",
        ),
        ("rollout.n=2.5", "rollout.n = 2.5 (--set): must be a whole number >= 1"),
        ("rollout.n=null", "rollout.n = null (--set): must be a whole number >= 1"),
        ("rollout.top_p=2", "rollout.top_p = 2 (--set): must be a number > 0 and <= 1"),
        ("rollout.dtype=int8", "rollout.dtype = int8 (--set): must be null or one of float32, bfloat16"),
        ("cluster.device=tpu", "cluster.device = tpu (--set): must be one of cpu, cuda, npu"),
        ("trainer.deterministic=perhaps", "trainer.deterministic = perhaps (--set): must be true or false"),
        ("trainer.seed=-5", "trainer.seed = -5 (--set): must be a whole number >= 0 and <= 4294967295"),  # of numpy
        ("trainer.seed=4294967296", "trainer.seed = 4294967296 (--set): must be a whole number >= 0 and <= 4294967295"),
        ("trainer.experiment_name=123", "trainer.experiment_name = 123 (--set): must be text; put it in quotes"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas = [0.9] (--set): must be a list of 2, each a number"),
        (
            "actor.optim.betas=[0.9, 0.9, 0.9]",
            "actor.optim.betas = [0.9, 0.9, 0.9] (--set): must be a list of 2, each a number",
        ),
        ("data.train_files=[a, 1]", "data.train_files = [a, 1] (--set): must be a list, each text"),
        ("actor.optim=null", "actor.optim = null (--set): must be a mapping with keys of lr, min_lr"),
        ("rollout.engine_kwargs=[1]", "rollout.engine_kwargs = [1] (--set): must be a mapping"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(small, override, message):
    (found,) = problems(small, override)
    assert found.startswith(message)
    assert "pydantic" not in found and "http" not in found and "input" not in found


# --- all problems at once ---------------------------------------------------------------------------------------------


def test_all_problems_come_at_once_each_with_its_line_and_the_nearest_key(write):
    path = write(
        "bad.yaml",
        """\
        model:
          pth: m
        actor:
          layout:
            world_size: 0
            tensor_parallel: 2
          optim:
            learning: 1
            clip_grad: high
        trainr:
          seed: 1
        rollout:
          lr: 3
        data:
          train_batch_size: 8
        """,
    )
    found = problems(path)
    for line in (
        "model.path (bad.yaml:1): is not set; must be text",
        "model.pth (bad.yaml:2): unknown key; did you mean path?",
        "actor.layout.world_size = 0 (bad.yaml:5): must be a whole number >= 1",
        "actor.optim.clip_grad = high (bad.yaml:9): must be a number >= 0",
        "actor.ppo_mini_batch_size (bad.yaml:3): is not set; must be a whole number >= 1",
        "trainr (bad.yaml:10): unknown key; did you mean trainer?",
        "rollout.lr (bad.yaml:13): unknown key; did you mean actor.optim.lr?",
    ):
        assert line in found
    assert any(f.startswith("actor.layout.tensor_parallel (bad.yaml:6): unknown key; did you mean ") for f in found)
    assert any(f.startswith("actor.optim.learning (bad.yaml:8): unknown key; known: lr, min_lr") for f in found)
    assert len(found) == 9


def test_an_empty_file_says_what_is_needed(write):
    with pytest.raises(ConfigError, match=r"empty\.yaml: is empty; a preset has at least model:, actor: and data:"):
        load_config(write("empty.yaml", "# nothing\n"))
    assert [f.split(":")[0] for f in problems(write("little.yaml", "trainer: {seed: 1}\n"))] == [
        "model",
        "actor",
        "data",
    ]


# --- the resolved configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *available_recipes()])
def test_a_resolved_configuration_loads_to_an_equal_run(tmp_path, recipe):
    overrides = [
        "data.apply_chat_template_kwargs={'1': \"3e4\", text: \"a: 'b' # c\", deep: {x: [1e-6, null, 'no']}}",
        "reward.custom_reward_function={path: r.py, reward_kwargs: {w: 1e-3}}",
        "actor.layout.pipeline_layers=[4]",
    ]
    resolved = load_config(TINY, recipe, overrides)
    (tmp_path / "config.resolved.yaml").write_text(resolved.to_yaml())
    again = load_config(tmp_path / "config.resolved.yaml")
    assert again.config == resolved.config
    assert set(again.origins) == set(resolved.origins)


def test_each_line_of_the_resolved_configuration_names_its_origin(small):
    resolved = load_config(small, recipe="grpo", overrides=["trainer.seed=7"])
    lines = resolved.to_yaml().splitlines()
    assert "# loss: vanilla, seq-mean-token-mean, clip 0.2/0.2, dual clip 10, 2 updates per rollout" in lines
    assert "# recipe: grpo" in lines
    for line in (
        "  path: m  # small.yaml:1",
        "  seed: 7  # --set",
        "  adv_estimator: grpo  # recipe grpo",
        "  n: 8  # default",
    ):
        assert line in lines
    assert all("  # " in line for line in lines if not line.endswith(":") and not line.startswith("#"))


def test_every_leaf_has_an_origin(small):
    resolved = load_config(small)
    leaves = set(schema_keys())
    unset = (
        "reward.custom_reward_function",
        *OTHER_LAYOUTS,
        "algorithm.policy_loss.custom",
        "algorithm.custom_advantage",
        "rollout.turns",
        "rollout.agent",
        "rollout.speculation",
    )
    optional = {key for key in leaves if key.startswith(tuple(f"{name}." for name in unset))}
    assert set(resolved.origins) == leaves - optional | set(unset)


def test_loading_takes_under_a_second_and_no_heavy_import():
    code = (
        "import sys, time; start = time.process_time()\n"
        "from mrl.config.load import load_config; import mrl.config.rules\n"
        f"load_config({str(TINY)!r})\n"
        "assert time.process_time() - start < 1, time.process_time() - start\n"
        "heavy = {'torch', 'ray', 'megatron', 'mbridge', 'vllm', 'transformers'} & "
        "set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_schema_is_frozen(small):
    with pytest.raises(ValidationError, match="frozen"):
        load_config(small).config.rollout.n = 3


def test_verls_names_stand_at_one_key_each():
    stated = [name for field in schema_keys().values() for name in notes_of(field).verl]
    names = verl_names()
    # the actor's layout is stated once and used twice, for the reference too
    assert len(names) == len(set(stated)) and set(names.values()) <= set(schema_keys())
    assert names["actor_rollout_ref.actor.optim.lr"] == "actor.optim.lr"
    assert (
        names["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"]
        == "actor.layout.tensor_model_parallel_size"
    )
