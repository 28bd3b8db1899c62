"""Names of the tensors that predict further tokens (multi-token prediction), which training and engines leave out.

Checkpoints of GLM-4.5 and DeepSeek-V3 number these layers behind the model's own, and each holds a copy of the
embedding and of the output layer. Qwen's have the prefix `mtp.` and share both.
"""

from mrl.model.hf_config import ModelSpec
from mrl.model.hf_files import EMBEDDING, HEAD
from mrl.model.registry import family_of
from mrl.model.wrapped import VISION_TOWER

# ends of the names of a predicting layer's copies
_COPIES = {".embed_tokens.weight": EMBEDDING, ".shared_head.head.weight": HEAD}


def is_drafting(name: str, model: ModelSpec) -> bool:
    """Tells whether a checkpoint's tensor belongs to the predicting layers."""
    return family_of(model).is_left_out(name, model) and not name.startswith(VISION_TOWER)


def copied_tensor(name: str) -> str | None:
    """Returns which of the model's tensors a predicting layer's tensor is a copy of; None if of none."""
    return next((original for end, original in _COPIES.items() if name.endswith(end)), None)
