"""One of two processes of `mrl family check`: compares Megatron's models with transformers' numbers, one after another.

python -m mrl.rank.family_ranks JOB.json RANK
"""

import gc
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.parallel_state import destroy_model_parallel
from safetensors.torch import load_file
from torch import Tensor

from mrl.config.schema import RunConfig
from mrl.data.row_columns import positions
from mrl.model.megatron_shards import local_shapes, source_shards
from mrl.model.registry import read_hf_config
from mrl.model.tensors import tensor_specs
from mrl.model.trained_tower import NAMES
from mrl.model.wrapped import VISION_TOWER, is_whole
from mrl.process.free_ports import free_port
from mrl.rank.actor import MegatronActor
from mrl.rank.family_reference import batch_of, beside, own_names, pixels_of

RANKS = 2


def main(job: Path, rank: int) -> None:
    """Judges this rank's share of the models that one rank has alone, then all that the ranks have together."""
    torch.set_num_threads(1)
    described = json.loads(job.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    out = job.with_suffix(f".rank-{rank}")
    for number, case in enumerate(described["alone"][rank::RANKS]):
        found[case["name"]] = _answer(case, 0, 1, job.with_suffix(f".port-{rank}-{number}"))
        out.write_text(json.dumps(found), encoding="utf-8")
    for number, case in enumerate(described["together"]):
        found[case["name"]] = _answer(case, rank, RANKS, job.with_suffix(f".port-{number}"))
        out.write_text(json.dumps(found), encoding="utf-8")
        if "fault" in found[case["name"]]:
            break  # the other rank waits for this one
    print("done", flush=True)


def _answer(case: dict[str, Any], rank: int, world_size: int, port: Path) -> dict[str, Any]:
    try:
        return _judged(case, rank, world_size, port)
    except Exception as error:  # of Megatron, of whatever kind: the check names it
        traceback.print_exc()
        return {"fault": f"{type(error).__name__}: {error}"}


def _judged(case: dict[str, Any], rank: int, world_size: int, port: Path) -> dict[str, Any]:
    config = RunConfig.model_validate(case["config"])
    actor = None
    try:
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", _agreed(port, rank))
        return compared(actor, Path(case["folder"]), case["words"])
    finally:
        closed(actor)


def closed(actor: MegatronActor | None) -> None:
    """Ends an actor's process groups, also those of one that could not be made."""
    if actor is not None:
        actor.close()
    if dist.is_initialized():
        destroy_model_parallel()
        dist.destroy_process_group()
    gc.collect()  # groups live on in its cycles


def _agreed(file: Path, rank: int) -> int:
    """Returns the port that rank 0 found for this case."""
    if rank == 0:
        part = file.with_name(file.name + ".part")
        part.write_text(str(free_port()))
        part.rename(file)
    while not file.exists():
        time.sleep(0.01)  # the program has a deadline
    return int(file.read_text())


def compared(actor: MegatronActor, folder: Path, vocab_size: int) -> dict[str, Any]:
    """Returns in what a rank differs from the model that transformers saved in `folder`, and from its numbers.

    `vocab_size`: size of the vocabulary.
    """
    found: dict[str, Any] = {"parameters": _other_parameters(actor)}
    stored = _without_frozen_tower(actor, own_names(folder))
    exported = {name: tensor.clone() for name, tensor in actor.export_hf()}
    tied = actor.model.tie_word_embeddings
    found["names"] = sorted(exported.keys() ^ {name for name in stored if not (tied and name == "lm_head.weight")})
    found["bits"] = sorted(name for name, tensor in exported.items() if not _same(tensor, stored.get(name)))
    reference = np.load(beside(folder) / "log_probs.npy")
    config = read_hf_config(folder)
    whole = config if is_whole(config) else None
    if whole is not None:
        actor.see(pixels_of(whole))
    batch = batch_of(vocab_size, whole)
    result = actor.log_probs(batch)
    if result is not None:
        expected = reference[positions(batch.response_lengths, result.rows)]
        found["log_probs"] = float(np.abs(result.log_probs - expected).max())
    actor.gradients(replace(batch, old_log_probs=reference))
    gradients = exported_gradients(actor)
    if actor.rank == 0:
        expected = _without_frozen_tower(actor, load_file(beside(folder) / "gradients.safetensors"))
        found["gradients"] = _distances(gradients, _zero_where_frozen(actor, expected))
    return found


def _without_frozen_tower(actor: MegatronActor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if actor.model.trained_tower is not None:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(VISION_TOWER)}


def _zero_where_frozen(actor: MegatronActor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns gradients of which only the projector of a vision tower has any, if that alone is trained."""
    tower = actor.model.trained_tower
    if tower is None:
        return gradients
    frozen = {NAMES + name for name, _ in tower.shapes() if not tower.is_trained(name)}
    return {name: torch.zeros_like(each) if name in frozen else each for name, each in gradients.items()}


def _same(exported: Tensor, stored: Tensor | None) -> bool:
    return stored is not None and torch.equal(exported, stored.to(exported.dtype))


def _other_parameters(actor: MegatronActor) -> list[str]:
    """Returns parameters that only one has of this rank's model and the weight map, or with other shapes."""
    described = local_shapes(source_shards(actor.model, actor.layout, actor.rank))
    held = {}
    for number, chunk in enumerate(actor.chunks):
        for name, parameter in chunk.named_parameters():
            held[name.removeprefix("module.").removeprefix("module."), number] = tuple(parameter.shape)
    return sorted(
        f"{name} {held.get((name, chunk), 'missing in Megatron')}, {described.get((name, chunk), 'no row')}"
        for name, chunk in held.keys() | described.keys()
        if held.get((name, chunk)) != described.get((name, chunk))
    )


def _distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns ||found - expected|| / ||expected|| of each tensor; infinity where only one has it."""
    distances = {}
    for name in found.keys() | expected.keys():
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            distances[name] = float("inf")
            continue
        off = (found[name] - expected[name]).norm()
        if off:
            distances[name] = (off / expected[name].norm().clamp(min=1e-12)).item()
    return distances


@torch.no_grad()
def exported_gradients(actor: MegatronActor) -> dict[str, Tensor]:
    """Returns full gradients under the checkpoint's names. They take the weights' place during an export."""
    for chunk in actor.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                _gather_shards(bucket.grad_data, buffer.data_parallel_group)
    parameters = [p for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad]
    constants = {spec.name for spec in tensor_specs(actor.model) if spec.is_constant}
    weights = [p.clone() for p in parameters]
    for parameter in parameters:
        parameter.copy_(parameter.main_grad)
    gradients = {name: tensor.clone().contiguous() for name, tensor in actor.export_hf()}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return {name: tensor for name, tensor in gradients.items() if name not in constants}


def _gather_shards(gradients: Tensor, group: dist.ProcessGroup) -> None:
    """Joins the shards of a summed gradient, of which the distributed optimizer leaves each rank its own."""
    shards = list(gradients.chunk(group.size()))
    dist.all_gather(shards, shards[group.rank()].clone(), group=group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
