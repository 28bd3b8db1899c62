"""Keys that reach upstream classes: real fields only, and none that a key of ours decides."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mrl.config import override_rules
from mrl.config.load import load_config
from mrl.config.override_fields import Effect
from mrl.config.override_rules import override_faults, upstream_class
from mrl.config.schema import RunConfig, leaf
from mrl.config.upstream_fields import UPSTREAM_FIELDS
from mrl.platforms import PLATFORMS
from mrl.platforms.versions import row_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
OURS = {
    name: {field: known.why for field, known in fields.items() if known.effect is Effect.OURS}
    for _, name, fields in override_rules._TARGETS
}


def broken(*overrides: str):
    config = load_config(TINY, overrides=list(overrides)).config
    return [violation for rule in override_rules.OVERRIDE_RULES for violation in rule(config, None)]


@pytest.mark.parametrize(
    "override",
    [
        "model.override_transformer_config={recompute_granularity: full, recompute_method: uniform, "
        "recompute_num_layers: 1}",
        "actor.optim.override_optimizer_config={optimizer_cpu_offload: true}",
        "actor.override_ddp_config={overlap_grad_reduce: false, bucket_size: 40000000}",
        "rollout.engine_kwargs={vllm: {block_size: 32, enable_log_requests: false}}",
    ],
)
def test_real_fields_pass(override):
    assert broken(override) == []


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("model.override_transformer_config={recompute_granularty: full}", "did you mean recompute_granularity?"),
        ("actor.optim.override_optimizer_config={optimiser_cpu_offload: true}", "did you mean optimizer_cpu_offload?"),
        ("actor.override_ddp_config={overlap_grad_reduction: true}", "did you mean overlap_grad_reduce?"),
        ("rollout.engine_kwargs={vllm: {enable_chunked_prefil: true}}", "did you mean enable_chunked_prefill?"),
        ("rollout.engine_kwargs={vllm: {zzzzzz: true}}", "no name is close"),
    ],
)
def test_a_typo_is_refused_with_the_nearest_field_and_the_version(override, suggestion):
    (found,) = broken(override)
    assert suggestion in found.rule
    assert "megatron-core 0.16.1" in found.rule or "vllm 0.32.0" in found.rule


def test_arguments_of_an_engine_are_those_of_the_vllm_in_the_devices_row():
    """npu has 0.23, where what 0.32 alone has would only be found when an engine starts, and has others besides."""
    key = "rollout.engine_kwargs.vllm"
    new, old = {"max_num_scheduled_tokens": 1}, {"max_num_partial_prefills": 1}
    (refused,) = override_faults(key, new, "npu")
    assert "vllm 0.23.0" in refused.rule and override_faults(key, old, "npu") == []
    (refused,) = override_faults(key, old, "cuda")
    assert "vllm 0.32.0" in refused.rule and override_faults(key, new, "cuda") == []
    assert override_faults(key, new | old, None) == []
    for device, row in (("npu", row_of("npu")), ("cuda", row_of("cuda"))):
        assert upstream_class("AsyncEngineArgs", device).version == row.packages["vllm"]


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        (
            "model.override_transformer_config={tensor_model_parallel_size: 2}",
            "actor.layout.tensor_model_parallel_size",
        ),
        ("model.override_transformer_config={num_layers: 2}", "model.path"),
        ("actor.optim.override_optimizer_config={lr: 1}", "actor.optim.lr"),
        ("actor.override_ddp_config={use_distributed_optimizer: false}", "mrl itself"),
        ("rollout.engine_kwargs={vllm: {tensor_parallel_size: 2}}", "rollout.tensor_model_parallel_size"),
        ("rollout.engine_kwargs={vllm: {model: x}}", "model.path"),
        ("rollout.engine_kwargs={vllm: {trust_remote_code: true}}", "mrl itself"),
    ],
)
def test_a_field_that_is_ours_is_refused_with_our_key(override, ours):
    (found,) = broken(override)
    assert ours in found.rule


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("actor.override_ddp_config={align_param_gather: true}", "pipeline schedule would have to start"),
        ("actor.override_ddp_config={num_distributed_optimizer_instances: 2}", "plain distributed optimizer"),
        ("actor.override_ddp_config={use_megatron_fsdp: true}", "plain distributed optimizer"),
        ("actor.override_ddp_config={use_custom_fsdp: true}", "plain distributed optimizer"),
        ("actor.override_ddp_config={data_parallel_sharding_strategy: optim}", "plain distributed optimizer"),
        ("actor.override_ddp_config={delay_wgrad_compute: true}", "delayed weight gradients"),
        ("model.override_transformer_config={calculate_per_token_loss: true}", "divided by the data-parallel size"),
        ("model.override_transformer_config={delay_wgrad_compute: true}", "delayed weight gradients"),
        ("model.override_transformer_config={overlap_moe_expert_parallel_comm: true}", "a plan of its layers"),
        ("actor.optim.override_optimizer_config={overlap_param_gather: true}", "a key of the same name"),
        ("actor.optim.override_optimizer_config={overlap_param_gather_with_optimizer_step: true}", "not finite"),
        ("actor.optim.override_optimizer_config={loss_scale: 1024}", "never multiplied"),
    ],
)
def test_a_value_under_which_the_actor_would_compute_something_else_is_refused_with_the_reason(override, why):
    (found,) = broken(override)
    assert why in found.why
    assert found.rule.startswith("must be ") and len(found.allowed) == 1


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("actor.override_ddp_config={overlap_grad_reduce: 'False'}", False),
        ("model.override_transformer_config={moe_aux_loss_coeff: '1e-3'}", 1e-3),
        ("model.override_transformer_config={recompute_modules: '[moe]'}", ["moe"]),
        ("model.override_transformer_config={moe_grouped_gemm: 'true'}", True),
        ("actor.optim.override_optimizer_config={optimizer_offload_fraction: '1'}", 1),
        ("rollout.engine_kwargs={vllm: {disable_log_stats: 'False'}}", False),  # a plain dataclass in 0.32
    ],
)
def test_what_is_no_text_is_refused_in_quotes(override, allowed):
    """To Megatron, whose dataclasses convert nothing, the text False is true. Most of vLLM's convert (pydantic)."""
    (found,) = broken(override)
    assert found.rule == "must be written without quotes" and found.allowed == (allowed,)


