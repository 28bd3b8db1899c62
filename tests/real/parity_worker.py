"""One rank: for each case in turn, builds the actor in its layout and writes what it computes. See test_parity."""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from padded import in_rows, read_batch
from ranks import agree_on_port
from safetensors.torch import load_file, save_file
from whole_models import of_text

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor
from mrl.rank.cut import RowLengths


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        batch = read_batch(case["batch"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        _report(actor, batch, case, folder)
        actor.close()
        del actor
        gc.collect()  # groups live on in its cycles, each with threads of gloo that wake a hundred times a second


def _report(actor: MegatronActor, batch: TrainBatch, case: dict, folder: Path) -> None:
    original = of_text(load_file(Path(actor.config.model.path) / "model.safetensors"))
    exported = _exported(actor)
    report = {
        "export_names_equal": sorted(exported) == sorted(original),
        "export_differs": [n for n in exported if n not in original or not torch.equal(exported[n], original[n])],
    }
    if (result := actor.log_probs(batch)) is not None:
        np.savez(
            folder / f"log_probs-{actor.rank}.npz",
            rows=result.rows,
            log_probs=in_rows(batch, result.rows, result.log_probs),
            entropy=result.entropy,
        )
    for cut, settings in case["cuts"].items():
        _set_actor(actor, RunConfig.model_validate(case["config"]), settings)
        report.setdefault("cuts", {})[cut] = _cut_of(actor, batch)
        parts = actor.gradients(batch)
        if actor.rank == 0:
            save_file(exported_gradients(actor), folder / f"gradients-{cut}.safetensors")
        else:
            exported_gradients(actor)
        if parts:
            (folder / f"metrics-{cut}-{actor.rank}.json").write_text(json.dumps(parts))
    _set_actor(actor, actor.config, {"ppo_epochs": case["epochs"]})
    updates = [[part] for _ in range(2 // case["epochs"]) for part in actor.update(batch).parts]
    weights = _exported(actor)
    if actor.rank == 0:
        save_file(weights, folder / "updated.safetensors")
    if updates:  # those of ranks that report
        (folder / f"updates-{actor.rank}.json").write_text(json.dumps(updates))
    (folder / f"report-{actor.rank}.json").write_text(json.dumps(report))


def _set_actor(actor: MegatronActor, config: RunConfig, settings: dict) -> None:
    """`config`: the case's own, so that no cut inherits from the one before."""
    actor.config = config.model_copy(update={"actor": config.actor.model_copy(update=settings)})


def _cut_of(actor: MegatronActor, batch: TrainBatch) -> list:
    """Whether sequences are packed, and the rows of each micro-batch of each data-parallel replica."""
    splitter = actor._update_splitter  # that which `gradients` cuts by
    shares = splitter.shares(RowLengths.of(batch))
    return [splitter.shape.packed, [[micro.rows.tolist() for micro in share] for share in shares]]


def _exported(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in actor.export_hf()}


@torch.no_grad()
def exported_gradients(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """Full gradients under Hugging Face names: they take the weights' place for the length of an export."""
    for chunk in actor.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                _gather_shards(bucket.grad_data, buffer.data_parallel_group)
    parameters = [p for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.clone() for p in parameters]
    for parameter in parameters:
        parameter.copy_(parameter.main_grad)
    gradients = _exported(actor)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return gradients


def _gather_shards(gradients: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The distributed optimizer leaves each rank with its own shard of the summed gradient."""
    shards = list(gradients.chunk(group.size()))
    dist.all_gather(shards, shards[group.rank()].clone(), group=group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
