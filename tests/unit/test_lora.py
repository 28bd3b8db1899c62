"""Adapters: what ranks hold of them, the weights that they make wherever these are cut, their checkpoints, PEFT's form,
what is refused, what a plan counts, and verl's keys.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reshard_world import World, expected, hf_weights, setup_for, shards_of, sums_of
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors
from small_model import SIZES, write_model
from test_config_rules import DENSE_MODEL, TINY_MODEL, only

from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.manifest import (
    EXP_AVG,
    WEIGHT,
    Manifest,
    RankFiles,
    StoredTensor,
    file_facts,
    read_manifest,
    write_manifest,
)
from mrl.checkpoint.open_checkpoint import open_merged, open_saved
from mrl.checkpoint.peft_folder import write_peft
from mrl.config.load import load_config
from mrl.config.schema_actor import LoraConfig
from mrl.driver.resume import RunIdentity, _check_same_adapters
from mrl.errors import ConfigError, DamagedCheckpoint, EnvironmentFault
from mrl.model import ModelSpec, model_spec
from mrl.model.adapters import (
    ALL_LINEAR,
    FIRST,
    SECOND,
    TARGETS,
    Lora,
    adapted_layers,
    adapted_modules,
    adapted_tensors,
    adapter_count,
    adapter_shapes,
    adapter_shards,
    add_factors,
    all_shards,
    factor_name,
    smallest_side,
)
from mrl.model.boxes import Box, cover_fault
from mrl.model.layout import TrainLayout
from mrl.model.peft_files import CONFIG, PREFIX, WEIGHTS, base_digest, check_base, read_peft
from mrl.model.registry import known_spec
from mrl.plan.activations import MicroBatchShape
from mrl.plan.devices import find_device
from mrl.plan.memory import memory_section
from mrl.plan.model_state import adapter_numel, stage_state
from mrl.plan.plan_inputs import PlanInputs, batch_plan, precision_of
from mrl.plan.times import PassWork, actor_seconds, adapter_launches, hand_over_seconds
from mrl.reshard.digest import merged
from mrl.tools.import_verl.translate import import_overrides
from mrl.units import round_up

TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
TP, PP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
SMALL = model_spec(SIZES)
LORA = Lora.of(4, 8.0, [ALL_LINEAR])
LAYOUTS = [
    {"world_size": 1},
    {"world_size": 2, TP: 2},
    {"world_size": 2, TP: 2, ETP: 2},
    {"world_size": 4, TP: 2, PP: 2, EP: 2},
    {"world_size": 4, EP: 2},
    {"world_size": 4, TP: 2, EP: 2, ETP: 2},
]


def factors_of(model, lora, seed=0) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise) * 0.1 for name, shape in adapter_shapes(model, lora).items()}


# --- what ranks hold --------------------------------------------------------------------------------------------------


def test_targets_come_in_one_order_and_all_linear_is_all_of_them():
    assert Lora.of(2, 4.0, ["down_proj", "q_proj"]).targets == ("q_proj", "down_proj")
    assert LORA.targets == TARGETS and LORA.scale == 2.0


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_every_element_of_every_factor_is_on_a_first_replica_once_and_replicas_hold_the_same(degrees):
    layout = TrainLayout.build(degrees, SMALL)
    of_rank = {rank: adapter_shards(SMALL, layout, rank, LORA) for rank in range(layout.world_size)}
    boxes: dict[str, list[Box]] = {}
    for rank, shards in of_rank.items():
        for shard in shards:
            assert rank in shard.replicas
            for other in shard.replicas:
                assert any(s.pieces == shard.pieces and s.replicas == shard.replicas for s in of_rank[other])
            if shard.primary == rank:
                for piece in shard.pieces:
                    boxes.setdefault(piece.hf_name, []).append(piece.hf_box)
    shapes = adapter_shapes(SMALL, LORA)
    assert boxes.keys() == shapes.keys()
    assert all(cover_fault(Box.whole(shape), boxes[name]) is None for name, shape in shapes.items())


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_a_rank_has_of_both_factors_what_its_part_of_the_weight_needs(degrees):
    layout = TrainLayout.build(degrees, SMALL)
    for rank in range(layout.world_size):
        shards = all_shards(SMALL, layout, rank, LORA)
        held = {piece.hf_name: [] for shard in shards for piece in shard.pieces}
        for shard in shards:
            for piece in shard.pieces:
                held[piece.hf_name].append(piece.hf_box)
        for spec in adapted_tensors(SMALL, LORA):
            for box in held.get(spec.name, ()):
                (first,) = held[factor_name(spec.name, FIRST)]
                (second,) = held[factor_name(spec.name, SECOND)]
                assert first.contains(Box(((0, 4), box.ranges[1]))) and second.contains(Box((box.ranges[0], (0, 4))))


def test_experts_of_a_rank_have_one_parameter_and_each_its_own_pair():
    layout = TrainLayout.build({"world_size": 2, EP: 2}, SMALL)
    name = "decoder.layers.0.mlp.experts.linear_fc1.adapter.up_proj_lora_A"
    (shard,) = [s for s in adapter_shards(SMALL, layout, 1, LORA) if s.megatron_name == name]
    assert shard.local_shape == (8, 64) and shard.is_expert
    names = [piece.hf_name for piece in shard.pieces]
    assert names == [f"model.layers.0.mlp.experts.{n}.up_proj.lora_A.weight" for n in (2, 3)]


# --- the weights that they make ---------------------------------------------------------------------------------------


def added(weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    """W + (scale * B) A in float32, a product after the other."""
    second = second * scale
    total = second[:, :1] * first[:1]
    for number in range(1, len(first)):
        total = total + second[:, number : number + 1] * first[number : number + 1]
    return total + weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_block_has_the_same_bits_however_it_is_cut_in_numpy_and_in_torch(dtype):
    noise = torch.Generator().manual_seed(1)
    weight, first, second = (torch.randn(shape, generator=noise) for shape in ((37, 53), (5, 53), (37, 5)))
    weight, first, second = (t.to(dtype).float() for t in (weight, first, second))
    whole = added(weight, first, second, 0.3)
    of_numpy, product = np.empty((2, *weight.shape), np.float32)
    add_factors(weight.numpy(), first.numpy(), second.numpy() * np.float32(0.3), np.multiply, of_numpy, product)
    assert np.array_equal(of_numpy.view(np.uint32), whole.numpy().view(np.uint32))
    for rows, columns in (((0, 1), (0, 53)), ((3, 36), (11, 12)), ((7, 20), (1, 50))):
        part = (slice(*rows), slice(*columns))
        block, product = torch.empty((2, *weight[part].shape))
        add_factors(weight[part], first[:, part[1]], second[part[0]] * 0.3, torch.mul, block, product)
        assert torch.equal(block, whole[part])


def test_a_merged_weight_is_base_and_product_in_float64_rounded_once_but_where_float32_cannot_tell():
    noise = torch.Generator().manual_seed(2)
    weight, first, second = (torch.randn(shape, generator=noise) for shape in ((256, 192), (16, 192), (256, 16)))
    exact = weight.double() + 0.25 * second.double() @ first.double()
    made = added(weight, first, second, 0.25)
    assert ((made - exact).abs() <= 8 * 2**-24 * (weight.abs() + 0.25 * second.abs() @ first.abs())).all()
    odd = made.bfloat16() != exact.bfloat16()
    assert odd.float().mean() < 1e-3
    steps = (made.bfloat16().view(torch.int16) - exact.bfloat16().view(torch.int16)).abs()
    assert steps.max() <= 1


class WholeFactors:
    """A Merge of whole factors, as every rank's own would give."""

    described = ()

    def __init__(self, factors: dict[str, torch.Tensor], lora: Lora):
        self.factors, self.lora = factors, lora

    def adapts(self, hf_name: str) -> bool:
        return factor_name(hf_name, FIRST) in self.factors

    def merge(self, hf_name: str, box: Box, block: torch.Tensor, out: torch.Tensor) -> None:
        rows, columns = box.slices
        first = self.factors[factor_name(hf_name, FIRST)][:, columns].float()
        second = self.factors[factor_name(hf_name, SECOND)][rows].float()
        out.copy_(added(block.float(), first, second, self.lora.scale).to(block.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("train", "rollout"),
    [
        ({"world_size": 1}, {}),
        ({"world_size": 2, TP: 2}, {"tensor": 2}),
        ({"world_size": 4, TP: 2, PP: 2, EP: 2}, {"data": 2, "expert": 2}),
        ({"world_size": 2, EP: 2}, {"num_engines": 2}),
    ],
)
def test_engines_get_merged_words_of_any_pair_of_layouts_and_both_sides_have_their_digests(train, rollout, dtype):
    setup = setup_for(train, rollout, dtype=dtype)
    weights = hf_weights(setup)
    merge = WholeFactors(factors_of(setup.model, LORA), LORA)
    whole = {
        name: merged(merge, name, Box.whole(tensor.shape), tensor, getattr(torch, dtype))
        if merge.adapts(name)
        else tensor
        for name, tensor in weights.items()
    }
    with World(setup, weights, merge=merge) as world:
        outcome = world.sync(1)
    assert outcome.errors() == []
    for worker, writer in outcome.writers.items():
        wanted = expected(setup, worker, weights | whole)
        assert all(torch.equal(writer.tensors[name], tensor) for name, tensor in wanted.items())
        assert sums_of(outcome.sends.values(), worker) == writer.digests
    assert all(torch.equal(world.held[0][key], tensor) for key, tensor in shards_of(setup, 0, weights).items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_is_merged_once_a_sync_and_its_digest_is_that_of_the_sync(ranks, monkeypatch):
    setup = setup_for({"world_size": ranks}, {})
    merge = WholeFactors(factors_of(setup.model, LORA), LORA)
    made, makes = [], merge.merge
    monkeypatch.setattr(merge, "merge", lambda name, *rest: made.append(name) or makes(name, *rest))
    with World(setup, hf_weights(setup), merge=merge) as world:
        messages = [message for sender in world.senders.values() for message in sender._messages]
        packed = [copy.hf_name for message in messages for copy in message.copies]
        for update in (1, 2):
            outcome = world.sync(update)
            assert outcome.errors() == []
            assert sums_of(outcome.sends.values(), 0) == outcome.writers[0].digests
            assert sorted(made) == sorted(filter(merge.adapts, packed))
            made.clear()
            for factor in merge.factors.values():
                factor *= 2


def test_a_merged_block_from_a_wrong_place_has_another_digest_than_its_engine():
    setup = setup_for({"world_size": 1}, {})
    merge = WholeFactors(factors_of(setup.model, LORA), LORA)
    with World(setup, hf_weights(setup), merge=merge) as world:
        copies = [copy for message in world.senders[0]._messages for copy in message.copies]
        gate = next(copy for copy in copies if copy.hf_name.endswith("gate_proj.weight"))
        up = next(c for c in copies if c.hf_name == gate.hf_name.replace("gate", "up") and c.hf_box == gate.hf_box)
        moved = {gate: replace(gate, source_box=up.source_box)}
        world.senders[0]._messages = [
            replace(message, copies=tuple(moved.get(copy, copy) for copy in message.copies))
            for message in world.senders[0]._messages
        ]
        outcome = world.sync(1)
    held = outcome.writers[0].digests
    sent = sums_of(outcome.sends.values(), 0) if not outcome.errors() else {}
    assert {name for name in held if sent.get(name) != held[name]} == {gate.parameter}


# --- checkpoints and PEFT's form --------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path) -> Path:
    write_model(tmp_path / "base")
    noise = np.random.default_rng(0)
    file = tmp_path / "base" / "model.safetensors"
    save_file({n: noise.standard_normal(t.shape, np.float32) for n, t in load_file(file).items()}, file)
    return tmp_path / "base"


def step_of(
    base: Path, folder: Path, degrees: dict, factors: dict[str, torch.Tensor], dtype: str = "float32", **adapters
) -> Path:
    """A checkpoint of adapters as ranks of a layout write it, moments among it."""
    folder.mkdir()
    (folder / "hf").mkdir()
    shutil.copy(base / "config.json", folder / "hf")
    sizes = json.loads((base / "config.json").read_text())
    model = model_spec(sizes)
    layout = TrainLayout.build(degrees, model)
    ranks = []
    for rank in range(layout.world_size):
        tensors, entries, name = {}, [], f"rank-{rank:05d}.safetensors"
        for shard in (s for s in adapter_shards(model, layout, rank, LORA) if s.primary == rank):
            local = torch.zeros(shard.local_shape, dtype=getattr(torch, dtype))
            for piece in shard.pieces:
                local[piece.local_box.slices] = factors[piece.hf_name][piece.hf_box.slices].to(local.dtype)
            for role, values in ((WEIGHT, local), (EXP_AVG, local.float().clone())):
                key = f"{role}/{shard.vp_chunk}.{shard.megatron_name}"
                tensors[key] = values
                entries.append(StoredTensor(name, key, role, shard.local_shape, None, shard.pieces))
        save_tensors(tensors, folder / name)
        facts = {"step": 3.0, "num_updates": 3, "lr": 0.5, "scheduler": {}}
        ranks.append(RankFiles(tuple(entries), {name: file_facts(folder / name)}, facts))
    said = {"rank": 4, "alpha": 8.0, "target_modules": list(TARGETS)}
    said |= {"base": {"path": str(base), "digest": base_digest(base)}} | adapters
    write_manifest(folder, Manifest(3, degrees, dtype, sizes, tuple(ranks), {}, {}, adapters=said))
    return folder


@pytest.mark.parametrize("degrees", [{"world_size": 1}, {"world_size": 4, TP: 2, PP: 2, EP: 2}])
def test_a_checkpoint_of_adapters_is_opened_as_the_full_model_and_written_so(base, tmp_path, degrees):
    factors = factors_of(SMALL, LORA)
    folder = step_of(base, tmp_path / "step-3", degrees, factors)
    write_hf(open_saved(folder), tmp_path / "merged", Options(verify=True))
    merge = WholeFactors(factors, LORA)
    found = load_file(tmp_path / "merged" / "model-00001.safetensors")
    for name, tensor in load_file(base / "model.safetensors").items():
        wanted = torch.from_numpy(tensor)
        if merge.adapts(name):
            wanted = merged(merge, name, Box.whole(tensor.shape), wanted, torch.float32)
        assert np.array_equal(found[name].view(np.uint32), wanted.numpy().view(np.uint32)), name


def test_adapters_become_a_checkpoint_of_full_weights_only_where_that_is_asked_for(base, tmp_path):
    opened = open_saved(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA)))
    with pytest.raises(ConfigError, match="--weights-only writes the full model"):
        write_layout(opened, tmp_path / "other", {"world_size": 1})
    assert not (tmp_path / "other").exists()


