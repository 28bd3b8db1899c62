"""The NPU platform against stand-ins.

They have the signatures of MindSpeed core_r0.16.0 (Ascend/MindSpeed on GitHub: mindspeed/ megatron_adaptor.py,
mindspeed/args_utils.py, features_manager/context_parallel/context_parallel_feature.py) and of torch_npu 2.10.0.post4
(tests/unit/test_stand_ins.py compares both with what was read from these releases), and of Megatron; nothing here has
seen hardware.
"""

import ast
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small_model import SIZES

from mrl.config.load import load_config
from mrl.config.rules import notes, violations
from mrl.errors import EnvironmentFault
from mrl.model import model_spec, planning_model_spec
from mrl.platforms import get_platform, npu_mindspeed, prepare_process
from mrl.platforms.hosting import environment_faults, get_hosting
from mrl.platforms.versions import ASCEND_CONFIG, ASCEND_VARIABLES

ROOT = Path(__file__).parents[2]

STAND_INS = {
    "torch_npu/__init__.py": "",
    "torch_npu/contrib/__init__.py": "",
    "torch_npu/contrib/transfer_to_npu.py": "",
    "megatron/__init__.py": "",
    "megatron/core/__init__.py": "",
    "megatron/core/parallel_state.py": """
STARTED = False
def initialize_model_parallel(context_parallel_size=1):
    return "megatron's own"
def model_parallel_is_initialized():
    return STARTED
""",
    "mindspeed/__init__.py": "",
    "mindspeed/args_utils.py": """
import argparse
_MINDSPEED_ARGS = None
def get_mindspeed_args(get_defaults=False):
    global _MINDSPEED_ARGS
    if not get_defaults and _MINDSPEED_ARGS is not None:
        return _MINDSPEED_ARGS
    parser = argparse.ArgumentParser(description='MindSpeed Arguments', allow_abbrev=False)
    choices = ['megatron_cp_algo', 'hybrid_cp_algo']
    parser.add_argument('--context-parallel-algo', default='megatron_cp_algo', choices=choices)
    args, unknown = parser.parse_known_args([] if get_defaults else None)
    for name in unknown:  # what it does not know becomes an attribute, under an empty name where it is a lone dash
        vars(args)[name[2:].replace('-', '_')] = True
    if not get_defaults:
        _MINDSPEED_ARGS = args
    return args
def get_full_args():
    return get_mindspeed_args()  # those of Megatron's training script, where that is installed and has parsed any
""",
    "mindspeed/megatron_adaptor.py": """
from torch_npu.contrib import transfer_to_npu
from mindspeed.args_utils import get_full_args, get_mindspeed_args
from megatron.core import parallel_state
_ORIGINAL = parallel_state.initialize_model_parallel
def _apply(args):
    if int(getattr(args, 'context_parallel_size', 1)) > 1:
        parallel_state.initialize_model_parallel = lambda *a, **k: "mindspeed's, with rings"
def patch_features():
    _apply(get_mindspeed_args())
def repatch(args):
    parallel_state.initialize_model_parallel = _ORIGINAL
    full_args = get_full_args()
    for k, v in args.items():
        setattr(full_args, k, v)
    _apply(full_args)
patch_features()
""",
}  # fmt: skip

LAYOUT = {
    "world_size": 4,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
}


