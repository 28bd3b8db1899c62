"""The writer hands over finished modules and nothing else; the handshake finds every way in which an engine is not what
the plan assumes.

The engine here is a toy whose kernels keep weights transposed; tests/real/test_engine_slices.py does the same with
vLLM.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mrl.engine import handshake, load_layout
from mrl.engine.handshake import HandshakeError, check_backend, check_loader, check_parameters
from mrl.engine.load_layout import LayerwiseWriter, weight_bytes
from mrl.engine.read_back import (
    held_digests,
    hf_block,
    parameter_digest,
    through_identity,
    unpacked,
    what_reading_shows,
)
from mrl.model import TensorSpec
from mrl.model.boxes import Box
from mrl.model.vllm_parameters import TargetParameter, TargetPiece
from mrl.reshard.digest import partial_digest

ROWS, WIDTH = 300, 6  # more than one digit of base 256
HF = {"q.weight": (ROWS, WIDTH), "k.weight": (4, WIDTH), "q.bias": (ROWS,), "k.bias": (4,), "embed.weight": (5, WIDTH)}


def piece(name: str, hf: tuple, local: tuple, axes: tuple[int, ...] | None = None) -> TargetPiece:
    return TargetPiece(name, Box(hf), Box(local), axes or tuple(range(len(hf))))


def targets(dtype: str = "float32") -> tuple[TargetParameter, ...]:
    """Rank 1 of 2: the second half of q, all of k, and three of the five words in four rows."""
    half, wide = ROWS // 2, (0, WIDTH)
    rows = {"q": ((half, ROWS), (0, half)), "k": ((0, 4), (half, half + 4))}
    weight = tuple(piece(f"{n}.weight", (hf, wide), (local, wide)) for n, (hf, local) in rows.items())
    bias = tuple(piece(f"{n}.bias", (hf,), (local,)) for n, (hf, local) in rows.items())
    words = (piece("embed.weight", ((2, 5), wide), ((0, 3), wide)),)
    return (
        TargetParameter("embed.weight", "embed", (4, WIDTH), dtype, words),
        TargetParameter("layers.0.fused.weight", "layers.0.fused", (half + 4, WIDTH), dtype, weight),
        TargetParameter("layers.0.fused.bias", "layers.0.fused", (half + 4,), dtype, bias),
        TargetParameter("layers.1.fused.weight", "layers.1.fused", (half + 4, WIDTH), dtype, weight),
        TargetParameter("layers.1.fused.bias", "layers.1.fused", (half + 4,), dtype, bias),
    )


class Layer(nn.Module):
    """Keeps its parameters as the kernel does: two-dimensional ones transposed."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        self.load_shapes = shapes
        for leaf, shape in shapes.items():
            setattr(self, leaf, nn.Parameter(torch.randn(shape[::-1]).to(dtype), requires_grad=False))
        self.register_buffer("table", torch.arange(3.0))


