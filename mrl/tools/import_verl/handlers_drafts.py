"""Handlers of verl's keys of multi-token prediction (`model.mtp.*`)."""

from mrl.config.schema_rollout import MTP
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.keys import M, R
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

_MTP = M + "mtp."
_KEPT = "the checkpoint's predicting layers are in every checkpoint and export, as they came"
_NOT_TRAINED = "the predicting layers are not trained along; they stay as they came"
_ASLEEP = (
    "engines that sleep forget the predicting layers, and no weight sync brings them: drafts by them need engines on "
    "devices of their own"
)
_DEFAULTS = {"num_speculative_tokens": 1, "speculative_num_steps": 3}  # verl 0.9.1, workers/config/model.py
_OF_TRAINING = ("detach_encoder", "mtp_loss_scaling_factor")


def _mtp(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles all keys below `model.mtp.`. verl reads the others only with `enable`."""
    name = o.key.removeprefix(_MTP)
    if name == "enable":
        out.leave("implied", o.key, o.value, _KEPT, o.line)
    elif not settings.given(_MTP + "enable"):
        out.leave("not_applicable", o.key, o.value, "goes with mtp.enable", o.line)
    elif name == "enable_train":
        out.leave("unsupported" if o.value else "implied", o.key, o.value, _NOT_TRAINED, o.line)
    elif name in _OF_TRAINING:
        out.leave("not_applicable", o.key, o.value, "goes with mtp.enable_train", o.line)
    elif name == "enable_rollout" and o.value and not settings.ahead:
        out.leave("unsupported", o.key, o.value, _ASLEEP, o.line)
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
