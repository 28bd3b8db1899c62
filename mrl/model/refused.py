"""Published architectures that cannot be trained with megatron-core 0.16.1 and vLLM 0.32, and what is missing where.

docs/adding_a_family.md has the same table. Others may be added by rows.
"""

_SPARSE = "it attends through a sparse indexer, which Megatron-core has as an experiment that takes no packs"
_AFTER = "norms stand after attention and MLP, too, and Megatron-core's layers have none there"
_STATE_SPACE = "it has state-space layers, which Megatron-core has in another model class without packs"
_NO_CLASS = "transformers has no class of it, so nothing could be compared with"
# architecture -> reason
REFUSED: dict[str, str] = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": "it mixes several residual streams (hyper-connections); Megatron-core's layers have one",
    "Gemma3ForCausalLM": _AFTER,
    "Gemma3ForConditionalGeneration": _AFTER,
    "Gemma4ForCausalLM": _AFTER,
    "Gemma4ForConditionalGeneration": _AFTER,
    "Olmo2ForCausalLM": _AFTER,
    "Olmo3ForCausalLM": _AFTER,
    "Glm4ForCausalLM": _AFTER,
    "Llama4ForCausalLM": "experts get inputs weighed by the router, and some layers attend in chunks without rotation",
    "Llama4ForConditionalGeneration": "experts get inputs weighed by the router, and some layers attend in chunks "
    "without rotation",
    "NemotronHForCausalLM": _STATE_SPACE,
    "GraniteMoeHybridForCausalLM": _STATE_SPACE,
    "Ernie4_5_MoeForCausalLM": "routers choose by a softmax plus constants, and Megatron-core has constants beside a "
    "sigmoid alone",
    "HunYuanMoEV1ForCausalLM": "norms of queries and keys come after the rotation, and Megatron-core's before",
    "HunYuanDenseV1ForCausalLM": "norms of queries and keys come after the rotation, and Megatron-core's before",
    "Step3p5ForCausalLM": "layers differ in their windows and numbers of heads, and Megatron-core's are alike",
    "MiMoForCausalLM": _NO_CLASS,
    "BailingMoeForCausalLM": _NO_CLASS,
    "BailingMoeV2ForCausalLM": _NO_CLASS,
    "Qwen3OmniMoeForConditionalGeneration": "its text model lies two configurations deep, beside others that hear and "
    "speak",
    "KimiK25ForConditionalGeneration": "its text model, DeepSeek-V3's, lies under other names beside a vision tower",
}
