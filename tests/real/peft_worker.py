"""Loads adapters by PEFT, perhaps with another transformers, and writes what its model computes. See test_peft."""

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
MARK = ".default.weight"  # PEFT names a factor lora_A.default.weight, and without the adapter's name in files


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """A sum of log-probs of the next words, each with a weight of its own."""
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (log_probs * torch.linspace(-1, 1, log_probs.numel()).reshape(log_probs.shape)).sum()


def main(folder: Path) -> None:
    import peft  # the test imports this module without it
    import transformers

    torch.set_num_threads(1)
    ids = load_file(folder / "ids.safetensors")["ids"]
    given = {"attn_implementation": "eager", "torch_dtype": torch.float32}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **given).eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval()
    logits = model(ids).logits
    loss_of(logits, ids).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {f"{name.removesuffix(MARK)}.weight": each.grad for name, each in trained.items()}
    save_file({"logits": logits.detach()}, folder / "logits.safetensors")
    save_file({name.removeprefix(PREFIX): each for name, each in gradients.items()}, folder / "gradients.safetensors")
    model.save_pretrained(folder / "saved")
    missing = [str(each.message) for each in said if "missing adapter keys" in str(each.message)]
    facts = {"peft": peft.__version__, "transformers": transformers.__version__, "missing": missing}
    (folder / "report.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
