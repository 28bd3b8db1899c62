"""vLLM's input of a request with images: tokens, pixels and places, all processed (seeing_models.py)."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mrl.data.image_reader import ImageReader
from mrl.data.samples import ImageStore
from mrl.engine.requests import Request

_KIND = "image"  # vLLM's word for the modality
_KEPT = 4  # images whose pixels are kept: the responses to a prompt come one after the other, and may be many


class ImageInputs:
    """Makes the inputs in the process of an engine's front end."""

    def __init__(self, model: str, store: ImageStore):
        """`model`: folder of the model. Raises ConfigError as ImageReader does."""
        reader = ImageReader.of(model, store)
        self._pixels = lru_cache(_KEPT)(lambda name: torch.from_numpy(reader.pixels(name)))

    def of(self, request: Request) -> dict[str, Any]:
        """Returns vLLM's `MultiModalInput`. It takes a while: images are decoded.

        Raises EnvironmentFault for an image that cannot be read.
        """
        from transformers import BatchFeature
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        images = request.images
        grids = torch.tensor([image.grid for image in images])
        pixels: list[Tensor] = [self._pixels(image.name) for image in images]
        items = MultiModalKwargsItems.from_hf_inputs(
            BatchFeature({"pixel_values": torch.cat(pixels), "image_grid_thw": grids}),
            {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, grids.prod(-1)),
                "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
            },
        )
        places = [PlaceholderRange(offset=image.start, length=image.tokens) for image in images]
        names = [image.name for image in images]
        return mm_input(list(request.prompt_ids), items, {_KIND: names}, {_KIND: places})
