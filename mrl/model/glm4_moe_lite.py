"""GLM-4.7-Flash: DeepSeek-V3's layers, with a router that vLLM keeps in float32, as GLM-4.5's."""

from mrl.model.decoder_weights import dense_layer
from mrl.model.deepseek_v3 import VLLM_ORDER, engine_keys, read
from mrl.model.glm4_moe import is_left_out, with_shared_experts
from mrl.model.weight_map import DEEPSEEK_NAMES, Family

FAMILY = Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    read,
    dense_layer,
    with_shared_experts,
    vllm_order=VLLM_ORDER,
    predicting=DEEPSEEK_NAMES,
    is_left_out=is_left_out,
    engine_keys=engine_keys,
)