def test_adapters_go_into_pefts_form_and_back(base, tmp_path):
    factors = factors_of(SMALL, LORA)
    folder = step_of(base, tmp_path / "step-3", {"world_size": 2, TP: 2}, factors)
    assert write_peft(folder, tmp_path / "out" / "peft").tensors == len(factors)
    written = load_file(tmp_path / "out" / "peft" / WEIGHTS)
    assert written.keys() == {f"{PREFIX}{name}" for name in factors}
    assert all(np.array_equal(written[f"{PREFIX}{name}"], tensor.numpy()) for name, tensor in factors.items())
    assert read_peft(tmp_path / "out" / "peft", SMALL, LORA).keys() == factors.keys()
    check_base(tmp_path / "out" / "peft", base)
    config = json.loads((tmp_path / "out" / "peft" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, list(TARGETS))


def test_of_a_checkpoint_of_adapters_the_critic_beside_them_is_not_digested(base, tmp_path):
    folder = step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA))
    critic = folder / "critic-00000.safetensors"
    critic.write_bytes(b"one")
    manifest = read_manifest(folder)
    files = RankFiles(None, {critic.name: file_facts(critic)}, manifest.optimizer)
    write_manifest(folder, replace(manifest, critic=(files,)))
    critic.write_bytes(b"two")
    write_peft(folder, tmp_path / "peft")
    write_hf(open_saved(folder), tmp_path / "merged")
    own = folder / "rank-00000.safetensors"
    own.write_bytes(own.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedCheckpoint, match="rank-00000"):
        write_peft(folder, tmp_path / "damaged")


