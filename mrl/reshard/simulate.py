"""What vLLM 0.32's loader gives a worker, as slices of full tensors; said without the boxes that the plan is made of."""

import numpy as np

from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout

Arrays = dict[str, np.ndarray]


def loaded(model: ModelSpec, rollout: RolloutLayout, worker: int, hf: Arrays, transposed: bool) -> Arrays:
    """The parameters of one worker after vLLM's own loader has seen all full tensors; `transposed`: as vllm-ascend
    stores experts.
    """
    tp, size = rollout.coords(worker).tp, rollout.tensor
    found: Arrays = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in hf:
            rows = -(-len(hf[name]) // 64) * 64
            words = np.zeros((rows, model.hidden_size), np.int32)
            words[: len(hf[name])] = hf[name]
            found[name] = _cut(words, size, tp)
    found["model.norm.weight"] = hf["model.norm.weight"]
    for layer in range(model.num_layers):
        at = f"model.layers.{layer}."
        _load_attention(found, hf, at, model.num_key_value_heads, tp, size)
        for leaf in ("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight"):
            if at + leaf in hf:
                found[at + leaf] = hf[at + leaf]
        for mlp in (f"{at}mlp.", f"{at}mlp.shared_expert."):
            if f"{mlp}gate_proj.weight" in hf:
                halves = [_cut(hf[f"{mlp}{part}_proj.weight"], size, tp) for part in ("gate", "up")]
                found[f"{mlp}gate_up_proj.weight"] = np.concatenate(halves)
                found[f"{mlp}down_proj.weight"] = _cut(hf[f"{mlp}down_proj.weight"], size, tp, axis=1)
        if layer in model.moe_layers:
            _load_experts(found, hf, f"{at}mlp.experts.", model.num_experts, rollout, worker, transposed)
    return found


def _load_attention(found: Arrays, hf: Arrays, at: str, kv_heads: int, tp: int, size: int) -> None:
    attention = f"{at}self_attn."
    for leaf in ("weight", "bias"):
        if f"{attention}q_proj.{leaf}" in hf:
            q, k, v = (hf[f"{attention}{part}_proj.{leaf}"] for part in "qkv")
            copies = max(1, size // kv_heads)  # of each key/value head, on neighbouring ranks
            heads = [_cut(x, size // copies, tp // copies) for x in (k, v)]
            found[f"{attention}qkv_proj.{leaf}"] = np.concatenate([_cut(q, size, tp), *heads])
    found[f"{attention}o_proj.weight"] = _cut(hf[f"{attention}o_proj.weight"], size, tp, axis=1)
    for norm in ("q_norm.weight", "k_norm.weight"):
        if attention + norm in hf:
            found[attention + norm] = hf[attention + norm]


def _load_experts(found: Arrays, hf: Arrays, at: str, num_experts: int, rollout: RolloutLayout, worker: int, transposed: bool) -> None:
    flat, group = worker % rollout.workers_per_engine, rollout.workers_per_engine
    spread = rollout.expert > 1
    mine = np.array_split(np.arange(num_experts), group)[flat] if spread else range(num_experts)
    parts, part = (1, 0) if spread else (group, flat)
    w13, w2 = [], []
    for expert in mine:
        gate, up, down = (hf[f"{at}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        w13.append(np.concatenate([_cut(gate, parts, part), _cut(up, parts, part)]))
        w2.append(_cut(down, parts, part, axis=1))
    for leaf, blocks in (("w13_weight", w13), ("w2_weight", w2)):
        stacked = np.stack(blocks)
        found[f"{at}routed_experts.{leaf}"] = stacked.transpose(0, 2, 1) if transposed else stacked


def _cut(array: np.ndarray, parts: int, index: int, axis: int = 0) -> np.ndarray:
    """One of equal parts along an axis."""
    size, rest = divmod(array.shape[axis], parts)
    if rest:
        raise ValueError(f"{array.shape} cannot be cut into {parts} parts along {axis}")
    return array[(slice(None),) * axis + (slice(index * size, (index + 1) * size),)]
