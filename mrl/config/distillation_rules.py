"""Rules of on-policy distillation: which teachers are possible, and which settings do not go with one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path

from mrl.algo.spec import FORWARD_OVER_TOP_K, KL_TYPES
from mrl.config.actor_rules import ACTOR_RULES, padding_of_branches
from mrl.config.device_rules import DEVICE_RULES, adapted_once
from mrl.config.efficiency_rules import EFFICIENCY_RULES
from mrl.config.family_rules import LATENT_RULES, ROTATION_RULES, SINK_RULES
from mrl.config.override_rules import override_faults
from mrl.config.rule_row import RuleRow, on_only_where
from mrl.config.schema import DistillationConfig, RunConfig
from mrl.config.schema_actor import LoraConfig
from mrl.config.teacher_model import teacher_layout
from mrl.config.vision_rules import narrow_first_chunk
from mrl.errors import MrlError, Violation
from mrl.model import ModelSpec, planning_model_spec
from mrl.model.layout import check_train_layout
from mrl.model.vocabularies import TOKENIZER, differing_tokens, vocabulary
from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS

_TEACHER = "distillation.teacher_model"
_LOSS = "distillation.distillation_loss"
_PATH = f"{_TEACHER}.model_path"
_WITHOUT_GRADIENT = tuple(name for name, spec in KL_TYPES.items() if spec.estimator == "k1" and not spec.k2_gradient)
_FIELDS = f"{_TEACHER}.override_transformer_config"
_OF_ACTOR = "model.override_transformer_config"
_BUDGET = f"{_TEACHER}.log_prob_max_token_len_per_gpu"


def distillation_notes(config: RunConfig) -> Iterator[str]:
    """Yields notes on settings of a distillation that are legal and may be a mistake."""
    distillation = config.distillation
    if not distillation.enabled:
        if distillation != DistillationConfig():
            yield "distillation: is set, and no teacher is loaded, because distillation.enabled is false"
        return
    if distillation.in_advantages and config.algorithm.policy_loss.loss_mode == "geo_mean":
        yield (
            f"{_LOSS}.use_policy_gradient: geo_mean takes the mean of a response's advantages, so the teacher judges "
            "responses and not tokens; gspo keeps them apart"
        )
    if distillation.in_advantages and not distillation.over_top_k and _estimator(config) != "k1":
        name = distillation.distillation_loss.loss_mode
        yield f"{_LOSS}.loss_mode: {name} as an advantage is an estimate whose gradient is not that of the KL; k1 is"


def _with(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.distillation.enabled and broken(config, model)


def _estimator(config: RunConfig) -> str:
    """Returns the estimator of a known loss_mode. For another one it returns the name itself."""
    name = config.distillation.distillation_loss.loss_mode
    if name in KL_TYPES:
        return KL_TYPES[name].estimator
    return name


def _has_no_gradient(config: RunConfig) -> bool:
    """Whether the gradient of the estimate as a loss has mean 0 for every teacher."""
    return config.distillation.distillation_loss.loss_mode in _WITHOUT_GRADIENT


def _teacher_model(config: RunConfig, model: ModelSpec) -> ModelSpec | None:
    """Returns the teacher's sizes, or None where they are not known. `model` is the actor's."""
    path = config.distillation.teacher_model.model_path
    if not config.distillation.enabled or path is None:
        return None
    if path == config.model.path:
        return model
    try:
        return planning_model_spec(path)[0]
    except MrlError:  # another rule reports it
        return None


def _readable(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Refuses a teacher whose checkpoint cannot be read."""
    path = config.distillation.teacher_model.model_path
    if not config.distillation.enabled or path in (None, config.model.path):
        return
    try:
        planning_model_spec(path)
    except MrlError as error:
        yield Violation(_PATH, f"cannot be used: {error}")


