"""Implements `mrl convert`."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import positive
from mrl.cli.slow_work import SlowWork
from mrl.errors import ConfigError, EnvironmentFault

# --layout's short names -> keys of actor.layout
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "world": "world_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
}
MOST_WORKERS = 8  # more would only wait for the disk
SHOWN = 3
SHOWN_FAULTS = 10


def add(commands) -> None:
    """Registers the command."""
    convert = commands.add_parser(
        "convert", help="convert checkpoints between Hugging Face's format and mrl's, and between layouts"
    )
    convert.add_argument(
        "--check",
        type=Path,
        metavar="FOLDER",
        help="check a Hugging Face export of any trainer: names, shapes, dtypes, NaN, ties, repeated tensors",
    )
    convert.add_argument(
        "--against",
        type=Path,
        metavar="ORIGINAL",
        help="with --check: the model from which training began; shows how far each tensor moved, and what took "
        "another's place",
    )
    convert.add_argument("--json", action="store_true", help="with --check: print one JSON object")
    convert.set_defaults(parser=convert, run=_check)
    conversions = convert.add_subparsers(dest="conversion", metavar="WHICH")
    to_hf = conversions.add_parser("megatron-to-hf", help="write a saved step as a Hugging Face checkpoint")
    _add_megatron_source(to_hf)
    to_hf.add_argument(
        "--vision-from",
        type=Path,
        metavar="FOLDER",
        help="checkpoint of a model with a vision tower (Qwen3.5): write its form, with the tower copied byte for "
        "byte; left out, the text model alone is written",
    )
    _add_common(to_hf, _megatron_to_hf)
    lora = conversions.add_parser("lora-to-hf", help="write the adapters of a saved step in PEFT's format, or merged")
    lora.add_argument("checkpoint", help="a step-N folder of a run with actor.lora, or a run directory for its newest")
    lora.add_argument("--merged", action="store_true", help="write the full model, with the adapters merged in")
    _add_base(lora)
    _add_common(lora, _lora_to_hf)
    from_hf = conversions.add_parser("hf-to-megatron", help="write Hugging Face weights as a checkpoint at a layout")
    from_hf.add_argument("checkpoint", help="folder with config.json, safetensors files and tokenizer")
    _add_target(from_hf)
    _add_common(from_hf, _hf_to_megatron)
    again = conversions.add_parser(
        "megatron-to-megatron", help="write a saved step at another layout, optimizer state included"
    )
    _add_megatron_source(again)
    again.add_argument("--weights-only", action="store_true", help="leave out master weights, moments and schedule")
    _add_target(again)
    _add_common(again, _megatron_to_megatron)
    tokenizer = conversions.add_parser(
        "tokenizer", help="write a tokenizer that is code over tiktoken.model (Moonlight, Kimi-K2) as one without code"
    )
    tokenizer.add_argument("checkpoint", help="folder with tiktoken.model and tokenizer_config.json")
    tokenizer.add_argument("-o", "--output", required=True, help="folder to write; must not exist")
    tokenizer.set_defaults(run=partial(_conversion, _tokenizer))


def _conversion(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Runs a conversion. Raises ConfigError if a check is asked for, too."""
    if options.check is not None or options.against is not None:
        raise ConfigError(f"--check and --against exclude {options.conversion}: give one of them")
    run(options)


def _check(options: argparse.Namespace) -> None:
    from mrl.checkpoint.export_check import check_export

    if options.check is None:
        if options.against is not None or options.json:
            raise ConfigError("--against and --json belong to --check FOLDER, or to a conversion after its name")
        options.parser.print_help(sys.stderr)
        raise SystemExit(ConfigError.exit_code)
    report = check_export(options.check, options.against, SlowWork("checking: {:,} of {:,} tensors"))
    if options.json:
        farthest = [asdict(moved) for moved in report.moved[:SHOWN_FAULTS]]
        answer = asdict(report) | {"folder": str(options.check), "ok": report.is_sound}
        answer["moved"] = {"median": report.usual_move, "farthest": farthest}
        print(json.dumps(answer))
    else:
        print("\n".join(_check_lines(options, report)))
    if not report.is_sound:
        raise SystemExit(EnvironmentFault.exit_code)


