"""One rank: for each case in turn, what the actor computes of rows with images. See test_images."""

import gc
import hashlib
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from checkpoint_worker import _save
from critic_worker import _set_heads
from ranks import agree_on_port
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mrl.config.schema import RunConfig
from mrl.config.schema_actor import GRADIENTS, OPTIMIZER, PARAMETERS
from mrl.data.batch import TrainBatch
from mrl.data.row_columns import positions
from mrl.errors import DataError
from mrl.model.critic_weights import HEAD
from mrl.model.megatron_shards import local_shapes
from mrl.model.registry import inner_tensors, load_model_spec
from mrl.model.trained_tower import NAMES
from mrl.rank import vision
from mrl.rank.actor import MegatronActor, _count
from mrl.rank.critic import MegatronCritic, _for_critic, value_loss_pass
from mrl.rank.cut import MicroRows
from mrl.rank.family_ranks import _gather_shards, compared
from mrl.rank.family_reference import IMAGES, _part, _seen, batch_of, beside, pixels_of
from mrl.rank.local_parameters import plain_name
from mrl.rank.optimizer import zero_gradients
from mrl.rank.rank_load import load_rank
from mrl.rank.vision import Pixels


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    for number, case in enumerate(json.loads(cases_file.read_text())):
        config = RunConfig.model_validate(case["config"])
        folder = Path(config.model.path)
        actor = MegatronActor(config, rank, world_size, "127.0.0.1", agree_on_port(out, rank, number))
        whole = json.loads((folder / "config.json").read_text())
        found = {}
        if case["name"] == "traps":
            found = traps(actor, folder, whole, case["words"])
        elif case["name"] == "sampled":
            found = sampled(actor, whole, case["words"], case["twin"])
        elif case["name"].startswith("looked at"):
            found = looked_at(actor, whole, case["words"])
        elif case["name"].startswith("second models"):
            found = second_models(actor, folder, whole, case["words"])
        elif "checkpoint" in case:
            found = updated(actor, folder, whole, case)
        else:
            found = compared(actor, folder, case["words"])
        (out / f"{case['name']}-{rank}.json").write_text(json.dumps(found))
        actor.close()
        del actor
        gc.collect()  # groups live on in its cycles


def traps(actor: MegatronActor, folder: Path, whole: dict, words: int) -> dict:
    """Largest difference of log-probs from transformers', of rows with images and of others, if one thing is wrong."""
    batch = batch_of(words, whole)
    refused = ""
    try:
        actor.log_probs(batch)
    except DataError as error:
        refused = str(error)
    drawn = pixels_of(whole)
    actor.see(drawn)
    expected = np.load(beside(folder) / "log_probs.npy")

    def gaps() -> list[float]:
        result = actor.log_probs(batch)
        off = np.abs(result.log_probs - expected[positions(batch.response_lengths, result.rows)])
        sees = np.repeat(np.isin(result.rows, list(IMAGES)), batch.response_lengths[result.rows])
        return [float(off[sees].max()), float(off[~sees].max())]

    own = actor.vision
    found = {"none": gaps()}
    with _set(own, "_pixels", lambda name: drawn(name).flip(0)):
        found["other pixels"] = gaps()
    with _set(own, "with_positions", lambda rows: replace(rows, positions=_plain(rows))):
        found["plain positions"] = gaps()
    with _set(vision._Added, "_current", lambda added: None):
        found["no DeepStack"] = gaps()
    with _set(own, "_placed", None), _set(own, "_show", lambda *_: None):
        found["no features"] = gaps()
    axes = own._axes
    with _set(own, "_axes", axes.roll(1)):
        found["other pairs"] = gaps()
    return {"refused": refused, "gaps": found}


def sampled(actor: MegatronActor, whole: dict, words: int, twin: int) -> dict:
    """Log-probs of responses in which the model has said an image's token, and of those with its twin in place."""
    actor.see(pixels_of(whole))
    batch = batch_of(words, whole)
    ends = np.cumsum(batch.lengths)
    both = []
    for token in (whole["image_token_id"], twin):
        ids = batch.token_ids.copy()
        ids[ends - 1] = token
        ids[ends[2:] - 2] = token
        both.append(actor.log_probs(replace(batch, token_ids=ids)).log_probs)
    return {"gap": float(np.abs(both[0] - both[1]).max())}


