"""What drafts are taken to give: tokens of a decode step (rollout.speculation).

Where each drafted token is accepted with probability a if those before it were, a step of k drafted tokens gives
1 + a + a^2 + ... + a^k tokens (Leviathan et al., arXiv 2211.17192, equation 1). Runs measure the share of each position
(drafts/acceptance_at/1, 2, ...) in all decode steps, which a calibration hands over for the same method.
"""

from dataclasses import replace

from mrl.config.schema_rollout import AUTO, MTP, SpeculationConfig
from mrl.plan.plan_inputs import PlanInputs


def is_auto(inputs: PlanInputs) -> bool:
    """Tells whether the number of drafted tokens is to be found."""
    speculation = inputs.config.rollout.speculation
    return speculation is not None and speculation.tokens == AUTO


def drafted_tokens(inputs: PlanInputs) -> int:
    """Returns the tokens drafted for a sequence in a decode step; 0 where none are, or where nothing is known of them.

    How often a look-up (ngram) finds the right tokens depends on the text. Before a calibration it counts as none.
    """
    speculation = inputs.config.rollout.speculation
    if speculation is None or (speculation.method != MTP and not measured_acceptance(inputs)):
        return 0
    if speculation.tokens == AUTO:
        raise ValueError("the number of drafted tokens is not found yet: see draft_choice")
    return speculation.tokens


def acceptance(inputs: PlanInputs) -> tuple[float, ...]:
    """Returns the share of drafts whose first, second, ... token is accepted, with all before it."""
    drafted = drafted_tokens(inputs)
    measured = measured_acceptance(inputs)
    assumed = measured[0] if measured else inputs.assumptions.draft_acceptance
    shares = list(measured[:drafted])
    while len(shares) < drafted:
        shares.append((shares[-1] if shares else 1.0) * assumed)
    return tuple(shares)


def tokens_per_step(inputs: PlanInputs) -> float:
    """Returns the tokens that a decode step gives each sequence."""
    return 1.0 + sum(acceptance(inputs))


def measured_acceptance(inputs: PlanInputs) -> tuple[float, ...]:
    """Returns the acceptance that runs of the cluster had with the same method; empty where it is not known."""
    measured = inputs.assumptions.measured
    speculation = inputs.config.rollout.speculation
    if speculation is None or not (measured and measured.lengths) or measured.lengths.drafted_by != speculation.method:
        return ()
    return measured.lengths.accepted


def with_drafts(inputs: PlanInputs, tokens: int, method: str = MTP) -> PlanInputs:
    """Returns the same inputs with engines that draft so many tokens; with 0 they draft none."""
    speculation = SpeculationConfig(method=method, tokens=tokens) if tokens else None
    rollout = inputs.config.rollout.model_copy(update={"speculation": speculation})
    return replace(inputs, config=inputs.config.model_copy(update={"rollout": rollout}))
