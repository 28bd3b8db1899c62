"""Log-probs and their backward: without the logits, against the plain path through all logits, time and memory.

    python scripts/bench/logprob.py [--json] [--tokens 4096 --hidden 1024 --vocab 151936 --rounds 3]

Each side runs in a process of its own, in turns; memory is the peak of the resident set over the level before the first
operation.
errors      of log-probs and both gradients in bfloat16 against float64 with the same weights and states, the largest
            over the largest value there is; `lean` should not be above `plain`
"""

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable

SIDES = ("plain", "lean")
GOALS = {"time": 1.35, "memory": 12.0}  # lean's seconds over plain's, plain's bytes over lean's
_ERROR_SIZE = (256, 512, 32768)  # tokens, hidden, vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    for name, default in (("tokens", 4096), ("hidden", 1024), ("vocab", 151936), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    report = _report(options.tokens, options.hidden, options.vocab, options.rounds)
    if options.json:
        print(json.dumps(report))
    else:
        _show(report)


def _report(tokens: int, hidden: int, vocab: int, rounds: int) -> dict:
    """Medians of both sides over the rounds, their ratios, errors and goals. Raises SystemExit where they disagree."""
    runs = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, found in runs.items():
            found.append(_alone(_measure, side, tokens, hidden, vocab))
    check = [found[0]["log_prob"] for found in runs.values()]
    if abs(check[0] - check[1]) > 1e-4:
        raise SystemExit(f"the two sides disagree: {check}")
    report = {
        f"{side}_{key}": statistics.median(r[key] for r in found)
        for side, found in runs.items()
        for key in ("s", "peak_bytes")
    }
    report |= {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "float32"}
    report |= {
        "memory_ratio": report["plain_peak_bytes"] / report["lean_peak_bytes"],
        "time_ratio": report["lean_s"] / report["plain_s"],
    }
    report["errors"] = _alone(_errors)
    report["goals"] = {
        f"lean <= {GOALS['time']} x plain's seconds": report["time_ratio"] <= GOALS["time"],
        f"lean <= plain's memory / {GOALS['memory']:.0f}": report["memory_ratio"] >= GOALS["memory"],
        "bfloat16 no further from float64 than plain": all(e["lean"] <= e["plain"] for e in report["errors"].values()),
    }
    return report


def _alone(function: Callable, *arguments):
    """What the function returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _show(report: dict) -> None:
    print(f"{'':8}{'seconds':>10}{'peak extra MB':>16}")
    for side in SIDES:
        print(f"{side:8}{report[f'{side}_s']:>10.2f}{report[f'{side}_peak_bytes'] / 1e6:>16.0f}")
    print(f"lean / plain: time {report['time_ratio']:.2f}, memory 1 / {report['memory_ratio']:.1f}")
    for what, error in report["errors"].items():
        print(f"bfloat16 {what}: plain {error['plain']:.2e}, lean {error['lean']:.2e}")
    for goal, is_met in report["goals"].items():
        print(f"{'met   ' if is_met else 'MISSED'} {goal}")


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

    from mrl.rank.logprob import lean_log_probs

    return lean_log_probs(states, weight, targets, torch.ones(len(targets)), vocab, dist.group.WORLD)[0]


def _errors() -> dict[str, dict[str, float]]:
    """Of each output and side; see `errors` above."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokens, hidden, vocab = _ERROR_SIZE
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(tokens, hidden, generator=generator).bfloat16()
    weight = (torch.randn(vocab, hidden, generator=generator) * 0.1).bfloat16()
    targets, slope = torch.randint(vocab, (tokens,), generator=generator), torch.randn(tokens, generator=generator)
    found = {}
    for name, function, dtype in (
        ("exact", _plain_exact, torch.float64),
        ("plain", _plain, None),
        ("lean", _lean, None),
    ):
        leaves = [tensor.to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in (states, weight)]
        log_probs = function(*leaves, targets, vocab)
        (log_probs * slope).sum().backward()
        found[name] = (log_probs.detach().double(), *(leaf.grad.double() for leaf in leaves))
    return {
        what: {side: float((found[side][n] - exact).abs().max() / exact.abs().max()) for side in ("plain", "lean")}
        for n, (what, exact) in enumerate(zip(("log_probs", "grad_hidden", "grad_weight"), found["exact"], strict=True))
    }


def _plain_exact(states, weight, targets, vocab):
    return (states @ weight.t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


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
