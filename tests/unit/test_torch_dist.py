"""torch_dist checkpoints: torch's own reader and writer are the other side, and nothing in a file is run or believed.

tests/real/test_torch_dist.py has Megatron's own models on the other side.
"""

import json
import os
import pickle
import re
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from seldom import seldom

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from tiny_models import save, tiny_dense, tiny_moe, tiny_qwen2, tiny_shared

import mrl.checkpoint.planned_file
from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.open_checkpoint import open_hf, open_saved
from mrl.checkpoint.safetensors_file import DirectFile
from mrl.cli.convert import parse_layout
from mrl.cli.main import main
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import load_model_spec
from mrl.tools.torch_dist.names import global_tensors
from mrl.tools.torch_dist.pickles import read_pickle
from mrl.tools.torch_dist.read import open_torch_dist
from mrl.tools.torch_dist.write import write_torch_dist

FAMILIES = {"qwen3_moe": tiny_moe, "qwen2_moe": tiny_shared, "qwen3": tiny_dense, "qwen2": tiny_qwen2}
VERIFIED = Options(verify=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("models")
    folders = {name: save(make().to(torch.bfloat16), out / name) for name, make in FAMILIES.items()}
    for folder in folders.values():
        (folder / "tokenizer.json").write_text(f'{{"of": "{folder.name}"}}')
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Names, shapes, dtypes and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape) and torch.equal(
            tensor, other[name]
        ), name


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in metadata.items() if hasattr(t, "size")}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def fused_qkv(full: dict[str, torch.Tensor], layer: int, heads: int, groups: int, leaf: str = "weight") -> torch.Tensor:
    """For each key/value head: its query heads, the key head, the value head."""
    q, k, v = (full[f"model.layers.{layer}.self_attn.{part}_proj.{leaf}"] for part in "qkv")
    size = q.shape[0] // heads
    rows = []
    for group in range(groups):
        queries = heads // groups * size
        rows += [
            q[group * queries : (group + 1) * queries],
            k[group * size : (group + 1) * size],
            v[group * size : (group + 1) * size],
        ]
    return torch.cat(rows)


