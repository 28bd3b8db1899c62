"""Implements `mrl plan`: prints the plan of mrl.plan as JSON or as text."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import add_config, devices, positive, resolved_config
from mrl.cli.slow_work import SlowWork
from mrl.errors import ConfigError, DoesNotFit
from mrl.units import GIB

_ACTOR_ALONE = (
    "only the actor is counted; mrl plan CONFIG with a layout counts a reference model, engines and the host too"
)


def add(commands) -> None:
    """Registers the command."""
    plan = commands.add_parser(
        "plan", help="show memory, times and weight sync of a configuration, or layouts that fit; needs no device"
    )
    add_config(plan, optional=True)
    plan.add_argument(
        "--device", metavar="NAME", help="such as h100-80g; default: the smallest one of the kind cluster.device"
    )
    plan.add_argument(
        "--megatron",
        metavar="VERSION",
        help="version of megatron-core; older ones refuse some layouts (default: the tested one)",
    )
    plan.add_argument("--run-dir", help="also write plan.json there; mrl train compares its own plan with it")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument(
        "--search", action="store_true", help="list the layouts of the actor that fit on --devices, best first"
    )
    plan.add_argument(
        "--devices", type=devices, metavar="N", help="with --search: devices of the actor; default: its world_size"
    )
    plan.add_argument(
        "--model", metavar="PATH", help="with --search: a checkpoint folder or a known name, instead of CONFIG"
    )
    plan.add_argument(
        "--top", type=positive, default=10, metavar="N", help="with --search: how many to list (default 10)"
    )
    plan.add_argument(
        "--calibrate",
        nargs="+",
        metavar="RUN",
        help="fit the plan's assumptions to these runs on the devices of CONFIG, as far as they determine them, and "
        "write them to --output, which cluster.calibration then names",
    )
    plan.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="with --calibrate: the file; default: cluster.calibration, or DEVICE.json",
    )
    plan.add_argument(
        "--messages",
        type=int,
        nargs=2,
        metavar=("RANK", "WORKER"),
        help="list what this rank sends to this worker in a weight sync, box by box; both count from 0",
    )
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    if (options.config is None) != (options.search and options.model is not None):
        raise ConfigError("give CONFIG, or with --search a --model in its place")
    asked = [name for name in ("search", "messages", "calibrate") if getattr(options, name)]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in asked)} have answers of their own: give one of them")
    if options.output is not None and not options.calibrate:
        raise ConfigError("--output is the file of --calibrate RUN ...: give both, or leave it out")
    if options.calibrate:
        answer = _calibrate(options)
        lines = calibration_lines
    elif options.search:
        answer = _search(options)
        lines = search_lines
    elif options.messages:
        answer = _messages(options, *options.messages)
        lines = message_lines
    else:
        answer = _plan_of_run(options)
        lines = plan_lines
    answer["seconds"] = time.perf_counter() - start
    if options.json:
        print(json.dumps(answer))
    else:
        for line in [*lines(answer), *(f"note: {note}" for note in answer["notes"])]:
            print(line)
    if answer.get("fit") == "does not fit":
        raise SystemExit(DoesNotFit.exit_code)


def _plan_of_run(options: argparse.Namespace) -> dict[str, Any]:
    from mrl.config.rules import check
    from mrl.plan.fit import fit_of
    from mrl.plan.plan_inputs import device_for
    from mrl.plan.run_plan import plan_of, plan_text
    from mrl.record.run_dir import RunDir, write_text

    resolved = _resolved(options)
    config = resolved.config
    model, substitute = _model(config.model.path)
    check(resolved, model)
    plan = plan_of(config, model, device_for(config, options.device))
    if options.run_dir is not None:
        file = RunDir(Path(options.run_dir)).plan
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, plan_text(plan))
        except OSError as error:
            raise ConfigError(f"--run-dir {options.run_dir}: cannot be written: {error.strerror}") from None
    notes = _notes(config, options.device, plan["device"]["name"], substitute)
    return plan | {"fit": fit_of(plan["memory"]), "notes": notes}


def _calibrate(options: argparse.Namespace) -> dict[str, Any]:
    """Fits the assumptions to runs and writes the cluster's file. Returns what they were and are."""
    from mrl.config.rules import check
    from mrl.plan.calibration_file import write_calibration
    from mrl.plan.devices import USUAL, usual_ends
    from mrl.plan.plan_inputs import device_for
    from mrl.tools.calibrate import calibration_of, read_runs

    resolved = _resolved(options)
    config = resolved.config
    device = device_for(config, options.device)
    model, substitute = _model(config.model.path)
    check(resolved, model)
    runs = read_runs(options.calibrate, device)
    found, named = calibration_of(runs)
    target = Path(options.output or config.cluster.calibration or f"{device.name}.json")
    write_calibration(target, device.name, named, found)
    constants = [
        vars(each) | {"usual": getattr(USUAL, each.name), "usual_ends": list(usual_ends(each.name))}
        for each in found.fitted
    ]
    seconds = {
        name: _step_of(config, model, device, assumed)
        for name, assumed in (("usual", USUAL), ("found", found.assumptions))
    }
    return {
        "file": str(target),
        "device": device.name,
        "runs": [vars(run) for run in named],
        "constants": constants,
        "phases": dict(found.phases),
        "lengths": vars(found.lengths) | {"mean": found.lengths.mean_response(found.lengths.limit)},
        "left": dict(found.left),
        "phase_seconds": seconds,
        "notes": [substitute] if substitute else [],
    }


