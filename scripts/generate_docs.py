#!/usr/bin/env python
"""Writes docs/{configuration,layouts,refusals,metrics,from_verl,tuning,efficiency,predictions,known_problems,evidence,
faults}.md from the schema, the rules, the spec tables, docs/source, docs/results and the rows of scripts/evidence.

    python scripts/generate_docs.py [--check]     with --check writes nothing and exits 1 when a page is out of date

Raises ValueError when a text names a key or a metric that does not exist, or a field has no text: so the pages cannot
go stale.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import yaml
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parent))
import published_runs

from mrl.algo import spec
from mrl.config.load import allowed_text, load_config
from mrl.config.schema import OTHER_LAYOUTS, RunConfig, Section, leaf, schema_keys
from mrl.config.section import notes_of, section_of
from mrl.config.yaml_tree import dump_value
from mrl.plan.devices import USUAL, faster, slower
from mrl.platforms.hosting import get_hosting
from mrl.record.spec import all_metrics, metric_spec
from mrl.tools.import_verl.handlers import HANDLERS
from mrl.tools.import_verl.keys import ROWS

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "scripts" / "evidence"))
import evidence_page  # noqa: E402
import fault_rows  # noqa: E402
import rule_pages  # noqa: E402

SOURCE = ROOT / "docs" / "source"
VERL_SCRIPTS = ROOT / "docs" / "results" / "verl_scripts.json"  # scripts/evidence/verl_scripts.py
_COLUMNS = ("key", "may be", "default", "meaning", "advice")
_MADE = (
    "<!-- made by scripts/generate_docs.py; edit mrl/config/schema_*.py, mrl/record/metrics.yaml, the spec tables or "
    "docs/source instead -->\n"
)


def sections(
    section: type[Section] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, type[Section], dict[str, FieldInfo]]]:
    """(dotted name, class, fields that are no sections) of every section, outer ones first;
    other layouts are as `actor.layout`.
    """
    inner = {name: below for name, field in section.model_fields.items() if (below := section_of(field.annotation))}
    plain = {name: field for name, field in section.model_fields.items() if name not in inner}
    yield prefix.rstrip("."), section, plain
    for name, below in inner.items():
        if f"{prefix}{name}" not in OTHER_LAYOUTS:
            yield from sections(below, f"{prefix}{name}.")


@cache
def keys() -> set[str]:
    """Every key of the configuration, sections left out; those of other layouts are as those of `actor.layout`."""
    return {key for key in schema_keys() if not key.startswith(tuple(f"{name}." for name in OTHER_LAYOUTS))}


def configuration() -> str:
    """Every field with what it may be, its default, meaning and advice."""
    page = [
        _MADE,
        "# Configuration\n",
        "Every key of a preset, a recipe or `--set`. `mrl validate CONFIG --resolved` prints all values, and where "
        "each comes from. A relative path begins in the current directory.\n",
    ]
    for name, section, fields in sections():
        if fields:
            page += [f"## {name}\n", f"{' '.join(section.__doc__.split())}\n", *_table(_COLUMNS)]
            page += [_row(*_field(f"{name}.{field}", info)) for field, info in fields.items()]
            page.append("")
    page += ["## Names\n", *_names("Advantages", "algorithm.adv_estimator", spec.ADVANTAGES)]
    page += _names("Policy losses", "algorithm.policy_loss.loss_mode", spec.LOSSES)
    page += _names("Aggregations", "algorithm.policy_loss.loss_agg_mode", spec.AGGREGATIONS)
    return "\n".join(page)


def _field(key: str, info: FieldInfo) -> tuple[str, ...]:
    if not info.description:
        raise ValueError(f"{key} has no meaning; state it with `key` (mrl/config/section.py)")
    notes = notes_of(info)
    may_be = f"{allowed_text(info)} ({notes.unit})" if notes.unit else allowed_text(info)
    default = "required" if info.is_required() else f"`{_shown(info.get_default(call_default_factory=True))}`"
    return f"`{key.rpartition('.')[2]}`", may_be, default, info.description, notes.advice


def _shown(value: Any) -> str:
    return dump_value(list(value) if isinstance(value, tuple) else value)


def _names(title: str, key: str, table: dict[str, Any]) -> list[str]:
    return [
        f"### {title} (`{key}`)\n",
        *_table(("name", "what it is")),
        *(_row(f"`{n}`", s.summary) for n, s in table.items()),
        "",
    ]


def metrics() -> str:
    """Every metric with unit, reduction and how to read it."""
    kinds = "How parts become one number: sum, mean over weights (tokens or samples), max, min, or the last."
    page = [
        _MADE,
        "# Metrics\n",
        f"`metrics.jsonl` has one object a step. {kinds}\n",
        *_table(("metric", "unit", "reduced by", "meaning", "how to read it")),
    ]
    page += [
        _row(f"`{metric.name}`", metric.unit, metric.kind, metric.summary, metric.reading) for metric in all_metrics()
    ]
    return "\n".join([*page, ""])


_FROM_VERL = (
    "* **Nothing is lost silently.** Text that cannot be read, a branch that cannot be decided and a missing "
    "`--config-name` file are named, with the variable to give by `--set NAME=VALUE`. Such an import is never "
    "`valid`. Misspelt keys are named with the nearest one of verl's releases.",
    "* **Engines.** vLLM generates in place of SGLang and TensorRT-LLM, with the same weights, sampling and limits.",
    "* **Devices.** A script that looks for NPUs is read as on GPUs; `--set DEVICE=npu` chooses the other branch.",
    "* **Asynchronous trainers** become `trainer.schedule: one_step_off` or `bounded`. A step is all that "
    "verl trains on between two weight syncs. verl's staleness threshold is rounded up to whole steps. Old log-probs "
    "are recomputed, where verl uses the engine's, and a correction weighs the difference.",
    "* **Rewards.** verl's `seq_reward` is `reward` here. Async functions are refused: call yours with `asyncio.run`.",
    "* **Your code** is loaded only from files that a key names: rewards, losses (`algorithm.policy_loss.custom`), "
    "advantages (`algorithm.custom_advantage`), tools and environments (`rollout.turns.path`).",
    "* **Resuming.** verl's default `resume_mode: auto` is kept: a second start resumes. mrl's own default refuses a "
    "directory with a run unless `--resume` is given.",
    "* **Filters.** `top_p` and `top_k` of training responses are kept if the loss uses training's old log-probs "
    "(verl's default), not the engine's. A correction or `bypass_mode` turns them off, with a warning.\n",
)


def from_verl() -> str:
    """Where each key of verl's goes."""
    page = [
        _MADE, "# From verl\n",
        "`mrl import-verl SCRIPT` imports a launch script and reports every key ([the "
        "answers](tutorial/from_verl.md)). A key that ends in a dot covers everything below it. Implied: mrl always "
        "does so. Not applicable: nothing is to be set. `only` X: any other value is reported, not carried over. By "
        "value: the last column explains each value.\n",
        *_FROM_VERL,
        "## Unsupported keys and values\n",
        *_table(("verl", "here", "why")),
    ]  # fmt: skip
    other = ["", "## All other keys\n", *_table(("verl", "here", "why"))]
    for key, row in sorted(ROWS.items()):
        here = {
            "to": f"`{row.to}`",
            "implied": "implied",
            "not_applicable": "not applicable",
            "unsupported": "**unsupported**",
        }
        said = here.get(row.kind) or _targets(HANDLERS[key]) or "by value"
        if said == "by value" and not row.why:
            raise ValueError(f"{key} of verl's says nowhere what becomes of which values: ROWS")
        if row.said:
            said = "only " + " or ".join(f"`{value}`" for value in dict.fromkeys(row.said))
        if (
            row.kind == "to"
            and row.to not in keys()
            and not row.to.startswith(("rollout.engine_kwargs", "model.override", "actor.optim.override"))
        ):
            raise ValueError(f"verl's {key} goes to {row.to}, which is no key")
        (page if row.kind == "unsupported" else other).append(_row(f"`{key}`", said, row.why))
    return "\n".join([*page, *other, *_public_scripts(), ""])