def looked_at(actor: MegatronActor, whole: dict, words: int) -> dict:
    """The images that the tower of this rank computes in a step of three passes, and in the next step."""
    drawn, steps = pixels_of(whole), []
    actor.see(lambda name: steps[-1].append(name) or drawn(name))
    for _ in range(2):
        steps.append([])
        batch = actor.prepared(batch_of(words, whole))
        micros = actor._whole(batch).log_probs
        for _ in range(3):
            actor.policy_log_probs(batch, micros)
    return {"steps": steps}


def second_models(actor: MegatronActor, folder: Path, whole: dict, words: int) -> dict:
    """Largest differences from transformers' of a critic's values under a drawn head, of the gradients of its loss, and
    of a teacher's log-probs.
    """
    pixels = pixels_of(whole)
    actor.see(pixels)
    head = 0.1 * torch.randn(1, actor.model.hidden_size, generator=torch.Generator().manual_seed(3))
    _set_heads(actor, head)
    batch, found = batch_of(words, whole), {}
    expected = {"critic": torch.cat(values_under(head, folder, batch, pixels)).numpy()}
    expected["teacher"] = np.load(beside(folder) / "log_probs.npy")
    for name, (column, wanted) in {
        "critic": ("critic_values", expected["critic"]),
        "teacher": ("teacher_log_probs", expected["teacher"]),
    }.items():
        model = getattr(actor, name)
        own = [MicroRows(np.arange(len(batch)))]
        columns = model.columns(model.prepared(batch), own)
        if columns is not None:
            rows, values = columns
            off = values[column] - wanted[positions(batch.response_lengths, rows)]
            found[name] = float(np.abs(off).max())
    returns = np.random.default_rng(5).standard_normal(int(batch.response_lengths.sum())).astype(np.float32)
    trained = replace(batch, critic_values=expected["critic"], returns=returns)
    found["gradients"] = critic_gradients(actor.critic, trained, gradients_under(head, folder, trained, pixels))
    return found


def critic_gradients(critic: MegatronCritic, batch: TrainBatch, expected: dict) -> dict[str, float]:
    """||found - expected|| / ||expected|| of each tensor's parts on this rank, after a pass over all rows, which
    replicas share.
    """
    replica = critic.layout.dense_coords(critic.rank).dp
    own = [MicroRows(np.arange(len(batch))[replica :: critic.layout.data])]
    batch = critic.prepared(_for_critic(batch))
    distances: dict[str, float] = {}
    with critic.in_place(), critic.residence.using(PARAMETERS, GRADIENTS, OPTIMIZER):
        zero_gradients(critic.chunks, critic.optimizer)
        around = critic._around(batch, training=True, micros=own)
        value_loss_pass(critic.chunks, critic._inputs(batch, own), critic.parameters, _count(batch), around)
        for chunk in critic.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                for bucket in buffer.buckets:
                    _gather_shards(bucket.grad_data, buffer.data_parallel_group)
        held = {
            (plain_name(name), number): parameter.main_grad
            for number, chunk in enumerate(critic.chunks)
            for name, parameter in chunk.named_parameters()
        }
        assert held.keys() == local_shapes(critic.shards).keys()
        for shard in (shard for shard in critic.shards if not shard.is_constant):
            gradient = held[shard.megatron_name, shard.vp_chunk]
            for piece in shard.pieces:
                wanted = expected[piece.hf_name]
                off = gradient[piece.local_box.slices] - wanted[piece.hf_box.slices]
                share = off.norm() / wanted.norm().clamp(min=1e-12) if off.any() else 0.0
                distances[piece.hf_name] = max(distances.get(piece.hf_name, 0.0), float(share))
    return distances


