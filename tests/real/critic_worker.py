"""One rank: for each case in turn, builds the actor with a critic and writes what the critic computes.

See test_critic.
"""

import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from padded import in_rows, read_batch
from parity_worker import exported_gradients
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor, _count
from mrl.rank.bridge import ValueHead
from mrl.rank.cut import ReplicaCut, RowLengths, StepCut, step_cut


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        _report(actor, case, folder)
        actor.close()
        del actor
        gc.collect()


def _report(actor: MegatronActor, case: dict, folder: Path) -> None:
    given = np.load(case["columns"])
    batch = replace(read_batch(case["batch"]), critic_values=given["old_values"], returns=given["returns"])
    before = {name: tensor.clone() for name, tensor in actor.export_hf()}
    for_actor = replace(batch, advantages=given["returns"], old_log_probs=batch.rollout_log_probs)
    actor.gradients(for_actor)
    gradients = {name: tensor.clone() for name, tensor in exported_gradients(actor).items()}
    critic = actor.critic
    assert (critic.in_place is not nullcontext) == (case["config"]["critic"].get("layout") is not None)
    _set_heads(actor, torch.from_numpy(given["head"]))
    whole, cut = _cuts(actor, batch)
    counts = [_count(batch.rows(rows)) for rows in whole.slices]
    parts = []
    for name in ("before", "after"):
        found = critic.columns(batch, cut.log_probs)
        if found is not None:
            rows, columns = found
            values = in_rows(batch, rows, columns["critic_values"])
            np.savez(folder / f"values-{name}-{actor.rank}.npz", rows=rows, values=values)
        if name == "before":
            parts = [part for _ in range(2) for part in critic.update_replica(batch, cut.mini_batches, counts)]
    same = all(torch.equal(tensor, before[name]) for name, tensor in actor.export_hf())
    actor.gradients(for_actor)
    same &= all(torch.equal(tensor, gradients[name]) for name, tensor in exported_gradients(actor).items())
    left = dict(critic.residence.left_bytes)
    report = {"actor_stays": same, "parts": parts if critic.holds_result else [], "left": left}
    (folder / f"report-{actor.rank}.json").write_text(json.dumps(report))


def _cuts(actor: MegatronActor, batch: TrainBatch) -> tuple[StepCut, ReplicaCut]:
    """The critic's cut as the driver makes it, and this rank's part of it."""
    lengths = RowLengths.of(batch)
    layout = actor.critic.layout
    own = None
    if layout.data == actor.layout.data:
        of_actor = step_cut(actor.config, actor.layout, actor.model, lengths, step=0)
        own = [of_actor.own_rows(replica) for replica in range(layout.data)]
    whole = step_cut(actor.critic.config, layout, actor.model, lengths, own, step=0)
    return whole, whole.of(layout.dense_coords(actor.rank).dp)


@torch.no_grad()
def _set_heads(actor: MegatronActor, weight: torch.Tensor) -> None:
    """A head that says something, as none does in the beginning."""
    with actor.critic.residence.using("parameters", "optimizer"):
        for chunk in actor.critic.chunks:
            for module in chunk.modules():
                if isinstance(module, ValueHead):
                    assert not module.weight.any()
                    module.weight.copy_(weight)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
