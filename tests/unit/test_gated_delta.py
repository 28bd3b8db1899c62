"""Gated delta attention: the rule token by token, and transformers' layer of the same weights, packed and over two
tensor ranks.
"""

import multiprocessing
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mrl.rank.gated_delta as rule
from mrl.model.computed_sizes import DELTA_CHUNK
from mrl.platforms import get_platform
from mrl.process.free_ports import free_port
from mrl.rank.gated_delta import GatedDelta, gated_delta

SIZES = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_num_key_heads=4,
    linear_num_value_heads=8,
)  # fmt: skip
HIDDEN, EPS = 32, 1e-6
LENGTHS = (3, DELTA_CHUNK, 1, 2 * DELTA_CHUNK + 6, DELTA_CHUNK - 2)
TOKENS = sum(LENGTHS)


def token_by_token(query, key, value, decay, rate) -> Tensor:
    """One sequence by the definition, in float64."""
    query, key, value, decay, rate = (x.double() for x in (query, key, value, decay, rate))
    query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = torch.zeros(query.shape[1], query.shape[2], value.shape[2], dtype=torch.float64)
    outs = []
    for q, k, v, a, b in zip(query, key, value, decay, rate, strict=True):
        state = state * a.exp()[:, None, None]
        correction = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, correction)
        outs.append(torch.einsum("hkv,hk->hv", state, q) * query.shape[2] ** -0.5)
    return torch.stack(outs)


def drawn(heads: int = 3) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, TOKENS, heads, 16, generator=random)
    value = torch.randn(TOKENS, heads, 24, generator=random)
    rate, decay = torch.rand(2, TOKENS, heads, generator=random)
    return query, key, value, -0.3 * decay, rate


def test_a_pack_is_computed_sequence_by_sequence_as_the_rule_says():
    given = drawn()
    found = gated_delta(*given, LENGTHS)
    parts = zip(*(x.split(LENGTHS) for x in given), strict=True)
    expected = torch.cat([token_by_token(*part) for part in parts])
    assert (found - expected).abs().max() < 1e-5 < expected.abs().max()
    leaking = gated_delta(*given, (TOKENS,))  # the trap: one state for all
    assert (leaking - expected).abs().max() > 0.1


def test_what_else_is_in_the_pack_changes_no_bit():
    given = drawn()
    found = gated_delta(*given, LENGTHS).split(LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone = gated_delta(*(x.split(LENGTHS)[row] for x in given), (length,))
        assert torch.equal(found[row], alone)


class Written(TorchDispatchMode):
    """Counts the elements that operations return, without views."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out._base is None:
            self.elements += out.numel()
        return out


def trained(lengths: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Output and gradients of one head, and the elements that the backward wrote."""
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, sum(lengths), 1, 16, generator=random)
    rate, decay = torch.rand(2, sum(lengths), 1, generator=random)
    given = [x.requires_grad_() for x in (query, key, value, -0.3 * decay, rate)]
    out = gated_delta(*given, lengths)
    with Written() as written:
        out.sin().sum().backward()
    return [out.detach(), *(x.grad for x in given)], written.elements


def test_the_backward_writes_twice_as_much_for_twice_the_tokens():
    """Not four times: each slice of a tensor would have a gradient of the whole one."""
    longer = [trained((tokens,))[1] for tokens in (2048, 4096)]
    assert longer[1] < 2.01 * longer[0]


def by_slices(counts, *given: Tensor) -> Tensor:
    """Every chunk's part as a slice, as the rule is written."""
    query, scores, new, read, key, decay = given
    state = torch.zeros(counts[0], query.shape[1], query.shape[3], new.shape[3])
    outs, first = [], 0
    for count in counts:
        at = slice(first, first + count)
        state = state[:count]
        value = new[at] - read[at] @ state
        outs.append(query[at] @ state + scores[at] @ value)
        state = state * decay[at] + key[at].transpose(2, 3) @ value
        first += count
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [(700,), LENGTHS, (64,) * 5, (1, 300, 299, 1)])
def test_parts_that_are_split_once_have_the_bits_of_slices(lengths, monkeypatch):
    found = trained(lengths)[0]
    monkeypatch.setattr(rule, "_stepwise", by_slices)
    assert all(torch.equal(*pair) for pair in zip(found, trained(lengths)[0], strict=True))


