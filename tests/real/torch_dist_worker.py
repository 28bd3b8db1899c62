"""One rank: for each task in turn, saves or loads Megatron's own model through Megatron's own dist_checkpointing, or
loads a converted checkpoint of ours into the actor. See test_torch_dist.

The model is built from Megatron's local modules, whose `sharded_state_dict` is untouched; its weights are those that
mbridge loaded into the actor, under the local modules' names.
"""

import json
import re
import sys
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from ranks import agree_on_port
from safetensors.torch import load_file

from mrl.config.schema import RunConfig
from mrl.model.layout import padded_vocab_size
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_load import load_rank

MIXED_UP = -7.0  # what the parameters hold before a load


def main(rank: int, world_size: int, out: Path, tasks: list[dict]) -> None:
    for number, task in enumerate(tasks):
        actor = MegatronActor(
            RunConfig.model_validate(task["config"]), rank, world_size, "127.0.0.1", agree_on_port(out, rank, number)
        )
        report = {"save": _save, "load": _load, "ours": _load_ours}[task["kind"]](actor, task)
        (out / f"{task['name']}-{rank}.json").write_text(json.dumps(report))
        dist.barrier()
        actor.close()


def _local_model(actor: MegatronActor, like_transformer_engine: bool) -> GPTModel:
    config = deepcopy(actor.chunks[0].config)
    config.sequence_parallel = False  # Megatron's torch norm refuses it, and no token goes through this model
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm", moe_grouped_gemm=False
    )
    if like_transformer_engine and config.num_moe_experts:
        # with its own keys the local spec gives the norm before experts a dense layer's name
        spec.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    stage, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    model = GPTModel(
        config=config, transformer_layer_spec=spec, max_sequence_length=64, pre_process=stage == 0,
        post_process=stage == stages - 1,
        vocab_size=padded_vocab_size(actor.model.vocab_size, actor.layout.tensor), position_embedding_type="rope",
        share_embeddings_and_output_weights=actor.model.tie_word_embeddings,
    )  # fmt: skip
    return model.to(config.params_dtype)  # as Megatron's own wrapper does: torch's norms are made in float32


def _bridged(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """What mbridge loaded on this rank, under the names of Megatron's local modules."""
    found = {}
    for name, parameter in actor.chunks[0].named_parameters():
        plain = re.sub(r"^(module\.)*", "", name)
        plain = plain.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        plain = plain.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        plain = re.sub(r"mlp\.experts\.(linear_fc\d)\.weight(\d+)", r"mlp.experts.local_experts.\2.\1.weight", plain)
        found[plain] = parameter.data
    return found


def _save(actor: MegatronActor, task: dict) -> dict:
    model, bridged = _local_model(actor, like_transformer_engine=False), _bridged(actor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(bridged.pop(name))
    assert not bridged, sorted(bridged)
    for style, metadata in task["styles"].items():
        state = model.sharded_state_dict(metadata=metadata)
        norm = torch.ones(4)
        replica = (0, 0, actor.rank)
        state["optimizer"] = ShardedTensor.from_rank_offsets(
            "optimizer.state.exp_avg.decoder.norm", norm, replica_id=replica
        )
        state["rng"] = ShardedObject("rng_state", {"seed": 3}, (1,), (0,), replica_id=replica)
        folder = Path(task["path"]) / style / "iter_0000007"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state | {"iteration": 7}, str(folder))
        dist.barrier()
        if actor.rank == 0:
            (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    return {}


def _load(actor: MegatronActor, task: dict) -> dict:
    """Names of parameters whose bits are not those that mbridge loads here."""
    model = _local_model(actor, like_transformer_engine=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(MIXED_UP)
    state = model.sharded_state_dict(metadata=task["metadata"])
    loaded = dist_checkpointing.load(state, task["path"])
    common = {key: loaded.pop(key) for key in ("iteration", "checkpoint_version", "content_metadata")}
    model.load_state_dict(
        {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}, strict=False
    )
    return _differences(actor, dict(model.named_parameters()), _bridged(actor)) | {"common": common}


def _load_ours(actor: MegatronActor, task: dict) -> dict:
    """The same, and names of tensors whose bits mbridge does not export as they were."""
    bridged = {name: value.clone() for name, value in _bridged(actor).items()}
    with torch.no_grad():
        for value in _bridged(actor).values():
            value.fill_(MIXED_UP)
    load_rank(actor, Path(task["path"]))
    original = load_file(Path(actor.config.model.path) / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in actor.export_hf()}
    odd = [
        n
        for n in original.keys() | exported.keys()
        if n not in original or n not in exported or not torch.equal(original[n], exported[n])
    ]
    return _differences(actor, _bridged(actor), bridged) | {"exported_wrong": odd}


def _differences(actor: MegatronActor, own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict:
    padding = padded_vocab_size(actor.model.vocab_size, actor.layout.tensor) - actor.model.vocab_size
    if padding and actor.layout.dense_coords(actor.rank).tp == actor.layout.tensor - 1:
        # rows of padding are nobody's weights
        for name in (n for n in own if "word_embeddings" in n or "output_layer" in n):
            expected[name], own[name] = expected[name][:-padding], own[name][:-padding]
    wrong = [name for name in own if name not in expected or not torch.equal(own[name], expected[name])]
    return {"wrong": wrong, "missing": sorted(expected.keys() - own.keys()), "count": len(own)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
