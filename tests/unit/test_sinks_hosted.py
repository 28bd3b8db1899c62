"""W&B, MLflow and SwanLab get the names, steps and values that they can hold;
the packages themselves are stood in for here.
"""

import sys
from types import SimpleNamespace

import pytest

from mrl.errors import ConfigError
from mrl.record.loggers import MlflowSink, RunInfo, SwanlabSink, WandbSink
from mrl.record.run_dir import RunDir
from mrl.record.sinks import check_packages, make_sinks

METRICS = {"val-core/x/acc/mean@4": 0.25, "critic/score/mean": 1.0, "bad": float("nan"), "none": None}
ROWS = [{"data_source": "toy", "input": "1+1", "output": "2", "gts": ["2"], "score": 1.0}]
INFO = RunInfo("project", "name", {"a": 1})


class Service:
    """Stands in for a client package; notes every call."""

    def __init__(self):
        self.calls = []
        self.id = "run-7"

    def note(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def __getattr__(self, name):
        return self.note(name)

    def named(self, name):
        return [(args, kwargs) for n, args, kwargs in self.calls if n == name]


@pytest.fixture
def service(monkeypatch):
    stand_in = Service()
    for name in ("wandb", "swanlab"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in


def test_wandb_has_the_step_as_its_axis_and_continues_its_run(tmp_path, service):
    for _ in range(2):  # the second is a resumed run
        sink = WandbSink(tmp_path, INFO)
        sink.write(3, METRICS)
        sink.generations(3, ROWS)
        sink.close()
    first, second = (kwargs for _, kwargs in service.named("init"))
    assert (first["project"], first["name"], first["config"], first["id"]) == ("project", "name", {"a": 1}, None)
    assert (second["id"], second["resume"]) == ("run-7", "allow")
    logged = service.named("log")[0][0][0]
    assert logged["training/global_step"] == 3 and logged["val-core/x/acc/mean@4"] == 0.25 and "none" not in logged
    assert service.named("Table")[0][1]["data"] == [["toy", "1+1", "2", "['2']", 1.0]]
    assert (("*",), {"step_metric": "training/global_step"}) in service.named("define_metric")


def test_swanlab_gets_finite_numbers_only(tmp_path, service):
    sink = SwanlabSink(tmp_path, INFO)
    sink.write(3, METRICS)
    assert service.named("log")[0] == (({"val-core/x/acc/mean@4": 0.25, "critic/score/mean": 1.0},), {"step": 3})


def test_nothing_is_connected_to_before_the_first_call(tmp_path, service):
    WandbSink(tmp_path, INFO).close()
    SwanlabSink(tmp_path, INFO).close()
    assert service.calls == []


def test_mlflow_gets_names_that_it_allows(tmp_path, monkeypatch):
    sent = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="1"),
        create_run=lambda number, run_name: SimpleNamespace(info=SimpleNamespace(run_id="r")),
        log_batch=lambda run_id, metrics: sent.append((run_id, metrics)),
        set_terminated=lambda run_id: sent.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda tracking_uri: client))
    monkeypatch.setitem(
        sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))
    )
    sink = MlflowSink(tmp_path, INFO)
    sink.write(3, METRICS | {f"m{i}": 0.0 for i in range(1500)})
    sink.close()
    (run_id, first), (_, rest), end = sent
    assert (run_id, first[:2], len(first), len(rest), end) == (
        "r", [("val-core/x/acc/mean_at_4", 0.25, 3), ("critic/score/mean", 1.0, 3)], 1000, 502, "ended",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_missing_package_is_refused_before_anything_starts(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(
        ConfigError, match=rf"trainer\.logger: {name} needs the package {name}; pip install 'mrl\[{name}\]'"
    ):
        check_packages(["console", name])
    with pytest.raises(ConfigError, match=rf"pip install 'mrl\[{name}\]'"):
        make_sinks([name], RunDir.open(tmp_path, ""), 1)
