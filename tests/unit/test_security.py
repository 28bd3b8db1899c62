"""The promises of SECURITY.md, each with the attack that it stands against; those of rewards are in
test_reward_attacks.py, of pickles in test_torch_dist.py, of bad input in test_hostile_input.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_run import World, write_run

from mrl.checkpoint.hf_folder import copy_hf_files
from mrl.cli.main import main
from mrl.cluster.prerequisites import OPEN_RAY, refuse_open_ray
from mrl.config.load import load_config
from mrl.config.schema import schema_keys
from mrl.driver.preflight import plug_in_lines, plug_ins
from mrl.errors import ConfigError, DataError, EnvironmentFault
from mrl.model import load_model_spec
from mrl.model.hf_files import hf_files, weight_files
from mrl.model.registry import known_hf_config
from mrl.platforms.hosting import get_hosting
from mrl.process.free_ports import free_port
from mrl.record.attempts import ATTEMPTS, attempt
from mrl.record.redact import HIDDEN, command_without_secrets, without_secrets

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
PROMISES = 15


def test_every_promise_names_attacks_by_their_functions():
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, PROMISES + 1))
    for _, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named and len(named) == tests.count("tests/"), tests
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), (file, test)
    for page in ("README.md", "docs/index.md"):
        assert "SECURITY.md" in (ROOT / page).read_text(), page


# ---------------------------------------------------------------- models


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known_hf_config("Qwen3-30B-A3B")))
    (folder / "tokenizer.json").write_text("{}")
    return folder


TRAP = "from pathlib import Path\nPath(__file__).with_name('PWNED').write_text('')\n"


def test_code_of_a_model_is_neither_run_nor_copied(model, tmp_path):
    for name in ("modeling_qwen.py", "tokenization_qwen.py", "configuration_qwen.py", "setup.py"):
        (model / name).write_text(TRAP)
    assert load_model_spec(model).num_layers == 48, "the family is read without it"
    out = tmp_path / "out"
    out.mkdir()
    copy_hf_files(model, out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "tokenizer.json"]
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_that_wants_its_own_code_is_refused(model, name, capsys):
    (model / "tokenization_qwen.py").write_text(TRAP)
    settings = json.loads((model / name).read_text()) if (model / name).exists() else {}
    (model / name).write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["tokenization_qwen.T", None]}}))
    with pytest.raises(ConfigError, match="auto_map"):
        load_model_spec(model)
    for command in ("validate", "plan", "train"):
        with pytest.raises(SystemExit) as end:
            main([command, str(PRESET), "--set", f"model.path={model}"])
        assert end.value.code == 2
        said = capsys.readouterr()
        assert "auto_map" in said.out + said.err
    assert not (model / "PWNED").exists()


def test_a_tokenizer_of_code_over_tiktoken_is_refused_with_the_way_to_one_without(model):
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["t.T", None]}}))
    with pytest.raises(ConfigError, match="save the tokenizer as one of transformers' classes"):
        load_model_spec(model)
    (model / "tiktoken.model").touch()
    with pytest.raises(ConfigError, match=r"mrl convert tokenizer .* writes one without code"):
        load_model_spec(model)


def test_links_pipes_and_devices_of_a_model_are_not_followed_out_of_it(model, tmp_path):
    (tmp_path / "secret").write_text("secret")
    out = tmp_path / "out"
    out.mkdir()
    for target in (tmp_path / "secret", Path("/etc/passwd"), Path("/dev/zero"), tmp_path / "absent", "vocab.txt", "/"):
        (model / "vocab.txt").symlink_to(target)
        with pytest.raises(EnvironmentFault, match=r"vocab\.txt"):
            copy_hf_files(model, out)
        (model / "vocab.txt").unlink()
    os.mkfifo(model / "vocab.txt")
    with pytest.raises(EnvironmentFault, match=r"vocab\.txt"):
        copy_hf_files(model, out)
    (model / "vocab.txt").unlink()
    (model / "vocab.txt").symlink_to("tokenizer.json")  # a link within
    assert "vocab.txt" in copy_hf_files(model, out)
    assert not (out / "vocab.txt").is_symlink()
    (model / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(EnvironmentFault, match=r"model\.safetensors"):
        weight_files(model)


def test_links_of_the_hubs_cache_lead_to_its_blobs_and_nowhere_else(tmp_path):
    repository = tmp_path / "models--Qwen--X"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "aa").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
    assert [file.name for file in hf_files(snapshot)] == ["config.json"] and weight_files(snapshot)
    (tmp_path / "secret").write_text("secret")
    for target in (tmp_path / "secret", repository / "refs", blobs / ".." / "snapshots", blobs / "sub" / "file"):
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            target.write_text("x")
        (snapshot / "vocab.txt").symlink_to(target)
        with pytest.raises(EnvironmentFault, match=r"vocab\.txt"):
            hf_files(snapshot)
        (snapshot / "vocab.txt").unlink()
    elsewhere = tmp_path / "model"
    shutil.copytree(snapshot, elsewhere, symlinks=True)
    with pytest.raises(EnvironmentFault):
        hf_files(elsewhere)


# ---------------------------------------------------------------- Ray, engines


def test_a_cluster_without_token_is_refused_unless_it_is_forced(monkeypatch, capsys):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for command in ("train", "eval", "submit"):
        with pytest.raises(SystemExit) as end:
            main([command, str(PRESET)])
        assert end.value.code in (2, 4)
    assert capsys.readouterr().err.count("RAY_AUTH_MODE=disabled") >= 2
    monkeypatch.setenv(OPEN_RAY, "1")
    refuse_open_ray()


@pytest.mark.parametrize("script", ["start_head.sh", "start_worker.sh"])
def test_no_node_is_started_without_token_unless_it_is_forced(script, tmp_path):
    (tmp_path / "ray").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "ray").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_AUTH_MODE": "disabled", "DEVICE": "cpu", "CPUS": "1"}
    command = ["bash", str(ROOT / "launch" / script)]
    places = {"HEAD": "127.0.0.1:1", "PORT": "7", "DASHBOARD_PORT": "9", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment | places, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "RAY_AUTH_MODE=disabled" in done.stderr and "started" not in done.stdout


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_engines_unpickle_nothing_whatever_the_command_was_given(device, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    given = get_hosting(device).engine_environment(0, 1, 1, 1)
    assert given["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


LISTENING = """
import os, sys, psutil, torch.distributed as dist
from mrl.platforms.addresses import gloo_environment
os.environ.update(gloo_environment("127.0.0.1"))
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1)
for each in psutil.Process().net_connections(kind="inet"):
    if each.status == psutil.CONN_LISTEN:
        print(each.laddr.ip, each.laddr.port)
