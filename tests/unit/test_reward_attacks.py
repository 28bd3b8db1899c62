"""What a reward function, or what it started, does against the trainer: endless answers, forged lines, floods, daemons,
and what it is given of the machine.
"""

import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mrl.reward import confine, keeper
from mrl.reward.items import ANSWER_BYTES, RewardItem, RewardResult, RewardSpec
from mrl.reward.pool import RewardPool

FUNCTION = r"""
import fcntl, json, os, resource, socket, subprocess, sys, threading, time

def results():
    "The descriptor of the result channel: the one pipe, beyond the standard ones, that can be written to."
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if fd > 2 and fcntl.fcntl(fd, fcntl.F_GETFL) & 3 == os.O_WRONLY:
                return fd
        except OSError:
            pass

DAEMON = '''
import os, sys, time
os.setsid()
if os.fork(): os._exit(0)
os.setsid()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(3600)
'''

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "endless":
        while True: os.write(results(), b"x" * 4096); time.sleep(0.001)
    if solution_str == "slow":
        while True: os.write(results(), b"x"); time.sleep(0.05)
    if solution_str == "newlines":
        while True: os.write(results(), b"\n" * 4096)
    if solution_str == "forged":
        os.write(results(), json.dumps(["ok", 99.0, {}, ""]).encode() + b"\n")
    if solution_str == "forged with a ticket":
        os.write(results(), json.dumps(["0" * 16, "ok", 99.0, {}, ""]).encode() + b"\n")
    if solution_str == "forged nest":
        os.write(results(), b"[" * 100_000 + b"\n")
    if solution_str == "half": os.write(results(), b'["ok", 9')
    if solution_str == "forged later":
        threading.Timer(0.2, os.write, (results(), json.dumps(["ok", 99.0, {}, ""]).encode() + b"\n")).start()
    if solution_str == "wait": time.sleep(0.6)
    if solution_str == "long key": return {"score": 1.0, "k" * 1_100_000: 1.0}
    if solution_str == "parts": return {"score": 1.0} | {str(i): i for i in range(100_000)}
    if solution_str == "huge": return {"score": 1.0, "number": 10 ** 5000}
    if solution_str == "power": return 10 ** 400
    if solution_str == "flood":
        for _ in range(80): print("x" * 1_000_000)
    if solution_str in ("daemon", "daemon and die"):
        subprocess.Popen([sys.executable, "-c", DAEMON, extra_info["pid_file"]])
        while not (os.path.exists(extra_info["pid_file"]) and open(extra_info["pid_file"]).read()): time.sleep(0.01)
        if solution_str == "daemon and die": os._exit(3)
    if solution_str == "group": os.killpg(0, 9)
    if solution_str == "env": return {"score": 1.0, "names": "\n".join(sorted(os.environ))}
    if solution_str.startswith("net"):
        family = socket.AF_INET if solution_str.startswith("net4") else socket.AF_INET6
        kind = socket.SOCK_STREAM if solution_str.startswith("net4") else socket.SOCK_DGRAM
        if solution_str.endswith("child"):
            code = f"import socket; socket.socket({int(family)}, {int(kind)})"
            return float(subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0)
        socket.socket(family, kind)
    if solution_str.startswith("write "): open(solution_str[6:], "w").write("x")
    if solution_str.startswith("remove "): os.remove(solution_str[7:])
    if solution_str.startswith("cut "): os.truncate(solution_str[4:], 0)
    if solution_str.startswith("child writes "):
        return float(subprocess.run(["touch", solution_str[13:]], stderr=subprocess.DEVNULL).returncode == 0)
    if solution_str == "unix": socket.socket(socket.AF_UNIX).close()
    if solution_str == "ring":
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        return 1.0 if libc.syscall(425, 1, ctypes.create_string_buffer(200)) >= 0 else -float(ctypes.get_errno())
    if solution_str == "limit": return float(resource.getrlimit(resource.RLIMIT_AS)[0])
    return 1.0
"""


@pytest.fixture
def spec(tmp_path) -> RewardSpec:
    (tmp_path / "mine.py").write_text(FUNCTION)
    return RewardSpec(path=str(tmp_path / "mine.py"))


def scored(spec: RewardSpec, *texts: str, timeout_s: float = 20.0, **options) -> list[RewardResult]:
    extra_info = options.pop("extra_info", {})
    items = [RewardItem(i, "toy", text, "1", extra_info) for i, text in enumerate(texts)]
    with RewardPool(spec, 1, timeout_s, failure_score=-1.0, **options) as pool:
        return pool.score(items)


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_an_answer_without_end_ends_at_the_deadline_or_the_limit(spec):
    begin = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = scored(spec, "good", "endless", "good", "slow", "newlines", "good", timeout_s=1.5)
    good = (1.0, "ok")
    bad = [(-1.0, "died"), (-1.0, "timeout"), (-1.0, "died")]
    assert [(r.score, r.reason) for r in results] == [good, bad[0], good, *bad[1:], good]
    assert time.monotonic() - begin < 60  # each of at most two tries has 1.5 s, and six processes start
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_an_answer_beyond_all_measure_costs_its_sample_and_no_memory(spec):
    results = scored(spec, "good", "long key", "parts", "huge", "power", "good")
    assert [r.score for r in results] == [1.0, *[-1.0] * 4, 1.0]
    for result in results[1:-1]:
        assert result.reason in ("wrong_type", "raised") and len(result.detail) < 4000
        assert len(repr(result.parts)) <= ANSWER_BYTES


