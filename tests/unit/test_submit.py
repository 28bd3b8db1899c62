"""`mrl submit` against a stand-in of Ray's job client: what is sent, what is waited for,
and the status that comes back.
"""

import contextlib
import os
import shlex
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import yaml

from mrl.cli import submit as command
from mrl.cli.main import main
from mrl.cluster import job as jobs
from mrl.cluster import prerequisites
from mrl.errors import ConfigError, EnvironmentFault, Interrupted

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
ELSEWHERE = [  # a checkout may have a tiny world, which is not sent
    *("--set", "model.path=/models/m"), *("--set", "data.train_files=[/t.parquet]"),
    *("--set", "data.val_files=[/v.parquet]"),
]  # fmt: skip


class Client:
    """A head whose agent comes up after `busy` requests, and a job that ends as told."""

    def __init__(self, status="SUCCEEDED", code=0, busy=0, error=None, on_logs=lambda: None):
        self.status, self.code, self.busy, self.error, self.on_logs = status, code, busy, error, on_logs
        self.submitted, self.stopped, self.asked = [], [], 0

    def submit_job(self, **job):
        self.asked += 1
        if self.asked <= self.busy:
            raise RuntimeError(
                "Request failed with status code 500: No available agent to submit job, please try again later."
            )
        if self.error:
            raise self.error
        self.submitted.append(job)
        return job["submission_id"]

    async def tail_job_logs(self, job_id):
        yield "step 1\n"
        self.on_logs()
        yield "step 2\n"

    def get_job_status(self, job_id):
        return SimpleNamespace(value=self.status)

    def get_job_info(self, job_id):
        return SimpleNamespace(driver_exit_code=self.code, message="the node went away")

    def stop_job(self, job_id):
        self.stopped.append(job_id)
        return True


JOB = jobs.Job("mrl-1", "mrl train x.yaml", {"working_dir": "."})


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", 6, 6), ("FAILED", None, 1), ("STOPPED", None, 5)],
)
def test_the_exit_status_is_the_drivers(status, code, expected):
    said = []
    assert jobs.follow(Client(status, code), JOB, said.append) == expected
    assert said[:2] == ["step 1\n", "step 2\n"]
    if status == "FAILED" and code is None:
        assert "the node went away" in said[-1]


