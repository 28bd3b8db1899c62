"""Layers that predict further tokens: carried by every form of a checkpoint and exported, byte for byte."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_deepseek_v3 import CONFIG as DEEPSEEK
from test_deepseek_v3 import FP8
from test_glm4_moe import CONFIG as GLM
from test_qwen3_5 import MOE as QWEN3_5
from test_qwen3_next import CONFIG as QWEN3_NEXT
from test_saving import made_run, trained

from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.draft_layers import FILE, draft_layers, export
from mrl.checkpoint.manifest import check_digests, read_manifest
from mrl.checkpoint.open_checkpoint import open_hf, open_saved
from mrl.cli.convert import parse_layout
from mrl.cli.main import main
from mrl.errors import EnvironmentFault
from mrl.model import load_model_spec, model_spec, tensor_specs
from mrl.model.hf_files import EMBEDDING, HEAD, read_index
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.vllm_parameters import target_parameters
from mrl.model.weight_map import DRAFTING
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import simulated_faults
from mrl.units import KIB

COPIES = {".embed_tokens.weight": EMBEDDING, ".shared_head.head.weight": HEAD}
FAMILIES = {
    "GLM-4.5": GLM | {"vocab_size": 64, "hidden_size": 16},
    "DeepSeek-V3": DEEPSEEK | {"num_nextn_predict_layers": 1},
    "Qwen3-Next": QWEN3_NEXT | {"torch_dtype": "bfloat16"},
    "Qwen3.5": QWEN3_5 | {"mtp_num_hidden_layers": 1},
}
TWO_LAYERS = "GLM-4.5 with two layers"  # which no rank holds, and nothing drafts with
KEPT = FAMILIES | {TWO_LAYERS: FAMILIES["GLM-4.5"] | {"num_nextn_predict_layers": 2}}


def head_of(config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The predicting layers as the family's checkpoints name them: each a layer of the model, what joins it, and
    copies.
    """
    made = {}
    for number in range(config.get("num_nextn_predict_layers", 1)):
        made |= one_of(config, tensors, number)
    return made


