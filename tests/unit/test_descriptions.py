"""What a checkpoint says of its tensors, rank by rank: a reader reads what it needs of it, and finds all that it needs;
checkpoints that say it in one file, as they once did, are read.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from reshard_cases import assembled, random_layouts, tagged
from safetensors.torch import save_file
from seldom import seldom
from test_checkpoints import CONFIG, FACTS, a_checkpoint, a_manifest, flip_a_byte

from mrl.checkpoint.manifest import (
    MASTER,
    WEIGHT,
    RankFiles,
    StoredTensor,
    check_digests,
    file_facts,
    read_manifest,
    write_manifest,
)
from mrl.checkpoint.stored_boxes import Boxes
from mrl.checkpoint.tensor_names import may_hold, tensor_names
from mrl.errors import DamagedCheckpoint, EnvironmentFault
from mrl.model import model_spec
from mrl.model.boxes import Box
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, source_shards
from mrl.rank.rank_load import TensorLoader
from mrl.rank.rank_parameters import RankParameter


def saved(folder, model, layout, hf, parts: int = 1):
    """A checkpoint of `layout` whose weights are numbered; of each local tensor the moments are cut in `parts` places,
    as data-parallel ranks have them, and rank after rank has one.
    """
    folder.mkdir()
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.world_size)]
    entries: list[list[StoredTensor]] = [[] for _ in range(layout.world_size)]
    rng = np.random.default_rng(0)
    for rank in range(layout.world_size):
        for shard in source_shards(model, layout, rank):
            if shard.primary != rank:
                continue
            key, local = f"{rank}.{shard.vp_chunk}.{shard.megatron_name}", torch.from_numpy(assembled(shard, hf))
            cuts = sorted({0, *rng.integers(0, local.numel() + 1, parts - 1).tolist(), local.numel()})
            for number, flat in enumerate([None, *pairwise(cuts)]):
                writer = (rank + max(number - 1, 0)) % layout.world_size
                role = WEIGHT if flat is None else MASTER
                tensors[writer][f"{role}/{key}.{number}"] = (
                    local if flat is None else local.reshape(-1)[slice(*flat)].clone()
                )
                entries[writer].append(
                    StoredTensor(
                        f"rank-{writer:05d}.safetensors",
                        f"{role}/{key}.{number}",
                        role,
                        shard.local_shape,
                        flat,
                        shard.pieces,
                    )
                )
    ranks = []
    for rank in range(layout.world_size):
        name = f"rank-{rank:05d}.safetensors"
        save_file(tensors[rank], folder / name)
        ranks.append(RankFiles(tuple(entries[rank]), {name: file_facts(folder / name)}, FACTS))
    write_manifest(folder, a_manifest(1, tuple(ranks)))
    return folder


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_local_tensor_of_which_a_part_is_missing_is_not_whole(missing):
    whole = Box(((0, 3), (0, 4)))
    pieces = (Piece("model.norm.weight", whole, whole),)
    parts = [
        StoredTensor(f"rank-{rank:05d}.safetensors", "master/0.0.norm", MASTER, (3, 4), flat, pieces)
        for rank, flat in enumerate([(0, 5), (5, 7), (7, 12)])
    ]
    Boxes(parts).check_whole(Path("step"))
    with pytest.raises(EnvironmentFault, match="norm is stored in parts that do not add up"):
        Boxes(parts[:missing] + parts[missing + 1 :]).check_whole(Path("step"))


@pytest.mark.parametrize("seed", seldom(range(2), 0))
def test_whatever_a_rank_of_any_layout_asks_for_is_found_though_other_ranks_describe_it(tmp_path, seed):
    """Weights, and flat parts of masters that a distributed optimizer cuts elsewhere; each rank begins anew."""
    for number, (model, written) in enumerate(random_layouts(seed, 3)):
        hf = tagged(model)
        folder = saved(tmp_path / f"{number}", model, written, hf, parts=3)
        manifest = read_manifest(folder)
        rng = np.random.default_rng(seed)
        (layout, *_) = [other for known, other in random_layouts(100 * seed + number, 60) if known is model]
        for rank in range(layout.world_size):
            loader = TensorLoader(folder, manifest, check_first=False, rank=rank)
            shards = source_shards(model, layout, rank)
            for shard in (shards[i] for i in rng.permutation(len(shards))):
                whole = torch.from_numpy(assembled(shard, hf))
                found = torch.zeros_like(whole)
                loader.fill(WEIGHT, shard.pieces, found)
                assert torch.equal(found, whole)
                start, stop = sorted(rng.integers(0, whole.numel() + 1, 2).tolist())
                found.zero_()
                loader.fill(MASTER, RankParameter(shard, None, None, (start, stop)).own_pieces(), found)
                assert torch.equal(found.reshape(-1)[start:stop], whole.reshape(-1)[start:stop])
            loader.close()


def test_a_rank_of_the_same_layout_reads_its_own_description_and_no_other(tmp_path):
    """Where nobody has a replica of its part: of four pipeline stages each reads one file in four."""
    model = model_spec(CONFIG | {"num_hidden_layers": 4, "tie_word_embeddings": False})
    layout = TrainLayout.build({"world_size": 4, "pipeline_model_parallel_size": 4}, model)
    folder = saved(tmp_path / "step-1", model, layout, tagged(model))
    manifest = read_manifest(folder)
    for rank in range(4):
        aside = [folder / f"rank-{other:05d}.json" for other in range(4) if other != rank]
        contents = {file: file.read_bytes() for file in aside}
        for file in aside:
            file.unlink()
        loader = TensorLoader(folder, manifest, rank=rank)
        for shard in source_shards(model, layout, rank):
            for role in (WEIGHT, MASTER):
                loader.fill(role, shard.pieces, torch.zeros(shard.local_shape, dtype=torch.int64))
        for file, data in contents.items():
            file.write_bytes(data)


def test_the_manifest_says_nothing_of_single_tensors(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    assert "pieces" not in (path / "manifest.json").read_text()
    assert [entry["flat"] for entry in json.loads((path / "rank-00001.json").read_text())] == [[5, 12]]


def test_a_damaged_description_is_a_damaged_checkpoint(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    manifest = read_manifest(path)
    flip_a_byte(path / "rank-00000.json")
    whole = Box.whole((3, 4))
    for read in (
        lambda: check_digests(path, manifest),
        lambda: tuple(manifest.read_entries(path)),
        lambda: TensorLoader(path, manifest).fill(WEIGHT, [Piece("w", whole, whole)], torch.zeros(3, 4)),
    ):
        with pytest.raises(DamagedCheckpoint, match=r"rank-00000\.json: its bytes are not those") as damage:
            read()
        assert damage.value.folder == path
    (path / "rank-00000.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"rank-00000\.json is missing"):
        read_manifest(path)


def test_names_in_short_may_say_too_much_and_never_too_little():
    names = ["model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.4.mlp.experts.2.up_proj.weight", "lm_head"]
    short = tensor_names(names)
    assert short == {"model.layers.*.mlp.experts.*.up_proj.weight": [[3, 4], [2, 17]], "lm_head": []}
    assert all(may_hold(short, name) for name in names)
    assert may_hold(short, "model.layers.3.mlp.experts.2.up_proj.weight")
    assert not may_hold(short, "model.layers.5.mlp.experts.2.up_proj.weight")
    assert not may_hold(short, "model.layers.3.mlp.experts.2.gate_proj.weight")