def changed(base: Path) -> None:
    file = base / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] += 1
    save_file(tensors, file)


def test_a_checkpoint_of_adapters_on_another_model_is_refused_by_digest_and_the_model_may_move(base, tmp_path):
    folder = step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA))
    write_peft(folder, tmp_path / "peft")
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"which does not exist; .* \(mrl convert --base, model.path of mrl eval\)"):
        open_saved(folder)
    assert open_merged(folder, moved).adapters is not None
    changed(moved)
    with pytest.raises(ConfigError, match="digest differs"):
        open_merged(folder, moved)
    with pytest.raises(ConfigError, match="digest differs"):
        check_base(tmp_path / "peft", moved)


def test_what_is_said_of_adapters_must_fit_their_tensors(base, tmp_path):
    for number, said in enumerate(({"target_modules": ["q_proj"]}, {"rank": 2}, {"rank": 8})):
        folder = step_of(base, tmp_path / f"step-{number}", {"world_size": 1}, factors_of(SMALL, LORA), **said)
        with pytest.raises(EnvironmentFault, match="not those of its adapters"):
            open_saved(folder)
        with pytest.raises(EnvironmentFault, match="not those of its adapters"):
            write_peft(folder, tmp_path / "peft")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda factor: factor.to(torch.int8), "is I8, and factors are F32, BF16, F16"),
        (lambda factor: factor.double(), "is F64"),
        (lambda factor: factor.index_fill(0, torch.tensor([1]), float("nan")), "not finite"),
        (lambda factor: factor.half().index_fill(0, torch.tensor([1]), float("inf")), "not finite"),
        (lambda factor: factor.bfloat16().index_fill(0, torch.tensor([1]), float("-inf")), "not finite"),
    ],
    ids=["int8", "float64", "nan", "inf in float16", "-inf in bfloat16"],
)
def test_factors_that_are_no_finite_floating_point_numbers_are_refused(base, tmp_path, changed, said):
    write_peft(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA)), tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    factors = {name: torch.from_numpy(factor) for name, factor in load_file(file).items()}
    name = sorted(factors)[1]
    save_tensors(factors | {name: changed(factors[name])}, file)
    with pytest.raises(ConfigError, match=said):
        read_peft(tmp_path / "peft", SMALL, LORA)
    for dtype in (torch.float16, torch.bfloat16):
        save_tensors({name: factor.to(dtype) for name, factor in factors.items()}, file)
        assert read_peft(tmp_path / "peft", SMALL, LORA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, "r is 8, and actor.lora.rank is 4"),
        ({"lora_alpha": 4}, "lora_alpha is 4, and actor.lora.alpha is 8"),
        ({"use_dora": True}, "use_dora True is not computed here"),
        ({"peft_type": "IA3"}, "peft_type IA3 is not computed"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa is not computed here"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
        ({"init_lora_weights": "corda"}, "init_lora_weights corda"),
        ({"use_qalora": True}, "use_qalora True"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens \[5, 6\]"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(base, tmp_path, change, said):
    write_peft(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA)), tmp_path / "peft")
    file = tmp_path / "peft" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=said):
        read_peft(tmp_path / "peft", SMALL, LORA)


