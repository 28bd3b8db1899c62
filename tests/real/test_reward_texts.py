"""What a judge says of each response goes from the scorer to the file of samples, by reference, through real Ray."""

import os

import pytest
import ray
from world import make_world

from mrl.cluster.scoring import Channel, PoolSettings, ScorerGroup, _actor
from mrl.config.schema import RecordConfig
from mrl.data.samples import Sample, packed
from mrl.driver.sample_writer import SampleWriter
from mrl.record.sample_files import read_samples
from mrl.reward.items import Question, RewardSpec
from mrl.store.response_store import ResponseStore
from mrl.store.reward_texts import SHORT

ROWS = 40
JUDGE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    long = extra_info["number"] % 2
    reasons = {f"reason {i}": f"{extra_info['number']} " * 80 for i in range(30)} if long else {"reason 0": "none"}
    return {"score": float(extra_info["number"]), **reasons}
"""


@pytest.mark.real
def test_a_judges_reasons_are_recorded_and_the_driver_holds_numbers(tmp_path):
    (file := tmp_path / "judge.py").write_text(JUDGE)
    (folder := tmp_path / "samples").mkdir()
    model = str(make_world(tmp_path / "world") / "model")
    made = packed([Sample(i, i, i, 0, (1,), (2, 3), (-0.1, -0.2), "stop", 0) for i in range(ROWS)])
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        scorer = _actor(model, ray.get_runtime_context().get_node_id())
        spec = RewardSpec(path=str(file))
        pool = PoolSettings(spec, 1, 60.0, 0.0, tmp_path / "reward.log", dict(os.environ), str(tmp_path))
        ray.get(scorer.start.remote(pool))
        group, samples = ScorerGroup([Channel("scorer 0", scorer)], {"engine 0": 0}), ResponseStore.put_here(made)
        group.submit(samples, [Question(i, "source", None, {"number": i}) for i in range(ROWS)], "engine 0")
        results = group.drain()
        held = [sum(len(part) for part in each.parts.values() if isinstance(part, str)) for each in results]
        assert max(held) <= SHORT and [each.score for each in results] == [float(i) for i in range(ROWS)]
        writer = SampleWriter(folder, 60.0, RecordConfig())
        writer.write(1, samples, results)
        writer.close()
        group.close()
    finally:
        ray.shutdown()
    for number, row in enumerate(read_samples(folder, 1)):
        reasons = [part for name, part in row["reward"].items() if name.startswith("reason ")]
        assert reasons == ([f"{number} " * 80] * 30 if number % 2 else ["none"])
        assert row["reward"]["score"] == number