_REFUSED = {  # what the first reason of a refusal has -> what it comes to
    "config.json does not exist": "no `config.json` of the model at hand (give a folder by `--set`)",
    "rollout.gpu_memory_utilization": "the memory of an engine",
    "unknown name": "an estimator or loss that mrl lacks (GPG, ReMax, OTB)",
    "rollout.n: must be at least": "an estimator that compares responses, and one response a prompt",
    "--config-path": "a configuration file of verl's that was not given (`--config-path`)",
    "starts ": "no RL training",
    "cannot be read as shell": "unreadable shell",
    "cluster.device": "a model that mrl does not run on NPUs",
}


def _refusals(scripts: list[dict]) -> Iterator[str]:
    """Counts the refused scripts by what their first reason comes to, most frequent first."""
    reasons = [row["why"].partition("; ")[0] for row in scripts if row["verdict"] == "refused"]
    found = Counter(next((said for has, said in _REFUSED.items() if has in why), "other rules") for why in reasons)
    yield from _table(("first reason of a refusal", "scripts"))
    yield from (_row(said, str(count)) for said, count in found.most_common())
    yield ""


def _public_scripts() -> Iterator[str]:
    """Which of verl's own launch scripts come through, and why the others do not."""
    found = json.loads(VERL_SCRIPTS.read_text(encoding="utf-8"))
    counts, answers = found["counts"], [row["verdict"] for row in found["scripts"]]
    commits = ", ".join(f"{name} at {commit[:12]}" for name, commit in found["commits"].items())
    pairs = sum(counts.get(name, 0) for name in ("same", "unknown, told", "absent, told", "LOST", "DIFFERENT"))
    yield "\n## Public scripts\n"
    yield (
        f"The {len(answers)} launch scripts of {commits}, read by the import and compared with bash, where stubs in "
        "place of python and ray record their arguments (`python scripts/evidence/verl_scripts.py`). bash passes "
        f"{pairs:,} key=value pairs: {counts['same']:,} are "
        f"read alike, {pairs - counts['same'] - counts.get('LOST', 0) - counts.get('DIFFERENT', 0)} depend on "
        f"variables that the script does not set and are named, {counts.get('LOST', 0)} are lost and "
        f"{counts.get('DIFFERENT', 0)} differ silently. Answers: "
        + ", ".join(f"{answers.count(name)} {name}" for name in ("valid", "carried with losses", "refused"))
        + ".\n"
    )
    yield from _refusals(found["scripts"])
    yield from _table(("script", "answer", "why, the first reason"))
    for row in found["scripts"]:
        why = row["why"].partition("; ")[0].replace("`", "")
        why = f"`{why[:117]}...`" if len(why) > 120 else f"`{why}`" if why else ""
        yield _row(f"{row['repository']}: {row['path']}", row["verdict"], why)