@pytest.mark.parametrize("start", [None, True, False, "gaussian", "eva", "orthogonal"])
def test_a_start_that_leaves_the_base_as_it_was_makes_a_plain_adapter(base, tmp_path, start):
    write_peft(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA)), tmp_path / "peft")
    file = tmp_path / "peft" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": start}))
    assert read_peft(tmp_path / "peft", SMALL, LORA).keys() == adapter_shapes(SMALL, LORA).keys()


def test_an_adapter_with_a_name_is_found_in_its_own_folder(base, tmp_path):
    """peft's save_pretrained writes FOLDER/NAME for adapter_name="NAME", and FOLDER alone for its usual name."""
    step = step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA))
    write_peft(step, tmp_path / "peft" / "mine")
    with pytest.raises(EnvironmentFault, match=rf"peft has no {CONFIG}.* set it to {tmp_path}/peft/mine$"):
        read_peft(tmp_path / "peft", SMALL, LORA)
    assert read_peft(tmp_path / "peft" / "mine", SMALL, LORA)
    with pytest.raises(EnvironmentFault, match=rf"has no {CONFIG}.*save_pretrained wrote"):
        read_peft(tmp_path, SMALL, LORA)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_names_of_a_modules_own_state_are_refused_with_what_to_write(base, tmp_path, name):
    write_peft(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA)), tmp_path / "peft")
    file = tmp_path / "peft" / WEIGHTS
    save_file({key.replace(".weight", f".{name}.weight"): factor for key, factor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=rf"lora_A\.{name}\.weight has the name of the adapter.* save_pretrained"):
        read_peft(tmp_path / "peft", SMALL, LORA)


def test_an_adapter_on_other_modules_is_refused(base, tmp_path):
    write_peft(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(SMALL, LORA)), tmp_path / "peft")
    with pytest.raises(ConfigError, match="are not those of"):
        read_peft(tmp_path / "peft", SMALL, replace(LORA, targets=("q_proj",)))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, "has adapters alone and actor.lora.rank is 0"),
        ({"rank": 8}, "actor.lora.rank: 8, and the adapters in .* have 4"),
        ({"alpha": 4.0}, "actor.lora.alpha: 4.0"),
        ({"target_modules": ["q_proj"]}, "actor.lora.target_modules"),
        ({"base": {"path": "here", "digest": "b"}}, "has other weights than the model"),
    ],
)
def test_a_resumed_run_has_the_adapters_of_its_checkpoint(now, said):
    said_then = {
        "rank": 4, "alpha": 8.0, "target_modules": list(TARGETS), "start": None,
        "base": {"path": "there", "digest": "a"},
    }  # fmt: skip
    manifest = Manifest(3, {}, "float32", SIZES, (), {}, {}, adapters=said_then)
    identity = RunIdentity(None, {}, None, said_then | now if now else {})
    with pytest.raises(ConfigError, match=said):
        _check_same_adapters(identity, manifest, Path("step-3"))
    _check_same_adapters(RunIdentity(None, {}, None, said_then), manifest, Path("step-3"))


