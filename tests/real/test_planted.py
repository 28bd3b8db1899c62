"""The first verdict of `mrl explain` names what was planted in a run: causes of planted_causes.py, at drawn steps."""

import json
import os
from pathlib import Path

import pytest
from planted_causes import CAUSES, judged, warm_world

# named in a whole run; `python tests/real/planted_causes.py` plants the others, too
NAMED = (
    "stale_expert", "router", "routes", "softmax", "gradients", "learning_rate", "pays_length", "flipped",
    "temperature", "clip", "adam_lost", "old_weights", "not_a_number", "kl_sign", "truths",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return warm_world(tmp_path_factory.mktemp("planted") / "world")


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("cause", [each for each in CAUSES if each.name in NAMED], ids=lambda cause: cause.name)
def test_the_first_verdict_names_what_was_planted(world, tmp_path, cause):
    line = judged(world, tmp_path, cause, int(os.environ.get("MRL_PLANTED_SEED", "0")))
    assert line["right"], json.dumps(line)
