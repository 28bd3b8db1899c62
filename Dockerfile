# syntax=docker/dockerfile:1
# docker build --target cpu -t mrl:cpu .      or cuda, or npu (--build-arg CHIP=910b for Atlas A2; the default is A3)
# Versions are those of setup.py and mrl/platforms/versions.py; a test compares. None of the three was ever built.

FROM python:3.11-slim-bookworm AS source
ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/mrl
COPY setup.py pyproject.toml README.md LICENSE ./
COPY mrl mrl
COPY parallel_configs parallel_configs
COPY launch launch
COPY scripts scripts

FROM source AS cpu
# the C++ compiler is vLLM's: it builds small kernels at run time
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
ENV MRL_VENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN bash -c 'source scripts/install.sh cpu'
ENTRYPOINT ["mrl"]

# docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 --ulimit nofile=65535 --device /dev/infiniband mrl:cuda doctor
# (shared memory for engines and weight syncs, addresses that other nodes reach, pinned memory and adapters for NCCL between nodes)
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
ENV PIP_NO_CACHE_DIR=1 MRL_VENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ wget \
    libibverbs1 ibverbs-providers rdma-core && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mrl
COPY --from=source /opt/mrl .
RUN bash -c 'source scripts/install.sh cuda'
ENTRYPOINT ["mrl"]

# docker run --ipc=host --network=host --ulimit memlock=-1 --ulimit nofile=65535 $(for i in $(seq 0 15); do echo --device /dev/davinci$i; done) \
#   --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
#   -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro -v /etc/hccn.conf:/etc/hccn.conf:ro mrl:npu doctor
# (the driver and its tools are the host's, and /etc/hccn.conf has the addresses of the devices' own adapters; 16 of an A3, 8 of an A2)
# CHIP: a3 (Atlas A3) or 910b (Atlas A2).
ARG CHIP=a3
FROM swr.cn-south-1.myhuaweicloud.com/ascendhub/cann:9.1.0-${CHIP}-ubuntu22.04-py3.12 AS npu
# which kernels vllm-ascend compiles; ascend910b1 for Atlas A2
ARG SOC_VERSION=ascend910_9392
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="https://triton-ascend.osinfra.cn/pypi/simple/ https://download.pytorch.org/whl/cpu"
# clang is what Ascend's Triton compiles with, wget what Kubernetes' probes may call
RUN apt-get update && apt-get install -y --no-install-recommends g++ clang-15 git libnuma-dev wget && rm -rf /var/lib/apt/lists/* \
    && update-alternatives --install /usr/bin/clang clang /usr/bin/clang-15 20 \
    && update-alternatives --install /usr/bin/clang++ clang++ /usr/bin/clang++-15 20 \
    && pip install setuptools==80.10.2 setuptools-scm==9.2.2 wheel==0.45.1 packaging==25.0
WORKDIR /opt
# vLLM without a device of its own, then its Ascend plugin, whose operators are compiled against CANN and the torch that is installed.
# torch's builds for CPUs, also on x86-64: torch_npu is made for them, and torchvision and torchaudio, which vllm-ascend wants, follow.
# vllm-ascend's wheel on the index is built for A2, and on A3 no engine would start: it is built here, from the sdist. Without isolation
# pip installs none of the requirements of that build (its pyproject.toml), so those that vLLM does not bring are named.
RUN git clone --depth 1 --branch v0.23.0 https://github.com/vllm-project/vllm.git \
    && VLLM_TARGET_DEVICE=empty pip install ./vllm && rm -rf vllm
RUN . /usr/local/Ascend/ascend-toolkit/set_env.sh && . /usr/local/Ascend/nnal/atb/set_env.sh \
    && pip install torch==2.10.0 torch-npu==2.10.0.post4 \
    && pip install cmake==3.31.6 pybind11==2.13.6 attrs==25.3.0 decorator==5.2.1 scipy==1.15.3 pandas==2.2.3 einops==0.8.1 \
    googleapis-common-protos==1.70.0 \
    && COMPILE_CUSTOM_KERNELS=1 SOC_VERSION=${SOC_VERSION} \
    pip install --no-build-isolation --no-binary=vllm-ascend vllm-ascend==0.23.0
# MindSpeed is on no package index and is imported from its sources. Its requirements ask for an older numpy and tokenizers than the row
# has; what it imports of them, the row brings.
RUN git clone --depth 1 --branch core_r0.16.0 https://gitcode.com/Ascend/MindSpeed.git && pip install --no-deps -e ./MindSpeed
WORKDIR /opt/mrl
COPY --from=source /opt/mrl .
# Last of all Ascend's Triton alone: on x86-64 other packages bring the usual one, which lies in the same folder.
RUN pip install -e ".[npu]" && pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend==3.2.2
# CANN's libraries are found through variables that its scripts set
ENTRYPOINT ["/bin/bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && source /usr/local/Ascend/nnal/atb/set_env.sh && exec mrl \"$@\"", "mrl"]
