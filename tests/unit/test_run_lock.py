"""A run directory has one writer: it is taken over only from who is gone, by one process, and who lost it knows."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mrl.checkpoint.step_folders import Newest
from mrl.driver.assemble_files import _poll
from mrl.driver.resume import _restore_line, rewind
from mrl.driver.stop_signals import StopFlag
from mrl.errors import ConfigError, EnvironmentFault, Interrupted, LostLock
from mrl.generate.lost_engines import LostEngines
from mrl.record import process_mark, run_lock
from mrl.record.attempts import UnderWay, attempt, read_attempts
from mrl.record.process_mark import ProcessMark
from mrl.record.run_dir import RunDir
from mrl.record.run_lock import BEAT_S, LEASE_S, RunLock, in_use, newest_lock
from mrl.record.sinks import make_sinks

OPEN = "from mrl.record.run_dir import RunDir; RunDir.open({!r}, '', resume=True); "


class World:
    """Hosts that take one folder, and a clock that moves as they wait. `at_wait`: what else happens then."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.at_wait = lambda: None
        self._monkeypatch = monkeypatch

    def on(self, host: str) -> None:
        """What follows happens on another host."""
        self._monkeypatch.setattr(process_mark.socket, "gethostname", lambda: host)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at_wait()

    def take(self, folder) -> RunLock:
        return RunLock.take(folder, clock=self)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_a_holder_whose_process_is_gone_here_is_succeeded_at_once(tmp_path, world):
    subprocess.run([sys.executable, "-c", OPEN.format(str(tmp_path))], timeout=60, check=True)  # ends without close
    assert newest_lock(tmp_path).holder.process.pid != os.getpid()
    world.take(tmp_path)
    assert world.now == 0 and newest_lock(tmp_path).holder.process == ProcessMark.own()


def test_a_process_that_ended_and_that_nobody_has_asked_about_is_gone(tmp_path, world):
    ended = subprocess.Popen([sys.executable, "-c", OPEN.format(str(tmp_path))])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie still
    world.take(tmp_path)
    assert world.now == 0 and ended.wait() == 0


def test_the_same_pid_with_another_start_is_another_process(tmp_path, world):
    mark = ProcessMark.own().to_json() | {"started": "1"}
    (tmp_path / "run.lock.3").write_text(json.dumps(mark))
    assert not in_use(tmp_path)
    world.take(tmp_path)
    assert world.now == 0 and newest_lock(tmp_path).number == 4


