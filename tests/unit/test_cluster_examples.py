"""The examples for Kubernetes and Slurm are what KubeRay's schema and Slurm's manual pages allow, and start what they
say. tests/unit/schemas has of these what the examples use; each file names version, commit and file of what it was cut
out of. A new version's is cut from KubeRay's file in two steps: (1) of the served version v1 take openAPIV3Schema's
`spec`, with the group and the name of the kind; (2) along launch/kuberay.yaml keep of each object only the properties
that it has there, without descriptions and with `additionalProperties: false`, and of a list's items what any of them
has; what is `required` stays.
"""

import copy
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).with_name("schemas")
CLUSTER = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
SLURM = (ROOT / "launch" / "slurm.sh").read_text()
TRAIN = ["preset.yaml", "--run-dir", "/shared/run"]


def kuberay() -> dict:
    return json.loads((SCHEMAS / "kuberay_raycluster.json").read_text())


def pods() -> list[dict]:
    groups = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_ray_cluster_misses_a_lost_node_as_soon_as_one_of_the_start_script():
    (head,) = CLUSTER["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    own = {each["name"]: each["value"] for each in head["env"] if "health_check" in each["name"]}
    script = (ROOT / "launch" / "start_head.sh").read_text()
    assert own == dict(re.findall(r"(RAY_health_check_\w+)=\$\{\1:-(\d+)\}", script)) and len(own) == 3


def test_the_ray_cluster_is_one_that_kuberay_takes():
    stored = kuberay()
    assert CLUSTER["apiVersion"] == f"{stored['group']}/{stored['served']}" and CLUSTER["kind"] == stored["kind"]
    jsonschema.validate(CLUSTER["spec"], stored["spec"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("workerGroupSpecs", 0, "replica"), 4),
        (("workerGroupSpecs", 0, "replicas"), "4"),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("authOptions", "mode"), "none"),
        (("headGroupSpec", "template", "spec", "containers"), {"name": "ray-head"}),
    ],
    ids=lambda case: str(case),
)
def test_a_mistake_in_it_is_refused(path, value):
    spec = copy.deepcopy(CLUSTER["spec"])
    place = spec
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, kuberay()["spec"])


def test_every_pod_has_shared_memory_and_the_storage_that_all_see():
    for pod in pods():
        (container,) = pod["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounted["/shared"]]


def test_workers_may_pin_memory_and_have_time_to_save():
    pod = pods()[1]
    assert pod["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    grace = yaml.safe_load((ROOT / "launch" / "runtime_env.cuda.yaml").read_text())["env_vars"]
    assert pod["terminationGracePeriodSeconds"] >= int(grace["RAY_JOB_STOP_WAIT_TIME_S"])


def test_slurm_knows_every_option_that_its_script_gives():
    known = json.loads((SCHEMAS / "slurm.json").read_text())
    batch = re.findall(r"^#SBATCH --([a-z-]+)", SLURM, re.MULTILINE)
    assert {"nodes", "gpus-per-node", "ntasks-per-node", "signal"} <= set(batch) <= set(known["sbatch"])
    steps = [line for line in SLURM.splitlines() if re.search(r"\bsrun --", line)]
    assert len(steps) == 2
    for line in steps:
        words = line[line.index("srun") : line.index("launch/")]
        assert set(re.findall(r"--([a-z-]+)", words)) <= set(known["srun"])


class Allocation:
    """Commands of Slurm, Ray and mrl, replaced by scripts that record how they are called."""

    def __init__(self, folder: Path, nodes: int):
        self.bin, self.log = folder / "bin", folder / "calls"
        self.bin.mkdir()
        self.script("scontrol", f"seq -f node-%g {nodes}")
        interfaces = (("docker0", "172.17.0.1/16"), ("br-4f1c", "172.18.0.1/16"), ("eth0", "10.1.2.3/24"))
        self.script("ip", "\n".join(f"echo '{n}: {name}    inet {address} brd 10.1.2.255 scope global {name}'"
                                    for n, (name, address) in enumerate(interfaces, 2)))  # fmt: skip
        self.script("srun", f'echo "srun ${{HOST:-}} ${{HEAD:-}} $*" >>{self.log}\nexec sleep 30')
        self.script("ray", f'echo " 0.0/{8 * nodes}.0 GPU"')

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def runs(self, program: str) -> None:
        """What mrl does."""
        self.script("mrl", f'echo "mrl $RAY_ADDRESS $*" >>{self.log}\n{program}')

    def start(self) -> subprocess.Popen:
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.bin), "POLL_S": "0.1", "DEVICE": "cuda",
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1042", "SLURM_JOB_NODELIST": "node-[1-3]",
            "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "96",
        }  # fmt: skip
        words = [str(ROOT / "launch" / "slurm.sh"), *TRAIN]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def calls(self) -> list[str]:
        return sorted(self.log.read_text().splitlines()) if self.log.exists() else []


def test_the_job_starts_a_head_its_workers_and_the_run_and_ends_as_the_run_does(tmp_path):
    job = Allocation(tmp_path, nodes=3)
    job.runs("exit 3")
    process = job.start()
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 3, said
    run, *steps = job.calls
    assert run == f"mrl 10.1.2.3:6421 train {' '.join(TRAIN)}"
    worker, head = sorted(steps, key=lambda line: "start_head" in line)
    assert "10.1.2.3" in head and "--nodelist=node-1" in head
    assert all("--cpus-per-task=96" in step for step in steps), "a step does not take over the job's"
    assert "10.1.2.3:6421" in worker and "--nodes=2" in worker and "--exclude=node-1" in worker


def test_the_signal_before_the_time_is_over_reaches_the_run_which_may_still_save(tmp_path):
    job = Allocation(tmp_path, nodes=1)
    job.runs("trap 'sleep 0.5; exit 5' TERM\nwhile :; do sleep 0.1; done")
    process = job.start()
    deadline = time.monotonic() + 20
    while not any(call.startswith("mrl") for call in job.calls) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)  # until its trap is set
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 5, said
    assert len([call for call in job.calls if call.startswith("srun")]) == 1  # a single node has no worker
