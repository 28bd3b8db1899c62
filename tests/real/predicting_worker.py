"""One rank of a run whose engines draft with the model's predicting layer: gradients, updates and a checkpoint."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from padded import read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.model import tensor_specs
from mrl.rank.actor import MegatronActor
from mrl.rank.predicting import PredictingLayer
from mrl.rank.rank_parameters import rank_parameters


def main(rank: int, world_size: int, out: Path, plan: dict) -> None:
    batch = read_batch(plan["batch"])
    report = {}
    for number, (name, config) in enumerate(plan["configs"].items()):
        port = agree_on_port(out, rank, number)
        actor = MegatronActor(RunConfig.model_validate(config), rank, world_size, "127.0.0.1", port)
        if name == plan["gradients_of"]:
            actor.gradients(batch)
            if actor.predicting is not None:
                actor.predicting.sum_gradients()
                report["loss"] = actor.predicting.metrics()["actor/mtp_loss"]
                np.savez(out / f"gradients-{rank}.npz", **_gradients(actor))
        before = _weights(actor)
        report[name] = [actor.update(batch).parts for _ in range(plan["updates"])]
        policy, layer = _weights(actor)
        torch.save(policy, out / f"{name}-{rank}.pt")
        report[f"{name} moved"] = {key: not torch.equal(before[1][key], value) for key, value in layer.items()}
        if name == plan["gradients_of"]:
            actor.gradients(batch)
            if actor.predicting is not None:
                report["kept"] = _after_a_step_without_norm(actor.predicting)
        actor.close()
    (out / f"report-{rank}.json").write_text(json.dumps(report))


def _after_a_step_without_norm(layer: PredictingLayer) -> dict[str, bool]:
    """Whether each parameter is as before, although Adam has moments."""
    before = _copies(layer.chunk)
    layer.sum_gradients()
    layer.squares()
    layer.step(float("nan"), 0.5)
    layer.chunk.start_param_sync(force_sync=True)
    return {key: torch.equal(before[key], value) for key, value in _copies(layer.chunk).items()}


def _weights(actor: MegatronActor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters of the policy, and of the predicting layer."""
    policy = {f"{n}.{key}": value for n, chunk in enumerate(actor.chunks) for key, value in _copies(chunk).items()}
    return policy, {} if actor.predicting is None else _copies(actor.predicting.chunk)


def _copies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: parameter.detach().clone() for key, parameter in module.named_parameters()}


def _gradients(actor: MegatronActor) -> dict[str, np.ndarray]:
    """This rank's part of each tensor's gradient, NaN elsewhere, by the checkpoint's names."""
    found: dict[str, np.ndarray] = {}
    shapes = {spec.name: spec.shape for spec in tensor_specs(actor.held)}
    for parameter in rank_parameters(actor):
        if not parameter.shard.megatron_name.startswith("mtp.") or parameter.flat is None:
            continue
        local = torch.full_like(parameter.parameter, float("nan")).reshape(-1)
        part = slice(*parameter.flat)
        local[part] = parameter.parameter.main_grad.reshape(-1)[part]
        local = local.reshape(parameter.parameter.shape).numpy()
        for piece in parameter.shard.pieces:
            whole = found.setdefault(piece.hf_name, np.full(shapes[piece.hf_name], np.nan, np.float32))
            own = local[piece.local_box.slices]
            here = whole[piece.hf_box.slices]
            whole[piece.hf_box.slices] = np.where(np.isnan(own), here, own)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
