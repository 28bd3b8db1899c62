"""One rank: log-probs, gradients and counts under routes that came with the samples. See test_routes."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from padded import in_rows, read_batch
from parity_worker import exported_gradients
from ranks import agree_on_port
from safetensors.torch import save_file

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        for name, file in case["batches"].items():
            _report(actor, read_batch(file), name, folder)
        if config.actor.router_replay == "R2":
            np.savez(folder / "recorded.npz", **_recorded(actor, read_batch(file)))
        actor.close()


def _report(actor: MegatronActor, batch: TrainBatch, name: str, folder: Path) -> None:
    result = actor.log_probs(batch)
    reference = actor.ref_log_probs(batch) if actor.reference else result
    if result is not None:
        padded = {
            name: in_rows(batch, r.rows, r.log_probs) for name, r in (("log_probs", result), ("reference", reference))
        }
        arrays = {"rows": result.rows, **padded}
        np.savez(folder / f"{name}-{actor.rank}.npz", **arrays)
    batch = replace(batch, ref_log_probs=batch.old_log_probs)
    actor.gradients(batch)
    (folder / f"{name}-{actor.rank}.json").write_text(json.dumps(actor.routing.metrics()))
    gradients = exported_gradients(actor)
    if actor.rank == 0:
        save_file(gradients, folder / f"{name}.safetensors")


def _recorded(actor: MegatronActor, batch: TrainBatch) -> dict[str, np.ndarray]:
    """Routes that one rank chose, sample by sample: [tokens, layers, topk] under the row's number;
    its micro-batches are single rows.
    """
    (chunk,) = actor.chunks
    routers = [m for m in unwrap_model(chunk).modules() if isinstance(m, TopKRouter)]
    found = {}
    for row in range(len(batch)):
        actor.log_probs(batch.rows(slice(row, row + 1)))
        length = int(batch.lengths[row])
        found[str(row)] = np.stack([r.router_replay.chosen[:length].numpy() for r in routers], axis=1)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
