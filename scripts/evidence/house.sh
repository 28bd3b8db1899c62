#!/usr/bin/env bash
# The goals of size and density: files, lines, AST nodes and the longest function of mrl/, what is packed into its
# expressions, lines of README and how many of them are long.
# Writes docs/results/house.json.   scripts/evidence/house.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/house.py --json | python -c '
import json, sys
from pathlib import Path

found = json.load(sys.stdin)["working tree"]
readme = Path("README.md").read_text(encoding="utf-8").splitlines()
print(json.dumps({
    "files": found["files"], "lines": found["lines"], "longest_function": found["function_lines"]["longest"],
    "longest_file": found["longest_file"], "ast_nodes": found["ast_nodes"], "statements": found["statements"],
    "per_1000_statements": found["per_1000_statements"], "readme_lines": len(readme),
    "readme_wide": sum(len(line) > 120 for line in readme),
}))' | python scripts/evidence/stamp.py docs/results/house.json scripts/evidence/house.sh
