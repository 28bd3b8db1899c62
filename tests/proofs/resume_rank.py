"""One rank of a trainer without engines, that saves in the background as a run does, and is killed by resume.py.

    python tests/proofs/resume_rank.py RANK FOLDER, where FOLDER/start.json says what to do

After every update it writes a line with the SHA-256 of its weights, moments and random states.
"""

import hashlib
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from mrl.algo.rows import on_tokens
from mrl.checkpoint.manifest import Manifest, RankFiles, write_manifest
from mrl.checkpoint.step_folders import checkpoint_steps, discard, superseded, write_atomically
from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, packed
from mrl.driver.saving import BackgroundWrite
from mrl.process.free_ports import free_port
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_load import load_rank
from mrl.rank.rank_save import HostCopy

SAMPLES = 6
KEEP = 2


def main(rank: int, folder: Path) -> None:
    """Each start: (name, checkpoint to begin from, updates to have at the end, updates between saves,
    whether weights are written).
    """
    start = json.loads((folder / "start.json").read_text())
    config = RunConfig.model_validate(start["config"])
    for number, (name, load, until, save_every, weights) in enumerate(start["tasks"]):
        actor = MegatronActor(
            config, rank, config.actor.layout.world_size, "127.0.0.1", meeting_port(folder, rank, number)
        )
        if load:
            load_rank(actor, Path(load))
        train(actor, folder / name, Path(start["checkpoints"]), until, save_every, weights)
        actor.close()


def train(actor: MegatronActor, out: Path, checkpoints: Path, until: int, save_every: int, weights: bool) -> None:
    """Updates, digests, saves; the last save is complete when it returns."""
    out.mkdir(exist_ok=True)
    copy, seen, writing = HostCopy(), HostCopy(), BackgroundWrite()
    with (out / f"digests-{actor.rank}.jsonl").open("a", buffering=1) as digests:
        while actor.num_updates < until:
            actor.update(batch_of(actor.num_updates, actor.model.vocab_size))
            step = actor.num_updates
            digests.write(json.dumps([step, digest(seen, actor)]) + "\n")
            if weights:
                write_weights(actor, out / f"weights-{step}.safetensors")
            if save_every and step % save_every == 0:
                hear(writing)
                copy.take(actor)
                writing.begin(step, partial(save, actor, copy, out, checkpoints, step))
    hear(writing)


def hear(writing: BackgroundWrite) -> None:
    """Waits for the save before; one that failed ends the rank."""
    ended = writing.result(wait=True)
    if ended is not None and ended.fault:
        raise SystemExit(ended.fault)


def save(actor: MegatronActor, copy: HostCopy, out: Path, checkpoints: Path, step: int) -> None:
    """Rank 0 does what the driver of a run does; the ranks hear of the folder and answer with their parts through
    files.
    """
    if actor.rank:
        part = copy.write(Path(wait_for(out / f"begin-{step}")))
        tell(out / f"part-{step}-{actor.rank}", json.dumps(part.to_json()))
        return
    write_atomically(checkpoints / f"step-{step}", partial(write_all, actor, copy, out, step))
    for old in superseded(checkpoints, step, KEEP):
        discard(old)


def write_all(actor: MegatronActor, copy: HostCopy, out: Path, step: int, work: Path) -> None:
    """Rank 0's part, everybody else's, and the manifest."""
    tell(out / f"begin-{step}", str(work))
    own = copy.write(work)
    others = [wait_for(out / f"part-{step}-{rank}") for rank in range(1, actor.config.actor.layout.world_size)]
    ranks = (own, *(RankFiles.from_json(json.loads(text)) for text in others))
    hf_config = json.loads((Path(actor.config.model.path) / "config.json").read_text())
    layout = actor.config.actor.layout.model_dump()
    write_manifest(work, Manifest(step, layout, actor.config.model.dtype, hf_config, ranks, {}, {}))
    print(f"complete {step}, of {[s for s, _ in checkpoint_steps(work.parent)]}", flush=True)


def digest(seen: HostCopy, actor: MegatronActor) -> str:
    """Of every byte that a checkpoint of this moment would hold."""
    seen.take(actor)
    found = hashlib.sha256()
    for name, tensor in sorted(seen.tensors.items()):
        found.update(name.encode())
        found.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def write_weights(actor: MegatronActor, path: Path) -> None:
    """The whole model under Hugging Face names."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in actor.export_hf()}
    if actor.rank == 0:
        save_file(tensors, path)


def batch_of(number: int, vocab_size: int) -> TrainBatch:
    """Samples of uneven lengths, other ones for every update."""
    rng = np.random.default_rng(number)
    samples = []
    for i in range(SAMPLES):
        prompt, response = rng.integers(1, 12, 2).tolist()
        ids = rng.integers(1, vocab_size, prompt + response).tolist()
        samples.append(Sample(i, i, 0, 0, tuple(ids[:prompt]), tuple(ids[prompt:]), (0.0,) * response, "stop", 0))
    batch = TrainBatch.of(packed(samples), 1.0)
    advantages = on_tokens(rng.standard_normal(SAMPLES), batch.response_lengths).astype(np.float32)
    return replace(batch, old_log_probs=np.full_like(advantages, -np.log(vocab_size)), advantages=advantages)


def meeting_port(folder: Path, rank: int, number: int) -> int:
    """A port that rank 0 found free right before it is used."""
    if rank == 0:
        tell(folder / f"port-{number}", str(free_port()))
    return int(wait_for(folder / f"port-{number}"))


def tell(file: Path, text: str) -> None:
    """Writes a file that is whole whenever it is there."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.rename(file)


def wait_for(file: Path) -> str:
    """What `tell` wrote; whoever started the ranks ends them when it never comes."""
    while not file.exists():
        time.sleep(0.002)
    return file.read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
