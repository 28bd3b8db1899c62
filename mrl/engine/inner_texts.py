"""vLLM's text models of Qwen2, Qwen3 and Qwen3-MoE for a folder whose model also reads images (Qwen2.5-VL, Qwen3-VL).

The text model's configuration lies inside that of the whole. The engine believes that positions have three numbers. A
text's three are equal, and then multimodal rotation is the plain one.
"""

import copy
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

_CHANNELS = 3


class _InsideWhole:
    """Gives the text model its own configuration, and each token of a text three equal positions."""

    supports_mrope: ClassVar[Literal[True]] = True
    own: ClassVar[str]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        whole = vllm_config.model_config.hf_config
        text = copy.deepcopy(vllm_config.model_config.hf_text_config)
        text.norm_topk_prob = True  # of experts, whose class inside the whole reads no such key
        text.tie_word_embeddings = whole.tie_word_embeddings  # the inner configuration may lack it (Qwen3-VL)
        super().__init__(vllm_config=vllm_config.with_hf_config(text, [self.own]), prefix=prefix)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Returns positions [3, tokens], and 0: the next token's position is the number of tokens."""
        return torch.arange(len(input_tokens)).expand(_CHANNELS, -1), 0


class Qwen2InsideVL(_InsideWhole, Qwen2ForCausalLM):
    """The text model of Qwen2.5-VL."""

    own = "Qwen2ForCausalLM"


class Qwen3InsideVL(_InsideWhole, Qwen3ForCausalLM):
    """The text model of Qwen3-VL."""

    own = "Qwen3ForCausalLM"


class Qwen3MoeInsideVL(_InsideWhole, Qwen3MoeForCausalLM):
    """The text model of Qwen3-VL with experts."""

    own = "Qwen3MoeForCausalLM"
