"""One rank: does each task in turn, in an actor of its own. See test_checkpoint.

A task starts from the Hugging Face weights or a checkpoint and may save after some updates; its weights at each of
these points are files.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from padded import read_batch
from ranks import agree_on_port
from safetensors.torch import save_file

from mrl.checkpoint.manifest import Manifest, RankFiles, write_manifest
from mrl.config.schema import RunConfig
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_load import load_rank
from mrl.rank.rank_save import HostCopy


def main(rank: int, world_size: int, out: Path, tasks: list[dict]) -> None:
    for number, task in enumerate(tasks):
        config = RunConfig.model_validate(task["config"])
        batch = read_batch(task["batch"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        folder = out / task["name"]
        folder.mkdir(exist_ok=True)
        if task["load"]:
            (folder / f"read-{rank}.json").write_text(json.dumps(asdict(load_rank(actor, Path(task["load"])))))
        _write(actor, folder / "loaded.safetensors")
        for _ in range(task["updates_before_save"]):
            actor.update(batch)
        if task["save"]:
            _save(actor, Path(task["save"]))
            _write(actor, folder / "saved.safetensors")
        actor.update(batch)
        _write(actor, folder / "updated.safetensors")
        if rank == 0:
            (folder / "report.json").write_text(json.dumps({"num_updates": actor.num_updates}))
        actor.close()


def _save(actor: MegatronActor, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f"{folder.name}.part-{actor.rank}.json"
    copy = HostCopy()
    copy.take(actor)
    part.write_text(json.dumps(copy.write(folder).to_json()))
    dist.barrier()
    if actor.rank == 0:
        parts = [
            json.loads(part.with_name(f"{folder.name}.part-{r}.json").read_text()) for r in range(dist.get_world_size())
        ]
        hf_config = json.loads((Path(actor.config.model.path) / "config.json").read_text())
        ranks = tuple(RankFiles.from_json(p) for p in parts)
        layout = actor.config.actor.layout.model_dump()
        manifest = Manifest(2, layout, actor.config.model.dtype, hf_config, ranks, {}, {})
        write_manifest(folder, replace(manifest, vision=actor.model.trained_part))
    dist.barrier()


def _write(actor: MegatronActor, path: Path) -> None:
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in actor.export_hf()}
    if actor.rank == 0:
        save_file(weights, path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
