"""Implements `mrl import-verl`."""

import argparse
import json
import os
import sys
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import add_verbose
from mrl.errors import ConfigError, MrlError, shortened

_NO_LAYOUT = "mrl plan --search found no layout that breaks no rule and fits {} in every phase with the rest as it is"
_REFUSED = 50  # layouts of the search that break a rule, the fastest first, until it is given up
_TRANSFORMER = "model.override_transformer_config"


def add(commands) -> None:
    """Registers the command."""
    parser = commands.add_parser(
        "import-verl", help="write a configuration from a verl launch script, without running any of it"
    )
    what = "launch scripts, one script with overrides behind it (its $@), or overrides alone"
    parser.add_argument("source", nargs="+", metavar="SCRIPT|KEY=VALUE", help=what)
    parser.add_argument("-o", "--output", help="file to write (a folder for several scripts); default: print it")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="given",
        help="a shell variable of the script, or (with a dot) a key of mrl; repeatable",
    )
    parser.add_argument(
        "--preset",
        help="preset whose layout is used for a script without one; default: the nearest preset of its model",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="for a script without a layout, use the fastest layout that fits, not a preset's (also done where there "
        "is no preset)",
    )
    parser.add_argument(
        "--as-written", action="store_true", help="keep settings that mrl would change; validation may then refuse them"
    )
    parser.add_argument(
        "--accept-losses",
        action="store_true",
        help="exit with 0 even if keys that change training are not carried over",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: the fate of every key, warnings, violations"
    )
    add_verbose(parser)
    parser.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> None:
    scripts, words = _sources(options.source)
    if len(scripts) > 1 and words:
        raise ConfigError("overrides take the place of one script's $@; give them with one script at a time")
    if len(scripts) > 1:
        results = [_import_of_several(script, options) for script in scripts]
    else:
        results = [_import_script(scripts[0] if scripts else None, words, options, several=False)]
    if options.json:
        print(json.dumps(results[0] if len(results) == 1 else {"scripts": results}))
    elif len(results) > 1:
        print(_summary(results))
    if not all(result["ok"] for result in results):
        raise SystemExit(ConfigError.exit_code)


def _sources(given: list[str]) -> tuple[list[Path], list[str]]:
    scripts = [Path(text) for text in given if os.path.isfile(text)]
    words = [text for text in given if not os.path.isfile(text)]
    if folders := [word for word in words if os.path.isdir(word)]:
        raise ConfigError(f"{folders[0]}: is a folder; give the scripts in it, as {folders[0].rstrip('/')}/*.sh")
    if lost := [word for word in words if "=" not in word or "\n" in word]:
        raise ConfigError(f"{', '.join(lost)}: no such file, and no override (key=value) either")
    return scripts, words


