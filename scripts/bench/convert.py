"""Speed of `mrl convert` both ways beside `cp` and `sync` of the same bytes, alternated, and the memory of its
processes.

The model is a synthetic Qwen3-MoE of random bits. Every side runs as a command of its own, start-up included. A
checkpoint of ours has a SHA-256 of every file, written or checked, so what that alone takes on one core is measured
beside. `--json` prints one object.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path
from statistics import median

LAYOUT = "tp=2,pp=2,ep=2"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}  # fmt: skip
POLL_S = 0.05  # of a high-water mark; oftener would cost what is measured


def make_model(folder: Path, experts: int) -> None:
    """A checkpoint of random bfloat16 numbers, a file a layer."""
    import torch
    from safetensors.torch import save_file

    from mrl.model import model_spec, tensor_specs

    torch.manual_seed(0)
    config = CONFIG | {"num_experts": experts}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    specs = tensor_specs(model_spec(config))
    weight_map = {}
    for layer in sorted({-1 if spec.layer is None else spec.layer for spec in specs}):
        own = [spec for spec in specs if (-1 if spec.layer is None else spec.layer) == layer]
        file = f"model-{layer + 2:05d}.safetensors"
        save_file({spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in own}, folder / file)
        weight_map |= {spec.name: file for spec in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copied(source: Path, target: Path) -> float:
    """Seconds of `cp` and `sync` of a folder."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.rglob("*.safetensors")], check=True)
    return time.perf_counter() - began


def digested(folder: Path) -> tuple[float, float]:
    """Seconds, and seconds of processor, of the SHA-256 of a folder's weights, by the function that conversions use."""
    began, used_cpu = time.perf_counter(), time.process_time()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")
    return time.perf_counter() - began, time.process_time() - used_cpu


def converted(direction: str, source: Path, target: Path, workers: int) -> tuple[float, int]:
    """(seconds of the whole command, largest peak of resident memory among its processes in bytes)."""
    layout = [] if direction == "megatron-to-hf" else ["--layout", LAYOUT]
    command = [
        Path(sys.executable).with_name("mrl"),
        "convert",
        direction,
        source,
        "-o",
        target,
        "--workers",
        str(workers),
        "--json",
        *layout,
    ]
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, *(_status(pid, "VmHWM") for pid in family(process.pid)))
        time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"{direction} ended with {process.returncode}")
    return time.perf_counter() - began, peak


def cpu_of_children() -> float:
    """Seconds of processor that ended child processes and theirs have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def family(pid: int) -> list[int]:
    """A process and its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(p for child in children for p in family(int(child)))]


def _status(pid: int, field: str) -> int:
    """Bytes that /proc says of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def level_after_imports() -> int:
    """Resident bytes of a process that has imported what a conversion imports."""
    program = (
        "import mrl.cli.main, mrl.checkpoint.convert\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM:')))"
    )
    return (
        int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout) * 1024
    )


def measure(work: Path, rounds: int, workers: int, experts: int) -> dict:
    """Alternates copy, there and back."""
    model, ours, back, copy = (work / name for name in ("model", "ours", "back", "copy"))
    make_model(model, experts)
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    subprocess.run(["sync", *model.glob("*.safetensors")], check=True)
    seconds: dict[str, list[float]] = {"copy": [], "SHA-256": [], "hf-to-megatron": [], "megatron-to-hf": []}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}  # on a machine that others use, the waiting is theirs
    peak = 0
    for _ in range(rounds):
        used_cpu = cpu_of_children()
        seconds["copy"].append(copied(model, copy))
        cpu["copy"].append(cpu_of_children() - used_cpu)
        spent, used_cpu = digested(model)
        seconds["SHA-256"].append(spent)
        cpu["SHA-256"].append(used_cpu)
        for direction, source, target in (("hf-to-megatron", model, ours), ("megatron-to-hf", ours, back)):
            digested(source)  # reads it: all sources are in the cache, as the one that is copied is
            used_cpu = cpu_of_children()
            spent, used = converted(direction, source, target, workers)
            seconds[direction].append(spent)
            cpu[direction].append(cpu_of_children() - used_cpu)
            peak = max(peak, used)
        for folder in (copy, ours, back):
            shutil.rmtree(folder)
    rates = {name: nbytes / median(values) for name, values in seconds.items()}
    return {
        "bytes": nbytes, "workers": workers, "layout": LAYOUT, "seconds": seconds, "cpu_seconds": cpu,
        "load": os.getloadavg()[0],
        "bytes_per_s": rates["hf-to-megatron"], "back_bytes_per_s": rates["megatron-to-hf"],
        "copy_bytes_per_s": rates["copy"],
        "ratio_to_copy": {name: median(map(truediv, seconds["copy"],
                    seconds[name])) for name in seconds if name != "copy"},
        "peak_rss_over_imports_bytes": peak - level_after_imports(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--experts", type=int, default=CONFIG["num_experts"], help="in a layer; 64 make 2 GB, 16 make 0.65 GB"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to write some 8 GB, on the disk that is meant (default: the temporary folder)",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        found = measure(Path(work), options.rounds, options.workers, options.experts)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{found['bytes'] / 1e9:.2f} GB, {LAYOUT}, {found['workers']} workers; seconds of each "
        "round, GB/s of the median"
    )
    print(f"load of the machine: {found['load']:.1f} on {os.cpu_count()} cores")
    for name, seconds in found["seconds"].items():
        ratio = f"   {found['ratio_to_copy'][name]:.2f} of the copy's speed" if name != "copy" else ""
        rounds = " ".join(f"{s:6.2f}" for s in seconds)
        print(f"{name:16} {rounds}   {found['bytes'] / median(seconds) / 1e9:5.2f} GB/s   "
              f"processor {median(found['cpu_seconds'][name]):.2f} s{ratio}")  # fmt: skip
    print(f"peak of a process over the level after imports: {found['peak_rss_over_imports_bytes'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
