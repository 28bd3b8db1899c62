#!/usr/bin/env bash
# Stops the head that launch/start_head.sh started on this machine, and what runs on it. `ray stop` would end every Ray of yours here.
#   TEMP=/tmp/ray-mrl launch/stop_head.sh
# A job that runs is stopped first, where it is to save: `ray job stop JOB`, or Ctrl-C of `mrl submit`.
set -euo pipefail
temp=${TEMP:-/tmp/ray-mrl}
# processes of Ray's name the session's folder; workers end with their raylet
mrl_left() { pgrep -u "$(id -u)" -f -- "[=/]${temp#/}/session_" || true; }
mapfile -t processes < <(mrl_left)
[ ${#processes[@]} -gt 0 ] || { echo "no head of yours has its folder at $temp; TEMP names another" >&2; exit 4; }
kill "${processes[@]}" 2>/dev/null || true
end=$((SECONDS + ${STOP_TIMEOUT_S:-20}))
while mapfile -t processes < <(mrl_left) && [ ${#processes[@]} -gt 0 ]; do
    if [ $SECONDS -ge $end ]; then
        kill -KILL "${processes[@]}" 2>/dev/null || true
        break
    fi
    sleep 0.2
done
echo "the head at $temp is stopped"