def test_sums_of_decays_are_torchs_on_the_host_and_ordinary_ones_elsewhere():
    """With deterministic algorithms torch refuses its own sums of floats on cuda."""
    from torch.overrides import TorchFunctionMode

    from mrl.rank.gated_delta import _running_sums, _summed_by_rows

    class NoCumsum(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            assert function.__name__ != "cumsum"
            return function(*args, **(kwargs or {}))

    decay = -torch.rand(3, 2, DELTA_CHUNK, 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_running_sums(decay), decay.cumsum(dim=2))
    assert (_summed_by_rows(decay) - decay.double().cumsum(dim=2)).abs().max() < 1e-5
    with NoCumsum():
        assert _running_sums(decay.to("meta")).shape == decay.shape


# ---------------------------------------------------------------- the layer


def hugging_face():
    """Transformers' layer with large weights, its input, and what the loss weighs each output with.

    States are forgotten more slowly than it would begin with: of faster ones its own gradients are 2e-5 from float64's.
    """
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    config = Qwen3NextConfig(hidden_size=HIDDEN, num_hidden_layers=4, rms_norm_eps=EPS, **SIZES)
    layer = Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1 and name != "conv1d.weight":
                parameter.mul_(5.0)
            elif name in ("norm.weight", "dt_bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name == "A_log":
                parameter.sub_(3.0)
    return layer, torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)


def expected() -> tuple[Tensor, dict[str, Tensor]]:
    """Each sequence alone: outputs, and gradients by name, that of the input among them."""
    layer, x, weights = hugging_face()
    x.requires_grad_()
    out = torch.cat([layer(part[None])[0] for part in x.split(LENGTHS)])
    (out * weights).sum().backward()
    return out.detach(), {name: p.grad for name, p in layer.named_parameters()} | {"input": x.grad}


def test_decays_and_rates_of_a_bfloat16_layer_have_transformers_bits(monkeypatch):
    """Decays are computed in float32 whatever the weights are; they multiply over the whole sequence."""
    layer, x, _ = hugging_face()
    layer = layer.bfloat16()
    x = x.bfloat16()[None]
    seen = {}

    def noted(*given, **named):
        seen.update(named)
        raise InterruptedError

    layer.chunk_gated_delta_rule = noted  # where older versions have it
    monkeypatch.setattr(sys.modules[type(layer).__module__], "torch_chunk_gated_delta_rule", noted)
    with torch.no_grad(), pytest.raises(InterruptedError):
        layer(x)

    own = torch.nn.Module()
    own.kernel = "torch"
    for name, size in (("key_heads", 4), ("values_a_key", 2), ("value_heads", 8), ("key_dim", 16), ("value_dim", 24)):
        setattr(own, name, size)
    own.by_kind = False
    own.A_log, own.dt_bias = layer.A_log, layer.dt_bias
    own.conv1d = lambda channels, lengths: channels
    own._by_kind = partial(GatedDelta._by_kind, own)
    found = []
    taken = lambda q, k, v, decay, rate, lengths: found.extend((decay, rate)) or v  # noqa: E731
    monkeypatch.setitem(rule._RULES, "torch", taken)
    own.norm = lambda out, gate: out
    with torch.no_grad():
        GatedDelta._of_pack(own, layer.in_proj_qkvz(x[0]), layer.in_proj_ba(x[0]), (TOKENS,))
    decay, rate = found
    assert decay.dtype is torch.float32 and torch.equal(decay, seen["g"][0])
    assert torch.equal(rate, seen["beta"][0])
    assert not torch.equal(layer.A_log.exp().float(), layer.A_log.float().exp()), "the test would not see it"


def own_part(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """What a tensor rank has of a parameter of the checkpoint."""
    if name == "norm.weight":
        return whole
    if name == "out_proj.weight":
        return whole.chunk(ranks, dim=1)[rank]
    if name == "conv1d.weight":
        keys = 4 * 16
        return torch.cat([part.chunk(ranks)[rank] for part in whole.split([keys, keys, 8 * 24])])
    return whole.chunk(ranks)[rank]


def computed(rank: int, ranks: int, port: int, found) -> None:
    """Puts a rank's outputs and gradients into `found`."""
    from megatron.core import parallel_state as mpu
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.set_num_threads(1)
    get_platform("cpu").apply_patches()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mpu.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True,
        perform_initialization=False, tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1,
        layernorm_epsilon=EPS, gradient_accumulation_fusion=False, **SIZES,
    )  # fmt: skip
    layer = GatedDelta(config, 1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    judge, x, weights = hugging_face()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(own_part(name, judge.get_parameter(name), rank, ranks))
    padded = torch.nn.utils.rnn.pad_sequence(x.split(LENGTHS))
    rows = layer(padded.chunk(ranks)[rank])[0].detach()
    x, weights = (tensor.chunk(ranks)[rank][:, None] for tensor in (x, weights))
    x = x.clone().requires_grad_()
    starts = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    out, bias = layer(x, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q_padded=starts))
    assert bias is None
    (out * weights).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in layer.named_parameters()} | {"input": x.grad[:, 0].numpy()}
    asks = {name for name, p in layer.named_parameters() if getattr(p, "sequence_parallel", False)}
    found.put((rank, out[:, 0].detach().numpy(), gradients, asks, rows.numpy()))
    dist.destroy_process_group()


