"""One rank: for each case in turn, what the actor computes of rows with images. See test_images."""

import gc
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.data.row_columns import positions
from mrl.errors import DataError
from mrl.rank import vision
from mrl.rank.actor import MegatronActor
from mrl.rank.family_ranks import compared
from mrl.rank.family_reference import IMAGES, batch_of, beside, pixels_of


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
