"""DeepSeek-V3 and its kin: what their configurations mean, what is refused of them, and where Megatron alone would
compute another model.
"""

import inspect
import json
from math import prod
from types import SimpleNamespace

import pytest
import torch

from mrl.checkpoint.hf_folder import copy_hf_files
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import ConfigError
from mrl.model import known_spec, model_spec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.registry import _KNOWN, FAMILIES, family_of, known_hf_config, load_model_spec
from mrl.model.rotation import Yarn
from mrl.model.vllm_parameters import target_parameters
from mrl.plan.engine_memory import cache_bytes_per_token, worker_weights
from mrl.platforms.replicated_linear import ReplicatedLinear
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import rehearse
from mrl.tools.rehearse.small_model import small_hf_config

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "q_lora_rank": 24,
    "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 16, "max_position_embeddings": 65536, "rope_theta": 1e4,
    "rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CODE = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}


def test_the_published_configuration_is_that_of_transformers_defaults():
    """Its file is typed from the model's public card."""
    from transformers import DeepseekV3Config

    published, defaults = json.loads((_KNOWN / "DeepSeek-V3.json").read_text()), DeepseekV3Config().to_dict()
    own = {
        "architectures",
        "rope_theta",
        "rope_scaling",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
        "torch_dtype",
    }
    of_a_short_model = {"max_position_embeddings", "num_nextn_predict_layers"}
    compared = published.keys() - own - of_a_short_model
    assert {key: published[key] for key in compared} == {key: defaults[key] for key in compared}
    spec = known_spec("DeepSeek-V3")
    assert spec.moe_layers == tuple(range(3, 61)) and spec.left_out_layers == 1
    assert (spec.head_dim, spec.qk_nope_head_dim, spec.value_head_dim) == (192, 128, 128)


def test_kimi_k2_and_files_with_code_beside_them_are_read_as_deepseek_v3():
    kimi = model_spec(CONFIG | {"model_type": "kimi_k2", "auto_map": CODE})
    assert kimi == model_spec(CONFIG) and family_of(kimi) is FAMILIES["DeepseekV3ForCausalLM"]


def test_code_in_official_folders_is_neither_run_nor_copied_and_vllm_reads_the_models_without_it(tmp_path, monkeypatch):
    from transformers import DeepseekV3Config
    from vllm.transformers_utils.config import get_config  # here: seconds, where nobody else has imported it

    # vLLM renames the class to "kimi_k2", and transformers then saves later models of this process with fused experts
    monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
    trap = "from pathlib import Path\nPath(__file__).with_name('RUN').write_text('')\n"
    specs, read = [], []
    for name in ("DeepSeek-V3", "Moonlight-16B-A3B", "Kimi-K2-Instruct"):
        folder, copy = tmp_path / name, tmp_path / f"copy of {name}"
        folder.mkdir()
        copy.mkdir()
        (folder / "config.json").write_text(json.dumps(known_hf_config(name) | {"auto_map": CODE}))
        (folder / "configuration_deepseek.py").write_text(trap)
        specs.append(load_model_spec(folder))
        assert specs[-1] == known_spec(name)
        keys = family_of(specs[-1]).engine_keys(specs[-1])
        found = get_config(str(folder), trust_remote_code=False, hf_overrides_kw=keys)
        read.append([found.kv_lora_rank, found.topk_method, found.n_group])
        copy_hf_files(folder, copy)
        assert [file.name for file in copy.iterdir()] == ["config.json"]
    assert read == [[512, "noaux_tc", spec.expert_groups] for spec in specs]
    assert not list(tmp_path.rglob("RUN"))


def test_a_choice_from_one_group_must_say_so_since_engines_take_four():
    alone = {key: value for key, value in CONFIG.items() if key != "topk_group"} | {"n_group": 1}
    assert model_spec(alone | {"topk_group": 1}).chosen_expert_groups == 1
    with pytest.raises(ConfigError, match="topk_group"):
        model_spec(alone)


