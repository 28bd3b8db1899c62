"""`mrl convert --check` names what is wrong with an export, of each of a hundred drawn faults."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_model import SIZES
from torch import Tensor

from mrl.checkpoint.export_check import check_export
from mrl.cli.main import main
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import model_spec, tensor_specs
from mrl.model.hf_files import INDEX

QWEN3_MOE = {**SIZES, "hidden_size": 48, "torch_dtype": "bfloat16"}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60,
    "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
# Qwen3.5's text model, whose files may hold all experts of a layer in one tensor
STACKED = {
    **QWEN2, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def weights(config: dict) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for spec in tensor_specs(model_spec(config)):
        values = torch.randn(spec.shape, generator=generator) * 0.02
        if spec.name.endswith("norm.weight"):
            values = 1 + 10 * values
        made[spec.name] = values.to(getattr(torch, spec.dtype))
    return made


def write(folder: Path, tensors: dict[str, Tensor], config: dict, shards: int = 2) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    listed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in names[shard::shards]}
        save_file(part, folder / file)
        listed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Moved by a hundredth."""
    generator = torch.Generator().manual_seed(1)
    moves = {name: 1 + 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    return {name: (tensor.float() * moves[name]).to(tensor.dtype) for name, tensor in tensors.items()}


@pytest.fixture(scope="module", params=[QWEN3_MOE, QWEN2], ids=["qwen3_moe", "qwen2"])
def origin(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin") / "model"
    return write(folder, weights(request.param), request.param), request.param


def recoded(file: Path, encoding: str) -> None:
    file.write_text(file.read_text(), encoding)


def draw(kind: str, tensors: dict[str, Tensor], rng: random.Random) -> tuple[list[str], str] | None:
    """Changes the tensors by a fault of a kind. Returns the tensors of which one must be named and words that must be
    said of it; None if this model has no such tensor.
    """
    matrices = [n for n, t in tensors.items() if t.ndim == 2]
    name = rng.choice(matrices)
    layer = rng.choice(sorted({n.split(".")[2] for n in tensors if ".layers." in n}))
    attention = f"model.layers.{layer}.self_attn."
    experts = sorted({n.rpartition(".experts.")[2].split(".")[0] for n in tensors if ".experts." in n})
    match kind:
        case "transposed":
            tensors[name] = tensors[name].T
            return [name], "transposed"
        case "gate for up":
            gate = rng.choice([n for n in matrices if "gate_proj" in n])
            up = gate.replace("gate_proj", "up_proj")
            tensors[gate], tensors[up] = tensors[up], tensors[gate]
            return [gate, up], "holds "
        case "experts swapped":
            if not experts:
                return None
            one, other = rng.sample(experts, 2)
            for part in ("gate", "up", "down"):
                names = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for e in (one, other)]
                tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
            return names, "holds "
        case "expert repeated":
            if not experts:
                return None
            one, other = rng.sample(experts, 2)
            for part in ("gate", "up", "down"):
                names = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for e in (one, other)]
                tensors[names[0]] = tensors[names[1]]
            return names, "holds |same values"
        case "layer repeated":
            shared = [n for n in tensors if f".layers.{layer}." in n]
            other = "0" if layer != "0" else "1"
            for n in shared:
                tensors[n] = tensors[n.replace(f".layers.{layer}.", f".layers.{other}.")]
            return shared, "holds |same values"
        case "norm as made":
            name = rng.choice([n for n in tensors if n.endswith("norm.weight")])
            tensors[name] = torch.ones_like(tensors[name])
            return [name], "as a norm is made"
        case "norms swapped":
            names = [f"model.layers.{layer}.{n}_layernorm.weight" for n in ("input", "post_attention")]
            tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
            return names, "holds "
        case "bias left out":
            biases = [n for n in tensors if n.endswith(".bias")]
            if not biases:
                return None
            name = rng.choice(biases)
            if rng.random() < 0.5:
                del tensors[name]
                return [name], "is missing"
            tensors[name] = torch.zeros_like(tensors[name])
            return [name], "is 0 everywhere"
        case "NaN":
            name = rng.choice(sorted(tensors))
            bad = tensors[name].clone()
            bad.view(-1)[rng.randrange(bad.numel())] = rng.choice([torch.nan, torch.inf])
            tensors[name] = bad
            return [name], "1 elements that are NaN or infinite"
        case "dtype":
            tensors[name] = tensors[name].to(rng.choice([torch.float32, torch.float16]))
            return [name], "is F32, not|is F16, not"
        case "vocabulary padded":
            name = rng.choice(["model.embed_tokens.weight", "lm_head.weight"])
            rows = tensors[name].new_zeros(rng.choice([1, 22]), tensors[name].shape[1])
            tensors[name] = torch.cat([tensors[name], rows])
            return [name], "padding of the vocabulary was kept"
        case "q, k, v fused":
            names = [f"{attention}{x}_proj.weight" for x in "qkv"]
            fused = torch.cat([tensors[n] for n in names])
            groups = tensors[names[1]].shape[0] // 8
            fused = fused.reshape(groups, -1, fused.shape[1]).transpose(0, 1).reshape(fused.shape)  # rows dealt out
            begin = 0
            for n in names:
                size = len(tensors[n])
                tensors[n] = fused[begin : begin + size]
                begin += size
            return names, "rows in other places|holds "
        case "heads in another order":
            name = f"{attention}q_proj.weight"
            heads = tensors[name].reshape(-1, 8, tensors[name].shape[1])
            tensors[name] = heads.flip(0).reshape(tensors[name].shape)
            return [name], "rows in other places"
        case "columns joined wrongly":
            name = rng.choice([n for n in matrices if "o_proj" in n or "down_proj" in n])
            half = tensors[name].shape[1] // 2
            tensors[name] = torch.cat([tensors[name][:, half:], tensors[name][:, :half]], 1)
            return [name], "columns in other places"
        case "of another model":
            tensors[name] = (torch.randn(tensors[name].shape) * 0.02).to(torch.bfloat16)
            return [name], "of its length, more than training moves"
        case "name":
            tensors[f"model.{name}"] = tensors.pop(name)
            return [name], "is missing"
    raise AssertionError(kind)