def test_a_checkpoint_of_whole_weights_is_not_gone_on_with_by_adapters():
    manifest = Manifest(3, {}, "float32", SIZES, (), {}, {})
    with pytest.raises(ConfigError, match="has whole weights"):
        _check_same_adapters(RunIdentity(None, {}, None, {"rank": 4}), manifest, Path("step-3"))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "field", "said"),
    [
        (["actor.lora.rank=65"], "actor.lora.rank", "at most 64, the smaller side of model.layers.0"),
        (["actor.lora.alpha=4"], "actor.lora.alpha", "needs actor.lora.rank above 0"),
        (["actor.lora.path=/somewhere"], "actor.lora.path", "needs actor.lora.rank above 0"),
        (["actor.lora.dropout=0.1"], "actor.lora.dropout", "needs actor.lora.rank above 0"),
        (["actor.lora.base_dtype=nf4"], "actor.lora.base_dtype", "needs actor.lora.rank above 0"),
        (["actor.lora.rank=4", "actor.lora.base_dtype=int8"], "actor.lora.base_dtype", "must be model.dtype"),
        (
            ["actor.lora.dropout=0.1", "algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=64"],
            "actor.lora.dropout",
            "must be 0 with algorithm.anchor on_policy",
        ),
        (["actor.lora.target_modules=[]"], "actor.lora.target_modules", "must name a module"),
        (["actor.lora.target_modules=[q_prj]"], "actor.lora.target_modules", "q_proj"),
        (["actor.freeze_router=true"], "actor.freeze_router", "must be false with actor.lora.rank"),
        (
            [
                "model.override_transformer_config.moe_router_load_balancing_type=aux_loss",
                "model.override_transformer_config.moe_aux_loss_coeff=0.01",
            ],
            "model.override_transformer_config.moe_aux_loss_coeff",
            "must be 0 with actor.lora.rank",
        ),
        (
            [
                "actor.layout.tensor_model_parallel_size=1",
                "actor.layout.expert_model_parallel_size=1",
                "actor.layout.sequence_parallel=false",
                "actor.layout.pipeline_model_parallel_size=4",
                "actor.layout.world_size=4",
                "cluster.n_gpus_per_node=5",
                "actor.layout.pipeline_layers=[0,2,2,0]",
            ],
            "actor.layout.pipeline_model_parallel_size",
            "must leave every pipeline stage a layer",
        ),
        (
            ["algorithm.use_kl_loss=true", "ref.param_offload=true"],
            "ref.param_offload",
            "must be false with actor.lora.rank",
        ),
        (
            ["actor.layout.tensor_model_parallel_size=4", "actor.layout.world_size=4", "cluster.n_gpus_per_node=5"],
            "actor.layout.tensor_model_parallel_size",
            "must divide num_key_value_heads = 2",
        ),
    ],
)
def test_what_adapters_cannot_be_is_refused_in_one_message(overrides, field, said):
    needs_rank = "needs actor.lora.rank" in said or "lora.rank=65" in overrides[0]
    rank = [] if needs_rank else ["actor.lora.rank=4"]
    violation = only(*rank, *overrides)
    assert violation.field == field and said in str(violation)


