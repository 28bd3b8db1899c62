"""Converted checkpoints hold the very bits they were made from, in any layout and back,
and what cannot be converted is refused by name.
"""

import errno
import json
import os
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from seldom import seldom

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from test_checkpoints import change_description
from tiny_models import in_dtype, save, tiny_dense, tiny_glm, tiny_latent, tiny_moe, tiny_next, tiny_qwen2, tiny_shared

import mrl.checkpoint.convert
import mrl.checkpoint.convert_job
import mrl.checkpoint.planned_file
import mrl.checkpoint.stored_boxes
from mrl.checkpoint.convert import ExpectedModel, write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.manifest import EXP_AVG, MASTER, WEIGHT, file_facts, read_manifest, sealed
from mrl.checkpoint.open_checkpoint import open_hf, open_saved, weight_role
from mrl.checkpoint.safetensors_file import DirectFile
from mrl.cli.convert import parse_layout
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import load_model_spec
from mrl.model.boxes import Box
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, source_shards
from mrl.rank.rank_load import TensorLoader

FAMILIES = {
    "qwen3_moe": tiny_moe, "qwen2_moe": tiny_shared, "qwen3": tiny_dense, "qwen2": tiny_qwen2,
    "deepseek_v3": tiny_latent, "qwen3_next": tiny_next,
}  # fmt: skip
LAYOUTS = {
    "one rank": "tp=1", "tp2 pp2 ep2": "tp=2,pp=2,ep=2", "tp4, fewer key heads": "tp=4", "vpp2": "pp=2,vpp=2",
    "uneven stages": "pp=2,first=1,last=3", "etp2": "tp=2,etp=2", "replicas": "tp=2,world=8,ep=4",
}  # fmt: skip
DENSE = {name: LAYOUTS[name] for name in ("one rank", "tp4, fewer key heads", "vpp2", "uneven stages")} | {
    "tp2 pp2": "tp=2,pp=2"
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Tiny checkpoints of every family in float32, and one in bfloat16 whose files are two."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("models")
    folders = {name: save(make(), out / name) for name, make in FAMILIES.items()}
    half = out / "half"
    tiny_moe().to(torch.bfloat16).save_pretrained(half, max_shard_size="400KB")
    assert len(list(half.glob("*.safetensors"))) > 2
    folders["half glm4_moe"] = save(in_dtype(tiny_glm(), torch.bfloat16), out / "half-glm")
    for folder in (*folders.values(), half):
        (folder / "tokenizer.json").write_text(f'{{"of": "{folder.name}"}}')
    return folders | {"half": half}


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Tensors do not fit into a block or a scratch buffer, nor a rank's part into a file."""
    monkeypatch.setattr(mrl.checkpoint.planned_file, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(mrl.checkpoint.stored_boxes, "SCRATCH_BYTES", 3000)
    monkeypatch.setattr(mrl.checkpoint.planned_file, "FILE_BYTES", 600_000)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """By the format's own reader."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Names, shapes, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].shape == other[n].shape and torch.equal(one[n], other[n]) for n in one
    )


CASES = [
    *(("qwen3_moe", LAYOUTS[name]) for name in LAYOUTS), ("qwen2_moe", "tp=2,pp=2,ep=2"), ("half", "tp=2,pp=2,ep=2"),
    *(("qwen3", DENSE[name]) for name in DENSE), ("qwen2", DENSE["tp2 pp2"]),
    ("half glm4_moe", "tp=2,pp=2,ep=2"), ("deepseek_v3", "tp=2,pp=2,ep=2"), ("qwen3_next", "tp=2,pp=2,ep=2"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), seldom(CASES, *range(0, len(CASES), 3), *range(-5, 0)))
def test_there_and_back_gives_the_same_bytes_whatever_the_layout(models, tmp_path, small_parts, model, layout):
    there = write_layout(open_hf(models[model]), tmp_path / "ours", parse_layout(layout), options=Options(verify=True))
    back = write_hf(open_saved(tmp_path / "ours"), tmp_path / "hf", Options(verify=True))
    original = weights(models[model])
    assert same(weights(tmp_path / "hf"), original)
    assert there.tensors == back.tensors == len(original) and back.files > 1
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.values())
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == (models[model] / "tokenizer.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "ours"]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3_moe", "tp=2,pp=2,ep=2"),
        ("qwen2_moe", "tp=4,etp=2,ep=2"),
        ("half", "pp=2,vpp=2"),
        ("half glm4_moe", "tp=2,pp=2,ep=2"),
        ("qwen3_next", "tp=2,pp=2,ep=2"),
    ],
)
def test_each_rank_is_stored_what_megatron_has_there(models, tmp_path, model, layout):
    """Against an oracle that slices whole tensors; `TensorLoader`, by which ranks load, reads it."""
    degrees, spec, full = parse_layout(layout), load_model_spec(models[model]), weights(models[model])
    write_layout(open_hf(models[model]), tmp_path / "ours", degrees)
    manifest = read_manifest(tmp_path / "ours")
    stored, plan = TensorLoader(tmp_path / "ours", manifest), TrainLayout.build(degrees, spec)
    files = {name: load_file(tmp_path / "ours" / name) for name in manifest.files()}
    written = {(e.file, e.key) for e in manifest.read_entries(tmp_path / "ours")}
    assert written == {(file, key) for file, tensors in files.items() for key in tensors}
    for rank in range(plan.world_size):
        for shard in source_shards(spec, plan, rank):
            role = weight_role(shard)
            expected = torch.zeros(shard.local_shape, dtype=full[shard.pieces[0].hf_name].dtype)
            for piece in shard.pieces:
                expected[piece.local_box.slices] = full[piece.hf_name][piece.hf_box.slices]
            found = torch.zeros_like(expected)
            stored.fill(role, shard.pieces, found)
            assert torch.equal(found, expected)
            if shard.primary == rank:  # padding rows and all
                assert torch.equal(
                    files[f"rank-{rank:05d}.safetensors"][f"{role}/{shard.vp_chunk}.{shard.megatron_name}"], expected
                )


def test_optimizer_state_moves_between_layouts_with_the_weights(models, tmp_path, small_parts):
    """Moments that are cut over data parallelism: each element has the number of its place
    in the Hugging Face tensor.
    """
    source = with_optimizer(models["half"], tmp_path / "step-7")
    write_layout(open_saved(source), tmp_path / "moved", parse_layout("tp=2,pp=2,ep=2"), options=Options(verify=True))
    manifest, before = read_manifest(tmp_path / "moved"), read_manifest(source)
    assert manifest.step == 7 and manifest.optimizer == before.optimizer and manifest.trainer["cursor"] == {"index": 4}
    assert manifest.converted and not manifest.weights_only
    stored = TensorLoader(tmp_path / "moved", manifest)
    for name, tensor in weights(models["half"]).items():
        whole = Box.whole(tensor.shape)
        for role, expected in ((WEIGHT, tensor), (MASTER, tensor.float()), (EXP_AVG, numbered(tensor))):
            found = torch.zeros_like(expected)
            stored.fill(role, [Piece(name, whole, whole)], found)
            assert torch.equal(found, expected), (name, role)
    write_layout(open_saved(tmp_path / "moved"), tmp_path / "alone", parse_layout("tp=1"), weights_only=True)
    alone = read_manifest(tmp_path / "alone")
    assert (
        alone.weights_only
        and {e.role for e in alone.read_entries(tmp_path / "alone")} == {WEIGHT}
        and alone.optimizer["step"] is None
    )


def numbered(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)


def with_optimizer(model: Path, folder: Path) -> Path:
    """A saved step of two data-parallel ranks, written here by hand: each has an uneven flat part of every moment."""
    from mrl.checkpoint.manifest import Manifest, RankFiles, StoredTensor, file_facts, write_manifest

    folder.mkdir()
    (folder / "hf").mkdir()
    shutil.copy(model / "config.json", folder / "hf")
    spec, full = load_model_spec(model), weights(model)
    layout = TrainLayout.build({"world_size": 2}, spec)
    ranks = []
    for rank in range(2):
        tensors, entries, name = {}, [], f"rank-{rank:05d}.safetensors"
        for shard in source_shards(spec, layout, rank):
            for role, make in ((WEIGHT, lambda t: t), (MASTER, torch.Tensor.float), (EXP_AVG, numbered)):
                local = torch.zeros(shard.local_shape, dtype=torch.bfloat16 if role == WEIGHT else torch.float32)
                for piece in shard.pieces:
                    local[piece.local_box.slices] = make(full[piece.hf_name])[piece.hf_box.slices]
                cut = local.numel() // 3
                flat = None if role == WEIGHT else ((0, cut), (cut, local.numel()))[rank]
                if role == WEIGHT and shard.primary != rank:
                    continue
                key = f"{role}/{shard.vp_chunk}.{shard.megatron_name}"
                tensors[key] = local if flat is None else local.reshape(-1)[slice(*flat)].clone()
                entries.append(StoredTensor(name, key, role, shard.local_shape, flat, shard.pieces))
        save_file(tensors, folder / name)
        facts = {"step": 7.0, "num_updates": 7, "lr": 0.5, "scheduler": {"num_steps": 9}}
        ranks.append(RankFiles(tuple(entries), {name: file_facts(folder / name)}, facts))
    config = json.loads((model / "config.json").read_text())
    write_manifest(
        folder, Manifest(7, {"world_size": 2}, "bfloat16", config, tuple(ranks), {"cursor": {"index": 4}}, {})
    )
    return folder


def test_worker_processes_write_the_same_files(models, tmp_path, monkeypatch):
    monkeypatch.setattr(mrl.checkpoint.convert_job, "SMALL_BYTES", 0)
    for workers in (1, 2):
        write_layout(
            open_hf(models["qwen3_moe"]),
            tmp_path / f"ours{workers}",
            parse_layout("tp=2"),
            options=Options(workers, verify=workers == 2),
        )
    one, two = (read_manifest(tmp_path / f"ours{workers}") for workers in (1, 2))
    assert one == two and len(one.files()) == 2


def test_the_bar_shows_the_bytes_of_the_whole_output(models, tmp_path, capsys):
    report = write_layout(
        open_hf(models["half"]), tmp_path / "ours", parse_layout("tp=2"), options=Options(progress=True)
    )
    shown = capsys.readouterr().err
    assert f"{report.bytes / 1e6:.1f}/{report.bytes / 1e6:.1f} MB" in shown


# --- interruptions ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def killed_after(monkeypatch, count: int) -> None:
    """The process ends while the file after `count` files is being written."""
    real, calls = DirectFile.write, []

    def write(out, block):
        if out.path.name not in calls:
            calls.append(out.path.name)
        if len(calls) > count:
            real(out, block[: len(block) // 2])
            raise Killed
        real(out, block)

    monkeypatch.setattr(DirectFile, "write", write)


@pytest.mark.parametrize("count", [1, 3])
def test_a_killed_conversion_goes_on_with_the_files_that_it_had_not_finished(models, tmp_path, monkeypatch, count):
    degrees = parse_layout("tp=2,pp=2,ep=2")
    whole = write_layout(open_hf(models["qwen3_moe"]), tmp_path / "whole", degrees)
    with monkeypatch.context() as patch:
        killed_after(patch, count)
        with pytest.raises(Killed):
            write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", degrees)
    assert not (tmp_path / "ours").exists()
    finished = {f: f.stat().st_mtime_ns for f in (tmp_path / ".ours.partial" / "files").glob("*.safetensors")}
    assert len(finished) == count
    report = write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", degrees, options=Options(verify=True))
    assert (report.resumed_files, report.files) == (count, whole.files)
    assert {
        f.name: f.stat().st_mtime_ns for f in (tmp_path / "ours").glob("*") if f.name in {g.name for g in finished}
    } == {f.name: time for f, time in finished.items()}
    assert read_manifest(tmp_path / "ours") == read_manifest(tmp_path / "whole")
    assert not (tmp_path / ".ours.partial").exists()


def test_what_is_left_of_another_conversion_is_not_continued(models, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        killed_after(patch, 2)
        with pytest.raises(Killed):
            write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", parse_layout("tp=2,pp=2,ep=2"))
    report = write_layout(
        open_hf(models["qwen2_moe"]), tmp_path / "ours", parse_layout("tp=2,pp=2,ep=2"), options=Options(verify=True)
    )
    assert report.resumed_files == 0


def test_two_conversions_do_not_write_one_output(models, tmp_path, monkeypatch):
    def second(*_):
        write_layout(open_hf(models["qwen3"]), tmp_path / "ours", parse_layout("tp=1"))

    monkeypatch.setattr(mrl.checkpoint.convert_job, "write_planned_file", second)
    with pytest.raises(ConfigError, match="being written by another conversion"):
        write_layout(open_hf(models["qwen3"]), tmp_path / "ours", parse_layout("tp=1"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_not_taken_for_another_conversion(models, tmp_path, monkeypatch, capsys, number):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mrl.checkpoint.convert_job.fcntl, "flock", refuses)
    write_layout(open_hf(models["qwen3"]), tmp_path / "ours", parse_layout("tp=1"))
    said = capsys.readouterr()
    assert os.strerror(number) in said.err and "no other conversion" in said.err and not said.out
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_damaged_files_of_a_checkpoint_of_ours_are_named_and_nothing_is_made_of_them(models, tmp_path):
    write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", parse_layout("tp=2"))
    file = tmp_path / "ours" / "rank-00001.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-5] ^= 1
    file.write_bytes(whole)
    said = r"rank-00001\.safetensors: its bytes are not those that were written \(SHA-256 differs\)"
    for convert in (
        lambda: write_hf(open_saved(tmp_path / "ours"), tmp_path / "out"),
        lambda: write_layout(open_saved(tmp_path / "ours"), tmp_path / "out", parse_layout("tp=4")),
    ):
        with pytest.raises(EnvironmentFault, match=said):
            convert()
    file.write_bytes(whole[:-1])
    with pytest.raises(
        EnvironmentFault, match=rf"rank-00001\.safetensors has {len(whole) - 1} bytes, not {len(whole)}"
    ):
        write_hf(open_saved(tmp_path / "ours"), tmp_path / "out")
    file.unlink()
    with pytest.raises(EnvironmentFault, match=r"rank-00001\.safetensors is missing"):
        write_hf(open_saved(tmp_path / "ours"), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(models, tmp_path, monkeypatch):
    needed = sum(t.nbytes for t in weights(models["qwen3"]).values())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(needed, 0, needed - 1))
    with pytest.raises(EnvironmentFault, match=r"GB are to be written and .* GB are free"):
        write_layout(open_hf(models["qwen3"]), tmp_path / "ours", parse_layout("tp=1"))
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_conversion_that_are_deleted_count_as_free(models, tmp_path, monkeypatch):
    degrees, usage = parse_layout("tp=2,pp=2,ep=2"), namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        killed_after(patch, 1)
        with pytest.raises(Killed):
            write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", degrees)
    files = tmp_path / ".ours.partial" / "files"
    left = {file.name: file.stat().st_size for file in files.iterdir()}
    assert sum(name.endswith(".safetensors") for name in left) == 1
    dense = parse_layout("tp=2,pp=2")
    needed = write_layout(open_hf(models["qwen3"]), tmp_path / "whole", dense).bytes
    assert needed > sum(left.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(needed, 0, needed - sum(left.values()) - 1))
    with pytest.raises(EnvironmentFault, match=r"GB are to be written and .* GB are free"):
        write_layout(open_hf(models["qwen3"]), tmp_path / "ours", dense)
    assert {file.name: file.stat().st_size for file in files.iterdir()} == left
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(needed, 0, needed - sum(left.values())))
    assert write_layout(open_hf(models["qwen3"]), tmp_path / "ours", dense).resumed_files == 0


def test_a_disk_that_fills_up_keeps_what_is_finished(models, tmp_path, monkeypatch):
    real, calls = DirectFile.write, []

    def write(out, block):
        calls.append(out.path.name)
        if len(set(calls)) > 2:
            raise OSError(28, "No space left on device")
        real(out, block)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", write)
        with pytest.raises(
            EnvironmentFault, match=r"No space left on device\); free some and run the same command again"
        ):
            write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", parse_layout("tp=2,pp=2,ep=2"))
    assert not list(tmp_path.rglob("*.part"))
    assert (
        write_layout(open_hf(models["qwen3_moe"]), tmp_path / "ours", parse_layout("tp=2,pp=2,ep=2")).resumed_files == 2
    )


def test_damaged_hugging_face_files_are_named(models, tmp_path):
    folder = shutil.copytree(models["half"], tmp_path / "model")
    second = sorted(folder.glob("*.safetensors"))[1]
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(EnvironmentFault, match=f"{second.name} cannot be read"):
        write_layout(open_hf(folder), tmp_path / "ours", parse_layout("tp=1"))
    second.unlink()
    with pytest.raises(EnvironmentFault, match=f"{second.name} does not exist"):
        write_layout(open_hf(folder), tmp_path / "ours", parse_layout("tp=1"))
    second.write_bytes(whole)
    (folder / "config.json").write_text(
        (models["qwen3_moe"] / "config.json").read_text().replace('experts": 8', 'experts": 9')
    )
    with pytest.raises(EnvironmentFault, match=r"weights are not those .*experts\.8\..* is missing"):
        write_layout(open_hf(folder), tmp_path / "ours", parse_layout("tp=1"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("dtype", "said"), [(torch.float16, "F16"), (None, "BF16 .*, F32")])
def test_a_dtype_that_cannot_be_trained_and_a_mixture_are_refused(models, tmp_path, dtype, said):
    folder = shutil.copytree(models["qwen3"], tmp_path / "model")
    tensors = weights(folder)
    mixed = {
        name: tensor.to(dtype or (torch.bfloat16 if "norm" in name else torch.float32))
        for name, tensor in tensors.items()
    }
    save_file(mixed, folder / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=f"weights of dtype {said}"):
        write_layout(open_hf(folder), tmp_path / "ours", parse_layout("tp=1"))


def test_a_configuration_for_another_model_or_dtype_is_refused(models):
    with pytest.raises(ConfigError, match=r"c\.yaml: model\.path .*another architecture .*num_experts 8, not 0"):
        expected = ExpectedModel("c.yaml", str(models["qwen3_moe"]), "float32")
        expected.check(open_hf(models["qwen3"]))
    with pytest.raises(ConfigError, match=r"weights are bfloat16, model\.dtype in c\.yaml is float32"):
        ExpectedModel("c.yaml", str(models["half"]), "float32").check(open_hf(models["half"]))


def test_a_manifest_that_does_not_match_its_files_is_refused(models, tmp_path):
    ours = tmp_path / "ours"
    write_layout(open_hf(models["qwen3_moe"]), ours, parse_layout("tp=2"))
    manifest, description = (ours / "manifest.json").read_text(), (ours / "rank-00000.json").read_text()
    key = "weight/0.decoder.layers.3.mlp.router.weight"
    for change, said in (
        ((key, "weight/0.elsewhere"), "elsewhere is described as F32 .* the file has nothing"),
        (('"dtype": "float32"', '"dtype": "bfloat16"'), "is described as BF16"),
        (("layers.3.mlp.gate.weight", "layers.3.mlp.gates.weight"), r"not those of its hf_config \(2 differ\)"),
    ):
        assert change[0] in manifest + description
        (ours / "rank-00000.json").write_text(description.replace(*change))
        altered = json.loads(manifest.replace(*change))
        altered["ranks"][0]["description"] = {"rank-00000.json": file_facts(ours / "rank-00000.json")}
        (ours / "manifest.json").write_text(json.dumps(sealed(altered)))
        with pytest.raises(EnvironmentFault, match=said):
            write_hf(open_saved(ours), tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_a_manifest_with_a_hole_and_an_equally_large_overlap_is_refused(models, tmp_path):
    ours, name = tmp_path / "ours", "model.layers.1.self_attn.o_proj.weight"
    write_layout(open_hf(models["qwen3"]), ours, parse_layout("tp=2"))

    def overlap(entries: list) -> None:
        (piece,) = (piece for entry in entries for piece in entry["pieces"] if piece[0] == name)
        low, high = piece[1][1]
        piece[1][1] = [low - 4, high - 4]

    change_description(ours, 1, overlap)
    with pytest.raises(EnvironmentFault, match=rf"{name} \(weight\) is stored twice"):
        write_hf(open_saved(ours), tmp_path / "hf")
    shape = weights(models["qwen3"])[name].shape
    with pytest.raises(EnvironmentFault, match=rf"{name} \(weight\) is stored twice"):
        TensorLoader(ours, read_manifest(ours)).fill(
            WEIGHT, [Piece(name, Box.whole(shape), Box.whole(shape))], torch.zeros(shape)
        )


@pytest.mark.parametrize("file", ["__0_0.distcp", "iter_0000005/__0_0.distcp", "latest_checkpointed_iteration.txt"])
def test_megatrons_own_format_is_refused_and_its_pickles_are_not_opened(tmp_path, file):
    (tmp_path / "theirs" / file).parent.mkdir(parents=True)
    (tmp_path / "theirs" / file).write_bytes(b"")
    (tmp_path / "theirs" / file).with_name(".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ConfigError, match="torch_dist format"):
        write_hf(open_saved(tmp_path / "theirs"), tmp_path / "hf")
    with pytest.raises(ConfigError, match="torch_dist format"):
        write_layout(open_hf(tmp_path / "theirs"), tmp_path / "ours", parse_layout("tp=1"))


def test_verification_finds_one_wrong_bit_and_gives_the_output_no_name(models, tmp_path, monkeypatch):
    real = mrl.checkpoint.planned_file._fill_block

    def flips(reader, entry, first, block):
        real(reader, entry, first, block)
        if entry.key.endswith("layers.2.self_attention.linear_proj.weight") and not first:
            block[5, 3] ^= np.uint32(1)

    monkeypatch.setattr(mrl.checkpoint.planned_file, "_fill_block", flips)
    with pytest.raises(
        EnvironmentFault, match=r"model\.layers\.2\.self_attn\.o_proj\.weight \(weight\) differs .* in row 5"
    ):
        write_layout(
            open_hf(models["qwen3_moe"]), tmp_path / "ours", parse_layout("tp=1"), options=Options(verify=True)
        )
    assert list(tmp_path.iterdir()) == []


def test_verification_reads_the_disk_again_and_misses_no_tensor(models, tmp_path, monkeypatch):
    real_finish, real_plan = mrl.checkpoint.convert_job.finish_file, mrl.checkpoint.convert.hf_plan

    def damages(work, name, facts):
        real_finish(work, name, facts)
        file = work / "files" / name
        file.write_bytes(file.read_bytes()[:-1] + b"?")

    def forgets(model, dtype):
        (first, *rest) = real_plan(model, dtype)
        return (replace(first, entries=first.entries[:-1]), *rest)

    write_layout(open_hf(models["qwen2"]), tmp_path / "ours", parse_layout("tp=2"))
    for where, name, change, said in (
        (mrl.checkpoint.convert_job, "finish_file", damages, r"model-00001\.safetensors: its bytes are not those"),
        (mrl.checkpoint.convert, "hf_plan", forgets, r"lm_head\.weight is missing"),
    ):
        with monkeypatch.context() as patch, pytest.raises(EnvironmentFault, match=said):
            patch.setattr(where, name, change)
            write_hf(open_saved(tmp_path / "ours"), tmp_path / "hf", Options(verify=True))
        assert [p.name for p in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=two", "dp=2", "tp=2,tp=2", "tp=2;pp=2"])
def test_a_layout_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match=r"--layout: .*tp, pp, vpp, cp, ep, etp, world, first, last"):
        parse_layout(text)


def test_the_world_is_the_least_that_both_grids_fit():
    assert parse_layout("tp=2,pp=2,ep=4")["world_size"] == 8  # dense 4, experts 8
    assert parse_layout("tp=2,cp=2,ep=2")["world_size"] == 4
    assert parse_layout("tp=2,world=6")["world_size"] == 6
