"""Writes golden files: what peers' own functions give for drawn inputs. Runs in the peers' environment alone.

scripts/evidence/outside.sh makes that environment and calls this. A topic is a module of tests/outside/peers with
`PEERS`, the distributions whose versions are recorded, and `cases()`, which returns plain JSON: inputs and what the
peer gave.
"""

import gzip
import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))


def main(topics: list[str]) -> None:
    known = sorted(path.stem for path in (HERE / "peers").glob("*.py") if not path.stem.startswith("_"))
    if unknown := sorted(set(topics) - set(known)):
        sys.exit(f"no topic {', '.join(unknown)}; there are {', '.join(known)}")
    for topic in topics or known:
        module = importlib.import_module(topic)
        written = {"peers": {name: version(name) for name in module.PEERS}, "cases": module.cases()}
        text = json.dumps(written, separators=(",", ":"), sort_keys=True)
        path = HERE / "golden" / f"{topic}.json.gz"
        path.parent.mkdir(exist_ok=True)
        # no time stamp and no name, so that equal numbers are equal files
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{topic}: {len(written['cases'])} cases of {written['peers']}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