def one_of(config: dict, tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    last = config["num_hidden_layers"] - 1
    block = {name: t for name, t in tensors.items() if name.startswith(f"model.layers.{last}.")}
    hidden = config["hidden_size"]
    dtype = tensors[EMBEDDING].dtype
    joined = torch.randn(hidden, 2 * hidden, dtype=dtype)
    if "num_nextn_predict_layers" in config:
        prefix = f"model.layers.{last + 1 + number}."
        own = {"eh_proj.weight": joined, "enorm.weight": joined[0, :hidden], "hnorm.weight": joined[1, :hidden]}
        own |= {"shared_head.norm.weight": joined[2, :hidden]}
        copies = {end[1:]: tensors[original] for end, original in COPIES.items()}
    else:
        prefix = "mtp."
        own = {"fc.weight": joined, "norm.weight": joined[0, :hidden], "pre_fc_norm_hidden.weight": joined[1, :hidden]}
        own |= {"pre_fc_norm_embedding.weight": joined[2, :hidden]}
        copies = {}
    layer = prefix if prefix != "mtp." else "mtp.layers.0."
    made = {name.replace(f"model.layers.{last}.", layer): torch.randn_like(t) for name, t in block.items()}
    return made | {prefix + name: t.clone() for name, t in (own | copies).items()}


def made(folder: Path, config: dict, seed: int = 0) -> Path:
    """A Hugging Face checkpoint with a head, in two files."""
    torch.manual_seed(seed)
    dtype = getattr(torch, config.get("torch_dtype") or config["dtype"])
    spec = model_spec(config)
    tensors = {
        t.name: torch.randn(t.shape, dtype=torch.float32 if t.is_constant else dtype) for t in tensor_specs(spec)
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors, folder / "model-00001.safetensors")
    save_file(head_of(config, tensors), folder / "model-00002.safetensors")
    return folder


def all_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


@pytest.mark.parametrize("family", KEPT)
def test_a_model_leaves_as_it_came(tmp_path, capsys, family):
    config = KEPT[family]
    model = made(tmp_path / "model", config)
    write_layout(open_hf(model), tmp_path / "ours", parse_layout("tp=1"))
    manifest = read_manifest(tmp_path / "ours")
    check_digests(tmp_path / "ours", manifest)
    assert FILE in manifest.hf_files
    with safe_open(tmp_path / "ours" / "hf" / FILE, "pt") as kept:
        assert not [name for name in kept.keys() if name.endswith(tuple(COPIES))]  # noqa: SIM118
    write_layout(open_saved(tmp_path / "ours"), tmp_path / "again", parse_layout("tp=2"))
    main(["convert", "megatron-to-hf", str(tmp_path / "again"), "-o", str(tmp_path / "hf"), "--verify"])
    said = capsys.readouterr().out
    assert "written as they were" in said and "left out" not in said
    assert same(all_of(model), all_of(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config
    listed = read_index(tmp_path / "hf" / "model.safetensors.index.json")
    assert listed.keys() == all_of(model).keys()
    assert {listed[name] for name in head_of(config, all_of(model))} == {FILE}
    write_hf(open_hf(tmp_path / "hf"), tmp_path / "copy", Options())  # an export is a source like any other
    assert same(all_of(model), all_of(tmp_path / "copy"))


def test_copies_are_written_from_the_trained_tensors_and_all_else_stays(tmp_path):
    model = made(tmp_path / "model", FAMILIES["GLM-4.5"])
    trained = made(tmp_path / "trained", FAMILIES["GLM-4.5"], seed=1)
    (tmp_path / "out").mkdir()
    export(draft_layers(model, load_model_spec(model)), open_hf(trained), tmp_path / "out")
    before, weights, after = all_of(model), all_of(trained), load_file(tmp_path / "out" / FILE)
    for name, tensor in after.items():
        original = next((original for end, original in COPIES.items() if name.endswith(end)), None)
        assert torch.equal(tensor, before[name] if original is None else weights[original]), name
    assert not torch.equal(before[EMBEDDING], weights[EMBEDDING]) and len(after) > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sync_brings_each_worker_what_vllms_loaders_would(family):
    held = model_spec(FAMILIES[family]).holding(True)
    assert held.predicting_layers == 1
    degrees = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    degrees["num_layers_in_last_pipeline_stage"] = 1
    train = TrainLayout.build({"world_size": 8} | degrees, held)
    for rollout in (RolloutLayout(1, 1), RolloutLayout(2, 2), RolloutLayout(1, 2, 1, 2)):
        plan = plan_reshard(
            held, train, rollout, dialect="cuda", dtype="bfloat16", topology=None, budget_bytes=64 * KIB
        )
        assert list(simulated_faults(plan)) == []
        drafting = [t for t in target_parameters(held, rollout, 0, "cuda", "bfloat16") if t.name.startswith(DRAFTING)]
        assert len(drafting) > 8


WIDE = {
    "hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("rollout", [RolloutLayout(1, 1), RolloutLayout(1, 2, 1, 2)])
def test_a_sync_brings_fp8_engines_words_of_the_layer_and_its_joining_product_as_it_is(rollout):
    """As vLLM's loader takes both: tests/real/test_quantised_loader.py."""
    held = model_spec(FAMILIES["GLM-4.5"] | WIDE).holding(True)
    degrees = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    train = TrainLayout.build({"world_size": 4} | degrees, held)
    given = {"dialect": "cuda", "dtype": "bfloat16", "topology": None, "budget_bytes": 256 * KIB}
    assert list(simulated_faults(plan_reshard(held, train, rollout, **given, fp8_block=32))) == []
    drafting = {
        t.name: t.dtype
        for t in target_parameters(held, rollout, 0, "cuda", "bfloat16", 32)
        if t.name.startswith(DRAFTING)
    }
    assert drafting[f"{DRAFTING}model.layers.3.eh_proj.weight"] == "bfloat16"
    words = [name for name, dtype in drafting.items() if dtype == "float8_e4m3fn"]
    assert words and all(f"{name}_scale_inv" in drafting for name in words)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_ranks_hold_is_cut_joined_and_exported_with_the_rest(tmp_path, family):
    """As a run with rollout.speculation.method: mtp saves it: through two layouts, and back to the same files."""
    config = FAMILIES[family]
    model = made(tmp_path / "model", config)
    write_layout(open_hf(model, predicting=True), tmp_path / "ours", parse_layout("tp=2,ep=2"))
    manifest = read_manifest(tmp_path / "ours")
    check_digests(tmp_path / "ours", manifest)
    assert model_spec(manifest.hf_config).predicting_layers == 1
    stored = {piece.hf_name for entry in manifest.read_entries(tmp_path / "ours") for piece in entry.pieces}
    head = head_of(config, all_of(model)).keys()
    copies = {name for name in head if name.endswith(tuple(COPIES))}
    assert head & stored == head - copies
    if copies:
        with safe_open(tmp_path / "ours" / "hf" / FILE, "pt") as kept:
            assert not list(kept.keys())  # names of copies alone
    write_layout(open_saved(tmp_path / "ours"), tmp_path / "again", parse_layout("tp=1"))
    main(["convert", "megatron-to-hf", str(tmp_path / "again"), "-o", str(tmp_path / "hf"), "--verify"])
    assert same(all_of(model), all_of(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == config


def test_a_copy_that_differs_is_named_and_stays_as_it_was(tmp_path, capsys):
    model = made(tmp_path / "model", FAMILIES["DeepSeek-V3"])
    name = "model.layers.3.shared_head.head.weight"
    head = load_file(model / "model-00002.safetensors")
    head[name][5, 7] += 1
    save_file(head, model / "model-00002.safetensors")
    assert draft_layers(model, load_model_spec(model)).differing == (name,)
    main(["convert", "megatron-to-hf", str(_ours(model, tmp_path)), "-o", str(tmp_path / "hf"), "--json"])
    assert same(all_of(model), all_of(tmp_path / "hf"))
    write_hf(open_hf(model), tmp_path / "copy", Options())
    main(["convert", "megatron-to-hf", str(tmp_path / "ours"), "-o", str(tmp_path / "said")])
    assert "written as they were" in capsys.readouterr().out
    report = write_hf(open_hf(model), tmp_path / "third", Options())
    assert report.other_copies == (name,)


def _ours(model: Path, folder: Path) -> Path:
    write_layout(open_hf(model), folder / "ours", parse_layout("tp=1"))
    return folder / "ours"


def test_eight_bit_matrices_become_bfloat16_by_their_scales(tmp_path):
    config = FAMILIES["DeepSeek-V3"] | {"quantization_config": FP8}
    model = made(tmp_path / "model", config)
    head = load_file(model / "model-00002.safetensors")
    name = "model.layers.3.eh_proj.weight"
    words = torch.randn(64, 128).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.037]])
    save_file(head | {name: words, f"{name}_scale_inv": scales}, model / "model-00002.safetensors")
    write_hf(open_hf(model), tmp_path / "hf", Options())
    found = all_of(tmp_path / "hf")
    assert torch.equal(found[name], (words.float() * scales).to(torch.bfloat16))
    assert f"{name}_scale_inv" not in found and "quantization_config" not in (tmp_path / "hf/config.json").read_text()


def test_damage_is_seen(tmp_path):
    model = made(tmp_path / "model", FAMILIES["GLM-4.5"])
    ours = _ours(model, tmp_path)
    data = bytearray((ours / "hf" / FILE).read_bytes())
    data[-1] ^= 1
    (ours / "hf" / FILE).write_bytes(data)
    with pytest.raises(EnvironmentFault, match=FILE):
        open_saved(ours)


def test_a_run_writes_them_once_and_each_of_its_checkpoints_has_them(tmp_path):
    model = made(tmp_path / "model", FAMILIES["GLM-4.5"] | {"dtype": "float32"})
    (tmp_path / "run").mkdir()
    run = made_run(model, tmp_path / "run", max_actor_ckpt_to_keep=1)
    inodes = set()
    for _ in range(3):
        trained(run)
        run.saver.save_last(run.state)
        (folder,) = (tmp_path / "run").glob("step-*")
        check_digests(folder, read_manifest(folder))
        inodes.add((folder / "hf" / FILE).stat().st_ino)
    assert len(inodes) == 1
    own = draft_layers(model, load_model_spec(model)).own
    assert load_file(folder / "hf" / FILE).keys() == own.keys()
    run.saver.close()


def test_a_run_of_a_model_without_them_writes_none(tmp_path):
    model = made(tmp_path / "model", FAMILIES["GLM-4.5"] | {"dtype": "float32"})
    (model / "model-00002.safetensors").unlink()
    (tmp_path / "run").mkdir()
    run = made_run(model, tmp_path / "run")
    trained(run)
    run.saver.save_last(run.state)
    assert not list((tmp_path / "run").rglob(FILE))
    run.saver.close()
