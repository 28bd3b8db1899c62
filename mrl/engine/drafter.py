"""The model with which a worker of vLLM drafts (rollout.speculation.method: mtp), as a part of what weight syncs write.

Its predicting layers come with each sync, and are read back with the rest. It multiplies with the embedding and output
layer of the model itself, so those are brought once. Both of vLLM 0.32's model runners, that of CPUs and the second
version, which accelerators use, give the drafting model by `get_draft_model`. Private are the names of its modules
`model.embed_tokens`, `lm_head` and `shared_head.head`.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from mrl.model.weight_map import DRAFTING


def drafting_model(runner: Any) -> nn.Module:
    """Returns the drafting model of a worker. `runner`: vLLM's model runner.

    Raises RuntimeError where its embedding or output layer is not the model's, because no sync would renew it.
    """
    model = runner.get_model()
    drafting = runner.get_draft_model()
    heads = [layer.shared_head.head for layer in drafting.modules() if hasattr(layer, "shared_head")]
    if hasattr(drafting, "lm_head"):
        heads.append(drafting.lm_head)
    if drafting.model.embed_tokens is not model.model.embed_tokens or any(head is not model.lm_head for head in heads):
        raise RuntimeError(
            "the drafting model has an embedding or output layer of its own, which no weight sync renews: its drafts "
            "would be stale"
        )
    return drafting


class ModelThatDrafts(nn.Module):
    """A model and its drafting model as one, for weight syncs. Names of the latter begin with DRAFTING.

    Modules that both have, embedding and output layer, are found once, under the model's names.
    """

    def __init__(self, model: nn.Module, drafting: nn.Module):
        super().__init__()
        self._modules.update(model._modules)
        self._loaders = (model.load_weights, drafting.load_weights)
        if isinstance(drafting.model.layers, nn.ModuleDict):  # numbered behind the model's layers, as in checkpoints
            self._modules[DRAFTING.rstrip(".")] = drafting
            self._prefixes = tuple(f"model.layers.{number}." for number in drafting.model.layers)
        else:  # Qwen's: not numbered with the model's
            self._modules[DRAFTING.rstrip(".")] = drafting.model
            self._prefixes = ("mtp.",)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Gives each tensor of a checkpoint to the loader of its model: predicting layers to the drafting model."""
        given: tuple[list[tuple[str, Tensor]], ...] = ([], [])
        for name, tensor in weights:
            given[name.startswith(self._prefixes)].append((name, tensor))
        for loader, own in zip(self._loaders, given, strict=True):
            if own:
                loader(own)