def _of_rules(model: ModelSpec, *overrides: str) -> list:
    from mrl.config.lora_rules import LORA_RULES

    config = load_config(TINY, None, ["actor.lora.rank=4", *overrides]).config
    return [violation for rule in LORA_RULES for violation in rule(config, model)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (known_spec("Mixtral-8x7B"), "mixtral family"),
        (replace(known_spec("DeepSeek-V3"), fp8_block=(128, 128)), "a checkpoint in FP8"),
    ],
)
def test_families_whose_layers_have_no_adapters_are_refused_by_name(model, words):
    (violation,) = _of_rules(model)
    assert violation.field == "actor.lora.rank" and words in str(violation)


def test_latent_attention_has_adapters_on_its_own_modules():
    kimi = replace(known_spec("Kimi-K2-Instruct"), fp8_block=None)
    for model, own in ((kimi, ("q_a_proj", "q_b_proj")), (known_spec("Moonlight-16B-A3B"), ("q_proj",))):
        assert not _of_rules(model)
        found = adapted_modules(model, Lora.of(4, 8, ["all-linear"]))
        rest = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        assert found == (*own, *rest)
        (violation,) = _of_rules(model, "actor.lora.target_modules=[k_proj]")
        assert "must name a module that the model has" in str(violation)


def test_gated_delta_attention_has_adapters_on_its_own_modules():
    fused, apart = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    text = replace(known_spec("Qwen3.5-35B-A3B"), is_wrapped=False)
    for model, own in ((known_spec("Qwen3-Next-80B-A3B"), fused), (text, apart)):
        assert not _of_rules(model)
        found = adapted_modules(model, Lora.of(4, 8, ["all-linear"]))
        rest = ("q_proj", "k_proj", "v_proj", "o_proj", *own, "out_proj", "gate_proj", "up_proj", "down_proj")
        assert found == rest


