"""What a weight sync holds beside the weights is in the plan: rounds on the fast path, a bucket on the slow one."""

import pytest
from small_model import SIZES
from test_plan import TP, config

from mrl.model import known_spec, model_spec
from mrl.plan.devices import find_device
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs

MIB = 1024**2
VOCABULARY = 151936 * 2048  # elements of the largest matrix of Qwen3-30B-A3B


def staged(model, placement: str, **reshard) -> dict[str, int]:
    """Staging of a rank and of a worker in the phases of a sync; trained over two tensor ranks, as engines are."""
    run = config("any", {"world_size": 16, TP: 2})
    nodes = {"nnodes": 2} if placement == "colocated" else {"nnodes": 3}
    sections = {
        "rollout": run.rollout.model_copy(update={"tensor_model_parallel_size": 2}),
        "reshard": run.reshard.model_copy(update=reshard),
        "cluster": run.cluster.model_copy(update={"placement": placement} | nodes),
    }
    phases = memory_section(PlanInputs.of(run.model_copy(update=sections), model, find_device("h100-80g")))["phases"]
    of_rank, of_worker = ("sync", "rollout_sync") if placement == "separate" else ("train_to_sync", "train_to_sync")
    return {
        "sync_staging": phases[of_rank]["terms"]["sync_staging"],
        "engine_staging": phases[of_worker]["terms"]["engine_staging"],
    }


@pytest.mark.parametrize("placement", ["separate", "colocated"])
@pytest.mark.parametrize("budget", [64, 512])
def test_the_fast_path_stages_two_rounds_and_an_engine_two_modules_more(placement, budget):
    """The largest module: 4 experts of 3 matrices of 64 x 64, in bfloat16, half of it on each tensor rank."""
    module = 4 * 3 * 64 * 64 * 2 // 2
    assert staged(model_spec(SIZES), placement, path="fast", budget_mb=budget) == {
        "sync_staging": 2 * budget * MIB,
        "engine_staging": 2 * budget * MIB + 2 * module,
    }


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_the_slow_path_stages_a_bucket_of_512_mib_and_the_largest_tensor_gathered_and_merged(placement):
    found = staged(known_spec("Qwen3-30B-A3B"), placement, path="slow")
    assert found["sync_staging"] == 512 * MIB + 2 * VOCABULARY * 2
