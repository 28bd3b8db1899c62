"""W&B, MLflow and SwanLab as they are installed (extras `wandb`, `mlflow`, `swanlab`), without a network: what they
keep is what was sent.

Each is skipped where its package is missing. tests/unit/test_sinks_hosted.py has the same calls with stand-ins.
"""

import json
import time

import pytest

from mrl.record.loggers import RunInfo
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sinks import make_sinks

pytestmark = [pytest.mark.real, pytest.mark.long]
SCORES = {1: 0.5, 2: 1.0, 3: 1.5}
NAME = "val-core/x/acc/mean@4"
ROWS = [{"data_source": "toy", "input": "1+1", "output": "2", "gts": "2", "score": 1.0}]


def recorded(name: str, folder, steps, resume=False) -> float:
    """Writes the steps through one logger; seconds that the caller waited before the record was closed."""
    run = RunDir.open(folder, "a: 1\n", resume=resume)
    record = make_sinks([name], run, 5, RunInfo("mrl-test", "exp", {"a": {"b": 1}}, 120.0))
    begin = time.monotonic()
    for step in steps:
        record.write(step, {NAME: SCORES[step], "bad": float("nan"), "none": None})
    record.generations(steps[-1], ROWS)
    waited = time.monotonic() - begin
    record.close()
    run.close()
    return waited


def check_jsonl(folder) -> None:
    assert [(row["training/global_step"], row[NAME]) for row in read_metrics(folder / "metrics.jsonl")] == list(
        SCORES.items()
    )


def test_wandb_offline(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert recorded("wandb", tmp_path / "run", [1, 2]) < 2
    first = (tmp_path / "run" / "wandb.id").read_text()
    recorded("wandb", tmp_path / "run", [3], resume=True)
    check_jsonl(tmp_path / "run")
    assert not caplog.records and (tmp_path / "run" / "wandb.id").read_text() == first
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(kept) == 2 and all(first in file.name and NAME.encode() in file.read_bytes() for file in kept)


def test_wandb_without_an_account_is_left_out(tmp_path, monkeypatch, caplog):
    """Online is W&B's own default; where it cannot log in, it raises, and the run goes on."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # of a test before, whose mode it would keep
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    assert recorded("wandb", tmp_path / "run", [1, 2, 3]) < 2
    check_jsonl(tmp_path / "run")
    assert "trainer.logger: wandb failed" in caplog.text


def test_mlflow_in_a_file(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert recorded("mlflow", tmp_path / "run", [1, 2]) < 2
    recorded("mlflow", tmp_path / "run", [3], resume=True)
    check_jsonl(tmp_path / "run")
    assert not [r for r in caplog.records if r.name.startswith("mrl")]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow.db")
    run = client.get_run((tmp_path / "run" / "mlflow.id").read_text())
    history = client.get_metric_history(run.info.run_id, "val-core/x/acc/mean_at_4")
    assert [(m.step, m.value) for m in history] == list(SCORES.items())
    assert run.info.status == "FINISHED" and set(run.data.metrics) == {"val-core/x/acc/mean_at_4"}
    (shown,) = (tmp_path / "run" / "mlflow").rglob("step-3.json")
    assert json.loads(shown.read_text())["rows"][0]["output"] == "2"


def test_swanlab_offline(tmp_path, monkeypatch, caplog):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert recorded("swanlab", tmp_path / "run", [1, 2, 3]) < 2
    check_jsonl(tmp_path / "run")
    assert not [r for r in caplog.records if r.name.startswith("mrl")]
    kept = [file for file in (tmp_path / "run" / "swanlab").rglob("*") if file.is_file()]
    assert any(NAME.encode() in file.read_bytes() for file in kept)
