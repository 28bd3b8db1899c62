"""Rules of speculative decoding (rollout.speculation): what it needs of model, device and the other features."""

import os.path
from collections.abc import Callable, Iterator
from pathlib import Path

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RolloutConfig, RunConfig
from mrl.config.schema_rollout import AUTO, MTP, NGRAM, SpeculationConfig
from mrl.errors import Violation
from mrl.model import ModelSpec, read_hf_config
from mrl.model.eagle_head import head_faults, head_positions
from mrl.model.registry import family_of
from mrl.platforms.hosting import get_hosting

_KEY = "rollout.speculation"
_METHODS = (NGRAM, MTP)
_LOOKUP = SpeculationConfig.model_fields["lookup"].default
_FITS = "must be ngram, mtp or the folder of an EAGLE-3 head that fits the model"
TRIED_WITH_HEADS = ("qwen3_moe",)
# Families whose drafting model took weights by a sync, held them, and drafted what transformers' layers say of them.
# DeepSeek's does not draft on CPUs. Drafters of accelerators give Qwen3.5's layer positions in one row
# (vllm/v1/worker/gpu/spec_decode), as cpu_drafts.py has it do on CPUs.
TRIED = ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def _where_drafted(
    field: str,
    broken: Callable[[RunConfig, ModelSpec], bool],
    rule: str,
    why: str,
    allowed: tuple = (None,),
) -> RuleRow:
    """Builds a row that is judged only where the run speculates."""
    return RuleRow(field, lambda c, m: c.rollout.speculation is not None and broken(c, m), rule, why, allowed)


