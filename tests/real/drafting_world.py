"""A world in which drafts are accepted at first and the policy moves away: answers count digits upwards, now and then a
digit is repeated, and the reward is for repeating. The predicting layer is trained beside the model before it begins.

    python drafting_world.py FOLDER
"""

import importlib.util
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from predicting_oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny_models import with_head
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel
from world import ROOT

LENGTH = 24  # of a response
REPEATS = 0.2
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "max_position_embeddings": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True,
    "use_qk_norm": True, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "initializer_range": 0.08,
    "attn_implementation": "eager", "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip


def make(folder: Path) -> Path:
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location("make_tiny_world", ROOT / "scripts" / "make_tiny_world.py")
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tokenizer = script.make_tokenizer()
    problems = [p for p in script.split_problems(seed=0)[0] if min(p.left, p.right) > 9][:256]
    task = script.Task(tokenizer)
    prompts = torch.tensor([task._prompt_ids(problem) for problem in problems])
    ends = {"eos_token_id": script.SPECIAL.index("<eos>"), "pad_token_id": script.SPECIAL.index("<pad>")}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **ends)).float()
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    _warm_up(model, prompts, digits)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with_head(folder / "model")
    _train_head(model, folder / "model", prompts, digits)
    (folder / "data").mkdir(parents=True)
    for name, rows in (("train", problems[:128]), ("val", problems[128:144])):
        pq.write_table(pa.Table.from_pylist(script.data_rows(rows, name)), folder / "data" / f"{name}.parquet")
    return folder


def _batch(prompts: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """Sequences of prompts and answers [64, tokens]."""
    chosen = prompts[torch.randint(len(prompts), (64,))]
    steps = (torch.rand(64, LENGTH) > REPEATS).long()
    return torch.cat([chosen, digits[(torch.randint(10, (64, 1)) + steps.cumsum(1)) % 10]], 1)


def _warm_up(model: PreTrainedModel, prompts: torch.Tensor, digits: torch.Tensor) -> None:
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(250):
        ids = _batch(prompts, digits)
        logits = model(ids).logits[:, prompts.shape[1] - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, prompts.shape[1] :].flatten()).backward()
        adam.step()
        adam.zero_grad()


def _train_head(model: PreTrainedModel, folder: Path, prompts: torch.Tensor, digits: torch.Tensor) -> None:
    oracle = Oracle(model, folder)
    adam = torch.optim.Adam([t for t in oracle.stored.values() if t.requires_grad], 2e-3)
    first = prompts.shape[1]
    for step in range(250):
        ids = _batch(prompts, digits)
        log_probs = oracle.of_batch(ids)[:, first - 2 : -2]
        loss = -log_probs.gather(-1, ids[:, first:, None]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 50 == 0:
            print(f"predicting layer: {float(loss.detach()):.3f} nats", file=sys.stderr)
    file = folder / "model.safetensors"
    trained = {oracle.prefix + name: tensor.detach().contiguous() for name, tensor in oracle.stored.items()}
    save_file(load_file(file) | trained, file, metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
