"""Rules of a critic (algorithm.adv_estimator: gae): what it goes with, and that its keys are not set without one."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from mrl.config.actor_rules import BATCH_RULES, storages_stay
from mrl.config.rule_row import Rule, RuleRow
from mrl.config.run_rules import OPTIM_RULES
from mrl.config.schema import AlgorithmConfig, CriticConfig, RunConfig, Section
from mrl.errors import Violation
from mrl.model import ModelSpec

_ESTIMATOR = "algorithm.adv_estimator"


def _with(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.algorithm.needs_critic and broken(config, model)


def _unread(config: RunConfig) -> Iterator[str]:
    """Yields keys of a critic that have values of their own."""
    if _differs(config.critic, CriticConfig()):
        yield "critic"
    if config.trainer.critic_warmup:
        yield "trainer.critic_warmup"
    for name in ("gamma", "lam"):
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
    *map(_of_critic, (*OPTIM_RULES, *BATCH_RULES, storages_stay)),
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
        "actor.lora.rank",
        _with(lambda c, m: c.actor.lora.rank > 0),
        f"must be 0 with {_ESTIMATOR}: gae",
        "a critic is trained whole, beside an actor that is",
        (0,),
    ),
    RuleRow(
        "rollout.endpoint",
        _with(lambda c, m: c.rollout.endpoint),
        f"must be false with {_ESTIMATOR}: gae",
        "an agent may go back in its conversation, and such a response is not one sequence of values",
        (False,),
    ),
    RuleRow(
        _ESTIMATOR,
        _with(lambda c, m: m.is_latent or m.is_hybrid),
        "must not be gae for a model of the {m.family} family",
        "critics are built and tried for layers of grouped-query attention alone",
        ("grpo",),
    ),
)
