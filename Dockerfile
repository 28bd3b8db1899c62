# syntax=docker/dockerfile:1
# docker build --target cpu -t mrl:cpu .     Versions: setup.py. Never built.

FROM python:3.11-slim-bookworm AS source
ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/mrl
COPY setup.py pyproject.toml README.md ./
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

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
ENV PIP_NO_CACHE_DIR=1 MRL_VENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mrl
COPY --from=source /opt/mrl .
RUN bash -c 'source scripts/install.sh cuda'
ENTRYPOINT ["mrl"]

FROM source AS npu
RUN echo "the npu platform is not there yet; see README.md" >&2 && exit 1