@pytest.mark.parametrize("name", ["speculative_config", "spec_method", "spec_model", "spec_tokens"])
@pytest.mark.parametrize("value", ["ngram", "{}", "{method: mtp, num_speculative_tokens: 2}", "2"])
def test_drafts_past_their_own_key_are_refused_by_name(name, value):
    (found,) = broken(f"rollout.engine_kwargs={{vllm: {{{name}: {value}}}}}")
    assert found.field == f"rollout.engine_kwargs.vllm.{name}" and "rollout.speculation" in f"{found.rule} {found.why}"


def test_scales_that_no_sync_renews_are_refused_by_name():
    """vLLM 0.23, which vllm-ascend needs, still has the argument; vLLM 0.32 does not."""
    npu = "cluster.device=npu"
    usual = broken(npu)
    found = broken(npu, "rollout.engine_kwargs={vllm: {calculate_kv_scales: true}}")
    (fault,) = [each for each in found if each not in usual]
    assert fault.field == "rollout.engine_kwargs.vllm.calculate_kv_scales" and "no sync renews" in fault.why
    assert fault.allowed == (False,)
    assert broken(npu, "rollout.engine_kwargs={vllm: {calculate_kv_scales: false}}") == usual


def test_weights_are_gathered_early_only_where_gradients_are_reduced_early():
    assert broken("actor.override_ddp_config={overlap_grad_reduce: true, overlap_param_gather: true}") == []
    (found,) = broken("actor.override_ddp_config={overlap_param_gather: true}")
    assert found.field.endswith("overlap_param_gather") and "overlap_grad_reduce: true" in found.rule


def test_arguments_of_another_engine_are_not_silently_ignored():
    (found,) = broken("rollout.engine_kwargs={sglang: {x: 1}}")
    assert (found.field, found.allowed) == ("rollout.engine_kwargs.sglang", ("vllm",))


@pytest.mark.parametrize("name", OURS)
def test_every_field_that_is_ours_exists_upstream_and_every_key_named_for_it_exists_here(name):
    theirs = {device: upstream_class(name, device).fields for device in PLATFORMS} if name in UPSTREAM_FIELDS else {}
    assert all(set(OURS[name]) <= names for names in theirs.values())
    config: RunConfig = load_config(TINY).config
    keys = {key for text in OURS[name].values() for key in text.split(" + ") if " " not in key}
    for key in keys:
        section, _, field = key.rpartition(".")
        assert field in type(leaf(config, section)).model_fields, key


def test_the_tables_are_those_of_the_installed_packages():
    script = ROOT / "scripts" / "generate_upstream_fields.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_reading_the_source_finds_what_importing_it_would():
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert names == UPSTREAM_FIELDS["AsyncEngineArgs"].fields
