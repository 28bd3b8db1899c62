"""One of two ranks: three updates with everything on the device, and the same with all that leaves it in between.

See test_offload.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from padded import read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.rank.actor import MegatronActor
from mrl.rank.local_parameters import LocalParameters
from mrl.rank.optimizer import step, zero_gradients
from mrl.rank.rank_parameters import rank_parameters
from mrl.rank.rank_save import HostCopy

ROUNDS = 3


def main(rank: int, world_size: int, out: Path, plan: dict) -> None:
    batch, number = read_batch(plan["batch"]), 0
    for name, configs in plan["cases"].items():
        report = {}
        for kind, watch in (("kept", nothing), ("moved", watched)):
            config = RunConfig.model_validate(configs[kind])
            actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
            report[kind] = [one_round(actor, batch, watch) for _ in range(ROUNDS)]
            actor.close()
            number += 1
        (out / f"{name}-{rank}.json").write_text(json.dumps(report))


def one_round(actor: MegatronActor, batch: TrainBatch, watch: Callable) -> dict:
    """The phases of a step, in the trainer's order, and what they left behind."""
    phases = {}

    def after(phase: str) -> None:
        phases[phase] = watch(actor)

    actor.offload()
    after("generate")
    refused = refusals(actor) if watch is watched else []
    answers = [actor.log_probs(batch)]
    after("log_prob")
    if actor.reference is not None:
        answers.append(actor.ref_log_probs(batch))
    updated = actor.update(batch).parts
    after("train")
    exported = {name: digest(tensor) for name, tensor in actor.export_hf()}
    after("sync")
    actor.offload()
    copy = HostCopy()
    copy.take(actor)
    return {
        "phases": phases, "refused": refused, "updated": updated, "exported": exported,
        "log_probs": [None if a is None else digest(torch.from_numpy(a.log_probs)) for a in answers],
        "saved": {name: digest(tensor) for name, tensor in copy.tensors.items()},
        "reference": actor.reference.digest() if actor.reference else None,
        "host": [
            sum(buffer.nbytes for buffer in actor.residence._buffers.values()),
            [p.data_ptr() for buffer in actor.residence._buffers.values() for p in buffer.pieces],
        ],
    }  # fmt: skip


def nothing(actor: MegatronActor) -> dict:
    return {}


def watched(actor: MegatronActor) -> dict[str, int]:
    """Bytes on the device, found without the code that moved them."""
    buffers = [b for chunk in actor.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {p.untyped_storage()._cdata: p.untyped_storage() for chunk in actor.chunks for p in chunk.parameters()}
    states = {}
    for part in actor.optimizer.chained_optimizers:
        adam = part.optimizer
        tensors = [p for group in adam.param_groups for p in group["params"]]
        tensors += [v for state in adam.state.values() for v in state.values() if v.dim()]
        states |= {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return {
        "parameters": sum(s.nbytes() for s in weights.values()),
        "gradients": sum(b.grad_data.untyped_storage().nbytes() for b in buffers),
        "optimizer": sum(s.nbytes() for key, s in states.items() if key not in weights),
    }


def refusals(actor: MegatronActor) -> list[str]:
    """What touching an offloaded actor past its methods ends with."""
    name = next(name for name, _ in actor.chunks[0].named_parameters()).replace("module.", "")
    attempts = (
        lambda: actor.chunks[0](None, None, None),
        lambda: LocalParameters(actor.chunks)(name, 0),
        lambda: list(rank_parameters(actor)),
        lambda: zero_gradients(actor.chunks, actor.optimizer),
        lambda: step(actor.optimizer, actor.scheduler),
    )
    return [_error(attempt) for attempt in attempts]


def _error(attempt: Callable) -> str:
    try:
        attempt()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256. Of a copy: a storage that numpy has seen cannot be resized any more."""
    return hashlib.sha256(memoryview(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy())).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
