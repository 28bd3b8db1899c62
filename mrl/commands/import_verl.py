"""`mrl import-verl`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, MrlError


def add(commands) -> None:
    """Registers the command."""
    parser = commands.add_parser("import-verl", help="write our configuration from a verl launch script, without running anything of it")
    what = "launch scripts, overrides behind one (its $@), or overrides alone"
    parser.add_argument("source", nargs="+", metavar="SCRIPT|KEY=VALUE", help=what)
    parser.add_argument("-o", "--output", help="file to write (a folder for several scripts); default: print it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="given",
        help="a shell variable of the script, or (with a dot) a key of ours; repeatable",
    )  # fmt: skip
    parser.add_argument("--preset", help="whose layout a script without one gets; default: that of the nearest preset for its model")
    parser.add_argument("--as-written", action="store_true", help="keep what means something else today; validation may then refuse it")
    parser.add_argument("--json", action="store_true", help="print one JSON object: what became of every key, warnings, violations")
    parser.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> None:
    scripts, words = _sources(options.source)
    if len(scripts) > 1 and words:
        raise ConfigError("overrides stand for one script's $@; give them with one script at a time")
    results = [_one(script, words, options, len(scripts) > 1) for script in scripts or [None]]
    if options.json:
        print(json.dumps(results[0] if len(results) == 1 else {"scripts": results}))
    if not all(result["ok"] for result in results):
        raise SystemExit(ConfigError.exit_code)


def _sources(given: list[str]) -> tuple[list[Path], list[str]]:
    scripts = [Path(text) for text in given if Path(text).is_file()]
    words = [text for text in given if not Path(text).is_file()]
    if lost := [word for word in words if "=" not in word or "\n" in word]:
        raise ConfigError(f"{', '.join(lost)}: no such file, and no override (key=value) either")
    return scripts, words


def _one(script: Path | None, words: list[str], options: argparse.Namespace, several: bool) -> dict[str, Any]:
    """Imports one script (or `words` alone), writes or prints the result and its report."""
    out = _translated(script, words, options)
    text = out.to_yaml()
    file = _written(options.output, script, text, several)
    found, remarks = _checked(file, text)
    result = {"script": out.name, "output": None if file is None else str(file), "ok": not found, **out.to_json()}
    if file is None:
        result["yaml"] = text
    if not options.json:
        if file is None:
            print(text)
        _report(out, found, remarks, sys.stderr if file is None else sys.stdout)
    return result | {"violations": [v.to_json() for v in found], "notes": remarks}


def _translated(script: Path | None, words: list[str], options: argparse.Namespace):
    from mrl.config.verl.translate import import_overrides, import_script

    variables, own = _given(options.given)
    settings = {"as_written": options.as_written, "preset": options.preset, "own": tuple(own)}
    if script is None:
        out = import_overrides(words, **settings)
    else:
        try:
            text = script.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{script}: cannot be read as text: {error}") from None
        out = import_script(text, str(script), variables, words, **settings)
    for key, value in own.items():
        out.put("chosen", "", key, value, "--set")
    return out


def _given(texts: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """(shell variables, keys of ours) that --set gives."""
    from mrl.config.verl.overrides import hydra_value

    variables, own = {}, {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {text}: must read NAME=VALUE")
        if "." in name:
            own[name] = hydra_value(value)
        else:
            variables[name] = value
    return variables, own


def _written(output: str | None, script: Path | None, text: str, several: bool) -> Path | None:
    if output is None:
        return None
    file = Path(output) / f"{script.stem}.yaml" if several else Path(output)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {file}: cannot be written: {error.strerror}") from None
    return file


def _checked(file: Path | None, text: str) -> tuple[list, list[str]]:
    """Violations of the result and remarks, as `mrl validate` gives them."""
    from mrl.commands.validate import check_config
    from mrl.config.load import load_config
    from mrl.config.violation import ConfigViolation, InvalidConfig

    with tempfile.TemporaryDirectory() as folder:
        path = file or Path(folder) / "imported.yaml"
        if file is None:
            path.write_text(text, encoding="utf-8")
        try:
            return check_config(load_config(path))
        except InvalidConfig as error:
            return list(error.violations), []
        except MrlError as error:
            return [ConfigViolation("model.path", str(path), None, str(error))], []


def _report(out, found: list, remarks: list[str], stream) -> None:
    from mrl.config.verl.report import KINDS

    counts = ", ".join(f"{len(out.of(kind))} {kind.replace('_', ' ')}" for kind in KINDS if out.of(kind))
    print(f"{out.name}: {counts}", file=stream)
    for kind in ("unsupported", "unknown", "chosen", "not_applicable"):
        for entry in out.of(kind):
            print(f"  {kind.replace('_', ' ')}: {entry}", file=stream)
    for line in [*(f"warning: {w}" for w in out.warnings), *(f"violation: {v}" for v in found), *remarks]:
        print(f"  {line}", file=stream)
    print("  valid" if not found else f"  refused: {len(found)} violations", file=stream)
