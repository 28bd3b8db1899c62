"""The machines of asynchronous training at work on a simulated fleet: what holds in random schedules, and what each
schedule is worth.

    python scripts/evidence/fleet.py [--cases 10000] [--json docs/results/fleet.json]    no device, no weights; a minute

* `cases`: random schedules in random worlds (engines that die, hang, come back; groups that fail, teach nothing or kill
  engines; runs that are killed and go on), each held against books kept beside the machines: tests/unit/fleet_cases.py
  says what must hold.
* `balanced`: four engines with responses as long as those of a published run (a lognormal fitted to its mean, longest
  and clipped share) and a trainer that takes 1, 1/2 or 1/4 of the time of generation. Token rates are relative to the
  synchronous schedule.
* `planned`: 30B on 32 and 235B on 128 H100, a half or three quarters of them for generation, at the rates that `mrl
  plan` assumes for this device. Whether the model fits the ranks that are left is not asked. `sync, colocated` has all
  devices for both in turn; what a hand-over costs is left out. Predictions, not measurements.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mrl.config.load import load_config
from mrl.model import expert_share, planning_model_spec
from mrl.plan.engine_memory import cache_bytes_per_token
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for, engine_of
from mrl.plan.step_work import Lengths, mean_flops_per_token
from mrl.plan.times import actor_seconds

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))
sys.path.append(str(ROOT / "scripts" / "evidence"))
from fleet import EngineKind, World  # noqa: E402
from fleet_cases import random_case, run  # noqa: E402
from fleet_speed import SOURCE_000, Speed, balanced, phases, schedules, speed_of  # noqa: E402
from stamp import facts  # noqa: E402

SYNC_S = 1.0
PRESETS = ("qwen3-30b-a3b/h100-4x8", "qwen3-235b-a22b/h100-16x8")
GENERATE = (0.5, 0.75)  # shares of the devices
STEPS, WARM_UP = 14, 6
PUBLISHED = {
    "verl 0.9.1, 35B-A3B on 32 devices, asynchronous over synchronous": 1.56,
    "NeMo-RL v0.7, 30B-A3B on 32 H100, one step off over on-policy": 1522 / 1232,
}


# ---------------------------------------------------------------- what holds


def check_cases(count: int) -> dict[str, Any]:
    """Runs the cases; how many saw each kind of trouble. Raises where something does not hold."""
    began, seen, tokens = time.process_time(), Counter(), Counter()
    for number in range(count):
        fleet = run(random_case(number))
        seen.update(what for what, times in fleet.seen.items() if times)
        seen["several versions in a response"] += any(
            len(response) > 1 for _, _, spans, _ in fleet.books.trained for response in spans
        )
        seen[fleet.schedule.order] += 1
        tokens["groups"] += len(fleet.books.trained)
        tokens["tokens"] += fleet.buffer.counts.kept.tokens
    seconds = round(time.process_time() - began, 1)
    return {
        "cases": count,
        "failed_checks": 0,
        "cases_with": dict(seen.most_common()),
        "trained": dict(tokens),
        "cpu_s": seconds,
    }


# ---------------------------------------------------------------- what a schedule is worth


def compared(batch: int, responses: int, staleness: int, world: World) -> dict[str, Any]:
    """Rows of schedules in one world, beside the bound of what overlap alone can gain."""
    rules = schedules(batch, responses, SOURCE_000.longest, staleness)
    generation, training = phases(rules["sync"], world)
    rows = {name: speed_of(schedule, world, STEPS, WARM_UP) for name, schedule in rules.items()}
    base = rows["sync"].tokens_per_s
    return {
        "max_staleness": staleness,
        "generation_s": round(generation, 1),
        "training_s": round(training, 1),
        "bound_of_overlap": round((generation + training) / max(generation, training), 3),
        "rows": [row(name, speed, base) for name, speed in rows.items()],
    }


def row(name: str, speed: Speed, base: float) -> dict[str, Any]:
    """One schedule."""
    return {"schedule": name, "over_sync": round(speed.tokens_per_s / base, 3)} | {
        k: round(v, 4) for k, v in asdict(speed).items()
    }


def balanced_worlds() -> list[dict[str, Any]]:
    """Trainers of different speed beside the same engines."""
    found = []
    engines = (EngineKind(step_s=0.01, each_s=0.0001, prefill_s=1e-5, seats=256),) * 4
    world = World(engines, partial(SOURCE_000.length, 1), prompt_tokens=500, sync_s=SYNC_S)
    for over in (1.0, 0.5, 0.25):
        sized = balanced(world, schedules(32, 16, SOURCE_000.longest)["sync"], over)
        found += [{"training_over_generation": over} | compared(32, 16, staleness, sized) for staleness in (2, 4)]
    return found


# ---------------------------------------------------------------- planned devices


@dataclass(frozen=True)
class PlannedEngine(EngineKind):
    """Decoding bound by memory: weights that are read once a step, and the cache of each response."""

    weights_s: float = 0.0  # to read all of them
    shared: float = 1.0  # of the weights, read however few responses there are
    active: float = 1.0  # of the experts, chosen by one token
    cache_s: float = 0.0  # to read a response's cache

    def token_seconds(self, responses: int) -> float:
        """An expert that no token chose is not read."""
        chosen = 1 - (1 - self.active) ** responses
        return self.weights_s * (self.shared + (1 - self.shared) * chosen) + responses * self.cache_s


def planned_inputs(preset: str) -> PlanInputs:
    """The preset with responses of the fitted lengths."""
    config = load_config(ROOT / "parallel_configs" / f"{preset}.yaml").config
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"max_response_length": SOURCE_000.longest})}
    )
    model, _ = planning_model_spec(config.model.path)
    inputs = PlanInputs.of(config, model, device_for(config))
    return replace(inputs, assumptions=replace(inputs.assumptions, response_share=SOURCE_000.mean / SOURCE_000.longest))


def planned_engine(inputs: PlanInputs, lengths: Lengths) -> PlannedEngine:
    """One engine at the plan's rates."""
    model, rollout, device, assumed, memory = (
        inputs.model,
        inputs.rollout,
        inputs.device,
        inputs.assumptions,
        engine_of(inputs),
    )
    rate = device.memory_rate * assumed.decode_memory_share
    cached = (lengths.prompt + mean_place()) * cache_bytes_per_token(model, rollout.tensor, inputs.engine_element_bytes)
    computed = mean_flops_per_token(model, lengths) / (rollout.tensor * device.flops * assumed.prefill_mfu)
    return PlannedEngine(
        prefill_s=computed,
        seats=max(1, min(inputs.config.rollout.max_num_seqs, int(memory.cache_tokens / lengths.total))),
        weights_s=memory.weights / rate,
        shared=1 - expert_share(model),
        active=model.num_experts_per_tok / model.num_experts,
        cache_s=cached / rate,
    )


