"""The rows of versions as the package index resolved them (docs/results/rows.json, by scripts/resolve_rows.py): a pin
that was changed since, or that contradicts what another package of its row requires, shows here without asking the
index.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mrl.platforms.versions import row_of

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("resolve_rows", ROOT / "scripts" / "resolve_rows.py")
resolve_rows = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(resolve_rows)
STORED = json.loads(resolve_rows.RESULTS.read_text())


@pytest.mark.parametrize("row", resolve_rows.PLATFORMS)
def test_what_was_resolved_is_what_setup_py_asks_for(row):
    assert STORED[row]["requirements"] == sorted(resolve_rows.requirements(row)), "run scripts/resolve_rows.py"
    assert STORED[row]["built"] == sorted(resolve_rows.built(row))


@pytest.mark.parametrize("row", resolve_rows.PLATFORMS)
def test_every_pin_of_the_version_rows_is_among_what_would_be_installed(row):
    device = resolve_rows.PLATFORMS[row][0]
    elsewhere = {Requirement(part).name: Requirement(part).specifier for part in resolve_rows.built(row)}
    for name, version in (row_of(device).packages | row_of(device).loose).items():
        assert elsewhere[name].contains(version) if name in elsewhere else STORED[row]["packages"][name] == version, (
            name
        )


@pytest.mark.parametrize("row", resolve_rows.PLATFORMS)
def test_what_is_built_from_sources_finds_its_requirements_among_the_rest(row):
    python, packages = STORED[row]["python"], STORED[row]["packages"]
    machine = STORED[row]["platform"].partition("-")[0]
    for part in resolve_rows.built(row).values():
        for requirement in map(Requirement, part["requires"]):
            if requirement.marker is None or requirement.marker.evaluate(
                {"python_version": python, "platform_machine": machine}
            ):
                found = packages[requirement.name.lower().replace("_", "-")]
                assert requirement.specifier.contains(found), f"{requirement} beside {found}"


def test_ascends_triton_is_put_in_last_where_another_comes_with_the_rest():
    (last,) = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if 'pip install -e ".[npu]"' in line]
    assert "triton" in STORED["npu-x86"]["packages"]
    assert last.endswith("pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend==3.2.2")