def _targets(handler: Callable) -> str:
    """Our keys that a handler of mrl/tools/import_verl/handlers.py names, in its own strings or in those of its module;
    "" for none.
    """
    names = handler.__code__.co_names
    said = {
        text for text in [*_strings(handler.__code__), *map(handler.__globals__.get, names)] if isinstance(text, str)
    }
    below = {text + "*" for text in said if text.endswith(".") and any(key.startswith(text) for key in keys())}
    found = sorted(said & keys() | below)
    return f"{', '.join(f'`{key}`' for key in found)}; the import says why" if found else ""


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _strings(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (item for item in constant if isinstance(item, str))


def tuning() -> str:
    """Goals, and what to turn in which order."""
    page = [
        _MADE,
        "# Tuning\n",
        "What to turn, in which order. Every key is explained in [configuration.md](configuration.md).\n",
    ]
    for goal in _source("tuning"):
        page += [f"## {goal['goal']}\n", f"{goal['intro']}\n"]
        for number, step in enumerate(goal["steps"], 1):
            _check_keys(step["keys"], "tuning.yaml")
            page.append(f"{number}. {', '.join(f'`{key}`' for key in step['keys'])}: {step['text']}")
        page.append("")
        _check_metrics(goal["intro"] + "".join(step["text"] for step in goal["steps"]))
    return "\n".join(page)


def efficiency() -> str:
    """Switches that make an update faster, one a row."""
    page = [
        _MADE,
        "# Efficiency of an update\n",
        "What makes an update of a mixture of experts faster, with Megatron-core 0.16.1 (0.17.0 has the same "
        "restrictions). Figures of one H100: [evidence](evidence.md).\n",
        "| switch | set by | from | refused | presets | the plan counts |",
        "|---|---|---|---|---|---|",
    ]
    rows = map(_efficiency_row, _source("efficiency"))
    return "\n".join([*page, *rows, "", _switches_of_devices(), "", _TOKENS, "", _DEEPEP, ""])


def _switches_of_devices() -> str:
    lists = []
    for device in ("cuda", "npu", "cpu"):
        names = [f"`{key.rpartition('.')[2]}`" for key in get_hosting(device).switches]
        none = "none, since overlapped communication would take cores from computing"
        lists.append(f"{device}: {', '.join(names) or none}")
    return (
        "**`mrl init` and presets turn on what costs nothing.** `mrl plan --search` counts the overlaps. "
        f"{'; '.join(lists)}. What a rule refuses for a model is left out. DeepEP is off, too; the search prints a "
        "step's seconds with it where experts span nodes."
    )


_TOKENS = (
    "**Small micro-batches wait for the host.** On one H100 with 16 experts a rank, launching a layer of 30B took "
    "as long for 8,192 tokens as for 16,384. Tokens a second rose with `actor.ppo_max_token_len_per_gpu` up to 32,768, "
    "so recomputing activations may be cheaper than small micro-batches. `launch_us` of "
    "`scripts/hardware/run.sh cuda actor_8k` measures your host.\n\n"
    "**CUTLASS grouped GEMM is off by default.** `model.grouped_gemm: cutlass` made an update of 8,192 tokens "
    "1.55 times as fast on one H100, but its numbers are not yet compared with Hugging Face's on a device."
)

_DEEPEP = "**DeepEP has no pinned build.** The right commit depends on the cluster: build it there."


def _efficiency_row(row: dict) -> str:
    settings = ", ".join(
        f"`{key.rpartition('.')[2]}: {dump_value(value)}`" for key, value in row.get("set", {}).items()
    )
    where = f"`{row['source']['file']}`: {row['source']['text']}"
    counted = ", ".join(row.get("plan", [])) or "nothing"
    return f"| {row['switch']} | {settings or 'nothing'} | {where} | {row['refused']} | {_with(row)} | {counted} |"


def _with(row: dict) -> str:
    found = [name for name in sorted(presets()) if row.get("set") and is_set(presets()[name], row["set"])]
    return ", ".join(found) or ("none" if "set" in row else "all")


@cache
def presets() -> dict[str, RunConfig]:
    """Of every preset by MODEL/CLUSTER what it comes to."""
    files = (ROOT / "parallel_configs").glob("*/*.yaml")
    return {f"{file.parent.name}/{file.stem}": load_config(file).config for file in files}


def is_set(config: RunConfig, wanted: dict[str, Any]) -> bool:
    """Whether a configuration has these values, under its keys or those of `override_*`."""
    return all(setting_of(config, key) == value for key, value in wanted.items())


def setting_of(config: RunConfig, key: str) -> Any:
    """The value of a key, or of a field of an `override_*` key; None where that is not given."""
    above, _, name = key.rpartition(".")
    return leaf(config, above).get(name) if above.rpartition(".")[2].startswith("override_") else leaf(config, key)


def predictions() -> str:
    """Published runs beside what is predicted of them, and where the constants are from."""
    page = [
        _MADE,
        "# Predictions against published runs\n",
        "What `mrl plan` predicts for published runs (`python scripts/published_runs.py`). Low and high take every "
        "constant at the better or worse end of its range. Two constants were fitted to NeMo-RL's runs, which are "
        "therefore no independent check: `sequence_host` (vLLM's host time for each sequence) and `rest` (the "
        "remainder of a step). No run of mrl on several devices has been compared. "
        "A decode step is one token of every sequence; an update is one optimizer step.\n",
        *_table(("run", "published", "low", "expected", "high", "error", "source", "missed because")),
    ]
    page += [_row(*_prediction(run)) for run in published_runs.compared()]
    page += [
        "",
        "## Drafts\n",
        "How many times as fast generation is with speculative decoding (`rollout.speculation`) as without.\n",
        *_table(("run", "published", "predicted", "error", "source", "assumed", "missed because")),
    ]
    page += [_row(*_drafts(run)) for run in published_runs.compared_drafts()]
    page += [
        "",
        "## Constants\n",
        "One value for all runs. Only `logit_passes` is 3 for pre-training, whose loss reads logits in 16 bits. "
        "The named check of `scripts/hardware` measures a constant; the H100's values are in "
        "`docs/results/hardware/h100.jsonl`.\n",
        *_table(("constant", "value", "low", "high", "one H100", "from", "check")),
    ]
    page += [_row(*_constant(row)) for row in _source("assumptions")]
    page += [
        "",
        "## After calibrations\n",
        "`mrl plan --calibrate` fits constants to your runs and keeps samples of those that the runs cannot "
        "pin down. `mrl plan --search` ranks layouts by their mean over these samples. It proposes as a trial the run "
        "with the largest expected improvement (Jones, Schonlau and Welch 1998).",
        "",
        *_calibrations(),
        "",
        *_on_cores(),
    ]
    return "\n".join([*page, ""])


def _calibrations() -> list[str]:
    """Says what simulations of two calibrations gave."""
    return [
        "We simulated clusters by drawing constants at random (`tests/unit/test_calibration.py`, marked long). "
        "The first run is the plan's, the second the proposed trial, the third the fastest by both. Columns: draws; "
        "how many are within 5 % of the best layout; how much slower the worst one is; what the trial costs, in shares "
        "of a step.",
        "",
        *_table(("cluster", "draws", "first run", "third run", "best of the three", "farthest", "trial, on average")),
        *(_row(*map(str, row.values())) for row in _source("calibrations")),
    ]


def _on_cores() -> list[str]:
    """Says how far a calibration by one batch is from others on a core."""
    phases = ("log_prob", "update")
    return [
        "We calibrated on one batch of the tiny model on one core, then predicted others. Errors are predicted over "
        "measured seconds (`tests/real/test_rank_seconds.py`); the goal is 15 %, which the second "
        "measurement, on a busy machine, misses twice. Log-prob time has a fixed part, which one "
        "calibration run cannot separate. Steps of whole runs after one run on a quiet machine (`python "
        "scripts/evidence/predicted_runs.py RUNS`, at `7bfcc7c4`): twice the batch +0 %, half -7 %, twice the length "
        "-6 %, DP2 EP2 -1 %; missed: a quarter of the micro-batch -16 %, PP2 +20 %. Not measured: the long world.",
        "",
        *_table(("changed", *phases, "commit", "date")),
        *(
            _row(row["what"], *(_of_goal(row[name]) for name in phases), row["commit"], str(row["date"]))
            for row in _source("core_predictions")
        ),
    ]


def _of_goal(percent: int) -> str:
    return f"{percent:+d} %{' (missed)' if abs(percent) > 15 else ''}"


def _prediction(run: "published_runs.Compared") -> tuple[str, ...]:
    row = run.row
    published, *sides = (f"{1000 * s:.3g} ms" if s < 0.1 else f"{s:.3g} s" for s in (
        row["seconds"], run.low, run.expected, run.high))  # fmt: skip
    goal = f" (goal {row['goal']:.0%})" if "goal" in row else ""
    source = f"{row['source']}. Counted with its path: {row['path']}" if "path" in row else row["source"]
    return row["run"], published, *sides, f"{run.error:+.0%}{goal}", source, row.get("missed", "")


def _drafts(run: "published_runs.ComparedDrafts") -> tuple[str, ...]:
    row = run.row
    goal = f" (goal {row['goal']:.0%})" if "goal" in row else " (goal: the right side of 1)"
    return (
        row["run"],
        f"{row['published']:g}",
        f"{run.predicted:.2f}",
        f"{run.error:+.0%}{goal}",
        row["source"],
        row["assumed"],
        row.get("missed", ""),
    )


def _constant(row: dict[str, str]) -> tuple[str, ...]:
    name, rung = row["name"], row.get("rung")
    check = f"`{rung}`" if rung else "none"
    if row["of"] == "devices":
        values = json.loads((ROOT / "mrl" / "plan" / "devices.json").read_text(encoding="utf-8"))
        return f"`{name}`", f"{values['h100-80g'][name]} (H100)", "", "", row.get("measured", ""), row["source"], check
    low, usual, high = (f"{getattr(side(USUAL), name):g}" for side in (faster, replace, slower))
    return (
        f"`{name}`",
        usual,
        low if low != usual else "",
        high if high != usual else "",
        row.get("measured", ""),
        row["source"],
        check,
    )


def known_problems() -> str:
    """Symptoms with cause and cure."""
    page = [
        _MADE,
        "# Known problems\n",
        "`mrl doctor` finds those that can be seen on a host, `mrl validate` those of a configuration.\n",
    ]
    for problem in _source("known_problems"):
        _check_metrics(problem["cure"])
        page += [f"## {problem['title']}\n"]
        page += [f"{problem['seen']}. {problem['cause']} **Fix:** {problem['cure']}", ""]
    return "\n".join(page)


def _check_keys(names: list[str], file: str) -> None:
    if unknown := [name for name in names if name not in keys()]:
        raise ValueError(f"docs/source/{file}: no key of the configuration: {', '.join(unknown)}")


def _check_metrics(text: str) -> None:
    for name in re.findall(
        r"\b(?:actor|train|training|timing_s|response_length|router|reshard)/[a-z_]+(?:/[a-z_]+)*", text
    ):
        metric_spec(name)  # raises KeyError with the nearest names


def _source(name: str) -> Any:
    return yaml.safe_load((SOURCE / f"{name}.yaml").read_text(encoding="utf-8"))


def _table(heads: tuple[str, ...]) -> list[str]:
    return [_row(*heads), _row(*["---"] * len(heads))]


def _row(*cells: str) -> str:
    return "| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in cells) + " |"


PAGES = {
    "configuration": configuration,
    "layouts": lambda: f"{_MADE}{rule_pages.layouts()}",
    "refusals": lambda: f"{_MADE}{rule_pages.refusals()}",
    "metrics": metrics,
    "from_verl": from_verl,
    "tuning": tuning,
    "efficiency": efficiency,
    "predictions": predictions,
    "known_problems": known_problems,
    "evidence": lambda: f"{_MADE}{evidence_page.page()}",
    "faults": lambda: f"{_MADE}{fault_rows.page()}",
}


def out_of_date() -> dict[Path, str]:
    """Pages that are not what they are made of, and their text."""
    made = {ROOT / "docs" / f"{name}.md": make() for name, make in PAGES.items()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text}


def main() -> None:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    options = parser.parse_args()
    stale = out_of_date()
    for path, text in {} if options.check else stale.items():
        path.write_text(text, encoding="utf-8")
    print(f"{'out of date' if options.check else 'written'}: {', '.join(path.name for path in stale) or 'none'}")
    sys.exit(1 if options.check and stale else 0)


if __name__ == "__main__":
    main()
