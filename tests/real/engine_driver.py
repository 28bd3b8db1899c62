"""Runs a script that starts one vLLM engine, in a process and a session of its own, and ends what it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from mrl.engine.leftovers import remove_all, shared_memory_below
from mrl.platforms.hosting import get_hosting

HERE = Path(__file__).parent


def run_engine(script: str, folder: Path, job: dict[str, Any], tensor: int, limit_s: float, kv_gib: int = 1) -> Any:
    """What `script`, beside this file, writes for `job`, which it reads as JSON;
    the environment is that of a run's engine.
    """
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    environment = os.environ | get_hosting("cpu").engine_environment(0, 1, tensor, kv_gib) | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), str(file)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=limit_s)
        finally:
            # a driver that failed leaves vLLM's workers behind
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                segments = shared_memory_below(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                remove_all(segments)
        assert status == 0, log.seek(0) or log.read()[-6000:]
    return json.loads(file.with_suffix(".out").read_text())
