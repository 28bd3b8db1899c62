"""Checkpoints in FP8 are read as the bfloat16 model that they stand for, in conversions, in Megatron and by engines;
the oracle is torch's own float8 with scales spread over their blocks.
"""

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from fp8_models import BLOCK, FILE, as_bfloat16, in_fp8
from tiny_models import in_dtype, save, tiny_latent

import mrl.checkpoint.planned_file
import mrl.checkpoint.stored_boxes
from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.hf_folder import copy_hf_files
from mrl.checkpoint.manifest import WEIGHT, facts_of, read_manifest
from mrl.checkpoint.open_checkpoint import SafetensorsFiles, open_hf, open_mrl, whole_tensor
from mrl.checkpoint.stored_boxes import Fp8Reader
from mrl.cli.convert import parse_layout
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.driver.evaluation import _stored_otherwise
from mrl.engine.engine_state import AWAITED
from mrl.engine.requests import _of_model
from mrl.errors import EnvironmentFault
from mrl.model import load_model_spec
from mrl.model.boxes import Box
from mrl.model.fp8 import bfloat16_bits
from mrl.model.hf_files import check_checkpoint
from mrl.rank.mapped_bridge import Bfloat16Files
from mrl.units import MIB


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A bfloat16 model whose matrices are of whole blocks and of parts of them: 576 rows, 384 and 96."""
    torch.set_num_threads(1)
    model = tiny_latent(hidden_size=160, moe_intermediate_size=96)
    return save(in_dtype(model, torch.bfloat16), tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def stored(plain, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    return folder, in_fp8(plain, folder)


@pytest.fixture
def changed(stored, tmp_path):
    """A function that writes the checkpoint anew with other tensors or another configuration."""

    def write(change, **config) -> Path:
        tensors = load_file(stored[0] / FILE)
        change(tensors)
        save_file(tensors, tmp_path / FILE)
        known = json.loads((stored[0] / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(known))
        return tmp_path

    return write


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("shape", [(128, 128), (300, 257), (1, 129), (127, 1)])
def test_every_code_and_scales_of_any_size_give_torchs_bits(shape):
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # no number
    blocks = [-(-size // BLOCK) for size in shape]
    scales = torch.exp2(80 * torch.rand(blocks, generator=random) - 40) * torch.rand(blocks, generator=random)
    expected = as_bfloat16(codes.view(torch.float8_e4m3fn), scales)
    words = bfloat16_bits(codes.numpy(), scales.numpy(), (BLOCK, BLOCK))
    assert np.array_equal(words, expected.view(torch.int16).numpy().view(np.uint16))


def test_all_256_codes_have_torchs_values_and_no_number_stays_none():
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    words = bfloat16_bits(codes.numpy(), np.ones((1, 1), np.float32), (BLOCK, BLOCK))
    ours = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(ours.nan_to_num(1e4), codes.view(torch.float8_e4m3fn).float().nan_to_num(1e4))


@pytest.mark.parametrize("box", [((0, 300), (0, 257)), ((100, 290), (127, 129)), ((129, 130), (3, 257))])
def test_a_box_has_the_scales_of_its_place(box):
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (300, 257), generator=random, dtype=torch.uint8)
    scales = torch.rand(3, 3, generator=random) + 0.1
    whole = as_bfloat16(codes.view(torch.float8_e4m3fn), scales).view(torch.int16).numpy().view(np.uint16)
    cut = tuple(slice(*ends) for ends in box)
    first = (box[0][0], box[1][0])
    assert np.array_equal(bfloat16_bits(codes.numpy()[cut], scales.numpy(), (BLOCK, BLOCK), first), whole[cut])


@pytest.mark.parametrize("first", [(0, 0), (3, 7)])
def test_blocks_need_not_be_square(first):
    """torch's own values and product in float32, rounded by torch; blocks of 2 rows and 5 columns."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (7, 13), generator=random, dtype=torch.uint8)
    scales = torch.rand(4, 3, generator=random) + 0.1
    each = scales.repeat_interleave(2, 0)[:7].repeat_interleave(5, 1)[:, :13]
    whole = (codes.view(torch.float8_e4m3fn).float() * each).bfloat16()[first[0] :, first[1] :]
    words = bfloat16_bits(codes.numpy()[first[0] :, first[1] :], scales.numpy(), (2, 5), first)
    assert np.array_equal(words, whole.contiguous().view(torch.int16).numpy().view(np.uint16))


