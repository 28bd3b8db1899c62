"""The model with which a worker of vLLM drafts (rollout.speculation.method: mtp), and the proof that it is not stale.

vLLM reads it from model.path, and no training changes it. It multiplies with the embedding and output layer of the
model itself, so a weight sync renews both. Private in vLLM 0.32: `model_runner.drafter.model`, and the names of its
modules `model.embed_tokens` and `shared_head.head`.
"""

from typing import Any

from torch import Tensor

from mrl.reshard.digest import lane_sums


def draft_digests(runner: Any) -> dict[str, list[int]]:
    """Returns a digest of each parameter that the drafting model does not share, as its kernels hold it."""
    shared = {id(parameter) for parameter in runner.get_model().parameters()}
    drafting = runner.drafter.model
    return {
        name: _digest(parameter.data)
        for name, parameter in drafting.named_parameters()
        if id(parameter) not in shared and parameter.numel()
    }


def check_drafter(runner: Any, loaded: dict[str, list[int]]) -> None:
    """Raises RuntimeError naming what of the drafting model is not the model's, or not what was `loaded`."""
    model = runner.get_model()
    drafting = runner.drafter.model
    heads = [layer.shared_head.head for layer in drafting.modules() if hasattr(layer, "shared_head")]
    if drafting.model.embed_tokens is not model.model.embed_tokens or any(head is not model.lm_head for head in heads):
        raise RuntimeError(
            "the drafting model has an embedding or output layer of its own, which no weight sync renews: its drafts "
            "are stale"
        )
    held = draft_digests(runner)
    if stale := sorted(name for name in loaded.keys() | held.keys() if loaded.get(name) != held.get(name)):
        raise RuntimeError(f"the drafting model holds other weights than it loaded: {', '.join(stale[:8])}")


def _digest(tensor: Tensor) -> list[int]:
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    return lane_sums(rows, (0, 0)).tolist()