def mean_place() -> float:
    """Tokens of a response that are there when one of its tokens is made, over all tokens: E[l^2] / 2 E[l]."""
    drawn = [min(SOURCE_000.length(0, number, 0), SOURCE_000.longest) for number in range(4000)]
    return sum(length**2 for length in drawn) / 2 / sum(drawn)


def planned(preset: str, generates: float) -> dict[str, Any]:
    """A preset's devices, a share of which generates; layouts scale by their data parallelism."""
    inputs = planned_inputs(preset)
    batch, data = batch_plan(inputs.config, inputs.train), inputs.config.data
    lengths = Lengths(data.max_prompt_length * inputs.assumptions.prompt_share, SOURCE_000.mean)
    scored, updated = actor_seconds(inputs, batch)
    each = (scored.total + batch.mini_batches * updated.total) / (batch.samples * SOURCE_000.mean)
    engines = (planned_engine(inputs, lengths),) * inputs.rollout.num_engines
    everything = World(engines, partial(SOURCE_000.length, 1), round(lengths.prompt), partial(times, each), SYNC_S)
    world = replace(
        everything, engines=engines[: round(len(engines) * generates)], train_s=partial(times, each / (1 - generates))
    )
    sync = schedules(batch.prompts, batch.responses_per_prompt, SOURCE_000.longest)["sync"]
    found = compared(batch.prompts, batch.responses_per_prompt, 2, world)
    colocated = row("sync, colocated", speed_of(sync, everything, STEPS, WARM_UP), found["rows"][0]["tokens_per_s"])
    devices = inputs.config.cluster.nnodes * inputs.config.cluster.n_gpus_per_node
    facts = {"preset": preset, "devices": devices, "generate": generates, "seats": engines[0].seats}
    assumed = asdict(inputs.assumptions)
    return facts | found | {"rows": [*found["rows"], colocated], "assumptions": assumed}


def times(seconds: float, tokens: int) -> float:
    """Of a step on so many response tokens."""
    return seconds * tokens


def print_world(world: dict[str, Any]) -> None:
    """A line for each schedule."""
    made = (
        f"{world['preset']}, {world['generate']:.0%} generate"
        if "preset" in world
        else f"T = {world['training_over_generation']} G"
    )
    seconds = f"G {world['generation_s']} s, T {world['training_s']} s"
    print(f"{made}, S = {world['max_staleness']}: {seconds}, overlap alone gains at most {world['bound_of_overlap']}")
    for each in world["rows"]:
        rate, versions = f"{each['tokens_per_s']:12,.0f} tokens/s", f"{each['versions']:.2f} versions"
        print(f"  {each['schedule']:22} {each['over_sync']:6} x {rate}   {versions}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = facts("scripts/evidence/fleet.sh")
    parts: dict[str, Callable[[], Any]] = {
        "cases": lambda: check_cases(args.cases),
        "balanced": balanced_worlds,
        "planned": lambda: [planned(preset, share) for preset in PRESETS for share in GENERATE],
    }
    lengths = asdict(SOURCE_000) | {"mean": SOURCE_000.mean, "share_below_1190": SOURCE_000.share_below(1190)}
    result |= {name: part() for name, part in parts.items()} | {"lengths": lengths, "published": PUBLISHED}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for world in [*result["balanced"], *result["planned"]]:
        print_world(world)
    print(json.dumps(result["cases"]))


if __name__ == "__main__":
    main()
