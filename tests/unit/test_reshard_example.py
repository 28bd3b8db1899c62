"""The worked example at the head of mrl/reshard/plan.py is what the planner makes of it."""

from dataclasses import replace

import numpy as np
import pytest
from test_reshard_source import MODELS

from mrl.model.boxes import Box
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Piece, Shard
from mrl.model.vllm_parameters import TargetParameter, TargetPiece
from mrl.reshard import faults, plan, streams
from mrl.reshard.messages import Copy
from mrl.reshard.plan import ReshardPlan, plan_reshard

RANKS, WORKERS, ROWS, COLUMNS = 2, 3, 4, 6
NAME = "model.layers.0.mlp.down_proj.weight"
BOXES = "abcd"


def columns_of(number: int, parts: int) -> tuple[Box, Box]:
    """An equal share of the weight's columns: in the tensor, and as a parameter of its own."""
    width = COLUMNS // parts
    return Box(((0, ROWS), (number * width, (number + 1) * width))), Box.whole((ROWS, width))


@pytest.fixture
def planned(monkeypatch):
    """The planner, for a model that is this one weight: a maker of plans by their budget."""

    def sent_shards(model, layout, rank, fp8_block):
        hf_box, local_box = columns_of(rank, RANKS)
        return (
            Shard(
                "decoder.layers.0.mlp.linear_fc2.weight",
                0,
                local_box.shape,
                (Piece(NAME, hf_box, local_box),),
                False,
                (rank,),
            ),
        )

    def target_parameters(model, rollout, worker, dialect, dtype, *_):
        hf_box, local_box = columns_of(worker, WORKERS)
        return (
            TargetParameter(
                NAME, NAME.rpartition(".")[0], local_box.shape, dtype, (TargetPiece(NAME, hf_box, local_box, (0, 1)),)
            ),
        )

    monkeypatch.setattr(streams, "sent_shards", sent_shards)
    for module in (streams, faults):
        monkeypatch.setattr(module, "target_parameters", target_parameters)
    model = replace(MODELS["qwen3"], num_layers=1)
    train = TrainLayout.build({"world_size": RANKS, "tensor_model_parallel_size": RANKS}, model)
    return lambda budget: plan_reshard(
        model, train, RolloutLayout(1, WORKERS), dialect="cpu", dtype="bfloat16", budget_bytes=budget
    )


def boxes_of(whole: ReshardPlan) -> dict[str, tuple[int, int, Copy]]:
    """Letter -> (rank, worker, copy) of a plan that cuts no box."""
    boxes = [(m.source, w, copy) for w in range(WORKERS) for m in whole.receives(w) for copy in m.copies]
    return dict(zip(BOXES, sorted(boxes, key=lambda box: box[2].hf_box.origin[1]), strict=True))


def test_the_boxes_are_those_of_the_picture(planned):
    held, needed = np.full((ROWS, COLUMNS), "?"), np.full((ROWS, COLUMNS), "?")
    for letter, (rank, worker, copy) in boxes_of(planned(1 << 20)).items():
        held[:, columns_of(rank, RANKS)[0].slices[1]][copy.source_box.slices] = letter
        needed[:, columns_of(worker, WORKERS)[0].slices[1]][copy.target_box.slices] = letter
    for row in range(ROWS):
        ranks = "     ".join(" ".join(part) for part in np.split(held[row], RANKS))
        workers = "       ".join(" ".join(part) for part in np.split(needed[row], WORKERS))
        assert f"    row {row}    {ranks}         {workers}\n" in plan.__doc__


def test_the_copies_are_those_of_the_table(planned):
    for letter, (rank, worker, copy) in boxes_of(planned(1 << 20)).items():
        hf, source, target = (
            f"[{', '.join(f'{start}:{stop}' for start, stop in box.ranges)}]"
            for box in (copy.hf_box, copy.source_box, copy.target_box)
        )
        assert f"    {letter}  {hf}  from rank {rank} {source}  to worker {worker} {target}\n" in plan.__doc__


def test_rounds_and_messages_are_those_of_the_table(planned):
    whole, small = boxes_of(planned(1 << 20)), planned(16)
    lines = []
    for message in sorted(
        (m for w in range(WORKERS) for m in small.receives(w)), key=lambda m: (m.round, m.source, m.worker)
    ):
        letters = [
            next(name for name, box in whole.items() if box[2].hf_box.contains(copy.hf_box)) for copy in message.copies
        ]
        grains = [
            f"{name}[{copy.hf_box.ranges[0][0]}:{copy.hf_box.ranges[0][1]}]"
            for name, copy in zip(letters, message.copies, strict=True)
        ]
        who = f"round {message.round}  rank {message.source} -> worker {message.worker}"
        lines.append(f"    {who}  {message.nbytes} bytes  {' '.join(grains)}\n")
    assert "".join(lines) in plan.__doc__
    assert plan.__doc__.count("    round ") == len(lines)
