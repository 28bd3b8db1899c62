"""Models as peers write them at the end of training: verl merges what FSDP's ranks saved, slime converts Megatron's
parameters, Megatron-Bridge streams tensors into the origin's files, torch keeps the names of its wrappers, transformers
is the form that all mean.
"""

import base64
import importlib.util
import json
import pickle
import tempfile
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import distribution
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from verl.model_merger import base_model_merger
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

PEERS = ("verl", "transformers", "torch", "peft", "megatron-bridge")
RANKS = 2
LEFT_OUT = "model.layers.1.self_attn.o_proj.weight"
PADDED = 8  # rows of the vocabulary that Megatron adds
SIZES = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=40,
    max_position_embeddings=64,
    torch_dtype="bfloat16",
    pad_token_id=None,
)
MODELS = {
    "tied qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, tie_word_embeddings=False
    ),
}


def cases() -> list[dict]:
    torch.manual_seed(11)
    return [
        {"model": name, "way": way, "files": _written(save)}
        for name, config in MODELS.items()
        for way, save in _ways(config).items()
    ]


def _ways(config) -> dict[str, Callable[[str], None]]:
    """Returns what writes a model before and after training, each given the folder."""
    before = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in before.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    after = deepcopy(before)
    for parameter in after.parameters():
        parameter.data *= 1 + 0.01 * torch.randn_like(parameter)
    words = SIZES["vocab_size"]
    return {
        "origin": before.save_pretrained,
        "transformers": after.save_pretrained,
        "verl's FSDP merger": lambda out: _merged(after, out),
        "verl's FSDP merger, adapters": lambda out: _merged(_with_adapters(before), out),
        "slime": lambda out: _by_slime(after, out, words),
        "slime, padded vocabulary": lambda out: _by_slime(after, out, words + PADDED),
        "Megatron-Bridge": lambda out: _by_bridge(before, after, out),
        "Megatron-Bridge, a tensor not given": lambda out: _by_bridge(before, after, out, leaves_out=LEFT_OUT),
        "torch.compile": lambda out: _as_it_is(torch.compile(after), out),
        "DataParallel": lambda out: _as_it_is(torch.nn.DataParallel(after), out),
        "torch.save": lambda out: _pickled(after, out),
    }


