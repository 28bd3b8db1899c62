"""Proves that a model family is right, in the order in which one looks for a fault.

    keys         every key of config.json that transformers' or vLLM's class reads is read, refused or explained
    names        tensors and shapes are those that transformers saves
    vllm         vLLM's own loader puts every element where the weight map says, on every worker of an engine
    conversion   Hugging Face's format -> mrl's in a layout -> Hugging Face's: the same bytes
    one rank     log-probs and gradients are those of transformers, for every drawn configuration
    layouts      the same in tensor, pipeline, expert and context parallelism, where rules allow it
    step         one training step of ranks and an engine that compute the same probabilities

Whatever needs torch, Megatron or vLLM runs in processes of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from mrl.config.family_rules import NOT_ON_CPU
from mrl.errors import ConfigError
from mrl.model import ModelSpec, model_spec, tensor_specs
from mrl.model.hf_config import HfConfig
from mrl.model.hf_files import checkpoint_tensors
from mrl.model.layout import LayoutDegrees, RolloutLayout, is_legal_layout
from mrl.model.registry import family_of, own_config
from mrl.platforms.hosting import get_hosting
from mrl.tools.family.config_keys import unread_keys
from mrl.tools.family.drawn import APART, BIASES, MIXED, ODD, PLAIN, WHOLE, as_transformers, drawn_configs
from mrl.tools.family.step import train_step
from mrl.tools.own_command import run_mrl

DEADLINE_S = 900.0  # for one group of processes
LOG_PROBS = 1e-5  # largest difference from transformers
# Largest share of a tensor's norm. Measured: up to 4e-6, and 1.9e-5 for routers and gates beside gated delta attention,
# of which transformers' own float32 is 1.1e-5 from its float64 (tests/real/test_parity.py).
GRADIENTS = 3e-5
_SHOWN = 10
_TP, _PP, _EP, _ETP, _CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
)
_LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {_TP: 2},
    "pp2": {_PP: 2},
    "cp2": {_CP: 2},
    "tp2 etp2": {_TP: 2, _ETP: 2},
    "tp2 ep2": {_TP: 2, _EP: 2},
}
_OF_MIXED = ("pp2", "tp2 ep2")
_ROLLOUTS = (
    RolloutLayout(1, 1),
    RolloutLayout(1, 2),
    RolloutLayout(1, 4),
    RolloutLayout(1, 2, 1, 2),
    RolloutLayout(1, 1, 3, 3),
)
_IN_ENGINES = (PLAIN, ODD, APART, WHOLE)
_CONVERSION = ("tp=2,pp=2,ep=2", "tp=2,pp=2")


@dataclass(frozen=True)
class Check:
    """One line of the answer. `faults`: what is wrong, empty if nothing is."""

    name: str
    found: str  # what was compared, with the worst number
    faults: tuple[str, ...] = ()
    cure: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Tells whether nothing is wrong."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Returns the check as plain data."""
        status = "ok" if self.ok else "failure"
        return {
            "name": self.name,
            "status": status,
            "found": self.found,
            "faults": list(self.faults),
            "cure": self.cure,
            "seconds": round(self.seconds, 1),
        }