def _check_lines(options: argparse.Namespace, report: Any) -> Iterator[str]:
    what = f"{options.check}: {report.family}, {report.tensors} tensors, {report.bytes / 1e9:.2f} GB"
    if report.is_sound:
        yield f"{what}: sound"
    else:
        yield f"{what}: {len(report.faults)} fault{'s' * (len(report.faults) != 1)}"
    for fault in report.faults[:SHOWN_FAULTS]:
        yield f"  {fault.tensor or 'all'}: {fault.what}"
    if len(report.faults) > SHOWN_FAULTS:
        yield f"  and {len(report.faults) - SHOWN_FAULTS} more (--json has all)"
    if report.moved and report.moved[0].share:
        far = report.moved[0]
        half = f"by less than {max(report.usual_move, 1e-4):.2%} of their length" if report.usual_move else "not at all"
        yield f"moved from {options.against}: half of the tensors {half}, most {far.tensor} by {far.share:.2%}"
    for note in report.notes:
        yield f"note: {note}"


def _add_megatron_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        help="a step-N folder, or a run directory for its newest one; with --trust-checkpoint also a torch_dist "
        "checkpoint of Megatron's",
    )
    parser.add_argument(
        "--hf-files", type=Path, metavar="FOLDER", help="configuration and tokenizer of a torch_dist checkpoint's model"
    )
    _add_base(parser)


def _add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="new place of the model under a step's adapters, where it has moved"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--layout", metavar="tp=2,pp=2,ep=2", help=f"degrees, from {', '.join(DEGREES)}; default of world: the smallest"
    )
    which.add_argument("--config", help="a configuration, for its actor.layout; its model must be the checkpoint's")
    which.add_argument(
        "--format", choices=["torch_dist"], help="Megatron's own format, for any layout; needs --trust-checkpoint"
    )
    parser.add_argument(
        "--non-homogeneous-layers",
        action="store_true",
        help="torch_dist keys by layer, for Megatron models that are built that way",
    )


