"""A process of vLLM's from the server is one that was spawned: same threads, cores and environment; else it is spawned.

Real ones are in tests/real/test_forking.py; that engines' processes do come from it is seen in tests/real/test_runs.py.
"""

import multiprocessing
import os
from pathlib import Path

import pytest

from mrl.engine import forking
from mrl.engine.forking import ForkingContext, bound_cores, can_fork, preloaded_libraries

SERVER = {forking._SERVER: "openmp.so", "LD_PRELOAD": "openmp.so"}


@pytest.mark.parametrize(
    ("changed", "forks"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "8"}, True),
        ({"OMP_NUM_THREADS": "9"}, False),  # each is to be bound to a core
        ({"OMP_NUM_THREADS": "0"}, False),
        ({"OMP_NUM_THREADS": "2,1"}, False),
        ({"LD_PRELOAD": "heap.so:openmp.so"}, False),  # the server runs without it
        ({"LD_PRELOAD": ""}, False),
        ({"LD_LIBRARY_PATH": "/lib"}, True),  # what is imported may add to it, for programs that are started later
        ({forking._SERVER: ""}, False),
        ({"GOMP_CPU_AFFINITY": "1"}, True),
    ],
)
def test_a_server_stands_in_where_it_has_loaded_the_same(changed, forks):
    assert can_fork(SERVER | {"OMP_NUM_THREADS": "1"} | changed) is forks


def test_without_a_server_or_a_number_of_threads_processes_are_spawned():
    assert not can_fork({"OMP_NUM_THREADS": "1"}) and not can_fork(SERVER)


@pytest.mark.parametrize(
    ("environment", "cores"),
    [
        ({"GOMP_CPU_AFFINITY": "3"}, {3}),
        ({"GOMP_CPU_AFFINITY": "0 12 5"}, {0, 5, 12}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5]"}, {4, 5}),
        ({"OMP_PLACES": "{0,1,2}", "OMP_PROC_BIND": "true"}, {0, 1, 2}),
        ({}, set()),
    ],
)
def test_cores_are_read_as_vllm_tells_them_to_openmp(environment, cores):
    assert bound_cores(environment) == cores


def test_libraries_that_are_given_are_kept_and_not_doubled():
    (openmp,) = preloaded_libraries("").split(":")[-1:]
    assert "libgomp" in openmp and os.path.exists(openmp)
    assert preloaded_libraries("/x/other.so").split(":")[-2:] == ["/x/other.so", openmp]
    assert preloaded_libraries("/x/libiomp5.so:/x/libtcmalloc.so") == "/x/libiomp5.so:/x/libtcmalloc.so"
    assert preloaded_libraries(preloaded_libraries("")) == preloaded_libraries("")


def test_the_server_is_started_with_the_libraries_that_its_processes_will_ask_for(monkeypatch, tmp_path):
    seen = {}

    def started() -> None:
        seen.update(os.environ)
        seen["folder"] = multiprocessing.current_process()._config["tempdir"]

    monkeypatch.setattr(forking.forkserver, "ensure_running", started)
    monkeypatch.setattr(forking.forkserver, "set_forkserver_preload", lambda modules: seen.update(modules=modules))
    monkeypatch.setenv(forking._SERVER, "")
    monkeypatch.setenv("LD_PRELOAD", "")
    forking.start_server(tmp_path)
    assert seen["LD_PRELOAD"] == preloaded_libraries("") and seen["modules"] == ["__main__", forking.IMPORTED]
    # this process's own children are none of them
    assert os.environ["LD_PRELOAD"] == "" and "tempdir" not in multiprocessing.current_process()._config
    assert Path(seen["folder"]).parent == tmp_path  # which is noted, so that no kill leaves a socket behind
    monkeypatch.setenv("LD_PRELOAD", preloaded_libraries(""))  # as vLLM sets it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert can_fork(os.environ)


def test_what_cannot_be_forked_is_spawned(monkeypatch):
    monkeypatch.delenv(forking._SERVER, raising=False)
    process = ForkingContext().Process(target=os.getppid)
    process.start()
    process.join(60)
    assert process.exitcode == 0 and process.environment is None
    assert multiprocessing.get_start_method(allow_none=True) != "forkserver"
