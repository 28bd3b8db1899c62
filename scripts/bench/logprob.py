"""Log-probs and their backward: without the logits, against the plain path through all logits, time and memory.

    python scripts/bench/logprob.py [--json] [--tokens 4096 --hidden 1024 --vocab 151936 --rounds 3]

Each side runs in a process of its own, in turns; memory is the peak of the resident set over the level before the first
operation.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time

CHUNK = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    for name, default in (("tokens", 4096), ("hidden", 1024), ("vocab", 151936), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    size = (options.tokens, options.hidden, options.vocab)
    runs = {side: [] for side in ("plain", "lean")}
    for _ in range(options.rounds):
        for side, found in runs.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(_measure, (side, *size)))
    check = [found[0]["log_prob"] for found in runs.values()]
    if abs(check[0] - check[1]) > 1e-4:
        raise SystemExit(f"the two sides disagree: {check}")
    report = {
        f"{side}_{key}": statistics.median(r[key] for r in found)
        for side, found in runs.items()
        for key in ("s", "peak_bytes")
    }
    report |= {
        "chunk": CHUNK,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocab": options.vocab,
        "dtype": "float32",
    }
    report |= {
        "memory_ratio": report["plain_peak_bytes"] / report["lean_peak_bytes"],
        "time_ratio": report["plain_s"] / report["lean_s"],
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"{'':8}{'seconds':>10}{'peak extra MB':>16}")
    for side in runs:
        print(f"{side:8}{report[f'{side}_s']:>10.2f}{report[f'{side}_peak_bytes'] / 1e6:>16.0f}")
    print(f"plain / lean: time {report['time_ratio']:.2f}, memory {report['memory_ratio']:.1f}")


def _measure(side: str, tokens: int, hidden: int, vocab: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    # both have where to put their gradients, as in training
    weight.grad, weight.main_grad = torch.zeros_like(weight), torch.zeros_like(weight) if side == "lean" else None
    if side == "plain":
        del weight.main_grad
    function = _lean if side == "lean" else _plain
    with _PeakMemory() as memory:
        start = time.perf_counter()
        log_probs = function(states, weight, targets, vocab)
        log_probs.mean().backward()
        seconds = time.perf_counter() - start
    return {"s": seconds, "peak_bytes": memory.extra, "log_prob": log_probs.mean().item()}


def _plain(states, weight, targets, vocab):
    logits = (states @ weight.t()).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _lean(states, weight, targets, vocab):
    import torch
    import torch.distributed as dist

    from mrl.megatron.logprob import lean_log_probs

    return lean_log_probs(states, weight, targets, torch.ones(len(targets)), vocab, dist.group.WORLD, chunk=CHUNK)[0]


class _PeakMemory:
    """Samples the resident set; `extra` is its peak over the level at the start, bytes."""

    def __enter__(self) -> "_PeakMemory":
        self._stop, self._first, self._peak = threading.Event(), _resident(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = self._peak - self._first

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._peak = max(self._peak, _resident())


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
