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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.config.family_rules import NOT_ON_CPU
from mrl.errors import ConfigError
from mrl.model import ModelSpec, model_spec, tensor_specs
from mrl.model.hf_config import HfConfig
from mrl.model.hf_files import checkpoint_tensors
from mrl.model.layout import LayoutDegrees, RolloutLayout, is_legal_layout
from mrl.model.registry import family_of, inner_tensors, own_config
from mrl.platforms.hosting import get_hosting
from mrl.tools.family.config_keys import unread_by_engines, unread_keys
from mrl.tools.family.drawn import APART, BIASES, MIXED, ODD, PLAIN, WHOLE, as_transformers, drawn_configs
from mrl.tools.family.step import train_step
from mrl.tools.own_command import run_mrl

DEADLINE_S = 900.0  # for one group of processes
RANKS = 2
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
_IN_ALL_ENGINES = (PLAIN, ODD)
_CONVERSION = ("tp=2,pp=2,ep=2", "tp=2,pp=2")
Cases = dict[str, dict[str, Any]]  # name -> what a process needs to know of it


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
    """The checks of one family."""

    def __init__(self, config: HfConfig, work: Path, together: "_Together") -> None:
        """`config`: the model's own config.json. `work`: an empty folder. `together`: with other families."""
        self.work = work
        self.model = model_spec(config)
        self.family = family_of(self.model)
        self.configs = {name: self._named(drawn) for name, drawn in drawn_configs(config).items()}
        self._together = together

    def _named(self, drawn: dict[str, Any]) -> dict[str, Any]:
        if "text_config" in drawn:
            return drawn
        return {**drawn, "architectures": [self.family.architecture]}

    @property
    def file(self) -> str:
        """The file with the family's rows."""
        return f"mrl/model/{self.family.read.__module__.rpartition('.')[2]}.py"

    def folder(self, name: str) -> Path:
        """Returns the folder of a drawn model."""
        return self.work / "models" / str(list(self.configs).index(name))

    def models_to_make(self) -> Cases:
        """Returns each drawn model for transformers."""
        return {name: {"config": config, "folder": str(self.folder(name))} for name, config in self.configs.items()}

    def made(self) -> dict[str, Any]:
        """Returns the tensors of each drawn model that transformers could make, or its fault."""
        return self._together.reference(self)

    def usable(self) -> list[str]:
        """Returns the names of the drawn models that transformers made."""
        return [name for name, found in self.made().items() if "fault" not in found]

    def keys(self) -> Check:
        """Checks that every key of config.json is read, refused or explained."""
        config = _with_defaults(self.configs[PLAIN])
        faults = (
            *(f"{key} is read by transformers or vLLM, but not by mrl" for key in unread_keys(config)),
            *(f"{key} is read here, and vLLM's class computes one value of it" for key in unread_by_engines(config)),
        )
        cure = (
            f"read it in {self.file}, refuse it there by a row of _PLAIN (in the second case all values but vLLM's), "
            "or say in WITHOUT_EFFECT of mrl/tools/family/config_keys.py why every value means the same model"
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
        return Check("names", f"{len(self.configs)} random tiny models of transformers' class", tuple(faults), cure)

    def engines(self) -> Cases:
        """Returns the engines that load a drawn model, by what is special about them."""
        cases = {}
        for name in [name for name in self.usable() if name in _IN_ENGINES or name.startswith(BIASES)]:
            folder = self.folder(name)
            model = model_spec(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            for rollout in _ROLLOUTS if name in _IN_ALL_ENGINES else _ROLLOUTS[:2]:
                if _vllm_divides(model, rollout):
                    label = (
                        f"{name}, {rollout.tensor} x {rollout.data} workers{', experts spread' * (rollout.expert > 1)}"
                    )
                    cases[label] = {"folder": str(folder), "layout": astuple(rollout)}
        return cases

    def vllm(self) -> Check:
        """Checks the weight map's view of vLLM against vLLM's own loader."""
        found = self._together.loader(self)
        faults = _nothing(found)
        for name, said in found.items():
            faults += [f"{name}: {fault}" for fault in said.get("differences", [said.get("fault")])]
        cure = f"mend the vLLM names, splits or dtypes of the rows in {self.file}"
        return Check("vllm", f"{len(found)} engines, every element", tuple(faults), cure)

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

    def on_one_rank(self) -> Cases:
        """Returns each drawn model for one rank."""
        return {name: self._compared(name, {"world_size": 1}) for name in self.usable()}

    def in_layouts(self) -> Cases:
        """Returns drawn models in every legal layout of two ranks."""
        cases = {}
        for drawn in self.usable():
            is_mixed = drawn.startswith(MIXED)  # dense layers among those with experts
            for name, degrees in _LAYOUTS.items():
                layout = {"world_size": 2} | degrees
                if (drawn == PLAIN or (is_mixed and name in _OF_MIXED)) and self._is_legal(drawn, layout):
                    label = name if drawn == PLAIN else f"{name} with {drawn}"
                    cases[label] = self._compared(drawn, layout)
        return cases

    def _is_legal(self, drawn: str, layout: dict[str, int]) -> bool:
        return is_legal_layout(LayoutDegrees.of(layout), model_spec(self.configs[drawn]))

    def _compared(self, drawn: str, layout: dict[str, int]) -> dict[str, Any]:
        """Returns what ranks need to know that compare a drawn model with transformers' numbers."""
        folder = str(self.folder(drawn))
        vocab_size = own_config(self.configs[drawn])["vocab_size"]
        return {"folder": folder, "config": run_config(folder, layout), "words": vocab_size}

    def one_rank(self) -> Check:
        """Checks log-probs and gradients of every drawn model on one rank."""
        return self._parity("one rank", self._together.one_rank(self))

    def layouts(self) -> Check:
        """Checks log-probs and gradients in every legal layout of two ranks."""
        return self._parity("layouts", self._together.layouts(self))

    def _parity(self, check: str, found: dict[str, Any]) -> Check:
        """`found`: of each case, what each of its ranks found."""
        faults = _nothing(found)
        worst = {"log_probs": 0.0, "gradients": 0.0}
        for name, of_ranks in found.items():
            faults += [f"{name}: {fault}" for said in of_ranks for fault in _judged(said, worst)]
        compared = f"{', '.join(found)}: log-probs to {worst['log_probs']:.1e}, gradients to {worst['gradients']:.1e}"
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


class FamilyChecks:
    """The checks of some families."""

    def __init__(self, configs: Mapping[str, HfConfig], work: Path) -> None:
        """`configs`: each model's own config.json, by a name that the answer has for it. `work`: an empty folder."""
        self._together = _Together(work)
        self.families = {
            name: FamilyCheck(config, work / str(number), self._together)
            for number, (name, config) in enumerate(configs.items())
        }
        self._together.families += self.families.values()

    def run(self, only: tuple[str, ...] = ()) -> Iterator[tuple[str, Check]]:
        """Yields the checks in order, each of all families. `only`: names of those to run; empty: all.

        What one process computes for all families counts as the first one's seconds.
        """
        names = [name for name in CHECKS if not only or name in only]
        self._together.checks = names
        for name in names:
            for label, family in self.families.items():
                began = time.monotonic()
                found = CHECKS[name](family)
                yield label, replace(found, seconds=time.monotonic() - began)


class _Together:
    """What processes compute for all families at once: most of their seconds are the import of their packages."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.families: list[FamilyCheck] = []
        self.checks: list[str] = []  # that are asked for

    def reference(self, family: FamilyCheck) -> dict[str, Any]:
        """Returns what transformers says of each model of a family."""
        return self._reference[family]

    def loader(self, family: FamilyCheck) -> dict[str, Any]:
        """Returns what vLLM's loader says of each engine of a family."""
        return self._loader[family]

    def one_rank(self, family: FamilyCheck) -> dict[str, Any]:
        """Returns what one rank says of each model of a family."""
        return self._ranks[0][family]

    def layouts(self, family: FamilyCheck) -> dict[str, Any]:
        """Returns what each of two ranks says of each layout of a family."""
        return self._ranks[1][family]

    @cached_property
    def _reference(self) -> dict[FamilyCheck, dict[str, Any]]:
        cases = {family: family.models_to_make() for family in self.families}
        return _of_families(cases, self._answers("mrl.rank.family_reference", "reference", cases))

    @cached_property
    def _loader(self) -> dict[FamilyCheck, dict[str, Any]]:
        cases = {family: family.engines() for family in self.families}
        return _of_families(cases, self._answers("mrl.engine.loader_check", "vllm", cases))

    @cached_property
    def _ranks(self) -> tuple[dict[FamilyCheck, dict[str, Any]], dict[FamilyCheck, dict[str, Any]]]:
        """Two processes first share the models of one rank, then are the two ranks of all layouts."""
        alone, both = (
            {family: cases(family) if name in self.checks else {} for family in self.families}
            for name, cases in (("one rank", FamilyCheck.on_one_rank), ("layouts", FamilyCheck.in_layouts))
        )
        job = self._job("ranks", {"alone": _listed(alone), "together": _listed(both)})
        program = [sys.executable, "-m", "mrl.rank.family_ranks", str(job)]
        _run([[*program, str(rank)] for rank in range(RANKS)], job)
        found = [_found(job, rank) for rank in range(RANKS)]
        missing = [
            {"fault": f"no answer of rank {rank}: {_last_lines(job.with_suffix(f'.log-{rank}'))}"}
            for rank in range(RANKS)
        ]
        said = {"alone": {}, "together": {}}
        for number, case in enumerate(_listed(alone)):
            rank = number % RANKS
            said["alone"][case["name"]] = [found[rank].get(case["name"], missing[rank])]
        for case in _listed(both):
            said["together"][case["name"]] = [found[rank].get(case["name"], missing[rank]) for rank in range(RANKS)]
        return _of_families(alone, said["alone"]), _of_families(both, said["together"])

    def _answers(self, program: str, name: str, cases: dict[FamilyCheck, Cases]) -> dict[str, Any]:
        job = self._job(name, {"cases": _listed(cases)})
        code = _run([[sys.executable, "-m", program, str(job)]], job)
        out = job.with_suffix(".out")
        if code or not out.exists():
            fault = {"fault": _last_lines(job.with_suffix(".log-0"))}
            return {case["name"]: fault for case in _listed(cases)}
        return json.loads(out.read_text(encoding="utf-8"))

    def _job(self, name: str, job: dict[str, Any]) -> Path:
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / f"{name}.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        return file


def _listed(cases: dict[FamilyCheck, Cases]) -> list[dict[str, Any]]:
    """Returns all families' cases, with names that no other case has."""
    return [
        {"name": f"{family.work.name}: {name}", **case} for family, each in cases.items() for name, case in each.items()
    ]


def _of_families(cases: dict[FamilyCheck, Cases], said: dict[str, Any]) -> dict[FamilyCheck, dict[str, Any]]:
    """Returns the answers to each family's cases, by their own names."""
    return {family: {name: said[f"{family.work.name}: {name}"] for name in each} for family, each in cases.items()}


def _nothing(cases: Mapping[str, Any]) -> list[str]:
    return [] if cases else ["nothing to compare: transformers made no model"]


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with transformers' value of every key, as an official file may spell it out."""
    known = as_transformers(config)
    # lists with an entry a layer follow from other keys
    left_out = ("rope_parameters", "rope_theta", "rope_scaling", "layer_types", "mlp_layer_types")
    return {key: value for key, value in known.items() if key not in left_out} | config


def _other_names(model: ModelSpec, folder: Path) -> list[str]:
    wanted = {spec.name: spec.shape for spec in tensor_specs(model)}
    stored = {}
    for key, tensor in checkpoint_tensors(folder).items():
        is_tied_head = "lm_head" in key and model.tie_word_embeddings
        if is_tied_head or family_of(model).is_left_out(key, model):
            continue
        stored |= {inner.name: inner.shape for inner in inner_tensors(model, key, tensor.shape)}
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


def _judged(found: dict[str, Any], worst: dict[str, float]) -> list[str]:
    """Returns what is wrong in one rank's answer, and keeps the worst numbers."""
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
