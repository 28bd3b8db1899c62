"""A conversion that is killed without warning leaves no processes, and the same command finishes it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from deadlines import END_S
from safetensors.torch import load_file, save_file

from mrl.model import model_spec, tensor_specs

pytestmark = pytest.mark.real

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1024, "intermediate_size": 512,
    "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
MRL = Path(sys.executable).with_name("mrl")


@pytest.fixture
def model(tmp_path) -> Path:
    """200 MB of random numbers."""
    torch.set_num_threads(1)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in tensor_specs(model_spec(CONFIG))}
    save_file(tensors, folder / "model.safetensors")
    return folder


def command(which: str, source: Path, target: Path, *more: str) -> list[str]:
    return [str(MRL), "convert", which, str(source), "-o", str(target), "--workers", "2", "--json", *more]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def test_kill_9_and_the_same_command_again(model, tmp_path):
    there = command("hf-to-megatron", model, tmp_path / "ours", "--layout", "tp=2,pp=4,ep=4", "--verify")
    done = tmp_path / ".ours.partial" / "done"
    process = subprocess.Popen(there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: list(done.glob("*.json")), END_S)
        workers = children(process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    assert workers and wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), END_S)
    finished = len(list(done.glob("*.json")))
    assert 1 <= finished < 16 and not (tmp_path / "ours").exists()
    again = json.loads(subprocess.run(there, check=True, capture_output=True, timeout=END_S).stdout)
    assert (again["resumed_files"], again["files"], again["verified"]) == (finished, 16, True)
    subprocess.run(
        command("megatron-to-hf", tmp_path / "ours", tmp_path / "back"), check=True, capture_output=True, timeout=END_S
    )
    one = load_file(model / "model.safetensors")
    other = {name: t for file in (tmp_path / "back").glob("*.safetensors") for name, t in load_file(file).items()}
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "model", "ours"]
