"""What the tests of `.ci/run` came to, tier by tier, into docs/results/tiers.json.

    MRL_REPORTS=/tmp/reports bash .ci/run && python scripts/evidence/tiers.py /tmp/reports

`seconds` of a tier are pytest's own; those of `whole` are all that `.ci/run` takes, with the installation.
"""

import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from long_tests import summary  # noqa: E402
from stamp import facts  # noqa: E402

TIERS = ("unit", "browser", "real")


def main() -> None:
    """Reads TIER.xml of each tier in the folder that is given."""
    command = "MRL_REPORTS=/tmp/reports bash .ci/run && python scripts/evidence/tiers.py /tmp/reports"
    folder = Path(sys.argv[1])
    found = {"whole": facts(command) | {"seconds": int((folder / "seconds").read_text())}}
    for tier in TIERS:
        report = folder / f"{tier}.xml"
        seconds = float(next(xml.parse(report).getroot().iter("testsuite")).get("time"))
        found[tier] = summary(report, seconds, command)
    (ROOT / "docs" / "results" / "tiers.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
