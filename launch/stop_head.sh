#!/usr/bin/env bash
# Stops the head that launch/start_head.sh started on this machine, and what runs on it. `ray stop` would end every Ray of yours here.
#   TEMP=/tmp/ray-mrl launch/stop_head.sh
# A job that runs is stopped first, where it is to save: `ray job stop JOB`, or Ctrl-C of `mrl submit`.
set -euo pipefail
temp=${TEMP:-/tmp/ray-mrl}
# processes of Ray's name the session's folder; workers end with their raylet. $1: a pattern of what stands before it
mrl_left() { pgrep -u "$(id -u)" -f -- "$1[=/]${temp#/}/session_" || true; }
[ -n "$(mrl_left "")" ] || { echo "no head of yours has its folder at $temp; TEMP names another" >&2; exit 4; }
# the raylet first, the head last: its monitor takes leave of it, and would wait for one that has gone
for kind in "raylet/raylet .*" "[.]py .*" ""; do
    mapfile -t processes < <(mrl_left "$kind")
    kill "${processes[@]}" 2>/dev/null || true
    end=$((SECONDS + ${STOP_TIMEOUT_S:-10}))
    while [ -n "$(mrl_left "$kind")" ] && [ $SECONDS -lt $end ]; do sleep 0.2; done
done
mapfile -t processes < <(mrl_left "")
kill -KILL "${processes[@]}" 2>/dev/null || true
echo "the head at $temp is stopped"