WORLDS = (1, 2)  # tensor ranks
IN_A_PROCESS = "import sys; sys.path.insert(0, sys.argv[1]); import test_gated_delta as t; t.compute_all(sys.argv[2])"


def compute_all(path: str) -> None:
    """Writes what all ranks of both worlds compute into a file; the process has imported what they need, once."""
    import transformers.models.qwen3_next.modeling_qwen3_next  # noqa: F401

    context = multiprocessing.get_context("fork")
    queues, ports = {}, set()
    for ranks in WORLDS:
        queue = queues[ranks] = context.Queue()
        while (port := free_port()) in ports:
            pass
        ports.add(port)
        for rank in range(ranks):
            context.Process(target=computed, args=(rank, ranks, port, queue), daemon=True).start()
    found = {ranks: [queue.get(timeout=120) for _ in range(ranks)] for ranks, queue in queues.items()}
    for of_world in found.values():
        of_world.sort(key=lambda of_rank: of_rank[0])
    Path(path).write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory) -> dict[int, list]:
    """Rank, outputs, gradients, parameters that ask for a sum over tensor ranks, outputs of a padded batch; of each,
    by the number of tensor ranks.
    """
    path = tmp_path_factory.mktemp("ranks") / "found"
    command = [sys.executable, "-c", IN_A_PROCESS, str(Path(__file__).parent), str(path)]
    subprocess.run(command, check=True, timeout=200)  # another test may have imported vllm here
    return pickle.loads(path.read_bytes())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", WORLDS)
def test_outputs_and_gradients_are_those_of_transformers_with_each_sequence_alone(of_ranks, ranks):
    torch.set_num_threads(1)
    found = of_ranks[ranks]
    out, gradients = expected()
    outputs = torch.cat([torch.from_numpy(one[1]) for one in found])
    assert (outputs - out).abs().max() < 1e-5 * out.abs().max()
    padded = torch.cat([torch.from_numpy(one[4]) for one in found])
    of_rows = torch.cat([padded[:length, row] for row, length in enumerate(LENGTHS)])
    assert (of_rows - out).abs().max() < 1e-5 * out.abs().max()
    for name, whole in gradients.items():
        parts = [torch.from_numpy(one[2][name]) for one in found]
        if name == "input":
            assert far(torch.cat(parts), whole) < 1e-5
        elif name == "norm.weight":
            assert far(sum(parts), whole) < 1e-5
            assert all(one[3] == ({name} if ranks > 1 else set()) for one in found)
        else:
            for rank, part in enumerate(parts):
                assert far(part, own_part(name, whole, rank, ranks)) < 1e-5, name


def far(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
