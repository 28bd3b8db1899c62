"""vLLM's models that read images, for engines that are given images as the model's own processor reads them.

They are vLLM's classes with a processor that never processes: an engine gets the tokens of a prompt with those of its
images among them, the images' names, and where the tokens are. Workers read the pixels (image_inputs.py). So no
tokenizer counts tokens again, and torchvision need not be installed. The tower is frozen. It is loaded once, from the
files (tower.py), and weight syncs bring the text model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.vision import get_load_balance_assignment
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from mrl.engine.image_inputs import NAMES, WorkerImages
from mrl.engine.text_models import empty_torchvision

with empty_torchvision():
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

_STEPS = 2  # of which the cache of features has all images: the one that is computed, and one that is planned beside it


class _Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of the cache of features, in tokens.

        vLLM has this cache as large as the largest image. If it is full, a prompt is cut before an image, which a CPU's
        engine must not do (Hosting.engine_arguments). A step computes no more tokens than `_STEPS` times this allows.
        """
        return {"image": _STEPS * max(seq_len, self.ctx.model_config.max_model_len)}


class _Dummy(BaseDummyInputsBuilder):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> NoReturn:
        raise NotImplementedError("engines do not process images")

    def get_dummy_mm_data(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError("engines do not process images")


class _Processor(BaseMultiModalProcessor):
    requires_tokenizer = False

    def _get_mm_fields_config(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError("engines do not process images")

    def _get_prompt_updates(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError("engines do not process images")


class _Seeing:
    """Reads images by name, and gives the text model inside what its own configuration may lack."""

    images: WorkerImages  # set by the worker before the first request

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        whole = vllm_config.model_config.hf_config
        text = whole.get_text_config()
        text.norm_topk_prob = True  # of experts, whose class inside the whole reads no such key
        text.tie_word_embeddings = whole.tie_word_embeddings
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def embed_multimodal(self, **given: Any) -> Any:
        """Returns the features of images, as the class does that is given pixels."""
        patches = given["image_grid_thw"].prod(-1).tolist()
        pixels = self.images.of(given.pop(NAMES), patches, _own_share(patches)).to(self.visual.device)
        return super().embed_multimodal(pixel_values=pixels, **given)


def _own_share(patches: Sequence[int]) -> list[int]:
    """Returns the numbers of the images that vLLM gives to this worker's tower, with `mm_encoder_tp_mode: data`."""
    workers = get_tensor_model_parallel_world_size()
    order, counts, _ = get_load_balance_assignment(list(patches), workers)
    begin = sum(counts[: get_tensor_model_parallel_rank()])
    return order[begin : begin + counts[get_tensor_model_parallel_rank()]]


_processed = MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_Dummy)


@_processed
class SeeingQwen2_5_VL(_Seeing, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""


@_processed
class SeeingQwen3VL(_Seeing, Qwen3VLForConditionalGeneration):
    """Qwen3-VL."""


@_processed
class SeeingQwen3VLMoe(_Seeing, Qwen3VLMoeForConditionalGeneration):
    """Qwen3-VL with experts."""


@_processed
class SeeingQwen3_5(_Seeing, Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""


@_processed
class SeeingQwen3_5Moe(_Seeing, Qwen3_5MoeForConditionalGeneration):
    """Qwen3.5 with experts."""
