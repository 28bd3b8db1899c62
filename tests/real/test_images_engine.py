"""vLLM's log-probs behind images are transformers' in each family, with mrl's own arguments, model class and inputs. So
are those of responses in which the model samples tokens of images, videos and their begin, and of a turn behind them:
words like others there.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mrl.model import model_spec
from mrl.model.registry import family_of, known_hf_config
from mrl.rank.family_reference import make
from mrl.tools.family.drawn import small_config
from mrl.tools.rehearse.small_tower import whole_config

pytestmark = [pytest.mark.real, pytest.mark.long]
LARGEST = 1e-4  # nats, as between engines and ranks in a run; a wrong position or picture gives above 1e-2
# a model of each family whose text model it is
MODELS = {"vl-moe": "Qwen3-30B-A3B", "vl": "Qwen3-0.6B", "2.5-vl": "Qwen2.5-0.5B", "3.5": "Qwen3.5-27B",
          "3.5-moe": "Qwen3.5-35B-A3B"}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_responses_behind_images_have_transformers_log_probs(name, tmp_path):
    found = answered(name, tmp_path, "frozen")
    assert len(found["gaps"]) == 18 + 6 + 6 and max(found["gaps"]) < LARGEST, found
    print(name, "furthest", max(found["gaps"]))
    assert found["alone"]
    assert found["looked"] == 5, "each of five different images is looked at once, by whichever of 15 responses"


@pytest.mark.parametrize("name", MODELS)
def test_after_a_sync_of_another_tower_the_kept_features_are_wrong_and_new_ones_are_transformers(name, tmp_path):
    found = answered(name, tmp_path, "trained")
    assert found["held"]
    assert max(found["gaps"]) < LARGEST, found
    assert max(found["stale"]) > 10 * LARGEST


def answered(name: str, tmp_path: Path, vision: str) -> dict:
    plain = small_config(known_hf_config(MODELS[name]))
    torch.set_num_threads(1)
    folder = tmp_path / "model"
    tower = make(whole_config(plain, family_of(model_spec(plain))), folder).config.vision_config
    side = (tower.patch_size * tower.spatial_merge_size) ** 2
    Qwen2VLImageProcessorPil(
        patch_size=tower.patch_size,
        temporal_patch_size=tower.temporal_patch_size,
        merge_size=tower.spatial_merge_size,
        size={"shortest_edge": side, "longest_edge": 16 * side},
    ).save_pretrained(folder)
    script = Path(__file__).with_name("images_engine.py")
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(out), vision],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(out.read_text())