def _vocabulary(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    teacher = _teacher_model(config, model)
    if teacher is not None and teacher.vocab_size < model.vocab_size:
        rule = f"has a vocabulary of {teacher.vocab_size} tokens, and model.path one of {model.vocab_size}"
        why = "the teacher scores every token that is sampled, so it has to know all of them; give a teacher that does"
        yield Violation(_PATH, rule, why)


def _positions(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    teacher = _teacher_model(config, model)
    longest = config.data.max_sample_length
    if teacher is not None and teacher.longest_sample < longest:
        rule = f"has {teacher.longest_sample} positions, and the longest sample has {longest} tokens"
        yield Violation(_PATH, rule, "the teacher reads whole samples; lower data.max_response_length")


def _layout(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks that the teacher's layout is legal for its model and has the actor's ranks."""
    teacher = _teacher_model(config, model)
    if teacher is None:
        return
    degrees = teacher_layout(config, teacher)
    ranks = config.actor.layout.world_size
    if degrees.world_size != ranks:
        rule = f"must be actor.layout.world_size = {ranks}"
        yield Violation(f"{_TEACHER}.layout.world_size", rule, "the teacher computes on the actor's ranks", (ranks,))
        return
    own = config.distillation.teacher_model.layout is not None
    if config.model.vision is not None:
        yield from narrow_first_chunk(degrees, teacher, f"{_TEACHER}.layout")
    for violation in check_train_layout(degrees, teacher):
        if own:
            allowed = () if violation.field == "world_size" else violation.allowed  # other ranks than the actor's
            yield replace(violation, field=f"{_TEACHER}.layout.{violation.field}", allowed=allowed)
            continue
        why = f"{violation.field} {violation.rule}; left out, the teacher lies as the actor"
        yield Violation(f"{_TEACHER}.layout", "must be set for this teacher", why)


def _budget(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks that the teacher's micro-batches hold the longest sample, padded for its layout."""
    own = config.distillation.teacher_model.log_prob_max_token_len_per_gpu
    actor = config.actor
    teacher = _teacher_model(config, model)
    if teacher is None:
        return
    if not actor.use_dynamic_bsz:
        if own is not None:
            yield Violation(_BUDGET, "needs actor.use_dynamic_bsz: true", "the setting would be ignored", (None,))
        return
    tokens = own or actor.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    degrees = teacher_layout(config, teacher)
    parts = degrees.sequence_parts
    longest = config.data.max_sample_length + padding_of_branches(config, degrees.context_parallel_size)
    least = ceil(ceil(longest / parts) * parts / degrees.context_parallel_size)
    if tokens is not None and tokens < least:
        rule = f"must be at least {least}, the longest sample on one device of the teacher"
        why = f"a sample is never cut over micro-batches, and the teacher's hold {tokens} tokens"
        yield Violation(_BUDGET, rule, why, (least,))


def _overrides(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Refuses Megatron fields that the teacher cannot have, as for the actor's model."""
    teacher = _teacher_model(config, model)
    if teacher is None:
        return
    given = config.distillation.teacher_model.override_transformer_config
    for violation in override_faults(_OF_ACTOR, given, config.cluster.device, teacher):
        yield replace(violation, field=violation.field.replace(_OF_ACTOR, _FIELDS, 1))
    for name in given:
        if name in MINDSPEED_FIELDS:
            why = "MindSpeed adapts a process once, by what the actor has"
            yield Violation(f"{_FIELDS}.{name}", f"goes under {_OF_ACTOR}", why)
        elif name.startswith("moe_") and not teacher.is_moe:
            yield Violation(
                f"{_FIELDS}.{name}", "is for mixtures of experts, and the teacher is dense", "it is ignored"
            )


def _as_the_actor(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Applies the actor's rules to the teacher's fields and layout. What both break in the same way is said once."""
    teacher = _teacher_model(config, model)
    if teacher is None:
        return
    given = config.distillation.teacher_model.override_transformer_config
    others = {"lora": LoraConfig(), "router_replay": "disabled", "freeze_router": False}  # they are the student's
    actor = config.actor.model_copy(update={"layout": teacher_layout(config, teacher), **others})
    fields = config.model.model_copy(update={"override_transformer_config": given})
    own = config.model_copy(update={"actor": actor, "model": fields})
    of_layout = (*ROTATION_RULES, *LATENT_RULES, *SINK_RULES, *DEVICE_RULES)
    rules = (*ACTOR_RULES, *EFFICIENCY_RULES, *of_layout)
    of_actor = {str(violation) for rule in rules for violation in rule(config, model)}
    said = {violation.field for violation in _overrides(config, model)}
    for rule in rules:
        for violation in rule(own, teacher):
            name = violation.field
            is_read = name.startswith(_OF_ACTOR) or (rule in of_layout and name.startswith("actor.layout."))
            if is_read and str(violation) not in of_actor:
                renamed = name.replace(_OF_ACTOR, _FIELDS, 1).replace("actor.layout.", f"{_TEACHER}.layout.", 1)
                if renamed not in said:
                    yield replace(violation, field=renamed)


def _folder(config: RunConfig) -> Path | None:
    """Returns the teacher's folder where it is on this host."""
    path = config.distillation.teacher_model.model_path
    if not config.distillation.enabled or path is None or not Path(path).is_dir():
        return None
    return Path(path)


def _tokenizer(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that both tokenizers give the same numbers to the same tokens, where their files are here."""
    teacher = _folder(config)
    actor = Path(config.model.path)
    if teacher is None or not actor.is_dir():
        return
    if not (teacher / TOKENIZER).is_file():
        why = f"put the {TOKENIZER} there that the teacher was trained with, so that it can be compared"
        yield Violation(_PATH, f"has no {TOKENIZER}", why)
        return
    if not (actor / TOKENIZER).is_file():
        yield Violation(_PATH, f"cannot be compared: model.path has no {TOKENIZER}", "convert its tokenizer to one")
        return
    try:
        differing = differing_tokens(vocabulary(actor / TOKENIZER), vocabulary(teacher / TOKENIZER))
    except MrlError as error:
        yield Violation(_PATH, f"cannot be compared with model.path: {error}")
        return
    if differing:
        why = "the teacher would score other texts than were sampled; give a teacher of the same tokenizer"
        yield Violation(_PATH, f"has another tokenizer than model.path: {differing}", why)


DISTILLATION_RULES = (
    RuleRow(
        _PATH,
        _with(lambda c, m: c.distillation.teacher_model.model_path is None),
        "must be set with distillation.enabled: true",
        "distillation needs a teacher; give the folder of its checkpoint",
    ),
    _readable,
    _vocabulary,
    _positions,
    _layout,
    _budget,
    _overrides,
    _as_the_actor,
    adapted_once(f"{_TEACHER}.layout", lambda c: c.distillation.enabled),
    RuleRow(
        "algorithm.adv_estimator",
        _with(lambda c, m: c.algorithm.needs_critic and not c.distillation.distillation_loss.reward_weight),
        "must not be gae where rewards do not count (distillation.distillation_loss)",
        "a critic would be trained, and its advantages multiplied by 0",
        ("grpo",),
    ),
    RuleRow(
        f"{_LOSS}.loss_mode",
        lambda c, m: c.distillation.in_loss and _has_no_gradient(c),
        f"must not be {' or '.join(_WITHOUT_GRADIENT)} without use_policy_gradient",
        "the gradient of this estimate as a loss is 0 in the mean, whoever the teacher is",
        ("k2", "k3+", "k1+"),
    ),
    RuleRow(
        f"{_LOSS}.use_policy_gradient",
        lambda c, m: c.distillation.over_top_k and c.distillation.in_advantages,
        "must be false with loss_mode {c.distillation.distillation_loss.loss_mode}",
        "an advantage belongs to the sampled token, and this KL is over tokens that were not sampled",
        (False,),
    ),
    RuleRow(
        f"{_LOSS}.log_prob_min_clamp",
        lambda c, m: (
            c.distillation.distillation_loss.log_prob_min_clamp is not None
            and c.distillation.distillation_loss.loss_mode != FORWARD_OVER_TOP_K
        ),
        f"needs loss_mode {FORWARD_OVER_TOP_K}",
        "no other loss reads it",
        (None,),
    ),
    RuleRow(
        f"{_LOSS}.topk",
        lambda c, m: c.distillation.over_top_k and c.distillation.distillation_loss.topk > m.vocab_size,
        "must be at most {m.vocab_size}, the size of the vocabulary",
        "the loss is over that many of the teacher's most likely tokens",
        lambda c, m: (m.vocab_size,),
    ),
    RuleRow(
        f"{_LOSS}.use_policy_gradient",
        lambda c, m: c.distillation.in_advantages and c.algorithm.on_policy,
        "must be false with algorithm.anchor: on_policy",
        "advantages are computed before the update, and the teacher's part needs old log-probs; algorithm.anchor: "
        "recompute makes the pass that it needs",
        (False,),
    ),
    on_only_where(
        "algorithm.filter_groups.enable",
        lambda c, m: not c.distillation.alone,
        "must be false where rewards do not count (distillation.distillation_loss)",
        "there groups with equal rewards teach as much as others",
    ),
    on_only_where(
        "algorithm.use_kl_in_reward",
        lambda c, m: not c.distillation.alone,
        "must be false where rewards do not count (distillation.distillation_loss)",
        "its penalty is part of the rewards; use algorithm.use_kl_loss",
    ),
)
DISTILLATION_PATH_RULES = (_tokenizer,)