def _written(save: Callable[[str], None]) -> dict[str, str]:
    """Returns the files that a peer writes, in base64."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "generation_config.json"]
        return {str(path.relative_to(folder)): base64.b64encode(path.read_bytes()).decode() for path in sorted(files)}


def _merged(model: PreTrainedModel, out: str) -> None:
    """Saves shards as verl's FSDP workers do, and merges them by verl's own class."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    with tempfile.TemporaryDirectory() as folder:
        huggingface = Path(folder) / "huggingface"
        model.config.save_pretrained(huggingface)
        (Path(folder) / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
        for rank in range(RANKS):
            held = {
                key: DTensor.from_local(tensor.float().chunk(RANKS)[rank].clone(), mesh, [Shard(0)], run_check=False)
                for key, tensor in model.state_dict().items()
            }
            torch.save(held, Path(folder) / f"model_world_size_{RANKS}_rank_{rank}.pt")
        config = base_model_merger.ModelMergerConfig(
            "merge", "fsdp", target_dir=out, local_dir=folder, hf_model_config_path=str(huggingface)
        )
        nothing = {"hf_tokenizer": lambda *a, **k: None, "hf_processor": lambda *a, **k: None}
        with mock.patch.multiple(base_model_merger, **nothing):
            FSDPModelMerger(config).merge_and_save()


def _with_adapters(model: PreTrainedModel):
    """Returns the model with trained adapters of peft, which verl's merger leaves beside the weights."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(deepcopy(model), LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    adapted.config = model.config
    return adapted


def _as_it_is(wrapped: torch.nn.Module, out: str) -> None:
    """Saves a wrapped model's state under the wrapper's own names."""
    from safetensors.torch import save_file

    state = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    save_file(state, f"{out}/model.safetensors")
    next(module for module in wrapped.modules() if isinstance(module, PreTrainedModel)).config.save_pretrained(out)


def _pickled(model: PreTrainedModel, out: str) -> None:
    torch.save(model.state_dict(), f"{out}/pytorch_model.bin")
    model.config.save_pretrained(out)


def _by_bridge(before: PreTrainedModel, after: PreTrainedModel, out: str, leaves_out: str = "") -> None:
    """Streams tensors into files as the origin has them, by Megatron-Bridge's own class; `leaves_out` never comes."""
    (file,) = (f for f in distribution("megatron-bridge").files or () if f.match("hf_pretrained/state.py"))
    spec = importlib.util.spec_from_file_location("bridge_state", file.locate())  # the package itself wants a GPU's
    state = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(state)
    with tempfile.TemporaryDirectory() as origin, tempfile.TemporaryDirectory() as trained:
        before.save_pretrained(origin, max_shard_size="8KB")  # several files, as models of the day have
        after.save_pretrained(trained)
        tensors = state.SafeTensorsStateSource(trained)
        given = ((name, tensors[name]) for name in tensors.get_all_keys() if name != leaves_out)
        with mock.patch("builtins.print"):
            state.SafeTensorsStateSource(origin).save_generator(given, out, strict=not leaves_out)
    after.config.save_pretrained(out)


# ---------------------------------------------------------------- slime


def _by_slime(model: PreTrainedModel, out: str, vocabulary: int) -> None:
    """Converts Megatron's parameters by slime's own functions. `vocabulary`: what slime is told."""
    unpickler = pickle.Unpickler
    import convert_torch_dist_to_hf as slime  # puts an unpickler of its own into pickle

    pickle.Unpickler = unpickler
    config = model.config
    said = Namespace(
        kv_channels=getattr(config, "head_dim", None),
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        num_layers=config.num_hidden_layers,
        num_experts=getattr(config, "num_experts", None),
        q_lora_rank=None,
        vocab_size=vocabulary,
    )
    name = type(config).__name__.lower()
    with mock.patch("builtins.print"):
        slime.save_tensors(said, name, _megatron(model), out, 1 << 14, vocabulary)
    config.save_pretrained(out)


def _megatron(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the parameters under Megatron's names and in its layout, the vocabulary padded, as torch_dist does."""
    config = model.config
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        from safetensors.torch import load_file

        hf = load_file(f"{folder}/model.safetensors")

    def padded(name: str) -> torch.Tensor:
        return torch.cat([hf[name], torch.zeros(PADDED, config.hidden_size, dtype=hf[name].dtype)])

    made = {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        made["output_layer.weight"] = padded("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        made |= _layer(hf, config, layer)
    return made


def _layer(hf: dict[str, torch.Tensor], config, layer: int) -> dict[str, torch.Tensor]:
    theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    groups = config.num_key_value_heads

    def joined(kind: str) -> torch.Tensor:
        parts = [hf[f"{theirs}self_attn.{p}_proj.{kind}"] for p in "qkv"]
        grouped = [part.view(groups, part.shape[0] // groups, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def gated(at: str) -> torch.Tensor:
        return torch.cat([hf[f"{theirs}{at}.gate_proj.weight"], hf[f"{theirs}{at}.up_proj.weight"]])

    made = {
        "self_attention.linear_qkv.weight": joined("weight"),
        "self_attention.linear_proj.weight": hf[f"{theirs}self_attn.o_proj.weight"],
        "self_attention.linear_qkv.layer_norm_weight": hf[f"{theirs}input_layernorm.weight"],
    }
    if f"{theirs}self_attn.q_proj.bias" in hf:
        made["self_attention.linear_qkv.bias"] = joined("bias")
    if f"{theirs}self_attn.q_norm.weight" in hf:
        made["self_attention.q_layernorm.weight"] = hf[f"{theirs}self_attn.q_norm.weight"]
        made["self_attention.k_layernorm.weight"] = hf[f"{theirs}self_attn.k_norm.weight"]
    after = hf[f"{theirs}post_attention_layernorm.weight"]
    if f"{theirs}mlp.gate.weight" not in hf:
        made["mlp.linear_fc1.layer_norm_weight"] = after
        made["mlp.linear_fc1.weight"] = gated("mlp")
        made["mlp.linear_fc2.weight"] = hf[f"{theirs}mlp.down_proj.weight"]
    else:
        made["pre_mlp_layernorm.weight"] = after
        made["mlp.router.weight"] = hf[f"{theirs}mlp.gate.weight"]
        experts = range(config.num_experts)
        made["mlp.experts.experts.linear_fc1.weight"] = torch.stack([gated(f"mlp.experts.{e}") for e in experts])
        made["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
            [hf[f"{theirs}mlp.experts.{e}.down_proj.weight"] for e in experts]
        )
    return {ours + name: tensor for name, tensor in made.items()}