def _step_of(config, model, device, assumed) -> dict[str, float]:
    """Predicts the phases of a step, without its sync."""
    from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of
    from mrl.plan.times import phase_seconds

    inputs = PlanInputs.of(config, model, device, assumed)
    return phase_seconds(inputs, batch_plan(config, inputs.train), engine_of(inputs))


def _messages(options: argparse.Namespace, rank: int, worker: int) -> dict[str, Any]:
    """Returns all messages of a weight sync from one rank to one worker. Raises ConfigError for wrong numbers."""
    from mrl.config.rules import check
    from mrl.model.layout import TrainLayout
    from mrl.plan.run_plan import reshard_plan_of

    resolved = _resolved(options)
    config = resolved.config
    model, substitute = _model(config.model.path)
    check(resolved, model)
    plan = reshard_plan_of(config, model, TrainLayout.build(config.actor.layout, model))
    for name, number, count in (("RANK", rank, plan.train.world_size), ("WORKER", worker, plan.rollout.world_size)):
        if not 0 <= number < count:
            raise ConfigError(f"--messages: {name} {number} must be from 0 to {count - 1}")
    messages = []
    for message in plan.sends(rank):
        if message.worker == worker:
            boxes = [
                {"tensor": copy.hf_name, "box": copy.hf_box.ranges, "from": copy.source_name, "to": copy.parameter}
                for copy in message.copies
            ]
            messages.append({"round": message.round, "bytes": message.nbytes, "boxes": boxes})
    notes = [substitute] if substitute else []
    return {"rank": rank, "worker": worker, "messages": messages, "notes": notes, "hash": plan.hash}


def _search(options: argparse.Namespace) -> dict[str, Any]:
    from mrl.plan.devices import device_by_part
    from mrl.plan.plan_inputs import device_for
    from mrl.platforms.versions import MEGATRON
    from mrl.tools.first_config import usual_config
    from mrl.tools.run_search import run_report, settings_between
    from mrl.tools.search import search
    from mrl.tools.search_report import search_problem, search_report, ways_out
    from mrl.tools.switches import with_switches

    if options.config is not None:
        config = _resolved(options).config
        device = device_for(config, options.device)
        devices = options.devices or config.actor.layout.world_size
        per_node = config.cluster.n_gpus_per_node
    else:
        if options.devices is None or options.device is None:
            raise ConfigError("--search with --model needs --devices N and --device NAME")
        device = device_by_part(options.device)
        devices = options.devices
        config = usual_config(options.model, _model(options.model)[0], device, devices)
        per_node = device.devices_per_node
    if config.algorithm.needs_critic:
        raise ConfigError(
            "--search counts no critic, and algorithm.adv_estimator is gae: search without it (--set "
            "algorithm.adv_estimator=grpo), and see with mrl plan what the critic adds"
        )
    model, substitute = _model(config.model.path)
    megatron = config.cluster.versions.get("megatron-core", options.megatron or MEGATRON)
    problem = search_problem(config, model, device, devices, per_node, megatron)
    planned = options.config is not None and devices == config.actor.layout.world_size
    notes = _notes(config, options.device, device.name, substitute) + ([] if planned else [_ACTOR_ALONE])
    result = search(problem, SlowWork("searching: {:,} layouts so far, {:,} fit"))
    run = None
    if planned:
        run = run_report(config, problem, result)
    report = search_report(config, problem, options.top, planned, result)
    if not report["layouts"]:
        report |= ways_out(config, problem, megatron, planned)
    return report | {"switches": settings_between(config, with_switches(config, model)), "run": run, "notes": notes}


