"""Computes log-probs and gradients of tiny models by transformers alone: the reference of `mrl family check`.

python -m mrl.rank.family_reference JOB.json

A freshly made model is nearly uniform, so a wrong weight would hardly show. Matrices here are large, norms and biases
uneven, and constants of routers far from 0. A model that reads images gets rows with none, one and two of them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from mrl.data.batch import TrainBatch
from mrl.data.samples import RowImage, Sample, packed
from mrl.model.hf_config import TEXT_CONFIG
from mrl.model.hf_files import checkpoint_tensors
from mrl.model.registry import inner_tensors, load_model_spec
from mrl.model.weight_map import Inner
from mrl.model.wrapped import VISION_TOWER

# tokens of the prompt and of the response of each row
LENGTHS = ((3, 9), (1, 1), (12, 4), (7, 17), (2, 24), (21, 3), (6, 11))
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 2.0, -0.25, 1.5)
TEMPERATURES = (1.0, 0.7)
_CONSTANTS = ("e_score_correction_bias", "expert_bias")  # in modules and in checkpoints
_DECAY = "A_log"
# row -> first token and grid of each of its images, as in RowImage; those behind a prompt came with an answer of a tool
IMAGES = {
    2: ((3, (1, 4, 6)),),
    3: ((2, (1, 2, 2)), (12, (1, 4, 4))),
    4: ((9, (1, 2, 8)),),
    5: ((1, (1, 4, 4)), (8, (1, 2, 8))),
}
_OF_EXPERTS = "_proj_bias"  # biases of all experts together
NOT_FOR_THE_CLASS = ("architectures", "torch_dtype", "dtype", "auto_map")


def batch_of(vocab_size: int, whole: dict[str, Any] | None = None) -> TrainBatch:
    """Returns rows of drawn tokens of a vocabulary of `vocab_size`, with their advantages and without old log-probs.

    `whole`: config.json of a model that reads images. Its rows have some, and no token of an image elsewhere.
    """
    rng = np.random.default_rng(1)
    samples = []
    for row, (prompt, response) in enumerate(LENGTHS):
        ids = rng.integers(1, vocab_size, prompt + response)
        images = () if whole is None else _images_of(row, whole)
        if whole is not None:
            ids[np.isin(ids, [whole["image_token_id"], whole["video_token_id"]])] = 1
        for image in images:
            ids[image.start : image.start + image.tokens] = whole["image_token_id"]
        samples.append(
            Sample(
                row, row, row, 0, ids[:prompt].tolist(), ids[prompt:].tolist(), (0.0,) * response, "stop", 0,
                images=images,
            )
        )  # fmt: skip
    batch = TrainBatch.of(packed(samples), 1.0)
    temperature = np.resize(np.float32(TEMPERATURES), len(LENGTHS))
    advantages = np.repeat(np.float32(ADVANTAGES), [response for _, response in LENGTHS])
    return replace(batch, temperature=temperature, advantages=advantages)


def _images_of(row: int, whole: dict[str, Any]) -> tuple[RowImage, ...]:
    merged = whole["vision_config"].get("spatial_merge_size", 2) ** 2
    return tuple(
        RowImage("x".join(map(str, grid)), start, prod(grid) // merged, grid) for start, grid in IMAGES.get(row, ())
    )


def pixels_of(whole: dict[str, Any]) -> Callable[[str], Tensor]:
    """Returns the function from an image's name, which is its grid, to its pixels as the model's processor makes them,
    float32 [patches, numbers of a patch]. They are drawn. `whole`: config.json of the model.
    """
    tower = AutoConfig.for_model(**{k: v for k, v in whole.items() if k not in NOT_FOR_THE_CLASS}).vision_config
    channels = getattr(tower, "in_channels", 3)
    numbers = channels * tower.temporal_patch_size * tower.patch_size**2

    def drawn(name: str) -> Tensor:
        patches = prod(map(int, name.split("x")))
        return torch.randn(patches, numbers, generator=torch.Generator().manual_seed(patches))

    return drawn


def make(config: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Makes a model of random float32 weights by transformers' own class, and saves it."""
    keys = {key: value for key, value in config.items() if key not in NOT_FOR_THE_CLASS}
    made = AutoConfig.for_model(**keys)
    torch.manual_seed(0)
    reads_images = TEXT_CONFIG in config
    class_of = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    model = class_of.from_config(made, attn_implementation="eager").to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if VISION_TOWER[0] in name:
                continue  # its features are as large as the words' embeddings by themselves
            if name.endswith(_OF_EXPERTS):  # so large that a clamp of gate and up is seen
                parameter.add_(3 * torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.mul_(5.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith(_DECAY):  # states that are forgotten fast have gradients near 0
                parameter.sub_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith(_CONSTANTS):
                buffer.copy_(4 + 0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    if not reads_images:
        _keep_what_engines_read(config, folder)
    return model


def _keep_what_engines_read(config: dict[str, Any], folder: Path) -> None:
    """Puts back keys that transformers' class neither reads nor writes, as published folders have them."""
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "rope_scaling", "rope_theta")}
    file.write_text(json.dumps(kept | written, indent=2), encoding="utf-8")


def beside(folder: Path) -> Path:
    """Returns the folder of what transformers computes with the model in `folder`."""
    return folder.with_name(f"{folder.name}-reference")


def own_names(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a saved model under the names of the text model."""
    found: dict[str, Tensor] = {}
    model = load_model_spec(folder)
    for file in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            for inner in inner_tensors(model, key, tuple(tensor.shape)):
                found[inner.name] = _part(tensor, inner)
    return found


def _part(tensor: Tensor, inner: Inner) -> Tensor:
    if inner.is_turned:
        expert, column = inner.expert_and_column(tensor.shape[2])
        return tensor[expert, :, column : column + inner.rows].T.contiguous()
    if tensor.dim() > len(inner.shape):
        flat = tensor.reshape(-1, tensor.shape[-1])
        return flat[inner.first : inner.first + inner.rows].reshape(inner.shape).contiguous()
    return tensor.contiguous()


def log_probs(model: PreTrainedModel, batch: TrainBatch, pixels: Callable[[str], Tensor] | None = None) -> list[Tensor]:
    """Returns log-probs of the response tokens of each row, computed one row at a time and without padding.

    `pixels`: of images in the rows, as in `pixels_of`.
    """
    found = []
    ends = np.cumsum(batch.lengths)
    for row, end in enumerate(ends):
        ids = torch.from_numpy(batch.token_ids[end - batch.lengths[row] : end].astype(np.int64))
        prompt = int(batch.prompt_lengths[row])
        seen = {} if pixels is None else _seen(batch.rows(np.array([row])), pixels)
        logits = model(ids[None], **seen).logits[0, prompt - 1 : -1] / float(batch.temperature[row])
        found.append(logits.log_softmax(-1).gather(-1, ids[prompt:, None])[:, 0])
    return found


def _seen(row: TrainBatch, pixels: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Returns what transformers' class is given of a row's images."""
    if not row.image_counts[0]:
        return {}
    kinds = np.zeros(len(row.token_ids), np.int64)
    for start, tokens in zip(row.image_starts, row.image_tokens, strict=True):
        kinds[start : start + tokens] = 1
    return {
        "pixel_values": torch.cat([pixels(name.decode()) for name in row.image_names]),
        "image_grid_thw": torch.from_numpy(row.image_grids.astype(np.int64)),
        "mm_token_type_ids": torch.from_numpy(kinds)[None],
    }


def compute(config: dict[str, Any], folder: Path) -> None:
    """Saves the model of `config` in `folder`, and in `beside(folder)` what transformers computes with it.

    `log_probs.npy`: float32 [response tokens]. `gradients.safetensors`: those of GSPO's loss at a ratio of one, under
    the names of the checkpoint, with those of a vision tower.
    """
    out = beside(folder)
    out.mkdir(parents=True)
    model = make(config, folder)
    whole = config if TEXT_CONFIG in config else None
    batch = batch_of(config.get(TEXT_CONFIG, config)["vocab_size"], whole)
    rows = log_probs(model, batch, None if whole is None else pixels_of(whole))
    np.save(out / "log_probs.npy", torch.cat(rows).detach().numpy())
    # GSPO (arXiv:2507.18071), equation 5: the mean over sequences of the advantage times the ratio of sequences
    ratios = torch.stack([(row - row.detach()).mean().exp() for row in rows])
    loss = -(ratios * torch.tensor(ADVANTAGES)).mean()
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(gradients[name])
    renamed = out / "renamed"
    model.save_pretrained(renamed)
    trained = {name: tensor for name, tensor in own_names(renamed).items() if not name.endswith(_CONSTANTS)}
    save_file(trained, out / "gradients.safetensors")


def main(job: Path) -> None:
    """Computes each case of a job. What fails is written as the case's `fault`."""
    torch.set_num_threads(1)
    found = {}
    for case in json.loads(job.read_text(encoding="utf-8"))["cases"]:
        folder = Path(case["folder"])
        try:
            compute(case["config"], folder)
            stored = checkpoint_tensors(folder)
            found[case["name"]] = {"tensors": {name: list(tensor.shape) for name, tensor in stored.items()}}
        except Exception as error:  # of transformers, of whatever kind: the check names it
            found[case["name"]] = {"fault": f"{type(error).__name__}: {error}"}
    job.with_suffix(".out").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
