"""Loads complete tensors as vLLM 0.32's own loader does. It is the oracle for plans and works on arrays.

It is independent of the weight map and its boxes. As in `load_weights`, names are read one by one, and each layer class
slices its tensor.
"""

from collections import defaultdict

import numpy as np

from mrl.model.hf_config import ModelSpec
from mrl.model.layout import RolloutLayout
from mrl.model.weight_map import DRAFTING

Arrays = dict[str, np.ndarray]
# packed_modules_mapping: a module of the checkpoint -> the fused module, and its position there
_FUSED_MLP = {f"{x}_proj": ("gate_up_proj", part) for part, x in enumerate(("gate", "up"))}
# for gated delta attention with separate projections
_FUSED_KINDS = {
    "in_proj_qkv": ("in_proj_qkvz", 0),
    "in_proj_z": ("in_proj_qkvz", 1),
    "in_proj_b": ("in_proj_ba", 0),
    "in_proj_a": ("in_proj_ba", 1),
}
_FUSED = {**{f"{x}_proj": ("qkv_proj", part) for part, x in enumerate("qkv")}, **_FUSED_MLP}
# for latent attention with a latent of queries; without it nothing is fused
_FUSED_LATENTS = {"q_a_proj": ("fused_qkv_a_proj", 0), "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1), **_FUSED_MLP}
_VOCABULARY = ("embed_tokens", "lm_head")
_COLUMN_PARALLEL = (
    "q_proj",
    "q_b_proj",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "fc",  # of Qwen's predicting layers
)
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")
# family -> gate, up and down projection of experts
_PLAIN_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = dict.fromkeys(("mixtral", "minimax_m2"), ("w1", "w3", "w2"))
# family -> words of names that its class has others for
_RENAMED = {"gpt_oss": {"self_attn": "attn", "embed_tokens": "embedding"}}
_TOWER = ["model", "visual"]
_OF_VALUE_HEADS = ("A_log", "dt_bias")  # parameters directly in the layer of gated delta attention


def loaded(model: ModelSpec, rollout: RolloutLayout, worker: int, hf: Arrays, transposed: bool) -> Arrays:
    """Returns the parameters of one worker after loading all tensors of `hf`.

    `transposed`: as vllm-ascend stores experts.
    """
    tp = rollout.coords(worker).tp
    slices: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, tensor in hf.items():
        if ".experts." not in name:  # scales of a matrix in FP8 are cut as its rows and columns are
            *path, module, leaf = name.split(".")
            fused, part = _fused(model).get(module, (module, 0))
            if path[:2] == _TOWER:  # each worker has the whole of it (mm_encoder_tp_mode: data)
                path = path[1:]
                local = tensor
            elif module in ("conv1d", "in_proj_qkv"):
                keys = model.linear_num_key_heads * model.linear_key_head_dim
                local = np.concatenate([_cut(part, rollout.tensor, tp) for part in np.split(tensor, (keys, 2 * keys))])
            elif module in ("qkv_proj", "gate_up_proj"):  # fused already in the checkpoint (Phi-3)
                local = _fused_part(module, tensor, model, tp, rollout.tensor)
            elif module in ("q_norm", "k_norm") and model.family == "minimax_m2":
                local = _sliced(f"{module[0]}_proj", tensor, model.num_key_value_heads, tp, rollout.tensor)
            elif leaf in (*_OF_VALUE_HEADS, "sinks"):
                local = _cut(tensor, rollout.tensor, tp)
            else:
                local = _sliced(module, tensor, model.num_key_value_heads, tp, rollout.tensor)
            names = [_RENAMED.get(model.family, {}).get(name, name) for name in (*path, fused, leaf)]
            slices[".".join(names)][part] = local
    parameters = {}
    for name, parts in slices.items():
        parameters[name] = np.concatenate([parts[part] for part in sorted(parts)])
    names = _EXPERTS.get(model.family, _PLAIN_EXPERTS)
    for prefix in sorted({name.split(".experts.")[0] + ".experts." for name in hf if ".experts." in name}):
        if model.family == "gpt_oss":
            parameters |= _biased_experts(hf, prefix, model.num_experts, rollout, worker)
        else:
            parameters |= _experts(hf, prefix, names, model.num_experts, rollout, worker, transposed)
    return {_in_drafting_model(name, model): array for name, array in parameters.items()}


def _in_drafting_model(name: str, model: ModelSpec) -> str:
    """Returns a parameter's name, which vLLM changes in predicting layers (deepseek_mtp.py: _rewrite_spec_layer_name).

    They are in another model beside it (Qwen's: qwen3_next_mtp.py, `remap_weight_names`).
    """
    if name.startswith("mtp."):
        return DRAFTING + name.removeprefix("mtp.")
    names = name.split(".")
    if names[1] != "layers" or int(names[2]) < model.num_layers:
        return name
    if names[3] not in ("enorm", "hnorm", "eh_proj", "shared_head"):
        names.insert(3, "mtp_block")
    return ".".join((DRAFTING.rstrip("."), *names))


def _fused_part(module: str, tensor: np.ndarray, model: ModelSpec, tp: int, size: int) -> np.ndarray:
    """Returns a worker's rows of a tensor that is fused in the checkpoint, kind by kind."""
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    kinds = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}[module]
    ends = {"qkv_proj": (queries, queries + keys), "gate_up_proj": (len(tensor) // 2,)}[module]
    parts = zip(kinds, np.split(tensor, ends), strict=True)
    return np.concatenate([_sliced(kind, part, model.num_key_value_heads, tp, size) for kind, part in parts])


def _fused(model: ModelSpec) -> dict[str, tuple[str, int]]:
    if not model.is_latent:
        return {**_FUSED, **_FUSED_KINDS}
    if model.q_lora_rank:
        return _FUSED_LATENTS
    return _FUSED_MLP


def _sliced(module: str, tensor: np.ndarray, kv_heads: int, tp: int, size: int) -> np.ndarray:
    """Returns a worker's part of a tensor, by the class of its layer."""
    if module in _VOCABULARY:
        rows = -(-len(tensor) // 64) * 64
        padding = np.zeros((rows - len(tensor), *tensor.shape[1:]), tensor.dtype)
        return _cut(np.concatenate([tensor, padding]), size, tp)
    if module in ("k_proj", "v_proj"):
        copies = max(1, size // kv_heads)  # of each key/value head, on neighbouring ranks
        return _cut(tensor, size // copies, tp // copies)
    if module in _COLUMN_PARALLEL:
        return _cut(tensor, size, tp)
    if module in _ROW_PARALLEL and tensor.ndim > 1:  # every worker has the whole bias, and the first one adds it
        return _cut(tensor, size, tp, axis=1)
    return tensor


def _experts(
    hf: Arrays,
    prefix: str,
    names: tuple[str, ...],
    num_experts: int,
    rollout: RolloutLayout,
    worker: int,
    transposed: bool,
) -> Arrays:
    """Returns w13 and w2 of one layer: the worker's whole experts, or a slice of each."""
    workers = rollout.workers_per_engine
    flat = worker % rollout.workers_per_engine
    spread = rollout.expert > 1
    own = np.array_split(np.arange(num_experts), workers)[flat] if spread else range(num_experts)
    parts, part = (1, 0) if spread else (workers, flat)
    stacks = {}
    for leaf in ("weight", "weight_scale_inv"):
        if f"{prefix}0.{names[0]}.{leaf}" not in hf:
            continue
        w13 = []
        w2 = []
        for expert in own:
            gate, up, down = (hf[f"{prefix}{expert}.{name}.{leaf}"] for name in names)
            w13.append(np.concatenate([_cut(gate, parts, part), _cut(up, parts, part)]))
            w2.append(_cut(down, parts, part, axis=1))
        stacks |= {f"{prefix}routed_experts.w13_{leaf}": np.stack(w13)}
        stacks |= {f"{prefix}routed_experts.w2_{leaf}": np.stack(w2)}
    return {name: stack.transpose(0, 2, 1) if transposed else stack for name, stack in stacks.items()}


def _biased_experts(hf: Arrays, prefix: str, num_experts: int, rollout: RolloutLayout, worker: int) -> Arrays:
    """Returns matrices and biases of gpt-oss' experts. The first of the workers that share one adds its last bias."""
    workers = rollout.workers_per_engine
    flat = worker % workers
    spread = rollout.expert > 1
    own = np.array_split(np.arange(num_experts), workers)[flat] if spread else range(num_experts)
    parts, part = (1, 0) if spread else (workers, flat)
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for expert in own:
        gate_up, down = (f"{prefix}{expert}.{name}_proj" for name in ("gate_up", "down"))
        found["w13_weight"].append(_cut(hf[f"{gate_up}.weight"], parts, part))
        found["w13_bias"].append(_cut(hf[f"{gate_up}.bias"], parts, part))
        found["w2_weight"].append(_cut(hf[f"{down}.weight"], parts, part, axis=1))
        found["w2_bias"].append(hf[f"{down}.bias"] * (part == 0))
    return {f"{prefix}routed_experts.{name}": np.stack(arrays) for name, arrays in found.items()}


def _cut(array: np.ndarray, parts: int, index: int, axis: int = 0) -> np.ndarray:
    """Returns one of equal parts along an axis."""
    size, rest = divmod(array.shape[axis], parts)
    if rest:
        raise ValueError(f"{array.shape} cannot be cut into {parts} parts along {axis}")
    return array[(slice(None),) * axis + (slice(index * size, (index + 1) * size),)]
