#!/usr/bin/env bash
# What README says of single parts, in one place: scripts/bench/{plan,packing,logprob,verifier,convert,manifest,group_files,resume,samples,data_plane}.py on this machine, one after the other.
# data_plane, up to a whole large step at its pace, takes eight minutes, data_plane_routes five, data_plane_turns, with responses
# of one turn and of eight, six, data_plane_before, beside the
# last commit whose driver held everything, three. data_plane_nodes and data_plane_nodes_routes need root and run by name only.
# Writes docs/results/benches.json.   scripts/evidence/benches.sh [names; all without them, others keep what the file holds of them]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=docs/results/benches.json
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(plan packing logprob verifier convert manifest group_files resume samples data_plane data_plane_routes data_plane_turns
    data_plane_before)
python scripts/evidence/stamp.py --clean
declare -A more=([data_plane]="--responses 1024 4096 8192" [data_plane_routes]="--routes --responses 256 1024 2048"
    [data_plane_turns]="--responses 64 256 --turns 1 8"
    [data_plane_before]="--before 3a7ad58 --responses 64 256 1024" [data_plane_nodes]="--nodes --responses 64 256"
    [data_plane_nodes_routes]="--nodes --routes --responses 64")
for one in "${names[@]}"; do
    file=${one/#data_plane_*/data_plane}
    python "scripts/bench/$file.py" --json ${more[$one]:-} |
        python scripts/evidence/stamp.py "$out" "scripts/evidence/benches.sh $one" --at "$one"
done
