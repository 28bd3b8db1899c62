"""One rank: what its passes read from the device, by who asked. See test_device_waits."""

import json
import sys
from pathlib import Path

from ranks import ROOT, agree_on_port

sys.path.insert(0, str(ROOT / "scripts" / "hardware"))
from layers import some_batch
from waits import asked

from mrl.config.schema import RunConfig
from mrl.rank.actor import MegatronActor


def main(rank: int, world_size: int, out: Path, cases_file: Path) -> None:
    found = {}
    for meeting, (name, config) in enumerate(json.loads(cases_file.read_text()).items()):
        port = agree_on_port(out, rank, meeting)
        actor = MegatronActor(RunConfig.model_validate(config), rank, world_size, "127.0.0.1", port)
        batch = some_batch(words=100)
        actor.gradients(batch)  # what is made once is made: tables of angles, memory of collectives
        found[name] = dict(asked(actor, batch))
        actor.close()
    (out / f"reads-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
