"""Handlers of verl's keys of loss, correction and filter. All other handlers stand in handlers.py."""

from collections.abc import Callable

from mrl.algo.spec import LOSSES, NEEDS_CRITIC
from mrl.tools.import_verl.keys import A
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings
from mrl.tools.import_verl.verl_defaults import VERL_DEFAULTS

Handler = Callable[[Override, Import, VerlSettings], None]

# Losses that verl averages within each sequence first, whatever loss_agg_mode says: loss -> in which versions
SEQUENCE_MEANS = {
    "gspo": "verl ignored the key and averaged each sequence first, its repository of August 2026 too; "
    "release 0.9.1 obeys it and would train another objective",
    "sapo": "verl ignores the key and averages each sequence first",
}
# Metrics that verl's DAPO trainer sums over a response's tokens: the score, which includes the overlong penalty, and
# the score less the KL penalty.
_METRICS = {"seq_reward": "reward", "seq_final_reward": "reward"}


def _loss_mode(o: Override, out: Import, settings: VerlSettings) -> None:
    out.put("renamed", o.key, "algorithm.policy_loss.loss_mode", o.value, line=o.line)
    spec = None
    if isinstance(o.value, str):
        spec = LOSSES.get(o.value)
    bypassed = settings.value("algorithm.rollout_correction.bypass_mode")
    if spec is None or not spec.needs_rollout_anchor or bypassed or settings.as_written:
        return
    why = (
        f"verl measures the step of {o.value} from recomputed log-probs, its paper from those of generation "
        "(algorithm.anchor: rollout)"
    )
    out.put("chosen", "", "algorithm.policy_loss.force", True, why, o.line)
    out.warnings.append(f"line {o.line}: {why}; force: true keeps what verl computes")


def _aggregation(o: Override, out: Import, settings: VerlSettings) -> None:
    to = "algorithm.policy_loss.loss_agg_mode"
    ignored = SEQUENCE_MEANS.get(settings.loss_mode)
    if ignored is not None and o.value != "seq-mean-token-mean" and not settings.as_written:
        why = f"what verl computes for {settings.loss_mode}, whatever this key says ({o.value})"
        out.put("renamed", o.key, to, "seq-mean-token-mean", why, o.line)
        out.warnings.append(
            f"line {o.line}: {settings.loss_mode} with loss_agg_mode={o.value}: {ignored}. seq-mean-token-mean is "
            "written; --as-written keeps the key, and validation then refuses it"
        )
        return
    out.put("renamed", o.key, to, o.value, line=o.line)


def _clip(o: Override, out: Import, settings: VerlSettings) -> None:
    given = [name for name in ("clip_ratio_low", "clip_ratio_high") if A + name in settings.keys]
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if name not in given:
            out.put("renamed", o.key, f"algorithm.policy_loss.{name}", o.value, line=o.line)
    if len(given) == 2:
        out.leave("implied", o.key, o.value, "clip_ratio_low and clip_ratio_high are given and win", o.line)
    else:
        out.warnings.append(
            f"line {o.line}: clip_ratio: verl's loss looks at clip_ratio_low and clip_ratio_high "
            f"first, which default to {VERL_DEFAULTS[A + 'clip_ratio_low']}"
        )


def _tis_cap(o: Override, out: Import, settings: VerlSettings) -> None:
    if not isinstance(o.value, int | float) or o.value <= 0:
        out.leave("implied", o.key, o.value, "no correction", o.line)
        return
    out.put("renamed", o.key, _CORRECTION + "high", float(o.value), line=o.line)
    out.put("implied", "", _CORRECTION + "level", "token", "tis_imp_ratio_cap weighs tokens", o.line)
    out.put("implied", "", _CORRECTION + "mode", "truncate", "tis_imp_ratio_cap truncates", o.line)


def _gamma(o: Override, out: Import, settings: VerlSettings) -> None:
    """Carries gamma over. Of verl's estimators without a critic only reinforce_plus_plus reads it."""
    if settings.estimator in NEEDS_CRITIC:
        out.put("carried", o.key, o.key, o.value, line=o.line)
    elif o.value == 1:
        out.leave("implied", o.key, o.value, "rewards are not discounted", o.line)
    elif settings.estimator == "reinforce_plus_plus":
        out.leave(
            "unsupported", o.key, o.value, "rewards are not discounted here: reinforce_plus_plus has gamma 1", o.line
        )
    else:
        out.leave("not_applicable", o.key, o.value, "the estimator does not discount", o.line)


