"""Speed of the weight digest on one core beside a plain read (int32 sum) of the same memory.

`--json` prints one object.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from mrl.reshard.digest import partial_digest

SHAPES = {
    "expert [768, 2048]": (768, 2048),
    "o_proj slice [4096, 1024]": (4096, 1024),
    "embedding [18992, 4096]": (18992, 4096),
}


def best_rate(run: Callable[[], object], nbytes: int, repeats: int = 7) -> float:
    """Bytes per second of the fastest run after a warm-up."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return nbytes / min(times)


def measure() -> list[dict]:
    """One row per shape and dtype."""
    rows = []
    for name, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.randn(shape).to(dtype)
            words = tensor.view(torch.int32)
            rows.append({
                "tensor": name,
                "dtype": str(dtype).removeprefix("torch."),
                "digest_bytes_per_s": best_rate(lambda t=tensor: partial_digest(t, "a.weight", (0, 0)), tensor.nbytes),
                "read_bytes_per_s": best_rate(lambda w=words: w.sum(dtype=torch.int32), tensor.nbytes),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    rows = measure()
    if as_json:
        print(json.dumps({"threads": 1, "rows": rows}))
        return
    for row in rows:
        digest, read = (row[key] / 1e9 for key in ("digest_bytes_per_s", "read_bytes_per_s"))
        print(f"{row['tensor']:26} {row['dtype']:9} digest {digest:5.1f} GB/s   plain read {read:5.1f} GB/s")


if __name__ == "__main__":
    main()
