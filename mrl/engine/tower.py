"""The vision tower of an engine. A frozen one is read from the model's files once, and proven to stay what they have.

    start       files --> vLLM's own loader --> every parameter compared with the files, before kernels pack it
                digests of what kernels hold are noted
    each sync   brings the text model alone; digests are compared, wherever the text model is read back, too

A tower that is trained comes with each sync, and is proven as the text model is. The engine then forgets features of
images, beside prefixes.

Each worker holds the whole tower (vLLM's `mm_encoder_tp_mode: data`). vLLM itself is not imported here.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mrl.engine.constants import loose_constants, sha256_of
from mrl.engine.engine_state import SYNCS_TOWER
from mrl.errors import EnvironmentFault
from mrl.model.hf_files import in_tower, tower_tensors
from mrl.model.trained_tower import MODULE, NAMES
from mrl.reshard.digest import lane_sums

_FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}  # vLLM's parameter -> tensors of the files, one after the other
SHOWN = 4  # names in one message
_TOWER = MODULE.removesuffix(".")


def tower_of(model: nn.Module) -> nn.Module | None:
    """Returns the vision tower; None for a text model."""
    return getattr(model, _TOWER, None)


def text_of(model: nn.Module) -> nn.Module:
    """Returns the text model, which weight syncs write: the model itself, or the one inside of it."""
    if tower_of(model) is None:
        return model
    return model.language_model


class TextAndTower(nn.Module):
    """The text model and the vision tower inside an engine's model, under the names that plans have for them.

    The modules are the engine's own.
    """

    def __init__(self, whole: nn.Module):
        super().__init__()
        for name, module in text_of(whole).named_children():
            self.add_module(name, module)
        self.add_module(_TOWER, tower_of(whole))
        self._whole = [whole]  # in a list, so that it is no child

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads tensors by vLLM's loaders, given under their names in plans. Returns the parameters that were
        written.
        """
        (whole,) = self._whole
        of_tower, of_text = [], []
        for name, tensor in weights:
            (of_tower if name.startswith(NAMES) else of_text).append((name, tensor))
        written = set(whole.load_weights(of_tower)) if of_tower else set()
        return written | (set(text_of(whole).load_weights(of_text)) if of_text else set())


def syncs_tower(model_config: Any) -> bool:
    """Tells whether weight syncs bring the vision tower, too. `model_config`: vLLM's ModelConfig."""
    return bool(getattr(model_config.hf_config, SYNCS_TOWER, False))


def synced_part(model: nn.Module, model_config: Any) -> nn.Module:
    """Returns what weight syncs write: the text model, and the tower with it if it is trained.

    `model_config`: vLLM's ModelConfig.
    """
    if tower_of(model) is not None and syncs_tower(model_config):
        return TextAndTower(model)
    return text_of(model)


def load_tower(model: nn.Module, folder: Path) -> None:
    """Loads the tower from the files in `folder` by vLLM's loader. Does nothing for a text model.

    Raises EnvironmentFault unless every parameter then is what the files have.
    """
    tower = tower_of(model)
    if tower is None:
        return
    stored = dict(_read(folder))
    model.load_weights(stored.items())
    own = {in_tower(key): tensor for key, tensor in stored.items()}
    wrong = [name for name, parameter in tower.named_parameters() if not _holds(parameter.data, name, own)]
    if wrong:
        raise EnvironmentFault(
            f"model.path {folder}: vLLM's vision tower does not hold what the files have of "
            f"{', '.join(wrong[:SHOWN])}{' and more' * (len(wrong) > SHOWN)}"
        )


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file, keys in tower_tensors(folder):
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for key in keys:
                yield key, tensors.get_tensor(key)


def _holds(parameter: Tensor, name: str, stored: dict[str, Tensor]) -> bool:
    fused = next((part for part in _FUSED if f".{part}." in name), None)
    names = [name]
    if fused is not None:
        names = [name.replace(fused, part) for part in _FUSED[fused]]
    if any(each not in stored for each in names):
        return False
    expected = torch.cat([stored[each] for each in names]).to(parameter.device, parameter.dtype)
    return expected.shape == parameter.shape and torch.equal(expected, parameter)


def tower_digests(tower: nn.Module, packed: Iterator[tuple[str, Tensor]]) -> dict[str, object]:
    """Returns a digest of all that the tower computes with. `packed`: weights that only kernels hold, by layer."""
    parameters = {name: parameter.data for name, parameter in tower.named_parameters() if parameter.numel()}
    parameters |= {f"{name}.<packed>": weight for name, weight in packed}
    digests: dict[str, object] = {name: _digest(tensor) for name, tensor in parameters.items()}
    constants = dict(tower.named_buffers()) | loose_constants(tower)
    return digests | {name: sha256_of(tensor) for name, tensor in constants.items()}


def _digest(tensor: Tensor) -> list[int]:
    return lane_sums(tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[None], (0, 0)).tolist()


def check_tower(loaded: dict[str, object], held: dict[str, object]) -> None:
    """Raises RuntimeError naming what of the tower is not as it was `loaded`."""
    changed = sorted(name for name in loaded.keys() | held.keys() if loaded.get(name) != held.get(name))
    if changed:
        raise RuntimeError(
            f"the frozen vision tower of this engine has changed: {', '.join(changed[:SHOWN])}"
            f"{' and more' * (len(changed) > SHOWN)}"
        )
