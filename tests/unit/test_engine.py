"""An engine's answers to vLLM's refusals: no version is served beside an old cache, and no cause is lost.
vLLM is a stand-in.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mrl.engine import engine_scheduler, leftovers
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import Interrupted, described
from mrl.platforms.versions import vllm_generation


class Llm:
    """Of AsyncLLM what leaving an update asks for."""

    errored = False

    def __init__(self, resets: list, errors: dict[str, str] | None = None):
        self.resets, self.errors = resets, errors or {}

    async def reset_prefix_cache(self):
        return self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]

    async def collective_rpc(self, method, args=()):
        name = args[0]
        return [{"error": self.errors[name]} if name in self.errors else {"value": name}]


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A maker of an engine that serves version 6."""
    dead = type("EngineDeadError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", SimpleNamespace(EngineDeadError=dead))
    monkeypatch.setattr(engine_scheduler, "DROP_S", 0.05)

    def make(resets: list, errors: dict[str, str] | None = None, **arguments) -> VllmEngine:
        made = VllmEngine(
            SimpleNamespace(
                engine_id=3,
                name="engine 3",
                data_ranks=1,
                arguments=arguments,
                captures_routes=False,
                syncs_tower=False,
                speculates=False,
                segments_file=str(tmp_path / "segments"),
                expected=(),
            )
        )
        made._calls.llm, made._generation = Llm(resets, errors), vllm_generation("0.23.0")
        made._machine.serve(6)
        return made

    return make


@pytest.mark.parametrize("awaits", [True, False])
def test_an_engine_that_loaded_no_weights_answers_nothing_until_some_were_committed(engine, monkeypatch, awaits):
    made = engine([True])
    made.settings.awaits_weights = awaits
    checked = []

    async def started(meeting, folder) -> None:
        made._machine.serve(0)
        made._door.open()

    async def check_order() -> None:
        checked.append(made.version)

    made.settings.check_order = True
    monkeypatch.setattr(made, "_start", started)
    monkeypatch.setattr(made, "_check_order", check_order)

    async def run() -> int | None:
        await made.start()
        version = made.version
        if awaits:
            with pytest.raises(RuntimeError, match="engine 3 is FENCED and refuses generate"):
                await anext(made.generate([], None))
            with pytest.raises(RuntimeError, match="engine 3 refuses commit: no whole update has reached it"):
                await made.commit(0)
            await update_fast(made)
            await made.commit(0)
        return version

    version = asyncio.run(run())
    assert checked == [0], "the start-up check needs numbers, whoever's they are"
    assert version == (None if awaits else 0) and made.version == 0


async def update_fast(engine: VllmEngine) -> None:
    await engine.receive_weights(4, True)


async def update_slow(engine: VllmEngine) -> None:
    await engine.begin_update()
    await engine.load_bucket(np.zeros(4, np.uint8), "")
    await engine.finish_update()


def leave(engine: VllmEngine, update=update_fast) -> None:
    """Takes an update and serves it."""

    async def run() -> None:
        await update(engine)
        assert engine.version is None
        await engine.commit(7)

    asyncio.run(run())


@pytest.mark.parametrize("update", [update_fast, update_slow])
@pytest.mark.parametrize("answer", [False, None])
def test_a_version_is_not_served_while_vllm_keeps_what_old_weights_computed(engine, update, answer):
    made = engine([answer])
    with pytest.raises(Interrupted, match=rf"engine 3: vLLM did not empty its prefix cache .*\(it answered {answer}\)"):
        leave(made, update)
    assert made.version is None


@pytest.mark.parametrize("update", [update_fast, update_slow])
def test_a_block_that_comes_free_a_moment_later_does_not_stop_the_run(engine, update):
    made = engine([False, False, True])
    leave(made, update)
    assert made.version == 7


def test_without_prefix_caching_there_is_nothing_to_empty(engine):
    made = engine([False], enable_prefix_caching=False)
    leave(made)
    assert made.version == 7


def test_when_dropping_a_failed_update_fails_too_both_causes_are_told(engine):
    made = engine([True], {"update_weights": "nothing came from rank 2", "abandon_update": "no memory"})
    with pytest.raises(RuntimeError, match=r"^nothing came from rank 2; and dropping the update failed: no memory$"):
        asyncio.run(made.receive_weights(4, True))
    assert made.version is None


def test_an_update_that_failed_and_was_dropped_is_told_as_it_is(engine):
    with pytest.raises(RuntimeError, match=r"^nothing came from rank 2$"):
        asyncio.run(engine([True], {"update_weights": "nothing came from rank 2"}).receive_weights(4, True))


