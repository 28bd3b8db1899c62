#!/usr/bin/env bash
# Makes the golden files of tests/outside anew: peers' own functions, called in an environment of their own.
#   scripts/evidence/outside.sh [TOPIC ...]     without a topic: all
# MRL_OUTSIDE_VENV names the environment (default .venv-outside, about 2 GB). verl 0.9.1 wants another transformers than
# mrl's row and Hydra another antlr than its math rules, so the two cannot share one.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${MRL_OUTSIDE_VENV:-$PWD/.venv-outside}
stamp=$venv/.made-$(sha256sum "$0" | cut -c1-16)
if [ ! -e "$stamp" ]; then
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    pip="$venv/bin/python -m pip install -q --disable-pip-version-check"
    $pip "torch==2.13.0+cpu" 2>/dev/null || $pip "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu
    $pip verl==0.9.1 "math-verify[antlr4_9_3]==0.9.0" trl==1.16.0 peft==0.21.2 torchdata==0.11.0 \
        openai==3.57.0 anthropic==2.14.0 "fla-core[cpu]==0.6.0" swebench==5.0.2
    $pip --no-deps openrlhf==0.11.2 # its requirements want a GPU; its losses do not
    $pip --no-deps megatron-bridge==0.3.1  # the same: what writes its files needs torch alone
    # GiGPO's authors publish no package
    mkdir -p "$venv/gigpo"
    curl -fsSL -o "$venv/gigpo/core_gigpo.py" \
        https://raw.githubusercontent.com/langfengQ/DrMAS/3b556f2c0373fe23d6b637cbd3673c076713aebe/gigpo/core_gigpo.py
    # nor does slime; its converters need torch alone
    slime=https://raw.githubusercontent.com/THUDM/slime/624b824a898ab0ec1fcb4d373004c7f3852bf515
    folder=slime/backends/megatron_utils
    for file in $folder/misc_utils.py $folder/megatron_to_hf/{__init__,deepseekv3,glm4,glm4moe,llama,mimo,minimax_m2,qwen2,qwen3_5,qwen3_next,qwen3_vl,qwen3moe}.py \
        $folder/megatron_to_hf/processors/{__init__,padding_remover}.py tools/convert_torch_dist_to_hf.py; do
        curl -fsSL --create-dirs -o "$venv/slime/$file" "$slime/$file"
    done
    touch "$stamp"
fi
export PYTHONPATH=$venv/gigpo:$venv/slime:$venv/slime/tools
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=
# vLLM's CPU build is in mrl's own environment, which its requirements share with no other peer
own=(parsers)
others=()
for topic in tests/outside/peers/*.py; do
    topic=$(basename "$topic" .py)
    [[ " ${own[*]} " == *" $topic "* ]] || others+=("$topic")
done
asked=("$@")
[ $# -gt 0 ] || asked=("${own[@]}" "${others[@]}")
for topic in "${asked[@]}"; do
    python=$venv/bin/python
    [[ " ${own[*]} " != *" $topic "* ]] || python=.venv/bin/python
    "$python" tests/outside/make.py "$topic"
done
