"""Sandboxes: one protocol, each backend, and what a command tries against the machine, row by row."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from sandbox_images import BWRAP, DOCKERD, IMAGE, daemon, root_folder
from test_harnesses import ASKS, MENDS, WELL, judged

from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.containers import left_behind
from mrl.acting.sandboxes.remote import REMOTE
from mrl.acting.sandboxes.sandbox import SandboxError, SandboxSpec
from mrl.acting.sandboxes.starting import start
from mrl.errors import ConfigError

LIMITS = {"max_memory_gib": 0.25, "max_processes": 40, "max_disk_mib": 32.0}
SECRET = "of the host alone"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return root_folder(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="module")
def address(tmp_path_factory, root) -> str:
    with daemon(tmp_path_factory.mktemp("docker"), root) as found:
        yield found


@pytest.fixture(scope="module", params=[pytest.param("bubblewrap", marks=BWRAP), pytest.param("docker", marks=DOCKERD)])
def backend(request, root) -> tuple[SandboxSpec, str]:
    """Specification and image of each backend."""
    if request.param == "bubblewrap":
        return SandboxSpec("bubblewrap", **LIMITS), str(root)
    return SandboxSpec("docker", address=request.getfixturevalue("address"), **LIMITS), IMAGE


@pytest.fixture(scope="module")
def endpoint() -> int:
    """A port of this host's loopback that answers with the Host it was asked by."""

    class Host(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.headers["Host"].encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture(scope="module")
def sandbox(backend, endpoint):
    spec, image = backend
    with start(spec, image, "/repo", endpoint) as started:
        yield started


def test_commands_files_and_their_ends(sandbox):
    assert sandbox.shell("cat f; sh f 5 3").text == "expr $1 - $2\n2\n"
    assert sandbox.shell("exit 3").status == 3
    assert sandbox.run(["cat"], b"a\0b" * 100_000, most=10**6).output == b"a\0b" * 100_000
    assert sandbox.run(["env"], environment={"GIVEN": "é"}).text.count("GIVEN=é") == 1
    sandbox.write("deep/er/a b'c", b"\x00\xff")
    assert sandbox.read("/repo/deep/er/a b'c") == b"\x00\xff"
    with pytest.raises(SandboxError, match="missing cannot be read"):
        sandbox.read("missing")
    archive = sandbox.packed()
    sandbox.shell("rm -r deep f")
    sandbox.unpack(archive)
    assert sandbox.shell("cat f").text == "expr $1 - $2\n"


def test_a_command_that_hangs_or_floods_is_ended(sandbox):
    began = time.monotonic()
    hung = sandbox.shell("sleep 60", seconds=0.5)
    assert (hung.status, hung.reason) == (None, "seconds") and time.monotonic() - began < 20
    flood = sandbox.shell("while :; do echo flood; done", seconds=0.5, most=1000)
    assert flood.reason == "seconds" and len(flood.output) < 1100 and flood.left_out > 1000
    assert "bytes are left out" in flood.text
    assert sandbox.shell("ps").text.count("sleep") == 0


# what a command tries; it prints BROKE where that is possible
ATTACKS = {
    "writes into the image": "echo x > /bin/new && echo BROKE",
    "overwrites the image's shell": "cp /bin/busybox /bin/sh && echo BROKE",
    "mounts the root anew": "mount -o remount,rw / && echo BROKE",
    "mounts": "mkdir -p m; mount -t tmpfs none m && echo BROKE; mount -t proc none m && echo BROKE",
    "binds": "mkdir -p b; mount -o bind /bin b && echo BROKE",
    "begins a user namespace": "unshare -U true && echo BROKE; unshare -r true && echo BROKE",
    "enters a namespace": "nsenter -t 1 -m true && echo BROKE",
    "leaves by chroot": "mkdir -p c; chroot c true && echo BROKE; chroot /proc/1/root true && echo BROKE",
    "makes a device": "mknod sda b 8 0 && echo BROKE; mknod mem c 1 1 && echo BROKE",
    "reads disks and memory": (
        "cat /dev/sda /dev/vda /dev/mem /dev/kmem /proc/kcore 2>/dev/null | head -c1 | grep -q . && echo BROKE"
    ),
    "reads the host's file": "cat {secret} | grep alone && echo BROKE; cat /proc/1/root{secret} && echo BROKE",
    "climbs out of its folder": "cat ../../../../../..{secret} && echo BROKE",
    "links to the host's file": "ln {secret} l && echo BROKE; ln -s {secret} s; cat s && echo BROKE",
    "looks at the host's users": "grep -c . /etc/shadow && echo BROKE",
    "finds the daemon": (
        "for s in /var/run/docker.sock /run/docker.sock /run/podman/podman.sock {folder}; do [ -e $s ] && "
        "echo BROKE; done"
    ),
    "connects outside": "nc -w 1 1.1.1.1 80 < /dev/null && echo BROKE; nc -w 1 8.8.8.8 53 </dev/null && echo BROKE",
    "connects to another port of the host": "nc -w 1 127.0.0.1 {other} < /dev/null && echo BROKE",
    "sees the host's interfaces": (
        "ls /sys/class/net 2>/dev/null | grep -v -x -E 'lo|bonding_masters' && echo BROKE; ip addr | grep -E "
        "'eth|ens|enp|docker' && echo BROKE"
    ),
    "sees the host's processes": (
        "[ -e /proc/{pid} ] && tr '\\0' ' ' < /proc/{pid}/cmdline | grep pytest && echo BROKE; ps | grep -v "
        "grep | grep pytest && echo BROKE"
    ),
    "signals the host": "kill -0 {pid} && [ $(ps | wc -l) -gt 200 ] && echo BROKE",
    "ends its first process": "kill -9 1; sleep 0.2; [ -d /proc/1 ] || echo BROKE",
    "reads keys of whoever started it": "cat /proc/*/environ | tr '\\0' '\\n' | grep {key} && echo BROKE",
    "sets what the kernel runs": (
        "echo '|/tmp/x' > /proc/sys/kernel/core_pattern && echo BROKE; echo x > /proc/sys/kernel/hostname && echo BROKE"
    ),
    "asks the kernel to halt": "echo b > /proc/sysrq-trigger && echo BROKE",
    "changes groups of processes": (
        "for f in $(find /sys/fs/cgroup -name release_agent 2>/dev/null); do echo /x > $f && echo BROKE; "
        "done; mkdir /sys/fs/cgroup/memory/x && echo BROKE"
    ),
    "sets the clock": "date -s 2001-01-01; [ $(date +%Y) = 2001 ] && echo BROKE",
    "becomes another user": "setuidgid 12345 true && echo BROKE; chown 12345 f && echo BROKE",
    "has capabilities": "grep -E 'Cap(Eff|Prm|Bnd).*[1-9a-f]' /proc/self/status && echo BROKE",
    "may gain rights": "grep -q 'NoNewPrivs:.1' /proc/self/status || echo BROKE",
    "has no filter of system calls": "grep -q 'Seccomp:.2' /proc/self/status || echo BROKE",
    "loads a module": "insmod /bin/busybox && echo BROKE; [ -w /sys/module ] && echo x > /sys/module/x && echo BROKE",
    "fills the disk": (
        "dd if=/dev/zero of=big bs=1M count=64; [ $(stat -c %s big) -gt 33554432 ] && echo BROKE; rm -f big"
    ),
    "fills shared memory": (
        "dd if=/dev/zero of=/dev/shm/big bs=1M count=64; [ $(stat -c %s /dev/shm/big) -gt 33554432 ] && echo "
        "BROKE; rm -f /dev/shm/big"
    ),
    "fills /dev": "dd if=/dev/zero of=/dev/big bs=1M count=70 2>/dev/null && echo BROKE; rm -f /dev/big",
    "makes files without end": "mkdir d; cd d; seq 20000 | xargs touch && echo BROKE; cd ..; rm -rf d",
    "starts processes without end": "f(){{ f|f& }}; f; sleep 1; [ $(ps | wc -l) -gt 60 ] && echo BROKE",
    "takes memory without end": "tail /dev/zero; [ $? = 0 ] && echo BROKE",
    "leaves a process": "sleep 1000 & (setsid sleep 1001 &) ; true",
    "leaves a file for others": "echo x > /tmp/for-others; echo y > /dev/shm/for-others",
}


def test_what_a_command_tries_is_refused(sandbox, backend, root, tmp_path, endpoint):
    """All attacks in one sandbox, which works after each of them."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    spec, image = backend
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = {"secret": secret, "folder": (spec.address or "unix:///nowhere")[7:], "other": other.getsockname()[1]}
        words |= {"pid": os.getpid(), "key": "PYTEST_CURRENT_TEST"}
        broken = []
        for name, script in ATTACKS.items():
            ran = sandbox.shell(script.format(**words), seconds=20)
            if "BROKE" in ran.text:
                broken.append((name, ran))
            if "without end" in name or name.startswith("fills"):
                assert sandbox.shell("echo fine").text == "fine\n", name
    assert broken == []
    assert secret.read_text() == SECRET and not (root / "bin" / "new").exists()
    assert sandbox.shell("ps").text.count("sleep") == 0
    with start(spec, image, "/repo") as second:
        assert second.shell("ls /tmp/for-others /dev/shm/for-others").status != 0
        assert second.shell("cat f; ls").text == "expr $1 - $2\nf\ntests\n"


@BWRAP
def test_many_sandboxes_have_a_limit_of_processes_each(root):
    """They run as one user, of whom the kernel counts all processes of one namespace together."""
    spec = SandboxSpec("bubblewrap", **LIMITS | {"max_processes": 12})
    rooms = [Broker(spec) for _ in range(4)]
    outputs = []

    def use(room: Broker) -> None:
        with room.start(str(root), "/repo") as own:
            outputs.append(own.shell("sleep 1 & sleep 1 & sleep 1 & sleep 1 & wait; echo all").text)

    threads = [threading.Thread(target=use, args=(room,)) for room in rooms]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert outputs == ["all\n"] * 4


def test_the_endpoint_is_at_its_own_address_inside_and_nothing_else_is(sandbox, backend, endpoint):
    asked = f"printf 'GET / HTTP/1.0\\r\\nHost: 127.0.0.1:{endpoint}\\r\\n\\r\\n' | nc 127.0.0.1 {endpoint} | tail -1"
    assert sandbox.shell(asked).text == f"127.0.0.1:{endpoint}"
    spec, image = backend
    with start(spec, image, "/repo") as without:
        assert "refused" in without.shell(asked).text


@DOCKERD
@pytest.mark.long
def test_an_agent_in_a_container_asks_the_endpoint_and_is_judged_by_the_rows_tests(address, tmp_path):
    """As in bubblewrap (test_harnesses). An image that is not there is no doing of the model's."""
    docker = {"backend": "docker", "address": address}
    log = tmp_path / "log"
    assert judged(IMAGE, MENDS, log, backend=docker) == ("closed", 1.0, WELL), log.read_text()
    assert judged("no-such:image", ASKS, log, backend=docker)[0] == "environment"
    assert "no-such:image" in log.read_text()
    end = time.monotonic() + 30
    while left_behind(address) and time.monotonic() < end:  # the pool does not wait for the end of a sandbox
        time.sleep(0.1)
    assert left_behind(address) == []


def test_what_cannot_be_started_is_told(backend):
    spec, image = backend
    with pytest.raises(SandboxError, match=r"there is no root folder|no such image"):
        start(spec, "/not/there" if spec.backend == "bubblewrap" else "not-there:1")
    with pytest.raises(SandboxError, match="names no image"):
        start(spec)
    for folder in ("/", "relative", "/tmp/../tmp", "/proc"):
        with pytest.raises(SandboxError, match="absolute path of its own"):
            start(spec, image, folder)
    ended = start(spec, image, "/new")
    assert ended.shell("pwd; ls -A").text == "/new\n"
    ended.end()
    ended.end()
    with pytest.raises(SandboxError, match="has ended"):
        ended.shell("true")


def test_a_daemon_that_is_not_there_is_told():
    pytest.importorskip("docker")
    with pytest.raises(SandboxError, match="no daemon of Docker or Podman answers at unix:///not/there"):
        start(SandboxSpec("docker", address="unix:///not/there"), IMAGE)


@pytest.mark.parametrize("name", REMOTE)
def test_a_remote_backend_without_its_package_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'mrl\[{name}\]'"):
        start(SandboxSpec(name), "image")


@BWRAP
def test_a_broker_starts_them_for_a_process_that_is_confined_itself(root):
    """In a child that has given up the network and mounting, as processes of tools have."""
    script = f"""
from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.sandbox import SandboxError, SandboxSpec
from mrl.reward.confine import without_network, without_writing
broker = Broker(SandboxSpec(max_memory_gib=0.2))
without_network(), without_writing(())
with broker.start({str(root)!r}, "/repo") as sandbox:
    sandbox.write("new", b"1")
    print(sandbox.shell("cat new f; exit 4"), sandbox.read("new"), len(sandbox.packed()) > 512)
for failing in (lambda: sandbox.read("new"), lambda: broker.start("/not/there")):
    try:
        failing()
    except SandboxError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Ran(status=4, output=b'1expr $1 - $2\\n', reason='', left_out=0) b'1' True",
        "the sandbox has ended",
        "there is no root folder '/not/there'; bubblewrap needs the absolute path of one",
    ]


def left_over(marker: str) -> list[str]:
    """Command lines of processes with a word, and mounts of sandboxes that this process can see."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text:
            found.append(text)
    return found + [line for line in Path("/proc/mounts").read_text().splitlines() if line.startswith("mrl ")]


KILLED = """
import sys, time
from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.sandbox import SandboxSpec
broker = Broker(SandboxSpec({backend!r}, address={address!r}, max_disk_mib=16))
print("begun", flush=True)
while True:
    with broker.start({image!r}, "/repo") as sandbox:
        sandbox.shell("sleep 0.02 & echo x > x; sleep 0.0{marker}")
"""


def killed_sessions(backend, count: int, temporary: Path) -> list[str]:
    """Kills processes with sandboxes at drawn moments, under a keeper as tools are. Returns what is left of them, also
    in their folder of temporary files.
    """
    import random

    spec, image = backend
    marker = f"77{os.getpid()}"
    script = KILLED.format(backend=spec.backend, address=spec.address, image=image, marker=marker)
    keeper = (
        "import os, sys; from mrl.reward import keeper; keeper.main(os.open('/dev/null', 0), os.open('/dev/null', 1)); "
        "exec(sys.argv[1])"
    )
    picker = random.Random(0)
    latest = 0.6 if spec.backend == "bubblewrap" else 4.0
    for number in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", keeper, script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(temporary)},
        )  # fmt: skip
        time.sleep(picker.uniform(0.15, latest))
        process.send_signal((signal.SIGTERM, signal.SIGKILL)[number % 2])
        process.wait(30)
    end = time.monotonic() + 60
    left = ["?"]
    while left and time.monotonic() < end:
        time.sleep(0.5)
        if spec.backend == "docker":
            # the next run's, which removes what a killed keeper could not: a daemon that has much to do still makes
            # what it was asked for
            start(spec, image).end()
        left = left_over(marker) + os.listdir(temporary)
        if spec.backend == "docker":
            left += left_behind(spec.address)
    return left


@BWRAP
def test_nothing_is_left_of_sessions_that_are_killed(root, tmp_path):
    """Of containers the long test shows it: each takes a second to start."""
    backend = SandboxSpec("bubblewrap", **LIMITS), str(root)
    assert killed_sessions(backend, 4, tmp_path) == []


@pytest.mark.long
def test_nothing_is_left_of_two_hundred_sessions_that_are_killed(backend, tmp_path):
    assert killed_sessions(backend, 200, tmp_path) == []
