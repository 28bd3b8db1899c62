"""What reading a large data file costs: seconds, and peak memory beyond the imports, for files of many rows and of few.

python scripts/bench/data.py [--rows 2000000] [--small 200000] [--unique 17000] [--json]

Synthetic parquet files in verl's schema with prompts of 400 characters, in the row groups that pyarrow and pandas write
(1,048,576 rows):
`--unique` prompts again and again, as DAPO-Math-17k has them, and all prompts distinct. Each is read by a process of
its own, which then draws four batches in shuffled order. `load_peak_mb` is all memory while reading, `peak_mb` that of
both, `own_peak_mb` that of both without pages of files such as libraries, from which `own_bytes_a_row_more` follows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_AT_ONCE = 50_000
READ = """
import json, sys, threading, time
from mrl.data.dataset import PromptDataset, PromptParameters
from mrl.data.order import DataCursor, PromptStream

class Quarters:  # some four characters are a token, as in English under a large vocabulary
    def apply_chat_template(self, conversation, **_):
        return list(conversation[0]["content"].encode()[::4])

def status(name):  # getrusage would give the parent's peak, which a process inherits
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

class Own(threading.Thread):  # the peak of memory that is no page of a file; the kernel keeps no mark of it
    peak, over = 0, False
    def run(self):
        while not self.over:
            self.peak = max(self.peak, status("RssAnon"))
            time.sleep(0.01)

before, own_before, begin, own = status("VmHWM"), status("RssAnon"), time.perf_counter(), Own()
own.start()
data = PromptDataset.load([sys.argv[1]], Quarters(), PromptParameters())
seconds, loaded = time.perf_counter() - begin, status("VmHWM")
stream, cursor = PromptStream(data, 512, seed=0), DataCursor()
for _ in range(4):
    _, cursor = stream.next_batch(cursor)
own.over = True
own.join()
print(json.dumps({
    "rows": data.report.rows, "kept": data.report.kept, "seconds": round(seconds, 1),
    "load_peak_mb": round((loaded - before) / 1e6, 1), "own_peak_mb": round((own.peak - own_before) / 1e6, 1),
    "peak_mb": round((status("VmHWM") - before) / 1e6, 1),
}))
"""


def write(path: Path, rows: int, unique: int) -> None:
    """`rows` rows over `unique` prompts."""
    pq.write_table(
        pa.concat_tables(
            _part(range(begin, min(begin + ROWS_AT_ONCE, rows)), unique) for begin in range(0, rows, ROWS_AT_ONCE)
        ),
        path,
    )


def _part(rows: range, unique: int) -> pa.Table:
    names = [f"{i % unique:0400d}" for i in rows]
    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    flat = pa.StructArray.from_arrays([pa.array(names), pa.array(["user"] * len(names))], fields=list(message))
    truths = [pa.array([n[-5:] for n in names]), pa.array(["rule"] * len(names))]
    return pa.table(
        {
            "data_source": pa.array(["math_dapo"] * len(names)),
            "prompt": pa.ListArray.from_arrays(pa.array(range(len(names) + 1), pa.int32()), flat),
            "reward_model": pa.StructArray.from_arrays(truths, ["ground_truth", "style"]),
        }
    )


def measured(rows: int, unique: int) -> dict[str, Any]:
    """One file read in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.parquet"
        write(path, rows, unique)
        done = subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True)
        return json.loads(done.stdout) | {"file_mb": round(path.stat().st_size / 1e6, 1)}


def compared(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """Both, and what a row more costs."""
    more = large["own_peak_mb"] - small["own_peak_mb"]
    return {
        "small": small,
        "large": large,
        "times_the_rows": round(large["rows"] / small["rows"], 1),
        "times_the_load_peak": round(large["load_peak_mb"] / small["load_peak_mb"], 2),
        "times_the_own_peak": round(large["own_peak_mb"] / small["own_peak_mb"], 2),
        "own_bytes_a_row_more": round(1e6 * more / (large["rows"] - small["rows"]), 1),
    }


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--small", type=int, default=200_000)
    parser.add_argument("--unique", type=int, default=17_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = {
        name: compared(*(measured(rows, min(unique or rows, rows)) for rows in (args.small, args.rows)))
        for name, unique in (("duplicates", args.unique), ("distinct", None))
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, found in result.items():
        for size in ("small", "large"):
            print(f"{name:10} " + "  ".join(f"{key} {value:,}" for key, value in found[size].items()))
        print(
            f"{name:10} {found['times_the_own_peak']} times the memory of its own, "
            f"{found['own_bytes_a_row_more']} bytes a row more"
        )


if __name__ == "__main__":
    main()
