"""Whole runs of a random Qwen3-Next and a random Qwen3.5: twenty steps with the engine's routes, and the same bits
after a stop at the tenth. A run from a folder that also has a vision tower is that of its text model.
"""

import json
import shutil
from pathlib import Path
from time import process_time

import pytest
import torch
from safetensors.torch import load_file
from test_latent_run import SETTINGS, after_twenty_steps
from test_runs import finish, train
from tiny_models import tiny_kinds_moe, tiny_next
from whole_models import in_whole
from world import PRESET, make_world, metrics, overrides, put_model, succeeded

from mrl.rank.gated_delta import gated_delta
from mrl.tools.compare_runs import metrics_difference

pytestmark = [pytest.mark.real, pytest.mark.long]


def without_padding(make):
    """No token is padding: transformers would give that one an embedding of zeros, of which a norm's gradient is a
    thousand times another's where it is sampled.
    """
    return lambda pad_token_id, **sizes: make(**sizes)


@pytest.fixture(scope="module", params=[tiny_next, tiny_kinds_moe])
def world(request, tmp_path_factory) -> Path:
    """The tiny world with another model under its tokenizer."""
    return put_model(make_world(tmp_path_factory.mktemp("world")), without_padding(request.param))


def test_twenty_steps_train_and_go_on_from_the_tenth_bit_by_bit(world, tmp_path):
    before, after = after_twenty_steps(world, tmp_path)
    still = {name for name in before if before[name].equal(after[name])}
    assert all(".mlp.experts." in name for name in still)  # that no token chose, and nothing else
    assert any(name.endswith("A_log") for name in before) and len(still) < len(before) / 4


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> tuple[Path, Path]:
    """Two worlds: one whose model also has a vision tower, one that has its text model alone."""
    folder = tmp_path_factory.mktemp("whole")
    plain = put_model(make_world(folder / "plain"), without_padding(tiny_kinds_moe))
    shutil.copytree(plain, folder / "whole")
    in_whole(plain / "model", folder / "whole" / "model")
    return folder / "whole", plain


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_run_from_a_whole_is_the_run_of_its_text_model(worlds, tmp_path, placement):
    """Its reference too, and its evaluation, which has no ranks that could bring the weights."""
    settings = dict(
        SETTINGS, trainer__total_training_steps=2, trainer__save_freq=2, trainer__val_before_train=True,
        algorithm__use_kl_loss=True, algorithm__kl_loss_coef=0.1, cluster__placement=placement,
    )  # fmt: skip
    runs = [tmp_path / "whole", tmp_path / "plain"]
    for world, run_dir in zip(worlds, runs, strict=True):
        assert finish(train(world, run_dir, **settings), run_dir) == 0
    rows, expected = (metrics(run_dir) for run_dir in runs)
    assert len(rows) == 3 and metrics_difference(rows, expected) is None
    for run_dir in runs:
        succeeded("convert", "megatron-to-hf", str(run_dir), "-o", f"{run_dir}-hf", "--verify")
    ends = [load_file(next(Path(f"{run_dir}-hf").glob("*.safetensors"))) for run_dir in runs]
    assert ends[0].keys() == ends[1].keys() and all(ends[0][name].equal(ends[1][name]) for name in ends[0])
    whole = str(worlds[0] / "model")
    succeeded("convert", "megatron-to-hf", str(runs[0]), "-o", str(tmp_path / "with"), "--vision-from", whole)
    tower = load_file(tmp_path / "with" / "model-vision.safetensors")
    start = load_file(worlds[0] / "model" / "model.safetensors")
    assert tower and all(tower[name].equal(start[name]) for name in tower)
    if placement == "separate":
        told = ("--model", whole, "-o", str(tmp_path / "eval"), "--json")
        results = json.loads(succeeded("eval", str(PRESET), *overrides(worlds[0], **settings), *told))
        before = {name: value for name, value in rows[0].items() if name.startswith("val-")}
        assert before and results["metrics"] == before


def test_routes_of_old_log_probs_are_replayed(world, tmp_path):
    """R2: the second of two updates a step goes by the routes of before the first."""
    settings = SETTINGS | dict(trainer__total_training_steps=2, trainer__save_freq=-1, actor__router_replay="R2")
    assert finish(train(world, tmp_path, **settings), tmp_path) == 0
    rows = metrics(tmp_path)
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    assert all(row["router/drift"] == 0 for row in rows)


def backward_seconds(tokens: int) -> float:
    """Seconds of CPU of one sequence through two heads."""
    query, key, value = torch.randn(3, tokens, 2, 64)
    rate, decay = torch.rand(2, tokens, 2)
    given = [x.requires_grad_() for x in (query, key, value, -0.1 * decay, rate)]
    out = gated_delta(*given, (tokens,)).sum()
    start = process_time()
    out.backward()
    return process_time() - start


def test_the_backward_of_gated_delta_takes_twice_as_long_for_twice_the_tokens():
    """Least of five each. It took four times as long when each chunk was a slice of the whole tensor."""
    torch.set_num_threads(1)
    backward_seconds(256)
    seconds = [[backward_seconds(tokens) for tokens in (8192, 16384)] for _ in range(5)]
    short, long = (min(times) for times in zip(*seconds, strict=True))
    assert long < 2.5 * short
