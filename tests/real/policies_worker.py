"""One rank: reference log-probs and routes before and after updates. See test_policies."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from padded import on_all_rows, read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        batch = read_batch(case["batch"])
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        (out / f"{case['name']}-{rank}.json").write_text(json.dumps(_observed(actor, batch)))
        actor.close()


def _observed(actor: MegatronActor, batch: TrainBatch) -> dict:
    maps: list[torch.Tensor] = []
    for chunk in actor.chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(lambda _, __, output: maps.append(output[1].clone()))
    start = {name: p.detach().clone() for c in actor.chunks for name, p in c.named_parameters()}
    before = actor.log_probs(batch)
    first_maps = list(maps)
    maps.clear()
    report: dict = {"has_reference": actor.reference is not None}
    if actor.reference is not None:
        digest, ref = actor.reference.digest(), actor.ref_log_probs(batch)
        if ref is not None:
            report["kl_before"] = float(np.abs(ref.log_probs - before.log_probs).max())
        batch = TrainBatch(**(batch.arrays | {"ref_log_probs": _on_every_rank(ref, batch)}))
    old = _on_every_rank(before, batch)
    batch = TrainBatch(**(batch.arrays | {"old_log_probs": old}))
    metrics = _updates(actor, batch, maps)
    report["metrics"] = metrics
    report["differing_maps"] = sum(not torch.equal(a, b) for a, b in zip(first_maps, maps, strict=True))
    maps.clear()
    report["router_gradients"] = [
        float(p.main_grad.norm()) for c in actor.chunks for n, p in c.named_parameters() if n.endswith("router.weight")
    ]
    moved = {name: float((p - start[name]).abs().max()) for c in actor.chunks for name, p in c.named_parameters()}
    report["routers_moved"] = [change for name, change in moved.items() if name.endswith("router.weight")]
    report["others_moved"] = min(change for name, change in moved.items() if not name.endswith("router.weight"))
    if actor.reference is not None:
        after = actor.ref_log_probs(batch)
        report["reference_unchanged"] = digest == actor.reference.digest()
        if after is not None:
            report["reference_moved"] = float(np.abs(after.log_probs - ref.log_probs).max())
            report["policy_moved"] = float(np.abs(after.log_probs - actor_log_probs(actor, batch)).max())
        else:
            actor.log_probs(batch)
    return report


def _updates(actor: MegatronActor, batch: TrainBatch, maps: list[torch.Tensor]) -> list:
    """The step's updates.

    Of micro-batches that backward computes again, layer by layer, `maps` keeps the first choices.
    """
    maps.clear()
    metrics = actor.update(batch).parts
    layers = actor.model.num_layers
    if unwrap_model(actor.chunks)[0].config.recompute_granularity == "full":
        maps[:] = [chosen for first in range(0, len(maps), 2 * layers) for chosen in maps[first : first + layers]]
    return metrics


def actor_log_probs(actor: MegatronActor, batch: TrainBatch) -> np.ndarray:
    return actor.log_probs(batch).log_probs


def _on_every_rank(result, batch: TrainBatch) -> np.ndarray:
    """[response tokens] on all ranks; one data-parallel replica here, so one rank has all rows."""
    full = torch.zeros(batch.rollout_log_probs.shape)
    if result is not None:
        full += torch.from_numpy(on_all_rows(batch, result.rows, result.log_probs))
    torch.distributed.all_reduce(full)
    return full.numpy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