def gradients_under(head: torch.Tensor, folder: Path, batch: TrainBatch, pixels: Pixels) -> dict[str, torch.Tensor]:
    """Gradients of half the mean squared error of all tokens' values, by transformers, under the names of weights."""
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    head = head.clone().requires_grad_()
    values = torch.cat(values_of(whole.model, head, batch, pixels))
    (0.5 * (values - torch.from_numpy(batch.returns)).square().mean()).backward()
    spec, found = load_model_spec(folder), {HEAD: head.grad}
    for name, parameter in whole.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for inner in inner_tensors(spec, name, tuple(parameter.shape)):
            found[inner.name] = _part(gradient, inner)
    return found


@torch.no_grad()
def values_under(head: torch.Tensor, folder: Path, batch: TrainBatch, pixels: Pixels) -> list[torch.Tensor]:
    """What a head makes of transformers' states before each token of a response, of each row."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval().model
    return values_of(model, head, batch, pixels)


def values_of(model: PreTrainedModel, head: torch.Tensor, batch: TrainBatch, pixels: Pixels) -> list[torch.Tensor]:
    ends, found = np.cumsum(batch.lengths), []
    for row, end in enumerate(ends):
        ids = torch.from_numpy(batch.token_ids[end - batch.lengths[row] : end].astype(np.int64))
        seen = _seen(batch.rows(np.array([row])), pixels)
        states = model(input_ids=ids[None], **seen).last_hidden_state[0, int(batch.prompt_lengths[row]) - 1 : -1]
        found.append((states @ head.T)[:, 0])
    return found


def updated(actor: MegatronActor, folder: Path, whole: dict, case: dict) -> dict:
    """The first update beside torch's AdamW with transformers' gradients, and the bits of weights after a second one.

    A checkpoint is written between the two, or read in place of the first.
    """
    actor.see(pixels_of(whole))
    reference = np.load(beside(folder) / "log_probs.npy")
    batch = replace(batch_of(case["words"], whole), old_log_probs=reference)
    checkpoint, found = Path(case["checkpoint"]), {}
    if checkpoint.exists():
        load_rank(actor, checkpoint)
    else:
        before = _weights(actor)
        parts = actor.update(batch).parts
        if parts and "actor/grad_norm" in parts[0]:
            found["grad_norm"] = parts[0]["actor/grad_norm"][0]
        after = _weights(actor)
        if actor.rank == 0:
            found |= _beside_torch(actor, before, after, load_file(beside(folder) / "gradients.safetensors"))
        _save(actor, checkpoint)
    actor.update(batch)
    found["bits"] = {name: hashlib.sha256(weight.numpy()).hexdigest() for name, weight in _weights(actor).items()}
    return found


def _weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in actor.export_hf()}


def _beside_torch(actor: MegatronActor, before: dict, after: dict, gradients: dict) -> dict:
    """The largest distance of a weight's step from torch's, as a share of the step, and torch's norm of gradients."""
    optim, tower = actor.config.actor.optim, actor.model.trained_tower
    weights = {name: torch.nn.Parameter(before[name].clone()) for name in before}
    groups = []
    for name, weight in weights.items():
        of_tower = name.startswith(NAMES)
        if of_tower and not tower.is_trained(name.removeprefix(NAMES)):
            continue
        weight.grad = gradients[name].clone()
        decays = weight.dim() > 1  # neither norms nor biases, as in Megatron
        groups.append({"params": [weight], "lr": optim.vision_lr if of_tower else optim.lr,
                       "weight_decay": optim.weight_decay if decays else 0.0})  # fmt: skip
    norm = torch.nn.utils.clip_grad_norm_([group["params"][0] for group in groups], optim.clip_grad)
    torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps).step()
    off = {name: (after[name] - weight.data).norm() for name, weight in weights.items()}
    steps = {name: (after[name] - before[name]).norm() for name in weights}
    frozen = [name for name, weight in weights.items() if weight.grad is None]
    return {
        "norm": float(norm),
        "off": max(float(off[name] / steps[name]) for name in weights if name not in frozen),
        "moved": [name for name in frozen if steps[name]],
        "frozen": len(frozen),
    }


@contextmanager
def _set(owner: object, name: str, value: object):
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _plain(batch) -> np.ndarray:
    each = [np.arange(length) for length in batch.sequence_lengths]
    return np.repeat(np.concatenate(each)[:, None], 3, 1).astype(np.int32)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
