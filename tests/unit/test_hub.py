"""Names on the hub: what counts as one, and what is fetched, from a hub of the test's own on loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_model import write_model

from mrl.cli.main import main
from mrl.errors import EnvironmentFault
from mrl.model.hub import HubName, cached_folder, hub_name, local_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", HubName("Qwen/Qwen3-30B-A3B")),
        ("Qwen/Qwen3-8B@main", HubName("Qwen/Qwen3-8B", "main")),
        ("hf://me/my.model-2", HubName("me/my.model-2")),
        (f"hf://me/mine@{COMMIT}", HubName("me/mine", COMMIT)),
        # of another node
        (f"/root/.cache/hub/models--Qwen--Qwen3-8B/snapshots/{COMMIT}", HubName("Qwen/Qwen3-8B", COMMIT)),
        ("tiny-world/model", None),  # no model that is known: a folder that is not here
        ("models/Qwen3-8B", None),  # below a folder that is
        ("/models/Qwen3-8B", None), ("./Qwen3-8B", None), ("Qwen3-8B", None), ("hf://Qwen3-8B", None),
        ("hf://a/b/c", None),
        ("here", None),
    ],
)  # fmt: skip
def test_what_names_a_model_on_the_hub(path, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models", "here"):
        (tmp_path / folder).mkdir()
    assert hub_name(path) == name
    if name is None:
        assert local_folder(path) == path


def test_a_folder_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    assert hub_name("Qwen/Qwen3-8B") is None


# --- fetching ---------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a snapshot asks for; `files` and `asked` are set by the fixture."""

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        type(self).asked.append(path)
        if path.startswith("/api/models/Me/Mine/tree/"):
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in self.files.items()
            ]
            return self.answer(json.dumps(tree).encode(), body)
        if path.startswith("/api/models/Me/Mine"):
            siblings = [{"rfilename": name} for name in self.files]
            return self.answer(json.dumps({"id": "Me/Mine", "sha": COMMIT, "siblings": siblings}).encode(), body)
        data = self.files.get(path.removeprefix(f"/Me/Mine/resolve/{COMMIT}/"))
        return self.answer(data, body) if data is not None else self.send_error(404)

    def answer(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        for name, value in {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": len(data),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """Serves a small model as Me/Mine, with a program and a pickle beside it."""
    write_model(tmp_path / "model")
    for name in ("modeling.py", "pytorch_model.bin", "README.md"):
        (tmp_path / "model" / name).write_text("not to be fetched")
    Hub.files, Hub.asked = {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir() if f.is_file()}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def fetch(path: str, home: Path, endpoint: str, offline: bool = False) -> str:
    """`local_folder` in a process of its own, since huggingface_hub reads its settings once."""
    code = (
        f"from mrl.errors import MrlError\nfrom mrl.model.hub import local_folder\ntry: print(local_folder({path!r}))\n"
    )
    code += "except MrlError as error: print(f'{type(error).__name__}: {error}')"
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    settings = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | settings, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_model_is_fetched_once_without_its_code_and_pickles_and_serves_offline_from_then_on(hub, tmp_path):
    home = tmp_path / "home"
    folder = Path(fetch("hf://Me/Mine", home, hub))
    assert folder.name == COMMIT and folder.is_relative_to(home)
    there = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert (
        there == {n: d for n, d in Hub.files.items() if not n.endswith((".py", ".bin", ".md"))}
        and "config.json" in there
    )
    assert not [path for path in Hub.asked if path.endswith((".py", ".bin"))]
    nobody = "http://127.0.0.1:9"
    assert fetch("hf://Me/Mine", home, nobody, offline=True) == str(folder)
    elsewhere = str(folder).replace(str(home), "/nodes/other")  # what another node has it as
    assert fetch(elsewhere, home, nobody, offline=True) == str(folder)


def test_what_the_cache_has_of_a_name_is_found_without_fetching(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--Qwen--Qwen3-8B"
    assert cached_folder("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B" and cached_folder("here/it/is") == "here/it/is"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    assert cached_folder("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B", "a tokenizer alone is no model"
    (repo / "snapshots" / COMMIT / "config.json").write_text("{}")
    assert cached_folder("Qwen/Qwen3-8B") == str(repo / "snapshots" / COMMIT)


def test_what_cannot_be_fetched_is_told_in_one_message_with_the_command(hub, tmp_path):
    missing = fetch("hf://Me/Other@v1", tmp_path / "home", hub)
    assert missing.startswith("EnvironmentFault: hf://Me/Other@v1 is not on this machine and cannot be fetched")
    assert "hf download Me/Other --revision v1 --local-dir FOLDER" in missing and "404" in missing
    offline = fetch("hf://Me/Mine", tmp_path / "home", hub, offline=True)
    assert "HF_HUB_OFFLINE forbids fetching" in offline and "hf download Me/Mine --local-dir FOLDER" in offline


def test_a_run_of_a_name_hears_of_its_mistakes_before_anything_is_fetched(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).resolve().parents[2]

    def fetched(path):
        raise EnvironmentFault(f"{path} was to be fetched")

    monkeypatch.setattr("mrl.config.model_folders.local_folder", fetched)
    monkeypatch.setattr("mrl.cluster.prerequisites.shows_devices", lambda kind: True)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    preset = [
        str(root / "parallel_configs" / "qwen3-30b-a3b" / "h100-4x8-separate.yaml"),
        "--set",
        "data.train_files=rows.jsonl",
    ]
    for more, code, words in (
        ((), 4, "Qwen/Qwen3-30B-A3B was to be fetched"),
        (("--set", "rollout.top_k=0"), 2, "rollout.top_k"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["train", *preset, "--set", "data.val_files=rows.jsonl", *more])
        assert end.value.code == code and words in capsys.readouterr().err
