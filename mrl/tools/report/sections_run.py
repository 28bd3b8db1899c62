"""Sections about the machine: phases of a step, memory, proof of syncs, staleness, incidents, reproduction."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mrl.generate.lost_engines import whole_losses
from mrl.plain_files import LINES_BYTES, parse_json, read_json, read_text
from mrl.plan.compared import PlanRow
from mrl.plan.compared import with_unit as in_units
from mrl.plan.memory_phases import ACTOR, phase_bytes
from mrl.record.run_dir import RunDir
from mrl.tools.report.columns import Curve
from mrl.tools.report.metric_words import in_words
from mrl.tools.report.page import (
    Bar,
    Block,
    Chart,
    Facts,
    Items,
    Lanes,
    PageSection,
    Paragraph,
    Series,
    Stack,
    Table,
    Text,
    color_of,
)
from mrl.tools.report.run_record import RunRecord
from mrl.units import GIB


class StepPhase(NamedTuple):
    """A phase of a step: its name in words, and which processes work in it."""

    words: str
    works: str


# in the loop's order
PHASES = {
    "gen": StepPhase("generation", "engines"),
    "reward": StepPhase("rewards", "driver"),
    "record": StepPhase("writing samples", "driver"),
    "switch": StepPhase("switching devices", "both"),
    "old_log_prob": StepPhase("old log-probs", "ranks"),
    "ref": StepPhase("reference log-probs", "ranks"),
    "teacher": StepPhase("teacher log-probs", "ranks"),
    "values": StepPhase("values", "ranks"),
    "adv": StepPhase("advantages", "ranks"),
    "update_critic": StepPhase("critic update", "ranks"),
    "update_actor": StepPhase("actor update", "ranks"),
    "save_checkpoint": StepPhase("saving", "ranks"),
    "pause": StepPhase("pausing engines", "engines"),
    "settle": StepPhase("waiting to sync", "engines"),
    "reshard": StepPhase("weight sync", "both"),
    "testing": StepPhase("validation", "engines"),
    "outside": StepPhase("other", "driver"),
}
STACKED_STEPS = 500
LANES_OF_A_KIND = 8


# ---------------------------------------------------------------- a step


def step_times(run: RunRecord) -> PageSection | None:
    """Makes the section with phases over steps, and two steps as lanes."""
    names = _phases(run)
    if not names:
        return None
    stack = Stack(
        "phases",
        "Seconds of a step by phase",
        "s",
        tuple(Series(PHASES[n].words, f"stack/{n}", color=color_of(n)) for n in names),
    )
    time = run.curves["timing_s/step"]
    usual = int(time.steps[np.argsort(time.values)[len(time) // 2]])
    slowest = int(time.steps[time.values.argmax()])
    lanes = [_step_lanes(run, usual, f"Typical step ({usual})")]
    if slowest != usual:
        lanes.append(_step_lanes(run, slowest, f"Longest step ({slowest})"))
    return PageSection("steps", "Where the time goes", (stack, *lanes, _phase_table(run, names), *_profiles(run)))


def _profiles(run: RunRecord) -> tuple[Block, ...]:
    """Says where the traces of profiled steps are, a line each."""
    folder = RunDir(run.path).profiles
    files = sorted(folder.glob("step-*/rank-*.json.gz"))
    if not files:
        return ()
    rows = tuple((str(file.relative_to(run.path)), "a trace: open it at https://ui.perfetto.dev") for file in files)
    return (Facts(rows),)


def _phases(run: RunRecord) -> list[str]:
    if "timing_s/step" not in run.curves:
        return []
    return [
        name for name in PHASES if f"timing_s/{name}" in run.curves and run.curves[f"timing_s/{name}"].values.max() > 0
    ]


def stacked_curves(run: RunRecord) -> dict[str, Curve]:
    """Returns `stack/PHASE` over the same steps, at most STACKED_STEPS, evenly chosen."""
    steps = run.curves["timing_s/step"].steps
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), STACKED_STEPS)).astype(int))]
    rows = [run.by_step[int(step)] for step in chosen]
    curves = {}
    for name in _phases(run):
        seconds = [row.get(f"timing_s/{name}") or 0.0 for row in rows]
        curves[f"stack/{name}"] = Curve(chosen, np.array(seconds, np.float64), len(steps))
    return curves


def _step_lanes(run: RunRecord, step: int, title: str) -> Lanes:
    row = run.by_step[step]
    at = 0.0
    spans = []
    for name in PHASES:
        seconds = row.get(f"timing_s/{name}") or 0.0
        if seconds > 0:
            spans.append((name, at, at + seconds))
            at += seconds
    note = (
        "Phases in the loop's order with their measured seconds; what each process does within a phase is not recorded."
    )
    if run.settings.text("trainer.schedule", "sync") != "sync":
        note += (
            " Generation runs ahead of training, so engines work in all phases: generation is the time that training "
            "waits for them."
        )
    return Lanes(title, "s", tuple(_lane_rows(run, spans)), max(at, row.get("timing_s/step") or 0.0), note)


def _lane_rows(run: RunRecord, spans: list[tuple[str, float, float]]) -> Iterator[tuple[str, tuple[Bar, ...]]]:
    yield "the loop", tuple(Bar(PHASES[name].words, a, b, name) for name, a, b in spans)
    if run.plan is None:
        return
    layout = run.plan["layout"]
    ranks = {(r["node"], r["device"]): f"rank {r['rank']}" for r in layout["ranks"]}
    workers = {(w["node"], w["device"]): f"engine {w['engine']} worker {w['worker']}" for w in layout["workers"]}
    colocated = layout["placement"] != "separate"
    groups = [(ranks, {"ranks", "both", *(("engines",) if colocated else ())})]
    if not colocated:
        groups.append((workers, {"engines", "both"}))
    for devices, who in groups:
        bars = tuple(Bar(PHASES[name].words, a, b, name) for name, a, b in spans if PHASES[name].works in who)
        for (node, device), name in list(devices.items())[:LANES_OF_A_KIND]:
            label = f"{name} + {workers.get((node, device), 'engine')}" if colocated else name
            yield f"{_device_label(node, device)}: {label}"[:40], bars
        if len(devices) > LANES_OF_A_KIND:
            yield f"... and {len(devices) - LANES_OF_A_KIND} devices alike", bars


def _device_label(node: int, device: int) -> str:
    return f"node {node}, device {device}"


def _phase_table(run: RunRecord, names: list[str]) -> Table:
    total = run.curves["timing_s/step"].values.sum()
    rows = []
    for name in names:
        values = run.curves[f"timing_s/{name}"].values
        quantiles = (np.median(values), np.quantile(values, 0.95), values.max())
        rows.append((PHASES[name].words, *(f"{v:.3g}" for v in quantiles), f"{values.sum() / total:.1%}"))
    return Table(
        ("phase", "median s", "95th percentile s", "longest s", "share of all steps"), tuple(rows), (1, 2, 3, 4)
    )


# ---------------------------------------------------------------- the plan


def plan_compared(run: RunRecord) -> PageSection | None:
    """Makes the section that compares the plan with the run after its first steps, as the run did it."""
    kept = _comparisons(RunDir(run.path).compared)
    if not kept:
        return None
    step = max(kept)
    rows = kept[step]
    causes = tuple(f"{row.what}: {row.cause}." for row in rows if row.cause)
    blocks: list[Block] = [
        Paragraph(
            f"Seconds are medians of steps 2 to {step}. Predictions are for the measured lengths; a range is what the "
            "plan's assumptions leave open. mrl plan CONFIG --calibrate RUN fits them to this run."
        ),
        Table(
            ("what", "planned", "for these lengths", "range", "measured", ""),
            tuple(_compared_cells(row) for row in rows),
            (1, 2, 3, 4),
            caption=f"After step {step}",
        ),
    ]
    if causes:
        blocks.append(Items(causes))
    return PageSection("plan", "Plan and run", tuple(blocks))


def _comparisons(file: Path) -> dict[int, list[PlanRow]]:
    """Returns the comparisons by step; the later one of a step that was trained again. Damaged lines count as none."""
    found = {}
    if not file.is_file():
        return found
    for line in read_text(file, LINES_BYTES, errors="replace").splitlines():
        with suppress(ValueError, LookupError, TypeError):
            kept = parse_json(line)
            found[int(kept["step"])] = [PlanRow(**row) for row in kept["rows"]]
    return found


def _compared_cells(row: PlanRow) -> tuple[str, ...]:
    band = f"{in_units(row.low, row.unit)} to {in_units(row.high, row.unit)}"
    numbers = (in_units(row.planned, row.unit), in_units(row.predicted, row.unit), band)
    off = ""
    if row.is_off:
        off = "ABOVE its range" if row.measured > row.high else "below its range"
    return (row.what, *numbers, in_units(row.measured, row.unit), off)


# ---------------------------------------------------------------- memory


def memory(run: RunRecord) -> PageSection | None:
    """Makes the section that compares planned memory of the fullest device, by phase, with measurements."""
    if run.plan is None:
        return None
    return PageSection("memory", "Memory", tuple(_memory_blocks(run, run.plan["memory"], run.plan["device"])))


def _memory_blocks(run: RunRecord, planned: dict, device: dict) -> Iterator[Block]:
    phases = planned["phases"]
    rows = []
    for name, phase in phases.items():
        at = 0.0
        bars = []
        for term, size in sorted(phase["terms"].items(), key=lambda t: -t[1]):
            if size:
                bars.append(Bar(term.replace("_", " "), at, at + size / GIB, term))
                at += size / GIB
        rows.append((name.replace("_", " "), tuple(bars)))
    fullest = max(phase["bytes"] for phase in phases.values()) / GIB
    most = max(phase["device_bytes"] for phase in phases.values()) / GIB
    yield Lanes(
        f"Planned for the fullest {device['name']} device, by phase",
        "GiB",
        tuple(rows),
        fullest,
        f"The device has {most:.3g} GiB to plan with.",
    )
    table = [
        (
            name.replace("_", " "),
            f"{p['bytes'] / GIB:.3g}",
            f"{p['device_bytes'] / GIB:.3g}",
            "fits" if p["fits"] else f"does not fit: {p['change']}",
        )
        for name, p in phases.items()
    ]
    yield Table(("phase", "planned GiB", "device GiB", "verdict of the plan"), tuple(table), (1, 2))
    yield from _measured(run, planned, fullest)


def _measured(run: RunRecord, planned: dict, fullest: float) -> Iterator[Block]:
    names = [
        name
        for name in ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb", "perf/cpu_memory_used_gb")
        if name in run.curves
    ]
    if "perf/max_memory_allocated_gb" in run.curves:
        most = run.curves["perf/max_memory_allocated_gb"].values.max()
        of_a_rank = max(phase_bytes(run.plan, name).holders[ACTOR] for name in planned["phases"]) / GIB
        over = most > of_a_rank
        found = "within the plan"
        if over:
            found = f"ABOVE the plan by {most - of_a_rank:.2g} GiB"
        yield Paragraph(
            f"Measured on the fullest rank: {most:.3g} GiB allocated at most, {found} of {of_a_rank:.3g} GiB for "
            "ranks, without engines that share their devices.",
            "warn" if over else "good",
        )
    else:
        host = planned["host"]["bytes_per_node"] / GIB
        yield Paragraph(
            "This device has no memory of its own. The measured value is all memory in use on the host; "
            "planned for the "
            f"run's processes are {host:.3g} GiB of a node beside the devices' {fullest:.3g} GiB each."
        )
    if names:
        yield Chart("memory-measured", "Memory measured", "GiB", tuple(Series(in_words(name), name) for name in names))


# ---------------------------------------------------------------- the weight sync


def sync_proof(run: RunRecord) -> PageSection | None:
    """Makes the section on whether engines provably held the trainer's weights, and the cost."""
    verified = run.curves.get("reshard/verified")
    if verified is None:
        return None
    return PageSection("sync", "Weight sync", tuple(_sync_blocks(run, verified)))


