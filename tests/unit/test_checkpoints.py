"""Checkpoints on disk: what is written reads back, damage is found and passed over,
and nothing that is needed is removed.
"""

import itertools
import json
import os
import pickle
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from reshard_cases import assembled, random_layouts, tagged
from safetensors.torch import save_file
from seldom import seldom

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.manifest import (
    WEIGHT,
    Manifest,
    RankFiles,
    StoredTensor,
    check_digest,
    check_digests,
    facts_of,
    file_facts,
    read_manifest,
    sealed,
    share_of_files,
    write_manifest,
)
from mrl.checkpoint.open_checkpoint import open_saved, whole_tensor
from mrl.checkpoint.planned_file import file_portions
from mrl.checkpoint.step_folders import checkpoint_steps, newest_checkpoint, set_aside, superseded, write_atomically
from mrl.driver.resume import rewind
from mrl.errors import DamagedCheckpoint, EnvironmentFault, NumericAbort
from mrl.model import model_spec, tensor_specs
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece, source_shards
from mrl.rank.adam_state import AdamState
from mrl.rank.rank_load import TensorLoader
from mrl.rank.rank_parameters import RankParameter
from mrl.record.run_dir import RunDir

FACTS = {"step": 2.0, "num_updates": 2, "lr": 0.5, "scheduler": {"num_steps": 3}}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "intermediate_size": 8, "max_position_embeddings": 32,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def a_manifest(step: int, ranks: tuple[RankFiles, ...]) -> Manifest:
    trainer = {"cursor": {"epoch": 0, "index": 4}, "metrics": {"actor/lr": 0.5}}
    return Manifest(step, {"world_size": len(ranks)}, "float32", CONFIG, ranks, trainer, {"torch": "2"})


