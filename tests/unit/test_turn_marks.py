"""The evidence of trajectories: which requests stored rows are made of, and that each piece's run is legal."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from small_model import SIZES

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.data.samples import Sample, Turn, packed
from mrl.model import model_spec
from mrl.record.sample_files import write_samples

ROOT = Path(__file__).resolve().parents[2]
MODEL = model_spec(SIZES | {"num_hidden_layers": 4, "num_experts": 8})
SAMPLED = (1, 1, 0, 0, 1, 1, 1)
TALK = Sample(
    3, 0, 1, 11, (7, 8), (1, 2, 5, 6, 3, 4, 9), [-0.1] * 7, "stop", 5, later_versions=((5, 6),), sampled=SAMPLED,
    turns=(Turn(0, "stop", 1), Turn(4, "stop")),
)  # fmt: skip
PLAIN = Sample(4, 1, 2, 12, (7,), (4, 4), (-0.4, -0.5), "length", 5)
# given and sampled, of each request: the second turn of TALK was held at a border of the weights
ASKED = [([7, 8], [1, 2]), ([7, 8, 1, 2, 5, 6], [3]), ([7, 8, 1, 2, 5, 6, 3], [4, 9]), ([7], [4, 4])]


@pytest.fixture(scope="module")
def script():
    folders = [str(ROOT / "scripts" / "evidence"), str(ROOT / "scripts")]
    sys.path[:0] = folders
    spec = importlib.util.spec_from_file_location("trajectories_script", ROOT / "scripts/evidence/trajectories.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for folder in folders:
        sys.path.remove(folder)


def found(script, folder: Path, asked) -> tuple[int, int, int]:
    """Stored turns that nobody asked for, requests that nobody stored, and those of rows that there are not."""
    run = folder / "run"
    (run / "samples").mkdir(parents=True)
    rewards = [{"score": 1.0, "reason": "ok"}] * 2
    write_samples(run / "samples", 1, [packed([TALK]), packed([PLAIN])], rewards, turns=True)
    lines = [{"before": script.digest(given), "after": script.digest([*given, *said])} for given, said in asked]
    run.with_suffix(".marks").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = script.token_result(run, folder)
    assert (result["responses"], result["turns"], result["requests"]) == (2, 3, len(asked))
    return result["never_asked"], result["never_stored"], result["after_the_end"]


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        (ASKED, (0, 0, 0)),
        (ASKED[:-1], (1, 0, 0)),
        ([*ASKED, ASKED[0]], (0, 1, 0)),
        ([*ASKED[:3], ([7], [4]), ([7, 4], [4])], (0, 0, 0)),
        ([*ASKED[:3], ([8], [4, 4])], (1, 0, 1)),
        ([*ASKED[:3], ([7], [4, 5])], (1, 1, 0)),
    ],
    ids=["all", "one is missing", "one twice", "in two parts", "another prompt", "another answer"],
)
def test_a_request_is_a_stored_row_up_to_there_and_once(script, tmp_path, asked, wrong):
    assert found(script, tmp_path, asked) == wrong


def test_a_branch_is_asked_from_its_own_beginning(script):
    """The prompt 7 8, 1 2, what was heard, 3; the agent went back behind 1 2 and heard something else, then 4."""
    row = {
        "prompt_ids": [7, 8], "response_ids": [1, 2, 5, 3, 7, 8, 1, 2, 6, 4], "sampled": [1, 1, 0, 1, *[0] * 5, 1],
        "weight_version": [{"first_token": 0, "version": 5}, {"first_token": 4, "version": 6}],
        "branches": [{"first_token": 0, "prompt_tokens": 0}, {"first_token": 4, "prompt_tokens": 2}],
    }  # fmt: skip
    assert list(script.spans(row)) == [(0, 2, 4), (0, 5, 6), (6, 11, 12)]


def test_ids_in_another_order_have_another_digest(script):
    assert script.digest([1, 2]) != script.digest([2, 1]) != script.digest([2, 1, 0])


def pieces():
    return ["tokens-tools", "tokens-held", "tokens-games", "tokens-agent"] + [
        f"learn-{kind}-0" for kind in ("calculator", "shuffled", "random", "game", "blanked")
    ]


@pytest.mark.parametrize("name", pieces())
def test_what_a_piece_trains_with_is_legal(script, tmp_path, name, monkeypatch):
    for kind in ("tools", "game"):
        monkeypatch.setattr(script.Worlds, kind, lambda worlds: tmp_path)
    for file in ("reward.py", "blanked.py"):
        (tmp_path / file).write_text("def compute_score(*given): ...")
    values = script.PIECES[name].values(script.Worlds(tmp_path))
    own = {"model.path": None, "data.train_files": None, "data.val_files": None}
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items() if key not in own]
    resolved = load_config(script.PRESET, overrides=overrides)
    wrong = [each for each in violations(resolved, MODEL) if not each.field.startswith(("model.", "data."))]
    assert not wrong


def test_all_seeds_of_all_kinds_are_pieces(script):
    assert len(script.PIECES) == 4 + 5 * len(script.SEEDS)
    assert {name.rpartition("-")[0] + "-0" for name in script.PIECES if name.startswith("learn")} == set(pieces()[4:])