KINDS = (
    "transposed", "gate for up", "experts swapped", "expert repeated", "layer repeated", "norm as made",
    "norms swapped",
    "bias left out", "NaN", "dtype", "vocabulary padded", "q, k, v fused", "heads in another order",
    "columns joined wrongly", "of another model", "name",
)  # fmt: skip
DRAWS = 5  # of each kind and model


def test_a_hundred_drawn_faults_are_named_with_what_they_are(origin, tmp_path):
    folder, config = origin
    rng = random.Random(5)
    sound = trained(weights(config))
    named = 0
    for number, kind in enumerate(kind for kind in KINDS for _ in range(DRAWS)):
        tensors = dict(sound)
        drawn = draw(kind, tensors, rng)
        if drawn is None:
            continue
        export = write(tmp_path / str(number), tensors, config)
        report = check_export(export, folder)
        names, words = drawn
        said = [fault.what for fault in report.faults if fault.tensor in names]
        assert any(word in what for what in said for word in words.split("|")), (kind, names, report.faults[:4])
        shutil.rmtree(export)
        named += 1
    assert named >= 65


def step_of(
    kind: str, name: str, tensor: Tensor, size: float, rng: random.Random, generator: torch.Generator
) -> Tensor:
    """A change as training makes it. `size`: of an element's step, or of a low-rank product."""
    signs = torch.randn(tensor.shape, generator=generator).sign()
    if kind == "LoRA":
        if tensor.ndim < 2 or not ("q_proj" in name or "v_proj" in name or "down_proj" in name):
            return torch.zeros(tensor.shape)
        left = torch.randn(tensor.shape[0], 2, generator=generator)
        return size * left @ torch.randn(2, tensor.shape[1], generator=generator)
    if kind == "some layers" and ".layers.1." not in name:
        return torch.zeros(tensor.shape)
    if name.endswith("mlp.gate.weight"):  # a frozen router
        return torch.zeros(tensor.shape)
    if kind == "rare tokens" and ("embed" in name or "lm_head" in name):
        steps = torch.rand(len(tensor), 1, generator=generator)
        return size * signs * torch.where(steps < 0.8, 0.0, steps)
    if kind == "drawn steps":
        return size * torch.randn(tensor.shape, generator=generator) * rng.choice([0.5, 1, 2])
    return size * signs


TRAININGS = ("all alike", "LoRA", "some layers", "rare tokens", "drawn steps")


