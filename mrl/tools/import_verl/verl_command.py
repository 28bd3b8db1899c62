"""Finds the command that starts verl, and its overrides (`key=value` in Hydra's notation).

What is unknown about a value is kept beside it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.layout import LayoutDegrees
from mrl.tools.import_verl.expansion import Value, why_unknown
from mrl.tools.import_verl.hydra_values import hydra_value, leaves, read_value
from mrl.tools.import_verl.keys import MEGATRON, TRANSFORMER, A, M, R
from mrl.tools.import_verl.named_config import named_config
from mrl.tools.import_verl.shell import Launch, Script, read_script
from mrl.tools.import_verl.verl_defaults import VERL_DEFAULTS

# Modules that train with reinforcement learning. `recipe.dapo.main_dapo` adds dynamic sampling to the same keys; a copy
# of that recipe may lie in any folder.
_ENTRY = re.compile(
    r"(verl\.trainer\.main_ppo\w*|((verl_)?recipe\.)?(?<![a-z_])dapo\.main_dapo\w*|"
    r"verl\.experimental\.\w+\.(main_ppo\w*|\w*_main)|recipe\.(\w+\.){1,3}(\w*_)?main(?!_eval|_gen|_sft)(_\w+)?)"
    r"(?![\w.])"
)
# Of these, the modules that train as their keys say. Others have a loss, an estimator or rewards of their own in code.
_AS_KEYS_SAY = re.compile(
    r"verl\.trainer\.main_ppo(_sync|_v0)?|verl\.experimental\.\w+\.(main_ppo|\w*_main)|(\w+\.)*dapo\.(\w+\.)?main_dapo|"
    r"recipe\.(one_step_off_policy|fully_async_policy|partial_rollout|entropy|dynamo)\..*"
)
_ASCEND = re.compile(r"ASCEND_|HCCL_|VLLM_ASCEND_")  # environment variables
_OTHER_VERL = re.compile(r"verl\.(trainer|model_merger|experimental)\b[\w.]*|recipe\.[\w.]+")
_OVERRIDE = re.compile(r"(\+\+?|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
# Options of Hydra's command line whose value may be a separate word
_WITH_VALUE = frozenset(
    ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p", "--cfg", "-c")
)
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")  # to another key, as OmegaConf writes it
_LONG = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
MOST_INSIDE = 8  # depth of scripts that are given to commands of scripts as text
_ODD_BLANK = re.compile(r"[\u00a0\u1680\u2000-\u200b\u202f\u205f\u3000\ufeff]")  # blanks to a reader only
_LISTED = 4  # programs that are named where none of them is verl's
_SHOWN = 80  # characters shown of a word that is not read


@dataclass(frozen=True)
class Override:
    """One setting of verl's. `missing` is empty where the value is known."""

    key: str
    value: Any
    line: int
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class VerlCommand:
    """The command with which a script starts verl."""

    entry: str  # the module, such as verl.trainer.main_ppo; "" for overrides without a script
    config_name: str
    overrides: tuple[Override, ...]
    remarks: tuple[str, ...]
    faults: tuple[str, ...] = ()  # places of the script that cannot be read
    ascend: bool = False  # the script sets variables that only NPUs use


def from_script(script: Script, name: str, depth: int = 0) -> VerlCommand:
    """Returns the only command of a script that starts verl's RL training.

    `depth` counts the scripts around this one. Raises ConfigError where there is no such command, or more than one.
    """
    if depth > MOST_INSIDE:
        raise ConfigError(f"{name}: nested too deeply")
    launches = [(launch, entry) for launch in script.commands if (entry := _entry(launch.words)) is not None]
    if not launches and (inner := _inside(script, name)) is not None:
        return from_script(inner, name, depth + 1)
    if not launches:
        raise ConfigError("; ".join((*script.faults, script.refusal or f"{name}: {_why_not(script)}")))
    if len({tuple(w.text for w in launch.words) for launch, _ in launches}) > 1:
        lines = ", ".join(str(launch.line) for launch, _ in launches)
        raise ConfigError(
            f"{name}: starts verl more than once (lines {lines}); give one script a run, or the "
            "variable that chooses by --set"
        )
    launch, (entry, _) = launches[-1]
    stray = [word for other in script.commands if other.line > launch.line and _strays(other) for word in other.words]
    remarks = list(script.remarks)
    if stray:
        remarks.append(
            f"{name}:{_broken_continuation(script.lines, stray[0].argument_line)}: the shell ends the command there, "
            f"so verl never got what follows from line {stray[0].argument_line} on; it is taken as it was meant"
        )
    command = from_arguments([*launch.words, *stray], entry, name)
    ascend = any(_ASCEND.match(variable) for variable in script.variables)
    faults = (*(f"mend {fault}" for fault in script.faults), *command.faults)
    return replace(command, remarks=(*remarks, *command.remarks), faults=faults, ascend=ascend)


