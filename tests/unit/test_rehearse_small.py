"""Every configuration has a rehearsal that breaks no rule, stays small,
and keeps every switch that there is room for.
"""

import itertools
import json
import random
from pathlib import Path

import pytest
from seldom import seldom

from mrl.config.family_rules import NOT_ON_CPU
from mrl.config.load import RECIPES, load_config
from mrl.config.rules import violations
from mrl.config.schema import leaf, schema_keys
from mrl.config.speculation_rules import draft_positions
from mrl.errors import ConfigError
from mrl.model import FAMILIES, ModelSpec, known_models, known_name, model_spec, parameter_count, tensor_specs
from mrl.model.layout import TrainLayout
from mrl.model.registry import known_hf_config, weight_map
from mrl.tools.rehearse.compose import Rehearsal, WorkFolder, compose
from mrl.tools.rehearse.small_batch import GROUP, LONGEST, SAMPLES, shrink_factor
from mrl.tools.rehearse.small_layout import RANKS, WORKERS, small_layout
from mrl.tools.rehearse.small_model import SMALL_FORMS, small_hf_config

FOLDER = Path(__file__).parents[2] / "parallel_configs"
PRESETS = sorted(FOLDER.glob("*/*.yaml"))
EACH = [(path, recipe) for path in PRESETS for recipe in sorted(p.stem for p in RECIPES.glob("*.yaml"))]
IDS = [f"{p.parent.name}/{p.stem}" for p in PRESETS]
DEGREES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
LAYOUT = "actor.layout"


def hf_config_of(path: Path) -> dict:
    """Of a preset's model; the tiny worlds have Qwen3-MoE's architecture, and that of Qwen3-VL where they see."""
    config = load_config(path).config.model
    return known_hf_config(known_name(config.path) or ("Qwen3-VL-2B" if config.vision else "Qwen3-30B-A3B"))


def small_of(path: Path, rehearsal: Rehearsal, positions: int = 512) -> ModelSpec:
    vision = rehearsal.config.model.vision
    return model_spec(
        small_hf_config(hf_config_of(path), rehearsal.layout.layers, 320, positions, vision is not None), vision
    )


def rehearsal_of(path: Path, tmp_path: Path, *overrides: str) -> Rehearsal:
    return compose(load_config(path, overrides=overrides).config, WorkFolder(tmp_path), cpus=2)


def without_engine(model: ModelSpec) -> list[str]:
    """The key that is refused where vLLM's CPU build cannot generate with a model."""
    return ["cluster.device"] * (model.family in NOT_ON_CPU)


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_the_rehearsal_of_a_preset_breaks_no_rule_and_is_read_back_as_it_was_made(path, tmp_path):
    rehearsal = rehearsal_of(path, tmp_path)
    (tmp_path / "rehearsal.yaml").write_text(rehearsal.to_yaml())
    resolved = load_config(tmp_path / "rehearsal.yaml")
    assert resolved.config == rehearsal.config
    data = rehearsal.config.data
    model = small_of(path, rehearsal, data.max_prompt_length + data.max_response_length)
    assert [violation.field for violation in violations(resolved, model)] == without_engine(model)


@pytest.mark.parametrize(
    ("path", "recipe"),
    seldom(EACH, *range(0, len(EACH), 4)),
    ids=[f"{path.parent.name}/{path.stem}-{recipe}" for path, recipe in EACH],
)
def test_every_recipe_can_be_rehearsed_on_every_preset(path, recipe, tmp_path):
    config = load_config(path, recipe).config
    rehearsal = compose(config, WorkFolder(tmp_path), cpus=2)
    assert rehearsal.config.algorithm.policy_loss.loss_mode == config.algorithm.policy_loss.loss_mode
    (tmp_path / "rehearsal.yaml").write_text(rehearsal.to_yaml())
    model = small_of(path, rehearsal)
    broken = [violation.field for violation in violations(load_config(tmp_path / "rehearsal.yaml"), model)]
    lacks = recipe == "ppo" and (model.is_latent or model.is_hybrid or model.attention_sinks)
    assert sorted(broken) == ["algorithm.adv_estimator"] * lacks + without_engine(model)


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_a_rehearsal_is_small_and_every_degree_above_1_stays_so_or_is_named(path, tmp_path):
    original, rehearsal = load_config(path).config, rehearsal_of(path, tmp_path)
    small, named = rehearsal.config, {entry.switch for entry in rehearsal.out_of_reach}
    assert small.actor.layout.world_size <= RANKS
    assert small.rollout.num_engines * small.rollout.workers_per_engine <= WORKERS[original.cluster.placement]
    assert small.data.max_prompt_length + small.data.max_response_length <= LONGEST + 64
    assert small.data.train_batch_size * small.rollout.n <= 2 * SAMPLES
    keys = [f"{LAYOUT}.{name}_parallel_size" for name in DEGREES]
    keys += [
        f"rollout.{name}"
        for name in ("num_engines", "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size")
    ]
    for key in keys:
        was, now = leaf(original, key) or 1, leaf(small, key) or 1
        assert now == 1 if was == 1 else now > 1 or key in named, key
    was, now = (config.actor.layout.data_parallel_size for config in (original, small))
    assert was == 1 or now > 1 or "data parallelism" in named


