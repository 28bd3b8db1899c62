"""Tiny checkpoints whose matrices are in FP8 with a scale a block, as DeepSeek publishes them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
LEFT_ALONE = ("embed_tokens", "lm_head", "norm", ".gate.", "bias")  # as in DeepSeek's own files
FILE = "model.safetensors"


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Each element's scale."""
    rows = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def as_bfloat16(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What a matrix in FP8 stands for, by torch."""
    return (codes.float() * spread(scales, codes.shape)).to(torch.bfloat16)


def scales_of(weight: torch.Tensor) -> torch.Tensor:
    """The largest of each block becomes 448, e4m3's largest number."""
    blocks = [-(-size // BLOCK) for size in weight.shape]
    scales = torch.empty(blocks)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = block.abs().max() / 448
    return scales


def in_fp8(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in FP8; returns what its tensors stand for."""
    folder.mkdir(exist_ok=True)
    stored, meant = {}, {}
    for name, tensor in load_file(plain / FILE).items():
        stored[name] = meant[name] = tensor
        if not any(part in name for part in LEFT_ALONE):
            scales = scales_of(tensor.float())
            stored[name] = (tensor.float() / spread(scales, tensor.shape)).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            meant[name] = as_bfloat16(stored[name], scales)
    save_file(stored, folder / FILE, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return meant