def test_what_training_does_is_no_fault(origin, tmp_path):
    _, config = origin
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    for number in range(25):
        before = weights(config)
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"):
            before[name][3:7] *= 0.02  # short rows, for which a step is long
            before[name][9] = 0
        for name in before:
            if name.endswith("bias") and number % 2:
                before[name][:] = 0  # as they are made
        folder = write(tmp_path / f"{number}-before", before, config)
        kind, size = TRAININGS[number % 5], (1e-6, 2e-5, 1e-4, 5e-4, 2e-3)[number // 5]
        after = {n: (t.float() + step_of(kind, n, t, size, rng, generator)).to(t.dtype) for n, t in before.items()}
        report = check_export(write(tmp_path / f"{number}-after", after, config), folder)
        assert report.is_sound, (kind, size, report.faults[:3])


E, H, K, D, OUT = (
    "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight",
)  # fmt: skip


def with_zeros(tensor: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
    made = tensor.clone()
    made[rows, columns] = 0
    return made


PARTS = [  # tensor, damage, words
    (E, lambda t: with_zeros(t, slice(-4, None)), "rows 56-59 of 60 are zero, and are not in the origin"),
    (H, lambda t: with_zeros(t, slice(-4, None)), "rows 56-59 of 60 are zero, and are not in the origin"),
    (E, lambda t: torch.cat([t[:-3], 0.02 * torch.randn(3, t.shape[1]).bfloat16()]), "rows 57-59 of 60 moved by up"),
    (E, lambda t: t[[1, 0, *range(2, 60)]], "in other places: row 0 is the origin's row 1"),
    (H, lambda t: torch.cat([t[:56], t[52:56]]), "in other places: row 56 is the origin's row 52"),
    (D, lambda t: with_zeros(t, columns=slice(-3, None)), "columns 45-47 of 48 are zero"),
    (D, lambda t: t[:, [1, 0, *range(2, 48)]], "in other places: column 0 is the origin's column 1"),
    (K, lambda t: with_zeros(t, slice(-2, None)), "rows 14-15 of 16 are zero"),
    (OUT, lambda t: t * 1.29, "it is 1.29 times the origin's"),
    (OUT, lambda t: t * 2, "it is 2.00 times the origin's"),
    ("model.norm.weight", lambda t: t * 1.25, "it is 1.25 times the origin's"),
    ("model.norm.weight", lambda t: t.flip(0), "half of the tensors that moved by"),
]


@pytest.mark.parametrize("is_trained", [True, False])
def test_damage_of_a_part_is_named(is_trained, tmp_path):
    before = weights(QWEN2)
    before["model.norm.weight"] = 1 + 0.5 * (before["model.norm.weight"] - 1)
    folder = write(tmp_path / "before", before, QWEN2)
    generator = torch.Generator().manual_seed(3)
    after = dict(before)
    if is_trained:
        after = {n: (t + 2e-5 * torch.randn(t.shape, generator=generator)).bfloat16() for n, t in before.items()}
    for number, (name, damage, words) in enumerate(PARTS):
        if not is_trained and ("1.29" in words or "1.25" in words or "half of" in words):
            continue  # nothing is usual
        export = write(tmp_path / str(number), {**after, name: damage(after[name])}, QWEN2)
        said = [fault for fault in check_export(export, folder).faults if fault.tensor == name]
        assert len(said) == 1 and words in said[0].what, (number, said)


def test_zero_rows_without_an_origin_are_a_fault_of_projections_and_a_note_of_tokens(tmp_path):
    tensors = weights(QWEN2)
    tensors |= {E: with_zeros(tensors[E], slice(-4, None)), D: with_zeros(tensors[D], slice(2, 7, 2))}
    report = check_export(write(tmp_path / "a", tensors, QWEN2))
    assert [(fault.tensor, fault.what) for fault in report.faults] == [(D, "rows 2, 4, 6 of 32 are zero")]
    assert any(note.startswith(f"{E}: rows 56-59 of 60 are zero: unused tokens") for note in report.notes)
    assert check_export(tmp_path / "a", tmp_path / "a").is_sound  # they are in the origin, too


def test_a_trained_model_is_sound_and_moved(origin, tmp_path, capsys):
    folder, config = origin
    export = write(tmp_path / "export", trained(weights(config)), config, shards=3)
    main(["convert", "--check", str(export), "--against", str(folder), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["faults"] == [] and len(answer["moved"]["farthest"]) == 10
    assert 0.008 < answer["moved"]["median"] < 0.012
    main(["convert", "--check", str(folder), "--against", str(folder)])
    said = capsys.readouterr().out
    assert "all tensors are the origin's, unmoved" in said and "moved from" not in said
    main(["convert", "--check", str(export)])
    said = capsys.readouterr().out
    assert ": sound" in said and "without --against, tensors in each other's place cannot be seen" in said


def test_ten_faults_are_shown_and_the_exit_code_is_of_the_environment(origin, tmp_path, capsys):
    _, config = origin
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights(config).items()}
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--check", str(write(tmp_path / "export", tensors, config))])
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 4 and f"{len(tensors)} faults" in said[0]
    assert len([line for line in said if line.startswith("  ") and "NaN" in line]) == 10
    assert said[11] == f"  and {len(tensors) - 10} more (--json has all)"


def test_what_can_be_seen_without_an_origin(origin, tmp_path):
    _, config = origin
    tensors = weights(config)
    one = "model.layers.0.self_attn.o_proj.weight"
    tensors[one.replace(".0.", ".1.")] = tensors[one]
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 0
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    said = {fault.tensor: fault.what for fault in check_export(write(tmp_path / "e", tensors, config)).faults}
    assert said == {
        one.replace(".0.", ".1."): f"has the same values as {one}",
        "model.layers.0.self_attn.k_proj.weight": "is 0 everywhere",
        "model.norm.weight": "is 1 everywhere, as a norm is made: the trained one was left out",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "a", "tokenizer", "b", "-o", "c"], "exclude tokenizer"),
        (["--against", "a"], "belong to --check"),
        (["--check", "nowhere"], "nowhere/config.json does not exist"),
    ],
)
def test_wrong_calls_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert", *arguments])
    assert ended.value.code in (2, 4) and words in capsys.readouterr().err