class FamilyCheck:
    """The checks of one family. They share the tiny models that transformers made."""

    def __init__(self, config: HfConfig, work: Path) -> None:
        """`config`: the model's own config.json. `work`: an empty folder."""
        self.work = work
        self.model = model_spec(config)
        self.family = family_of(self.model)
        self.configs = {name: self._named(drawn) for name, drawn in drawn_configs(config).items()}
        self._made: dict[str, Any] | None = None

    def _named(self, drawn: dict[str, Any]) -> dict[str, Any]:
        if "text_config" in drawn:
            return drawn
        return {**drawn, "architectures": [self.family.architecture]}

    @property
    def file(self) -> str:
        """The file with the family's rows."""
        return f"mrl/model/{self.family.read.__module__.rpartition('.')[2]}.py"

    def run(self, only: tuple[str, ...] = ()) -> Iterator[Check]:
        """Yields the checks in order. `only`: names of those to run; empty: all."""
        for name, check in CHECKS.items():
            if only and name not in only:
                continue
            began = time.monotonic()
            found = check(self)
            yield Check(name, found.found, found.faults, found.cure, time.monotonic() - began)

    def folder(self, name: str) -> Path:
        """Returns the folder of a drawn model."""
        return self.work / "models" / str(list(self.configs).index(name))

    def made(self) -> dict[str, Any]:
        """Returns the tensors of each drawn model that transformers could make, or its fault."""
        if self._made is None:
            cases = [
                {"name": name, "config": config, "folder": str(self.folder(name))}
                for name, config in self.configs.items()
            ]
            self._made = self._answers("mrl.rank.family_reference", {"cases": cases}, "reference")
        return self._made

    def usable(self) -> list[str]:
        """Returns the names of the drawn models that transformers made."""
        return [name for name, found in self.made().items() if "fault" not in found]

    def _answers(self, program: str, job: dict[str, Any], name: str) -> dict[str, Any]:
        file = self._job(name, job)
        code = _run([[sys.executable, "-m", program, str(file)]], file)
        out = file.with_suffix(".out")
        if code or not out.exists():
            return {case["name"]: {"fault": _last_lines(file.with_suffix(".log-0"))} for case in job["cases"]}
        return json.loads(out.read_text(encoding="utf-8"))

    def _job(self, name: str, job: dict[str, Any]) -> Path:
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / f"{name}.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        return file

    def keys(self) -> Check:
        """Checks that every key of config.json is read, refused or explained."""
        unread = unread_keys(_with_defaults(self.configs[PLAIN]))
        faults = tuple(f"{key} is read by transformers or vLLM, and here by nobody" for key in unread)
        cure = (
            f"read it in {self.file}, refuse it there by a row of _PLAIN, or say in WITHOUT_EFFECT of "
            "mrl/tools/family/config_keys.py why every value means the same model"
        )
        return Check("keys", "keys that transformers' and vLLM's classes read", faults, cure)

    def names(self) -> Check:
        """Checks names and shapes of the weight map against what transformers saves."""
        faults = []
        for name, found in self.made().items():
            if "fault" in found:
                faults.append(f"{name}: transformers cannot make it: {found['fault']}")
                continue
            model = model_spec(json.loads((self.folder(name) / "config.json").read_text(encoding="utf-8")))
            faults += [f"{name}: {fault}" for fault in _other_names(model, self.folder(name))]
        cure = f"give each tensor of the checkpoint a row of dense_layer or expert_layer in {self.file}"
        return Check("names", f"{len(self.configs)} drawn models of transformers' class", tuple(faults), cure)

    def vllm(self) -> Check:
        """Checks the weight map's view of vLLM against vLLM's own loader."""
        cases = []
        for name in [name for name in self.usable() if name in _IN_ENGINES or name.startswith(BIASES)]:
            folder = self.folder(name)
            model = model_spec(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            for rollout in _ROLLOUTS:
                if _vllm_divides(model, rollout):
                    layout = astuple(rollout)
                    label = f"{name}, {rollout.tensor} x {rollout.data} workers"
                    cases.append({"name": f"{label}{', experts spread' * (rollout.expert > 1)}", "folder": str(folder),
                                  "layout": layout})  # fmt: skip
        faults = _nothing(cases)
        for name, found in self._answers("mrl.engine.loader_check", {"cases": cases}, "vllm").items():
            faults += [f"{name}: {fault}" for fault in found.get("differences", [found.get("fault")])]
        cure = f"mend the vLLM names, splits or dtypes of the rows in {self.file}, or its vllm_order"
        return Check("vllm", f"{len(cases)} engines, every element", tuple(faults), cure)

    def conversion(self) -> Check:
        """Checks that a conversion there and back gives the same bytes."""
        folder = self.folder(PLAIN)
        if PLAIN not in self.usable():
            return Check("conversion", "nothing", ("transformers made no model to convert",))
        layout = _CONVERSION[0 if self.model.is_moe else 1]
        steps = (
            ["convert", "hf-to-megatron", str(folder), "--layout", layout, "-o", str(self.work / "there")],
            ["convert", "megatron-to-hf", str(self.work / "there"), "-o", str(self.work / "back")],
        )
        for step in steps:
            log = self.work / f"{step[1]}.log"
            if run_mrl(step, log, DEADLINE_S):
                return Check("conversion", layout, (_last_lines(log),), f"see {log}")
        faults = _other_bytes(folder, self.work / "back")
        return Check(
            "conversion", f"to {layout} and back", tuple(faults), f"mend the splits of the rows in {self.file}"
        )

    def one_rank(self) -> Check:
        """Checks log-probs and gradients of every drawn model on one rank."""
        return self._parity("one rank", 1, {name: (name, {}) for name in self.usable()})

    def layouts(self) -> Check:
        """Checks log-probs and gradients in every legal layout of two ranks."""
        legal = {}
        for drawn in self.usable():
            is_mixed = drawn.startswith(MIXED)  # dense layers among those with experts
            for name, degrees in _LAYOUTS.items():
                if drawn == PLAIN or (is_mixed and name in _OF_MIXED):
                    label = name if drawn == PLAIN else f"{name} with {drawn}"
                    if self._is_legal(drawn, degrees):
                        legal[label] = (drawn, degrees)
        return self._parity("layouts", 2, legal)

    def _is_legal(self, drawn: str, degrees: dict[str, int]) -> bool:
        model = model_spec(self.configs[drawn])
        return is_legal_layout(LayoutDegrees.of({"world_size": 2} | degrees), model)

    def _parity(self, check: str, ranks: int, cases: dict[str, tuple[str, dict[str, int]]]) -> Check:
        """`cases`: name -> drawn model and degrees."""
        job = {"world_size": ranks, "cases": []}
        for name, (drawn, degrees) in cases.items():
            folder = str(self.folder(drawn))
            config = run_config(folder, {"world_size": ranks} | degrees)
            words = own_config(self.configs[drawn])["vocab_size"]
            job["cases"].append({"name": name, "folder": folder, "config": config, "words": words})
        file = self._job(check.replace(" ", "-"), job)
        program = [sys.executable, "-m", "mrl.rank.family_ranks", str(file)]
        _run([[*program, str(rank)] for rank in range(ranks)], file)
        faults = _nothing(job["cases"])
        worst = {"log_probs": 0.0, "gradients": 0.0}
        for name in cases:
            for rank in range(ranks):
                faults += [f"{name}: {fault}" for fault in _judged(_found(file, rank).get(name), worst, file, rank)]
        compared = f"{', '.join(cases)}: log-probs to {worst['log_probs']:.1e}, gradients to {worst['gradients']:.1e}"
        cure = f"mend the Megatron names and splits of the rows in {self.file}, or what bridge_config says of the model"
        return Check(check, compared, tuple(dict.fromkeys(faults)), f"{cure} (mrl/rank/mapped_bridge.py)")

    def step(self) -> Check:
        """Checks one training step with an engine."""
        if why := NOT_ON_CPU.get(self.model.family):
            return Check("step", f"not run on a CPU: {why}")
        cure = "see the log of the run; rules are in mrl/config/family_rules.py"
        found = train_step(self.configs[PLAIN], {}, self.work / "step", DEADLINE_S)
        if WHOLE not in self.configs or found.faults:
            return Check("step", found.said, found.faults, cure)
        inside = train_step(self.configs[PLAIN], self.configs[WHOLE], self.work / "whole", DEADLINE_S)
        return Check("step", f"{found.said}; {WHOLE}: {inside.said}", inside.faults, cure)


CHECKS: dict[str, Callable[[FamilyCheck], Check]] = {
    "keys": FamilyCheck.keys,
    "names": FamilyCheck.names,
    "vllm": FamilyCheck.vllm,
    "conversion": FamilyCheck.conversion,
    "one rank": FamilyCheck.one_rank,
    "layouts": FamilyCheck.layouts,
    "step": FamilyCheck.step,
}


def _nothing(cases: list[dict[str, Any]]) -> list[str]:
    return [] if cases else ["nothing to compare: transformers made no model"]


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with transformers' value of every key, as an official file may spell it out."""
    known = as_transformers(config)
    # lists with an entry a layer follow from other keys
    left_out = ("rope_parameters", "rope_theta", "rope_scaling", "layer_types", "mlp_layer_types")
    return {key: value for key, value in known.items() if key not in left_out} | config


def _other_names(model: ModelSpec, folder: Path) -> list[str]:
    from mrl.model.wrapped import inner_tensors

    wanted = {spec.name: spec.shape for spec in tensor_specs(model)}
    stored = {}
    for key, tensor in checkpoint_tensors(folder).items():
        is_tied_head = "lm_head" in key and model.tie_word_embeddings
        if is_tied_head or family_of(model).is_left_out(key, model):
            continue
        stored |= {inner.name: inner.shape for inner in inner_tensors(key, tensor.shape)}
    return [
        f"{name}: {stored.get(name, 'not in the checkpoint')}, {wanted.get(name, 'no row')}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]


def _other_bytes(one: Path, other: Path) -> list[str]:
    """Returns tensors of two folders that differ in name, dtype, shape or bytes."""
    held = [dict(_contents(folder)) for folder in (one, other)]
    return sorted(name for name in held[0].keys() | held[1].keys() if held[0].get(name) != held[1].get(name))


def _contents(folder: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    from mrl.model.hf_files import read_safetensors_header, weight_files

    for file in weight_files(folder):
        data = file.read_bytes()
        for name, tensor in read_safetensors_header(file).items():
            yield name, (tensor.dtype, tensor.shape, data[tensor.start : tensor.stop])


def _vllm_divides(model: ModelSpec, rollout: RolloutLayout) -> bool:
    """Tells whether vLLM can spread a model over these workers as the weight map describes it."""
    from mrl.model.vllm_parameters import target_parameters

    if (rollout.expert > 1 or rollout.data > 1) and not model.is_moe:
        return False
    if min(rollout.tensor, rollout.data, rollout.expert) > 1 or model.num_attention_heads % rollout.tensor:
        return False
    try:
        target_parameters(model, rollout, 0, "cpu", "float32")
    except ConfigError:
        return False
    return True


def run_config(path: str, layout: dict[str, int]) -> dict[str, Any]:
    """Returns the configuration of ranks that compare themselves with transformers."""
    rows = 7
    return {
        "model": {"path": path, "dtype": "float32"},
        "actor": {"layout": layout, "ppo_mini_batch_size": rows, "log_prob_micro_batch_size_per_gpu": 4},
        "rollout": {"n": 1},
        "algorithm": {"policy_loss": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}},
        "data": {"train_batch_size": rows},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }


def _run(commands: list[list[str]], job: Path) -> int:
    """Runs processes together, and ends all of them when one fails. Returns the worst exit code."""
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | get_hosting("cpu").actor_environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    processes = []
    try:
        for number, command in enumerate(commands):
            with job.with_suffix(f".log-{number}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )
        return _waited(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _waited(processes: list[subprocess.Popen]) -> int:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes):
            return max(abs(code) for code in codes if code)
        if None not in codes:
            return 0
        time.sleep(0.05)
    return 1


def _found(job: Path, rank: int) -> dict[str, Any]:
    file = job.with_suffix(f".rank-{rank}")
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def _judged(found: dict[str, Any] | None, worst: dict[str, float], job: Path, rank: int) -> list[str]:
    """Returns what is wrong in one rank's answer, and keeps the worst numbers."""
    if found is None:
        return [f"no answer of rank {rank}: {_last_lines(job.with_suffix(f'.log-{rank}'))}"]
    if "fault" in found:
        return [found["fault"]]
    faults = [f"parameter {name}" for name in found["parameters"]]
    faults += [f"{name} is exported by only one of both" for name in found["names"]]
    faults += [f"{name} is exported with other bits" for name in found["bits"]]
    off = found.get("log_probs", 0.0)
    worst["log_probs"] = max(worst["log_probs"], off)
    if not off < LOG_PROBS:
        faults.append(f"log-probs differ by {off:.1e} from transformers'")
    for name, distance in found.get("gradients", {}).items():
        worst["gradients"] = max(worst["gradients"], distance)
        if not distance < GRADIENTS:
            faults.append(f"the gradient of {name} differs by {distance:.1e} of its norm")
    return faults


def _last_lines(log: Path) -> str:
    if not log.exists():
        return "it did not start"
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(lines[-_SHOWN:])
