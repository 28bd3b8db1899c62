"""Folders of a model that also reads images around a text model, as the official ones of Qwen3.5 are."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
PRECISE = (".linear_attn.A_log", ".linear_attn.norm.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def in_whole(text: Path, folder: Path, precise: bool = False) -> dict[str, Tensor]:
    """Writes the whole around the text model in `text`, and returns its tensors as they are stored.

    `precise`: decays and their norms are in float32 whatever the others are.
    """
    shutil.copytree(text, folder, dirs_exist_ok=True)
    config = json.loads((text / "config.json").read_text())
    model_type = config["model_type"].removesuffix("_text")
    architecture = config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    inner = config | {"mtp_num_hidden_layers": 1}
    whole = {
        "architectures": [architecture], "model_type": model_type, "text_config": inner,
        "tie_word_embeddings": config["tie_word_embeddings"], "vision_config": {"model_type": f"{model_type}_vision"},
        "image_token_id": 5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    stored = _stored(load_file(text / FILE))
    if precise:
        # so little more that bfloat16 rounds it away
        stored |= {name: tensor.float() * (1 + 2**-12) for name, tensor in stored.items() if name.endswith(PRECISE)}
    save_file(stored, folder / FILE, {"format": "pt"})
    return stored


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of the whole, experts of a layer in one; with a vision tower and a layer that predicts more."""
    stored = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        inside = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        if expert := _EXPERT.fullmatch(inside):
            experts.setdefault(expert[1], {}).setdefault(int(expert[2]), {})[expert[3]] = tensor
        else:
            stored[inside] = tensor
    for prefix, parts in experts.items():
        ordered = [parts[number] for number in range(len(parts))]
        stored[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in ordered])
        stored[f"{prefix}.down_proj"] = torch.stack([part["down"] for part in ordered])
    dtype = next(iter(tensors.values())).dtype
    random = torch.Generator().manual_seed(3)
    stored["model.visual.patch_embed.proj.weight"] = torch.randn(8, 3, 2, 4, 4, generator=random).to(dtype)
    stored["model.visual.pos_embed.weight"] = torch.randn(6, 8, generator=random)  # in float32, whatever the others are
    stored["mtp.norm.weight"] = torch.zeros(64, dtype=dtype)
    return stored


def of_text(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of the text model: transformers 5.5 stores one of Qwen3.5 as its part of a whole one."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.", 1)
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                prefix = f"{name.removesuffix('gate_up_proj')}{number}"
                found |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            found |= {f"{prefix}{number}.down_proj.weight": down for number, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found