def a_checkpoint(folder, step: int, facts=(FACTS, FACTS), cut: int = 5):
    """One tensor 0..11 of shape [3, 4], each rank with a flat part of it."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    whole, values = Box.whole((3, 4)), torch.arange(12.0)
    ranks = []
    for rank, optimizer in enumerate(facts):
        flat = (0, cut) if rank == 0 else (cut, 12)
        name, key = f"rank-{rank:05d}.safetensors", "weight/0.w"
        save_file({key: values[slice(*flat)].clone()}, path / name)
        ranks.append(
            RankFiles(
                (StoredTensor(name, key, WEIGHT, (3, 4), flat, (Piece("w", whole, whole),)),),
                {name: file_facts(path / name)},
                optimizer,
            )
        )
    write_manifest(path, a_manifest(step, tuple(ranks)))
    return path


def change_description(path, rank: int, change) -> None:
    """As if the rank had said something else of what it wrote: `change` alters its entries, plain data."""
    file = path / f"rank-{rank:05d}.json"
    entries = json.loads(file.read_text())
    change(entries)
    file.write_text(json.dumps(entries))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["ranks"][rank]["description"] = {file.name: file_facts(file)}
    (path / "manifest.json").write_text(json.dumps(sealed(manifest)))


@pytest.mark.parametrize(
    "boxes",
    [
        ([[0, 3], [0, 4]], [[2, 5], [0, 4]]),
        ([[0, 3], [0, 4]], [[0, 2], [0, 4]]),
        ([[0, 3], [0, 4]], [[0, 3]]),
        ([[0, 3], [0, 4]], [[0, 4], [0, 3]]),
    ],
    ids=["outside of its tensor", "smaller", "of another rank", "turned"],
)
def test_a_piece_that_does_not_lie_in_its_tensor_is_told_whoever_reads_it(tmp_path, boxes):
    """Also where the digests are right."""
    path = a_checkpoint(tmp_path, 1)
    change_description(path, 0, lambda entries: entries[0].update(pieces=[["w", *boxes]]))
    with pytest.raises(EnvironmentFault, match=r"rank-00000\.json: not the description of a rank.*w at"):
        list(read_manifest(path).read_entries(path))


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.json"])
def test_a_checkpoint_whose_file_is_a_link_is_refused(tmp_path, name):
    path = a_checkpoint(tmp_path, 1)
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    with pytest.raises(EnvironmentFault, match=f"{name} is a link, and a checkpoint has files of its own"):
        read_manifest(path)


def flip_a_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    rank = RankFiles(
        (
            StoredTensor("r", "k", WEIGHT, (2, 3), None, (Piece("a", Box(((0, 2), (3, 6))), Box(((0, 2), (0, 3)))),)),
            StoredTensor("r", "l", "exp_avg", (4,), (1, 3), ()),
        ),
        {},
        FACTS,
    )
    manifest = replace(a_manifest(7, (rank,)), hf_files={"config.json": facts_of(b"{}")})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    write_manifest(tmp_path, manifest)
    found = read_manifest(tmp_path)
    assert tuple(found.read_entries(tmp_path)) == rank.entries
    assert replace(found, ranks=()) == replace(manifest, ranks=())
    assert [(part.files, part.optimizer) for part in found.ranks] == [(rank.files, rank.optimizer)]
    assert json.loads((tmp_path / "manifest.json").read_text())["num_updates"] == 2


def test_a_checkpoint_whose_ranks_disagree_is_neither_written_nor_read(tmp_path):
    with pytest.raises(NumericAbort, match="rank 1 has optimizer num_updates 3, a rank before it 2"):
        a_checkpoint(tmp_path, 1, (FACTS, FACTS | {"num_updates": 3}))
    path = a_checkpoint(tmp_path, 2)
    written = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(written | {"num_updates": 9}))
    with pytest.raises(EnvironmentFault, match="ranks count 2 optimizer updates, the manifest 9"):
        read_manifest(path)
    written["ranks"][1]["optimizer"]["lr"] = 0.25
    (path / "manifest.json").write_text(json.dumps(written))
    with pytest.raises(EnvironmentFault, match=r"rank 1 has optimizer lr 0\.25, a rank before it 0\.5"):
        read_manifest(path)


def test_a_rank_without_a_part_of_the_optimizer_does_not_disagree():
    ranks = tuple(RankFiles((), {}, facts) for facts in (FACTS | {"step": None}, FACTS, FACTS | {"step": None}))
    assert a_manifest(1, ranks).optimizer == FACTS


def test_parts_of_a_flat_tensor_are_put_together(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    out = torch.zeros(2, 2)
    TensorLoader(path, read_manifest(path)).fill(WEIGHT, [Piece("w", Box(((1, 3), (2, 4))), Box.whole((2, 2)))], out)
    assert out.tolist() == [[6.0, 7.0], [10.0, 11.0]]


def test_a_folder_without_a_manifest_is_no_checkpoint_and_none_that_is_damaged(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    assert checkpoint_steps(tmp_path) == [(1, path)]
    newest = newest_checkpoint(tmp_path)
    assert (newest.path, newest.damaged) == (path, {})


@pytest.mark.parametrize("name", ["../outside", "hf/../../outside", "/etc/hostname"])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path, name):
    (tmp_path / "outside").write_text("x")
    folder = tmp_path / "step-1"
    (folder / "hf").mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="does not list"):
        check_digest(folder, name, {name: file_facts(tmp_path / "outside")})


def test_a_file_is_compared_with_its_digest_when_a_rank_first_needs_it_and_not_before(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    flip_a_byte(path / "rank-00001.safetensors")
    loader, out = TensorLoader(path, read_manifest(path)), torch.zeros(1, 4)
    loader.fill(WEIGHT, [Piece("w", Box(((0, 1), (0, 4))), Box.whole((1, 4)))], out)
    assert out.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    with pytest.raises(EnvironmentFault, match=r"rank-00001\.safetensors: its bytes are not those that were written"):
        loader.fill(WEIGHT, [Piece("w", Box(((1, 2), (0, 4))), Box.whole((1, 4)))], out)


def test_an_element_that_no_file_holds_is_told(tmp_path):
    path = a_checkpoint(tmp_path, 1)
    loader = TensorLoader(path, read_manifest(path))
    with pytest.raises(EnvironmentFault, match=r"holds 4 of 8 elements of w \(weight\)"):
        loader.fill(WEIGHT, [Piece("w", Box(((2, 4), (0, 4))), Box.whole((2, 4)))], torch.zeros(2, 4))


def test_a_tensor_smaller_than_described_is_refused_and_no_neighbours_bytes_are_read(tmp_path):
    folder = tmp_path / "step-1"
    folder.mkdir()
    file = folder / "rank-00000.safetensors"
    save_file({"a": torch.zeros(2, 4), "b": torch.full((2, 4), 99.0)}, file)
    entry = StoredTensor(file.name, "a", WEIGHT, (3, 4), None, (Piece("w", Box.whole((3, 4)), Box.whole((3, 4))),))
    manifest = a_manifest(1, (RankFiles((entry,), {file.name: file_facts(file)}, FACTS),))
    out = torch.zeros(3, 4)
    with pytest.raises(EnvironmentFault, match=r"a is described as F32 of 48 bytes and the file has F32 of 32"):
        TensorLoader(folder, manifest).fill(WEIGHT, entry.pieces, out)


def test_flat_parts_with_a_hole_and_an_equally_large_overlap_are_refused(tmp_path):
    path, whole = a_checkpoint(tmp_path, 1), Box.whole((3, 4))
    change_description(path, 1, lambda entries: entries[0].update(flat=[4, 11]))
    said = r"weight/0\.w is stored in parts that do not add up, \[\(0, 5\), \(4, 11\)\]"
    with pytest.raises(EnvironmentFault, match=said):
        TensorLoader(path, read_manifest(path)).fill(WEIGHT, [Piece("w", whole, whole)], torch.zeros(3, 4))


def test_shards_that_were_swapped_are_found(tmp_path):
    """Of the same sizes, each a whole file of tensors: digests alone tell."""
    path = a_checkpoint(tmp_path, 2, cut=6)
    first, second = path / "rank-00000.safetensors", path / "rank-00001.safetensors"
    assert first.stat().st_size == second.stat().st_size and first.read_bytes() != second.read_bytes()
    first.rename(path / "kept")
    second.rename(first)
    (path / "kept").rename(second)
    with pytest.raises(DamagedCheckpoint, match="bytes are not those that were written"):
        check_digests(path, read_manifest(path))


@pytest.mark.parametrize("seed", seldom(range(3), 0))
def test_every_element_of_a_checkpoint_finds_its_place_in_any_other_layout(tmp_path, seed):
    """Random pairs of layouts of one model, elements numbered:
    what a rank loads is what it would have of the Hugging Face tensors.
    """
    pairs = 0
    for number, (model, written) in enumerate(random_layouts(seed, 5)):
        others = [layout for other, layout in random_layouts(100 * seed + number, 30) if other is model]
        folder, hf = tmp_path / f"{number}", tagged(model)
        folder.mkdir()
        stored = TensorLoader(folder, written_at_layout(folder, model, written, hf))
        for layout in others[:1]:
            pairs += 1
            for rank in range(layout.world_size):
                for shard in source_shards(model, layout, rank):
                    found = torch.zeros(shard.local_shape, dtype=torch.int64)
                    stored.fill(WEIGHT, shard.pieces, found)
                    assert np.array_equal(found.numpy(), assembled(shard, hf)), (shard.megatron_name, written, layout)
    assert pairs > 3


@pytest.mark.parametrize("seed", range(2))
def test_parts_of_a_distributed_optimizer_are_read_once_all_together(tmp_path, seed):
    """Each rank's tensors are cut at any place, as data-parallel ranks have them; what is not its own is not read."""
    rng = np.random.default_rng(seed)
    for number, (model, layout) in enumerate(random_layouts(seed, 3)):
        folder, hf = tmp_path / f"{number}", tagged(model)
        folder.mkdir()
        stored, read = TensorLoader(folder, written_at_layout(folder, model, layout, hf)), 0
        for rank in range(layout.world_size):
            for shard in source_shards(model, layout, rank):
                if shard.primary != rank:
                    continue
                size, found = int(np.prod(shard.local_shape)), torch.zeros(shard.local_shape, dtype=torch.int64)
                cuts = sorted({0, *rng.integers(0, size + 1, 2).tolist(), size})
                whole = torch.from_numpy(assembled(shard, hf)).reshape(-1)
                for part in itertools.pairwise(cuts):
                    found.zero_()
                    stored.fill(WEIGHT, RankParameter(shard, None, None, part).own_pieces(), found)
                    own = slice(*part)
                    assert torch.equal(found.reshape(-1)[own], whole[own]) and not found.reshape(-1)[: part[0]].any()
                    assert not found.reshape(-1)[part[1] :].any()
                read += sum(piece.hf_box.volume for piece in shard.pieces) * found.itemsize
        assert stored.bytes_read == read


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_each_file_is_compared_with_its_digest_by_one_rank(readers):
    files = {f"{i}": {"bytes": size} for i, size in enumerate((900, 10, 300, 310, 290, 20, 5))}
    shares = [share_of_files(files, reader, readers) for reader in range(readers)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    most = max(sum(facts["bytes"] for facts in share.values()) for share in shares)
    assert most <= max(900, 1.4 * 1835 / readers)


def written_at_layout(folder, model, layout, hf) -> Manifest:
    """What each rank of `layout` would write of its weights, those of its replicas left out."""
    ranks = []
    for rank in range(layout.world_size):
        shards = [shard for shard in source_shards(model, layout, rank) if shard.primary == rank]
        name = f"rank-{rank:05d}.safetensors"
        keys = {f"{shard.vp_chunk}.{shard.megatron_name}": shard for shard in shards}
        save_file({key: torch.from_numpy(assembled(shard, hf)) for key, shard in keys.items()}, folder / name)
        entries = tuple(
            StoredTensor(name, key, WEIGHT, shard.local_shape, None, shard.pieces) for key, shard in keys.items()
        )
        ranks.append(RankFiles(entries, {name: file_facts(folder / name)}, FACTS))
    return a_manifest(1, tuple(ranks))


def test_a_flipped_byte_is_found_and_an_older_step_taken(tmp_path):
    old, new = a_checkpoint(tmp_path, 2), a_checkpoint(tmp_path, 10)
    assert newest_checkpoint(tmp_path).path == new
    flip_a_byte(new / "rank-00001.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001.*SHA-256 differs") as damage:
        check_digests(new, read_manifest(new))
    sent = pickle.loads(pickle.dumps(damage.value))  # as it comes from a rank
    assert (sent.folder, str(sent)) == (new, str(damage.value))
    found = newest_checkpoint(tmp_path, {new: damage.value})
    assert found.path == old and found.manifest.step == 2
    assert found.damaged == {new: damage.value}


def test_without_any_good_checkpoint_each_damage_is_named(tmp_path):
    for step in (1, 2):
        (a_checkpoint(tmp_path, step) / "rank-00000.safetensors").unlink()
    found = newest_checkpoint(tmp_path)
    assert found.path is None and found.manifest is None and [p.name for p in found.damaged] == ["step-2", "step-1"]


def test_the_step_saved_just_now_outlives_retention_whatever_lies_beyond_it(tmp_path):
    for step in (2, 3, 4, 6):
        a_checkpoint(tmp_path, step)
    assert superseded(tmp_path, saved=3, keep=2) == []
    assert superseded(tmp_path, saved=3, keep=1) == [tmp_path / "step-2"]
    assert superseded(tmp_path, saved=6, keep=2) == [tmp_path / "step-2", tmp_path / "step-3"]


def test_a_damaged_checkpoint_is_set_aside_and_counts_no_more(tmp_path):
    a_checkpoint(tmp_path, 4)
    assert set_aside(tmp_path / "step-4") == tmp_path / "damaged-step-4"
    a_checkpoint(tmp_path, 4)
    set_aside(tmp_path / "step-4")
    assert [p.name for p in tmp_path.iterdir()] == ["damaged-step-4"]
    assert newest_checkpoint(tmp_path).path is None


def test_a_folder_is_written_whole_or_not_at_all_and_is_readable_as_others_are(tmp_path):
    folder = tmp_path / "step-1"

    def fails(work):
        (work / "half").write_text("")
        raise OSError

    with pytest.raises(OSError):
        write_atomically(folder, fails)
    assert list(tmp_path.iterdir()) == []
    mask = os.umask(0o027)
    try:
        write_atomically(folder, lambda work: (work / "whole").write_text("x"))
    finally:
        os.umask(mask)
    assert (folder / "whole").read_text() == "x" and stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_folder_that_is_replaced_stays_whole_until_the_new_one_has_its_name(tmp_path, monkeypatch):
    folder, removed = tmp_path / "step-1", []
    write_atomically(folder, lambda work: (work / "file").write_text("old"))

    def removes(path, **_):
        removed.append(((path / "file").read_text(), (folder / "file").read_text()))

    monkeypatch.setattr("mrl.checkpoint.step_folders.shutil.rmtree", removes)
    write_atomically(folder, lambda work: (work / "file").write_text("new"))
    assert removed == [("old", "new")]


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_that_opening_finds(tmp_path, renames):
    """Between the two renames, and after both."""
    run = RunDir.open(tmp_path, "")
    run.close()
    a_checkpoint(run.checkpoints, 3)
    killed = (
        "import os, shutil, sys; from pathlib import Path; from mrl.checkpoint.step_folders import write_atomically\n"
        "folder, left = Path(sys.argv[1]), int(sys.argv[2])\n"
        "rename = Path.rename\n"
        "def counted(path, to):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left < 0: os._exit(9)\n"
        "    return rename(path, to)\n"
        "Path.rename = counted\n"
        "copy = lambda work: (shutil.copytree(folder, work, dirs_exist_ok=True), (work / 'new').touch())\n"
        "write_atomically(folder, copy)\n"
    )
    command = [sys.executable, "-c", killed, str(run.checkpoints / "step-3"), str(renames)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 9
    run = RunDir.open(tmp_path, "", resume=True)
    point = newest_checkpoint(run.checkpoints)
    assert point.manifest is not None and point.manifest.step == 3
    point.manifest.trainer["metrics"] = {}
    rewind(run, point)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-3"]
    assert newest_checkpoint(run.checkpoints).path == run.checkpoints / "step-3"
    assert (run.checkpoints / "step-3" / "new").exists() is (renames == 2)


def test_a_checkpoint_is_replaced_beside_what_an_earlier_kill_left(tmp_path):
    a_checkpoint(tmp_path, 3).rename(tmp_path / "step-3.replaced")
    (tmp_path / "step-3").mkdir()  # not finished
    assert newest_checkpoint(tmp_path).path == tmp_path / "step-3.replaced"
    write_atomically(tmp_path / "step-3", lambda work: (work / "file").write_text("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert (tmp_path / "step-3" / "file").read_text() == "new"


def test_a_checkpoint_is_durable_with_the_folder_that_holds_all_of_them(tmp_path, monkeypatch):
    """That was made with the run, and nothing else waits for its name to be on the disk."""
    synced = []
    monkeypatch.setattr("mrl.checkpoint.step_folders.fsync", synced.append)
    (tmp_path / "checkpoints").mkdir()
    write_atomically(tmp_path / "checkpoints" / "step-1", lambda work: None)
    assert synced == [tmp_path / "checkpoints", tmp_path]


def test_what_a_kill_in_the_middle_of_saving_left_is_removed_when_the_run_is_opened(tmp_path):
    run = RunDir.open(tmp_path, "a: 1\n")
    run.close()
    (run.checkpoints / "step-3.tmp-ab12").mkdir()
    (run.checkpoints / "step-3.tmp-ab12" / "rank-00000.safetensors").write_text("half")
    (run.checkpoints / "step-2").mkdir()
    RunDir.open(tmp_path, "", resume=True).close()
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-2"]


def test_the_configuration_stays_until_the_resumed_run_stands(tmp_path):
    RunDir.open(tmp_path, "a: 1\n").close()
    run = RunDir.open(tmp_path, "a: 2\n", resume=True)
    assert run.config.read_text() == "a: 1\n"
    run.write_config("a: 2\n")
    assert run.config.read_text() == "a: 2\n"


class GroupAdam(torch.optim.Optimizer):
    """Keeps moments as a fused Adam does: the step count is the group's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.state[p] = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, GroupAdam])
def test_steps_of_per_parameter_and_of_fused_adams_survive(kind):
    parameter = torch.nn.Parameter(torch.zeros(3))
    adam = kind([parameter])
    assert AdamState(adam).steps() == set()
    for _ in range(3):
        parameter.grad = torch.ones(3)
        adam.step()
    assert AdamState(adam).steps() == {3.0}
    fresh = kind([parameter])
    AdamState(fresh).set_moments(parameter, 3.0, {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)})
    assert AdamState(fresh).steps() == {3.0}
    fresh.step()
    assert AdamState(fresh).steps() == {4.0}


def test_moments_whose_steps_nobody_counts_are_not_saved():
    parameter = torch.nn.Parameter(torch.zeros(3))
    adam = GroupAdam([parameter])
    adam.state[parameter] = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    with pytest.raises(RuntimeError, match="no step count"):
        AdamState(adam).steps()


@pytest.mark.parametrize(
    ("keys", "named"), [(("dtype",), ("dtype",)), (("torch_dtype",), ("torch_dtype",)), ((), ("torch_dtype",))]
)
def test_an_export_names_the_dtype_of_its_weights(tmp_path, keys, named):
    path = tmp_path / "step-1"
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "config.json").write_text(json.dumps(CONFIG | dict.fromkeys(keys, "bfloat16")))
    tensors, entries = {}, []
    for spec in tensor_specs(model_spec(CONFIG)):
        whole = Box.whole(spec.shape)
        tensors[spec.name] = torch.ones(spec.shape)
        entries.append(StoredTensor("r", spec.name, WEIGHT, spec.shape, None, (Piece(spec.name, whole, whole),)))
    save_file(tensors, path / "r")
    write_manifest(path, a_manifest(1, (RankFiles(tuple(entries), {"r": file_facts(path / "r")}, FACTS),)))
    assert write_hf(open_saved(path), tmp_path / "out").tensors == len(tensors)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in ("dtype", "torch_dtype") if key in written} == dict.fromkeys(named, "float32")


def test_files_are_cut_at_their_size_and_a_tensor_above_it_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr("mrl.checkpoint.planned_file.FILE_BYTES", 40)
    sizes = {"a": 11, "b": 5, "c": 5, "d": 1, "e": 30}  # elements of four bytes
    entries = [whole_tensor(name, (size,)) for name, size in sizes.items()]
    cut = [[entry.key for entry in portion] for portion in file_portions(entries, "float32")]
    assert cut == [["a"], ["b", "c"], ["d"], ["e"]]
