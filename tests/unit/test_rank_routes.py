"""A rank's routes: exactly the layers and tokens that its routers see, whatever block and node they lie in."""

from types import SimpleNamespace

import numpy as np
import pytest
from replicas import InMemory

from mrl.data.batch import TrainBatch
from mrl.data.routes import MISSING
from mrl.data.samples import Sample, packed
from mrl.rank.cut import MicroRows, ReplicaCut, RowLengths
from mrl.rank.packing import Shape, micro_batch
from mrl.store.routes import RouteReader, read_routes, tokens_by_block

LAYERS, TOPK = 6, 2
LENGTHS = [(3, 9), (1, 4), (6, 0), (2, 17), (5, 6), (4, 1)]
WITHOUT = 4  # the row that came without routes


def samples(rows) -> list[Sample]:
    made = []
    for i in rows:
        prompt, response = LENGTHS[i]
        routes = np.random.default_rng(i).integers(0, 99, (prompt + response, LAYERS, TOPK)).astype(np.int8)
        ids = tuple(range(100 * i, 100 * i + prompt + response))
        log_probs, none = (0.0,) * response, None if i == WITHOUT else routes
        made.append(Sample(i, i, i, 0, ids[:prompt], ids[prompt:], log_probs, "stop", 0, none))
    return made


def stored() -> InMemory:
    """Blocks of several rows and of one, on two nodes, and the row without routes in a block of its own."""
    blocks = [([0, 1], "a"), ([2], "b"), ([3], "a"), ([4], "b"), ([5], "b")]
    parts = [InMemory.whole(packed(samples(rows)), node) for rows, node in blocks]
    return InMemory.joined(parts).take(np.array([3, 0, 1, 2, 4, 5]))


def reader(received: list[int]) -> SimpleNamespace:
    """Of one node; notes the bytes that it hands out."""

    def read(*asked):
        found = RouteReader().read(*asked)
        received.append(0 if found is None else found.nbytes)
        return found

    return SimpleNamespace(read=SimpleNamespace(remote=read))


def rows(*numbers: int, filler: bool = False) -> MicroRows:
    return MicroRows(np.array(numbers), filler)


CUT = ReplicaCut(
    ((rows(0, 2), rows(1)), (rows(3, 4, 5), rows(0, filler=True))),
    (rows(0), rows(1, 2, 3), rows(4, 5)),
    (rows(0, 1), rows(2, 3, 4, 5)),
)


def blocks(kept) -> list:
    return kept.fetched([block.samples for block in kept.blocks])


SHAPES = [
    Shape(True),
    Shape(False),
    Shape(True, context=2),
    Shape(True, tensor=2),
    Shape(True, 2, 2),
    Shape(False, 1, 2),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [[0, 1, 2, 3, 4, 5], [2, 3], [0, 1, 4]])
def test_routers_get_what_they_would_get_of_whole_responses_and_nothing_else_travels(shape, layers):
    kept, layers, received = stored(), np.array(layers), []
    made = kept.read()
    every = TrainBatch.of(kept.read(with_routes=True), 1.0)
    for context in range(shape.context):
        for tensor in range(shape.tensor):
            needed = CUT.computed(RowLengths.of(made), shape, context, tensor)
            received.clear()
            found = read_routes(kept, blocks(kept), needed, layers, {"a": reader(received), "b": reader(received)})
            known = needed & (every.routes != MISSING).any((1, 2))
            extra = needed.sum() - known.sum()  # of the row without routes, whose part of an answer is MISSING
            assert known.sum() * len(layers) * TOPK <= sum(received) <= (known.sum() + extra) * len(layers) * TOPK
            own = TrainBatch.of(made, 1.0, found)
            for micro in (*CUT.log_probs, *CUT.reference, *CUT.mini_batches[0], *CUT.mini_batches[1]):
                seen, whole = (micro_batch(batch, micro.rows, shape, context) for batch in (own, every))
                part = (np.split(each.routes, shape.tensor, axis=1)[tensor] for each in (seen, whole))
                narrow, wide = part
                assert np.array_equal(narrow, wide[:, :, layers]) and seen.content == whole.content


def test_on_its_own_node_a_rank_cuts_out_the_same():
    kept, received = stored(), []
    made, layers = kept.read(), np.array([1, 2])
    needed = CUT.computed(RowLengths.of(made), Shape(True, context=2), 0, 0)
    far, near = (
        read_routes(kept, blocks(kept), needed, layers, each)
        for each in ({"a": reader(received), "b": reader(received)}, {})
    )
    assert np.array_equal(far.values, near.values) and np.array_equal(far.value_rows, near.value_rows)


def test_without_any_routes_there_are_none():
    kept = InMemory.whole(packed(samples([WITHOUT])))
    made = kept.read()
    assert read_routes(kept, blocks(kept), np.ones(len(made.token_ids), bool), np.arange(LAYERS), {}) is None


def test_rows_of_a_batch_keep_their_routes():
    kept = stored()
    made = kept.read()
    batch = TrainBatch.of(
        made, 1.0, read_routes(kept, blocks(kept), np.ones(len(made.token_ids), bool), np.arange(LAYERS), {})
    )
    whole = TrainBatch.of(kept.read(with_routes=True), 1.0)
    for index in (np.array([5, 1]), slice(2, 5)):
        one, other = (micro_batch(each.rows(index), np.arange(2), Shape(True)) for each in (batch, whole))
        assert np.array_equal(one.routes, other.routes)


@pytest.mark.parametrize("seed", range(6))
def test_each_block_has_its_own_tokens_in_their_order_and_an_empty_one_none(seed):
    rng = np.random.default_rng(seed)
    blocks, count = int(rng.integers(1, 9)), int(rng.integers(0, 40))
    block_of_token = rng.choice(rng.permutation(blocks)[: max(1, blocks - 2)], count)  # two blocks have none
    tokens = np.sort(rng.choice(1000, count, replace=False))
    found = tokens_by_block(tokens, block_of_token, blocks)
    assert len(found) == blocks
    for number, own in enumerate(found):
        assert own.dtype == tokens.dtype and np.array_equal(own, tokens[block_of_token == number])


def test_rows_that_stand_in_a_block_in_another_order_keep_their_routes():
    """The first and the last row are where the step has them, and those between have changed places."""
    routes = np.arange(12, dtype=np.int8).reshape(12, 1, 1)
    wanted = np.array([0, 1, 5, 6, 7, 2, 3, 4, 8, 9, 10, 11])
    found = RouteReader().read(np.array([0]), [wanted], routes)
    assert found[:, 0, 0].tolist() == wanted.tolist()
