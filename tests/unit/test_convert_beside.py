"""What goes with the weights of a conversion: configuration and tokenizer, groups that generation was ahead with; and
that damage in them is seen.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_model import SIZES

import mrl.checkpoint.convert
from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.group_files import name_again
from mrl.checkpoint.manifest import (
    EXP_AVG,
    WEIGHT,
    Manifest,
    RankFiles,
    StoredTensor,
    check_digests,
    described,
    file_facts,
    read_manifest,
    write_manifest,
)
from mrl.checkpoint.open_checkpoint import open_hf, open_saved
from mrl.checkpoint.step_folders import newest_checkpoint
from mrl.cli.convert import parse_layout
from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.driver.preflight import _model_of
from mrl.driver.resume import rewind
from mrl.errors import ConfigError, DamagedCheckpoint, EnvironmentFault
from mrl.model import model_spec, tensor_specs
from mrl.model.hf_files import check_same_architecture
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.record.run_dir import RunDir
from mrl.tools.torch_dist.write import write_torch_dist

LAYOUT = parse_layout("tp=2")
GROUPS = ("group-7.npz", "group-9.2.npz")  # a name is what the manifest says


@pytest.fixture
def model(tmp_path) -> Path:
    return made_model(tmp_path / "model", SIZES)


def made_model(folder: Path, config: dict) -> Path:
    """A Hugging Face checkpoint with a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    save_file(
        {tensor.name: np.ones(tensor.shape, np.float32) for tensor in tensor_specs(model_spec(config))},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def ours(model, tmp_path) -> Path:
    write_layout(open_hf(model), tmp_path / "run" / "step-3", LAYOUT)
    return tmp_path / "run" / "step-3"


@pytest.fixture
def ahead(model, tmp_path) -> Path:
    """A step of one rank as an asynchronous run saves it: with moments, and two groups on their way."""
    folder, spec, name = tmp_path / "run" / "step-3", model_spec(SIZES), "rank-00000.safetensors"
    folder.mkdir(parents=True)
    shutil.copytree(model, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    shards = source_shards(spec, TrainLayout.build({"world_size": 1}, spec), 0)
    entries = [
        StoredTensor(name, f"{role}/{shard.megatron_name}", role, shard.local_shape, None, shard.pieces)
        for role in (WEIGHT, EXP_AVG)
        for shard in shards
    ]
    save_file({entry.key: np.ones(entry.shape, np.float32) for entry in entries}, folder / name)
    for group in GROUPS:
        (folder / group).write_text(f"columns of {group}")
    files = {group: file_facts(folder / group) for group in GROUPS}
    trainer = {"cursor": {"index": 4}, "ahead": {"draw": 5, "files": files}}
    optimizer = {"step": 3.0, "num_updates": 3, "lr": 0.5, "scheduler": {}}
    rank = RankFiles(tuple(entries), {name: file_facts(folder / name)}, optimizer)
    write_manifest(folder, Manifest(3, {}, "float32", SIZES, (rank,), trainer, {}))
    return folder


def change_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_files_that_a_conversion_does_not_read_are_not_digested(ahead, tmp_path):
    manifest = read_manifest(ahead)
    whole = manifest.ranks[0].read_entries(ahead)
    of_role = {role: tuple(entry for entry in whole if entry.role == role) for role in (WEIGHT, EXP_AVG)}
    parts = {"rank-00000": of_role[WEIGHT], "rank-00001": of_role[EXP_AVG], "critic-00000": (), "critic-00001": ()}
    ranks = {}
    for name, entries in parts.items():
        file = f"{name}.safetensors"
        save_file({entry.key: np.ones(entry.shape, np.float32) for entry in entries}, ahead / file)
        own = tuple(replace(entry, file=file) for entry in entries)
        ranks[name] = RankFiles(own, {file: file_facts(ahead / file)}, manifest.optimizer)
    actor, critic = (tuple(ranks[f"{kind}-0000{rank}"] for rank in (0, 1)) for kind in ("rank", "critic"))
    described_critic = tuple(described(ahead, rank, part, "critic") for rank, part in enumerate(critic))
    write_manifest(ahead, replace(manifest, ranks=actor, critic=described_critic, layout={"world_size": 2}))
    change_a_byte(ahead / "critic-00001.safetensors")
    write_layout(open_saved(ahead), tmp_path / "again", LAYOUT)
    change_a_byte(ahead / "rank-00001.safetensors")
    write_hf(open_saved(ahead), tmp_path / "hf")
    with pytest.raises(DamagedCheckpoint, match="rank-00001"):
        write_layout(open_saved(ahead), tmp_path / "with-moments", LAYOUT)
    change_a_byte(ahead / "rank-00000.safetensors")
    with pytest.raises(DamagedCheckpoint, match="rank-00000"):
        write_hf(open_saved(ahead), tmp_path / "damaged")


@pytest.mark.parametrize("verify", [False, True])
def test_groups_on_their_way_are_in_the_converted_checkpoint(ahead, tmp_path, verify):
    write_layout(open_saved(ahead), tmp_path / "again" / "step-3", parse_layout("tp=1"), options=Options(verify=verify))
    newest = newest_checkpoint(tmp_path / "again")
    assert newest.path is not None and not newest.damaged
    check_digests(newest.path, newest.manifest)
    assert newest.manifest.trainer["ahead"]["draw"] == 5
    assert set(newest.manifest.files_beside()) == set(GROUPS)
    for name in GROUPS:
        assert (newest.path / name).read_text() == f"columns of {name}"
    write_hf(open_saved(newest.path), tmp_path / "hf")


def test_groups_are_copied_where_the_disk_is_another(ahead, tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuses)
    write_layout(open_saved(ahead), tmp_path / "again", parse_layout("tp=1"))
    assert (tmp_path / "again" / GROUPS[0]).read_text() == f"columns of {GROUPS[0]}"


def test_a_conversion_that_was_killed_among_the_groups_goes_on(ahead, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(written, path):
        name_again(written, path)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(mrl.checkpoint.convert, "name_again", killed)
        write_layout(open_saved(ahead), tmp_path / "again", parse_layout("tp=1"))
    report = write_layout(open_saved(ahead), tmp_path / "again", parse_layout("tp=1"), options=Options(verify=True))
    assert report.resumed_files == report.files


def test_a_damaged_group_is_not_carried_and_hinders_no_export(ahead, tmp_path):
    (ahead / GROUPS[1]).write_text(f"COLUMNS of {GROUPS[1]}")
    with pytest.raises(DamagedCheckpoint, match=r"group-9\.2\.npz: its bytes are not those"):
        write_layout(open_saved(ahead), tmp_path / "again", parse_layout("tp=1"))
    assert not (tmp_path / "again").exists()
    write_layout(open_saved(ahead), tmp_path / "weights", parse_layout("tp=1"), weights_only=True)
    assert read_manifest(tmp_path / "weights").files_beside() == {}
    write_hf(open_saved(ahead), tmp_path / "hf")


def test_verification_reads_groups_again(ahead, tmp_path, monkeypatch):
    def half(written, path):
        path.write_text("COLUMNS of group-7.npz" if path.name == GROUPS[0] else written.read_text())

    monkeypatch.setattr(mrl.checkpoint.convert, "name_again", half)
    with pytest.raises(EnvironmentFault, match=r"group-7\.npz: its bytes are not those"):
        write_layout(open_saved(ahead), tmp_path / "again", parse_layout("tp=1"), options=Options(verify=True))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokenizer.json", lambda text: "", r"hf/tokenizer\.json: its bytes are not those"),
        ("config.json", lambda text: text.replace("4", "5", 1), r"hf/config\.json: its bytes are not those"),
    ],
)
def test_a_damaged_tokenizer_or_configuration_is_a_damaged_checkpoint(ours, tmp_path, name, change, said):
    file = ours / "hf" / name
    damaged = change(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged)
    for read in (
        lambda: check_digests(ours, read_manifest(ours)),
        lambda: write_hf(open_saved(ours), tmp_path / "hf", Options(verify=True)),
        lambda: write_hf(open_saved(ours), tmp_path / "hf"),
        lambda: write_layout(open_saved(ours), tmp_path / "again", LAYOUT),
        lambda: write_torch_dist(open_saved(ours), tmp_path / "theirs"),
    ):
        with pytest.raises(DamagedCheckpoint, match=said) as damage:
            read()
        assert damage.value.folder == ours
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


@pytest.mark.parametrize("change", [lambda file: file.write_text('{"version": "1.1"}'), Path.unlink])
def test_a_run_goes_on_from_a_checkpoint_whose_tokenizer_was_changed_and_says_so(ours, tmp_path, capsys, change):
    """Training does not read it; an evaluation does."""
    run_dir = RunDir.open(tmp_path, "")
    change(ours / "hf" / "tokenizer.json")
    point = newest_checkpoint(tmp_path / "run")
    assert point.path == ours and not point.damaged
    point.manifest.trainer["metrics"] = {}
    rewind(run_dir, point)
    assert capsys.readouterr().out.count("hf/tokenizer.json is not what was saved") == 1
    config = load_config("parallel_configs/tiny-moe/cpu.yaml").config
    with pytest.raises(EnvironmentFault, match=r"hf/tokenizer\.json"):
        _model_of(ours, config.model, config.rollout)


@pytest.mark.parametrize("form", ["hf", "ours", "torch_dist"])
def test_verification_reads_the_tokenizer_again(ours, tmp_path, monkeypatch, form):
    write = {
        "hf": lambda: write_hf(open_saved(ours), tmp_path / "out", Options(verify=True)),
        "ours": lambda: write_layout(open_saved(ours), tmp_path / "out", LAYOUT, options=Options(verify=True)),
        "torch_dist": lambda: write_torch_dist(open_saved(ours), tmp_path / "out", options=Options(verify=True)),
    }[form]
    real = Path.write_bytes

    def damaged(path, data):
        return real(path, data.replace(b"1.0", b"9.9") if path.name == "tokenizer.json" else data)

    with monkeypatch.context() as patch, pytest.raises(EnvironmentFault, match=r"tokenizer\.json: its bytes are not"):
        patch.setattr(Path, "write_bytes", damaged)
        write()
    assert not (tmp_path / "out").exists()
    write()


def test_a_disk_that_is_full_by_then_is_told(ours, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(mrl.checkpoint.convert, "copy_hf_files", full)
    with pytest.raises(EnvironmentFault, match=r"x cannot be written \(No space left on device\)"):
        write_hf(open_saved(ours), tmp_path / "hf")


GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "intermediate_size": 8,
    "max_position_embeddings": 32, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "attention_bias": True, "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", None])