class Engine(nn.Module):
    """The toy model, with a loader written without boxes."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        fused = {"weight": (ROWS // 2 + 4, WIDTH), "bias": (ROWS // 2 + 4,)}
        self.embed = Layer({"weight": (4, WIDTH)}, dtype)
        self.layers = nn.ModuleList([nn.ModuleDict({"fused": Layer(fused, dtype)}) for _ in range(2)])

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            part, leaf = name.split(".")
            half = ROWS // 2
            if part == "embed":
                self.embed.weight.data[:3] = tensor[2:]
                self.embed.weight.data[3:] = 0
            elif part == "q":
                getattr(self.layers[0]["fused"], leaf).data[:half] = tensor[half:]
            else:
                getattr(self.layers[0]["fused"], leaf).data[half:] = tensor


class ToyReload:
    """Sets kernels aside and puts empty tensors there, as vLLM does. `log` says what was asked."""

    def __init__(self):
        self.log: list[str] = []
        self.aside: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def plan_name(self, name: str) -> str:
        return name

    def is_derived(self, leaf: str) -> bool:
        return False

    def enter(self, model):
        for layer in (m for m in model.modules() if isinstance(m, Layer)):
            self.aside[layer] = {leaf: getattr(layer, leaf) for leaf in layer.load_shapes}
            for leaf, shape in layer.load_shapes.items():
                setattr(
                    layer,
                    leaf,
                    nn.Parameter(
                        torch.empty(shape, device="meta", dtype=getattr(layer, leaf).dtype), requires_grad=False
                    ),
                )

    def leave_out(self, layer):
        self._back(layer)

    def load_tensor(self, layer, leaf):
        return (
            torch.empty(layer.load_shapes[leaf], device="meta", dtype=getattr(layer, leaf).dtype)
            if leaf in layer.load_shapes
            else None
        )

    def open_loaders(self, layer):
        self.log.append("open")

    def materialise(self, layer):
        for leaf in layer.load_shapes:
            old = getattr(layer, leaf)
            setattr(layer, leaf, nn.Parameter(torch.full(old.shape, 7.0, dtype=old.dtype), requires_grad=False))

    def packing_parts(self, layer, leaf):
        return None

    def process(self, layer, packed=()):
        for leaf, kernel in self.aside[layer].items():
            if leaf in packed:
                continue
            kernel.data.copy_(getattr(layer, leaf).data.t() if kernel.dim() == 2 else getattr(layer, leaf).data)
        self._back(layer)

    def _back(self, layer):
        for leaf, kernel in self.aside.pop(layer).items():
            setattr(layer, leaf, kernel)

    def finish(self, model, model_config):
        assert not self.aside
        self.log.append("finish")

    def abandon(self, model):
        for layer in list(self.aside):
            self._back(layer)


def final(engine: Engine):
    def read(target):
        kernel = engine.get_submodule(target.module).get_parameter(target.name.rpartition(".")[2]).data
        return [kernel.t() if kernel.dim() == 2 else kernel]

    return read


WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, (name, shape) in enumerate(HF.items())
}


def begun(engine: Engine, wanted=None) -> tuple[LayerwiseWriter, ToyReload]:
    reload = ToyReload()
    writer = LayerwiseWriter(engine, None, wanted or targets(), reload)
    writer.begin()
    return writer, reload


def write(writer: LayerwiseWriter, module: str, wanted=None) -> None:
    for target in wanted or targets():
        if target.module == module:
            for p in target.pieces:
                hf_block(writer.tensor(target.name), p).copy_(WEIGHTS[p.hf_name][p.hf_box.slices])


def write_all(writer: LayerwiseWriter, modules=("layers.1.fused", "embed", "layers.0.fused")) -> None:
    for module in modules:
        write(writer, module)
        writer.complete(module)


def right_digest(target: TargetParameter) -> int:
    return (
        sum(partial_digest(WEIGHTS[p.hf_name][p.hf_box.slices], p.hf_name, p.hf_box.origin) for p in target.pieces)
        % 2**64
    )


class PackedByHalves(ToyReload):
    """Packs a matrix by two parts, and says what it did."""

    def packing_parts(self, layer, leaf):
        if leaf != "weight" or "bias" not in layer.load_shapes:
            return None
        return self._halves(layer.weight.data, self.aside[layer]["weight"].data)

    def _halves(self, loaded, kernel):
        half = len(loaded) // 2
        for rows in (slice(0, half), slice(half, None)):
            self.log.append("shown")
            yield loaded[rows]
            kernel[:, rows] = loaded[rows].t()
            self.log.append("packed")


def test_parts_are_packed_after_they_were_seen_and_neither_twice_nor_left_out(monkeypatch):
    """Digests of a matrix come by parts along rows only where these are experts, so here they are put together."""
    seen = []

    def digest(parts, target):
        parts = [part.clone() for part in parts]
        seen.append((target.name, len(parts)))
        return parameter_digest([torch.cat(parts)], target)

    monkeypatch.setattr(load_layout, "parameter_digest", digest)
    engine = Engine()
    writer = LayerwiseWriter(engine, None, targets(), reload := PackedByHalves())
    writer.begin()
    write_all(writer)
    writer.finish()
    assert writer.received == {t.name: right_digest(t) for t in targets()} == held_digests(targets(), final(engine))
    assert dict(seen) == {t.name: 1 + (t.name.endswith("fused.weight")) for t in targets()}
    assert reload.log == ["shown", "packed"] * 4 + ["finish"]
    assert min(writer.seconds.values()) >= 0


def test_what_was_written_is_what_the_kernel_holds_in_its_own_memory():
    engine = Engine()
    places = {name: p.data_ptr() for name, p in engine.named_parameters()}
    writer, reload = begun(engine)
    write_all(writer)
    writer.finish()
    assert {name: p.data_ptr() for name, p in engine.named_parameters()} == places
    assert torch.equal(
        engine.layers[0]["fused"].weight.data.t(), torch.cat([WEIGHTS["q.weight"][ROWS // 2 :], WEIGHTS["k.weight"]])
    )
    assert torch.equal(engine.embed.weight.data.t(), torch.cat([WEIGHTS["embed.weight"][2:], torch.zeros(1, WIDTH)])), (
        "padding is zero"
    )
    assert (
        writer.received
        == writer.shown
        == {t.name: right_digest(t) for t in targets()}
        == held_digests(targets(), final(engine))
    )
    assert reload.log == ["finish"]


def test_a_flipped_bit_in_the_kernels_memory_changes_the_digest_of_its_parameter_alone():
    engine = Engine()
    writer, _ = begun(engine)
    write_all(writer)
    writer.finish()
    engine.layers[1]["fused"].weight.data.view(torch.int32)[2, 3] ^= 1
    held = held_digests(targets(), final(engine))
    assert [name for name in held if held[name] != writer.received[name]] == ["layers.1.fused.weight"]


def test_what_an_identity_cannot_show_is_rounded_where_one_is_used_and_nowhere_else():
    name, other = "layers.0.fused.weight", "layers.1.fused.weight"
    writer = LayerwiseWriter(Engine(), None, targets(), ToyReload(), by_identity=frozenset({name}))
    writer.begin()
    write(writer, "layers.0.fused")
    write(writer, "layers.1.fused")
    for parameter in (name, other, "layers.0.fused.bias"):
        writer.tensor(parameter).view(-1)[3] = -0.0
    writer.complete("layers.0.fused")
    writer.complete("layers.1.fused")
    assert [parameter for parameter in writer.shown if writer.shown[parameter] != writer.received[parameter]] == [name]


def test_padding_that_is_not_zero_is_named():
    engine = Engine()
    with pytest.raises(RuntimeError, match=r"embed.weight: the padding is not zero"):
        held_digests(targets(), final(engine))


def test_a_padded_parameter_must_be_read_back_in_one_part():
    """Its pieces lie in the whole parameter: in a second part they would name other elements."""
    words = targets()[0]
    whole = torch.cat([torch.randn(3, WIDTH), torch.zeros(1, WIDTH)])
    assert words.name in held_digests([words], lambda _: [whole])
    for size in (1, 3):
        with pytest.raises(RuntimeError, match=r"embed.weight: padded, yet read back in several parts"):
            held_digests([words], lambda _, size=size: whole.split(size))


def test_a_module_that_did_not_come_is_named():
    writer, reload = begun(Engine())
    write_all(writer, ("embed", "layers.1.fused"))
    with pytest.raises(RuntimeError, match=r"left 1 of 3 modules incomplete: layers.0.fused"):
        writer.finish()
    assert reload.log == []


def test_a_module_of_padding_alone_is_completed_without_a_message():
    engine = Engine()
    wanted = (replace(targets()[0], pieces=()), *targets()[1:])
    writer, _ = begun(engine, wanted)
    write_all(writer, ("layers.1.fused", "layers.0.fused"))
    writer.finish()
    assert not engine.embed.weight.any()
    assert "embed.weight" not in writer.received


def test_little_modules_may_be_open_beside_each_other():
    writer, _ = begun(Engine())
    for name in ("embed.weight", "layers.0.fused.bias", "layers.1.fused.weight"):
        writer.tensor(name)


def test_two_modules_may_be_open_and_not_three(monkeypatch):
    monkeypatch.setattr("mrl.engine.load_layout.LITTLE_BYTES", 0)
    writer, _ = begun(Engine())
    writer.tensor("embed.weight")
    writer.tensor("layers.0.fused.bias")
    with pytest.raises(
        RuntimeError, match=r"layers.1.fused would be the third module in load layout beside embed, layers.0.fused"
    ):
        writer.tensor("layers.1.fused.weight")


def test_a_repeated_round_is_refused():
    writer, _ = begun(Engine())
    write_all(writer, ("embed",))
    with pytest.raises(RuntimeError, match=r"brings embed.weight again"):
        writer.tensor("embed.weight")
    with pytest.raises(RuntimeError, match=r"embed cannot be completed"):
        writer.complete("embed")


def test_an_unknown_parameter_is_refused():
    with pytest.raises(RuntimeError, match=r"brings lm_head.weight, which this engine does not have"):
        begun(Engine())[0].tensor("lm_head.weight")


def test_an_abandoned_update_leaves_kernels_that_can_be_written_again():
    engine = Engine()
    before = {name: p.data.clone() for name, p in engine.named_parameters()}
    writer, reload = begun(engine)
    write(writer, "layers.0.fused")
    writer.abandon()
    writer.abandon()
    assert not reload.aside
    assert all(torch.equal(p.data, before[name]) for name, p in engine.named_parameters())
    writer, _ = begun(engine)
    write_all(writer)
    writer.finish()
    assert held_digests(targets(), final(engine)) == writer.received


def test_experts_that_a_kernel_keeps_transposed_are_written_where_they_lie():
    places = {(e, half): ((e, e + 1), (0, 3), (4 * half, 4 * half + 4)) for e in (0, 1) for half in (0, 1)}
    pieces = tuple(piece(f"e{e}.{'gu'[half]}", ((0, 4), (0, 3)), local, (2, 1)) for (e, half), local in places.items())
    expert = TargetParameter("experts.w13_weight", "experts", (2, 3, 8), "float32", pieces)
    engine = nn.Module()
    engine.experts = Layer({"w13_weight": (2, 8, 3)}, torch.float32)  # what its loader would fill
    engine.experts.w13_weight = nn.Parameter(torch.zeros(2, 3, 8), requires_grad=False)
    writer, reload = begun(engine, (expert,))
    sent = {p.hf_name: torch.randn(4, 3) for p in expert.pieces}
    for p in expert.pieces:
        hf_block(writer.tensor(expert.name), p).copy_(sent[p.hf_name])
    writer.complete("experts")
    writer.finish()
    held = engine.experts.w13_weight.data
    assert torch.equal(held[1], torch.cat([sent["e1.g"].t(), sent["e1.u"].t()], 1))
    assert writer.received[expert.name] == sum(partial_digest(t, name, (0, 0)) for name, t in sent.items()) % 2**64
    assert reload.log == ["finish"]


@pytest.mark.parametrize("slots", [(0, 1, 2, 3, 4), (0, 2, 1, 3, 4)], ids=["in order", "placed otherwise"])
def test_the_digest_of_experts_is_the_same_in_parts_and_whole(slots):
    halves = (((0, 16), (0, 8)), ((16, 32), (0, 8)))
    pieces = tuple(
        piece(f"e{e}.{'gu'[n]}", ((0, 16), (0, 8)), ((slot, slot + 1), *half), (1, 2))
        for n, half in enumerate(halves)
        for e, slot in enumerate(slots)
    )
    target, weight = (
        TargetParameter("experts.w13_weight", "experts", (5, 32, 8), "float32", pieces),
        torch.randn(5, 32, 8),
    )
    right = sum(partial_digest(hf_block(weight, p), p.hf_name, (0, 0)) for p in pieces) % 2**64
    for size in (1, 2, 5):
        assert held_digests([target], lambda _, size=size: weight.split(size)) == {target.name: right}


def test_bytes_that_have_to_come_are_counted_from_the_engine():
    engine = Engine(torch.bfloat16)
    engine.embed.shard_indices = type(
        "Rows", (), {"num_elements_padded": 4, "num_org_elements": 3, "num_added_elements": 0}
    )
    assert weight_bytes(engine, ToyReload(), torch.bfloat16) == 2 * (3 * WIDTH + 2 * (ROWS // 2 + 4) * (WIDTH + 1))


class TestHandshake:
    @pytest.fixture(autouse=True)
    def spec(self, monkeypatch):
        monkeypatch.setattr(
            handshake, "with_scales", lambda spec, block: [TensorSpec(n, s, "float32") for n, s in HF.items()]
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_engine_as_planned_passes_and_keeps_its_weights(self, dtype):
        engine = Engine(getattr(torch, dtype))
        before = {name: p.data.clone() for name, p in engine.named_parameters()}
        check_parameters(engine, targets(dtype), ToyReload())
        assert check_loader(engine, None, targets(dtype), ToyReload()) == 2, "one fused module stands for both layers"
        assert all(torch.equal(p.data, before[name]) for name, p in engine.named_parameters())

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda t: t[1:], "embed.weight is a parameter of vLLM that the plan does not know"),
            (lambda t: (*t, replace(t[0], name="norm.weight")), "vLLM has no norm.weight"),
            (
                lambda t: (replace(t[0], local_shape=(8, WIDTH)), *t[1:]),
                "embed.weight is [4, 6] in vLLM, [8, 6] in the plan",
            ),
            (
                lambda t: (replace(t[0], dtype="bfloat16"), *t[1:]),
                "embed.weight is float32 in vLLM, bfloat16 in the plan",
            ),
        ],
    )
    def test_a_parameter_that_differs_is_named(self, change, words):
        with pytest.raises(HandshakeError) as caught:
            check_parameters(Engine(), change(targets()), ToyReload())
        assert str(caught.value) == words

    def test_a_head_that_is_tied_to_the_embedding_is_no_second_parameter(self):
        engine = Engine()
        engine.lm_head = Layer({"weight": (4, WIDTH)}, torch.float32)
        engine.lm_head.weight = engine.embed.weight
        check_parameters(engine, targets(), ToyReload())

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("hf", "local"),
        [
            (((ROWS // 2 - 1, ROWS - 1), (0, WIDTH)), None),  # one row off, across a digit's border
            (((0, ROWS // 2), (0, WIDTH)), None),  # the other rank's half
            (None, ((4, ROWS // 2 + 4), (0, WIDTH))),  # k before q
        ],
    )
    def test_a_loader_that_places_a_tensor_elsewhere_is_found(self, dtype, hf, local):
        wanted = list(targets(dtype))
        q, k = wanted[1].pieces
        q = replace(q, hf_box=Box(hf) if hf else q.hf_box, local_box=Box(local) if local else q.local_box)
        wanted[1] = replace(wanted[1], pieces=(q, replace(k, local_box=Box(((0, 4), (0, WIDTH)))) if local else k))
        with pytest.raises(HandshakeError, match=r"layers.0.fused.weight: vLLM's loader does not put"):
            check_loader(Engine(getattr(torch, dtype)), None, wanted, ToyReload())

    def test_swapped_names_of_equal_shape_are_found(self):
        wanted = list(targets())
        words = wanted[0].pieces[0]
        wanted[0] = replace(wanted[0], pieces=(replace(words, hf_name="k.weight", hf_box=Box(((0, 3), (0, WIDTH)))),))
        with pytest.raises(HandshakeError, match=r"embed.weight: vLLM's loader does not put k.weight"):
            check_loader(Engine(), None, wanted, ToyReload())

    def test_elements_that_the_plan_takes_for_padding_must_not_be_written(self):
        wanted = list(targets())
        words = wanted[0].pieces[0]
        wanted[0] = replace(
            wanted[0], pieces=(replace(words, hf_box=Box(((2, 4), (0, WIDTH))), local_box=Box(((0, 2), (0, WIDTH)))),)
        )
        with pytest.raises(
            HandshakeError, match=r"embed.weight: vLLM's loader writes elements that the plan takes for padding"
        ):
            check_loader(Engine(), None, wanted, ToyReload())

    def test_an_expert_kernel_with_a_layout_of_its_own_is_refused(self):
        check_backend("TRITON", ("CPU", "TRITON"))
        with pytest.raises(HandshakeError, match=r"MoE backend is FLASHINFER_CUTLASS"):
            check_backend("FLASHINFER_CUTLASS", ("CPU", "TRITON"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_through_an_identity_shows_every_bit_but_signs_of_zero_and_subnormals(dtype):
    weight = torch.randn(40, 700).to(dtype)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    layer.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)
    assert what_reading_shows(weight) is weight
    assert torch.equal(
        through_identity(layer, (40, 700), dtype).contiguous().view(torch.uint8), weight.view(torch.uint8)
    )
    weight[3, 5], weight[4, 6], weight[0, 0] = -0.0, torch.finfo(dtype).tiny / 4, 0.0
    shown = what_reading_shows(weight)
    assert shown is not weight
    assert torch.equal(shown, torch.where(weight.abs() < torch.finfo(dtype).tiny, 0.0, weight))
    assert not torch.signbit(shown[3, 5]), "a positive zero"


def blocked(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """Sixteen rows interleaved, as CPU kernels like it."""
    experts, rows, columns = weight.shape
    return weight.view(experts, rows // 16, 16, columns).transpose(2, 3).reshape(weight.shape).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_are_unpacked_whatever_the_packing_moves_where(dtype):
    weight = torch.randn(3, 256, 300).to(dtype)  # more elements than 16 bits can number
    for pack in (blocked, shuffled):
        assert torch.equal(torch.cat([part.clone() for part in unpacked(pack(weight, "vec"), pack, "vec")]), weight)


def shuffled(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """An order without blocks."""
    experts, rows, columns = weight.shape
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0))
    return weight.reshape(experts, -1)[:, order].view(weight.shape)


def test_experts_are_unpacked_a_few_at_a_time():
    weight = torch.randn(9, 512, 512)  # a megabyte each
    parts = [part.clone() for part in unpacked(blocked(weight, "vec"), blocked, "vec")]
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1]
    assert torch.equal(torch.cat(parts), weight)


def rounding(weight: torch.Tensor, isa: str) -> torch.Tensor:
    return weight.clone().fill_(0)


def test_a_packing_that_does_more_than_move_is_refused():
    with pytest.raises(RuntimeError, match=r"does not just move"):
        list(unpacked(torch.zeros(1, 16, 16), rounding, "vec"))
