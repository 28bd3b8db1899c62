"""Handlers of optimizer keys that verl has for the actor (actor_rollout_ref.actor.optim) and the critic alike."""

from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings


def _section(o: Override) -> str:
    """Returns verl's section of the optimizer that a key belongs to, with its dot."""
    return f"{o.key.rpartition('.')[0]}."


def schedule_length(o: Override, settings: VerlSettings) -> int | None:
    """Returns the training steps that verl takes a share of for a warm-up: those of the decay, or else of the run.

    None where the script gives neither.
    """
    decay, run = settings.given(f"{_section(o)}lr_decay_steps"), settings.value("trainer.total_training_steps")
    return next((steps for steps in (decay, run) if isinstance(steps, int) and steps > 0), None)


def gradient_clip(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles clip_grad and its deprecated name grad_clip, which wins in verl where both are set."""
    verls = _section(o)
    to = "critic.optim.clip_grad" if o.key.startswith("critic") else "actor.optim.clip_grad"
    old = settings.given(f"{verls}grad_clip")
    if o.key == f"{verls}grad_clip" and o.value is None:
        out.leave("implied", o.key, o.value, "clip_grad says it", o.line)
    elif o.key == f"{verls}clip_grad" and old is not None:
        out.leave("implied", o.key, o.value, f"verl takes grad_clip ({old}) where it is set", o.line)
    else:
        kind = "carried" if o.key.removeprefix("actor_rollout_ref.") == to else "renamed"
        out.put(kind, o.key, to, o.value, line=o.line)


def least_rate(o: Override, out: Import, settings: VerlSettings) -> None:
    """Converts the rate at the end of a decay, which is a share of the peak."""
    to = "critic.optim.min_lr" if o.key.startswith("critic") else "actor.optim.min_lr"
    rate = settings.given(f"{_section(o)}lr")
    if not o.value:
        out.leave("implied", o.key, o.value, "the rate decays to 0", o.line)
    elif not isinstance(rate, int | float) or not isinstance(o.value, int | float):
        why = f"a share of a rate that is not given; set {to}"
        out.leave("unsupported", o.key, o.value, why, o.line)
    else:
        out.put("renamed", o.key, to, o.value * rate, f"{o.value:g} of the rate {rate:g}", o.line)


def drop_unread_starts(out: Import, settings: VerlSettings) -> None:
    """Drops the first rate of a warm-up where the script has no warm-up: nothing in verl reads it then."""
    for verls, ours in (("actor_rollout_ref.actor.optim.", "actor.optim."), ("critic.optim.", "critic.optim.")):
        steps, share = (settings.given(f"{verls}{name}") for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"))
        if not any(isinstance(given, int | float) and given > 0 for given in (steps, share)):
            out.drop(f"{ours}lr_warmup_init", "there is no warm-up that would begin with it")