def from_arguments(words: Sequence[Value], entry: str = "", script: str = "") -> VerlCommand:
    """Returns the overrides among the words of a command, behind the module `entry` where there is one.

    They win over those of the file that the command names.
    """
    overrides: dict[str, Override] = {}
    options: dict[str, Value] = {}
    remarks = []
    faults = []
    found = _entry(words)
    rest = list(words[found[1] + 1 :]) if found is not None else list(words)
    while rest:
        word = rest.pop(0)
        option, _, value = word.text.partition("=")
        if option.startswith("-"):
            given = Value(value, word.missing, word.line)
            options[_LONG.get(option, option)] = rest.pop(0) if option in _WITH_VALUE and not value and rest else given
        elif (match := _OVERRIDE.fullmatch(word.text)) is not None:
            value = hydra_value(match[3])
            if not word.missing and (fault := _refused(match[2], match[3], word)):
                faults.append(fault)
            if match[2] in overrides and overrides[match[2]].value != value:
                remarks.append(f"line {word.line}: {match[2]} is set again; the later value wins, as with verl")
            if match[1] == "~":
                overrides.pop(match[2], None)
            else:
                _merge(overrides, Override(match[2], value, word.line, word.missing))
        elif word.text.strip():
            faults.append(_not_read(word))
    config_name = ""
    if "--config-name" in options:
        config_name = options["--config-name"].text
    named = named_config(config_name, options.get("--config-path", options.get("--config-dir")), entry, script)
    merged = {key: Override(key, value, 0) for key, value in named.values.items()}
    for override in overrides.values():
        _merge(merged, override)
    remarks += [named.said] if named.said else []
    settings = tuple(replace(override, **_referred(override, merged)) for override in merged.values())
    return VerlCommand(entry, config_name, settings, tuple(remarks), (*named.faults, *faults))


