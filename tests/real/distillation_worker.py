"""One rank: for each case in turn, builds the actor beside its teacher and writes what both compute. See
test_distillation.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from padded import in_rows, read_batch
from parity_worker import exported_gradients
from ranks import agree_on_port
from safetensors.torch import save_file

from mrl.config.schema import RunConfig
from mrl.config.teacher_model import TeacherModel
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor
from mrl.rank.cut import RowLengths, step_cut, teacher_cut

_OF_UPDATES = ("keep", "old_log_probs", "advantages", "loss_weights", "teacher_top_ids", "teacher_top_log_probs")


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        batch = read_batch(case["batch"])
        if "words" in case:
            batch = replace(batch, **np.load(case["words"]))
        _report(actor, batch, folder)
        actor.close()
        del actor
        gc.collect()


def _report(actor: MegatronActor, batch: TrainBatch, folder: Path) -> None:
    asked = []
    if actor.teacher is not None:
        asked = [_ask(actor, batch, folder / f"teacher-{actor.rank}.npz")]
    result = actor.log_probs(batch)
    if result is not None:
        np.savez(
            folder / f"actor-{actor.rank}.npz",
            rows=result.rows,
            log_probs=in_rows(batch, result.rows, result.log_probs),
        )
    actor.gradients(batch)
    gradients = exported_gradients(actor)
    actor.update(batch)
    weights = {name: tensor.clone().contiguous() for name, tensor in actor.export_hf()}
    if actor.rank == 0:
        save_file(gradients, folder / "gradients.safetensors")
        save_file(weights, folder / "updated.safetensors")
    if actor.teacher is not None:  # once more, beside weights that have moved
        asked.append(_ask(actor, batch, folder / f"again-{actor.rank}.npz"))
    (folder / f"report-{actor.rank}.json").write_text(json.dumps(asked))


def _ask(actor: MegatronActor, batch: TrainBatch, file: Path) -> dict:
    """Deals the rows as the driver does, and has this rank's replica of the teacher score its own."""
    config = actor.config
    teacher = actor.teacher
    cut = step_cut(config, actor.layout, actor.model, RowLengths.of(batch), step=0)
    own = [cut.own_rows(replica) for replica in range(actor.layout.data)]
    model = TeacherModel(teacher.model, teacher.layout)
    cuts = teacher_cut(config.actor, config.distillation.teacher_model, model, RowLengths.of(batch), own)
    rows, cut = cuts[teacher.layout.dense_coords(actor.rank).dp]
    part = replace(batch, **dict.fromkeys(_OF_UPDATES)).rows(rows)
    found = teacher.columns(part, cut.log_probs)
    if found is not None:
        own, columns = found
        log_probs = np.zeros((len(own), int(batch.response_lengths.max())), np.float32)
        known = in_rows(part, own, columns["teacher_log_probs"])
        log_probs[:, : known.shape[1]] = known
        words = {}
        if "teacher_top_ids" in columns:
            words = {"words": columns["teacher_top_ids"], "of_words": columns["teacher_top_log_probs"]}
        np.savez(file, rows=rows[own], log_probs=log_probs, **words)
    on_device = sum(p.untyped_storage().nbytes() for chunk in teacher._chunks for p in chunk.parameters())
    trained = [p.requires_grad for chunk in teacher._chunks for p in chunk.parameters()]
    return {"on_device": on_device, "trained": any(trained), "on_host": sum(t.nbytes for t in teacher.on_host)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