def _import_of_several(script: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Imports one of several scripts. Its failure does not stop the import of the others."""
    try:
        return _import_script(script, [], options, several=True)
    except MrlError as error:
        if not options.json:
            print(f"{script}: {error}")
        nothing = {"keys": 0, "unsupported": [], "error": str(error)}
        return {"script": str(script), "ok": False, "verdict": "refused", **nothing}


def _summary(results: list[dict[str, Any]]) -> str:
    keys = sum(r["keys"] for r in results)
    missing = sum(len(r["unsupported"]) for r in results)
    valid = sum(r["verdict"] == "valid" for r in results)
    lossy = sum(r["verdict"] == "carried with losses" for r in results)
    carried = f"{valid} valid" + (f", {lossy} carried with losses" if lossy else "")
    return f"{len(results)} scripts, {carried}; {keys} keys, {missing} unsupported ({missing / max(keys, 1):.1%})"


def _import_script(script: Path | None, words: list[str], options: argparse.Namespace, several: bool) -> dict[str, Any]:
    """Imports one script (or `words` alone), and writes or prints the result and its report."""
    out = _translated(script, words, options)
    text = out.to_yaml()
    file = _written(options, script, text, several)
    violations, remarks = _checked(file, text)
    refused = bool(violations or out.faults)
    verdict = "refused"
    if not refused:
        verdict = "valid"
        if out.losses:
            verdict = "carried with losses"
    result = {
        "script": out.name,
        "output": None if file is None else str(file),
        "ok": verdict == "valid" or (not refused and options.accept_losses),
        "verdict": verdict,
        "keys": len(out.keys),
        **out.to_json(),
    }
    if file is None:
        result["yaml"] = text
    if not options.json:
        if file is None:
            print(text)
        _report(out, violations, remarks, verdict, sys.stderr if file is None else sys.stdout)
    return result | {"violations": [v.to_json() for v in violations], "notes": remarks}


def _translated(script: Path | None, words: list[str], options: argparse.Namespace):
    variables, own = _given(options.given)

    def translated(chosen=None):
        out = _read(
            script,
            words,
            variables,
            as_written=options.as_written,
            preset=options.preset,
            own=tuple(own),
            chosen=chosen,
        )
        for key, value in own.items():
            out.put("chosen", "", key, deepcopy(value), "--set")  # further keys go into a mapping
        return out

    out = translated()
    has_choice = any(entry.to.startswith("actor.layout.") and entry.why != "--set" for entry in out.of("chosen"))
    if out.lacks_layout or (options.search and has_choice):
        return _searched(out, translated) or out
    return out


def _read(script: Path | None, words: list[str], variables: dict[str, str], **settings: Any):
    from mrl.plain_files import TEXT_BYTES, read_text, reason
    from mrl.tools.import_verl.translate import import_overrides, import_script

    if script is None:
        return import_overrides(words, **settings)
    try:
        text = read_text(script, TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{script}: cannot be read as text: {reason(error)}") from None
    return import_script(text, str(script), variables, words, **settings)


def _searched(out, translated):
    """Imports again with the fastest layout that breaks no rule and fits in every phase.

    Returns None where there is no such layout, or the model is not known.
    """
    from mrl.config.yaml_tree import nested
    from mrl.model import planning_model_spec
    from mrl.plan.plan_inputs import device_for, recompute_of
    from mrl.platforms.versions import MEGATRON
    from mrl.tools.search import search
    from mrl.tools.search_report import fastest_that_fit, search_problem
    from mrl.tools.switches import with_switches

    try:
        config = _loaded(out.to_yaml()).config
        model = planning_model_spec(config.model.path)[0]
        device = device_for(config)
    except MrlError:
        return None
    problem = search_problem(
        config, model, device, config.actor.layout.world_size, config.cluster.n_gpus_per_node, MEGATRON
    )
    written = nested(out.values).get("model", {}).get("override_transformer_config", {})
    if has_own := any(name.startswith("recompute_") for name in written):
        problem = replace(problem, ways=(recompute_of(config),))

    def imported(candidate):
        return _with_layout(translated, candidate, model, device, has_own)

    refused = []

    def breaks_no_rule(candidate) -> bool:
        if len(refused) < _REFUSED and not _checked(None, imported(candidate).to_yaml())[0]:
            return True
        refused.append(candidate)
        return False

    fastest, _ = fastest_that_fit(with_switches(config, model), problem, search(problem), 1, breaks_no_rule)
    for candidate in fastest:
        found = imported(candidate)
        if _stands(found.to_yaml(), model, device):
            return found
    out.warnings.append(_NO_LAYOUT.format(device.name))
    return None


def _stands(text: str, model, device) -> bool:
    """Tells whether a configuration breaks no rule and fits in every phase."""
    from mrl.plan.memory import memory_section
    from mrl.plan.plan_inputs import PlanInputs

    return not _checked(None, text)[0] and memory_section(PlanInputs.of(_loaded(text).config, model, device))["fits"]


def _with_layout(translated, candidate, model, device, has_own: bool):
    """Imports again with a layout of the search, its recomputation where the script has none, and switches."""
    from mrl.tools.import_verl.script_model import Chosen
    from mrl.tools.switches import missing_switches

    degrees = {key: value for key, value in candidate.degrees.items() if key != "world_size"}
    out = translated(Chosen(degrees, f"the fastest that fits {device.name} (mrl plan --search)"))
    if not has_own:
        settings = {f"{_TRANSFORMER}.{name}": value for name, value in candidate.recompute.settings.items()}
        _choose(out, settings, f"{device.name} is too small without it")
    switches = missing_switches(_loaded(out.to_yaml()).config, model)
    _choose(out, switches, f"updates on {device.name} are faster with it")
    return out


def _choose(out, values: dict[str, Any], why: str) -> None:
    """Adds what a searched layout needs or counts with."""
    for key, value in values.items():
        out.put("chosen", "", key, value, why)


def _given(texts: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns (shell variables, keys of mrl) that --set gives."""
    from mrl.tools.import_verl.hydra_values import hydra_value

    # every shell that runs the script sets these
    variables = {name: os.environ[name] for name in ("HOME", "USER") if os.environ.get(name)} | {"PWD": os.getcwd()}
    own = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {text}: must read NAME=VALUE")
        if "." in name:
            own[name] = hydra_value(value)
        else:
            variables[name] = value
    return variables, own


def _written(options: argparse.Namespace, script: Path | None, text: str, several: bool) -> Path | None:
    from mrl.plain_files import check_output
    from mrl.record.run_dir import write_text

    if options.output is None:
        return None
    file = Path(options.output) / f"{script.stem}.yaml" if several else Path(options.output)
    check_output(file, tuple(Path(name) for name in (*options.source, options.preset) if name))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except OSError as error:
        raise ConfigError(f"-o {file}: cannot be written: {error.strerror}") from None
    return file


def _checked(file: Path | None, text: str) -> tuple[list, list[str]]:
    """Returns violations and remarks about the result, as `mrl validate` gives them: among them whether its plan
    fits. That is no part of the verdict, which is about the translation. A result that is in no file is imported.yaml.
    """
    broken, remarks = _judged(file, text)
    if file is None:  # it was read from a folder that is gone
        broken = [replace(violation, where=Path(violation.where).name) for violation in broken]
    return broken, remarks


def _judged(file: Path | None, text: str) -> tuple[list, list[str]]:
    from mrl.cli.validate import check_config
    from mrl.config.load import SchemaRefusal
    from mrl.config.rules import with_rules
    from mrl.errors import InvalidConfig, Violation
    from mrl.model import planning_model_spec
    from mrl.plan.run_plan import memory_lines_of

    try:
        resolved = _loaded(text, file)
    except SchemaRefusal as refusal:
        return list(with_rules(refusal).violations), []
    except InvalidConfig as error:
        return list(error.violations), []
    path = resolved.config.model.path
    try:
        model, _ = planning_model_spec(path)
    except MrlError as error:
        return [Violation("model.path", str(error), value=path, where=resolved.where("model.path"))], []
    try:
        broken, remarks = check_config(resolved)
        return broken, [*remarks, *([] if broken else memory_lines_of(resolved.config, model))]
    except MrlError as error:
        return [Violation("configuration", str(error))], []


def _loaded(text: str, file: Path | None = None):
    """Returns the ResolvedConfig of `file`, or of `text` where no file was written."""
    from mrl.config.load import load_config

    if file is not None:
        return load_config(file)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path)


