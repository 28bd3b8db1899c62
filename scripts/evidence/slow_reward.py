"""A reward that takes 0 to 2 seconds, as a judge or a sandbox does; and what such a run's update waited for."""

import json
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("gen", "pause", "settle", "reshard", "testing")
MOST_SETTLE = 0.02  # of the time of all steps


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the response, late."""
    time.sleep(2 * random.random())
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def main(run_dir: Path) -> None:
    """Writes docs/results/slow_rewards.json. Ends with an error where the update waited for rewards."""
    from stamp import facts  # not in processes that load the reward

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["training/global_step"] > 0]
    whole = sum(row["timing_s/step"] for row in steps)
    shares = {name: sum(row.get(f"timing_s/{name}", 0.0) for row in steps) / whole for name in PHASES}
    found = facts("scripts/evidence/slow_rewards.sh RUN_DIRECTORY") | {
        "steps": len(steps),
        "seconds": round(whole, 1),
        "share_of_step_time": {name: round(share, 5) for name, share in shares.items()},
        "window": [row["async/window"] for row in steps],
        "preemptions": sum(row["perf/preemptions"] for row in steps),
        "kv_cache_peak": max(row["perf/kv_cache_peak"] for row in steps),
        "goal": f"settle at most {MOST_SETTLE:g} of step time; no preemption counted while the cache is nearly empty",
    }
    (ROOT / "docs" / "results" / "slow_rewards.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))
    if shares["settle"] > MOST_SETTLE or found["preemptions"]:
        sys.exit("weights waited for rewards, or a pause was taken for a full cache")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