# ---------------------------------------------------------------- conversion


def test_it_becomes_a_bfloat16_checkpoint_without_a_quantisation(stored, tmp_path):
    folder, meant = stored
    report = write_hf(open_hf(folder), tmp_path / "hf", Options(verify=True))
    assert same_bits(load_file(tmp_path / "hf" / "model-00001.safetensors"), meant)
    assert report.left_out == ()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert load_model_spec(tmp_path / "hf") == load_model_spec(folder) and not load_model_spec(tmp_path / "hf").is_fp8


def test_it_becomes_a_checkpoint_of_ours_at_a_layout_and_comes_back(stored, tmp_path, monkeypatch):
    """Matrices do not fit into a block or a scratch buffer, nor a rank's part into a file."""
    monkeypatch.setattr(mrl.checkpoint.planned_file, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(mrl.checkpoint.stored_boxes, "SCRATCH_BYTES", 3000)
    folder, meant = stored
    ours = tmp_path / "ours"
    write_layout(open_hf(folder), ours, parse_layout("tp=2,pp=2,ep=2"), options=Options(verify=True))
    assert "quantization_config" not in read_manifest(ours).hf_config
    assert "quantization_config" not in json.loads((ours / "hf" / "config.json").read_text())
    assert not open_mrl(ours).model.is_fp8
    write_hf(open_mrl(ours), tmp_path / "back")
    assert same_bits(load_file(tmp_path / "back" / "model-00001.safetensors"), meant)


def test_scales_may_lie_in_another_file_than_their_matrix(stored, tmp_path):
    folder, meant = stored
    tensors = load_file(folder / FILE)
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        parts["b.safetensors" if name.endswith("_scale_inv") else "a.safetensors"][name] = tensor
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    index = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    checkpoint = open_hf(tmp_path)
    before = checkpoint.identity
    output = tmp_path.with_name(f"{tmp_path.name}-hf")
    write_hf(checkpoint, output)
    assert same_bits(load_file(output / "model-00001.safetensors"), meant)
    (tmp_path / "b.safetensors").touch()
    assert checkpoint.identity != before  # what was begun with other scales is not gone on with


def test_reading_takes_a_few_megabytes_whatever_the_size_of_a_matrix(tmp_path):
    shape, name = (8192, 2048), "a.weight"  # 16 MiB of codes, 32 MiB of bfloat16
    codes = torch.full(shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # ones
    scales = torch.full([size // BLOCK for size in shape], 2.0)
    save_file({name: codes, f"{name}_scale_inv": scales}, tmp_path / FILE)
    files = SafetensorsFiles(tmp_path)
    files.read_headers([FILE])
    reader = Fp8Reader(tmp_path, [whole_tensor(name, shape, FILE)], files, {name: FILE}, (BLOCK, BLOCK))
    out = np.empty(shape, np.uint16)
    tracemalloc.start()
    reader.fill(WEIGHT, name, Box.whole(shape), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.close()
    assert peak < 8 * MIB and (out == 0x4000).all()


# ---------------------------------------------------------------- what is refused

Q = "model.layers.1.self_attn.q_b_proj.weight"
SCALES = f"{Q}_scale_inv"


def misshapen(tensors):
    tensors[SCALES] = tensors[SCALES][:-1].contiguous()


def in_bfloat16(tensors):
    tensors[SCALES] = tensors[SCALES].bfloat16()


def of_five_bits(tensors):
    tensors[Q] = tensors[Q].float().to(torch.float8_e5m2)


def of_a_norm(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


def of_no_matrix(tensors):
    tensors["lm_head.weight_scale_inv"] = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (lambda tensors: tensors.pop(SCALES), {}, rf"{Q} is F8_E4M3 and its scales, {SCALES}, are missing"),
        (misshapen, {}, rf"{SCALES} is F32 of shape \[2, 1\], not F32 of shape \[3, 1\]: one for 128 by 128 elements"),
        (in_bfloat16, {}, rf"{SCALES} is BF16"),
        (of_five_bits, {}, rf"{Q} is F8_E5M2"),
        (of_a_norm, {}, r"model.norm.weight is F8_E4M3 of shape \[160\]: only matrices"),
        (of_no_matrix, {}, "lm_head.weight_scale_inv is not part of the model"),
        (
            len,
            {"quantization_config": None},
            "but config.json has no quantization_config for it",
        ),
    ],
)
def test_files_that_cannot_be_read_so_are_refused_by_the_tensors_name(changed, change, config, words):
    folder = changed(change, **config)
    with pytest.raises(EnvironmentFault, match=words):
        check_checkpoint(folder, load_model_spec(folder))
    with pytest.raises(EnvironmentFault, match=words):
        open_hf(folder)


def test_rounded_constants_of_routers_are_told_as_what_they_are(changed):
    """Megatron takes them, conversions and evaluations do not; the files belong together all the same."""
    constants = "model.layers.1.mlp.gate.e_score_correction_bias"

    def in_fewer_bits(tensors):
        tensors[constants] = tensors[constants].bfloat16()

    with pytest.raises(EnvironmentFault, match=f"{constants} is BF16, and the constants of routers") as refusal:
        open_hf(changed(in_fewer_bits))
    assert "manifest" not in str(refusal.value)


# ---------------------------------------------------------------- Megatron, engines, runs


def test_megatron_is_given_the_same_bits(stored):
    folder, meant = stored
    files = Bfloat16Files(str(folder), (BLOCK, BLOCK))
    names = list(meant)
    assert same_bits(files.load_some_hf_weight(names), meant)
    assert torch.equal(files.load_one_hf_weight(Q), meant[Q])


def test_an_engine_is_the_bfloat16_model_and_waits_for_its_weights(stored, plain):
    of_fp8, of_plain = (_of_model(load_model_spec(folder), "cpu") for folder in (stored[0], plain))
    assert of_fp8.pop("load_format") == AWAITED and "load_format" not in of_plain
    assert of_fp8["hf_overrides"].pop("quantization_config", "missing") is None
    assert of_fp8 == of_plain


def test_vllm_is_told_of_no_quantisation(stored):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(stored[0])
    assert config.quantization_config
    config.update(_of_model(load_model_spec(stored[0]), "cpu")["hf_overrides"])  # as vLLM does
    assert getattr(config, "quantization_config", None) is None


def test_the_user_cannot_have_vllm_load_it(stored):
    config = load_config(
        "parallel_configs/tiny-moe/cpu.yaml", overrides=['rollout.engine_kwargs.vllm={"load_format": "auto"}']
    )
    fields = {violation.field for violation in violations(config, load_model_spec(stored[0]))}
    assert "rollout.engine_kwargs.vllm.load_format" in fields


def test_a_saved_step_has_a_configuration_of_its_own_weights(stored, tmp_path):
    facts = copy_hf_files(stored[0], tmp_path)
    written = (tmp_path / "config.json").read_bytes()
    assert "quantization_config" not in json.loads(written) and facts["config.json"] == facts_of(written)


def test_an_evaluation_converts_it_first_and_a_plain_one_not(stored, plain):
    assert _stored_otherwise(str(plain), None) is None
    assert _stored_otherwise(str(stored[0]), None).scales


@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float32])
def test_other_families_are_read_too_with_routers_in_float32_beside_them(gates, tmp_path):
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    sizes = {"hidden_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "vocab_size": 90, "intermediate_size": 96, "num_local_experts": 4}
    config = MiniMaxM2Config(**sizes, num_experts_per_tok=2, rotary_dim=16, pad_token_id=None)
    plain = save(in_dtype(MiniMaxM2ForCausalLM(config), torch.bfloat16), tmp_path / "plain")
    written = json.loads((plain / "config.json").read_text()) | {"rotary_dim": 16}
    (plain / "config.json").write_text(json.dumps(written))
    meant = in_fp8(plain, tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8" / FILE)
    for name, tensor in stored.items():
        if ".gate.weight" in name and "scale" not in name:
            stored[name] = tensor.to(gates)
    save_file(stored, tmp_path / "fp8" / FILE, {"format": "pt"})
    write_hf(open_hf(tmp_path / "fp8"), tmp_path / "hf", Options(workers=1, verify=True))
    found = {
        name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[name], meant[name]) for name in meant)