def test_a_signal_asks_the_job_to_stop_and_waits_for_it():
    before = signal.getsignal(signal.SIGTERM)
    client = Client("STOPPED", on_logs=lambda: os.kill(os.getpid(), signal.SIGTERM))
    said = []
    assert jobs.follow(client, JOB, said.append) == 5
    assert client.stopped == ["mrl-1"] and "step 2\n" in said
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["in the foreground", "in the background"])
def interrupts(request):
    """What SIGINT does on entry: shells start background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(30)
def test_a_second_signal_ends_the_wait(interrupts):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    client = Client("RUNNING", on_logs=twice)
    with pytest.raises(KeyboardInterrupt):
        jobs.follow(client, JOB, lambda text: None)
    assert client.stopped == ["mrl-1"] and signal.getsignal(signal.SIGINT) is interrupts


def test_a_head_that_is_lost_ends_the_wait_as_resumable(monkeypatch):
    class Lost(Client):
        def get_job_status(self, job_id):
            raise ConnectionError("Failed to connect to Ray")

    monkeypatch.setattr(jobs, "LOST_AFTER_S", -1.0)
    with pytest.raises(Interrupted, match="no longer answers about job mrl-1"):
        jobs.follow(Lost(), JOB, lambda text: None)


def test_a_head_without_an_agent_is_asked_again():
    client = Client(busy=3)
    jobs.submit(client, JOB, agent_timeout_s=60, wait=lambda s: None)
    assert client.asked == 4 and client.submitted[0]["entrypoint"] == "mrl train x.yaml"


def test_it_is_not_asked_for_ever():
    with pytest.raises(EnvironmentFault, match="No available agent"):
        jobs.submit(Client(busy=99), JOB, agent_timeout_s=-1, wait=lambda s: None)


def test_another_refusal_is_not_tried_again():
    client = Client(error=RuntimeError("Request failed with status code 401: invalid token"))
    with pytest.raises(EnvironmentFault, match="invalid token"):
        jobs.submit(client, JOB, agent_timeout_s=60, wait=lambda s: None)
    assert client.asked == 1


def test_a_package_too_large_names_what_is_large(tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(3 * 2**20))
    (tmp_path / "code.py").write_text("pass")
    client = Client(error=ValueError("Package size (600.00MiB) exceeds the maximum size of 512.00MiB"))
    job = jobs.Job("mrl-1", "mrl train", {"working_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"weights.bin 3 MiB, code.py 0 MiB; add .* to `excludes`"):
        jobs.submit(client, job, agent_timeout_s=60)


def test_a_stopped_job_has_time_to_save(tmp_path):
    path = tmp_path / "env.yaml"
    path.write_text("working_dir: .\n")
    assert jobs.read_runtime_env(path)["env_vars"] == {jobs.GRACE: "120"}
    path.write_text(f"env_vars: {{{jobs.GRACE}: '300', A: b}}\n")
    assert jobs.read_runtime_env(path)["env_vars"] == {jobs.GRACE: "300", "A": "b"}
    assert jobs.read_runtime_env(path, grace_s=7)["env_vars"][jobs.GRACE] == "7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("env_vars: {A: 1}", "A: values must be text"),
        ("- a", "a mapping"),
        ("env_vars: [a]", "a mapping"),
        ("a: [", "cannot be read"),
        ("{working_dir: ., image_url: x}", "image_url: Ray does not know it; the file may be for another version"),
        ("working_dir: [.]", "working_dir: must be text"),
        ("{working_dir: ., excludes: runs/}", "excludes: must be a list"),
        ("{working_dir: ., excludes: [1]}", "excludes: must be a list of strings"),
        ("{working_dir: ., pip: 3}", "pip: must be text, a list or a mapping"),
        ("working_dir: nowhere", "working_dir: nowhere is not here; a relative path starts at the current directory"),
    ],
)
def test_a_runtime_environment_that_ray_would_refuse_later_is_refused_now(tmp_path, text, said):
    path = tmp_path / "env.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        jobs.read_runtime_env(path)


def test_what_ray_has_against_an_environment_is_told_as_the_environments():
    client = Client(error=TypeError("runtime_env['pip'] must be of type str, dict or list"))
    with pytest.raises(ConfigError, match=r"--runtime-env: Ray refuses it: runtime_env\['pip'\] must be"):
        jobs.submit(client, JOB, agent_timeout_s=1)


def test_outside_of_a_checkout_the_environment_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["submit", str(PRESET), *ELSEWHERE])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "launch/runtime_env.cpu.yaml is not here" in said and "give --runtime-env" in said


class Head(BaseHTTPRequestHandler):
    """Answers as a dashboard whose token is `secret`, or with `other` in its place."""

    secret, other = "t" * 32, None

    def do_GET(self):
        right = self.headers.get("Authorization") == f"Bearer {self.secret}"
        body = (self.other or '{"ray_version": "2"}') if right else "Forbidden: Invalid authentication token"
        self.send_response(200 if right else 403)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def head(monkeypatch):
    """The address of a head of somebody's, whose token is in the environment."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", Head.secret)
    with HTTPServer(("127.0.0.1", 0), Head) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_head_is_asked_before_ray_is_imported(head, monkeypatch, tmp_path):
    prerequisites.check_dashboard(head)
    prerequisites.check_dashboard(f"{head}/")
    monkeypatch.setattr(Head, "other", "<html>")
    with pytest.raises(EnvironmentFault, match="is not a Ray dashboard"):
        prerequisites.check_dashboard(head)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("o" * 32 + "\n")
    with pytest.raises(EnvironmentFault, match=r"the head at .* requires another token") as no:
        prerequisites.check_dashboard(head)
    assert "o" * 32 not in str(no.value)


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("127.0.0.1:8265", ConfigError, "must be the dashboard's address, as http://127.0.0.1:8265"),
        ("auto", ConfigError, "must be the dashboard's address, as http://HOST:8265"),
        ("ray://head:10001", ConfigError, "must be the dashboard's address, as http://head:8265"),
        ("http://", ConfigError, "must be the dashboard's address"),
        ("http://127.0.0.1:9", EnvironmentFault, "no Ray dashboard answers at http://127.0.0.1:9 .*refused"),
        ("http://127.0.0.1:99999", EnvironmentFault, "no Ray dashboard answers at http://127.0.0.1:99999"),
    ],
)
def test_an_address_where_no_dashboard_can_be_is_told_at_once(address, kind, words):
    with pytest.raises(kind, match=words):
        prerequisites.check_dashboard(address)


def test_a_heads_own_port_is_no_dashboard(gcs):
    with pytest.raises(EnvironmentFault, match=r"no Ray dashboard answers at http://.* \(no answer in HTTP\)"):
        prerequisites.check_dashboard(f"http://{gcs(None)[0]}")


