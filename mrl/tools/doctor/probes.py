"""Checks that need a heavy import. Each has its own process; all run at once with one deadline."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mrl.platforms.inventory import BUILT_FOR_A_CHIP, LAYER_PROBES, TORCH_PROBES
from mrl.tools.doctor.host_facts import Finding, failure, ok, warning

DEADLINE_S = 8.0
_SHOWN = 1000  # characters of a program's last line; faults between nodes are one line


@dataclass(frozen=True)
class Probe:
    """A program that prints one line when all is well, or ends with another status."""

    name: str
    program: str
    cure: str
    arguments: tuple[str, ...] = ()
    # no answer by the deadline is a failure: with a refused token, Ray would try forever
    must_answer: bool = False


_RAY = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error', namespace='mrl-doctor')
print({name: amount for name, amount in ray.cluster_resources().items() if ':' not in name})
"""
_NODES = "from mrl.tools.node_checks import main; main()"
_BRIDGE = "import mbridge, megatron.core; print('mbridge and megatron-core', megatron.core.__version__, 'import')"
_VLLM = (
    "import vllm, vllm.distributed.weight_transfer; print('vLLM', vllm.__version__, 'imports, with weight transfer')"
)
_REINSTALL = "reinstall with scripts/install.sh; the message above names what is missing"


def probes(device: str, address: str | None, deep: bool, nnodes: int = 1) -> tuple[Probe, ...]:
    """Returns the probes that this host can try.

    `address`: of a Ray cluster that the run would join, on `nnodes` nodes. `deep`: also imports that take tens of
    seconds.
    """
    wanted = [
        Probe(
            "torch",
            TORCH_PROBES[device],
            "install the build of torch that fits the device and its driver; see version:torch",
        )
    ]
    if address:
        cure = (
            "is the head up (launch/start_head.sh), HOST:PORT right, and its token in "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token?"
        )
        wanted.append(Probe("ray cluster", _RAY, cure, (address,), must_answer=True))
    if address and nnodes > 1:
        wanted.append(Probe("between nodes", _NODES, "each names its own fix", (address, device)))
    if device == BUILT_FOR_A_CHIP:
        program = "from mrl.platforms.ascend_build import main; main()"
        wanted.append(Probe("vllm-ascend build", program, "the Dockerfile's npu target has the commands"))
    if deep and device in LAYER_PROBES:
        cure = "compile it against the torch that is installed: scripts/install.sh"
        wanted.append(Probe("import transformer_engine", LAYER_PROBES[device], cure))
    if deep:
        wanted += [Probe("import mbridge", _BRIDGE, _REINSTALL), Probe("import vllm", _VLLM, _REINSTALL)]
    return tuple(wanted)


def run_probes(wanted: Iterable[Probe], deadline_s: float = DEADLINE_S) -> Iterator[Finding]:
    """Runs all at once. One without answer by the deadline is ended, and counts as a warning or as it specifies."""
    quiet = os.environ | {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"), "VLLM_LOGGING_LEVEL": "ERROR"}
    started = []
    for probe in wanted:
        command = [sys.executable, "-c", probe.program, *probe.arguments]
        process = subprocess.Popen(command, env=quiet, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append((probe, process))
    end = time.monotonic() + deadline_s
    for probe, process in started:
        yield _answer(probe, process, max(end - time.monotonic(), 0.1), deadline_s)


def _answer(probe: Probe, process: subprocess.Popen, left_s: float, deadline_s: float) -> Finding:
    try:
        output, error = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        judge = failure if probe.must_answer else warning
        return judge(probe.name, f"no answer within {deadline_s:g} s", f"the host is busy, or: {probe.cure}")
    if process.returncode == 0:
        return ok(probe.name, _last(output))
    return failure(probe.name, _last(error) or f"ended with status {process.returncode}", probe.cure)


def _last(text: str) -> str:
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    if lines:
        return lines[-1][:_SHOWN]
    return ""
