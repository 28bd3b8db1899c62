"""One row of combinations.py: a run of a few tiny steps, its end, what follows, and what must hold of all of it."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from combination_axes import PRESETS, ROOT, STEPS, as_overrides, other_layout, other_schedule, settings
from covering import Row
from own_memory import OwnMemory

from mrl.record.run_dir import METRICS, read_metrics
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

RUN_S = 900.0  # deadline of one command, beside whatever else the machine does
GONE_S = 180.0  # for processes to go
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # of Ray; one whose driver was killed calls it for a minute
PROCESSES = {"rank lost": "ray::ActorWorker", "engine lost": "VLLM::"}
# of the process that trains, by how a run is ended; of one that does without what it lost: 0
EXIT_CODES = {"finished": 0, "SIGTERM": 5, "SIGKILL": -signal.SIGKILL, "engine lost": 0, "rank lost": 0}
REFUSED = (2, 3)
NOT_REPEATED = ("ready first", "ready first, partial")  # schedules that no two runs repeat
LEFT_OUT = ("turns/left_out", "train/not_finite_share")  # metrics of responses that no step has
STALENESS = {"sync": 0, "one step off": 1}  # others: 2
NOISE = 2.0**-7  # share of a weight: two roundings to bfloat16, as a layer's results are rounded several times
ROUNDINGS = 32  # of a model, where a response is further off than the bound
# of a token, engine against transformers; words of FP8 have three bits behind the point
LOG_PROB_BOUND = {"float32": 1e-4, "bfloat16": 0.15, "bfloat16, engines in FP8": 1.0}


@dataclass
class RowRun:
    """A row on its way; `problems` says what did not hold."""

    number: int
    row: Row
    world: Path
    folder: Path
    wholes: Path  # undisturbed runs, which rows share
    has_own_memory: bool = True  # of commands; where it is not possible, what they leave there is not looked for
    problems: list[str] = field(default_factory=list)
    seconds: list[list] = field(default_factory=list)  # each command of it with its seconds
    agents: list[psutil.Process] = field(default_factory=list)  # of killed drivers, to be gone by the row's end

    def do(self) -> None:
        """All of it, in the row's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._train()
        if not _lines(self.run):
            self.problems.append("the run has no metrics")
            return
        THEN[self.row["then"]](self)
        self._check_record()
        self._must_be_gone("train", self.agents)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def must(self, holds: bool, otherwise: str) -> None:
        """Notes a problem."""
        if not holds:
            self.problems.append(otherwise)

    # ------------------------------------------------------------------ the run and its end

    def _train(self) -> None:
        end = self.row["end"]
        code = self._mrl("train", *self._arguments(self.row), "--run-dir", str(self.run), end=end)
        self.must(code == EXIT_CODES[end], f"{end}: exit code {code} instead of {EXIT_CODES[end]}")

    @property
    def _finishes(self) -> bool:
        """Whether its first start comes to the last step, with whatever it loses on the way."""
        return EXIT_CODES[self.row["end"]] == 0

    def _arguments(self, row: Row, steps: int = STEPS) -> list[str]:
        given = as_overrides(settings(row, self.world, steps))
        return [str(PRESETS[row["placement"]]), *(word for text in given for word in ("--set", text))]

    def _mrl(self, *words: str, end: str = "finished") -> int:
        """Exit code of a command, ended on its way as `end` says; what it leaves behind is a problem, and removed."""
        log = self.folder / f"{words[0]}-{len(list(self.folder.glob('*.log')))}.log"
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        before = set(os.listdir(temporary))
        command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *words]
        began = time.monotonic()
        with log.open("w") as file, OwnMemory() as memory:
            process = subprocess.Popen(
                memory.command(command) if self.has_own_memory else command, cwd=ROOT,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            try:
                below = self._watch(process, end)
                if process.poll() is None:
                    self.problems.append(f"mrl {words[0]}: not done after {RUN_S:.0f} s")
            finally:
                _end_with_all_below(process)
            code = process.wait()
            if end == "SIGKILL":  # what follows need not wait for its agents
                self.agents = [one for one in below if _title(one).startswith(AGENTS)]
            self._must_be_gone(words[0], [one for one in below if one not in self.agents])
            held = memory.left() + sorted(set(os.listdir(temporary)) - before)
        # what a driver that is killed leaves is removed by whoever starts the run again
        self.must(end == "SIGKILL" or not held, f"mrl {words[0]} left {', '.join(held)}")
        self.seconds.append([words[0], round(time.monotonic() - began, 1)])
        return code

    def _must_be_gone(self, command: str, below: Sequence[psutil.Process]) -> None:
        _, left = psutil.wait_procs(below, timeout=GONE_S)
        for one in left:
            self.problems.append(f"mrl {command} left the process {one.pid}: {_title(one)[:80]}")
            one.kill()

    def _watch(self, process: subprocess.Popen, end: str) -> list[psutil.Process]:
        """All processes below one that ends, or is past its deadline."""
        below: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + RUN_S
        at = None if end == "finished" else random.Random(self.number).uniform(0, 1)  # s behind the line of step 2
        while process.poll() is None and time.monotonic() < deadline:
            found = _below(process.pid)
            below |= {child.pid: child for child in found}
            if at is not None and len(_lines(self.run)) >= 2:
                time.sleep(at)
                self._end(process, end, found)
                at = None
            time.sleep(0.1)
        self.must(at is None or process.poll() is None, f"{end}: the run was over before it")
        return list(below.values())

    def _end(self, process: subprocess.Popen, end: str, below: Sequence[psutil.Process]) -> None:
        if end in PROCESSES:
            victims = [one.pid for one in below if _title(one).startswith(PROCESSES[end])]
            if not victims:
                self.problems.append(f"{end}: no process {PROCESSES[end]} was there")
                return
            os.kill(max(victims), signal.SIGKILL)
        else:
            process.send_signal(getattr(signal, end))

    # ------------------------------------------------------------------ what follows

    def resume(self) -> None:
        """Goes on, and is what an undisturbed run is where schedules promise it."""
        steps = STEPS + 2 if self._finishes else STEPS
        words = self._arguments(self.row, steps)
        code = self._mrl("train", *words, "--run-dir", str(self.run), "--resume")
        self.must(code == 0, f"the resumed run: exit code {code}")
        promised = self.row["schedule"] not in NOT_REPEATED
        # a run that was to have fewer steps did not generate ahead for more
        if code or not promised or (self._finishes and self.row["schedule"] != "sync"):
            return
        self.be_the_undisturbed(steps)

    def be_the_undisturbed(self, steps: int = STEPS) -> None:
        """Has the metrics and the last checkpoint of a run of as many steps that nobody disturbed, bit by bit."""
        whole = self._whole(self._arguments(self.row, steps))
        found, expected = read_metrics(self.run / METRICS), read_metrics(whole / METRICS)
        self._must_be_none(metrics_difference(found, expected))
        folders = (folder / "checkpoints" / f"step-{steps}" for folder in (whole, self.run))
        self._must_be_none(checkpoint_difference(*folders))

    def _must_be_none(self, difference: str | None) -> None:
        self.must(difference is None, f"not what the undisturbed run is: {difference}")

    def _whole(self, words: list[str]) -> Path:
        """The run that was left alone; made once for equal settings."""
        known = self.wholes / "known.json"
        held = json.loads(known.read_text()) if known.exists() else {}
        key = json.dumps(words)
        if key not in held:
            folder = self.wholes / f"run-{len(held)}"
            code = self._mrl("train", *words, "--run-dir", str(folder))
            self.must(code == 0, f"the undisturbed run: exit code {code}")
            self.wholes.mkdir(parents=True, exist_ok=True)
            held[key] = folder.name
            known.write_text(json.dumps(held))
        return self.wholes / held[key]

    def resume_otherwise(self) -> None:
        """Goes on with another layout of the actor."""
        steps = STEPS + 1 if self._finishes else STEPS
        words = self._arguments(other_layout(self.row), steps)
        code = self._mrl("train", *words, "--run-dir", str(self.run), "--resume")
        self.must(code == 0, f"resumed with another layout: exit code {code}")
        self.must(_steps(self.run)[-1:] == [steps], "the run on another layout did not end")

    def be_refused(self) -> None:
        """Is refused another schedule before anything is touched."""
        before = (self.run / METRICS).read_bytes()
        words = self._arguments(other_schedule(self.row), STEPS + 1)
        code = self._mrl("train", *words, "--run-dir", str(self.run), "--resume")
        self.must(code in REFUSED, f"resumed by another schedule: exit code {code}")
        self.must((self.run / METRICS).read_bytes() == before, "a refused resume changed metrics.jsonl")

    def convert(self) -> None:
        """What the engines said of the newest tokens is what transformers says with the checkpoint of the version that
        made them.
        """
        kept = list(_samples(self.run))
        made = {version for sample in kept for version in token_versions(sample)} - {None}  # of context
        saved = set(_checkpoints(self.run))
        version = max(made & (saved | {0}), default=None)  # version 0 is the start, which every run has
        self.must(version is not None, f"tokens are of the versions {sorted(made)}, of which no checkpoint is kept")
        if version is None:
            return
        start = Path(settings(self.row, self.world, STEPS)["model.path"])
        out = self._exported(version or max(saved))
        if out is None:
            return
        samples = [sample for sample in kept if version in token_versions(sample)]
        dtypes = list(dict.fromkeys(["float32", self.row["dtype"].split(",")[0]]))
        bound = LOG_PROB_BOUND[self.row["dtype"]]
        some = samples[:: max(1, len(samples) // 8)]
        if self.row["images"] != "none":
            some = [sample for sample in some if self._is_read_by_transformers(sample, start)]
        worst = largest_difference(out if version else start, some, version, dtypes, bound, self.run / "images")
        self.must(worst <= bound, f"log-probs of version {version} are {worst:.2g} off transformers'")

    def _is_read_by_transformers(self, sample: Mapping[str, Any], model: Path) -> bool:
        """It takes every token of an image for one, where the model said it, too."""
        config = json.loads((model / "config.json").read_text())
        return not {config["image_token_id"], config["video_token_id"]} & set(sample["response_ids"])

    def _exported(self, step: int) -> Path | None:
        """A step's checkpoint in Hugging Face form, or None where `mrl convert` failed."""
        out = self.folder / f"hf-{step}"
        whole = []
        if self.row["images"] != "none":
            whole = ["--vision-from", settings(self.row, self.world)["model.path"]]
        words = [str(self.run / "checkpoints" / f"step-{step}"), "-o", str(out), *whole]
        code = self._mrl("convert", "megatron-to-hf", *words)
        self.must(code == 0, f"mrl convert of step {step}: exit code {code}")
        return out if code == 0 else None

    def evaluate(self) -> None:
        """Answers of the newest checkpoint are those of the validation behind the step that saved it."""
        out = self.folder / "eval"
        code = self._mrl("eval", *self._arguments(self.row), "--checkpoint", str(self.run), "-o", str(out))
        self.must(code == 0, f"mrl eval: exit code {code}")
        step = _checkpoints(self.run)[-1]
        held = self.run / "validation" / f"step-{step}.jsonl"
        if code or not held.exists() or self.row["dtype"] != "float32":
            return
        then = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
        now = [json.loads(line) for line in held.read_text().splitlines()]
        answers = [[(row["input"], row["output"], row["score"]) for row in rows] for rows in (now, then)]
        self.must(answers[0] == answers[1], f"mrl eval answers otherwise than the validation of step {step}")

    def report(self) -> None:
        """Is told in a page that names the steps and how the run ended."""
        code = self._mrl("report", str(self.run), "-o", str(self.folder / "report.html"))
        self.must(code == 0, f"mrl report: exit code {code}")

    # ------------------------------------------------------------------ what holds of every run

    def _check_record(self) -> None:
        rows = [row for row in read_metrics(self.run / METRICS) if row["training/global_step"]]
        most = STALENESS.get(self.row["schedule"], 2)
        for row in rows:
            step = row["training/global_step"]
            stale = row.get("training/off_policy/trajectory_staleness/max", 0)
            self.must(stale <= most, f"step {step}: staleness {stale}")
            self.must(row.get("reshard/verified") == 1, f"step {step}: the sync was not verified")
            self.must(row.get("reshard/weight_version") == step, f"step {step}: engines hold another version")
            self.must(row.get("actor/skipped_updates") == 0, f"step {step}: an update was skipped")
            if self.row["dtype"] == "float32" and most == 0:
                off = row["training/rollout_log_probs_abs_diff_max"]
                self.must(off <= LOG_PROB_BOUND["float32"], f"step {step}: trainer and engine differ by {off:.2g}")
        responses = settings(self.row, self.world)["rollout.n"]
        self.problems += lost_or_twice(rows, samples_by_step(self.run), responses)


THEN: Mapping[str, Callable[[RowRun], None]] = {
    "resume": RowRun.resume,
    "other layout": RowRun.resume_otherwise,
    "other schedule": RowRun.be_refused,
    "convert": RowRun.convert,
    "eval": RowRun.evaluate,
    "report": RowRun.report,
}


def largest_difference(
    model: Path,
    samples: Sequence[Mapping[str, Any]],
    version: int,
    dtypes: Sequence[str],
    bound: float,
    images: Path | None = None,
) -> float:
    """Returns how far an engine's log-probs of its own tokens of that version are from transformers', in nats.

    The nearest of the dtypes counts for each token; infinity for what is no number. In 16 bits a rounding can turn a
    router's choice between two experts. So a response that is further off than `bound` is read again with weights a
    little off, and the nearest reading of it counts. `images`: the run's, for samples that show some.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM
    if any(sample.get("images") for sample in samples):
        kind = AutoModelForImageTextToText
        samples = [sample | {"shown": shown(sample, model, images)} for sample in samples]
    readers = {name: kind.from_pretrained(model, dtype=getattr(torch, name)).eval() for name in dtypes}
    worst = 0.0
    for sample in samples:
        own = torch.tensor([made == version for made in token_versions(sample)])
        said = torch.tensor(sample["rollout_log_probs"])[own]
        nearest = torch.stack([(log_probs(one, sample)[own] - said).abs() for one in readers.values()]).amin(0)
        found = float(nearest.max())
        if math.isnan(found):
            return math.inf
        if len(dtypes) > 1 and found > bound:
            readings = _with_noise(readers["float32"], sample)
            found = min(found, *(float((read[own] - said).abs().max()) for read in readings))
        worst = max(worst, found)
    return worst


def _with_noise(reader: Any, sample: Mapping[str, Any]) -> Iterator[Any]:
    """Yields `log_probs` of a reader in float32, each time with every weight off by at most NOISE of its size."""
    import torch

    weights = [weight.detach().clone() for weight in reader.parameters()]
    numbers = torch.Generator().manual_seed(0)
    for _ in range(ROUNDINGS):
        with torch.no_grad():
            for weight, known in zip(reader.parameters(), weights, strict=True):
                off = torch.rand(known.shape, generator=numbers) * 2 - 1
                weight.copy_(known * (1 + NOISE * off))
        yield log_probs(reader, sample)
    with torch.no_grad():
        for weight, known in zip(reader.parameters(), weights, strict=True):
            weight.copy_(known)


def log_probs(reader: Any, sample: Mapping[str, Any]) -> Any:
    """What a model of transformers says of a response; float32 [tokens]."""
    import torch

    prompt, response = sample["prompt_ids"], sample["response_ids"]
    seen = sample.get("shown") or {}
    with torch.no_grad():
        logits = reader(torch.tensor([prompt + response]), **seen).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def shown(sample: Mapping[str, Any], model: Path, images: Path) -> dict[str, Any]:
    """What transformers is given of a response's images."""
    import torch

    from mrl.data.image_reader import ImageReader
    from mrl.data.samples import ImageStore

    reader = ImageReader.of(str(model), ImageStore(str(images), 1 << 24))
    kinds = torch.zeros(1, len(sample["prompt_ids"]) + len(sample["response_ids"]), dtype=torch.long)
    for image in sample["images"]:
        kinds[0, image["first_token"] : image["first_token"] + image["tokens"]] = 1
    if not sample["images"]:
        return {"mm_token_type_ids": kinds}
    pixels = torch.cat([torch.from_numpy(reader.pixels(image["name"])) for image in sample["images"]])
    grids = torch.tensor([image["grid"] for image in sample["images"]])
    return {"mm_token_type_ids": kinds, "pixel_values": pixels, "image_grid_thw": grids}


def token_versions(sample: Mapping[str, Any]) -> list[int | None]:
    """The version that made each token of a response; None of what a tool answered."""
    sampled = sample.get("sampled") or [True] * len(sample["response_ids"])
    spans = sample["weight_version"]
    found = []
    for place, own in enumerate(sampled):
        begun = [span["version"] for span in spans if span["first_token"] <= place]
        found.append(begun[-1] if own else None)
    return found


def lost_or_twice(
    rows: Sequence[Mapping[str, Any]], by_step: Mapping[int, Sequence[Mapping[str, Any]]], responses: int
) -> Iterator[str]:
    """Says what of a run stands in no step or in two, by its lines of metrics and its samples.

    Steps follow one another from 1 on. Each has its samples: as many groups as its line says that it trained on, of
    `responses` each, but where the line says that some were left out.
    """
    steps = [row["training/global_step"] for row in rows]
    if not steps or steps != list(range(1, len(steps) + 1)):
        yield f"steps {steps} do not follow one another from 1 on"
    for row in rows:
        step = row["training/global_step"]
        groups = Counter(sample["group_id"] for sample in by_step.get(step, ()))
        trained = row["train/trained_groups"]
        if len(groups) != trained:
            yield f"step {step}: samples of {len(groups)} groups, trained on {trained:.0f}"
        short = [group for group, number in groups.items() if number != responses]
        if short and not any(row.get(name) for name in LEFT_OUT):
            yield f"step {step}: groups {short[:3]} have not {responses} responses each"
    times = Counter((sample["prompt_id"], sample["seed"]) for samples in by_step.values() for sample in samples)
    twice = [one for one, number in times.items() if number > 1]
    if twice:
        yield f"responses in two steps: {twice[:3]}"


def samples_by_step(run: Path) -> dict[int, list[Mapping[str, Any]]]:
    """Responses of every step that has a file of them, each with the spans of its versions."""
    files = {step: run / "samples" / f"step-{step}.parquet" for step in _steps(run) if step}
    return {step: pq.read_table(file).to_pylist() for step, file in files.items() if file.exists()}


def _samples(run: Path) -> Iterator[Mapping[str, Any]]:
    for samples in samples_by_step(run).values():
        yield from samples


def _steps(run: Path) -> list[int]:
    return [row["training/global_step"] for row in read_metrics(run / METRICS)]


def _lines(run: Path) -> list[str]:
    path = run / METRICS
    return path.read_text().splitlines() if path.exists() else []


def _checkpoints(run: Path) -> list[int]:
    whole = (run / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in whole)


def _end_with_all_below(process: subprocess.Popen) -> None:
    """Ends a command that is still there, whatever interrupted the wait for it."""
    if process.poll() is None:
        for one in [*_below(process.pid), psutil.Process(process.pid)]:
            with suppress(psutil.Error):
                one.kill()


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
