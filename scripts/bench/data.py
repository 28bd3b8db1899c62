"""What reading a large data file costs: seconds, and peak memory beyond the imports.

python scripts/bench/data.py [--rows 2000000] [--unique 17000] [--json]      a synthetic parquet in verl's schema, prompts of 400 characters
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

READ = """
import json, sys, time
from mrl.data.dataset import PromptDataset, PromptParameters

class Bytes:
    def apply_chat_template(self, conversation, **_):
        return list(conversation[0]["content"].encode())

def peak():  # getrusage would give the parent's peak, which a process inherits
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

before, begin = peak(), time.perf_counter()
data = PromptDataset.load([sys.argv[1]], Bytes(), PromptParameters())
seconds = time.perf_counter() - begin
print(json.dumps({"rows": data.report.rows, "kept": data.report.kept, "seconds": seconds, "peak_extra_bytes": peak() - before}))
"""


def write(path: Path, rows: int, unique: int) -> None:
    """`rows` rows over `unique` prompts, in row groups of 50,000."""
    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    writer = None
    for begin in range(0, rows, 50_000):
        names = [f"{i % unique:0400d}" for i in range(begin, min(begin + 50_000, rows))]
        flat = pa.StructArray.from_arrays([pa.array(names), pa.array(["user"] * len(names))], fields=list(message))
        columns = {
            "data_source": pa.array(["math_dapo"] * len(names)),
            "prompt": pa.ListArray.from_arrays(pa.array(range(len(names) + 1), pa.int32()), flat),
            "reward_model": pa.StructArray.from_arrays(
                [pa.array([n[-5:] for n in names]), pa.array(["rule"] * len(names))], ["ground_truth", "style"]
            ),
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--unique", type=int, default=17_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.parquet"
        write(path, args.rows, args.unique)
        done = subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True)
        result = json.loads(done.stdout) | {"file_bytes": path.stat().st_size}
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:18} {value:16,.1f}" if isinstance(value, float) else f"{name:18} {value:16,d}")


if __name__ == "__main__":
    main()
