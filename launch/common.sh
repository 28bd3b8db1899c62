# shellcheck shell=bash
# Functions of the start scripts: which devices this node has, waiting for them, and waiting for those of the whole cluster.

# The kind of device: $DEVICE (cpu, cuda or npu), else what this node shows.
mrl_device() {
    if [ -n "${DEVICE:-}" ]; then echo "$DEVICE"
    elif compgen -G "${MRL_DEV:-/dev}/davinci[0-9]*" >/dev/null; then echo npu
    elif command -v nvidia-smi >/dev/null; then echo cuda
    else echo cpu; fi
}

# Cores that this process may use. `nproc` alone would answer OMP_NUM_THREADS, which is often 1 here.
mrl_cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# Whether $2, the setting $1, is a whole number from $3 to $4; one that is not set is.
mrl_check_number() {
    if [ -z "$2" ] || { [[ $2 =~ ^[0-9]{1,9}$ ]] && [ "$2" -ge "$3" ] && [ "$2" -le "$4" ]; }; then return 0; fi
    echo "$1=$2: a whole number from $3 to $4 is wanted" >&2
    return 4
}

# Makes Ray's folder $1, unless it is there, and asks whether it can be written. Ray puts sockets below it, whose names the kernel bounds.
mrl_make_temp() {
    if [[ $1 != /* ]]; then echo "TEMP=$1: an absolute path is wanted" >&2
    elif [ ${#1} -gt 40 ]; then echo "TEMP=$1 is of ${#1} characters, and Ray's sockets below it allow 40" >&2
    elif ! { mkdir -p "$1" && [ -w "$1" ]; } 2>/dev/null; then
        echo "TEMP=$1 cannot be written: another user's, perhaps; set TEMP to a folder of yours" >&2
    else return 0; fi
    return 4
}

# The file of Ray's token; nothing where neither RAY_AUTH_TOKEN_PATH nor HOME says it.
mrl_token_file() { echo "${RAY_AUTH_TOKEN_PATH:-${HOME:+$HOME/.ray/auth_token}}"; }

# Whether the token's file $1 can be read, where there is one.
mrl_check_token() {
    if [ ! -e "$1" ] || { [ -f "$1" ] && [ -r "$1" ]; }; then return 0; fi
    echo "Ray's token in $1 cannot be read: make it a file of yours, or set RAY_AUTH_TOKEN" >&2
    return 4
}

# Makes the token that guards a head, unless there is one: Ray itself only asks for it.
mrl_make_token() {
    local file
    if [ "$RAY_AUTH_MODE" != token ] || [ -n "${RAY_AUTH_TOKEN:-}" ]; then return 0; fi
    file=$(mrl_token_file)
    [ -n "$file" ] || { echo "HOME is not set, so there is no place for Ray's token: set HOME, or RAY_AUTH_TOKEN" >&2; return 4; }
    mrl_check_token "$file" || return
    [ ! -s "$file" ] || return 0
    (umask 077 && mkdir -p "$(dirname "$file")" && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$file" && chmod 600 "$file") 2>/dev/null ||
        { echo "Ray's token cannot be written to $file: set HOME to a folder of yours, or RAY_AUTH_TOKEN" >&2; return 4; }
}

# Whether port $2, named by $1, lies outside of those that Ray gives its workers; further arguments: those of ray start.
mrl_check_port() {
    local name=$1 port=$2
    shift 2
    if [[ " $* " == *" --min-worker-port"* ]] || [ "$port" -lt 10002 ] || [ "$port" -gt 19999 ]; then return 0; fi
    echo "$name=$port is among the ports of Ray's workers (10002 to 19999): set another, or give --min-worker-port and --max-worker-port" >&2
    return 4
}

# How many devices of kind $1 this node has now.
mrl_count() {
    case $1 in
        cuda) { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true ;;
        npu) compgen -G "${MRL_DEV:-/dev}/davinci[0-9]*" | wc -l ;;
        cpu) echo "${CPUS:-$(mrl_cores)}" ;; # what Ray is told; nothing has to come up
        *) echo "DEVICE=$1 is no device; allowed: cpu, cuda, npu" >&2; return 2 ;;
    esac
}

# Waits until this node shows $DEVICES devices of kind $1 (drivers take a while after a boot), prints their number; without $DEVICES all there are.
mrl_wait_local() {
    local kind=$1 have want=${DEVICES:-} end=$((SECONDS + ${DEVICE_TIMEOUT_S:-300}))
    while have=$(mrl_count "$kind") || return; [ "$have" -lt "${want:-1}" ]; do
        if [ $SECONDS -ge $end ]; then
            echo "this node shows $have of ${want:-1} $kind devices after ${DEVICE_TIMEOUT_S:-300} s: look at nvidia-smi or npu-smi, or lower DEVICES" >&2
            return 4
        fi
        sleep "${POLL_S:-2}"
    done
    echo "${want:-$have}"
}

# Arguments of `ray start` that announce $2 devices of kind $1. Ray cannot be relied on to find NPUs by itself, and their resource is called NPU.
mrl_resources() {
    case $1 in
        cuda) echo "--num-gpus $2" ;;
        npu) echo "--resources {\"NPU\":$2}" ;;
        cpu) echo "--num-gpus 0" ;;
    esac
}

# Waits until the cluster at $1 has $2 devices of kind $3 together.
mrl_wait_cluster() {
    local address=$1 want=$2 name have end=$((SECONDS + ${CLUSTER_TIMEOUT_S:-900}))
    case $3 in cuda) name=GPU ;; npu) name=NPU ;; cpu) name=CPU ;; esac
    while have=$(ray status --address "$address" 2>/dev/null | awk -v n="$name" '$2 == n { split($1, part, "/"); print int(part[2]) }'); [ "${have:-0}" -lt "$want" ]; do
        if [ $SECONDS -ge $end ]; then
            echo "the cluster at $address has ${have:-0} of $want $name after ${CLUSTER_TIMEOUT_S:-900} s: is launch/start_worker.sh running on every node?" >&2
            return 4
        fi
        sleep "${POLL_S:-2}"
    done
    echo "the cluster at $address has $have $name"
}
