"""The package index is asked whether the rows of setup.py can be installed.

Skipped where uv or the index is not to be had.
"""

import shutil
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import resolve_rows  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.long]
UNREACHED = ("error sending request", "Failed to fetch", "dns error")


def resolve(row: str, also: list[str] | None = None) -> dict:
    if shutil.which("uv") is None:
        pytest.skip("uv is part of the dev extra")
    try:
        return resolve_rows.resolve(row, also)
    except resolve_rows.Unresolved as error:
        if any(words in str(error) for words in UNREACHED):
            pytest.skip("no package index here")
        raise


@pytest.mark.parametrize("row", resolve_rows.PLATFORMS)
def test_a_row_can_be_installed(row):
    found = resolve(row)["packages"]
    for pin in map(Requirement, resolve_rows.requirements(row)):
        if canonicalize_name(pin.name) not in {
            canonicalize_name(Requirement(part).name) for part in resolve_rows.built(row)
        }:
            assert pin.specifier.contains(found[canonicalize_name(pin.name)]), pin


def test_the_transformers_of_the_other_rows_cannot_stand_beside_vllm_ascend():
    with pytest.raises(resolve_rows.Unresolved, match="transformers"):
        resolve("npu", ["transformers==5.19.0"])
