"""Handlers of verl's keys of multi-token prediction (`model.mtp.*`), and of the drafts that scripts ask of vLLM itself
(`rollout.engine_kwargs.vllm.speculative_config`).
"""

from typing import Any

from mrl.config.schema_rollout import MTP, NGRAM
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


SPECULATION = R + "engine_kwargs.vllm.speculative_config"
_TO = "rollout.speculation."
_HEAD = "eagle3"  # vLLM's name of the method by which heads draft
_SAME = {  # vLLM's fields that mean the same here
    "num_speculative_tokens": "tokens",
    "prompt_lookup_min": "lookup",
    "draft_sample_method": "draft_sample_method",
}


def speculation(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles vLLM's speculative_config, given whole or field by field."""
    fields = {o.key.removeprefix(f"{SPECULATION}."): o.value}
    if o.key == SPECULATION:
        fields = o.value if isinstance(o.value, dict) else {"": o.value}
    method = str(fields.get("method") or settings.given(f"{SPECULATION}.method") or "")
    for name, value in fields.items():
        _field(o, out, name, value, method)


def _field(o: Override, out: Import, name: str, value: Any, method: str) -> None:
    if method not in (NGRAM, _HEAD) and not method.endswith(MTP):
        drafter = method or "a method that vLLM finds out"
        why = f"{drafter} drafts nothing here; a look-up (ngram), the model's own layer (mtp) or an EAGLE-3 head does"
        out.leave("unsupported", o.key, value, why, o.line)
    elif name == "method" and method == _HEAD:
        out.leave("implied", o.key, value, "a head drafts where rollout.speculation.method is its folder", o.line)
    elif name == "method":
        out.put("renamed", o.key, f"{_TO}method", NGRAM if method == NGRAM else MTP, line=o.line)
    elif name == "model" and method == _HEAD:
        out.put("renamed", o.key, f"{_TO}method", value, "the folder of the head", o.line)
    elif name in _SAME:
        out.put("renamed", o.key, _TO + _SAME[name], value, line=o.line)
    else:
        out.leave("unsupported", o.key, value, "is decided by rollout.speculation", o.line)


DRAFT_HANDLERS: dict[str, Handler] = {_MTP: _mtp}
