"""Rules of a critic (algorithm.adv_estimator: gae): what it goes with, and that its keys are not set without one."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from mrl.config.actor_rules import ACTOR_RULES, BATCH_RULES, fixed_storages
from mrl.config.device_rules import DEVICE_RULES, adapted_once
from mrl.config.efficiency_rules import EFFICIENCY_RULES
from mrl.config.rule_row import Rule, RuleRow
from mrl.config.run_rules import OPTIM_RULES
from mrl.config.schema import AlgorithmConfig, CriticConfig, RunConfig, Section
from mrl.config.vision_rules import first_layers
from mrl.errors import Violation
from mrl.model import ModelSpec

_LAYOUT = "critic.layout"
_ESTIMATOR = "algorithm.adv_estimator"
_FIELDS = "model.override_transformer_config."


def _with(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.algorithm.needs_critic and broken(config, model)


def _unread(config: RunConfig) -> Iterator[str]:
    """Yields keys of a critic that have values of their own."""
    if _differs(config.critic, CriticConfig()):
        yield "critic"
    if config.trainer.critic_warmup:
        yield "trainer.critic_warmup"
    for name in ("gamma", "lam"):
        if name == "gamma" and config.algorithm.by_turn:
            continue
        if getattr(config.algorithm, name) != getattr(AlgorithmConfig(), name):
            yield f"algorithm.{name}"


def _differs(given: Section, default: Section) -> bool:
    """Whether a section differs from its default. Raises UnknownValue where it reads a refused key."""
    for name in type(default).model_fields:
        value = getattr(given, name)
        usual = getattr(default, name)
        if _differs(value, usual) if isinstance(usual, Section) else value != usual:
            return True
    return False


def _is_read(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Gives one message for all keys that are set for a critic, where the estimator has none."""
    algorithm = config.algorithm
    if algorithm.needs_critic:
        return
    given = list(_unread(config))
    if given:
        why = f"{algorithm.adv_estimator} has no critic, and {', '.join(given)} would not be read"
        yield Violation(_ESTIMATOR, f"must be gae where {given[0]} is given", why, ("gae",))


def _of_critic(rule: Rule) -> Rule:
    """Applies a rule of the actor's section to the critic's. What both break in the same way is said once."""

    def judge(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
        own = config.of_critic
        if own is None:
            return
        of_actor = set(map(str, rule(config, model)))
        for violation in rule(own, model):
            if str(violation) not in of_actor:
                yield replace(violation, field=_renamed(violation.field), rule=_renamed(violation.rule))

    return judge


def _has_other_ranks(config: RunConfig) -> bool:
    own = config.critic.layout
    return config.algorithm.needs_critic and own is not None and own.world_size != config.actor.layout.world_size


def _layout(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """What the actor's rules say of degrees, and of Megatron's fields beside them, in a layout of the critic's own;
    once where both break a rule alike.
    """
    own = config.of_critic
    if own is None or config.critic.layout is None or _has_other_ranks(config):
        return
    for rule in (*ACTOR_RULES, *EFFICIENCY_RULES, *DEVICE_RULES):
        of_actor = set(map(str, rule(config, model)))
        for violation in rule(own, model):
            name = violation.field
            if str(violation) in of_actor:
                continue
            if name.startswith("actor.layout."):
                allowed = () if name == "actor.layout.world_size" else violation.allowed  # other ranks than the actor's
                yield replace(violation, field=name.replace("actor.layout", _LAYOUT, 1), allowed=allowed)
            elif name.startswith(_FIELDS):
                yield replace(violation, rule=f"{violation.rule} (in {_LAYOUT})")


def _renamed(text: str) -> str:
    """Replaces the actor's keys in a text by those of the critic."""
    for name in ("ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "param_offload", "grad_offload"):
        text = text.replace(f"actor.{name}", f"critic.{name}")
    budget = text.replace("actor.log_prob_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu")
    return budget.replace("actor.optim.", "critic.optim.")


def _warmup_is_the_run(config: RunConfig) -> bool:
    steps = config.trainer.total_training_steps
    return steps is not None and config.trainer.warmup_steps >= steps


CRITIC_RULES = (
    _is_read,
    RuleRow(
        f"{_LAYOUT}.world_size",
        lambda c, m: _has_other_ranks(c),
        "must be actor.layout.world_size = {c.actor.layout.world_size}",
        "the critic computes on the actor's ranks",
        lambda c, m: (c.actor.layout.world_size,),
    ),
    _layout,
    adapted_once(_LAYOUT, lambda c: c.algorithm.needs_critic),
    *map(_of_critic, (*OPTIM_RULES, *BATCH_RULES, fixed_storages, first_layers)),
    RuleRow(
        "critic.optim.override_optimizer_config",
        _with(lambda c, m: bool(c.critic.optim.override_optimizer_config)),
        "must be empty",
        "actor.optim.override_optimizer_config holds for the critic's optimizer too",
        ({},),
    ),
    RuleRow(
        "trainer.critic_warmup",
        _with(lambda c, m: _warmup_is_the_run(c)),
        "must be at most trainer.total_training_steps = {c.trainer.total_training_steps}",
        "the actor would never be trained",
    ),
    RuleRow(
        "rollout.endpoint",
        _with(lambda c, m: c.rollout.endpoint),
        f"must be false with {_ESTIMATOR}: gae",
        "an agent may edit its history, and a response with branches is not one sequence of values",
        (False,),
    ),
    RuleRow(
        _ESTIMATOR,
        _with(lambda c, m: m.is_latent or m.is_hybrid or m.attention_sinks),
        "must not be gae for a model with latent or gated delta attention, or with attention sinks",
        "critics are built and tried for layers of plain grouped-query attention alone",
        ("grpo",),
    ),
)
