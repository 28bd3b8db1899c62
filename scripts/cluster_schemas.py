"""Stores what launch/kuberay.yaml and launch/slurm.sh are held against, cut out of the projects' own files.

python scripts/cluster_schemas.py --kuberay CHECKOUT --kuberay-version v1.7.0 --slurm CHECKOUT --slurm-version
slurm-26-05-3-1

A checkout is a git directory. Of KubeRay's schema of a RayCluster only what the example uses is kept, and what it
requires; the whole has 17,000 lines. Of Slurm the names of all options of sbatch and srun, from their manual pages.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = ROOT / "tests" / "unit" / "schemas"
CRD = "helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml"


def used_part(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """The schema of what `value` uses. What else an object may have is left out, so it counts as unknown."""
    kept = {key: inner for key, inner in schema.items() if key not in ("properties", "items", "description")}
    if "properties" in schema and isinstance(value, dict):
        known = schema["properties"]
        kept["properties"] = {name: used_part(known[name], inner) for name, inner in value.items() if name in known}
        kept["additionalProperties"] = False
    elif "additionalProperties" in schema:
        kept["additionalProperties"] = schema["additionalProperties"]
    if "items" in schema and isinstance(value, list):
        kept["items"] = _joined([used_part(schema["items"], inner) for inner in value] or [schema["items"]])
    return kept


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema of items, of what any of them uses."""
    first = dict(parts[0])
    for other in parts[1:]:
        for name, inner in other.get("properties", {}).items():
            known = first.setdefault("properties", {})
            known[name] = _joined([known[name], inner]) if name in known else inner
    return first


def kuberay(repository: Path, version: str) -> dict[str, Any]:
    """What is stored of KubeRay."""
    crd = yaml.safe_load(_show(repository, version, CRD))
    (served,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
    example = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
    spec = used_part(served["schema"]["openAPIV3Schema"]["properties"]["spec"], example["spec"])
    facts = {"project": "ray-project/kuberay", "version": version, "commit": _commit(repository, version), "file": CRD}
    return facts | {"group": crd["spec"]["group"], "served": "v1", "kind": crd["spec"]["names"]["kind"], "spec": spec}


def slurm(repository: Path, version: str) -> dict[str, Any]:
    """What is stored of Slurm."""
    facts = {"project": "SchedMD/slurm", "version": version, "commit": _commit(repository, version)}
    return facts | {name: _options(_show(repository, version, f"doc/man/man1/{name}.1")) for name in ("sbatch", "srun")}


def _options(page: str) -> list[str]:
    headings = re.findall(r"^\\fB.*?\\fR.*$|^\.B.*$|^\\-\\-.*$", page, re.MULTILINE)
    names = {
        name.replace("\\-", "-") for line in headings for name in re.findall(r"\\-\\-([a-z](?:[a-z]|\\-|-)*)", line)
    }
    return sorted(names)


def _show(repository: Path, version: str, path: str) -> str:
    return subprocess.run(
        ["git", "-C", repository, "show", f"{version}:{path}"], check=True, capture_output=True, text=True
    ).stdout


def _commit(repository: Path, version: str) -> str:
    found = subprocess.run(
        ["git", "-C", repository, "rev-parse", f"{version}^{{commit}}"], check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("kuberay", "slurm"):
        parser.add_argument(f"--{name}", type=Path, required=True)
        parser.add_argument(f"--{name}-version", required=True)
    args = parser.parse_args()
    SCHEMAS.mkdir(exist_ok=True)
    stored = {
        "kuberay_raycluster": kuberay(args.kuberay, args.kuberay_version),
        "slurm": slurm(args.slurm, args.slurm_version),
    }
    for name, content in stored.items():
        (SCHEMAS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