def test_a_forged_line_takes_no_score_and_shifts_none(spec):
    forged = ["forged", "forged with a ticket", "forged nest", "half"]
    results = scored(spec, *(text for each in forged for text in ("good", each)), "good")
    assert [(r.score, r.reason) for r in results[::2]] == [(1.0, "ok")] * 5
    assert [(r.score, r.reason) for r in results[1::2]] == [(-1.0, "died")] * 4
    assert all("result channel" in r.detail for r in results[1::2])


def test_a_line_that_comes_late_costs_nobody_else_the_score(spec):
    results = scored(spec, "forged later", "wait", "good")
    assert [(r.score, r.reason) for r in results] == [(1.0, "ok")] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody keeps orphans")
@pytest.mark.parametrize("text", ["daemon", "daemon and die"])
def test_a_daemon_in_a_session_of_its_own_ends_with_its_scoring_process(spec, text, tmp_path):
    scored(spec, text, extra_info={"pid_file": str(tmp_path / "pid")})
    assert gone_within(int((tmp_path / "pid").read_text()), 10)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody keeps orphans")
def test_a_daemon_ends_with_a_trainer_that_is_killed(spec, tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import sys, time; from mrl.reward.pool import *; from mrl.reward.items import *\n"
        f"pool = RewardPool(RewardSpec(path={spec.path!r}), num_workers=1)\n"
        f"pool.score([RewardItem(0, 't', 'daemon', '', {{'pid_file': {str(pid_file)!r}}})])\n"
        "print('ready', flush=True); time.sleep(3600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert trainer.stdout.readline() == b"ready\n"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert gone_within(int(pid_file.read_text()), 10)


def test_a_function_that_signals_its_group_reaches_itself_alone(spec):
    assert [r.reason for r in scored(spec, "good", "group", "good")] == ["ok", "died", "ok"]


def test_a_flood_of_output_fills_its_log_to_the_limit_and_no_further(spec, tmp_path, monkeypatch):
    log = tmp_path / "reward.log"
    assert [r.score for r in scored(spec, "flood", "good", timeout_s=60.0, log_path=log)] == [1.0, 1.0]
    assert keeper.LOG_BYTES <= log.stat().st_size <= keeper.LOG_BYTES + 2 * len(keeper.NOTICE)
    assert log.read_bytes().endswith(keeper.NOTICE)


def test_a_limit_of_memory_above_the_one_that_stands_leaves_that(spec, tmp_path):
    own = 8 * 1024**3
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({own}, {own}))\n"
        "from mrl.reward.pool import *; from mrl.reward.items import *\n"
        f"with RewardPool(RewardSpec(path={spec.path!r}, max_memory_gib=16.0), 1) as pool:\n"
        "    print(pool.score([RewardItem(0, 't', 'limit', '')])[0].score)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == own


SECRETS = {
    "WANDB_API_KEY": "k1",
    "HF_TOKEN": "k2",
    "AWS_SECRET_ACCESS_KEY": "k3",
    "SSH_AUTH_SOCK": "/s",
    "JUDGE_KEY": "k4",
}


def test_a_scoring_process_has_listed_variables_alone(spec, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    names = set(scored(spec, "env")[0].parts["names"].split())
    assert {"PATH", "LC_ALL"} <= names and not names & SECRETS.keys()
    named = dataclasses.replace(spec, environment=("JUDGE_*",))
    names = set(scored(named, "env", environment=os.environ | SECRETS)[0].parts["names"].split())
    assert names & SECRETS.keys() == {"JUDGE_KEY"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the network stays on, and the log says so")
def test_the_network_is_off_unless_the_run_asks_for_it(spec):
    refused = scored(spec, "unix", "net4", "net6", "net4 child", "ring", "good")
    assert [r.score for r in refused] == [1.0, -1.0, -1.0, 0.0, -13.0, 1.0]
    assert "reward.network" in refused[1].detail and "Permission denied" in refused[1].detail
    allowed = scored(dataclasses.replace(spec, network=True), "net4", "net6", "net4 child")
    assert [r.score for r in allowed] == [1.0, 1.0, 1.0]


@pytest.fixture
def outside(request, monkeypatch, tmp_path):
    """A folder that is no temporary one, wherever the repository lies."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = Path(tempfile.mkdtemp(dir=Path(__file__).parent, prefix=".outside-"))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    return folder


def landlock() -> bool:
    """Whether this kernel can keep a process from files, asked in a process that ends."""
    code = "import sys; from mrl.reward.confine import without_writing; sys.exit(not without_writing(()))"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_files_are_written_where_the_run_allows_it_alone(spec, outside):
    if not landlock():
        pytest.skip("this kernel has no Landlock: the log of rewards says that files are not off")
    kept = outside / "kept"
    kept.write_text("precious")
    attacks = [f"write {kept}", f"write {outside}/new", f"remove {kept}", f"cut {kept}", f"child writes {outside}/new"]
    results = scored(spec, *attacks, "write /dev/null", f"write {tempfile.gettempdir()}/mrl-reward-{os.getpid()}")
    os.remove(f"{tempfile.gettempdir()}/mrl-reward-{os.getpid()}")
    assert [r.score for r in results] == [-1.0] * 4 + [0.0] + [1.0] * 2
    assert "reward.folders" in results[0].detail
    assert kept.read_text() == "precious" and list(outside.iterdir()) == [kept]
    allowed = dataclasses.replace(spec, folders=(str(outside),))
    assert [r.score for r in scored(allowed, *attacks[1:3])] == [1.0, 1.0]


def test_where_the_network_cannot_be_taken_away_the_log_says_so(monkeypatch):
    monkeypatch.setattr(confine.platform, "machine", lambda: "riscv64")
    assert not confine.without_network()
