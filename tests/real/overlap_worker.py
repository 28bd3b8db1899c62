"""One data-parallel rank: two updates of several mini-batches, with what the replicas exchange at the end of a backward
or beside it. Writes what it saw; see test_overlap.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from padded import read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor


class Watch:
    """Counts bucket groups of an actor whose gradients were under way before its schedule came to their end."""

    def __init__(self, actor: MegatronActor):
        self.groups, self.early, self.stale = 0, [], []
        self.squares: list[float] = []  # of a chunk's parameters at the end of a pass, by the gradient of each
        self._parameters = [p for chunk in actor.chunks for p in chunk.parameters()]
        for chunk in actor.chunks:
            groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            self.groups += len(groups)
            chunk.finish_grad_sync = self._counting(chunk.finish_grad_sync, groups, list(chunk.parameters()))
        actor.optimizer.step_with_ready_grads = self._comparing(actor.optimizer.step_with_ready_grads)

    def _counting(self, finish, groups, parameters):
        def counted(*arguments, **named):
            self.squares.append(float(sum(p.main_grad.double().square().sum() for p in parameters)))
            self.early.append(sum(group.grad_reduce_handle is not None for group in groups))
            return finish(*arguments, **named)

        return counted

    def _comparing(self, step):
        def compared():
            answer = step()
            self.stale.append(not _equal_on_all_ranks(self._parameters))
            return answer

        return compared


def main(rank: int, world_size: int, out: Path, plan: dict) -> None:
    report = {
        name: _report(config, read_batch(plan["batch"]), rank, world_size, agree_on_port(out, rank, number))
        for number, (name, config) in enumerate(plan["configs"].items())
    }
    (out / f"report-{rank}.json").write_text(json.dumps(report))


def _report(config: dict, batch: TrainBatch, rank: int, world_size: int, port: int) -> dict:
    actor = MegatronActor(RunConfig.model_validate(config), rank, world_size, "127.0.0.1", port)
    watch = Watch(actor)
    before = actor.log_probs(batch)
    parts = [part for _ in range(2) for part in actor.update(batch).parts]
    own = [p for chunk in actor.chunks for p in chunk.parameters()]
    whole = _equal_on_all_ranks(own)
    after = actor.log_probs(batch)
    seen = {
        "norms": [part["actor/grad_norm"][0] for part in parts if "actor/grad_norm" in part],
        "replica_norms": [_of_replicas(part) for part in parts if "actor/grad_norm" in part],
        "replica": mpu.get_data_parallel_rank(),
        "squares": watch.squares,
        "log_probs": [_digest([torch.from_numpy(r.log_probs)]) if r else None for r in (before, after)],
        "weights": _digest(own),
        "moments": _digest(_moments(actor)),
        "updates": actor.num_updates,
        "whole_after": whole,
        "groups": watch.groups,
        "early": watch.early,
        "stale": watch.stale,
    }
    actor.close()
    return seen


def _of_replicas(part: dict) -> list[float]:
    names = sorted(name for name in part if name.startswith("actor/replica_grad_norm/"))
    return [part[name][0] for name in names]


def _moments(actor: MegatronActor) -> list[torch.Tensor]:
    """By parameter and in its order, whole on every rank: buckets decide which replica holds what of it."""
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    parts = [part for part in actor.optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]
    found = []
    for chunk in actor.chunks:
        for parameter in chunk.parameters():
            whole = torch.zeros(2, parameter.numel())
            for part in parts:
                _fill(whole, part, parameter)
            torch.distributed.all_reduce(whole, group=group)
            found.append(whole)
    return found


def _fill(whole: torch.Tensor, part, parameter: torch.Tensor) -> None:
    """With what an optimizer of this rank holds of the parameter's moments, if anything."""
    if parameter not in part.model_param_group_index_map:
        return
    held = part._get_model_param_range_map(parameter)["param"]
    group, order = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
    for row, name in enumerate(("exp_avg", "exp_avg_sq")):
        whole[row, held.start : held.end] = state[name].flatten()


def _equal_on_all_ranks(parameters: list[torch.Tensor]) -> bool:
    """Whether ranks hold the same bits. Every rank is a replica of the whole model, or of the same stage."""
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    mine = torch.from_numpy(np.frombuffer(bytes.fromhex(_digest(parameters)), np.uint8).copy())
    all_of_them = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(all_of_them, mine, group=group)
    return all(torch.equal(mine, other) for other in all_of_them)


def _digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