"""


def test_what_torch_distributed_listens_on_is_what_the_page_says():
    """As ranks meet on one host. Its store cannot be kept to one address; nothing else is on another than that."""
    port = free_port()
    command = [sys.executable, "-c", LISTENING, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    listening = [line.split() for line in done.stdout.splitlines()]
    assert [address for address, number in listening if int(number) == port] in (["::"], ["0.0.0.0"])
    pairs = [address for address, number in listening if int(number) != port]
    assert pairs and set(pairs) == {"127.0.0.1"}


# ---------------------------------------------------------------- plug-ins, secrets


def test_plug_ins_are_named_with_their_digest_before_they_run(tmp_path, tiny_worlds):
    reward = tmp_path / "mine.py"
    reward.write_text("def compute_score(**_): return 1.0\n")
    resolved = load_config(PRESET, overrides=[f"reward.custom_reward_function.path={reward}"])
    (found,) = plug_ins(resolved.config)
    digest = subprocess.run(["sha256sum", str(reward)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert found == {"key": "reward.custom_reward_function.path", "path": str(reward), "sha256": digest}
    with attempt(tmp_path, 0, {}, plug_ins=[found]):
        pass
    assert json.loads((tmp_path / ATTEMPTS).read_text().splitlines()[0])["plug_ins"] == [found]
    assert plug_in_lines([found]) == [f"plug-in: reward.custom_reward_function.path {reward}, SHA-256 {digest}"]
    started = {"command": ["python", str(reward), "--fast"]}
    agents = load_config(PRESET, overrides=["rollout.endpoint=true", f"rollout.agent={started}"])
    assert plug_ins(agents.config) == [{"key": "rollout.agent.command", "path": str(reward), "sha256": digest}]
    reward.unlink()
    with pytest.raises(ConfigError, match=r"mine\.py cannot be read"):
        plug_ins(resolved.config)


def test_every_kind_of_plug_in_is_named(tmp_path, tiny_worlds):
    keys = [
        "reward.custom_reward_function.path", "algorithm.policy_loss.custom.path", "algorithm.custom_advantage.path",
        "rollout.turns.path",
    ]  # fmt: skip
    for number, _ in enumerate(keys):
        (tmp_path / f"{number}.py").touch()
    overrides = [f"{key}={tmp_path / f'{number}.py'}" for number, key in enumerate(keys)]
    config = load_config(PRESET, overrides=[*overrides, "rollout.turns.tools=[mine]"]).config
    assert [each["key"] for each in plug_ins(config)] == keys


def test_a_plug_in_is_named_before_its_code_runs(tmp_path, tiny_worlds, monkeypatch, capsys):
    """A reward is asked about the first row before the run starts."""
    order = []
    monkeypatch.setattr("mrl.driver.preflight.preflight", lambda *_: None)
    monkeypatch.setattr("mrl.driver.preflight.check_inputs", lambda *_: order.append(capsys.readouterr().out) or stop())
    (tmp_path / "mine.py").touch()
    with pytest.raises(SystemExit):
        main(["train", str(PRESET), "--set", f"reward.custom_reward_function.path={tmp_path}/mine.py"])
    assert "plug-in: reward.custom_reward_function.path" in order[0]


def stop():
    raise DataError("here")


SECRET = "sk-abcdefghijklmnop1234"
KWARGS = "reward.custom_reward_function.reward_kwargs"


def test_secrets_are_not_written_down_or_handed_on(tmp_path, monkeypatch):
    words = ["mrl", "train", "x.yaml", "--set", f"{KWARGS}.api_key={SECRET}", "--set", f"{KWARGS}.password=letmein",
        "--set", "data.prompt_key=prompt", f"--header=Bearer {SECRET}"]  # fmt: skip
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(ConfigError), attempt(tmp_path, 0, {}):
        raise ConfigError(f"the judge refused https://me:letmein@judge.org with {SECRET}")
    text = (tmp_path / ATTEMPTS).read_text()
    assert SECRET not in text and "letmein" not in text and "data.prompt_key=prompt" in text
    settings = [f"{KWARGS}={{api_key: {SECRET}, nested: {{auth_token: letmein}}, url: 'https://a:letmein@b.c', n: 3}}",
        f"reward.custom_reward_function.path={tmp_path}/mine.py"]  # fmt: skip
    resolved = load_config(PRESET, overrides=settings)
    record = resolved.to_record()
    assert SECRET not in record and "letmein" not in record and record.count(HIDDEN) == 3
    assert load_config_text(tmp_path, resolved.to_yaml()).config == resolved.config, "what trains is whole"
    handed_on = json.dumps(without_secrets(resolved.config.model_dump(mode="json")))
    assert SECRET not in handed_on and "letmein" not in handed_on


def load_config_text(folder: Path, text: str):
    (folder / "config.yaml").write_text(text)
    return load_config(folder / "config.yaml")


def test_a_configuration_whose_secrets_were_left_out_is_not_run_without_them(tiny_worlds, capsys):
    settings = ["--set", f"{KWARGS}={{api_key: '{HIDDEN}'}}", "--set", f"reward.custom_reward_function.path={__file__}"]
    with pytest.raises(SystemExit) as end:
        main(["validate", str(PRESET), *settings])
    assert (
        end.value.code == 2
        and "api_key is the placeholder that a run stores in place of a secret" in capsys.readouterr().out
    )


def test_no_key_of_the_configuration_is_taken_for_a_secret():
    for key in schema_keys():
        assert command_without_secrets([f"{key}=5"]) == [f"{key}=5"], key
    kept = {"max_tokens": 5, "token_level": "x", "tokenizer": "y", "prompt_key": "z", "pad_token_id": 3}
    assert without_secrets(kept) == kept


def test_a_report_shows_no_secret_of_an_older_run(tmp_path):
    run = write_run(tmp_path / "run", World()).path
    row = {
        "event": "began",
        "time": "t",
        "command": ["mrl", f"a.api_key={SECRET}"],
        "versions": {},
        "host": "h",
        "pid": 1,
    }
    end = {"event": "ended", "time": "t", "exit_code": 1, "message": f"refused {SECRET}"}
    (run / ATTEMPTS).write_text(f"{json.dumps(row | {'step': 0})}\n{json.dumps(end)}\n")
    main(["report", str(run)])
    assert SECRET not in (run / "report.html").read_text()