def _model(path: str):
    from mrl.model import planning_model_spec

    return planning_model_spec(path)


def _resolved(options: argparse.Namespace):
    """Returns the configuration. --megatron is a short way to set its version."""
    if options.megatron is not None:
        options.overrides = [*options.overrides, f"cluster.versions.megatron-core={json.dumps(options.megatron)}"]
    return resolved_config(options)


def _notes(config, named: str | None, device: str, substitute: str) -> list[str]:
    assumed = ""
    if not (named or config.cluster.accelerator):
        assumed = f"planned for {device}; --device or cluster.accelerator names another"
    return [note for note in (assumed, substitute) if note]


# ---------------------------------------------------------------- as text


def plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yields the plan as about a screen of text, the verdict first."""
    from mrl.plan.run_plan import verdict

    yield verdict(plan)
    model = plan["model"]
    device = plan["device"]
    actor = plan["layout"]["actor"]
    yield (
        f"model: {model['path']}, {model['parameters'] / 1e9:.1f} B parameters, "
        f"{model['active_parameters'] / 1e9:.1f} B active"
    )
    yield f"device: {device['name']}, {device['usable'] / GIB:.1f} of {device['memory'] / GIB:.1f} GiB to plan with"
    yield from _layout_lines(plan, actor)
    yield from _batch_lines(plan["batch"])
    yield "memory of the fullest device, GiB:"
    yield from map(_phase_line, plan["memory"]["phases"].items())
    yield from _memory_lines(plan["memory"])
    yield from _time_lines(plan)
    yield from _sync_lines(plan["reshard"])
    yield f"hash: {plan['hash'][:16]}"


def _layout_lines(plan: dict[str, Any], actor: dict[str, Any]) -> Iterator[str]:
    layout = plan["layout"]
    engines = layout["engines"]
    stage_sizes = [sum(stop - start for start, stop in stage) for stage in layout["stages"]]
    yield (
        f"actor: {actor['world_size']} ranks ({_degrees(actor)}); stages of {', '.join(map(str, stage_sizes))} layers"
    )
    for name in ("critic", "teacher"):
        if name in layout:
            yield f"  its {name} on these ranks: {_degrees(layout[name])}"
    yield f"  {_by_node(layout['ranks'])}"
    sizes = (
        ", ".join(f"{name} {engines[name]}" for name in ("tensor", "data", "expert") if engines[name] > 1)
        or "one worker"
    )
    yield f"engines: {engines['number']} ({sizes}), {layout['placement']}"
    yield f"  {_by_node(layout['workers'])}"


def _degrees(sizes: dict[str, Any]) -> str:
    cut = [f"{name} {size}" for name, size in sizes.items() if size not in (1, False) and name != "world_size"]
    return ", ".join(cut) or "not sharded"


def _by_node(rows: Sequence[dict[str, Any]]) -> str:
    """Formats ranks or workers by node: `node 0: 0-7, node 1: 8-15`."""
    nodes: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        nodes.setdefault(row["node"], []).append(number)
    shown = [f"node {node}: {numbers[0]}-{numbers[-1]}" for node, numbers in nodes.items()]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])


def _batch_lines(batch: dict[str, Any]) -> Iterator[str]:
    yield (
        f"batch: {batch['train_batch_size']} prompts x {batch['n']} = {batch['samples_per_step']} samples a step, "
        f"{batch['updates_per_step']} update{'s' if batch['updates_per_step'] != 1 else ''}; "
        f"a rank's {batch['samples_per_rank_and_update']} samples of an update in "
        f"{batch['micro_batches_per_update']} micro-batches of at most {batch['micro_batch_tokens']} tokens"
    )


def _phase_line(named: tuple[str, dict[str, Any]]) -> str:
    name, phase = named
    terms = _terms(phase["terms"])
    where = ""
    if phase["stage"] is not None:
        where = f", stage {phase['stage']}"
    verdict = "fits"
    if not phase["fits"]:
        verdict = f"DOES NOT FIT: most is {phase['largest']}; change: {phase['change']}"
    return f"  {name + where:<32} {phase['bytes'] / GIB:7.1f} of {phase['device_bytes'] / GIB:.1f} {verdict} ({terms})"


def _terms(terms: dict[str, int]) -> str:
    return ", ".join(f"{term} {size / GIB:.1f}" for term, size in sorted(terms.items(), key=lambda t: -t[1]) if size)


def _memory_lines(memory: dict[str, Any]) -> Iterator[str]:
    cache = memory["kv_cache"]
    host = memory["host"]
    yield f"layers: {memory['layers']}; recompute: {memory['recompute']}"
    yield (
        f"KV cache: {cache['bytes_per_worker'] / GIB:.1f} GiB a worker, {cache['tokens_per_engine']} tokens an engine "
        f"({cache['longest_sequences_per_engine']} sequences of the longest kind) {cache['change']}".rstrip()
    )
    if host["bytes_per_node"]:
        verdict = "fits"
        if not host["fits"]:
            verdict = f"DOES NOT FIT: {host['change']}"
        terms = _terms(host["terms"])
        validation = ""
        if host["held_out_prompts"]:
            validation = f", the answers to {host['held_out_prompts']} validation prompts included"
        yield (
            f"object store: {host['object_store_bytes'] / GIB:.2f} GiB of a node, for the responses that exist "
            f"at once, at their limits{validation}; a start reads what an earlier one "
            "left of a step on the driver's node alone"
        )
        yield (
            f"host: {host['bytes_per_node'] / GIB:.1f} of {host['node_bytes'] / GIB:.0f} GiB of a "
            f"node, {verdict} ({terms})"
        )
    for change in memory["would_fit_with"]:
        yield _would_fit_with(change)


def _would_fit_with(settings: Sequence[str]) -> str:
    """Returns the options to add to the command. Long ones are lines of a shell, one a setting."""
    options = [f"--set {setting}" for setting in settings]
    between = " " if len(" ".join(options)) < 200 else " \\\n    "
    return f"would fit with: {between.join(options)}"


def _time_lines(plan: dict[str, Any]) -> Iterator[str]:
    from mrl.plan.run_plan import drafts_text, slow_generation, step_seconds

    times = plan["times"]
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times["phase_seconds"].items())
    low, expected, high = (f"{seconds:.3g}" for seconds in step_seconds(plan))
    yield (
        f"predicted at the assumed rates: a step {expected} s, from {low} to {high}: {phases}; update "
        f"{times['flops']['update']:.3g} FLOP, bubble {times['pipeline_bubble']:.1%}; a resume verifies its checkpoint "
        f"in {times['resume_seconds']:.3g} s"
    )
    if drafts := drafts_text(plan):
        yield drafts
    if vision := plan.get("vision"):
        yield (
            f"images: a tower of {vision['parameters'] / 1e9:.2f} B parameters, counted as if all "
            f"{vision['tokens_of_a_prompt']:.0f} tokens of a prompt{_of_response(vision)} were of one image: "
            f"{vision['flops']:.3g} FLOP a step, {vision['seconds_of_ranks']:.3g} s of ranks "
            f"({vision['patches_per_second']:.3g} patches a second), "
            f"{vision['seconds_of_engines']:.3g} s of engines; memory for "
            f"{vision['most_tokens_of_a_sample']} tokens of images in a sample"
        )
    if slow := slow_generation(plan):
        yield f"SLOW: {slow}"


def _of_response(vision: dict[str, Any]) -> str:
    tokens = vision["tokens_of_a_response"]
    return f" and {tokens:.0f} of a response, which tools or agents may show," if tokens else ""


def _sync_lines(sync: dict[str, Any]) -> Iterator[str]:
    link = sync["link_bytes_per_second"]
    steps = ", ".join(f"{name.replace('_', ' ')} {seconds:.3g}" for name, seconds in sync["seconds_of"].items())
    here = ""
    if sync["bytes_local"]:
        here = f", {_size(sync['bytes_local'])} inside devices"
    yield (
        f"sync: {_size(sync['bytes_required'])} required, {_size(sync['bytes_moved'])} moved, "
        f"{_size(sync['bytes_remote'])} of it between nodes{here}, in {sync['rounds']} rounds; predicted "
        f"{sync['predicted_seconds']:.3g} s: {steps} (wire at least {sync['bound_seconds']:.3g} s) at "
        f"{link['between_nodes'] / 1e9:.3g} GB/s between nodes, {link['inside_node'] / 1e9:.3g} inside one"
    )
    yield (
        f"  {_spread('rank', 'sends', sync['sent_bytes'])}, stages at most {_size(sync['peak_staging_bytes_trainer'])}"
    )
    yield (
        f"  {_spread('worker', 'receives', sync['received_bytes'])}, stages at most "
        f"{_size(sync['peak_staging_bytes_engine'])}"
    )
    yield f"  planned in {sync['plan_seconds']:.2f} s, hash {sync['hash'][:16]}; what each sends and receives: --json"


def _spread(who: str, does: str, sizes: Sequence[int]) -> str:
    """Says what the members of one side send or receive. It gives one number where all have the same."""
    least = min(sizes)
    most = max(sizes)
    how = _size(most) if least == most else f"{_size(least)} to {_size(most)} ({who} {sizes.index(most)})"
    return f"each of {len(sizes)} {who}s {does} {how}"


def _size(nbytes: int) -> str:
    """Formats bytes in GB, below one GB in MB."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.3g} MB"


