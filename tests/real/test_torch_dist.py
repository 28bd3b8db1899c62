"""Megatron's own checkpoints: what its dist_checkpointing saves is read bit by bit, and what is written here it loads
bit by bit.

Both sides run Megatron's code on real models whose weights mbridge loaded; nothing of mrl's conversion has a part in
them. Checkpoints of ours are held against mbridge's load and export in the same ranks, for every family of models.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import save, tiny_dense, tiny_moe, tiny_qwen2, tiny_shared

from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.open_checkpoint import open_hf
from mrl.tools.torch_dist.read import open_torch_dist
from mrl.tools.torch_dist.write import write_torch_dist

pytestmark = [pytest.mark.real, pytest.mark.long]

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
# the tied one last: mbridge 0.15.1 writes its map of tied embeddings into a class, so a later model of the process
# loads a wrong lm_head
MODELS = {"moe": tiny_moe, "shared": tiny_shared, "qwen2": tiny_qwen2, "dense": tiny_dense}
DEGREES = {
    "moe": {TP: 2, PP: 2, EP: 2},
    "shared": {TP: 2, PP: 2, EP: 2},
    "dense": {TP: 2, PP: 2},
    "qwen2": {TP: 2, PP: 2},
}
STYLES = {"stacked": None, "layers": {"non_homogeneous_layers": True}, "singleton": {"singleton_local_shards": True}}
VERIFIED = Options(verify=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Megatron saves at one layout, and loads at two what is written here."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("torch-dist")
    loads = []
    for name, make in MODELS.items():
        save(make().to(torch.bfloat16), out / name)
        (out / name / "tokenizer.json").write_text("{}")
        write_torch_dist(open_hf(out / name), out / f"ours-{name}", options=VERIFIED)
        write_layout(open_hf(out / name), out / f"mrl-{name}", {"world_size": 4} | DEGREES[name], options=VERIFIED)
        loads.append((name, name, None))
    write_torch_dist(open_hf(out / "moe"), out / "ours-layers", separate_layers=True, options=VERIFIED)
    loads.insert(0, ("moe", "layers", STYLES["layers"]))
    for world in (4, 1):
        tasks = []
        for name, written, metadata in loads:
            degrees = DEGREES[name] if world == 4 else {}
            path = str(out / f"ours-{written}" / "release")
            tasks.append(
                _task(out, "load", name, degrees, world)
                | {"name": f"load-{written}", "path": path, "metadata": metadata}
            )
            if world == 4 and name == written:
                tasks.append(
                    _task(out, "save", name, degrees, 4) | {"path": str(out / f"saved-{name}"), "styles": STYLES}
                )
                tasks.append(_task(out, "ours", name, degrees, 4) | {"path": str(out / f"mrl-{name}")})
        folder = out / f"world-{world}"
        folder.mkdir()
        (folder / "tasks.json").write_text(json.dumps(tasks))
        run_ranks(Path(__file__).with_name("torch_dist_worker.py"), world, folder, [str(folder / "tasks.json")])
    return out


def _task(out: Path, kind: str, model: str, degrees: dict[str, int], world: int) -> dict:
    config = {
        "model": {"path": str(out / model), "dtype": "bfloat16"},
        "actor": {"layout": {"world_size": world} | degrees, "ppo_mini_batch_size": 4},
        "rollout": {"n": 1},
        "data": {"train_batch_size": 4},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }
    return {"kind": kind, "name": f"{kind}-{model}", "config": config}


@pytest.mark.parametrize("world", [4, 1])
@pytest.mark.parametrize("written", [*MODELS, "layers"])
def test_megatron_loads_what_is_written_as_mbridge_loads_the_original(results, written, world):
    for rank in range(world):
        report = json.loads((results / f"world-{world}" / f"load-{written}-{rank}.json").read_text())
        assert report["wrong"] == report["missing"] == [] and report["count"] > 10
        assert report["common"]["iteration"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_converted_checkpoint_of_ours_is_what_mbridge_loads_and_exports(results, model):
    for rank in range(4):
        report = json.loads((results / "world-4" / f"ours-{model}-{rank}.json").read_text())
        assert report["wrong"] == report["missing"] == report["exported_wrong"] == [] and report["count"] > 10


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model", MODELS)
def test_what_megatron_saved_at_tp2_pp2_ep2_is_the_original_byte_for_byte(results, tmp_path, model, style):
    report = write_hf(open_torch_dist(results / f"saved-{model}" / style, results / model), tmp_path / "hf", VERIFIED)
    original = load_file(results / model / "model.safetensors")
    found = {name: t for file in (tmp_path / "hf").glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == original.keys() and report.tensors == len(original)
    for name, tensor in original.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert report.left_out == ("optimizer.state.exp_avg.decoder.norm",)
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_a_saved_checkpoint_with_a_flipped_byte_is_named(results, tmp_path):
    saved = shutil.copytree(results / "saved-dense" / "stacked", tmp_path / "saved")
    file = max(saved.rglob("*.distcp"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match=rf"{file.name}.*(CRC-32|cannot be read)"):
        write_hf(open_torch_dist(saved, results / "dense"), tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
