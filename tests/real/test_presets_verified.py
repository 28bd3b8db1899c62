"""Every preset's weight sync is proved: at the model's real shapes, and rehearsed with numbered elements on a shrunken model."""

import json
from pathlib import Path

import pytest

from mrl.cli import main

FOLDER = Path(__file__).parents[2] / "parallel_configs"
PRESETS = [p for p in sorted(FOLDER.glob("*/*.yaml")) if p.stem != "cpu"]  # the tiny ones have no model before it is made

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(120)]


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_weight_sync_of_a_preset_puts_every_element_in_its_place(path, capsys):
    main(["verify", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