def _add_common(parser: argparse.ArgumentParser, run) -> None:
    parser.add_argument("-o", "--output", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument(
        "--trust-checkpoint", action="store_true", help="allow Megatron's torch_dist format, which contains pickles"
    )
    cores = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    parser.add_argument(
        "--workers", type=positive, default=cores, metavar="N", help=f"processes that write (default here: {cores})"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the output again and compare it with the source before it gets its name",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=partial(_conversion, run))


def _megatron_to_hf(options: argparse.Namespace) -> None:
    from mrl.checkpoint.convert import write_hf
    from mrl.checkpoint.vision_tower import open_whole

    source = _open_megatron(options)
    whole = None
    if options.vision_from is not None:
        whole = open_whole(options.vision_from, source)
    _print_report(options, write_hf(source, options.output, _job_options(options), whole))


def _lora_to_hf(options: argparse.Namespace) -> None:
    from mrl.checkpoint.convert import write_hf
    from mrl.checkpoint.open_checkpoint import open_merged, step_folder
    from mrl.checkpoint.peft_folder import write_peft

    path = Path(options.checkpoint)
    if options.merged:
        source = open_merged(step_folder(path), options.base)
        _print_report(options, write_hf(source, options.output, _job_options(options)))
        return
    if options.base is not None or options.verify:
        raise ConfigError("--base and --verify belong to --merged; give it with them, or leave them out")
    report = write_peft(path, Path(options.output))
    if options.json:
        print(json.dumps(asdict(report) | {"output": options.output}))
        return
    _print_critic(report.left_out_critic)
    print(f"wrote {report.tensors} tensors to {options.output}, in PEFT's format")


def _hf_to_megatron(options: argparse.Namespace) -> None:
    from mrl.checkpoint.open_checkpoint import open_hf

    vision = None
    if options.config is not None:  # a vision tower that will be trained is part of the model
        from mrl.config.load import load_config

        vision = load_config(options.config).config.model.vision
    write = _writer(options)
    _print_report(options, write(open_hf(Path(options.checkpoint), vision=vision)))


def _megatron_to_megatron(options: argparse.Namespace) -> None:
    write = _writer(options)
    _print_report(options, write(_open_megatron(options)))


def _tokenizer(options: argparse.Namespace) -> None:
    from mrl.tools.tiktoken_folder import convert_tokenizer

    names = convert_tokenizer(Path(options.checkpoint), Path(options.output))
    print(f"{options.output}: {', '.join(names)}; put them in the place of those in {options.checkpoint}")


def _open_megatron(options: argparse.Namespace):
    """Opens the checkpoint to convert: one of mrl's, or with --trust-checkpoint one in Megatron's own format."""
    from mrl.checkpoint.open_checkpoint import find_torch_dist, open_saved

    path = Path(options.checkpoint)
    if options.hf_files is not None and not options.trust_checkpoint:
        raise ConfigError(
            "--hf-files belongs to a torch_dist checkpoint, which needs --trust-checkpoint; give both or neither"
        )
    if not options.trust_checkpoint or find_torch_dist(path) is None:
        source = open_saved(path, options.base)
        if options.base is not None and source.adapters is None:
            raise ConfigError(
                f"--base belongs to a step of adapters, and {source.folder} has whole weights; leave it out"
            )
        return source
    if options.base is not None:
        raise ConfigError(f"--base belongs to a step of adapters, and {path} is a torch_dist checkpoint; leave it out")
    from mrl.tools.torch_dist.read import open_torch_dist

    return open_torch_dist(path, options.hf_files)


def _job_options(options: argparse.Namespace):
    from mrl.checkpoint.convert_job import Options

    return Options(options.workers, options.verify, progress=sys.stderr.isatty())


def _writer(options: argparse.Namespace) -> Callable[[Any], Any]:
    """Returns the function that writes an opened checkpoint in the wanted format and reports."""
    if options.format is not None:
        return partial(_write_torch_dist, options)
    if options.non_homogeneous_layers:
        raise ConfigError("--non-homogeneous-layers names keys of --format torch_dist; give both or neither")
    return partial(_write_layout, options, *_layout(options))


def _write_layout(options: argparse.Namespace, degrees: Mapping[str, Any], expected: Any, source: Any):
    from mrl.checkpoint.convert import write_layout

    if expected is not None:
        expected.check(source)
    return write_layout(source, options.output, degrees, getattr(options, "weights_only", False), _job_options(options))


def _write_torch_dist(options: argparse.Namespace, source: Any):
    from mrl.tools.torch_dist.write import write_torch_dist

    if not options.trust_checkpoint:
        raise ConfigError(
            "torch_dist contains pickles, which can run code when they are loaded; give --trust-checkpoint to write "
            "it, or leave --format out and get safetensors"
        )
    return write_torch_dist(source, options.output, options.non_homogeneous_layers, _job_options(options))


def _layout(options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns degrees under the keys of actor.layout, and what --config expects of the checkpoint."""
    if options.layout is not None:
        return parse_layout(options.layout), None
    from mrl.checkpoint.convert import ExpectedModel
    from mrl.config.load import load_config

    config = load_config(options.config).config
    model = config.model
    return config.actor.layout.model_dump(), ExpectedModel(options.config, model.path, model.dtype, model.vision)


def _print_report(options: argparse.Namespace, report) -> None:
    if options.json:
        print(json.dumps(asdict(report) | {"output": options.output}))
        return
    resumed = ""
    if report.resumed_files:
        resumed = f", {report.resumed_files} of its {report.files} files by an earlier start"
    verified = ""
    if report.verified:
        verified = "; read again: names, shapes, dtypes, bytes and digests are the source's"
    rate = f"{report.bytes / 1e9:.2f} GB in {report.seconds:.1f} s"
    if report.left_out:
        shown = ", ".join(report.left_out[:SHOWN]) + (", ..." if len(report.left_out) > SHOWN else "")
        print(f"note: {len(report.left_out)} entries of the source are not parameters and are left out: {shown}")
    if report.left_out_layers:
        print(
            f"note: the model's layers for multi-token prediction ({report.left_out_layers}) are not trained and are "
            "left out; config.json names none"
        )
    if report.drafting:
        print(f"note: {report.drafting} tensors of the layers for multi-token prediction are written as they were")
    if report.other_copies:
        print(
            f"note: {', '.join(report.other_copies)}: not the bytes of the model's embedding or output layer, whose "
            "copies these should be. They stay as they were; engines use the model's own"
        )
    _print_critic(report.left_out_critic)
    if report.of_vision_tower:
        print(f"note: {report.of_vision_tower} tensors of the vision tower are copied as they are")
    if report.unchecked:
        print(f"note: {report.unchecked} tensors have no checksum, so damage in them cannot be detected")
    print(f"wrote {report.tensors} tensors to {options.output} ({rate}{resumed}){verified}")


def _print_critic(left_out: bool) -> None:
    if left_out:
        print("note: the critic is left out: only the source can be resumed, which a run can do at any layout")


def parse_layout(text: str) -> dict[str, int]:
    """Parses `tp=2,pp=2,ep=2` into keys of actor.layout. Raises ConfigError.

    The default world is the smallest that both grids of ranks fit.
    """
    from math import lcm, prod

    short: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in DEGREES or name in short or not re.fullmatch("0*[1-9][0-9]{0,4}", value):
            raise ConfigError(
                f"--layout: {part!r}; give each of {', '.join(DEGREES)} at most once, from 1 to 99999, as in tp=2,ep=4"
            )
        short[name] = int(value)
    dense_grid = prod(short.get(name, 1) for name in ("tp", "cp", "pp"))
    expert_grid = prod(short.get(name, 1) for name in ("etp", "ep", "pp"))
    degrees = {"world": lcm(dense_grid, expert_grid)} | short
    return {DEGREES[name]: value for name, value in degrees.items()}