def test_old_and_new_places_of_yarn_mean_the_same():
    old = model_spec(CONFIG | {"rope_scaling": YARN})
    in_new = {key: value for key, value in YARN.items() if key != "type"} | {"rope_type": "yarn", "rope_theta": 1e4}
    new = model_spec({k: v for k, v in CONFIG.items() if k != "rope_theta"} | {"rope_parameters": in_new})
    assert old == new and old.rotation.stretch == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, r"DeepseekV32ForCausalLM.*attends through a sparse indexer"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, r"GlmMoeDsaForCausalLM.*attends through a sparse indexer"),
        ({"architectures": ["DeepseekV32ForCausalLM"], "auto_map": CODE}, "sparse indexer"),
        ({"index_topk": 2048}, "index_topk"),
        ({"architectures": ["KimiVLForConditionalGeneration"], "auto_map": CODE}, "KimiVLForConditionalGeneration"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy'"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"topk_group": 1}, "topk_group = 1"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace = 3"),
        ({"n_shared_experts": None}, "n_shared_experts = None"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = 'linear'"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale, mscale_all_dim"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size"),
        ({"kv_lora_rank": None}, "has no kv_lora_rank"),
        # transformers and engines would take defaults of their own
        ({"routed_scaling_factor": None}, "routed_scaling_factor = null: must be a number"),
        ({"n_group": None}, "has no n_group"),
        ({"topk_group": None}, "has no topk_group"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank = '512'"),
        ({"q_lora_rank": 0.5}, "q_lora_rank = 0.5"),
        ({"v_head_dim": "16"}, "v_head_dim = '16'"),
        ({"qk_rope_head_dim": "64"}, "qk_rope_head_dim = '64'"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim = 0"),
        ({"n_group": "4"}, "n_group = '4'"),
        ({"rope_scaling": YARN | {"factor": "40"}}, "factor = '40'"),
        ({"rope_scaling": YARN | {"mscale": [1]}}, r"mscale = \[1\]"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": "4096"}}, "embeddings = '4096'"),
        ({"n_group": 0}, "n_group = 0"),
        ({"topk_group": 0}, "topk_group = 0"),
        # transformers makes none of them, or chooses experts of groups that were not chosen
        ({"n_group": 3}, "n_group = 3"),
        ({"n_group": 8}, "n_group = 8"),
        ({"num_experts_per_tok": 5}, "n_group = 4"),
        ({"n_group": 2, "topk_group": 4, "num_experts_per_tok": 8}, "topk_group = 4"),
        ({"topk_group": [2]}, r"topk_group = \[2\]"),
        ({"mlp_layer_types": 3}, "mlp_layer_types = 3"),
        ({"quantization_config": "fp8"}, "quantization_config = fp8"),
        ({"quantization_config": FP8 | {"weight_block_size": [128]}}, r"weight_block_size = \[128\]"),
        ({"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, r"weight_block_size = \[128, 0\]"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words):
        model_spec(CONFIG | change)


def refused(model, *overrides: str) -> dict[str, str]:
    """Field -> rule of what breaks for this model alone."""
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", overrides=overrides)
    plain = {v.field for v in violations(config, model_spec(CONFIG_OF_QWEN))}
    return {v.field: v.rule for v in violations(config, model) if v.field not in plain}


CONFIG_OF_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "max_position_embeddings": 65536, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
}  # fmt: skip
NO_PREFIXES = "rollout.enable_prefix_caching=false"


def test_what_latent_attention_cannot_do_on_a_device_is_told_before_a_run():
    model = model_spec(CONFIG)
    assert refused(model, NO_PREFIXES) == {}
    assert list(refused(model)) == ["rollout.enable_prefix_caching"]
    assert refused(model_spec(CONFIG | {"quantization_config": FP8}), NO_PREFIXES) == {}
    assert "512 and 64" in refused(model_spec(CONFIG | {"kv_lora_rank": 256}), NO_PREFIXES)["model.path"]
    overrides = 'rollout.engine_kwargs.vllm={"hf_overrides": {"n_group": 1}, "attention_backend": "AMX_MLA"}'
    vllm = "rollout.engine_kwargs.vllm."
    assert refused(model, NO_PREFIXES, overrides).keys() == {f"{vllm}hf_overrides", f"{vllm}attention_backend"}


def test_presets_of_other_devices_say_what_they_cannot_do():
    model = known_spec("Moonlight-16B-A3B")

    def fields(*overrides: str) -> set[str]:
        resolved = load_config("parallel_configs/moonlight-16b-a3b/h100-1x8.yaml", overrides=overrides)
        return {violation.field for violation in violations(resolved, model)}

    assert fields() == set()
    degrees = ("tensor_model_parallel_size=2", "data_parallel_size=2", "expert_parallel_size=4", "num_engines=2")
    both = [f"rollout.{degree}" for degree in degrees]
    assert "rollout.data_parallel_size" in fields(*both)  # vLLM's shared experts are whole on every worker then
    assert "actor.layout.context_parallel_size" in fields("actor.layout.context_parallel_size=2")
    assert "cluster.device" in fields("cluster.device=npu")
    fused = "model.override_transformer_config.apply_rope_fusion"
    assert fused in fields(f"{fused}=true")  # it has no yarn
    assert "cluster.versions" in fields('cluster.versions={"vllm": "0.23.0"}')


def test_vllm_has_both_down_projections_in_one_parameter_and_megatron_in_two():
    model = model_spec(CONFIG)
    for worker in range(2):
        held = {t.name: t for t in target_parameters(model, RolloutLayout(1, 2), worker, "cpu", "float32")}
        fused = held["model.layers.1.self_attn.fused_qkv_a_proj.weight"]
        assert fused.local_shape == (24 + 512 + 64, 64)
        assert [(p.hf_name.split(".")[-2], p.local_box.ranges[0]) for p in fused.pieces] == [
            ("q_a_proj", (0, 24)), ("kv_a_proj_with_mqa", (24, 600)),
        ]  # fmt: skip
        assert "model.layers.1.self_attn.kv_a_proj_with_mqa.weight" not in held


@pytest.mark.parametrize("queries", [24, None])
def test_a_plan_brings_every_element_to_its_place_in_the_joined_parameter(queries):
    model = model_spec(CONFIG | {"q_lora_rank": queries})
    degrees = {"world_size": 8, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}
    train = TrainLayout.build(degrees, model)
    plan = plan_reshard(model, train, RolloutLayout(2, 2, 1, 2), dialect="cuda", dtype="bfloat16")
    rehearsal = rehearse(plan)
    assert rehearsal.fault is None and rehearsal.elements > 0


def test_engines_are_told_what_transformers_does_not_write():
    """Without the method vLLM has no constants of routers, without the function a softmax."""
    keys = family_of(model_spec(CONFIG)).engine_keys(model_spec(CONFIG))
    assert keys == {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1, "moe_layer_freq": 1,
    }  # fmt: skip


def test_a_token_of_the_cache_is_its_latent_and_copies_for_decoding_count():
    model = known_spec("DeepSeek-V3")
    assert cache_bytes_per_token(model, 8, 2) == 61 * (512 + 64) * 2
    plain = sum(t.numel for t in _numbers_of(model, RolloutLayout(1, 8)))
    assert worker_weights(model, RolloutLayout(1, 8)) - plain == 61 * 16 * (128 + 128) * 512


def _numbers_of(model, layout):
    held = target_parameters(model, layout, 0, "cuda", "bfloat16")
    return [SimpleNamespace(numel=prod(target.local_shape)) for target in held]


def test_the_small_form_keeps_what_makes_the_family():
    small = model_spec(small_hf_config(json.loads((_KNOWN / "DeepSeek-V3.json").read_text()), 4, 64, 128))
    assert (small.kv_lora_rank, small.qk_rope_head_dim) == (512, 64)  # vLLM's CPU kernel has no other
    assert (small.expert_groups, small.chosen_expert_groups, small.num_experts_per_tok) == (4, 1, 2)
    assert small.rotation == known_spec("DeepSeek-V3").rotation and small.q_lora_rank and small.moe_layers == (1, 2, 3)


def test_the_small_form_of_what_transformers_saves_has_dense_layers_first():
    """Its own configurations of GLM-4.7-Flash list kinds of layers, and count no dense ones."""
    known = known_hf_config("Moonlight-16B-A3B") | {"architectures": ["Glm4MoeLiteForCausalLM"]}
    listed = {key: value for key, value in known.items() if key != "first_k_dense_replace"} | {
        "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25,
    }  # fmt: skip
    assert model_spec(listed).moe_layers == tuple(range(2, 27))
    assert model_spec(small_hf_config(listed, 4, 64, 128)).moe_layers == (1, 2, 3)


# ---------------------------------------------------------------- traps: each differs without its cure


def _hugging_face_routes(logits: torch.Tensor, constants: torch.Tensor, model) -> torch.Tensor:
    """Weights of all experts [tokens, experts], as transformers' router has them; written from its definition."""
    scores = logits.sigmoid()
    choice = scores + constants
    groups = choice.unflatten(-1, (model.expert_groups, -1)).topk(2, -1)[0].sum(-1)
    best = torch.zeros_like(groups).scatter(-1, groups.topk(model.chosen_expert_groups, -1)[1], 1.0).bool()
    allowed = best.repeat_interleave(model.num_experts // model.expert_groups, -1)
    chosen = choice.masked_fill(~allowed, -torch.inf).topk(model.num_experts_per_tok, -1)[1]
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    return weights / weights.sum(-1, keepdim=True) * model.routed_scaling_factor


def test_megatron_routes_as_the_checkpoint_only_with_its_groups():
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from mrl.rank.mapped_bridge import _experts

    model = model_spec(CONFIG | {"routed_scaling_factor": 2.5})
    told, random = _experts(model), torch.Generator().manual_seed(0)
    logits, constants = torch.randn(256, 8, generator=random), 0.3 * torch.randn(8, generator=random)

    def routed(groups, chosen):
        probabilities, _ = topk_routing_with_score_function(
            logits, told["moe_router_topk"], num_groups=groups, group_topk=chosen,
            scaling_factor=told["moe_router_topk_scaling_factor"], score_function=told["moe_router_score_function"],
            expert_bias=constants,
        )  # fmt: skip
        return probabilities

    expected = _hugging_face_routes(logits, constants, model)
    torch.testing.assert_close(routed(told["moe_router_num_groups"], told["moe_router_group_topk"]), expected)
    assert (routed(None, None) - expected).abs().max() > 0.1


def test_megatron_rotates_pairs_of_neighbours_only_where_it_knows_of_latent_attention():
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 8, generator=random)
    angles = torch.outer(torch.arange(6.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)
    of_q, of_k = apply_rotary_pos_emb_interleave(q, k, angles.cos()[None], angles.sin()[None])

    def scores(latent: bool) -> torch.Tensor:
        turned = [
            _apply_rotary_pos_emb_bshd(x.permute(2, 0, 1, 3), angles[:, None, None], multi_latent_attention=latent)
            for x in (q, k)
        ]
        return torch.einsum("sbhd,tbhd->st", *turned)

    expected = (of_q @ of_k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores(True), expected)
    assert (scores(False) - expected).abs().max() > 0.1


def test_a_replicated_projection_asks_for_the_sum_over_tensor_ranks():
    """Each rank has its own tokens: without the mark its gradient would be of those alone, and the loss right."""
    config = SimpleNamespace(params_dtype=torch.float32, perform_initialization=False, sequence_parallel=True)
    made = ReplicatedLinear(8, 4, parallel_mode="duplicated", config=config, init_method=None, bias=False)
    assert made.weight.sequence_parallel is True and made(torch.zeros(3, 8))[0].shape == (3, 4)
    with pytest.raises(ValueError, match="replicated"):
        ReplicatedLinear(8, 4, parallel_mode="column", config=config, init_method=None, bias=False)


def test_a_replicated_projection_counts_once_in_the_norm_whatever_transformer_engine_marks():
    """Its linear layers mark every weight as cut by rows, also one that each tensor rank has whole."""
    from megatron.core.tensor_parallel.layers import (
        param_is_not_tensor_parallel_duplicate,
        set_tensor_model_parallel_attributes,
    )

    from mrl.config.schema import ActorConfig, ModelConfig
    from mrl.rank.bridge import MBridge

    whole, cut = ("linear_q_down_proj", "linear_kv_down_proj"), ("linear_q_up_proj", "linear_proj")
    chunk = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in (*whole, *cut)})
    for parameter in chunk.parameters():
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    bridge, called = MBridge.__new__(MBridge), {}
    bridge._bridge = SimpleNamespace(get_model=lambda **given: called.update(given) or [])
    bridge.model_config = ModelConfig(path="model")
    bridge.actor_config = ActorConfig(layout={"world_size": 2}, ppo_mini_batch_size=1)
    bridge.dtype, bridge.has_value_head = torch.bfloat16, False
    bridge.model = SimpleNamespace(pad_token_id=None, is_latent=True, trained_tower=None)
    bridge.build_model(is_trained=False)
    for callback in called["post_model_creation_callbacks"]:
        callback(chunk)
    second = SimpleNamespace(rank=lambda: 1)  # of two tensor ranks
    counted = {name: param_is_not_tensor_parallel_duplicate(chunk[name].weight, second) for name in chunk}
    assert counted == dict.fromkeys(whole, False) | dict.fromkeys(cut, True)


def test_mbridges_own_bridge_is_refused_for_reasons_that_still_hold():
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    names = MLATransformerConfig.__dataclass_fields__
    assert "max_position_embeddings" not in names and "original_max_position_embeddings" in names
    built = inspect.getsource(DeepseekV3Bridge._build_config)
    assert "max_position_embeddings=" in built and "moe_router_num_groups" not in built


def test_a_prompt_of_one_token_is_never_taken_for_decoding():
    """vLLM takes it so where decodes stand before it, and the two ways have other bits."""
    from mrl.engine.cpu_latent import prompts_as_prompts

    told = []
    split = prompts_as_prompts(lambda batch, **named: told.append((batch, named)) or (0, 1, 0, 1))
    assert split("a batch", decode_threshold=1, treat_short_extends_as_decodes=True) == (0, 1, 0, 1)
    assert told == [("a batch", {"decode_threshold": 1, "treat_short_extends_as_decodes": False})]


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 40])
def test_of_few_rows_cpu_engines_compute_what_they_compute_of_many(rows, heads):
    """MKL alone takes another way for one to three rows: what a token becomes would depend on the others."""
    from mrl.engine.cpu_latent import bmm_of_many_rows, linear_of_many_rows

    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(heads, 48, 512, generator=random), torch.randn(heads, 512, 32, generator=random)
    bmm = bmm_of_many_rows(torch.bmm)
    whole = bmm(x, weight)
    parts = [bmm(x[:, at : at + rows], weight) for at in range(0, 48 - rows + 1, rows)]
    assert torch.equal(torch.cat(parts, 1), whole[:, : len(parts) * rows])
    out = torch.empty(rows, heads, 32)
    assert torch.equal(bmm(x[:, :rows], weight, out=out.transpose(0, 1)), whole[:, :rows])
    assert torch.equal(out.transpose(0, 1), whole[:, :rows])
    linear = linear_of_many_rows(x[0], weight[0].t())
    assert torch.equal(linear_of_many_rows(x[0, :rows], weight[0].t()), linear[:rows])