def test_a_socket_that_speaks_no_http_is_no_dashboard(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(prerequisites, "CONNECT_TIMEOUT_S", 0.2)
        with pytest.raises(EnvironmentFault, match="no Ray dashboard answers"):
            prerequisites.check_dashboard(f"http://127.0.0.1:{silent.getsockname()[1]}")


def submit(monkeypatch, capsys, *arguments, token="t" * 32, check=SystemExit) -> tuple[int | None, Client, str]:
    """(exit code, None where the command returned; the client; all output)"""
    client = Client()
    monkeypatch.setattr(command, "_client", lambda address: client)
    monkeypatch.chdir(ROOT)
    if token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(check) if check else contextlib.nullcontext() as ended:
        main(["submit", *arguments])
    captured = capsys.readouterr()
    return ended.value.code if check else None, client, captured.out + captured.err


def test_the_whole_command_line_reaches_the_cluster(monkeypatch, capsys):
    data = [*ELSEWHERE, "--set", "data.train_files=[a b.parquet]"]
    arguments = [str(PRESET), "--recipe", "grpo", "--restarts", "2", "--run-dir", "/shared/run", *data]
    code, client, said = submit(monkeypatch, capsys, "--grace-s", "9", *arguments)
    assert code == 0 and "step 2" in said
    (sent,) = client.submitted
    assert shlex.split(sent["entrypoint"]) == ["mrl", "train", *arguments, "--run-dir", "/shared/run"]
    assert sent["runtime_env"]["env_vars"][jobs.GRACE] == "9"
    assert {".git/", ".venv/", "runs/"} <= set(sent["runtime_env"]["excludes"])


def test_a_relative_run_directory_does_not_vanish_with_the_jobs_copy(monkeypatch, capsys):
    _, client, _ = submit(monkeypatch, capsys, str(PRESET), *ELSEWHERE)
    assert shlex.split(client.submitted[0]["entrypoint"])[-2:] == ["--run-dir", str(ROOT / "runs" / "tiny-moe")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.train_files=[launch/submit.sh]"], []),  # is sent
        (["data.train_files=[/abs.parquet, not-here.parquet]"], []),  # nothing is known of the job's host
        (["data.train_files=[runs/x.jsonl]"], ["data.train_files: runs/x.jsonl is not sent (runs/ in excludes"]),
        (["model.path=../outside"], ["model.path: ../outside is outside of"]),
        (["data.val_files=[kept/x.jsonl]"], ["kept/x.jsonl is not sent (/kept/ in .gitignore)"]),
        (
            ["cluster.nnodes=2", "cluster.n_gpus_per_node=8"],
            ["trainer.run_dir: runs/tiny-moe is relative to this host"],
        ),
    ],
)
def test_what_the_job_would_not_find_is_told_before_it_is_handed_in(tmp_path, monkeypatch, capsys, settings, words):
    place = tmp_path / "checkout"
    for name in ("runs/x.jsonl", "kept/x.jsonl", "launch/submit.sh", "../outside/config.json"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("")
    (place / ".gitignore").write_text("# of this folder\n/kept/\n")
    (place / "launch" / "env.yaml").write_text("working_dir: .\nexcludes: [runs/, '*.parquet']\n")
    client = Client()
    monkeypatch.setattr(command, "_client", lambda address: client)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    monkeypatch.chdir(place)
    given = ["model.path=/models/m", "data.train_files=[/t.parquet]", "data.val_files=[/v.parquet]", *settings]
    with pytest.raises(SystemExit) as ended:
        main(
            ["submit", str(PRESET), "--runtime-env", "launch/env.yaml", *(word for s in given for word in ("--set", s))]
        )
    said = capsys.readouterr()
    assert ended.value.code == (2 if words else 0) and bool(client.submitted) == (not words)
    assert all(word in said.err for word in words), said.err


def test_options_stand_behind_the_configuration_too(monkeypatch, capsys):
    run = ["--run-dir", "/shared/run", *ELSEWHERE]
    code, client, said = submit(monkeypatch, capsys, str(PRESET), "--grace-s", "9", *run, "--no-wait", check=None)
    assert code is None and "follow it with: RAY_AUTH_MODE=token ray job logs" in said
    (sent,) = client.submitted
    assert shlex.split(sent["entrypoint"]) == ["mrl", "train", str(PRESET), *run, "--run-dir", "/shared/run"]
    assert sent["runtime_env"]["env_vars"][jobs.GRACE] == "9"


@pytest.mark.parametrize("home", [None, "there"])
def test_without_a_token_nothing_is_asked_of_a_head(tmp_path, monkeypatch, capsys, home):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", str(tmp_path))
    code, client, said = submit(monkeypatch, capsys, str(PRESET), *ELSEWHERE, token=None)
    why = "HOME is not set" if home is None else f"{tmp_path}/.ray/auth_token does not exist"
    assert code == 4 and why in said and "set RAY_AUTH_TOKEN" in said and not client.submitted


def test_a_run_of_its_own_needs_no_home(monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    prerequisites.ask_for_token_authentication(own_cluster=False)
    assert not prerequisites.has_token()
    prerequisites.ask_for_token_authentication()
    assert prerequisites.has_token() and len(os.environ.pop("RAY_AUTH_TOKEN")) == 64


@pytest.mark.parametrize("before", [None, b"", b"of-the-user"])
def test_the_token_of_a_run_of_its_own_is_for_its_user_alone(monkeypatch, tmp_path, before):
    """Ray would write it by the umask: readable by everybody on a shared host."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    if before is not None:
        file.parent.mkdir()
        file.write_bytes(before)
    old = os.umask(0o022)
    try:
        prerequisites.ask_for_token_authentication()
    finally:
        os.umask(old)
    assert "RAY_AUTH_TOKEN" not in os.environ and [each.name for each in file.parent.iterdir()] == [file.name]
    if before:
        assert file.read_bytes() == before
    else:
        assert len(file.read_text()) == 64 and file.stat().st_mode & 0o777 == 0o600


class Gcs(grpc.GenericRpcHandler):
    """A head that answers whoever gives `token`, or everybody where it has none."""

    def __init__(self, token):
        self.token, self.asked = token, []

    def service(self, call):
        given = dict(call.invocation_metadata).get("authorization")
        self.asked.append((call.method, given))

        def answer(_, context):
            if self.token is not None and given != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    """Starts a head: (its address, itself). The user has a token, and no mode."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    servers = []

    def start(token):
        server, head = grpc.server(ThreadPoolExecutor(2)), Gcs(token)
        server.add_generic_rpc_handlers((head,))
        servers.append(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}", head

    yield start
    for server in servers:
        server.stop(None).wait()
    os.environ.pop("RAY_AUTH_MODE", None)


def test_a_run_joins_a_head_as_that_wants_it(gcs):
    address, head = gcs("t" * 32)
    prerequisites.follow_head(address)
    assert os.environ["RAY_AUTH_MODE"] == "token", "Ray would send none by itself"
    assert head.asked == [(prerequisites.ASKED, None), (prerequisites.ASKED, "Bearer " + "t" * 32)]


def test_an_open_head_is_joined_without_a_token(gcs):
    prerequisites.follow_head(gcs(None)[0])
    prerequisites.follow_head("auto")
    assert "RAY_AUTH_MODE" not in os.environ


def test_somebody_elses_head_is_told_before_ray_tries_on_and_on(gcs, monkeypatch):
    address, _ = gcs("o" * 32)
    with pytest.raises(EnvironmentFault, match=f"the head at {address} requires another token"):
        prerequisites.follow_head(address)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    with pytest.raises(EnvironmentFault, match=f"no Ray token for the head at {address}: .*auth_token does not exist"):
        prerequisites.follow_head(address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(
        EnvironmentFault, match=f"the head at {address} requires a token, but RAY_AUTH_MODE=disabled sends"
    ):
        prerequisites.follow_head(address)


def test_a_home_that_looks_writable_and_takes_nothing_gives_no_token(monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    prerequisites.ask_for_token_authentication()
    assert len(os.environ.pop("RAY_AUTH_TOKEN")) == 64


def test_an_unknown_key_is_told_before_anything_is_sent(monkeypatch, capsys):
    code, client, said = submit(monkeypatch, capsys, str(PRESET), "--set", "actor.optim.lrr=1")
    assert code == 2 and "did you mean" in said and not client.submitted


def test_a_dashboard_that_does_not_answer_is_the_environments_fault(monkeypatch, capsys):
    def refused(address):
        raise EnvironmentFault(f"no Ray dashboard answers at {address}")

    monkeypatch.setattr(command, "_client", refused)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(["submit", "--address", "http://127.0.0.1:9", str(PRESET), *ELSEWHERE])
    assert ended.value.code == 4 and "http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_runtime_environment_is_complete_and_explained(device):
    path = ROOT / "launch" / f"runtime_env.{device}.yaml"
    found = jobs.read_runtime_env(path)
    assert found["working_dir"] == "." and ".venv/" in found["excludes"] and int(found["env_vars"][jobs.GRACE]) >= 120
    lines = path.read_text().splitlines()
    for name in yaml.safe_load(path.read_text())["env_vars"]:
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        assert "#" in lines[at] or lines[at - 1].strip().startswith("#"), f"{name} is not explained"