def _sync_blocks(run: RunRecord, verified: Curve) -> Iterator[Block]:
    every = run.settings.text("reshard.verify_every", "?")
    proved = int((verified.values == 1).sum())
    unproved = verified.steps[verified.values != 1]
    read_back = (
        f"Read back from the engines and equal to what the ranks sent: {proved} of {len(verified)} syncs "
        f"(reshard.verify_every {every})."
    )
    yield Paragraph(read_back, "good" if not len(unproved) else "plain")
    if len(unproved):
        yield Paragraph(
            f"Not read back after steps {_some(unproved)}; digests of what arrived in load layout were compared in "
            "every one, and a "
            "version is served only once all ranks agree."
        )
    planned = {}
    if run.plan:
        planned = run.plan["reshard"]
    yield Facts(tuple(_sync_facts(run, planned)))
    yield Chart("sync-seconds", "Seconds of a sync", "s", (Series("seconds", "reshard/seconds"),))


def _sync_facts(run: RunRecord, planned: dict) -> Iterator[tuple[str, str]]:
    last = run.by_step[int(run.curves["reshard/verified"].steps[-1])]
    moved = last.get("reshard/bytes_moved")
    required = last.get("reshard/bytes_required")
    if moved is not None and required:
        yield (
            "bytes",
            f"{_bytes(moved)} moved, {_bytes(required)} required ({moved / required:.3g} times the lower bound)",
        )
    if (seconds := run.curves.get("reshard/seconds")) is not None:
        guess = ""
        if planned:
            guess = f"; planned {planned['predicted_seconds']:.3g}, wire alone at least {planned['bound_seconds']:.3g}"
        yield "seconds", f"median {np.median(seconds.values):.3g}, longest {seconds.values.max():.3g}{guess}"
    if (staging := last.get("reshard/peak_staging_bytes")) is not None:
        budget = ""
        if planned:
            budget = f" of a budget of {_bytes(planned['budget_bytes'])} a round"
        yield "staging", f"{_bytes(staging)} at most on a rank{budget}"
    if "reshard/engines" in last:
        yield "receivers", f"{last['reshard/engines']:.0f} engines, {last['reshard/workers']:.0f} workers"
    resynced = run.curves.get("reshard/resynced")
    yield "repeated", f"{0 if resynced is None else resynced.values.sum():.0f} syncs, after a failure"
    yield "version held now", f"{last.get('reshard/weight_version', float('nan')):.0f} after step {run.last_step}"
    if planned:
        yield "plan of the sync", planned["hash"]