def rank(folder: Path, program: str, *arguments: str, leave_out: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs `program` in a process of its own that finds the stand-ins instead of the real packages."""
    for name, text in STAND_INS.items():
        if not name.startswith(leave_out or ("-",)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\nLAYOUT = {LAYOUT!r}\n"
    return subprocess.run(
        [sys.executable, "-c", start + program, *arguments], capture_output=True, text=True, timeout=60
    )


PREPARE = (
    "from mrl.platforms import prepare_process\nOWN = prepare_process('npu', LAYOUT, {'moe_grouped_gemm': True, "
    "'swap_optimizer': True})\n"
)


def test_mindspeed_is_applied_for_the_runs_own_sizes_before_megatron_initialises(tmp_path):
    done = rank(
        tmp_path,
        PREPARE
        + "from megatron.core import parallel_state as p\nprint(p.initialize_model_parallel(context_parallel_size=2))",
    )
    assert done.stdout.strip() == "mindspeed's, with rings", done.stderr


def test_mindspeed_is_told_sizes_and_overrides_and_nothing_else_of_the_layout(tmp_path):
    done = rank(
        tmp_path, PREPARE + "from mindspeed.args_utils import get_mindspeed_args as g\nprint(sorted(vars(g()).items()))"
    )
    assert ast.literal_eval(done.stdout) == [
        ("context_parallel_algo", "megatron_cp_algo"), ("context_parallel_size", 2), ("moe_grouped_gemm", True),
        ("swap_optimizer", True), ("tensor_model_parallel_size", 2), ("use_distributed_optimizer", True),
        ("use_flash_attn", True),
    ], done.stderr  # fmt: skip


OF_EXPERTS = {  # grouped products, exchange, permutation and rotary embedding in kernels
    "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": True,
    "use_fused_rotary_pos_emb": True,
}  # fmt: skip
ASCEND = sorted((ROOT / "parallel_configs").glob("*/a[23]-*.yaml"))


@pytest.mark.parametrize("path", ASCEND, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_mindspeed_is_told_the_kernels_of_experts_by_every_ascend_preset_of_such_a_model(path, monkeypatch):
    """Tells it as a rank does, with the preset's own words and no others."""
    told = []
    monkeypatch.setitem(sys.modules, npu_mindspeed.ADAPTOR, types.SimpleNamespace(repatch=told.append))
    for refusal in ("refuse_beside_vllm", "_refuse_too_late"):  # other tests of this process import what they like
        monkeypatch.setattr(npu_mindspeed, refusal, lambda: None)
    config = load_config(path).config
    prepare_process(config.cluster.device, config.actor.layout.model_dump(), config.model.override_transformer_config)
    (said,) = told
    assert said["use_flash_attn"] is True
    if planning_model_spec(config.model.path)[0].is_moe:
        assert {name: said.get(name) for name in OF_EXPERTS} == OF_EXPERTS


def test_there_are_ascend_presets_of_experts_on_both_machines():
    of_experts = [path for path in ASCEND if planning_model_spec(load_config(path).config.model.path)[0].is_moe]
    assert {path.stem.split("-")[0] for path in of_experts} == {"a2", "a3"} and len(of_experts) >= 4


def test_megatron_itself_is_given_its_own_fields_only(tmp_path):
    done = rank(tmp_path, PREPARE + "print(OWN)")
    assert ast.literal_eval(done.stdout) == {"moe_grouped_gemm": True}, done.stderr


def test_the_command_line_is_hidden_from_mindspeed_and_then_back(tmp_path):
    # MindSpeed would end the process over the value, and make an attribute without a name of the lone dash
    strange = ("--context-parallel-algo", "ours", "-")
    done = rank(tmp_path, PREPARE + "print(sys.argv[1:])", *strange)
    assert ast.literal_eval(done.stdout) == list(strange), done.stderr


def test_two_runs_in_one_process_apply_it_twice(tmp_path):
    again = "prepare_process('npu', LAYOUT | {'context_parallel_size': 1}, {})\n"
    done = rank(
        tmp_path,
        PREPARE + again + "from megatron.core import parallel_state as p\nprint(p.initialize_model_parallel())",
    )
    assert done.stdout.strip() == "megatron's own", done.stderr


@pytest.mark.parametrize(
    ("before", "leave_out", "said"),
    [
        ("import megatron.core\n", (), "megatron was imported before MindSpeed"),
        ("import types; sys.modules['vllm'] = types.ModuleType('vllm')\n", (), "has imported vllm"),
        ("", ("mindspeed/",), "cluster.device=npu needs MindSpeed core_r0.16.0"),
        ("", ("torch_npu/",), "No module named 'torch_npu'"),
        ("open(sys.path[0] + '/megatron_adaptor.py', 'w').close()\n", (), "core_r0.17.0 or newer"),
        (PREPARE + "import megatron.core.parallel_state as p; p.STARTED = True\n", (), "process groups exist already"),
    ],
)
def test_what_comes_too_early_or_is_missing_is_said(tmp_path, before, leave_out, said):
    done = rank(tmp_path, before + PREPARE, leave_out=leave_out)
    assert done.returncode == 1 and "EnvironmentFault" in done.stderr and said in done.stderr


def test_other_devices_prepare_nothing():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, mrl.platforms as p; p.prepare_process('cpu', {}, {}); "
                               "print('torch' in sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr


def test_a_ranks_process_has_not_imported_megatron_when_it_is_prepared():
    """Rank 0 is asked for a port before it starts; that alone would have brought Megatron,
    and made MindSpeed too late.
    """
    program = (
        "import sys\nfrom mrl.rank.rank_worker import ActorWorker\n"
        "assert 1024 <= ActorWorker.free_port(None) <= 65535\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'mbridge', 'vllm', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


class Npu(types.ModuleType):
    """torch.npu with two devices; records what it was asked."""

    def __init__(self, available: bool = True):
        super().__init__("torch.npu")
        self.chosen, self.available = 0, available

    def is_available(self):
        return self.available

    def device_count(self):
        return 2

    def current_device(self):
        return self.chosen

    def set_device(self, device):
        self.chosen = device

    def max_memory_allocated(self, device=None):
        return 3 * 2**30

    def max_memory_reserved(self, device=None):
        return 5 * 2**29


@pytest.fixture
def npu(monkeypatch):
    stand_in = Npu()
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", stand_in, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return stand_in


def test_the_platform_answers_from_torch_npu(npu):
    platform = get_platform("npu")
    assert (platform.name, platform.distributed_backend) == ("npu", "hccl")
    platform.set_device(3)  # rank 3 of a host that shows this process two devices
    assert npu.chosen == 1
    assert (platform.max_memory_allocated_gb(), platform.max_memory_reserved_gb()) == (3.0, 2.5)


def test_a_host_without_npus_is_told_what_to_look_at(npu):
    npu.available = False
    with pytest.raises(EnvironmentFault, match="npu-smi info"):
        get_platform("npu")


def test_without_torch_npu_nothing_falls_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(EnvironmentFault, match="install the npu extra"):
        get_platform("npu")


def test_the_platform_refuses_an_environment_that_would_corrupt_weights(npu, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")
    with pytest.raises(EnvironmentFault, match="cannot be updated in place"):
        get_platform("npu")


def test_every_fault_of_the_environment_is_named_at_once():
    broken = {
        "VLLM_ASCEND_ENABLE_NZ": "2",
        "VLLM_PLUGINS": "mrl",
        "VLLM_ASCEND_ENABLE_FUSED_MC2": "1",
        "TASK_QUEUE_ENABLE": "2",
    }
    assert [fault.split()[0] for fault in environment_faults("npu", broken)] == [
        "VLLM_ASCEND_ENABLE_NZ", "VLLM_PLUGINS", "VLLM_ASCEND_ENABLE_FUSED_MC2", "TASK_QUEUE_ENABLE",
    ]  # fmt: skip
    assert (
        environment_faults(
            "npu", {"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_PLUGINS": "ascend,mrl", "TASK_QUEUE_ENABLE": "1"}
        )
        == []
    )


def test_our_own_environment_passes_our_own_check():
    hosting = get_hosting("npu")
    assert environment_faults("npu", hosting.actor_environment()) == []
    assert environment_faults("npu", hosting.engine_environment(0, 1, 4, 1)) == []


def test_ray_is_asked_for_npus_and_the_engine_for_storage_that_can_be_written():
    hosting = get_hosting("npu")
    assert hosting.ray_resources(cpus=2, devices=4) == {"CPU": 2, "NPU": 4.0}
    assert hosting.engine_arguments(4096, None, sleeps=True).pop("enable_sleep_mode") is True
    assert get_hosting("cuda").engine_arguments(4096, None, sleeps=True)["enable_sleep_mode"] is True
    assert hosting.engine_arguments(4096, None) == {"additional_config": {"weight_nz_mode": 0}}
    engine = hosting.engine_environment(0, 1, 4, 1)
    assert engine["VLLM_ASCEND_ENABLE_NZ"] == "0" and "VLLM_PLUGINS" not in engine
    both = (hosting.actor_environment(), engine)  # actor and engine may share an NPU
    assert all(e["HCCL_HOST_SOCKET_PORT_RANGE"] == e["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto" for e in both)


REFUSED = {
    "model.override_transformer_config.use_flash_attn": "model.override_transformer_config.use_flash_attn=false",
    "actor.layout.virtual_pipeline_model_parallel_size": "actor.layout.virtual_pipeline_model_parallel_size=2",
    "model.override_transformer_config.moe_use_legacy_grouped_gemm":
        "model.override_transformer_config.moe_use_legacy_grouped_gemm=true",
    "rollout.engine_kwargs.vllm.additional_config.eplb_config.dynamic_eplb":
        "rollout.engine_kwargs.vllm.additional_config={eplb_config: {dynamic_eplb: true}}",
    "rollout.engine_kwargs.vllm.additional_config.rl_config":  # of later releases
        "rollout.engine_kwargs.vllm.additional_config={rl_config: {enabled: true}}",
    "rollout.engine_kwargs.vllm.additional_config.weight_nz_mode":
        "rollout.engine_kwargs.vllm.additional_config={weight_nz_mode: 1}",
    "rollout.engine_kwargs.vllm.additional_config.enable_fused_mc2":
        "rollout.engine_kwargs.vllm.additional_config={weight_nz_mode: 0, enable_fused_mc2: 1}",
    "rollout.engine_kwargs.vllm.additional_config.enable_reduce_sample":
        "rollout.engine_kwargs.vllm.additional_config={enable_reduce_sample: true}",
    "rollout.engine_kwargs.vllm.additional_config.finegrained_tp_config":
        "rollout.engine_kwargs.vllm.additional_config={finegrained_tp_config: {lmhead_tensor_parallel_size: 2}}",
    "rollout.engine_kwargs.vllm.additional_config.enable_flashcomm2_parallel_size":
        "rollout.engine_kwargs.vllm.additional_config={enable_flashcomm2_parallel_size: 2}",
    "rollout.engine_kwargs.vllm.additional_config.recompute_scheduler_enable":
        "rollout.engine_kwargs.vllm.additional_config={recompute_scheduler_enable: true}",
}  # fmt: skip


@pytest.mark.parametrize(("field", "setting"), REFUSED.items())
def test_combinations_that_fail_on_npus_are_refused_there_and_only_there(field, setting):
    model, preset = model_spec(SIZES), ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"

    def refused(device: str) -> bool:
        found = violations(load_config(preset, None, [f"cluster.device={device}", setting]), model)
        return any(
            v.field == field and ("npu" in v.rule or "vllm-ascend" in v.rule or "must be" in v.rule) for v in found
        )

    assert refused("npu")
    # the one no other device has at all, and the other none can name the weights of
    anywhere = ("use_flash_attn", "moe_use_legacy_grouped_gemm")
    assert not refused("cuda") or field.endswith(anywhere)


def test_whatever_is_given_beside_weights_that_can_be_written_is_taken():
    """Where the key is left out, the engine's environment says the same."""
    model, preset = model_spec(SIZES), ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    given = "rollout.engine_kwargs.vllm.additional_config={dp_allreduce_on_npu: true, refresh: true}"
    assert violations(load_config(preset, None, ["cluster.device=npu", given]), model) == []
    assert get_hosting("npu").engine_environment(0, 1, 1, 1)["VLLM_ASCEND_ENABLE_NZ"] == "0"


@pytest.mark.parametrize(
    ("overrides", "legal"),
    [
        ([], False),
        (["rollout.tensor_model_parallel_size=2"], False),
        (["rollout.tensor_model_parallel_size=2", "rollout.expert_parallel_size=2"], True),
    ],
)
def test_a_steps_tokens_are_cut_over_ranks_only_where_experts_are(overrides, legal):
    model, preset = model_spec(SIZES), ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    given = ["cluster.device=npu", "cluster.n_gpus_per_node=8", *overrides]
    given += ["rollout.engine_kwargs.vllm.additional_config={enable_flashcomm1: true}"]
    found = [v for v in violations(load_config(preset, None, given), model) if v.field.endswith("enable_flashcomm1")]
    assert legal == (found == [])


def test_what_engines_are_told_is_what_that_release_reads():
    hosting = get_hosting("npu")
    ours = {name for name in hosting.engine_environment(0, 1, 4, 1) if name.startswith("VLLM_ASCEND_")}
    checked = {
        fault.split()[0]
        for fault in environment_faults("npu", {"VLLM_ASCEND_ENABLE_NZ": "2", "VLLM_ASCEND_ENABLE_FUSED_MC2": "1"})
    }
    assert ours and ours | checked <= ASCEND_VARIABLES
    assert hosting.engine_arguments(4096, None)["additional_config"].keys() <= ASCEND_CONFIG


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_variable_of_vllm_itself_is_one_that_it_reads(device):
    known = (Path(importlib.util.find_spec("vllm").origin).parent / "envs.py").read_text()
    told = {
        name for name in get_hosting(device).engine_environment(0, 1, 1, 1) if name.startswith("VLLM_")
    } - ASCEND_VARIABLES
    assert told and not {name for name in told if f'"{name}": ' not in known}


def test_cached_prompts_lose_their_routes_on_cpu_alone():
    """vLLM keeps routes by the cache's slots, 0.23 in its scheduler (RoutedExpertsManager);
    what mrl collects on CPU goes by requests.
    """
    model, preset = model_spec(SIZES), ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    replayed = ["actor.router_replay=R3", "rollout.enable_prefix_caching=true"]
    said = {
        device: [
            n
            for n in notes(load_config(preset, None, [f"cluster.device={device}", *replayed]), model)
            if "without routes" in n
        ]
        for device in ("cpu", "npu")
    }
    assert len(said["cpu"]) == 1 and said["npu"] == []


def test_two_that_move_optimizer_states_are_not_combined():
    model, preset = model_spec(SIZES), ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    both = [
        "cluster.device=npu",
        "model.override_transformer_config.swap_optimizer=true",
        "actor.optimizer_offload=true",
    ]
    assert [v.field for v in violations(load_config(preset, None, both), model)] == ["actor.optimizer_offload"]
    assert violations(load_config(preset, None, both[:2]), model) == []


def test_a_run_on_npus_says_that_nobody_has_tried_it():
    model, preset = model_spec(SIZES), ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    on_npu, on_cpu = load_config(preset, None, ["cluster.device=npu"]), load_config(preset)
    assert violations(on_npu, model) == []
    assert any("never run on hardware" in note for note in notes(on_npu, model))
    assert not any("never run on hardware" in note for note in notes(on_cpu, model))


def test_experts_that_are_cut_to_no_whole_blocks_are_said_to_be_slow_and_allowed():
    """Source 004 cuts each of 768 columns 32 times; spread over its 32 workers they are whole."""
    from mrl.config.device_rules import narrow_experts
    from mrl.config.load import load_config
    from mrl.model import known_spec

    file, model = Path(__file__).parents[2] / "parallel_configs/qwen3-30b-a3b/a2-4x8.yaml", known_spec("Qwen3-30B-A3B")
    (note,) = narrow_experts(load_config(file).config, model)
    assert note.startswith("rollout.expert_parallel_size: each expert is cut 32 times, to a width of 24")
    whole = load_config(file, None, ["rollout.expert_parallel_size=32"]).config
    assert not list(narrow_experts(whole, model))
    cut = load_config(file).config
    elsewhere = cut.model_copy(update={"cluster": cut.cluster.model_copy(update={"device": "cuda"})})
    assert not list(narrow_experts(elsewhere, model))
