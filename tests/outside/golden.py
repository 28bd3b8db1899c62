"""Reads what peers' own functions gave (tests/outside/make.py), and the table of differences that stay."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DIFFERENCES = HERE / "differences.yaml"


@cache
def golden(topic: str) -> list[dict[str, Any]]:
    """Returns the cases of a topic: inputs and what the peer gave."""
    return json.loads(gzip.decompress((HERE / "golden" / f"{topic}.json.gz").read_bytes()))["cases"]


@cache
def differences(topic: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a topic by their name: `what` differs, `right` says who is and why, `cases` how many."""
    rows = yaml.safe_load(DIFFERENCES.read_text()) or []
    return {row["name"]: row for row in rows if row["topic"] == topic}