def gate_up(full: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return torch.cat([full[f"{prefix}.gate_proj.weight"], full[f"{prefix}.up_proj.weight"]])


def written(models, tmp_path, name: str, separate_layers: bool = False) -> Path:
    write_torch_dist(open_hf(models[name]), tmp_path / "td", separate_layers, options=VERIFIED)
    return tmp_path / "td" / "release"


def test_torch_reads_what_is_written_under_megatrons_homogeneous_keys(models, tmp_path):
    full, found = weights(models["qwen3_moe"]), read_by_torch(written(models, tmp_path, "qwen3_moe"))
    assert found.keys() == {
        "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight",
        *(f"decoder.layers.{name}.weight" for name in (
            "self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.q_layernorm",
            "self_attention.k_layernorm",
            "pre_mlp_layernorm", "mlp.router", "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2",
        )),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    }  # fmt: skip
    qkv, fc1 = (
        found["decoder.layers.self_attention.linear_qkv.weight"],
        found["decoder.layers.mlp.experts.experts.linear_fc1.weight"],
    )
    for layer in range(4):
        assert torch.equal(qkv[layer], fused_qkv(full, layer, heads=4, groups=2))
        for expert in range(8):
            assert torch.equal(fc1[layer, expert], gate_up(full, f"model.layers.{layer}.mlp.experts.{expert}"))
    assert torch.equal(found["embedding.word_embeddings.weight"], full["model.embed_tokens.weight"])
    assert torch.load(tmp_path / "td" / "release" / "common.pt", weights_only=True)["iteration"] == 0
    assert (tmp_path / "td" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "td" / "hf" / "tokenizer.json").is_file()


def test_torch_reads_what_is_written_under_megatrons_keys_by_layer(models, tmp_path):
    full, found = (
        weights(models["qwen2_moe"]),
        read_by_torch(written(models, tmp_path, "qwen2_moe", separate_layers=True)),
    )
    for layer in range(4):
        at = f"decoder.layers.{layer}."
        assert torch.equal(
            found[f"{at}self_attention.linear_qkv.bias"], fused_qkv(full, layer, heads=4, groups=2, leaf="bias")
        )
        assert torch.equal(
            found[f"{at}mlp.shared_experts.linear_fc1.weight"], gate_up(full, f"model.layers.{layer}.mlp.shared_expert")
        )
        down = [full[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"] for expert in range(8)]
        assert torch.equal(found[f"{at}mlp.experts.experts.linear_fc2.weight"], torch.stack(down))


@pytest.mark.parametrize("separate_layers", [False, True])
@pytest.mark.parametrize("name", seldom(FAMILIES, "qwen3_moe", "qwen2"))
def test_there_and_back_and_what_torch_writes_of_the_same_are_the_same_bytes(
    models, tmp_path, monkeypatch, name, separate_layers
):
    monkeypatch.setattr(mrl.checkpoint.planned_file, "FILE_BYTES", 300_000)
    release = written(models, tmp_path, name, separate_layers)
    assert len(list(release.glob("*.distcp"))) > 2
    write_hf(open_torch_dist(tmp_path / "td"), tmp_path / "hf", VERIFIED)
    assert_same(weights(tmp_path / "hf"), weights(models[name]))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == (models[name] / "tokenizer.json").read_text()
    dcp.save(read_by_torch(release), checkpoint_id=tmp_path / "theirs", no_dist=True)
    write_hf(open_torch_dist(tmp_path / "theirs", models[name]), tmp_path / "again", VERIFIED)
    assert_same(weights(tmp_path / "again"), weights(models[name]))


def test_a_torch_dist_checkpoint_becomes_one_of_ours_and_the_other_way(models, tmp_path):
    written(models, tmp_path, "qwen3_moe")
    write_layout(open_torch_dist(tmp_path / "td"), tmp_path / "ours", parse_layout("tp=2,pp=2,ep=2"), options=VERIFIED)
    write_torch_dist(open_saved(tmp_path / "ours"), tmp_path / "theirs", options=VERIFIED)
    write_hf(open_torch_dist(tmp_path / "theirs"), tmp_path / "hf")
    assert_same(weights(tmp_path / "hf"), weights(models["qwen3_moe"]))


_states: dict[Path, dict[str, torch.Tensor]] = {}  # of each model, as torch reads what is written of it


def saved_by_torch(models, tmp_path, change=lambda state: state, name: str = "qwen3_moe") -> Path:
    """What a trainer may have left: torch's own writer, and `change` applied to the tensors before."""
    if models[name] not in _states:
        _states[models[name]] = read_by_torch(written(models, tmp_path, name))
        shutil.rmtree(tmp_path / "td")
    state = {key: tensor.clone() for key, tensor in _states[models[name]].items()}
    dcp.save(change(state), checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


def test_padding_of_the_vocabulary_wrappers_and_optimizer_states_stay_behind(models, tmp_path):
    def change(state):
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            state[key] = torch.cat([state[key], torch.full((129, 64), 7.0, dtype=torch.bfloat16)])
        wrapped = {f"module.module.{key}": tensor for key, tensor in state.items()}
        step = {"chained_0.optimizer.state.step": torch.ones(1), "optimizer.state.exp_avg.decoder.x": torch.ones(3)}
        return wrapped | step | {"rng_state": {"seed": 1}}

    report = write_hf(
        open_torch_dist(saved_by_torch(models, tmp_path, change), models["qwen3_moe"]), tmp_path / "hf", VERIFIED
    )
    assert_same(weights(tmp_path / "hf"), weights(models["qwen3_moe"]))
    assert report.left_out == ("chained_0.optimizer.state.step", "optimizer.state.exp_avg.decoder.x")


def test_archives_without_checksums_are_read_too_and_counted(models, tmp_path, capsys):
    torch.serialization.set_crc32_options(False)
    try:
        folder = saved_by_torch(models, tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    report = write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf", VERIFIED)
    assert_same(weights(tmp_path / "hf"), weights(models["qwen3_moe"]))
    assert report.unchecked == 12
    command = ("megatron-to-hf", folder, "--trust-checkpoint", "--hf-files", models["qwen3_moe"])
    _, said, _ = run(capsys, *command, "-o", tmp_path / "told")
    assert "12 tensors have no checksum, so damage in them cannot be detected" in said
    _, said, _ = run(capsys, *command, "-o", tmp_path / "json", "--json")
    assert json.loads(said)["unchecked"] == 12


def test_archives_with_checksums_are_not_said_to_have_none(models, tmp_path):
    assert (
        write_hf(open_torch_dist(saved_by_torch(models, tmp_path), models["qwen3_moe"]), tmp_path / "hf").unchecked == 0
    )


def test_blocks_cut_anywhere_are_what_a_whole_tensor_has_there(models):
    """Of every kind of key, with layers and experts cut too, as a resharded checkpoint may have them."""
    spec, full = load_model_spec(models["qwen2_moe"]), weights(models["qwen2_moe"])
    rng, kinds = np.random.default_rng(0), 0
    for key, tensor in sorted(global_tensors(spec).items()):
        if re.search(r"layers\.[1-3]\.|experts\.[1-7]\.", key):
            continue  # as the first of its kind
        kinds += 1
        whole = torch.zeros((*tensor.lead, *tensor.shape), dtype=torch.bfloat16)
        for index in product(*map(range, tensor.lead)):
            shard, first = tensor.members[index]
            local = torch.zeros(shard.local_shape, dtype=torch.bfloat16)
            for piece in shard.pieces:
                local[piece.local_box.slices] = full[piece.hf_name][piece.hf_box.slices]
            whole[index] = local[first : first + tensor.shape[0]]
        for _ in range(5):
            low = [int(rng.integers(0, size)) for size in whole.shape]
            high = [int(rng.integers(at + 1, size + 1)) for at, size in zip(low, whole.shape, strict=True)]
            block = whole[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
            shape, pieces = tensor.pieces(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
            found = torch.full(shape, torch.nan, dtype=torch.bfloat16)
            for piece in pieces:
                found[piece.local_box.slices] = full[piece.hf_name][piece.hf_box.slices]
            assert torch.equal(found, block.reshape(shape)), (key, low, high)
    assert kinds > 30


def export_killed_in_its_third_file(model, target, monkeypatch):
    monkeypatch.setattr(mrl.checkpoint.planned_file, "FILE_BYTES", 300_000)
    real, seen = DirectFile.write, []

    def killed(out, block):
        seen.append(out.path.name)
        if len(set(seen)) > 2:
            raise KeyboardInterrupt
        real(out, block)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            write_torch_dist(open_hf(model), target, options=VERIFIED)


def test_a_killed_export_goes_on_with_the_files_that_it_had_not_finished(models, tmp_path, monkeypatch):
    export_killed_in_its_third_file(models["qwen3_moe"], tmp_path / "td", monkeypatch)
    assert not (tmp_path / "td").exists()
    report = write_torch_dist(open_hf(models["qwen3_moe"]), tmp_path / "td", options=VERIFIED)
    assert report.resumed_files == 2 and report.files > 3
    write_hf(open_torch_dist(tmp_path / "td"), tmp_path / "hf")
    assert_same(weights(tmp_path / "hf"), weights(models["qwen3_moe"]))


def test_one_that_was_begun_with_the_other_kind_of_keys_is_not_gone_on_with(models, tmp_path, monkeypatch):
    export_killed_in_its_third_file(models["qwen3_moe"], tmp_path / "td", monkeypatch)
    report = write_torch_dist(open_hf(models["qwen3_moe"]), tmp_path / "td", separate_layers=True)
    assert report.resumed_files == 0
    write_hf(open_torch_dist(tmp_path / "td"), tmp_path / "hf")
    assert_same(weights(tmp_path / "hf"), weights(models["qwen3_moe"]))


# --- the command ------------------------------------------------------------------------------------------------------


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main(["convert", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_the_command_asks_for_trust_both_ways_and_converts_with_it(models, tmp_path, capsys):
    model, td = models["qwen3"], tmp_path / "td"
    there = ("hf-to-megatron", model, "-o", td, "--format", "torch_dist")
    code, _, said = run(capsys, *there)
    assert code == 2 and "pickles" in said and "--trust-checkpoint" in said and list(tmp_path.iterdir()) == []
    assert run(capsys, *there, "--trust-checkpoint", "--verify")[0] == 0
    back = ("megatron-to-hf", td, "-o", tmp_path / "hf", "--json")
    code, _, said = run(capsys, *back)
    assert code == 2 and "pickle" in said and "--trust-checkpoint" in said
    shutil.rmtree(td / "hf")
    code, _, said = run(capsys, *back, "--trust-checkpoint")
    assert code == 2 and "no config.json" in said and "--hf-files" in said
    code, said, _ = run(capsys, *back, "--trust-checkpoint", "--hf-files", model, "--verify")
    assert code == 0 and json.loads(said)["verified"]
    assert_same(weights(tmp_path / "hf"), weights(model))
    code, _, said = run(
        capsys, "hf-to-megatron", model, "-o", tmp_path / "x", "--layout", "tp=1", "--non-homogeneous-layers"
    )
    assert code == 2 and "--format torch_dist" in said


# --- bad input --------------------------------------------------------------------------------------------------------


def renamed(old: str, new: str):
    return lambda state: {key.replace(old, new): tensor for key, tensor in state.items()}


def replaced(key: str, make):
    return lambda state: state | {key: make(state[key])}


def without(key: str):
    return lambda state: {name: tensor for name, tensor in state.items() if name != key}


ROUTER = "decoder.layers.mlp.router.weight"
WRONG = {
    "unknown key": (renamed("mlp.router", "mlp.rooter"), r"decoder\.layers\.mlp\.rooter\.weight "
                                                         r"is not part of the model"),
    "another shape": (replaced(ROUTER, lambda t: t[:, :7].clone()), rf"{ROUTER} has shape \[4, 7, 64\], not \[4, 8, "
                                                                    r"64\]"),
    "small vocabulary": (replaced("output_layer.weight", lambda t: t[:99].clone()), r"output_layer\.weight has shape "
                                                                                    r"\[99, 64\]"),
    "missing key": (without(ROUTER), r"model\.layers\.0\.mlp\.gate\.weight: 0 of 512 elements"),
    "two dtypes": (replaced(ROUTER, torch.Tensor.float), r"weights of dtype BF16 .*, F32"),
    "other dtype": (lambda state: {k: t.half() for k, t in state.items()}, r"weights of dtype torch\.float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_are_not_the_models_are_named(models, tmp_path, case):
    change, said = WRONG[case]
    folder = saved_by_torch(models, tmp_path, change)
    with pytest.raises(EnvironmentFault, match=said):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]


def test_the_weights_of_another_model_are_named(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    with pytest.raises(EnvironmentFault, match=r"not those of the model that config\.json describes .*linear_fc1"):
        write_hf(open_torch_dist(folder, models["qwen3"]), tmp_path / "hf")


def test_missing_short_and_damaged_files_are_named(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    file.unlink()
    (folder / "other.distcp").touch()
    hf_files = models["qwen3_moe"]
    with pytest.raises(EnvironmentFault, match=r"__0_0\.distcp is missing"):
        write_hf(open_torch_dist(folder, hf_files), tmp_path / "hf")
    file.write_bytes(whole[:-100])
    with pytest.raises(EnvironmentFault, match=rf"__0_0\.distcp has {len(whole) - 100} bytes, not {len(whole)}"):
        write_hf(open_torch_dist(folder, hf_files), tmp_path / "hf")
    at = whole.index(
        weights(models["qwen3_moe"])["model.layers.2.self_attn.o_proj.weight"].view(torch.uint8).numpy().tobytes()
    )
    file.write_bytes(whole[: at + 5] + bytes([whole[at + 5] ^ 1]) + whole[at + 6 :])
    with pytest.raises(
        EnvironmentFault,
        match=r"__0_0\.distcp: the bytes of decoder\.layers\.self_attention\.linear_proj.* \(CRC-32 differs\)",
    ):
        write_hf(open_torch_dist(folder, hf_files), tmp_path / "hf")
    file.write_bytes(b"\0" * len(whole))
    with pytest.raises(
        EnvironmentFault, match=r"__0_0\.distcp: .* cannot be read: no archive of torch\.save begins at byte"
    ):
        write_hf(open_torch_dist(folder, hf_files), tmp_path / "hf")
    (folder / ".metadata").unlink()
    with pytest.raises(EnvironmentFault, match=r"\.metadata, which describes the files, is missing"):
        write_hf(open_torch_dist(folder, hf_files), tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]


class Runs:
    """A pickle that runs something when it is loaded."""

    def __init__(self, module_function, *arguments):
        self.call = module_function, arguments

    def __reduce__(self):
        return self.call


def test_a_description_that_would_run_something_is_refused_and_runs_nothing(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = Runs(os.mkdir, str(tmp_path / "ran"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(EnvironmentFault, match=r"it asks for posix\.mkdir"):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")
    # a name of a package that is allowed is not called either
    metadata.planner_data = Runs(Path.touch, tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf", VERIFIED)
    assert not (tmp_path / "ran").exists()
    for data in (b"", b"\x80\x04N", pickle.dumps({"a": eval})):
        with pytest.raises(ValueError, match=r"."):
            read_pickle(data)


def test_a_description_that_an_early_python_3_11_wrote_is_read(models, tmp_path, monkeypatch):
    """Enum.__reduce_ex__ of 3.11.2, Debian 12's: a member is getattr of its class and name."""
    monkeypatch.setattr("enum.Enum.__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
    folder = saved_by_torch(models, tmp_path)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf", VERIFIED)
    assert_same(weights(tmp_path / "hf"), weights(models["qwen3_moe"]))
    for wanted in (Runs(getattr, "text", "upper"), Runs(getattr, Runs(Path, "a"), "touch"), Runs(getattr, Path, 1)):
        with pytest.raises(ValueError, match="it asks for"):
            read_pickle(pickle.dumps(wanted))


def redescribed(folder: Path, key: str, change) -> None:
    """`change` is applied to (offsets, sizes) of the one block of a tensor, in both places that name it."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (chunk,) = metadata.state_dict_metadata[key].chunks
    index = next(i for i in metadata.storage_data if i.fqn == key)
    info = metadata.storage_data.pop(index)
    offsets, sizes = change(tuple(chunk.offsets), tuple(chunk.sizes))
    metadata.state_dict_metadata[key].chunks = [replace(chunk, offsets=torch.Size(offsets), sizes=torch.Size(sizes))]
    metadata.storage_data[replace(index, offset=torch.Size(offsets))] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


BLOCKS = {
    "beyond the last layer": lambda offsets, sizes: ((1, *offsets[1:]), sizes),
    "beyond the rows": lambda offsets, sizes: (offsets, (sizes[0], sizes[1] + 1, *sizes[2:])),
    "more layers than memory": lambda offsets, sizes: (offsets, (2**60, *sizes[1:])),
    "an axis missing": lambda offsets, sizes: (offsets[1:], sizes[1:]),
    "an axis too many": lambda offsets, sizes: (offsets, (*sizes, 1)),
    "below zero": lambda offsets, sizes: ((-1, *offsets[1:]), sizes),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_that_do_not_lie_in_their_tensor_are_named(models, tmp_path, case):
    folder = saved_by_torch(models, tmp_path)
    redescribed(folder, ROUTER, BLOCKS[case])
    with pytest.raises(EnvironmentFault, match=rf"\.metadata.*{ROUTER}.* block"):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")


def test_a_block_that_is_named_twice_is_refused(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata[ROUTER].chunks *= 2
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(EnvironmentFault, match=rf"the blocks of {ROUTER} are more than its shape"):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")


def test_files_outside_the_checkpoint_are_not_read(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    data = (folder / ".metadata").read_bytes()
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere/__0_0.distcp"
    assert pickle.dumps(metadata) != data
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(EnvironmentFault, match=r"outside the checkpoint"):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")


def test_an_archive_whose_tensor_is_not_in_order_is_refused(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    key = "decoder.layers.self_attention.linear_proj.weight"
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index = next(i for i in metadata.storage_data if i.fqn == key)
    size = metadata.state_dict_metadata[key].size
    with (folder / "turned.distcp").open("wb") as file:
        torch.save(torch.zeros((size[1], size[0], size[2]), dtype=torch.bfloat16).transpose(0, 1), file)
    metadata.storage_data[index].relative_path, metadata.storage_data[index].offset = "turned.distcp", 0
    metadata.storage_data[index].length = (folder / "turned.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        EnvironmentFault, match=rf"turned\.distcp: {key}.* cannot be read: its elements are not in order"
    ):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")


def test_blocks_with_a_hole_and_an_equally_large_overlap_are_refused(models, tmp_path):
    folder = saved_by_torch(models, tmp_path)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (chunk,) = metadata.state_dict_metadata[ROUTER].chunks
    index = next(i for i in metadata.storage_data if i.fqn == ROUTER)
    info, chunks = metadata.storage_data.pop(index), []
    for number, expert in enumerate((0, 2)):  # experts 2 and 3 are there twice, 6 and 7 not at all
        name, offsets, sizes = f"part{number}.distcp", torch.Size((0, expert, 0)), torch.Size((4, 4, 64))
        with (folder / name).open("wb") as file:
            torch.save(torch.zeros(sizes, dtype=torch.bfloat16), file)
        length = (folder / name).stat().st_size
        metadata.storage_data[replace(index, offset=offsets)] = replace(
            info, relative_path=name, offset=0, length=length
        )
        chunks.append(replace(chunk, offsets=offsets, sizes=sizes))
    metadata.state_dict_metadata[ROUTER].chunks = chunks
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(EnvironmentFault, match=r"model\.layers\.\d\.mlp\.gate\.weight \(weight\) is stored twice"):
        write_hf(open_torch_dist(folder, models["qwen3_moe"]), tmp_path / "hf")


def test_megatrons_older_format_is_told_from_an_interrupted_save(models, tmp_path):
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(
        EnvironmentFault, match=r"iter_0000005/\.metadata.* is missing: it is of the older format `torch`"
    ):
        write_hf(open_torch_dist(tmp_path, models["qwen3"]), tmp_path / "hf")


def test_one_that_is_given_as_hugging_face_files_is_sent_to_its_own_conversion(models, tmp_path):
    with pytest.raises(ConfigError, match=r"torch_dist format.* megatron-to-megatron"):
        write_layout(open_hf(saved_by_torch(models, tmp_path)), tmp_path / "ours", parse_layout("tp=1"))
