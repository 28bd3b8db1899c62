"""Converted checkpoints in Megatron: what mbridge loads from the Hugging Face files,
and what went on training before the conversion.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_checkpoint import EP, PP, TP, _batch, _equal, _start, _task, _weights
from tiny_models import save, tiny_moe

from mrl.checkpoint.convert import write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.open_checkpoint import open_hf, open_saved

pytestmark = [pytest.mark.real, pytest.mark.long]

HALF = ("moe", "bfloat16", 2, {TP: 2, EP: 2})
# the same architecture with other weights: what the ranks hold before they load a checkpoint
OTHER = ("other", *HALF[1:])
OTHER_STAGES = ("other", "bfloat16", 2, {PP: 2})


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """mbridge's load, two updates, a save and one more; then the same from converted checkpoints."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("converted")
    model = tiny_moe().to(torch.bfloat16)
    save(model, out / "moe")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    save(model, out / "other")
    for name in ("moe", "other"):
        np.savez(out / f"{name}.npz", **_batch(model.config.vocab_size).arrays)
    _start(out, 2, [_task(out, "bridge", HALF, saves=True)])
    shutil.copytree(out / "moe", out / "saved-bridge" / "hf", ignore=shutil.ignore_patterns("*.safetensors*"))
    verified = Options(verify=True)
    write_layout(open_hf(out / "moe"), out / "saved-fresh", {"world_size": 2, TP: 2, EP: 2}, options=verified)
    write_layout(open_saved(out / "saved-bridge"), out / "saved-stages", {"world_size": 2, PP: 2}, options=verified)
    fresh = _task(out, "fresh", OTHER, load="fresh") | {"updates_before_save": 2}
    moved = [_task(out, name, OTHER_STAGES, load=name) for name in ("stages", "bridge")]
    _start(out, 2, [fresh, moved[0], moved[1] | {"name": "moved"}])
    return out


def test_converted_weights_are_those_that_mbridge_loads_and_train_to_the_same_bits(results):
    bridge, fresh = _weights(results, "bridge"), _weights(results, "fresh")
    assert _equal(fresh["loaded"], bridge["loaded"])
    assert _equal(fresh["updated"], bridge["updated"]) and not _equal(fresh["updated"], fresh["loaded"])


def test_a_saved_step_converted_to_another_layout_goes_on_as_if_loaded_there_directly(results):
    bridge, stages, moved = (_weights(results, name) for name in ("bridge", "stages", "moved"))
    assert _equal(stages["loaded"], bridge["saved"])
    assert _equal(stages["updated"], moved["updated"]) and not _equal(stages["updated"], stages["loaded"])
