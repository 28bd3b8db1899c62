#!/usr/bin/env bash
# All evidence on one state of the code: every stored result, long piece and rehearsal of docs/source/claims.yaml that is stale, the short ones first.
#   scripts/evidence/all.sh --list              what is stale, by which command, and how long it will take; runs nothing
#   scripts/evidence/all.sh [NAME ...]          makes them anew, all or those named, and then docs/evidence.md
#   scripts/evidence/all.sh --leave-out root 'the network'    not those that need these
# Goes on where it was stopped, on another machine too: what is fresh by the commit that its file names is left out. A result whose command fails
# keeps what it was, and the next one runs. Refuses a tree with changes outside of docs, which no commit names.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/all.py "$@"
