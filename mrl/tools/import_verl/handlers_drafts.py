"""Handlers of verl's keys of multi-token prediction (`model.mtp.*`)."""

from mrl.config.schema_rollout import MTP
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.keys import M, R
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

_MTP = M + "mtp."
_KEPT = "the checkpoint's predicting layers are in every checkpoint and export, as they came"
_NOT_USED = "the predicting layer is trained along only where engines draft with it (mtp.enable_rollout)"
_DETACHED = (
    "its loss trains the predicting layer alone: neither policy, embedding nor output layer (mtp.detach_encoder)"
)
_DEFAULTS = {"num_speculative_tokens": 1, "speculative_num_steps": 3}  # verl 0.9.1, workers/config/model.py


def _mtp(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles all keys below `model.mtp.`. verl reads the others only with `enable`."""
    name = o.key.removeprefix(_MTP)
    if name == "enable":
        out.leave("implied", o.key, o.value, _KEPT, o.line)
    elif not settings.given(_MTP + "enable"):
        out.leave("not_applicable", o.key, o.value, "goes with mtp.enable", o.line)
    elif name == "enable_train" and not o.value:
        out.leave("implied", o.key, o.value, "the predicting layer stays as it came", o.line)
    elif name == "enable_train" and not settings.given(_MTP + "enable_rollout"):
        out.leave("unsupported", o.key, o.value, _NOT_USED, o.line)
    elif name == "enable_train":
        why = "" if settings.given(_MTP + "detach_encoder") else _DETACHED
        out.put("renamed", o.key, "actor.mtp.train", True, why, o.line)
    elif name in ("detach_encoder", "mtp_loss_scaling_factor") and not settings.given(_MTP + "enable_train"):
        out.leave("not_applicable", o.key, o.value, "goes with mtp.enable_train", o.line)
    elif name == "detach_encoder":
        out.leave("implied" if o.value else "unsupported", o.key, o.value, _DETACHED, o.line)
    elif name == "mtp_loss_scaling_factor":
        out.put("renamed", o.key, "actor.mtp.loss_weight", float(o.value), line=o.line)
    elif name == "enable_rollout" and o.value:
        out.put("renamed", o.key, "rollout.speculation.method", MTP, line=o.line)
        tokens = "speculative_num_steps" if settings.value(R + "name") == "sglang" else "num_speculative_tokens"
        drafted = settings.given(_MTP + tokens) or _DEFAULTS[tokens]
        out.put("implied", "", "rollout.speculation.tokens", drafted, f"verl's model.mtp.{tokens}")
    elif name == "enable_rollout":
        out.leave("implied", o.key, o.value, "engines draft nothing", o.line)
    else:
        out.leave("not_applicable", o.key, o.value, "goes with mtp.enable_rollout", o.line)


DRAFT_HANDLERS: dict[str, Handler] = {_MTP: _mtp}
