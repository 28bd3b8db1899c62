"""One rank of a colocated run: what its process holds after each hand-over of a step, over three steps with a save in
each.

See test_resident_memory.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from padded import read_batch
from ranks import agree_on_port

from mrl.config.schema import RunConfig
from mrl.config.schema_actor import GRADIENTS, OPTIMIZER, PARAMETERS
from mrl.platforms.process_memory import note_baseline
from mrl.rank.actor import MegatronActor
from mrl.rank.rank_save import HostCopy

STEPS = 3


def main(rank: int, world_size: int, out: Path, case_file: Path) -> None:
    case = json.loads(case_file.read_text())
    batch = read_batch(case["batch"])
    note_baseline()
    actor = MegatronActor(
        RunConfig.model_validate(case["config"]), rank, world_size, "127.0.0.1", agree_on_port(out, rank, 0)
    )
    moments, copy = [], HostCopy()

    def after(step: int, moment: str) -> None:
        moments.append({"step": step, "after": moment} | asdict(actor.memory(copy.tensors.values())))

    for step in range(STEPS):
        actor.bring(PARAMETERS)
        actor.prefetch(OPTIMIZER)  # as a run does where the plan has room for it, and here it has
        after(step, "rollout_to_log_prob")
        actor.log_probs(batch)
        after(step, "log_prob")
        actor.bring(PARAMETERS, GRADIENTS, OPTIMIZER)
        actor.update(batch)
        after(step, "train")
        copy.take(actor)
        actor.bring(PARAMETERS)
        after(step, "train_to_sync")
        actor.offload()
        after(step, "rollout")
    (out / f"{case['name']}-{rank}.json").write_text(json.dumps(moments))
    actor.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