def test_tied_embeddings(tmp_path):
    config = {**QWEN2, "tie_word_embeddings": True}
    tensors = weights(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert check_export(write(tmp_path / "a", tensors, config)).is_sound
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    (fault,) = check_export(write(tmp_path / "b", tensors, config)).faults
    assert fault.tensor == "lm_head.weight" and "tie_word_embeddings" in fault.what


def test_all_in_another_dtype_is_said_once(tmp_path):
    for dtype, words in ((torch.float16, ("are F16, and", "65504")), (torch.float32, ("are F32, and",))):
        tensors = {name: tensor.to(dtype) for name, tensor in weights(QWEN2).items()}
        (fault,) = check_export(write(tmp_path / str(dtype), tensors, QWEN2)).faults
        assert fault.tensor == "" and all(word in fault.what for word in words)


def test_without_a_dtype_in_the_configuration_that_of_the_files_is_taken(tmp_path):
    config = {key: value for key, value in QWEN2.items() if key != "torch_dtype"}
    tensors = weights(QWEN2)
    report = check_export(write(tmp_path / "a", tensors, config))
    assert report.is_sound and "config.json has no dtype: BF16 of the files is taken" in report.notes[0]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    (fault,) = check_export(write(tmp_path / "b", tensors, config)).faults
    assert fault.tensor == "lm_head.weight" and "is F16, not BF16" in fault.what


def test_one_fault_is_one(tmp_path, capsys):
    tensors = weights(QWEN2)
    tensors.pop("model.norm.weight")
    with pytest.raises(SystemExit):
        main(["convert", "--check", str(write(tmp_path / "a", tensors, QWEN2))])
    assert ": 1 fault\n" in capsys.readouterr().out


def test_experts_of_a_model_that_reads_images_are_told_apart(tmp_path):
    before = weights(STACKED)
    folder = write(tmp_path / "o", before, STACKED)
    export = stacked(trained(before))
    assert check_export(write(tmp_path / "a", export, STACKED), folder).is_sound
    experts = export["model.language_model.layers.1.mlp.experts.down_proj"]
    experts[[0, 2]] = experts[[2, 0]]
    said = {fault.tensor: fault.what for fault in check_export(write(tmp_path / "b", export, STACKED), folder).faults}
    assert said == {
        f"model.layers.1.mlp.experts.{one}.down_proj.weight":
        f"holds model.layers.1.mlp.experts.{other}.down_proj.weight of the origin" for one, other in ((0, 2), (2, 0))
    }  # fmt: skip


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a layer in one tensor, under the names of a model that also reads images."""
    made = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items() if ".experts." not in n}
    if "lm_head.weight" in tensors:
        made["lm_head.weight"] = tensors["lm_head.weight"]
    for layer in range(STACKED["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        of = {x: [tensors[f"{prefix}.{e}.{x}_proj.weight"] for e in range(4)] for x in ("gate", "up", "down")}
        inside = prefix.replace("model.", "model.language_model.", 1)
        joined = [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
        made |= {f"{inside}.gate_up_proj": torch.stack(joined), f"{inside}.down_proj": torch.stack(of["down"])}
    return made


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda f: next(iter(sorted(f.glob("*.safetensors")))).unlink(), EnvironmentFault, "although .* lists it"),
        (lambda f: (f / "config.json").unlink(), EnvironmentFault, "config.json does not exist"),
        (lambda f: (f / "config.json").write_text(json.dumps({**QWEN2, "architectures": ["Owl"]})), ConfigError, "Owl"),
        (lambda f: next(f.glob("*.safetensors")).write_bytes(b"\xff" * 64), EnvironmentFault, "read as safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), EnvironmentFault, "cannot be read"),
        (lambda f: (f / INDEX).write_bytes(b"\xef\xbb\xbf{}"), EnvironmentFault, "as UTF-8 with a byte order mark"),
        (lambda f: recoded(f / "config.json", "utf-16"), EnvironmentFault, "saved as UTF-16; save it as UTF-8"),
        (lambda f: recoded(f / "config.json", "utf-8-sig"), EnvironmentFault, "saved as UTF-8 with a byte order"),
        (lambda f: (f / INDEX).write_text("[]"), EnvironmentFault, "holds no JSON object, but a list"),
        (lambda f: (f / INDEX).write_text('{"metadata": {}}'), EnvironmentFault, "has no weight_map"),
        (lambda f: (f / INDEX).write_text('{"weight_map": [1]}'), EnvironmentFault, "weight_map must be .* not a list"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), EnvironmentFault, "weight_map is empty"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'), EnvironmentFault, "file's name for a, not"),
        (lambda f: [file.unlink() for file in f.glob("*model*")], EnvironmentFault, "no safetensors files"),
    ],
)
def test_bad_input_is_one_message(damage, error, words, tmp_path):
    export = write(tmp_path / "export", weights(QWEN2), QWEN2)
    damage(export)
    with pytest.raises(error, match=words):
        check_export(export)


def test_an_index_that_lists_other_tensors_is_named(tmp_path):
    export = write(tmp_path / "export", weights(QWEN2), QWEN2)
    index = export / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    file = listed["weight_map"].pop("model.norm.weight")
    listed["weight_map"]["model.layers.9.norm.weight"] = file
    index.write_text(json.dumps(listed))
    said = {fault.tensor: fault.what for fault in check_export(export).faults}
    assert "where model.safetensors.index.json lists it" in said["model.layers.9.norm.weight"]
    assert "does not list it" in said["model.norm.weight"]


def test_a_bias_of_zeros_is_judged_by_its_step(tmp_path):
    name = "model.layers.1.self_attn.k_proj.bias"
    before = weights(QWEN2)
    before[name][:] = 0
    folder = write(tmp_path / "before", before, QWEN2)
    for number, after in enumerate((dict(before), trained(before))):
        after[name] = torch.randn(after[name].shape).bfloat16()
        said = check_export(write(tmp_path / str(number), after, QWEN2), folder).faults
        assert [fault.tensor for fault in said] == [name] and "is zero in the origin, and moved by" in said[0].what


def test_shards_without_an_index_are_a_fault(tmp_path):
    export = write(tmp_path / "export", weights(QWEN2), QWEN2)
    (export / INDEX).unlink()
    assert [fault.what.split(":")[0] for fault in check_export(export).faults] == [
        f"model-00001-of-00002.safetensors without {INDEX}"
    ]


def test_another_models_files_are_said_at_once(tmp_path):
    (tmp_path / "a").mkdir()
    of_megatron = {f"decoder.layers.{i}.weight": torch.zeros(3) for i in range(9)}
    with pytest.raises(
        EnvironmentFault, match=r"another model's export: it has 0 of the .* decoder\.layers\.0\.weight"
    ):
        check_export(write(tmp_path / "b", of_megatron, QWEN2))
    other = {**QWEN2, "hidden_size": 2 * QWEN2["hidden_size"]}
    export = write(tmp_path / "c", weights(QWEN2), QWEN2)
    with pytest.raises(EnvironmentFault, match=r"another architecture .*hidden_size"):
        check_export(export, write(tmp_path / "d", weights(other), other))