def _referred(override: Override, overrides: dict[str, Override]) -> dict[str, Any]:
    """Returns value and unknown names of an override with its references to other keys (`${data.key}`) followed, as
    OmegaConf does when the value is read.

    Relative references, resolvers (`${oc.env:NAME}`), circles, and keys without a value here are unknown.
    """
    if override.missing:
        return {}
    missing: set[str] = set()

    def followed(value: Any, above: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [followed(item, above) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if (whole := _REFERENCE.fullmatch(value)) is not None:
            return of_key(whole, above)
        text = _REFERENCE.sub(lambda match: str(of_key(match, above)), value)
        missing.update([text] if "${" in text else [])
        return text

    def of_key(match: re.Match[str], above: tuple[str, ...]) -> Any:
        key = match[1]
        other = overrides.get(key, Override(key, VERL_DEFAULTS.get(key), 0))
        if other.value is None or other.missing or key in above:
            missing.add(match[0])
            return match[0]
        return followed(other.value, (*above, key))

    return {"value": followed(override.value, (override.key,)), "missing": frozenset(missing)}


def _merge(overrides: dict[str, Override], given: Override) -> None:
    """Adds an override as Hydra merges it: a mapping sets what it names, and any other value replaces a whole section.

    Of what is unknown in a mapping each entry keeps its own part.
    """
    for key, value in leaves(given.key, given.value):
        own = frozenset(name for name in given.missing if name in str(value))
        names = given.missing if key == given.key else own
        if value == {} and any(known.startswith(f"{key}.") for known in overrides):
            continue  # nothing is added to the section
        for known in list(overrides):
            if known == key or known.startswith(f"{key}.") or key.startswith(f"{known}."):
                del overrides[known]
        overrides[key] = Override(key, value, given.line, names)


def _refused(key: str, text: str, word: Value) -> str:
    """Says what is wrong with a list or mapping that Hydra does not read, its cure first; "" where it is right."""
    if not text.lstrip().startswith(("[", "{")):
        return ""
    try:
        read_value(text)
    except ConfigError as error:
        line = word.argument_line or word.line
        return f"mend the value of {key} in line {line}: {error}; lists are [a,b] and mappings {{a:1,b:2}}"
    return ""


def _broken_continuation(lines: Sequence[str], behind: int) -> str:
    """Says in which line a command ends too early, and why. `behind` is the line where the rest begins."""
    for number in range(behind - 1, 0, -1):
        line = lines[number - 1] if number <= len(lines) else ""
        if not line.strip():
            return f"{number}: an empty line inside the command"
        if line.lstrip().startswith("#"):
            return f"{number}: a comment inside the command"
        if re.search(r"\\\s+$", line):
            return f"{number}: a blank behind the backslash"
        if re.search(r"\\?\s#", line):
            return f"{number}: a comment behind the argument, where nothing may follow the backslash"
        return f"{number}: no backslash at the end of the line"
    return f"{behind}: the command above is not continued"


def _not_read(word: Value) -> str:
    """Describes a word that is neither an option nor an override, its cure first. What it may hold is lost."""
    text = word.text if len(word.text) <= _SHOWN else f"{word.text[:_SHOWN]}..."
    line = word.argument_line or word.line
    if odd := _ODD_BLANK.search(word.text):
        return (
            f"replace the character U+{ord(odd[0]):04X} by a plain blank in line {line}: the shell takes it for a "
            f"letter, so {text.strip()} is no override (key=value)"
        )
    if text.startswith("~"):
        return (
            f"remove {text} from line {line}, or give the value that is to hold without that key: no key of verl's is "
            "deleted here"
        )
    if not word.missing:
        return f"mend or remove {text} in line {line}: it is no override (key=value), and not read"
    names = sorted(word.missing)
    hint = " ".join(f"--set {name}=..." for name in names if name.isidentifier())
    cure = "give what it comes to as overrides behind the script"
    if hint:
        cure = f"give {hint} (nothing behind = where it is empty)"
    return f"{cure}: {text} in line {word.line} {why_unknown(word.text, names)}"


# verl's trainers that generate ahead of training, by a part of their module's name
ONE_STEP_OFF = "one_step_off"
FULLY_ASYNC = "fully_async"


@dataclass(frozen=True)
class VerlSettings:
    """All overrides together, for keys whose meaning depends on others.

    `degrees` are those of the actor's layout, from the script or chosen for it. `model` is None where it is not known.
    """

    command: VerlCommand
    keys: Mapping[str, Override]
    model: ModelSpec | None
    degrees: Mapping[str, Any]
    as_written: bool

    def value(self, *keys: str) -> Any:
        """Returns the value of a key of verl's. Of several keys it is that of the first one that is set.

        Where none is set, it is verl's default of the last key, or None. A key that is unknown or empty (`key=`) is not
        set. Raises ConfigError for a text where verl's default is a number.
        """
        name = next((key for key in keys if self._is_set(key)), None)
        default = VERL_DEFAULTS.get(keys[-1])
        if name is None:
            return default
        value = self.keys[name].value
        if type(default) in (int, float) and not isinstance(value, int | float | None):
            raise ConfigError(f"{name}={str(value)[:80]}: must be a number")
        return value

    def given(self, key: str) -> Any:
        """Returns the value that the script gives a key of verl's. Otherwise None, whatever verl's default is."""
        if self._is_set(key):
            return self.keys[key].value
        return None

    def _is_set(self, key: str) -> bool:
        override = self.keys.get(key)
        return override is not None and not override.missing and override.value != ""

    @property
    def megatron(self) -> bool:
        """Whether verl would train with Megatron."""
        return says_megatron(self.command, self.keys)

    @property
    def device(self) -> str:
        """The device. It is npu where the script sets what only NPUs use, else cuda. verl's default is the machine's
        device.
        """
        ascend = self.command.ascend or any(key.endswith(".use_flash_attn") and TRANSFORMER in key for key in self.keys)
        if self._is_set("trainer.device"):
            return self.value("trainer.device")
        if ascend:
            return "npu"
        return "cuda"

    @property
    def estimator(self) -> str:
        """verl's name of the advantage estimator."""
        return self.value("algorithm.adv_estimator")

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        nodes = self.value("trainer.nnodes")
        per_node = self.value("trainer.n_gpus_per_node")
        if nodes is None or per_node is None:
            raise ConfigError("trainer.nnodes and trainer.n_gpus_per_node: must be numbers, not null")
        return nodes * per_node

    @property
    def dense(self) -> bool:
        """Whether the model is known and has no experts."""
        return self.model is not None and not self.model.is_moe

    @property
    def loss_mode(self) -> str:
        """verl's name of the policy loss."""
        return self.value(A + "policy_loss.loss_mode")

    @property
    def ahead(self) -> str:
        """The trainer of verl's that the script starts, where it generates ahead; "" for others."""
        if not self.command.entry and any(key.startswith("async_training.") for key in self.keys):
            return FULLY_ASYNC
        return next((name for name in (ONE_STEP_OFF, FULLY_ASYNC) if name in self.command.entry), "")

    @property
    def staleness(self) -> float:
        """The share of a step's samples that may come from older weights, in the fully asynchronous trainer."""
        return self.value("async_training.staleness_threshold")

    @property
    def mini_batch(self) -> int:
        """Prompts of one optimizer update."""
        return self.value(A + "ppo_mini_batch_size")

    @property
    def prompts(self) -> int:
        """Prompts of a training step. In the fully asynchronous trainer: prompts between two weight syncs."""
        if self.ahead != FULLY_ASYNC:
            return self.value("data.train_batch_size")
        sync = self.value("async_training.trigger_parameter_sync_step")
        return sync * self.value("async_training.require_batches") * self.mini_batch

    @property
    def updates(self) -> int:
        """Optimizer updates of one training step."""
        batch = self.prompts
        mini = self.mini_batch
        whole = isinstance(batch, int) and isinstance(mini, int) and mini > 0
        if whole:
            return max(1, -(-batch // mini)) * self.epochs
        return self.epochs

    @property
    def epochs(self) -> int:
        """Passes of the actor's updates over a step's samples."""
        epochs = self.value(A + "ppo_epochs")
        return epochs if isinstance(epochs, int) else 1

    @property
    def context_parallel(self) -> int:
        """Degree of context parallelism; 1 where none is given."""
        return self.degrees.get("context_parallel_size") or 1

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the script's own actor, over which verl divides sizes that are of all devices."""
        cut = self.value(A + "ulysses_sequence_parallel_size") or 1
        if self.megatron:
            degrees = (f"{MEGATRON}{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
            cut = prod(self.value(degree) for degree in degrees)
        return max(1, self.devices // cut)

    @cached_property
    def sample_limit(self) -> int:
        """Tokens of the longest sample. 0 where the limits are not known."""
        prompt = self.value(R + "prompt_length", "data.max_prompt_length")
        response = self.value(R + "response_length", "data.max_response_length")
        if not isinstance(prompt, int) or not isinstance(response, int):
            return 0
        return prompt + response

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample, padded for the layout. 0 where the limits are not known."""
        cuts = LayoutDegrees.of({**self.degrees, "world_size": 1}).sequence_parts
        return -(-self.sample_limit // cuts) * cuts

    @property
    def model_path(self) -> str | None:
        """The model's path, even where a part of it is unknown, because its last part names the model."""
        path = None
        if M + "path" in self.keys:
            path = self.keys[M + "path"].value
        if isinstance(path, str):
            return path
        return None


def trains_by_own_code(entry: str) -> bool:
    """Tells whether a module of `VerlCommand.entry` may train otherwise than its keys say."""
    return bool(entry) and _AS_KEYS_SAY.fullmatch(entry) is None


def says_megatron(command: VerlCommand, keys: Mapping[str, Override]) -> bool:
    """Whether the command asks for Megatron, by configuration name, engine, strategy, or a degree."""
    named = "megatron" in command.config_name
    said = any(key in keys and keys[key].value == "megatron" for key in ("model_engine", A + "strategy"))
    return (
        named
        or said
        or any(
            (key.startswith(MEGATRON) and key.endswith("parallel_size")) or key.startswith(TRANSFORMER) for key in keys
        )
    )


def _entry(words: Sequence[Value]) -> tuple[str, int] | None:
    """Returns the module of verl's that a command starts (`-m module` or its file), and its position among the words.

    None for another command.
    """
    names = [word.text for word in words]
    for i, (before, name) in enumerate(zip(["", *names], names, strict=False)):
        module = name.removesuffix(".py").replace("/", ".").lstrip(".") if name.endswith(".py") else name
        if (before == "-m" or name.endswith(".py")) and (match := _ENTRY.search(module)):
            return match[0], i
    return None


def _inside(script: Script, name: str) -> Script | None:
    """Returns the script that a command gets as text, as in `bash -c "..."`, where that starts verl, else None."""
    for launch in script.commands:
        for word in launch.words:
            if re.search(r"\s", word.text.strip()) and re.search(r"-m\s+\S*main_|main_\w+\.py", word.text):
                inner = read_script(word.text, f"{name}:{launch.line}", {})
                remarks = (*script.remarks, *inner.remarks)
                faults = (*script.faults, *inner.faults)
                variables = script.variables | inner.variables
                return Script(inner.commands, remarks, faults, variables, inner.refusal, inner.lines)
    return None


def _why_not(script: Script) -> str:
    names = [word.text for launch in script.commands for word in launch.words]
    other = next((name for name in names if _OTHER_VERL.fullmatch(name)), None)
    if other is not None:
        return f"starts {other}, which is not verl's RL training; mrl trains with reinforcement learning only"
    programs = list(dict.fromkeys(launch.words[0].text[:_SHOWN] for launch in script.commands))
    started = ", ".join(programs[:_LISTED] + ["..."] * (len(programs) > _LISTED)) or "nothing"
    return (
        f"is no verl launch script: it starts {started}, and no `python3 -m verl.trainer.main_ppo` (or "
        "recipe.dapo.main_dapo); a list of overrides can be given instead of a script"
    )


def _strays(launch: Launch) -> bool:
    return all(_OVERRIDE.fullmatch(word.text) for word in launch.words)