@pytest.mark.parametrize("path", PRESETS, ids=IDS)
def test_every_other_switch_of_a_preset_stays_as_it_is(path, tmp_path):
    """Each key is the configuration's own, or its change is listed with the reason."""
    original, rehearsal = load_config(path).config, rehearsal_of(path, tmp_path)
    changed = {change.key: change for change in rehearsal.changes}
    for key in schema_keys():
        if any(key == name or key.startswith(f"{name}.") for name in changed):
            continue
        assert leaf(rehearsal.config, key) == leaf(original, key), key
    assert all(change.why for change in changed.values())
    kept = ("cluster.placement", "actor.param_offload", "actor.optimizer_offload", "actor.use_dynamic_bsz",
        "actor.use_remove_padding",
            "actor.router_replay", "algorithm.adv_estimator", "algorithm.filter_groups.enable",
            "algorithm.policy_loss.loss_mode",
            "algorithm.overlong_buffer.enable", "algorithm.use_kl_loss", "model.dtype", "actor.optim.lr",
            "trainer.async_save")  # fmt: skip
    assert not set(kept) & changed.keys()


def test_source_004s_layout_keeps_its_pipeline_its_experts_and_its_engines_of_several_ranks(tmp_path):
    """TP4 x PP4 x EP8 with one engine of TP4 x DP8: only the actor's data parallelism finds no room."""
    rehearsal = rehearsal_of(FOLDER / "qwen3-30b-a3b" / "a2-4x8.yaml", tmp_path)
    layout, engines = rehearsal.config.actor.layout, rehearsal.layout.engines
    assert (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.expert_model_parallel_size,
    ) == (2, 2, 2)
    assert (engines.num_engines, engines.tensor, engines.data) == (1, 2, 2)
    assert [e.switch for e in rehearsal.layout.out_of_reach] == ["data parallelism"]


def test_uneven_stages_stay_uneven(tmp_path):
    """235B has 11 layers in the first and the last stage and 12 in each of the others."""
    rehearsal = rehearsal_of(FOLDER / "qwen3-235b-a22b" / "h200-8x8.yaml", tmp_path)
    layout = rehearsal.config.actor.layout
    assert (
        layout.num_layers_in_first_pipeline_stage,
        layout.num_layers_in_last_pipeline_stage,
        rehearsal.layout.layers,
    ) == (1, 2, 3)


@pytest.mark.parametrize("overrides, cut", [
    (["num_layers_in_first_pipeline_stage=5"], ((1,), (2,))),
    (["num_layers_in_last_pipeline_stage=5"], ((2,), (1,))),
    (["account_for_embedding_in_pipeline_split=true"], ((1,), (2,))),
    (["account_for_loss_in_pipeline_split=true", "account_for_embedding_in_pipeline_split=true"], ((1,), (1,))),
    (["pipeline_layers=[20, 28]"], ((1,), (2,))),
    (["virtual_pipeline_model_parallel_size=4"], ((1, 1), (1, 1))),
])  # fmt: skip
def test_every_notation_of_a_split_has_a_small_form(overrides, cut, tmp_path):
    preset = FOLDER / "qwen3-30b-a3b" / "h100-4x8.yaml"
    settings = [f"{LAYOUT}.{text}" for text in ("pipeline_model_parallel_size=2", *overrides)]
    rehearsal = rehearsal_of(preset, tmp_path, *settings)
    model = small_of(preset, rehearsal)
    assert TrainLayout.build(rehearsal.config.actor.layout.model_dump(), model).chunk_layers == cut


def random_layouts(count: int) -> list[dict[str, int]]:
    """Legal degrees of a mixture of experts, some of each kind."""
    rng, sizes = random.Random(0), (1, 1, 2, 4, 8)
    found = []
    while len(found) < count:
        degrees = {name: rng.choice(sizes) for name in DEGREES}
        dense = degrees["tensor_model"] * degrees["pipeline_model"] * degrees["context"]
        experts = degrees["expert_model"] * degrees["expert_tensor"] * degrees["pipeline_model"]
        world = dense * rng.choice(sizes)
        if world % experts == 0 and world <= 256:
            found.append({f"{name}_parallel_size": size for name, size in degrees.items()} | {"world_size": world})
    return found


