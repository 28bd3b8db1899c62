"""The page that compares several runs."""

import re
from collections.abc import Iterator

import numpy as np

from mrl.tools.report.comparison import Comparison
from mrl.tools.report.metric_words import in_words
from mrl.tools.report.page import Block, Chart, Explorer, Items, Page, PageSection, Paragraph, Series, Table
from mrl.tools.report.run_record import RunRecord
from mrl.tools.report.sections import CHARTS, interval_of, unit_of
from mrl.tools.report.sections_run import PHASES, data_fingerprint
from mrl.tools.report.verdict import Tone, verdict


def compare_page(comparison: Comparison) -> Page:
    """Makes the page of a comparison."""
    names = list(comparison.runs)
    tone, words = headline(comparison)
    sections = (
        PageSection("verdict", "Verdict", (Paragraph(words, tone), *_verdict(comparison))),
        PageSection("settings", "Settings that differ", tuple(_settings(comparison))),
        PageSection("curves", "Curves", tuple(_curves(comparison))),
        PageSection("steps", "Where the time goes", (_times(comparison),)),
        PageSection("identity", "What was run", (_identity(comparison),)),
    )
    return Page(
        title=f"{names[0]} and {', '.join(names[1:])}",
        subtitle=f"{len(names)} runs, each compared with {names[0]}",
        sections=sections,
        curves={
            f"{label}|{name}": curve for label, run in comparison.runs.items() for name, curve in run.curves.items()
        },
        summary=_summary(comparison),
        headline=words,
    )


def headline(comparison: Comparison) -> tuple[Tone, str]:
    """Summarises the tests of validation scores."""
    first = next(iter(comparison.runs))
    if not comparison.tests:
        return "plain", "There are no validation scores of the same step to compare."
    better = [t.other for t in comparison.tests if t.difference.significant(t.level) and t.difference.mean > 0]
    worse = [t.other for t in comparison.tests if t.difference.significant(t.level) and t.difference.mean < 0]
    found = [
        f"{' and '.join(dict.fromkeys(who))} {how} {first}"
        for who, how in ((better, "beats"), (worse, "is worse than"))
        if who
    ]
    if not found:
        return "plain", "No run differs from the first by more than chance."
    words = f"{'; '.join(found)}, by more than chance on the validation prompts."
    if worse:
        return "plain", words
    return "good", words


def _verdict(comparison: Comparison) -> Iterator[Block]:
    if comparison.tests:
        yield Items(tuple(test.words() for test in comparison.tests))
        share = ""
        if len(comparison.tests) > 1:
            share = f", each at {comparison.tests[0].level:.2g}"
        yield Paragraph(
            f"{_counted(len(comparison.tests), 'test')} paired over prompts{share}. They compare these "
            "weights, not these settings: only further runs show how much another trainer.seed changes a score."
        )
    states = tuple(f"{name}: {verdict(run).headline}" for name, run in comparison.runs.items())
    yield Items((*states, *comparison.notes))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _settings(comparison: Comparison) -> Iterator[Block]:
    if not comparison.settings:
        yield Paragraph("None: the runs have the same configuration.")
        return
    rows = tuple((key, *values) for key, values in comparison.settings.items())
    yield Table(("key", *comparison.runs), rows)


def _curves(comparison: Comparison) -> Iterator[Block]:
    for spec in CHARTS:
        found = dict.fromkeys(
            name for pattern in spec.patterns for run in comparison.runs.values() for name in run.matching(pattern)
        )
        for metric in found:
            series = tuple(
                _series(label, run, metric) for label, run in comparison.runs.items() if metric in run.curves
            )
            id = f"compare-{re.sub('[^a-z0-9]+', '-', metric.lower())}"
            yield Chart(id, f"{spec.title}: {in_words(metric)}", unit_of(metric), series, spec.log, spec.note)
    names = sorted({name for run in comparison.runs.values() for name in run.curves})
    first = "critic/score/mean" if "critic/score/mean" in names else ""
    yield Explorer("any-metric", tuple(names), tuple((label, f"{label}|") for label in comparison.runs), first)


def _series(label: str, run: RunRecord, metric: str) -> Series:
    ends = interval_of(run, metric)
    return Series(label, f"{label}|{metric}", (f"{label}|{ends[0]}", f"{label}|{ends[1]}") if ends else None)


def _times(comparison: Comparison) -> Table:
    names = [f"timing_s/{phase}" for phase in PHASES]
    rows = [
        name
        for name in ("timing_s/step", *names, "perf/throughput")
        if any(name in run.curves for run in comparison.runs.values())
    ]
    cells = []
    for name in rows:
        cells.append((name, unit_of(name), *(_median(run, name) for run in comparison.runs.values())))
    return Table(("median of", "unit", *comparison.runs), tuple(cells), tuple(range(2, 2 + len(comparison.runs))))


def _median(run: RunRecord, name: str) -> str:
    if name in run.curves:
        return f"{np.median(run.curves[name].values):.3g}"
    return "(none)"


def _identity(comparison: Comparison) -> Table:
    runs = list(comparison.runs.values())
    rows = {
        "run directory": [str(run.path) for run in runs],
        "steps": [str(run.last_step) for run in runs],
        "recipe": [run.settings.recipe or "(none)" for run in runs],
        "seed": [run.settings.text("trainer.seed") for run in runs],
        "model": [run.settings.text("model.path") for run in runs],
        "prompts (fingerprint)": [data_fingerprint(run) or "(no checkpoint)" for run in runs],
        "plan": [run.plan["hash"] if run.plan else "(none)" for run in runs],
        "versions": [_versions(run) for run in runs],
    }
    return Table(("", *comparison.runs), tuple((name, *values) for name, values in rows.items()))


def _versions(run: RunRecord) -> str:
    named = {}
    if run.attempts:
        named = run.attempts[-1].versions
    return ", ".join(f"{name} {version}" for name, version in sorted(named.items())) or "(not written down)"


def _summary(comparison: Comparison) -> Table:
    """Returns the last value of every chart's metric, for browsers without scripts."""
    found = dict.fromkeys(
        name
        for spec in CHARTS
        for pattern in spec.patterns
        for run in comparison.runs.values()
        for name in run.matching(pattern)
    )
    rows = []
    for name in found:
        rows.append((name, *(_last(run, name) for run in comparison.runs.values())))
    return Table(("metric, last", *comparison.runs), tuple(rows), tuple(range(1, 1 + len(comparison.runs))))


def _last(run: RunRecord, name: str) -> str:
    if name in run.curves:
        return f"{run.curves[name].last:.4g}"
    return ""