def message_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each message, and below it one for each box with its tensor, range and target."""
    messages = answer["messages"]
    total = sum(message["bytes"] for message in messages)
    who = f"rank {answer['rank']} to worker {answer['worker']}"
    yield f"{len(messages)} messages from {who}, {total:,} bytes in all; plan {answer['hash'][:16]}"
    for message in messages:
        yield f"round {message['round']}: {message['bytes']:,} bytes"
        for box in message["boxes"]:
            cut = ", ".join(f"{start}:{stop}" for start, stop in box["box"])
            yield f"  {box['tensor']}[{cut}] -> {box['to']}"


def search_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields the best layouts, two lines each, and why others were left out."""
    alone = ", counting the actor alone" if result["planned"] else ""
    whole = f"{alone}; below, those that fit with the whole configuration" if alone else ""
    where = f"{result['devices']} x {result['device']}"
    counts = f"{result['fitting']} of {result['legal']} legal layouts on {where} fit"
    if result["layouts"]:
        yield f"{counts}{whole}; fastest first"
        yield f"seconds of an update of {result['samples']} samples, of which a step has {result['updates']}:"
    else:
        near = result["near"]
        lacks = f"; {near} lack less than the plan may be wrong by" if near else ""
        yield f"{'MAY NOT FIT' if near else 'NOTHING FITS'}: {counts}{alone}{lacks}"
        yield from _way_out_lines(result)
    for position, row in enumerate(result["layouts"], 1):
        degrees = (
            ", ".join(f"{key} {value}" for key, value in row["degrees"].items() if key != "world_size") or "not sharded"
        )
        yield f"{position:3}. {row['seconds']:8.2f} s  {degrees}"
        yield f"       {row['why']}"
        if row["deepep_seconds"] is not None:
            yield f"       {_with_deepep()}: {row['deepep_seconds']:.2f} s"
    if result["left_out"]:
        reasons = "; ".join(f"{why} ({count})" for why, count in result["left_out"].items())
        yield f"faster ones left out, with which the plan of the whole configuration does not fit: {reasons}"
    if result["too_large"]:
        yield "layouts that do not fit, by their largest term: " + ", ".join(
            f"{name} in {count}" for name, count in result["too_large"].items()
        )
    yield from result["engines"]
    if result["switches"]:
        yield "counted with: " + " ".join(f"--set {setting}" for setting in result["switches"])
    if run := result["run"]:
        times = run["seconds"] / run["best_seconds"]
        yield (
            f"whole steps, without their sync: {run['seconds']:.3g} s as it is; with engines and micro-batches too "
            f"{run['best_seconds']:.3g} s is the fastest that fits, {times:.2g} times as fast by "
            f"{'what your runs showed' if run['calibrated'] else 'published figures'}"
        )
        if run["settings"]:
            yield "  " + " ".join(f"--set {setting}" for setting in run["settings"])
        if run["deepep_seconds"] is not None:
            yield f"  {_with_deepep()}: {run['deepep_seconds']:.3g} s"
        if trial := run["trial"]:
            yield from _trial_lines(trial)


