"""A process from the server of vLLM's processes has what it was asked with, is watched as a spawned one is, and ends
with whoever asked.

Functions stand in for vLLM's core and worker; the server is the product's, which has imported vLLM.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from deadlines import END_S

pytestmark = pytest.mark.real
# A front end: it starts a core, which starts a worker; says who they are, and for each line that it reads, who was lost
# and how the core ended, and starts them anew.
FRONT_END = """
import json, os, sys, tempfile, time
import setproctitle
from mrl.engine import forking
from mrl.engine.process_watch import ProcessWatch, end_with_parent

def facts():
    import torch
    from vllm.distributed.device_communicators import shm_broadcast
    return [os.environ.get("TOLD"), os.environ.get("GONE"), torch.get_num_threads(), sorted(os.sched_getaffinity(0)),
            os.getppid(), shm_broadcast.SpinCondition.__name__]

def core(told):
    setproctitle.setproctitle("VLLM::EngineCore")
    end_with_parent()
    context = forking.ForkingContext()
    alive, ends = context.Pipe(duplex=False)
    here, there = context.Pipe(duplex=False)
    os.environ |= {"OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": str(max(os.sched_getaffinity(0))), "TOLD": "worker"}
    below = context.Process(target=worker, args=(there, alive), daemon=True)
    below.start()
    alive.close()  # else the worker would not see this process end
    told.send([os.getpid(), below.pid, here.recv()])
    time.sleep(600)

def worker(told, alive):
    setproctitle.setproctitle("VLLM::Worker_TP0")
    told.send(facts())
    try:
        alive.recv()  # as vLLM's: nothing is ever sent
    except EOFError:
        pass

if __name__ == "__main__":
    os.environ["GONE"] = "1"
    forking.start_server(tempfile.gettempdir())
    del os.environ["GONE"]
    os.environ["LD_PRELOAD"] = forking.preloaded_libraries(os.environ.get("LD_PRELOAD", ""))  # as vLLM sets it
    os.environ["OMP_NUM_THREADS"] = "1"
    context = forking.ForkingContext()
    server = forking.forkserver._forkserver
    for last in (False, False, True):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=core, args=(there,))
        process.start()
        said = here.recv()
        watch = ProcessWatch(lambda: False)
        told = [*said, server._forkserver_pid, os.path.dirname(server._forkserver_address)]
        if last:
            forking.leave_server()
        print(json.dumps(told), flush=True)
        sys.stdin.readline()
        while not watch.has_seen:
            time.sleep(0.01)
        lost = watch.lost
        process.kill()
        process.join()
        print(json.dumps([lost, process.exitcode]), flush=True)
"""


@pytest.fixture
def front_end(tmp_path) -> Iterator[subprocess.Popen]:
    """Its process; what is left of it and below it is killed."""
    (tmp_path / "front_end.py").write_text(FRONT_END)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "front_end.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    below = []
    process.below = below
    yield process
    process.kill()
    process.communicate()
    for one in below:
        if one.is_running():
            one.kill()


def answer(front_end: subprocess.Popen) -> list:
    return json.loads(front_end.stdout.readline())


@pytest.mark.timeout(END_S)
def test_forked_processes_are_what_spawned_ones_would_be_and_end_as_they_would(front_end):
    core, worker, facts, server, folder = answer(front_end)
    front_end.below += [psutil.Process(pid) for pid in (core, worker, server)]
    *facts, condition = facts
    assert facts == ["worker", None, 2, [max(os.sched_getaffinity(0))], server], "what the core set, not the server"
    assert condition == "NappingCondition", "who waits for the other would keep a core busy"
    assert [psutil.Process(pid).cmdline()[0].split()[0] for pid in (core, worker)] == [
        "VLLM::EngineCore",
        "VLLM::Worker_TP0",
    ]
    assert "/fork-" in folder and os.path.exists(folder)
    assert psutil.Process(server).num_threads() == 1, "what a second thread holds would be held for ever"

    front_end.stdin.write("\n")  # a worker dies
    front_end.stdin.flush()
    os.kill(worker, signal.SIGKILL)
    lost, code = answer(front_end)
    assert lost.startswith("VLLM::Worker_TP0") and code == -signal.SIGKILL

    core, worker, *_ = answer(front_end)
    front_end.below += [psutil.Process(pid) for pid in (core, worker)]
    front_end.stdin.write("\n")  # a core dies; its worker sees it
    front_end.stdin.flush()
    os.kill(core, signal.SIGKILL)
    lost, code = answer(front_end)
    assert lost.startswith("VLLM::EngineCore") and code == -signal.SIGKILL
    _, left = psutil.wait_procs([one for one in front_end.below if one.pid == worker], timeout=60)
    assert not left, f"outlived its core: {left}"

    core, worker, *_ = answer(front_end)
    assert not os.path.exists(folder), "it was left, and a kill leaves nothing behind"
    last = [psutil.Process(pid) for pid in (core, worker, server)]
    front_end.below += last
    front_end.kill()  # the front end dies, and all below it
    _, left = psutil.wait_procs(last, timeout=60)
    assert not left, f"outlived who asked for them: {left}"