_CORRECTION = "algorithm.rollout_correction."
# verl's rejections by the ratio itself, newer and older names -> the level here. Each keeps what is inside a band.
_REJECTIONS = {
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
    "token": "token",
    "sequence": "sequence",
    "geometric": "geometric",
}


def _correction(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.rpartition(".")[2]
    weighs = settings.value(_CORRECTION + "rollout_is", "algorithm.rollout_is") not in (None, False)
    match name, o.value:
        case (
            "rollout_is" | "rollout_rs" | "rollout_token_veto_threshold" | "rollout_rs_threshold_lower",
            None | False,
        ):
            out.leave("implied", o.key, o.value, "no correction", o.line)
        case ("rollout_is", "token" | "sequence"):
            out.put("renamed", o.key, _CORRECTION + "level", o.value, line=o.line)
        case ("rollout_rs", str()) if o.value in _REJECTIONS and not weighs:
            out.put("renamed", o.key, _CORRECTION + "level", _REJECTIONS[o.value], line=o.line)
            out.put(
                "implied", o.key, _CORRECTION + "mode", "mask", "a rejection masks what is outside its band", o.line
            )
            _warn_of_weights(o, out)
        case ("rollout_is_threshold", _):
            _band(o, out, weighs, one_sided=True)
        case ("rollout_rs_threshold", _):
            _band(o, out, not weighs and settings.value(_CORRECTION + "rollout_rs") in _REJECTIONS, one_sided=False)
        case ("bypass_mode", bool()):
            out.put("renamed", o.key, "algorithm.anchor", "rollout" if o.value else "recompute", line=o.line)
        case ("rollout_is_batch_normalize" | "use_policy_gradient", False) | ("loss_type", "ppo_clip"):
            out.leave("implied", o.key, o.value, "as it is here", o.line)
        case _:
            out.leave(
                "unsupported", o.key, o.value, "no such correction here; see algorithm.rollout_correction", o.line
            )


def _warn_of_weights(o: Override, out: Import) -> None:
    if _REJECTIONS[o.value] != "geometric":
        out.warnings.append(
            f"line {o.line}: rollout_rs={o.value} without rollout_is rejects in verl and leaves what it keeps at "
            f"weight 1; mode mask at level {_REJECTIONS[o.value]} here also weighs what it keeps by its ratio (only "
            "level geometric does not)"
        )


def _band(o: Override, out: Import, used: bool, one_sided: bool) -> None:
    """Carries a threshold over: `low_high`, or one number.

    One number is the upper bound of a weight. For a rejection it is the bound x on both sides (1/x and x).
    """
    parts = str(o.value).split("_")
    if not used or o.value is None:
        out.leave("implied", o.key, o.value, "it belongs to a correction that is off", o.line)
        return
    try:
        bounds = [float(part) for part in parts]
    except ValueError:
        out.leave("unsupported", o.key, o.value, "a threshold here is one number, or low_high", o.line)
        return
    out.put("renamed", o.key, _CORRECTION + "high", bounds[-1], line=o.line)
    if len(bounds) == 2 or not one_sided:
        out.put("renamed", o.key, _CORRECTION + "low", bounds[0] if len(bounds) == 2 else 1 / bounds[0], line=o.line)
        out.put("implied", o.key, _CORRECTION + "mode", "mask", "a band masks what is outside it", o.line)


def _metric(o: Override, out: Import, settings: VerlSettings) -> None:
    out.put(
        "renamed" if o.value in _METRICS else "carried",
        o.key,
        "algorithm.filter_groups.metric",
        _METRICS.get(o.value, o.value),
        line=o.line,
    )


ALGORITHM_HANDLERS: dict[str, Handler] = {
    A + "clip_ratio": _clip,
    A + "loss_agg_mode": _aggregation,
    A + "policy_loss.loss_mode": _loss_mode,
    A + "tis_imp_ratio_cap": _tis_cap,
    "algorithm.filter_groups.metric": _metric,
    "algorithm.gamma": _gamma,
    "algorithm.rollout_correction.": _correction,
    "algorithm.rollout_is": _correction,
    "algorithm.rollout_is_threshold": _correction,
}