def _trial_lines(trial: dict[str, Any]) -> Iterator[str]:
    follows = f", depending on {', '.join(trial['follows'])}" if trial["follows"] else ""
    yield (
        f"worth a trial: your runs leave open whether a step takes {trial['low']:.2f} or {trial['high']:.2f} times as "
        f"long with the settings below too{follows}; it is the faster one with a chance of {trial['chance']:.0%}. "
        "Measure some steps, and give both runs to --calibrate"
    )
    yield "  " + " ".join(f"--set {setting}" for setting in trial["settings"])


def calibration_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Yields what runs determine of a plan's assumptions, what they do not, and what that does to a step."""
    runs = ", ".join(f"{run['name']} ({run['steps']} steps)" for run in answer["runs"])
    yield f"{answer['file']}: {answer['device']}, by {runs}; cluster.calibration: {answer['file']} makes plans use it"
    lengths = answer["lengths"]
    yield (
        f"lengths: prompts of {lengths['prompt']:.4g} tokens, responses of {lengths['mean']:.4g} on average, "
        f"{lengths['cut']:.1%} cut at {lengths['limit']}"
    )
    yield "determined, with an interval of 90 %, before and now:"
    for row in answer["constants"]:
        low, high = sorted((row["faster"], row["slower"]))
        usual = " to ".join(f"{end:.3g}" for end in sorted(row["usual_ends"]))
        yield f"  {row['name']:<28}{row['usual']:.3g} ({usual}) -> {row['value']:.3g} ({low:.3g} to {high:.3g})"
    if answer["phases"]:
        factors = ", ".join(f"{name} x {factor:.3g}" for name, factor in answer["phases"].items())
        yield f"phases whose seconds these do not explain, without a single identifiable cause: {factors}"
    yield "not determined by these runs, and left as they were:"
    reasons: dict[str, list[str]] = {}
    for name, why in answer["left"].items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"  {', '.join(names)}: {why}"
    before, now = (answer["phase_seconds"][name] for name in ("usual", "found"))
    phases = ", ".join(f"{name} {before[name]:.3g} -> {now[name]:.3g} s" for name in now)
    yield f"a step of this configuration: {sum(before.values()):.3g} -> {sum(now.values()):.3g} s ({phases})"


def _way_out_lines(result: dict[str, Any]) -> Iterator[str]:
    """Says what would make a layout fit."""
    if result["would_fit_with"]:
        yield _would_fit_with(result["would_fit_with"])
    if result["would_fit_on"]:
        yield f"would fit on {result['would_fit_on']} x {result['device']}, counting the actor alone"
    elif not result["would_fit_with"]:
        yield f"would not fit on {result['tried_devices']} x {result['device']} either, counting the actor alone"


def _with_deepep() -> str:
    from mrl.tools.switches import DEEPEP

    settings = " ".join(f"--set {key}={value}" for key, value in DEEPEP.items())
    return f"with DeepEP, which has no pinned build here ({settings})"