def _some(numbers: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    if len(numbers) <= 8:
        return shown
    return f"{shown} and {len(numbers) - 8} more"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


# ---------------------------------------------------------------- staleness


def staleness(run: RunRecord) -> PageSection | None:
    """Makes the section on the age of trained tokens, if generation runs ahead."""
    ages = run.matching(r"training/off_policy/trajectory_staleness/(mean|max|min)")
    if not ages:
        return None
    bound = run.settings.text("trainer.max_staleness", "?")
    schedule = run.settings.text("trainer.schedule", "?")
    oldest = max(run.curves[name].values.max() for name in ages)
    blocks: list[Block] = [
        Paragraph(
            f"Schedule {schedule}, trainer.max_staleness {bound}: the oldest token trained on was {oldest:.0f} steps "
            "old."
        ),
        Chart(
            "staleness-age",
            "Age of a response's oldest token",
            "steps",
            tuple(Series(in_words(name), name) for name in ages),
        ),
    ]
    for id, title, pattern in (
        ("staleness-versions", "Weight versions that generated a response", r"async/versions_per_sample"),
        ("staleness-ahead", "Groups ahead, and dropped", r"async/(groups_ahead|dropped_groups)"),
    ):
        if names := run.matching(pattern):
            blocks.append(Chart(id, title, "", tuple(Series(in_words(name), name) for name in names)))
    return PageSection("staleness", "Staleness", tuple(blocks))


# ---------------------------------------------------------------- drafts


def drafts(run: RunRecord) -> PageSection | None:
    """Makes the section on what speculative decoding gave, if engines drafted."""
    accepted = run.curves.get("drafts/acceptance")
    given = run.curves.get("drafts/tokens_per_step")
    if accepted is None or given is None:
        return None
    first, last = accepted.values[0], accepted.values[-1]
    said = (
        f"Of the drafted tokens {first:.1%} were accepted at step {accepted.steps[0]} and {last:.1%} at step "
        f"{accepted.steps[-1]}; a decode step gave a drafted response {given.values.mean():.2f} tokens."
    )
    planned = run.plan["times"].get("drafts") if run.plan else None
    if planned and planned.get("seconds"):
        said += (
            f" The plan took {planned['tokens_per_step']:.2f}, and with it {planned['seconds']:.3g} s of generation "
            f"instead of {planned['seconds_without']:.3g}."
        )
    at = run.matching(r"drafts/acceptance_at/\d+")
    charts = (
        Chart(
            "drafts-accepted",
            "Drafted tokens accepted, by position",
            "share",
            tuple(Series(in_words(n), n) for n in at),
        ),
        Chart("drafts-given", "Tokens of a decode step", "tokens", (Series("tokens", "drafts/tokens_per_step"),)),
    )
    return PageSection("drafts", "Drafts", (Paragraph(said), *charts))


# ---------------------------------------------------------------- incidents


def incidents(run: RunRecord) -> PageSection:
    """Makes the list of what went wrong, by step, with suspicious log lines if the run ended badly."""
    rows = sorted(_incidents(run), key=lambda row: row[0])
    table = Table(("step", "what", "meaning"), tuple((str(step), what, meaning) for step, what, meaning in rows), (0,))
    blocks: list[Block] = [table] if rows else [Paragraph("No incident is recorded.")]
    blocks += [Items(tuple(_starts(run)))] if run.attempts else []
    if not run.finished and not run.running:
        tails = run.log_tails()
        blocks += [
            Text("\n".join(lines), f"logs/{name}, its last lines that report trouble") for name, lines in tails.items()
        ]
    return PageSection("incidents", "Incidents", tuple(blocks))


_COUNTED = {
    "reshard/resynced": "weight syncs failed at first and were repeated",
    "actor/skipped_updates": "updates were skipped: gradient not finite, or every token rejected",
    "reward/failed": "rewards failed; they counted as reward.failure_score",
    "rollout/stale_prefix_tokens": "prompts were answered from a cache of older weights, which is a defect",
}
_GROWING = {
    "training/failed_saves": "checkpoints were not saved; those before stayed",
    "training/failed_sample_files": "files of samples were not written: the disk took no more",
    "async/dropped_groups": "groups were generated and not trained on",
}


def _incidents(run: RunRecord) -> Iterator[tuple[int, str, str]]:
    for name, meaning in _COUNTED.items():
        curve = run.curves.get(name)
        if curve is not None and (curve.values > 0).any():
            first = int(curve.steps[curve.values > 0][0])
            yield (
                first,
                f"{name} {curve.values.sum():g} in {int((curve.values > 0).sum())} steps",
                f"{meaning} (first in this step)",
            )
    for name, meaning in _GROWING.items():
        curve = run.curves.get(name)
        if curve is not None and curve.last > 0:
            yield int(curve.steps[curve.values > 0][0]), f"{name} {curve.last:g}", f"{meaning} (first in this step)"
    for attempt in run.attempts:
        if attempt.generated_again:
            lost = "of later steps, lost when an earlier start ended with its process or node"
            yield attempt.step, f"{attempt.generated_again} responses generated again", lost
        for step in attempt.restarted_at:
            yield (
                step,
                "ranks were lost and started again",
                "from the newest checkpoint; attempts.jsonl has the reason",
            )
        for engine, step in attempt.engines_restarted:
            yield step, f"{engine} was started again", "attempts.jsonl has the reason"
    for advice in run.advice:
        yield advice.step, "advice", advice.text
    for step, text in run.warnings:
        yield step, "warning", text
    yield from _lost_engines(run)
    steps = sorted(run.by_step)
    for before, after in pairwise(steps):
        if after - before > 1:
            yield after, "missing lines", f"metrics.jsonl lacks steps {before + 1} to {after - 1}"


def _lost_engines(run: RunRecord) -> Iterator[tuple[int, str, str]]:
    file = RunDir(run.path).lost_engines
    losses, damaged = whole_losses(file)
    for loss in losses:
        groups = "1 unfinished group"
        if len(loss.groups) != 1:
            groups = f"{len(loss.groups)} unfinished groups"
        prompts = ""
        if loss.groups:
            prompts = f": prompts {_some([group.prompt_id for group in loss.groups])}"
        yield loss.step, f"lost: {', '.join(loss.engines)}", f"{loss.why} ({groups}{prompts})"
    if damaged:
        meaning = "cannot be read; a run that resumes refuses the file"
        yield run.last_step, f"{file.name}: {damaged} damaged {'lines' if damaged > 1 else 'line'}", meaning


def _starts(run: RunRecord) -> Iterator[str]:
    for number, attempt in enumerate(run.attempts, 1):
        again = ""
        if attempt.generated_again:
            again = f", with {attempt.generated_again} responses generated again"
        begun = f"Start {number}: {attempt.began} on {attempt.host}, from step {attempt.step}{again}"
        if attempt.exit_code is not None:
            why = ""
            if attempt.message:
                why = f": {attempt.message}"
            yield f"{begun}; ended {attempt.ended} with exit code {attempt.exit_code}{why}"
        elif run.running and number == len(run.attempts):
            yield f"{begun}; it is running"
        else:
            yield f"{begun}; it wrote no end: the process was killed"


# ---------------------------------------------------------------- how to do it again


def reproducibility(run: RunRecord) -> PageSection:
    """Makes the section with hashes, seeds, versions and the command."""
    blocks: list[Block] = [Facts(tuple(_identity(run)))]
    if run.attempts:
        blocks.append(Text(shlex.join(run.attempts[-1].command), "command of the last start"))
        versions = run.attempts[-1].versions
        blocks.append(
            Table(("package", "version"), tuple(sorted(versions.items())), caption="versions of the last start")
        )
    again = f"mrl train {shlex.quote(str(RunDir(run.path).config))} --run-dir NEW"
    blocks.append(Text(again, "the same run again, from its resolved configuration"))
    return PageSection("reproducibility", "Reproducibility", tuple(blocks))


def _identity(run: RunRecord) -> Iterator[tuple[str, str]]:
    settings = run.settings
    yield "seed", settings.text("trainer.seed")
    yield "deterministic", settings.text("trainer.deterministic")
    yield "model", settings.text("model.path")
    yield "loss", next((line.removeprefix("loss: ") for line in settings.head if line.startswith("loss: ")), "")
    yield "training data", settings.text("data.train_files")
    yield "validation data", settings.text("data.val_files")
    if run.plan:
        yield "plan", run.plan["hash"]
        yield "plan of the weight sync", run.plan["reshard"]["hash"]
    if fingerprint := data_fingerprint(run):
        yield "prompts (fingerprint)", fingerprint
    yield "checkpoints", ", ".join(f"step-{step}" for step in run.checkpoints) or "none"


def data_fingerprint(run: RunRecord) -> str:
    """Returns the fingerprint of the training prompts from the newest checkpoint's manifest; "" if it is unreadable."""
    if not run.checkpoints:
        return ""
    try:
        file = RunDir(run.path).checkpoints / f"step-{run.checkpoints[-1]}" / "manifest.json"
        return str(read_json(file, strict=False)["trainer"]["data_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# ---------------------------------------------------------------- the head of the page


def card(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yields the facts below the title: what was trained, on what, when, for how long, and how it ended."""
    settings = run.settings
    yield "model", settings.text("model.path")
    yield "data", settings.text("data.train_files")
    if run.plan:
        layout = run.plan["layout"]
        devices = len({(device["node"], device["device"]) for part in ("ranks", "workers") for device in layout[part]})
        yield "devices", f"{devices} x {run.plan['device']['name']}, {layout['placement']}"
    else:
        yield "devices", settings.text("cluster.device")
    if run.attempts:
        first, last = run.attempts[0], run.attempts[-1]
        yield "started", first.began[:16].replace("T", " ")
        if last.ended and (spent := _seconds_between(first.began, last.ended)) is not None:
            yield "duration", f"{_duration(spent)}{f', {len(run.attempts)} starts' if len(run.attempts) > 1 else ''}"
    tokens = sum(row.get("perf/total_num_tokens") or 0 for row in run.by_step.values())
    if tokens:
        yield "tokens", f"{tokens:,.0f}"
    if run.attempts:
        yield "mrl", run.attempts[-1].versions.get("mrl", "unknown")
        code = run.attempts[-1].exit_code
        running = "running" if run.running else "killed"
        yield "exit code", running if code is None else str(code)


def _seconds_between(began: str, ended: str) -> float | None:
    try:
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    except (TypeError, ValueError):
        return None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s"