def test_rows_of_a_rank_that_lie_apart_in_a_weight_are_joined_in_their_factor():
    """By kind, a tensor rank has queries, keys and values of its heads, which do not follow each other."""
    text = replace(known_spec("Qwen3.5-35B-A3B"), is_wrapped=False, num_layers=4, moe_layers=(0, 1, 2, 3),
                   linear_layers=(0, 1, 2))  # fmt: skip
    layout = TrainLayout.build({"world_size": 2, "tensor_model_parallel_size": 2}, text)
    keys, values = (16 * 128, 32 * 128)
    for rank in range(2):
        layers = adapted_layers(text, layout, rank, Lora.of(4, 8, ["in_proj_qkv", "in_proj_z"]))
        qkv, gates = layers[0].targets
        each = [(first + rank * size // 2, first + (rank + 1) * size // 2)
                for first, size in ((0, keys), (keys, keys), (2 * keys, values))]  # fmt: skip
        assert qkv.rows == tuple(each) and gates.rows == ((rank * values // 2, (rank + 1) * values // 2),)
        assert qkv.segments == ((0, 0, keys // 2), (keys // 2, keys // 2, keys // 2), (keys, keys, values // 2))
        assert [piece.hf_box.ranges[0] for piece in qkv.pieces("lora_B", 4)] == each
        assert qkv.shape("lora_B", 4) == (keys + values // 2, 4) and qkv.local_row(each[1][0]) == keys // 2


def test_the_smallest_side_is_that_of_the_targets():
    assert smallest_side(DENSE_MODEL, Lora.of(1, 1, ["k_proj"])) == (1024, "model.layers.0.self_attn.k_proj.weight")
    assert smallest_side(TINY_MODEL, LORA)[0] == 64
    assert LoraConfig().adapters is None and LoraConfig(rank=2).adapters == Lora.of(2, 16.0, TARGETS)


# --- what a plan counts -----------------------------------------------------------------------------------------------


LATENT = model_spec({
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 31, "intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "q_lora_rank": 6, "kv_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "max_position_embeddings": 64, "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
})  # fmt: skip


@pytest.mark.parametrize("degrees", [{"world_size": 1}, {"world_size": 2, TP: 2}, {"world_size": 4, TP: 2, EP: 2}])
def test_a_rank_holds_the_factors_of_down_projections_whole_and_of_up_projections_by_heads(degrees):
    lora = Lora.of(3, 6, ["all-linear"])
    layout = TrainLayout.build(degrees, LATENT)
    shapes = adapter_shapes(LATENT, lora)
    held = [adapter_shards(LATENT, layout, rank, lora) for rank in range(layout.world_size)]
    for name, shape in shapes.items():
        boxes = [p.hf_box for shards in held for s in shards for p in s.pieces if p.hf_name == name]
        assert cover_fault(Box.whole(shape), list(dict.fromkeys(boxes))) is None, name
        is_whole = "_a_proj" in name or ("lora_A" in name) != ("o_proj" in name or "down_proj" in name)
        if ".experts." not in name:
            assert (set(boxes) == {Box.whole(shape)}) == (is_whole or layout.tensor == 1), name
    for rank, shards in enumerate(held):
        whole = [s for s in shards if "_a_proj" in s.megatron_name]
        assert len(whole) == 16 and all(s.replicas == layout.dense_group(rank, "tp", "cp", "dp") for s in whole)


@pytest.mark.parametrize(
    ("degrees", "model"),
    [
        *((degrees, SMALL) for degrees in LAYOUTS),
        ({"world_size": 2, TP: 2}, LATENT),
        ({"world_size": 2, PP: 2}, LATENT),
    ],
)
def test_a_plan_counts_the_adapters_of_a_stage_as_ranks_hold_them(degrees, model):
    layout = TrainLayout.build(degrees, model)
    for rank in range(layout.world_size):
        pp = layout.dense_coords(rank).pp
        counted = adapter_numel(model, layout, pp, LORA)
        shards = adapter_shards(model, layout, rank, LORA)
        sizes = {
            is_expert: sum(
                round_up(s.local_shape[0] * s.local_shape[1], 64) for s in shards if s.is_expert == is_expert
            )
            for is_expert in (False, True)
        }
        assert (counted.dense, counted.expert) == (sizes[False], sizes[True])


def test_adapters_of_a_large_model_leave_gradients_and_optimizer_small():
    model = known_spec("Qwen3-30B-A3B")
    layout = TrainLayout.build({"world_size": 8, TP: 2, EP: 8}, model)
    lora = Lora.of(16, 32.0, ["q_proj", "k_proj", "v_proj", "o_proj"])
    full, small = stage_state(model, layout, 0), stage_state(model, layout, 0, lora=lora)
    assert small.gradients < full.gradients / 100 and small.optimizer < full.optimizer / 100
    assert full.parameters < small.parameters < full.parameters * 1.01
    assert small.trained < small.parameters / 100 and full.trained == full.parameters
    assert adapter_count(model, lora) == 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))


def test_a_hand_over_takes_the_frozen_base_one_way_and_all_else_both():
    """The host has the base's weights already when they leave; adapters and moments change."""
    offload = ["actor.param_offload=true", "actor.optimizer_offload=true"]
    for more in ([], ["actor.lora.rank=4"]):
        config = load_config(TINY, None, [*offload, *more]).config
        inputs = PlanInputs.of(config, TINY_MODEL, find_device("h100-80g"))
        state = stage_state(
            TINY_MODEL, inputs.train, 0, precision_of(config, inputs.element_bytes), lora=config.actor.lora.adapters
        )
        assert (state.frozen > 0.9 * state.parameters) == bool(more)
        moved = 2 * (state.parameters + state.optimizer) - state.frozen
        assert hand_over_seconds(inputs) == pytest.approx(moved / inputs.device.host_path_rate)


def test_the_reference_of_adapters_takes_no_memory():
    def terms(*overrides: str):
        kl = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1"]
        config = load_config(TINY, None, [*kl, *overrides]).config
        return str(memory_section(PlanInputs.of(config, TINY_MODEL, find_device("cpu"))))

    assert "'reference'" in terms() and "'reference'" not in terms("actor.lora.rank=4")
    assert "'reference'" in terms("actor.lora.rank=4", "ref.path=/another")


@pytest.mark.parametrize(
    ("device", "degrees", "experts"),
    [("h100-80g", {}, 1), ("h100-80g", {EP: 8}, 1), ("ascend-910b-64g", {}, 128), ("ascend-910b-64g", {EP: 8}, 16)],
)
def test_a_plan_launches_adapters_of_all_experts_at_once_where_torch_can(device, degrees, experts):
    """Of gate and up: A joined, A x, its scale, two of B, their place. Then what a layer does for all of them."""
    device = find_device(device)
    model = known_spec("Qwen3-30B-A3B")
    layout = TrainLayout.build({"world_size": 8} | degrees, model)
    work = PassWork(model, MicroBatchShape(1, 10240, 8192), 1e6, 1e9)
    assert adapter_launches(work, layout, device) == 0
    every = replace(work, lora=Lora.of(32, 64.0, [ALL_LINEAR]))
    assert adapter_launches(every, layout, device) == experts * 6 + 2 + experts * 3 + 2 + 7 + 2 + 3 + 2
    attention = replace(work, lora=Lora.of(32, 64.0, ["q_proj", "v_proj"]))
    assert adapter_launches(attention, layout, device) == 6 + 2


def test_adapters_of_many_experts_on_a_rank_take_no_more_launches_than_frozen_weights_spare():
    """A layer's adapters launch 31 kernels at 10 us, 0.3 ms a pass; its 128 experts' weights have no gradients, whose
    256 products take 16 ms.
    """

    def update(*overrides: str) -> float:
        preset = TINY.parents[1] / "qwen3-30b-a3b" / "h200-1x8.yaml"
        config = load_config(preset, None, list(overrides)).config
        inputs = PlanInputs.of(config, known_spec("Qwen3-30B-A3B"), find_device("h200-141g"))
        return actor_seconds(inputs, batch_plan(config, inputs.train))[1].compute

    whole = ["actor.layout.tensor_model_parallel_size=1", "actor.layout.expert_model_parallel_size=1"]
    assert 0.7 < update(*whole, "actor.lora.rank=32") / update(*whole) < 0.95


# --- verl's keys ------------------------------------------------------------------------------------------------------

M = "actor_rollout_ref.model."


def imported(*words: str):
    return import_overrides(["data.train_files=a.parquet", f"{M}path=Qwen/Qwen3-8B", *words])


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([f"{M}lora_rank=32"], {"rank": 32, "alpha": 16}),
        ([f"{M}lora_rank=32", f"{M}lora_alpha=64"], {"rank": 32, "alpha": 64}),
        ([f"{M}lora.rank=8"], {"rank": 8, "alpha": 32}),
        ([f"{M}lora_rank=8", f"{M}lora_alpha=8", f"{M}target_modules=all-linear"], {"target_modules": ["all-linear"]}),
        (
            [f"{M}lora.rank=8", f"{M}lora.target_modules=[linear_qkv,linear_fc2]"],
            {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]},
        ),
        ([f"{M}lora_rank=8", f"{M}lora_adapter_path=/x"], {"path": "/x"}),
        ([f"{M}lora.rank=8", f"{M}lora.dropout=0.1"], {"dropout": 0.1}),
    ],
)
def test_verls_adapters_are_carried(words, values):
    found = imported(*words)
    assert {key: found.values[f"actor.lora.{key}"] for key in values} == values
    assert not [entry for entry in found.of("unsupported") if "lora" in entry.key or "target" in entry.key]


def test_verls_adapters_that_are_off_or_others_than_here_are_said():
    off = imported(f"{M}lora_rank=0", f"{M}lora_alpha=0", f"{M}target_modules=all-linear", f"{M}lora.rank=0")
    assert not [key for key in off.values if key.startswith("actor.lora")] and not off.of("unsupported")
    words = (
        "type=dora",
        "dropout_position=post",
        "share_expert_adapters=True",
        "normalize_moe_lora=True",
        "merge=True",
    )
    other = imported(f"{M}lora.rank=8", *(f"{M}lora.{word}" for word in words))
    unlike = {f"{M}lora.{name}" for name in ("type", "dropout_position", "share_expert_adapters", "normalize_moe_lora")}
    assert {entry.key for entry in other.of("unsupported")} == unlike
    assert "no module" in str(imported(f"{M}lora.rank=8", f"{M}target_modules=[in_proj]").of("unsupported")[0])