def _report(out, violations: list, remarks: list[str], verdict: str, stream) -> None:
    from mrl.tools.import_verl.keys import M
    from mrl.tools.import_verl.report import KINDS
    from mrl.units import counted

    counts = ", ".join(f"{len(out.of(kind))} {kind.replace('_', ' ')}" for kind in KINDS if out.of(kind))
    print(f"{out.name}: {len(out.keys)} keys: {counts}", file=stream)
    for kind in ("unsupported", "unknown", "chosen", "not_applicable"):
        for entry in out.of(kind):
            print(f"  {kind.replace('_', ' ')}: {shortened(str(entry))}", file=stream)
    # once is enough
    missing = ["model.path"] if any(entry.key == M + "path" for entry in out.of("unsupported")) else []
    broken = [violation for violation in violations if violation.field not in missing]
    warned = (f"warning: {shortened(warning)}" for warning in out.warnings)
    for line in [*warned, *(f"violation: {v}" for v in broken), *remarks]:
        print(f"  {line}", file=stream)
    why = [
        *missing,
        *([counted(len(out.faults), "place") + " that cannot be read"] if out.faults else []),
        *([counted(len(broken), "violation")] if broken else []),
    ]
    lost = shortened(", ".join(entry.key for entry in out.losses), "; --accept-losses takes it as it is")
    said = {"refused": f": {', '.join(why)}", "carried with losses": f": {lost}"}
    print(f"  {verdict}{said.get(verdict, '')}", file=stream)
