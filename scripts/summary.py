"""One JSON line on a finished run: held-out exact match before and after, steps, seconds, run directory."""

import argparse
import json
from pathlib import Path

from mrl.record.run_dir import METRICS, read_metrics


def main() -> None:
    """Reads metrics.jsonl of the run directory; exits with a message when it holds no validation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=None, help="wall time to report; default: the sum of the steps' times"
    )
    args = parser.parse_args()
    rows = read_metrics(args.run_dir / METRICS)
    scores = [value for row in rows for name, value in row.items() if name.startswith("val-core/") and "/mean@" in name]
    if not scores:
        raise SystemExit(f"{args.run_dir} holds no validation results")
    steps = max(row["training/global_step"] for row in rows)
    seconds = args.seconds if args.seconds is not None else sum(row.get("timing_s/step", 0.0) for row in rows)
    print(
        json.dumps(
            {
                "before": scores[0],
                "after": scores[-1],
                "steps": steps,
                "seconds": round(seconds, 1),
                "run_dir": str(args.run_dir),
            }
        )
    )


if __name__ == "__main__":
    main()