def _method(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    speculation = config.rollout.speculation
    if speculation is None or speculation.head is None:
        return
    if model.family not in TRIED_WITH_HEADS:
        yield Violation(f"{_KEY}.method", _FITS, f"heads for {model.family} were never tried", _METHODS)
    elif not os.path.dirname(speculation.method) and not os.path.isdir(speculation.method):
        yield Violation(f"{_KEY}.method", _FITS, "it is no folder here", _METHODS)


def _head(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks a head's files, where its folder is on this host."""
    speculation = config.rollout.speculation
    is_tried = speculation is not None and speculation.head is not None and model.family in TRIED_WITH_HEADS
    if not is_tried or not speculation.head.is_dir():
        return
    faults = list(head_faults(speculation.head, model))
    if not faults and config.cluster.device == "cpu":
        needed = config.data.max_sample_length + draft_positions(config.rollout)
        if (positions := head_positions(speculation.head) or needed) < needed:
            faults = [
                f"its max_position_embeddings is {positions}, and samples with their drafts have {needed}: where one "
                "is longer, vLLM on CPUs drafts for none of a step, so bits would depend on the other responses"
            ]
    for why in faults:
        yield Violation(f"{_KEY}.method", _FITS, why, _METHODS)


def _layers(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks that the model has predicting layers that were tried, for so many tokens."""
    speculation = config.rollout.speculation
    if speculation is None or speculation.method != MTP:
        return
    key = f"{_KEY}.method"
    layers = model.left_out_layers
    if not layers:
        yield Violation(key, "must be ngram", "the model has no layers for multi-token prediction", ("ngram",))
    elif model.family not in TRIED:
        why = "drafts by layers of other families were never compared with the model's distribution"
        yield Violation(key, f"must be ngram for {model.family}", why, ("ngram",))
    elif missing := _missing_keys(config.model.path, model):
        why = (
            "the class that drafts gets no keys but those of config.json, and would compute another model without them"
        )
        rule = f"must be ngram, or config.json must have {', '.join(missing)}, as the official one has"
        yield Violation(key, rule, why, ("ngram",))
    elif layers > 1:
        why = (
            "weight syncs bring one layer, and vLLM's model runner on CPUs asks the first one for every token "
            "(v1/spec_decode/llm_base_proposer.py passes no spec_step_idx)"
        )
        yield Violation(key, f"must be ngram for {layers} layers for multi-token prediction", why, ("ngram",))


def _missing_keys(path: str, model: ModelSpec) -> list[str]:
    """Returns keys that engines are given for the model itself, and that config.json lacks; none without the file."""
    if not (Path(path) / "config.json").is_file():
        return []
    stored = read_hf_config(path)
    return [name for name in family_of(model).engine_keys(model) if name not in stored]


def _uses_layers(config: RunConfig, model: ModelSpec) -> bool:
    """Tells whether layers that were tried draft."""
    speculation = config.rollout.speculation
    is_tried = bool(model.left_out_layers) and model.family in TRIED
    return speculation is not None and speculation.method == MTP and is_tried


def _uses_a_model(config: RunConfig, model: ModelSpec) -> bool:
    """Tells whether layers or a head that were tried draft."""
    speculation = config.rollout.speculation
    has_head = speculation is not None and speculation.head is not None
    return _uses_layers(config, model) or (has_head and model.family in TRIED_WITH_HEADS)


def draft_positions(rollout: RolloutConfig) -> int:
    """Returns the positions behind the longest sample that an engine needs: of tokens that are checked, and of those
    drafted meanwhile.

    vLLM drafts for no sequence of a step in which one lacks them. Tokens would then depend on the other sequences.
    """
    if rollout.speculation is None:
        return 0
    return 2 * rollout.speculation.most + 1


def _fills_steps(config: RunConfig, _: ModelSpec) -> bool:
    rollout = config.rollout
    hosting = get_hosting(config.cluster.device)
    given = hosting.engine_arguments(config.data.max_sample_length, rollout.max_num_batched_tokens)
    drafted = rollout.max_num_seqs * (rollout.speculation.most + 1)
    return hosting.checks_batch_order and drafted > given["max_num_batched_tokens"]


def _chooses_by_batch(config: RunConfig, _: ModelSpec) -> bool:
    """Tells whether engines with data-parallel ranks would draft in small batches alone. On CPUs other rules say so."""
    speculation = config.rollout.speculation
    by_batch = speculation.tokens == AUTO or speculation.max_num_seqs is not None
    return by_batch and config.rollout.data_parallel_size > 1 and config.cluster.device != "cpu"


def speculation_notes(config: RunConfig) -> Iterator[str]:
    """Yields a note where speculation was never tried."""
    if config.rollout.speculation is not None and config.cluster.device == "cuda":
        yield (
            f"{_KEY}: on cuda vLLM has another sampler for drafted tokens than on cpu, where it was compared with "
            "the model's distribution; the engines' start compares log-probs, and no run on cuda was seen"
        )


SPECULATION_RULES = (
    _method,
    _layers,
    _where_drafted(
        f"{_KEY}.tokens",
        lambda c, m: c.rollout.speculation.tokens == AUTO and c.rollout.speculation.method != MTP,
        "must be a number with another method than mtp",
        "auto needs a predicted acceptance, which look-ups and heads lack",
        (2, 3, 4),
    ),
    _where_drafted(
        f"{_KEY}.tokens",
        lambda c, m: c.cluster.device == "cpu" and c.rollout.speculation.tokens == AUTO,
        "must be a number on cpu",
        "whether a response is drafted would depend on the number of others, and so would its bits",
        (2, 3, 4),
    ),
    _where_drafted(
        f"{_KEY}.max_num_seqs",
        lambda c, m: c.cluster.device == "cpu" and c.rollout.speculation.max_num_seqs is not None,
        "must be left out on cpu",
        "whether a response is drafted would depend on the number of others, and so would its bits",
    ),
    RuleRow(
        f"{_KEY}.method",
        lambda c, m: _uses_a_model(c, m) and c.cluster.device == "cpu" and c.rollout_dtype != "float32",
        "must be ngram on cpu in 16 bits",
        "bits of drafts, and so of tokens, would depend on the other responses of a step",
        ("ngram",),
    ),
    _where_drafted(
        f"{_KEY}.method",
        lambda c, m: c.rollout.speculation.head is not None and c.rollout.fp8_block > 0,
        "must be ngram or mtp with rollout.quantization",
        "heads beside a model in FP8 were never tried",
        _METHODS,
    ),
    _where_drafted(
        f"{_KEY}.method",
        lambda c, m: c.rollout.speculation.head is not None and c.cluster.placement == "colocated",
        "must be ngram or mtp with cluster.placement: colocated",
        "a sleeping engine forgets its weights, and no weight sync brings those of a head",
        _METHODS,
    ),
    RuleRow(
        "reshard.path",
        lambda c, m: _uses_layers(c, m) and c.reshard.path == "slow",
        "must be fast with rollout.speculation.method mtp",
        "full tensors go through the loader of the model alone, so drafts would be stale",
        ("fast",),
    ),
    RuleRow(
        "actor.mtp.train",
        lambda c, m: c.actor.mtp.train and c.actor.lora.rank > 0,
        "must be false with actor.lora.rank above 0",
        "a checkpoint of adapters has no place for a layer that is trained whole",
        (False,),
    ),
    _where_drafted(
        f"{_KEY}.draft_sample_method",
        lambda c, m: c.rollout.speculation.method == NGRAM and c.rollout.speculation.draft_sample_method != "greedy",
        "must be greedy with method ngram",
        "a look-up finds tokens, and no distribution to sample them from",
        ("greedy",),
    ),
    _where_drafted(
        f"{_KEY}.draft_sample_method",
        lambda c, m: (
            c.rollout.speculation.draft_sample_method != "greedy"
            and (c.cluster.device == "cpu" or c.trainer.deterministic)
        ),
        "must be greedy on cpu, and with trainer.deterministic",
        "vLLM samples drafts without the requests' seeds, so responses would not repeat",
        ("greedy",),
    ),
    RuleRow(
        "actor.mtp.train",
        lambda c, m: c.actor.mtp.train and not c.rollout.drafts_with_model,
        "must be false without rollout.speculation.method: mtp",
        "ranks hold the predicting layer only where engines draft with it",
        (False,),
    ),
    _where_drafted(
        f"{_KEY}.tokens",
        lambda c, m: (
            c.rollout.speculation.tokens != AUTO and c.rollout.speculation.tokens >= c.data.max_response_length
        ),
        "must be less than data.max_response_length = {c.data.max_response_length}",
        "the last tokens of every draft would be thrown away",
        (),
    ),
    _where_drafted(
        f"{_KEY}.lookup",
        lambda c, m: (
            c.rollout.speculation.method == NGRAM and c.rollout.speculation.lookup > c.data.max_sample_length - 2
        ),
        "must be at most max_prompt_length + max_response_length - 2",
        "so many tokens occur twice in no sample that goes on, and nothing would be drafted",
        lambda c, m: (min(_LOOKUP, c.data.max_sample_length - 2),) if c.data.max_sample_length > 2 else (),
    ),
    _where_drafted(
        f"{_KEY}.lookup",
        lambda c, m: c.rollout.speculation.method != NGRAM and c.rollout.speculation.lookup != _LOOKUP,
        f"must be left out unless {_KEY}.method is ngram",
        "layers and heads look nothing up, and the setting would be ignored",
        (_LOOKUP,),
    ),
    _where_drafted(
        "data.max_response_length",
        lambda c, m: (
            c.data.max_sample_length <= m.longest_sample < c.data.max_sample_length + draft_positions(c.rollout)
        ),
        "plus max_prompt_length = {c.data.max_prompt_length} and 2 x rollout.speculation.tokens + 1 must be at most "
        "{m.longest_sample}",
        "engines compute drafts at positions behind a sample, and the model knows no further ones",
        (),
    ),
    _where_drafted(
        "rollout.max_num_seqs",
        _fills_steps,
        "times rollout.speculation.tokens + 1 must be at most rollout.max_num_batched_tokens on cpu",
        "drafts are cut where a step is full, and a response's bits would depend on the other responses",
        (),
    ),
    _where_drafted(
        _KEY,
        lambda c, m: c.cluster.device == "cpu" and bool(m.linear_layers),
        "must be left out on cpu for models with gated delta attention",
        "whether bits of such drafts depend on the other responses was never compared",
    ),
    RuleRow(
        f"{_KEY}.method",
        lambda c, m: _uses_layers(c, m) and c.cluster.device == "cpu" and m.is_latent,
        "must be ngram on cpu for models with latent attention",
        "vLLM's latent attention on CPUs does not know which requests with drafts begin",
        ("ngram",),
    ),
    _where_drafted(
        "rollout.data_parallel_size",
        _chooses_by_batch,
        "must be 1 with rollout.speculation.tokens: auto, or with its max_num_seqs",
        "vLLM drops its schedule of drafts by batch size there, since data-parallel ranks that draft different numbers "
        "of tokens would deadlock",
        (1,),
    ),
)
SPECULATION_PATH_RULES = (_head,)