@pytest.mark.parametrize(
    "engines, tensor, data, placement", list(itertools.product((1, 4), (1, 4), (1, 4), ("separate", "colocated")))
)
def test_any_legal_layout_becomes_a_legal_small_one(engines, tensor, data, placement):
    """Sixty random layouts against each kind of engine: whole, small, nothing new, and what is lost is named."""
    base = load_config(FOLDER / "qwen3-30b-a3b" / "h100-4x8.yaml").config
    rollout = {
        "num_engines": engines,
        "tensor_model_parallel_size": tensor,
        "data_parallel_size": data,
        "expert_parallel_size": 1,
    }
    base = base.model_copy(update={
        "rollout": base.rollout.model_copy(update=rollout),
        "cluster": base.cluster.model_copy(update={"placement": placement}),
    })  # fmt: skip
    for degrees in random_layouts(60):
        layout = base.actor.layout.model_copy(update=degrees)
        small = small_layout(base.model_copy(update={"actor": base.actor.model_copy(update={"layout": layout})}))
        model = model_spec(small_hf_config(known_hf_config("Qwen3-30B-A3B"), small.layers, 320, 256))
        built = TrainLayout.build(small.actor, model)
        assert built.world_size == small.ranks <= RANKS and small.engines.world_size <= WORKERS[placement]
        named = {entry.switch for entry in small.out_of_reach}
        for name in DEGREES:
            key = f"{name}_parallel_size"
            was, now = degrees[key], small.actor[key] or 1
            assert now == 1 if was == 1 else now > 1 or f"{LAYOUT}.{key}" in named
        assert all(
            s == 1
            for s, was in zip(
                (small.engines.num_engines, small.engines.tensor, small.engines.data),
                (engines, tensor, data),
                strict=True,
            )
            if was == 1
        )


@pytest.mark.parametrize("name", known_models())
def test_a_small_model_is_of_its_family_and_has_its_kinds_of_tensors(name):
    hf_config = known_hf_config(name)
    was = model_spec(hf_config)
    small = model_spec(small_hf_config(hf_config, 4, 320, 256))
    kept = (
        "family",
        "tie_word_embeddings",
        "qkv_bias",
        "qk_norm",
        "norm_topk_prob",
        "router_score",
        "rotation",
    )
    assert [getattr(small, key) for key in kept] == [getattr(was, key) for key in kept]
    for property_of in (
        lambda m: m.is_moe, lambda m: m.shared_expert_intermediate_size > 0,
        lambda m: m.num_key_value_heads < m.num_attention_heads,
        lambda m: len(m.moe_layers) < m.num_layers, lambda m: m.num_experts_per_tok > 1,
    ):  # fmt: skip
        assert property_of(small) == property_of(was)
    assert {_kind(spec.name) for spec in tensor_specs(small)} == _kinds(was)
    assert parameter_count(small) < 10_000_000


def _kinds(model: ModelSpec) -> set[str]:
    """Of the tensors of a large model, whose experts are not listed one by one."""
    weights = weight_map(model)
    every = [weights.embedding, *weights.ends]
    for layer in range(model.num_layers):
        every += weights.layer(layer).hf
    return {part.name.format(layer="N", expert="N") for weight in every for part in weight.parts}


def _kind(name: str) -> str:
    return ".".join("N" if part.isdecimal() else part for part in name.split("."))


def test_every_family_has_a_small_form():
    assert SMALL_FORMS.keys() == {family.model_type for family in FAMILIES.values()}


def test_a_family_without_a_small_form_is_one_message():
    with pytest.raises(ConfigError, match="no small form of model_type 'mamba'; there is one of qwen2"):
        small_hf_config({"model_type": "mamba"}, 2, 320, 256)


def test_dense_and_sparse_layers_both_stay():
    config = known_hf_config("Qwen3-30B-A3B") | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 5]}
    assert model_spec(small_hf_config(config, 4, 320, 256)).moe_layers == (1, 3)


@pytest.mark.parametrize(
    "longest, samples", list(itertools.product((20, 1536, 10240, 22528, 131072), (8, 512, 4096, 16384)))
)
def test_the_factor_is_the_smallest_power_of_two_that_brings_both_down(longest, samples):
    factor = shrink_factor(longest, samples)
    assert factor & (factor - 1) == 0
    assert longest <= LONGEST * factor and samples <= SAMPLES * factor
    assert factor == 1 or longest > LONGEST * factor / 2 or samples > SAMPLES * factor / 2


def test_lengths_batches_and_budgets_shrink_by_one_factor(tmp_path):
    """2,048 + 8,192 tokens, 256 prompts in mini-batches of 64, a budget of one sample: by hand at a factor of 64."""
    rehearsal = rehearsal_of(FOLDER / "qwen3-30b-a3b" / "h100-4x8.yaml", tmp_path)
    data, actor = rehearsal.config.data, rehearsal.config.actor
    assert rehearsal.batch.factor == 64
    assert (data.max_prompt_length, data.max_response_length) == (48, 128)  # 32 is below the least prompt
    assert (data.train_batch_size, actor.ppo_mini_batch_size, rehearsal.config.rollout.n) == (4, 1, 16)
    assert actor.ppo_max_token_len_per_gpu == 176  # 160 would not hold the longest sample
    assert rehearsal.config.reshard.budget_mb == 4


