"""One rank: for each case in turn, builds the actor with adapters and writes what it computes. See test_lora."""

import gc
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from padded import in_rows, read_batch
from parity_worker import _gather_shards, _set_actor
from ranks import agree_on_port
from safetensors.torch import save_file

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.model.adapters import adapter_shards
from mrl.rank.actor import MegatronActor
from mrl.rank.local_parameters import plain_name
from mrl.rank.lora_layers import Adapter


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        _report(actor, read_batch(case["batch"]), case, folder)
        actor.close()
        del actor
        gc.collect()


def _report(actor: MegatronActor, batch: TrainBatch, case: dict, folder: Path) -> None:
    if actor.config.actor.lora.dropout:
        _report_dropout(actor, batch, folder)
        return
    before = _base(actor)
    _save_log_probs(actor, batch, actor.log_probs(batch), folder / f"log_probs-{actor.rank}.npz")
    _save_log_probs(actor, batch, actor.ref_log_probs(batch), folder / f"reference-{actor.rank}.npz")
    for cut, settings in case["cuts"].items():
        _set_actor(actor, RunConfig.model_validate(case["config"]), settings)
        actor.gradients(batch)
        save_file(_gradients(actor), folder / f"gradients-{cut}-{actor.rank}.safetensors")
    versions = _versions(actor)
    exported = {name: tensor.clone().contiguous() for name, tensor in actor.export_hf()}
    untouched = versions == _versions(actor)
    if actor.rank == 0:
        save_file(exported, folder / "merged.safetensors")
    parts = [actor.update(batch).parts for _ in range(2)]
    same = all(torch.equal(weight, before[name]) for name, weight in _base(actor).items())
    after = _adapters(actor)
    save_file(after, folder / f"updated-{actor.rank}.safetensors")
    (folder / f"report-{actor.rank}.json").write_text(json.dumps({"base_stays": same and untouched, "updates": parts}))


def _versions(actor: MegatronActor) -> list[int]:
    """How often each parameter was written to."""
    return [parameter._version for chunk in actor.chunks for parameter in chunk.parameters()]


def _report_dropout(actor: MegatronActor, batch: TrainBatch, folder: Path) -> None:
    """Log-probs, masks of the first pass of each adapter, and gradients of one update twice and of the next."""
    _save_log_probs(actor, batch, actor.log_probs(batch), folder / f"log_probs-{actor.rank}.npz")
    states = get_cuda_rng_tracker().get_states()
    with _seen_masks(actor) as masks:
        actor.gradients(batch)
    found = _gradients(actor)
    save_file(found, folder / f"gradients-{actor.rank}.safetensors")
    actor.gradients(batch)
    again = _gradients(actor)
    actor.num_updates += 1
    actor.gradients(batch)
    other = _gradients(actor)
    report = {
        "masks": masks,
        "again": all(torch.equal(again[name], found[name]) for name in found),
        "other": not any(torch.equal(other[name], found[name]) for name in found),
        "left": states.keys() == get_cuda_rng_tracker().get_states().keys(),
    }
    (folder / f"report-{actor.rank}.json").write_text(json.dumps(report))


@contextmanager
def _seen_masks(actor: MegatronActor) -> Iterator[dict[str, list]]:
    """Name of each adapter's layer -> digest of what its dropout left out first, and the share of that."""
    seen: dict[str, list] = {}
    plain = Adapter._dropped
    names = {
        id(module): f"{number}.{plain_name(name)}" for number, chunk in enumerate(actor.chunks)
        for name, module in chunk.named_modules() if isinstance(module, Adapter)
    }  # fmt: skip

    def dropped(self: Adapter, x: torch.Tensor) -> torch.Tensor:
        left = plain(self, x)
        gone = (left == 0).flatten()
        digest = hashlib.sha256(gone.numpy().tobytes()).hexdigest()
        seen.setdefault(names[id(self)], [digest, gone.float().mean().item()])
        return left

    Adapter._dropped = dropped
    try:
        yield seen
    finally:
        Adapter._dropped = plain


def _save_log_probs(actor: MegatronActor, batch: TrainBatch, result, file: Path) -> None:
    if result is not None:
        np.savez(file, rows=result.rows, log_probs=in_rows(batch, result.rows, result.log_probs))


def _base(actor: MegatronActor) -> dict[str, torch.Tensor]:
    named = (
        (f"{number}.{name}", parameter) for number, chunk in enumerate(actor.chunks)
        for name, parameter in chunk.named_parameters()
    )  # fmt: skip
    return {name: parameter.detach().clone() for name, parameter in named if not parameter.requires_grad}


def _gradients(actor: MegatronActor) -> dict[str, torch.Tensor]:
    for chunk in actor.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                _gather_shards(bucket.grad_data, buffer.data_parallel_group)
    return _pieces(actor, lambda parameter: parameter.main_grad)


def _adapters(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return _pieces(actor, lambda parameter: parameter.detach())


def _pieces(actor: MegatronActor, values) -> dict[str, torch.Tensor]:
    """Each box of a factor that this rank has: "NAME|row|column" -> values."""
    parameters = {
        (number, plain_name(name)): parameter for number, chunk in enumerate(actor.chunks)
        for name, parameter in chunk.named_parameters() if parameter.requires_grad
    }  # fmt: skip
    shards = adapter_shards(actor.model, actor.layout, actor.rank, actor.lora)
    assert {(shard.vp_chunk, shard.megatron_name) for shard in shards} == parameters.keys()
    return {
        "|".join([piece.hf_name, *map(str, piece.hf_box.origin)]): values(
            parameters[shard.vp_chunk, shard.megatron_name]
        )[piece.local_box.slices].clone().contiguous()
        for shard in shards for piece in shard.pieces
    }  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
