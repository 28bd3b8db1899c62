"""Keys of images: which column has them, and what becomes of the vision tower."""

import re
from typing import Any

from mrl.algo.spec import NEEDS_CRITIC
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.keys import A, R
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

_DATA = ("data.train_files", "data.val_files")
_PICTURES = re.compile(r"geo(metry)?3k", re.IGNORECASE)  # verl's data set of its visual scripts; it needs no image_key
_FREEZE = A + "freeze_vision_tower"
_ASKS = ("data.image_key", _FREEZE, R + "limit_images")
_VISION = "model.vision"
_UNKNOWN = (
    "mrl does not know this model by name as one that reads images: give --set model.path=FOLDER of a Qwen2.5-VL, "
    "Qwen3-VL or Qwen3.5, and --set model.vision=frozen"
)
_FROZEN = (
    f"the vision tower stays as it is (model.vision: frozen), and verl would train it with the text model, unless "
    f"{_FREEZE} is true: here it is not trained with "
)


def _sees(settings: VerlSettings) -> bool:
    return settings.model is not None and settings.model.tower is not None


def _image_key(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value is None:
        out.leave("implied", o.key, o.value, "no images are read", o.line)
    elif _sees(settings):
        out.put("carried", o.key, "data.image_key", o.value, line=o.line)
    else:
        out.leave("unsupported", o.key, o.value, _UNKNOWN, o.line)


def _freeze(o: Override, out: Import, settings: VerlSettings) -> None:
    if not _sees(settings):
        out.leave("not_applicable", o.key, o.value, "the model has no vision tower", o.line)
    elif o.value is True:
        out.put("renamed", o.key, _VISION, "frozen", line=o.line)
    else:
        out.leave("implied", o.key, o.value, f"see {_VISION}", o.line)


def carry_images(out: Import, settings: VerlSettings) -> None:
    """Sets model.vision for a model that reads images, where the script names any; else says what is lost."""
    pictures = [key for key in _DATA if key in settings.keys and _PICTURES.search(str(settings.keys[key].value))]
    asked = pictures or any(_value(settings, key) is not None for key in _ASKS)
    if asked and _sees(settings):
        if _value(settings, _FREEZE) is not True:
            _train(out)
        return
    for key in pictures:
        given = settings.keys[key]
        out.leave("unsupported", key, given.value, f"geo3k's rows have images: {_UNKNOWN}", given.line)


def _train(out: Import) -> None:
    """Trains the tower, as verl does by default, unless something else of the script does not go with that here."""
    values = out.values
    beside = [
        what
        for what, is_there in (
            ("adapters (actor.lora)", bool(values.get("actor.lora.rank"))),
            ("a critic", values.get("algorithm.adv_estimator") in NEEDS_CRITIC),
            ("generation ahead of training (trainer.schedule)", values.get("trainer.schedule", "sync") != "sync"),
            ("overlap_grad_reduce", bool(values.get("actor.override_ddp_config.overlap_grad_reduce"))),
        )
        if is_there
    ]
    if beside:
        out.put("chosen", "", _VISION, "frozen", "the script shows images to a model that reads them")
        out.warnings.append(_FROZEN + ", ".join(beside))
        return
    out.put("implied", "", _VISION, "trained", f"verl trains the vision tower unless {_FREEZE} is true")


def _value(settings: VerlSettings, key: str) -> Any:
    given = settings.keys.get(key)
    return None if given is None else given.value


IMAGE_HANDLERS: dict[str, Handler] = {"data.image_key": _image_key, _FREEZE: _freeze}