def test_a_process_that_runs_here_is_never_succeeded_even_if_it_stands_still(tmp_path, world):
    holder = subprocess.Popen(
        [sys.executable, "-c", OPEN.format(str(tmp_path)) + "print('has it', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline() == b"has it\n"
    holder.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(EnvironmentFault, match=f"in use by process {holder.pid} on host .* since 20.*its process"):
            world.take(tmp_path)
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.communicate(b"\n", timeout=60)
    assert world.now == 0 and not in_use(tmp_path)


@pytest.mark.parametrize(("readable", "lives"), [(True, True), (False, None)])
def test_of_a_process_that_may_be_neither_signalled_nor_read_nothing_is_known(monkeypatch, readable, lives):
    """Another user's, where /proc hides it: only its beat can say."""
    mark = ProcessMark.own()

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(process_mark.os, "kill", refused)
    if not readable:
        monkeypatch.setattr(process_mark.Path, "read_text", refused)
        monkeypatch.setattr(process_mark, "_boot", lambda: mark.boot)
    assert mark.lives() is lives


@pytest.mark.parametrize("place", [{"host": "pod-1"}, {"boot": "another kernel"}, {"pid_space": 1}])
def test_a_holder_elsewhere_is_succeeded_when_its_beat_stood_still_for_a_lease(tmp_path, world, place, capfd):
    """Its number may well be of a living process here, as both may be 1 in containers of one name."""
    mark = ProcessMark.own().to_json() | place | {"nonce": "a", "beat": "000000000007"}
    (tmp_path / "run.lock.1").write_text(json.dumps(mark))
    world.take(tmp_path)
    assert LEASE_S <= world.now <= LEASE_S + 2 * run_lock.LOOK_S
    assert [file.name for file in tmp_path.iterdir()] == ["run.lock.2"]
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2 and f"process {os.getpid()} on host" in told[0] and "taken over" in told[1]


def test_a_holder_elsewhere_that_beats_is_not_succeeded(tmp_path, world):
    world.on("pod-1")
    holder = world.take(tmp_path)
    world.on("pod-2")
    world.at_wait = lambda: world.now < LEASE_S - 2 or holder.beat()  # late, and in time
    with pytest.raises(EnvironmentFault, match=f"in use by process {os.getpid()} on host pod-1 since .*beat continues"):
        world.take(tmp_path)
    holder.check()


def test_a_pause_of_the_one_that_waits_counts_for_nothing(tmp_path, world, monkeypatch):
    """It is stopped for an hour between its clock and its look, and between its look and its clock: in both cases the
    holder has beaten in that hour, though it had not at the look before."""
    world.on("pod-1")
    holder = world.take(tmp_path)
    world.on("pod-2")
    looks = []

    read = run_lock.read_locks

    def paused_look(folder):
        seen = read(folder)
        looks.append(seen)
        if len(looks) == 3:
            world.now += 3600
            holder.beat()
        return seen

    monkeypatch.setattr(run_lock, "read_locks", paused_look)
    with pytest.raises(EnvironmentFault, match="heartbeat continues"):
        world.take(tmp_path)
    assert len(looks) == 4


def test_a_disk_that_stalls_for_both_is_no_silence_of_the_holder(tmp_path, world, monkeypatch):
    """The third look takes longer than a lease; the holder's next beat comes some seconds after it."""
    world.on("pod-1")
    holder = world.take(tmp_path)
    world.on("pod-2")
    stall = [0, 0, 1.2 * LEASE_S]
    read = run_lock.read_locks

    def stalled_look(folder):
        seen = read(folder)
        world.now += stall.pop(0) if stall else 0
        return seen

    monkeypatch.setattr(run_lock, "read_locks", stalled_look)
    world.at_wait = lambda: world.now < 1.2 * LEASE_S + BEAT_S or holder.beat()
    with pytest.raises(EnvironmentFault, match="heartbeat continues"):
        world.take(tmp_path)
    holder.check()


def test_a_lock_of_an_earlier_version_is_a_beat_that_stands_still(tmp_path, world):
    (tmp_path / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    world.take(tmp_path)
    assert world.now >= LEASE_S and not (tmp_path / "run.lock").exists()


def test_a_lock_of_an_earlier_version_here_is_judged_by_its_process(tmp_path, world):
    own = ProcessMark.own()
    lock = tmp_path / "run.lock"
    lock.write_text(json.dumps({"host": own.host, "pid": own.pid, "started": own.started}))
    assert in_use(tmp_path)
    with pytest.raises(EnvironmentFault, match="its process runs"):
        world.take(tmp_path)
    lock.write_text("")  # given back
    world.take(tmp_path)
    assert world.now == 0


@pytest.mark.parametrize("text", ["", '{"host": "x", "p', "[]"])
def test_a_torn_lock_is_a_beat_that_stands_still(tmp_path, world, text):
    (tmp_path / "run.lock.1").write_text(text)
    assert not in_use(tmp_path)
    world.take(tmp_path)
    assert world.now >= LEASE_S


@pytest.mark.parametrize("taker", ["a dead process here", "one elsewhere", "torn"])
def test_a_taker_that_was_killed_half_way_costs_a_living_holder_nothing(tmp_path, world, taker):
    """It had made its file and not removed the holder's."""
    world.on("pod-1")
    holder = world.take(tmp_path)
    world.on("pod-2")
    mark = ProcessMark.own().to_json() | {"nonce": "a", "beat": "000000000000"}
    texts = {
        "a dead process here": json.dumps(mark | {"started": "1"}),
        "one elsewhere": json.dumps(mark | {"host": "pod-3"}),
        "torn": "",
    }
    (tmp_path / "run.lock.2").write_text(texts[taker])
    assert in_use(tmp_path)
    world.at_wait = holder.beat
    with pytest.raises(EnvironmentFault, match=f"in use by process {os.getpid()} on host pod-1 since .*beat continues"):
        world.take(tmp_path)
    holder.check()
    world.at_wait = lambda: None
    world.take(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.lock.3"] and world.now >= LEASE_S


def test_a_taker_that_is_killed_beside_a_stopped_holder_leaves_it_its_directory(tmp_path):
    """Real processes that call their hosts by other names; the lease is short, so that the test is."""
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from mrl.record import process_mark, run_lock as r\n"
        "r.LEASE_S, r.LOOK_S, r.BEAT_S = 1.0, 0.01, 0.1\n"
        "process_mark.socket.gethostname = lambda: sys.argv[2]\n"
        "if sys.argv[2] == 'killed':\n"
        "    r.RunLock._follows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "lock = r.RunLock.take(Path(sys.argv[1]))\n"
        "print('has it', flush=True); input(); lock.check(); print('had it')\n"
    )
    ask = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def on(host):
        return subprocess.Popen([sys.executable, "-c", program, str(tmp_path), host], **ask)

    holder = on("holder")
    assert holder.stdout.readline() == "has it\n"
    holder.send_signal(signal.SIGSTOP)
    try:
        killed = on("killed")
        assert killed.wait(60) == -signal.SIGKILL
        assert sorted(file.name for file in tmp_path.iterdir()) == ["run.lock.1", "run.lock.2"]
    finally:
        holder.send_signal(signal.SIGCONT)
    late = on("late")
    assert f"in use by process {holder.pid} on host holder" in late.communicate(timeout=60)[1]
    assert holder.communicate("\n", timeout=60)[0] == "had it\n"


def test_a_full_disk_leaves_no_lock_of_nobody(tmp_path, world, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as now:
        now.setattr(run_lock.os, "pwrite", full)
        with pytest.raises(ConfigError, match="No space left"):
            RunDir.open(tmp_path, "", clock=world)
    assert not list(tmp_path.glob("run.lock*"))
    with monkeypatch.context() as now:
        now.setattr(run_lock.os, "pwrite", lambda *_: 7)
        with pytest.raises(ConfigError, match="No space left"):
            RunDir.open(tmp_path, "", clock=world)
    assert not list(tmp_path.glob("run.lock*"))
    RunDir.open(tmp_path, "", clock=world).close()
    assert world.now == 0


def test_who_waits_for_a_lock_is_stopped_by_a_signal(tmp_path, world):
    (tmp_path / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    stop = StopFlag()
    stop.signal = signal.SIGTERM
    with pytest.raises(Interrupted):
        RunDir.open(tmp_path, "", resume=True, poll=stop.raise_if_set, clock=world)
    assert world.now < LEASE_S and newest_lock(tmp_path).number == 0


def test_a_start_that_waited_for_a_run_does_not_begin_over_what_that_left(tmp_path, world):
    """The run had no step yet as the other began to wait."""
    world.on("pod-1")
    run = RunDir.open(tmp_path, "a: 1\n", clock=world)

    def trains_a_step_and_ends():
        run.metrics.write_text('{"training/global_step": 1}\n')
        (run.samples / "step-1.parquet").touch()
        run.close()

    world.at_wait = trains_a_step_and_ends
    world.on("pod-2")
    with pytest.raises(ConfigError, match="holds another run"):
        RunDir.open(tmp_path, "b: 2\n", clock=world)
    assert run.metrics.read_text() and list(run.samples.iterdir()) and run.config.read_text() == "a: 1\n"
    assert newest_lock(tmp_path).is_free and newest_lock(tmp_path).number == 2


def test_one_that_lost_the_lock_as_it_took_it_removes_nothing(tmp_path, world, monkeypatch):
    """It stood still between its file and what follows, for so long that another took the directory over."""
    (tmp_path / "run.lock.1").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    succeed = RunLock._succeed
    others = []

    def paused(lock, before):
        monkeypatch.setattr(RunLock, "_succeed", succeed)
        taken = lock._succeed(before)
        world.on("pod-2")
        others.append(RunDir.open(tmp_path, "", resume=True, clock=world))
        (others[0].checkpoints / "step-9.tmp-abcd").mkdir()
        world.on("pod-1")
        return taken

    monkeypatch.setattr(RunLock, "_succeed", paused)
    world.on("pod-1")
    with pytest.raises(LostLock):
        RunDir.open(tmp_path, "", resume=True, clock=world)
    assert [folder.name for folder in others[0].checkpoints.iterdir()] == ["step-9.tmp-abcd"]
    others[0].check_lock()


def test_a_lock_that_is_given_back_while_one_waits_is_taken(tmp_path, world):
    world.on("pod-1")
    holder = world.take(tmp_path)
    world.on("pod-2")
    world.at_wait = holder.give_back
    world.take(tmp_path).check()
    assert world.now < LEASE_S


def test_a_holder_that_lost_the_lock_knows_at_its_next_look(tmp_path, world):
    world.on("pod-1")
    paused = world.take(tmp_path)
    world.on("pod-2")
    other = world.take(tmp_path)
    for look in (paused.check, paused.beat):
        with pytest.raises(LostLock, match=r"process \d+ on host pod-2 since .* has taken it over"):
            look()
    assert LostLock.exit_code == EnvironmentFault.exit_code
    paused.give_back()  # nothing of its own
    other.check()
    assert [file.name for file in tmp_path.iterdir()] == ["run.lock.2"]


def test_the_beat_goes_on_by_itself_and_a_loss_is_known_without_a_look(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    lock = RunLock.take(tmp_path)
    texts = {text for _ in range(100) if (text := newest_lock(tmp_path).text) and not time.sleep(0.01)}
    assert len(texts) > 2 and len({len(text) for text in texts}) == 1
    lock.raise_if_lost()
    (tmp_path / "run.lock.1").unlink()
    with pytest.raises(LostLock, match=r"run\.lock\.1 is gone"):
        for _ in range(500):
            lock.raise_if_lost()
            time.sleep(0.01)
    assert not list(tmp_path.iterdir())


class Refusing:
    """A disk that refuses the next looks into a lock."""

    def __init__(self, monkeypatch, number: int, looks: int):
        self.left = looks
        self._number = number
        self._read = run_lock.read_text
        monkeypatch.setattr(run_lock, "read_text", self._look)
        monkeypatch.setattr(run_lock, "ASK_AGAIN_S", 0.01)
        monkeypatch.setattr(run_lock, "PATIENCE_S", 0.2)

    def _look(self, *what, **how):
        if self.left:
            self.left -= 1
            raise OSError(self._number, os.strerror(self._number))
        return self._read(*what, **how)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_look_that_the_disk_refuses_is_tried_again(tmp_path, monkeypatch, number):
    lock = RunLock.take(tmp_path)
    disk = Refusing(monkeypatch, number, 3)
    lock.check()
    assert disk.left == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_be_read_is_no_loss(tmp_path, monkeypatch, number):
    lock = RunLock.take(tmp_path)
    disk = Refusing(monkeypatch, number, 10**9)
    with pytest.raises(EnvironmentFault, match=r"run\.lock\.1 cannot be read"):
        lock.check()
    lock.give_back()  # quietly
    disk.left = 0
    lock.check()


def test_of_two_that_saw_the_same_lock_stand_still_one_takes_it(tmp_path, world, monkeypatch):
    """The second decides while the first is between its decision and its file; then the other way round."""
    (tmp_path / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    succeed = RunLock._succeed
    first = []

    def after_another(lock, before):
        monkeypatch.setattr(RunLock, "_succeed", succeed)
        first.append(RunLock(tmp_path, before[-1].number + 1))
        assert first[0]._succeed(before)
        return lock._succeed(before)

    monkeypatch.setattr(RunLock, "_succeed", after_another)
    with pytest.raises(EnvironmentFault, match="its process runs"):
        world.take(tmp_path)
    first[0].check()


def test_one_that_decided_long_ago_does_not_take_what_others_had_since(tmp_path, world):
    (tmp_path / "run.lock").write_text("")
    before = run_lock.read_locks(tmp_path)
    for _ in range(2):
        world.take(tmp_path).give_back()
    holder = world.take(tmp_path)
    assert not RunLock(tmp_path, before[-1].number + 1)._succeed(before)
    holder.check()
    assert [file.name for file in tmp_path.iterdir()] == ["run.lock.3"]


def test_a_beat_between_the_last_look_and_the_taking_is_seen(tmp_path, world):
    world.on("pod-1")
    holder = world.take(tmp_path)
    before = run_lock.read_locks(tmp_path)
    holder.beat()
    world.on("pod-2")
    assert not RunLock(tmp_path, 2)._succeed(before)
    holder.check()


def test_of_many_processes_that_take_a_dead_hosts_lock_at_once_one_has_it(tmp_path):
    """Real processes; the lease is short, so that the test is."""
    (tmp_path / "run.lock.4").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1", "nonce": "x"}))
    program = (
        "import sys, time; from mrl.record import run_lock as r\n"
        "r.LEASE_S, r.LOOK_S, r.BEAT_S = 1.0, 0.01, 0.2\n"
        "from pathlib import Path; from mrl.errors import MrlError\n"
        "folder = Path(sys.argv[1])\n"
        "print('ready', flush=True); input()\n"
        "try: lock = r.RunLock.take(folder)\n"
        "except MrlError as e: print(e.exit_code); sys.exit()\n"
        "for _ in range(100): lock.check(); time.sleep(0.01)\n"
        "print('had it')\n"
    )
    ask = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    takers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], **ask) for _ in range(4)]
    for taker in takers:
        assert taker.stdout.readline() == "ready\n"
    for taker in takers:
        taker.stdin.write("\n")
        taker.stdin.flush()
    said = sorted(taker.communicate(timeout=60)[0] for taker in takers)
    assert said == ["4\n", "4\n", "4\n", "had it\n"]


def test_a_directory_is_taken_where_nothing_but_exclusive_files_works(tmp_path, monkeypatch):
    """No flock, no links."""

    def refused(*_, **__):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr("fcntl.lockf", refused)
    monkeypatch.setattr("os.link", refused)
    RunDir.open(tmp_path / "run", "a: 1\n").close()


def test_closing_gives_the_folder_back(tmp_path):
    run = RunDir.open(tmp_path, "")
    assert in_use(tmp_path)
    run.close()
    assert newest_lock(tmp_path).is_free and not in_use(tmp_path)
    RunDir.open(tmp_path, "").close()
    assert [file.name for file in tmp_path.glob("run.lock*")] == ["run.lock.2"]


def test_a_beat_that_was_under_way_does_not_take_back_what_was_given(tmp_path):
    lock = RunLock.take(tmp_path)
    check = lock.check

    def look_and_give_back():
        lock.check = check
        lock.give_back()

    lock.check = look_and_give_back
    lock.beat()
    assert newest_lock(tmp_path).is_free


def test_of_a_holder_elsewhere_the_report_believes_the_age_of_its_beat(tmp_path, world):
    world.on("pod-1")
    world.take(tmp_path)
    world.on("pod-2")
    assert in_use(tmp_path)
    long_ago = time.time() - 2 * LEASE_S
    os.utime(tmp_path / "run.lock.1", (long_ago, long_ago))
    assert not in_use(tmp_path)


def test_a_run_that_lost_its_directory_writes_nothing_more(tmp_path, world):
    world.on("pod-1")
    run = RunDir.open(tmp_path, "a: 1\n")
    record = make_sinks([], run, 1)
    lost = LostEngines(run.lost_engines, run.check_lock)
    under_way = UnderWay(run.path, 0, run.check_lock)
    saved = Newest(tmp_path / "step-1", SimpleNamespace(step=1, trainer={"metrics": {"a": 1.0}}), {})
    damaged = Newest(None, saved.manifest, {tmp_path / "checkpoints" / "step-2": EnvironmentFault("x")})

    def contents():
        return {file.name: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    with pytest.raises(LostLock), attempt(run.path, 0, {}, run.check_lock):
        world.on("pod-2")
        other = RunDir.open(tmp_path, "", resume=True, clock=world)
        with attempt(other.path, 0, {}, other.check_lock):
            before = contents()
            writes = (
                lambda: record.write(1, {}),
                lambda: lost.note(1, ["engine 0"], "stood still", []),
                lambda: under_way.arrived(1, 1),
                lambda: run.write_config("a: 2\n"),
                lambda: run.truncate_metrics(0),
                lambda: rewind(run, damaged),
                lambda: _restore_line(saved.manifest, run),
                run.check_lock,
            )
            for write in writes:
                with pytest.raises(LostLock):
                    write()
            under_way.close()
            run.close()
            assert contents() == before
        run.check_lock()
    assert [one.exit_code for one in read_attempts(tmp_path)] == [None, 0]
    other.check_lock()


def test_nothing_is_noted_while_nobody_can_say_whose_the_directory_is(tmp_path, monkeypatch):
    run = RunDir.open(tmp_path, "")
    under_way = UnderWay(run.path, 0, run.check_lock)
    disk = Refusing(monkeypatch, errno.EIO, 10**9)
    with attempt(run.path, 0, {}, run.check_lock):
        under_way.arrived(1, 1)
    under_way.close()
    assert not (run.path / "under_way.json").exists() and not (run.path / "attempts.jsonl").exists()
    disk.left = 0
    under_way.arrived(1, 1)
    assert (run.path / "under_way.json").exists()


def test_a_run_is_ended_by_a_beat_that_found_the_loss(tmp_path, world):
    world.on("pod-1")
    run = RunDir.open(tmp_path, "")
    _poll(run, StopFlag())
    world.on("pod-2")
    RunDir.open(tmp_path, "", resume=True, clock=world)
    run.lock._lost = run.lock._loss()
    stop = StopFlag()
    stop.defer_signals()
    with pytest.raises(LostLock):
        _poll(run, stop)


def test_the_lease_outlasts_many_beats():
    """A disk that takes its time over one of them loses nobody the directory."""
    assert LEASE_S >= 10 * BEAT_S
