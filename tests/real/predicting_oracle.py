"""DeepSeek-V3's equations of multi-token prediction (arXiv:2412.19437, 21 to 25) over transformers' own layers.

As vLLM's classes compute them: for GLM and DeepSeek the first token is joined with zeros in place of its successor's
embedding, and Qwen's norms multiply by 1 + weight.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import PreTrainedModel

COPIES = ("embed_tokens.weight", "shared_head.head.weight")


class Oracle:
    """The predicting layer of a checkpoint beside transformers' model of the same folder."""

    def __init__(self, model: PreTrainedModel, folder: Path):
        self.model = model
        self.is_qwen = model.config.model_type.startswith("qwen3")
        self.prefix = "mtp." if self.is_qwen else f"model.layers.{model.config.num_hidden_layers}."
        # norm of the embedding, norm of the hidden states, projection, last norm
        self.names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
        inside = ""
        if self.is_qwen:
            own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
            self.names = tuple(f"{name}.weight" for name in own)
            inside = "layers.0."
        self.stored = {
            name.removeprefix(self.prefix): tensor.requires_grad_(not name.endswith("correction_bias"))
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(self.prefix) and not name.endswith(COPIES)
        }
        of_layer = {name.removeprefix(inside): t for name, t in self.stored.items() if name.startswith(inside)}
        self._weights = _of_transformers(model.model.layers[-1], of_layer)

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns [tokens, words]: row i is the distribution of token i + 2, of a sequence of ids [tokens]."""
        return self.of_batch(ids[None])[0]

    def of_batch(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns [rows, tokens, words] of sequences of one length, ids [rows, tokens]."""
        model, layer = self.model, self.model.model.layers[-1]
        embedding_norm, hidden_norm, join, last_norm = self.names
        length = ids.shape[1]
        places = torch.arange(length)[None]
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            follow = model.model.embed_tokens(ids.roll(-1, 1))
            angles = model.model.rotary_emb(hidden, places)
            head = model.lm_head.weight.clone()
        if not self.is_qwen:
            follow[:, 0] = 0
        pair = torch.cat([self._norm(follow, embedding_norm), self._norm(hidden, hidden_norm)], -1)
        causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
        given = {"attention_mask": causal, "position_embeddings": angles, "position_ids": places}
        joined = pair @ self.stored[join].T
        out = torch.func.functional_call(layer, self._weights, (joined,), given)
        out = out[0] if isinstance(out, tuple) else out
        return (self._norm(out, last_norm) @ head.T).log_softmax(-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.stored[name] + self.is_qwen, self.model.config.rms_norm_eps)


def _of_transformers(layer: torch.nn.Module, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stored tensors under the names of transformers' layer, which stacks experts."""
    weights = {}
    for name, own in layer.state_dict().items():
        if name in stored:
            weights[name] = stored[name]
            continue
        experts = [f"mlp.experts.{number}." for number in range(len(own))]
        if name.endswith("experts.gate_up_proj"):
            pairs = ([stored[f"{e}{half}_proj.weight"] for half in ("gate", "up")] for e in experts)
            weights[name] = torch.stack([torch.cat(pair) for pair in pairs])
        else:
            weights[name] = torch.stack([stored[f"{e}down_proj.weight"] for e in experts])
    return weights
