"""Published architectures that cannot be trained with megatron-core 0.16.1 and vLLM 0.32, and what is missing where.

docs/adding_a_family.md has the same table. Others may be added by rows.
"""

_SPARSE = "it attends through a sparse indexer, which Megatron-core has as an experiment that takes no packs"
_AFTER = "it has norms after attention and MLP, too, and Megatron-core's layers have none there"
_STATE_SPACE = "it has state-space layers, which Megatron-core has in another model class without packs"
_NO_CLASS = "transformers has no class of it, so nothing could be compared with"
_AFTER_ROTATION = (
    "norms of queries and keys come after the rotation, and Megatron-core's before; vLLM has no class of its own, but "
    "runs transformers' modules"
)
_CHUNKS = "most layers attend within chunks, and Megatron-core's attention does not"
_CONSTANTS = "residuals and logits are scaled by constants that Megatron-core has not, and most have state-space layers"
# architecture -> reason
REFUSED: dict[str, str] = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": "it mixes several residual streams (hyper-connections); Megatron-core's layers have one",
    "Gemma2ForCausalLM": _AFTER,
    "Gemma3ForCausalLM": _AFTER,
    "Gemma3ForConditionalGeneration": _AFTER,
    "Gemma4ForCausalLM": _AFTER,
    "Gemma4ForConditionalGeneration": _AFTER,
    "Exaone4ForCausalLM": _AFTER,
    "Olmo2ForCausalLM": _AFTER,
    "Olmo3ForCausalLM": _AFTER,
    "Glm4ForCausalLM": _AFTER,
    "Llama4ForCausalLM": _CHUNKS,
    "Llama4ForConditionalGeneration": _CHUNKS,
    "NemotronHForCausalLM": _STATE_SPACE,
    "GraniteMoeHybridForCausalLM": _CONSTANTS,
    "Ernie4_5_MoeForCausalLM": "routers choose by a softmax plus constants, and Megatron-core has constants beside a "
    "sigmoid alone",
    "HunYuanMoEV1ForCausalLM": _AFTER_ROTATION,
    "HunYuanDenseV1ForCausalLM": _AFTER_ROTATION,
    "Step3p5ForCausalLM": "layers with a window have other numbers of heads, and Megatron-core's have one number",
    "MiMoForCausalLM": _NO_CLASS,
    "BailingMoeForCausalLM": _NO_CLASS,
    "BailingMoeV2ForCausalLM": _NO_CLASS,
    "BailingMoeV2_5ForCausalLM": _NO_CLASS,
    "Qwen3OmniMoeForConditionalGeneration": "its text model lies two configurations deep, beside others that hear and "
    "speak",
    "KimiK25ForConditionalGeneration": "its text model's tensors have other names (language_model.) beside a vision "
    "tower's, and vLLM has no class of the text alone",
}