def test_a_large_group_is_cut_and_said(tmp_path):
    rehearsal = rehearsal_of(FOLDER / "qwen3-30b-a3b" / "h100-4x8.yaml", tmp_path, "rollout.n=64")
    (change,) = (c for c in rehearsal.changes if c.key == "rollout.n")
    assert (change.was, change.now, change.why) == (64, GROUP, f"at most {GROUP}")


@pytest.mark.parametrize("n", [1, 3, 5, 16])
@pytest.mark.parametrize("data_parallel", [1, 2, 4])
def test_every_data_parallel_rank_gets_as_many_samples(n, data_parallel, tmp_path):
    from mrl.tools.rehearse.small_batch import small_batch

    config = load_config(FOLDER / "qwen3-8b" / "h100-1x8.yaml", overrides=[f"rollout.n={n}"]).config
    batch = small_batch(config, data_parallel, 2)
    assert batch["actor.ppo_mini_batch_size"] * n % data_parallel == 0
    assert batch["data.train_batch_size"] % batch["actor.ppo_mini_batch_size"] == 0


def test_keys_of_accelerators_are_taken_out_and_named(tmp_path):
    rehearsal = rehearsal_of(
        FOLDER / "qwen3-30b-a3b" / "a2-4x8.yaml", tmp_path, "rollout.engine_kwargs={vllm: "
                                                            "{cudagraph_capture_sizes: [1, 2]}}",
        "model.override_transformer_config.moe_permute_fusion=true",
        "model.override_transformer_config.moe_router_dtype=fp32",
    )  # fmt: skip
    named = {entry.switch for entry in rehearsal.out_of_reach}
    transformer = "model.override_transformer_config"
    assert {f"{transformer}.use_flash_attn", f"{transformer}.moe_permute_fusion", "rollout.gpu_memory_utilization",
            "rollout.enable_chunked_prefill", "rollout.engine_kwargs.vllm.cudagraph_capture_sizes",
            "cluster.nnodes"} <= named  # fmt: skip
    kept = rehearsal.config.model.override_transformer_config
    assert kept == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }
    assert rehearsal.config.rollout.engine_kwargs == {} and rehearsal.config.cluster.device == "cpu"


@pytest.mark.parametrize(
    ("preset", "stays"),
    [("glm-4.6/h200-16x8", True), ("qwen3-next-80b-a3b/h100-4x8", False), ("deepseek-v3/h200-32x8", False)],
)
def test_drafts_are_rehearsed_where_a_cpu_can_draft_and_named_where_it_cannot(preset, stays, tmp_path):
    given = "rollout.speculation={method: mtp, tokens: auto, draft_sample_method: probabilistic}"
    path = FOLDER / f"{preset}.yaml"
    apart = ("rollout.data_parallel_size=1", "rollout.expert_parallel_size=1")
    rehearsal = rehearsal_of(path, tmp_path, given, "actor.mtp.train=true", *apart)
    assert "rollout.speculation" in {entry.switch for entry in rehearsal.out_of_reach}
    assert rehearsal.config.actor.mtp.train == rehearsal.config.rollout.drafts_with_model == stays
    (tmp_path / "rehearsal.yaml").write_text(rehearsal.to_yaml())
    data = rehearsal.config.data
    positions = data.max_sample_length + draft_positions(rehearsal.config.rollout)
    model = small_of(path, rehearsal, positions)
    assert [v.field for v in violations(load_config(tmp_path / "rehearsal.yaml"), model)] == []


def test_a_run_that_begins_from_a_checkpoint_is_rehearsed_from_the_small_model(tmp_path):
    preset = FOLDER / "qwen3-30b-a3b" / "h100-4x8.yaml"
    begun = rehearsal_of(
        preset, tmp_path, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/runs/large/checkpoints/step-9"
    )
    assert (begun.config.trainer.resume_mode, begun.config.trainer.resume_from_path) == ("disable", None)
    assert rehearsal_of(preset, tmp_path, "trainer.resume_mode=auto").config.trainer.resume_mode == "auto"


def test_the_written_configuration_says_what_each_changed_value_was(tmp_path):
    text = rehearsal_of(FOLDER / "qwen3-30b-a3b" / "h100-4x8.yaml", tmp_path).to_yaml()
    assert "world_size: 4  # 32: in small" in text and "max_response_length: 128  # 8192: divided by 64" in text
    assert json.dumps(str(tmp_path / "model"))[1:-1] in text