def test_an_export_names_no_layers_for_multi_token_prediction_that_it_does_not_have(capsys, tmp_path, key):
    config = GLM if key is None else GLM | {key: 1}
    model = made_model(tmp_path / "model", config)
    write_layout(open_hf(model), tmp_path / "ours", parse_layout("tp=1"))
    kept = json.loads((tmp_path / "ours" / "hf" / "config.json").read_text())
    assert kept == config and read_manifest(tmp_path / "ours").hf_config == config
    main(["convert", "megatron-to-hf", str(tmp_path / "ours"), "-o", str(tmp_path / "hf"), "--verify"])
    said = "multi-token prediction" in capsys.readouterr().out
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    if key is None:
        assert not said and exported == config
        return
    assert said and exported == config | {key: 0}
    # the export is of the same model, for a reference or a checkpoint of ours made of it
    check_same_architecture("ref.path", tmp_path / "hf", model_spec(config))
    assert model_spec(exported) == model_spec(config)
    shutil.rmtree(tmp_path / "hf")
    main(["convert", "megatron-to-hf", str(tmp_path / "ours"), "-o", str(tmp_path / "hf"), "--json"])
    assert json.loads(capsys.readouterr().out)["left_out_layers"] == 1


def test_no_export_in_megatrons_format_names_layers_that_it_does_not_hold(tmp_path):
    """The one family with such layers is refused."""
    model = made_model(tmp_path / "model", GLM | {"num_nextn_predict_layers": 1})
    with pytest.raises(ConfigError, match="glm4_moe models are not converted from or to Megatron's torch_dist format"):
        write_torch_dist(open_hf(model), tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
