#!/usr/bin/env bash
# The goals of size and density: files, lines, AST nodes and the longest function of mrl/, what is packed into its
# expressions, lines of README and how many of them are long; beside them the same before the house was said plainly.
# Writes docs/results/house.json.   scripts/evidence/house.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/house.py --before 8480244 --json | python -c '
import json, subprocess, sys
from pathlib import Path

NAMES = ("files", "lines", "longest_file", "ast_nodes", "statements", "functions", "function_lines", "per_1000_statements",
         "files_with_one_importer", "one_call_helpers", "docstrings_of_as_see", "long_sentences_of_docstrings",
         "long_sentences_of_refusals")


def told(found):
    whole = {"functions_with_whole_configuration": len(found["functions_with_whole_configuration"])}
    return {name: found[name] for name in NAMES} | whole


sides = json.load(sys.stdin)
now = told(sides["working tree"])
readme = Path("README.md").read_text(encoding="utf-8").splitlines()
commits = subprocess.run(
    [sys.executable, "scripts/house.py", "--commits", "docs/source/house_commits.txt"],
    check=True, capture_output=True, text=True,
).stdout
print(json.dumps(now | {
    "changed_by_commits": json.loads(commits),
    "longest_function": now["function_lines"]["longest"], "readme_lines": len(readme),
    "readme_wide": sum(len(line) > 120 for line in readme),
    "before": {"commit_before": "8480244"} | told(sides["8480244"]),
}))' | python scripts/evidence/stamp.py docs/results/house.json scripts/evidence/house.sh