def test_what_a_slow_update_passes_through_is_gone_when_it_is_in(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(leftovers, "memory_folder", lambda: str(tmp_path))
    made = engine([True])
    asyncio.run(made.begin_update())
    (folder,) = tmp_path.glob("mrl-sync-*")
    asyncio.run(made.begin_update())  # one that was given up, too
    assert not folder.exists() and len(list(tmp_path.glob("mrl-sync-*"))) == 1
    asyncio.run(made.finish_update())
    assert not list(tmp_path.glob("mrl-sync-*"))


def test_the_folder_of_sockets_is_gone_after_the_start_and_noted_for_a_kill_meanwhile(monkeypatch, tmp_path):
    monkeypatch.setattr(leftovers, "memory_folder", lambda: str(tmp_path))
    monkeypatch.setattr(leftovers, "NOTED_EVERY_S", 0.01)
    made = tmp_path / "psm_made_meanwhile"
    monkeypatch.setattr(leftovers, "shared_memory_below", lambda _: {made} if made.exists() else set())
    file = str(tmp_path / "segments")
    with leftovers.noted_start(file) as folder:
        assert [folder] == [*tmp_path.glob("mrl-sync-*")]
        assert os.environ[leftovers.SOCKETS] == str(folder) and leftovers.noted(file) == {folder}
        made.touch()
        deadline = time.monotonic() + 10
        while made not in leftovers.noted(file) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert leftovers.noted(file) == {folder, made}
    assert not folder.exists() and leftovers.SOCKETS not in os.environ


def test_a_semaphore_that_a_process_below_made_is_found():
    """Its maker has it mapped by the name that it had before it was there."""
    made = (
        "import multiprocessing as m, time; lock = m.get_context('spawn').Lock(); print(lock._semlock.name, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{made}; time.sleep(60)"], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            path = Path(f"/dev/shm/sem.{child.stdout.readline().strip().removeprefix('/')}")
            assert path.exists() and path in leftovers.shared_memory_below(os.getpid())
        finally:
            child.kill()
    leftovers.remove_all({path})


def test_what_a_process_that_died_had_mapped_stays_noted_until_it_is_gone(monkeypatch, tmp_path):
    lock, other = tmp_path / "sem.mp-lock", tmp_path / "psm_other"
    lock.touch()
    other.touch()
    mapped = {lock}
    monkeypatch.setattr(leftovers, "shared_memory_below", lambda _: mapped)
    file = str(tmp_path / "segments")
    leftovers.note(file, set())
    mapped = {other}  # the next note is written after its process has died
    leftovers.note(file, set())
    assert leftovers.noted(file) == {lock, other}
    leftovers.remove_all(leftovers.noted(file))
    mapped = set()
    leftovers.note(file, set())
    assert leftovers.noted(file) == set()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("gave up"), "gave up"),
        (ValueError("damaged bytes"), "damaged bytes"),
        (Interrupted("a lost worker"), "a lost worker"),
        (KeyError("model.norm.weight"), "KeyError: 'model.norm.weight'"),
        (MemoryError(), "MemoryError"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_error_whose_text_may_say_nothing_is_told_with_its_type(error, text):
    assert described(error) == text


def test_files_by_which_workers_met_are_removed_with_what_else_is_noted(engine, monkeypatch, tmp_path):
    monkeypatch.setattr("mrl.engine.vllm_engine.shared_memory_below", lambda pid: set())
    monkeypatch.setattr(leftovers, "shared_memory_below", lambda pid: set())
    met = tmp_path / "vllm_dist_1"
    met.write_text("")
    made = engine([True])
    made._rendezvous = leftovers.rendezvous_files([f"file://{met}", f"file://{met}", "tcp://127.0.0.1:5"])
    assert made._rendezvous == {met}
    made._note_files()
    made._calls.llm = None
    asyncio.run(made.stop())
    assert not met.exists()


class Process:
    """What psutil says of one."""

    def __init__(self, command: str, maps: tuple[str, ...] = (), children: tuple = ()):
        self.command, self.maps, self.below = command, maps, list(children)

    def cmdline(self):
        return self.command.split()

    def children(self, recursive=False):
        return [*self.below, *(each for child in self.below if recursive for each in child.children(True))]

    @property
    def pid(self):
        return self


def test_shared_memory_of_agents_and_tools_is_not_the_engines_to_remove(monkeypatch, tmp_path):
    names = ("psm_of_somebody", "psm_3", "psm_1", "other", "cpushm_2")
    for name in names:
        (tmp_path / name).touch()
    inodes = {name: (tmp_path / name).stat().st_ino for name in names}
    monkeypatch.setattr(leftovers, "SHARED", str(tmp_path))
    monkeypatch.setattr(leftovers, "_shared_inodes", lambda process: {inodes[name] for name in process.maps})
    agent = Process("python agent.py", ("psm_of_somebody",))
    tools = Process("python -P -m mrl.reward.keeper 3 4 mrl.acting.environment_worker", ("psm_3",), (agent,))
    workers = Process("VLLM::EngineCore", ("psm_1", "other"), (Process("VLLM::Worker", ("cpushm_2",)),))
    here = Process("ray::EngineWorker", (), (workers, tools))
    monkeypatch.setattr("psutil.Process", lambda pid: here)
    assert {path.name for path in leftovers.shared_memory_below(1)} == {"psm_1", "cpushm_2"}
