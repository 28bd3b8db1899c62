"""What the tests of `.ci/run` came to, tier by tier, into docs/results/tiers.json.

    MRL_REPORTS=/tmp/reports bash .ci/run && python scripts/evidence/tiers.py /tmp/reports

`seconds` are pytest's own, of a machine with `cpus` cores, and say nothing of the installation before them.
"""

import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from long_tests import summary  # noqa: E402

TIERS = ("unit", "browser", "real")


def main() -> None:
    """Reads TIER.xml of each tier in the folder that is given."""
    command = "MRL_REPORTS=/tmp/reports bash .ci/run && python scripts/evidence/tiers.py /tmp/reports"
    found = {}
    for tier in TIERS:
        report = Path(sys.argv[1]) / f"{tier}.xml"
        seconds = float(next(xml.parse(report).getroot().iter("testsuite")).get("time"))
        found[tier] = summary(report, seconds, command)
    (ROOT / "docs" / "results" / "tiers.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
