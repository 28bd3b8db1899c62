"""vLLM's input of a request with images: tokens, and where images are among them. Workers read the images, so that no
process holds pixels but for the step of an engine that computes their features.

    front end   names of images and their grids --> vLLM's front end --> scheduler: by name, an image that many requests
                have is computed once and stays in the cache of features. Each file is compared with its name first:
                an error here ends a request, and in a worker it ends the engine
    workers     names --> encoded bytes in the run directory --> pixels, on several threads --> tower. Tensor-parallel
                workers share images out, and each reads those that its own tower computes
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mrl.data.image_reader import ImageReader
from mrl.data.samples import ImageStore
from mrl.engine.requests import Request

NAMES = "image_names"  # of an input: UTF-8 of a name, uint8 [images, characters]
_KIND = "image"  # vLLM's word for the modality
NAN = float("nan")
_THREADS = 8  # that decode images of one step, at most: Pillow and numpy leave the interpreter's lock meanwhile


class RequestImages:
    """Makes inputs in the front end of an engine."""

    def __init__(self, model: str, store: ImageStore):
        """`model`: folder of the model. Raises ConfigError as ImageReader does."""
        self._reader = ImageReader.of(model, store)

    def input_of(self, request: Request) -> dict[str, Any]:
        """Returns vLLM's `MultiModalInput`. Raises EnvironmentFault for an image that is missing or damaged."""
        self._reader.check(image.name for image in request.images)
        return image_input(request)


def image_input(request: Request) -> dict[str, Any]:
    """Returns vLLM's `MultiModalInput` of a request whose images are there."""
    from transformers import BatchFeature
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    images = request.images
    names = [image.name for image in images]
    fields = {
        NAMES: torch.tensor([list(name.encode()) for name in names], dtype=torch.uint8),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
    }
    on_host = MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True)
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(fields), dict.fromkeys(fields, on_host))
    places = [PlaceholderRange(offset=image.start, length=image.tokens) for image in images]
    return mm_input(list(request.prompt_ids), items, {_KIND: names}, {_KIND: places})


class WorkerImages:
    """Reads pixels in a worker of an engine."""

    def __init__(self, model: str, store: ImageStore):
        """`model`: folder of the model. Raises ConfigError as ImageReader does."""
        self._reader = ImageReader.of(model, store)
        self._threads = ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), "images")

    def of(self, names: Tensor, patches: Sequence[int], own: Sequence[int]) -> Tensor:
        """Returns the pixels of images, [patches of all, numbers of a patch]: NaN for those that are not this worker's.

        `names`: as in an input. `patches`: of each image. `own`: numbers of those that this worker computes. Raises
        EnvironmentFault for an image that cannot be read.
        """
        found = torch.full((sum(patches), self._reader.patch_numbers), NAN)
        places = found.split(list(patches))
        words = [bytes(names[number].tolist()).decode() for number in own]
        for number, pixels in zip(own, self._threads.map(self._reader.pixels, words), strict=True):
            places[number].copy_(torch.from_numpy(pixels))
        return found
