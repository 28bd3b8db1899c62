"""Handlers of verl's `distillation.*`: one teacher, estimates from sampled tokens, KL over its likeliest words."""

from mrl.algo.spec import FORWARD_OVER_TOP_K, KL_TYPES
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

_LOSS = "distillation.distillation_loss."
_OURS = "distillation.distillation_loss."
_TEACHER = "distillation.teacher_model.model_path"
_OFF = "there is no teacher"
# verl's defaults
_DEFAULTS = {"loss_mode": "k3", "use_policy_gradient": False}
_OF_WORDS = ("topk", "log_prob_min_clamp")  # keys of losses over words
_ALONE = "verl drops the policy loss where use_task_rewards is false, its KL and entropy with it"


def _is_on(settings: VerlSettings) -> bool:
    return settings.given("distillation.enabled") is True


def _enabled(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value:
        out.put("carried", o.key, "distillation.enabled", True, line=o.line)
    else:
        out.leave("implied", o.key, o.value, _OFF, o.line)


def _loss_key(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.removeprefix(_LOSS)
    rewards = settings.given(f"{_LOSS}use_task_rewards")
    if not _is_on(settings):
        out.leave("not_applicable", o.key, o.value, _OFF, o.line)
    elif name == "loss_mode" and o.value not in (*KL_TYPES, FORWARD_OVER_TOP_K):
        why = f"k1, k2, k3 and the like score the sampled token, {FORWARD_OVER_TOP_K} the teacher's most likely tokens"
        out.leave("unsupported", o.key, o.value, why, o.line)
    elif name in _OF_WORDS and (o.value is None or settings.given(f"{_LOSS}loss_mode") != FORWARD_OVER_TOP_K):
        out.leave("implied", o.key, o.value, f"only {FORWARD_OVER_TOP_K} reads it", o.line)
    elif name == "distillation_loss_coef" and rewards is False:
        out.leave("implied", o.key, o.value, "verl reads it beside rewards alone", o.line)
    else:
        out.put("carried", o.key, f"{_OURS}{name}", o.value, line=o.line)


def _teacher(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles the teacher's checkpoint, under whatever name it has among verl's teachers."""
    is_path = o.key.endswith(".model_path") and o.value is not None
    if not _is_on(settings):
        out.leave("not_applicable", o.key, o.value, _OFF, o.line)
    elif is_path and out.values.get(_TEACHER, o.value) != o.value:
        out.leave("unsupported", o.key, o.value, "a run has one teacher", o.line)
    elif is_path:
        out.put("carried" if o.key == _TEACHER else "renamed", o.key, _TEACHER, o.value, line=o.line)
    else:
        why = "the teacher is a Megatron model on the actor's ranks (distillation.teacher_model.layout)"
        out.leave("not_applicable", o.key, o.value, why, o.line)


def complete_distillation(out: Import) -> None:
    """Writes verl's defaults where mrl's differ, and turns off what verl does not compute beside a teacher alone."""
    if not out.values.get("distillation.enabled"):
        return
    for name, value in _DEFAULTS.items():
        if f"{_OURS}{name}" not in out.values:
            out.put("implied", "", f"{_OURS}{name}", value, "verl's default")
    if out.values.get(f"{_OURS}use_task_rewards") is not False:
        return
    # verl/trainer/distillation/losses.py, distillation_ppo_loss
    for name, value in {"use_kl_loss": False, "use_kl_in_reward": False, "entropy_coeff": 0.0}.items():
        if out.values.get(f"algorithm.{name}"):
            out.put("implied", "", f"algorithm.{name}", value, _ALONE)
    controller = [f"kl_ctrl.{name}" for name in ("type", "kl_coef", "target_kl", "horizon")]
    for name in ("kl_loss_coef", "kl_loss_type", "kl_penalty", *controller):
        out.drop(f"algorithm.{name}", _ALONE)


DISTILLATION_HANDLERS: dict[str, Handler] = {
    "distillation.enabled": _enabled,
    **{
        f"{_LOSS}{name}": _loss_key
        for name in (
            *("loss_mode", "use_policy_gradient", "use_task_rewards", "distillation_loss_coef", "loss_max_clamp"),
            *_OF_WORDS,
        )
    },
    "distillation.teacher_models.": _teacher,
    "distillation.teacher_model.": _teacher,
}
