"""Reads verl's file of tools (`tool_config_path`). The named classes are not loaded here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.plain_files import CONFIG_BYTES, read_text

VERL_TOOLS = "verl_tools"  # the environment that has these tools
CONFIG_KEY = "rollout.turns.tool_config_path"
GSM8K = "verl.tools.gsm8k_tool.Gsm8kTool"
SANDBOX = "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
SEARCH_R1 = "verl.tools.search_tool.SearchTool"
STAND_INS = (GSM8K, SANDBOX, SEARCH_R1)  # verl's own classes that have a replacement


@dataclass(frozen=True)
class ToolEntry:
    """One tool of the file. `schema` describes the model's call; None: the class has it."""

    class_name: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any] | None


def read_tool_config(path: Path) -> list[ToolEntry]:
    """Returns the tools in order. Raises ConfigError for another kind of file, and for tools of another kind."""
    import yaml

    where = f"{CONFIG_KEY}: {path}"
    try:
        read = yaml.safe_load(read_text(path, CONFIG_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {error}") from error
    entries = read.get("tools") if isinstance(read, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: has no list `tools`, which verl's files of tools have")
    return [_entry(each, f"{where}: tool {number}") for number, each in enumerate(entries, 1)]


def _entry(given: Any, where: str) -> ToolEntry:
    if not isinstance(given, dict) or not isinstance(given.get("class_name"), str) or "." not in given["class_name"]:
        raise ConfigError(f"{where} has no class_name like module.Class")
    config = given.get("config") or {}
    schema = given.get("tool_schema")
    if not isinstance(config, dict) or not isinstance(schema, dict | None):
        raise ConfigError(f"{where} ({given['class_name']}): config and tool_schema have to be mappings")
    kind = config.get("type", "native")
    if kind != "native":
        raise ConfigError(f"{where} ({given['class_name']}) is of type {kind}; only native is supported")
    return ToolEntry(given["class_name"], config, schema)


def problem_of(entry: ToolEntry, path: Path) -> str | None:
    """Returns why its class cannot be loaded without verl, judged by its name; None if nothing is known against it."""
    name = entry.class_name
    if name.startswith("verl.") and name not in STAND_INS:
        return f"{name} is verl's own and has no replacement here; these have one: {', '.join(STAND_INS)}"
    if name in STAND_INS or root_of(entry, path) is not None:
        return None
    return f"no file was found for the module {name.rpartition('.')[0]} beside {path.name}, nor in a folder above it"


def files_of(path: Path) -> list[Path]:
    """Returns the file and the modules that run for it, each once. Raises ConfigError as read_tool_config."""
    files = {path.resolve(): None}
    for entry in read_tool_config(path):
        root = root_of(entry, path)
        if root is not None:
            file = root.joinpath(*entry.class_name.split(".")[:-1]).with_suffix(".py")
            if not file.is_file():
                file = file.with_suffix("") / "__init__.py"
            files[file] = None
    return list(files)


def root_of(entry: ToolEntry, path: Path) -> Path | None:
    """Returns the folder where its module's name begins: the file's own, or the nearest parent.

    None if there is none.
    """
    module = Path(*entry.class_name.split(".")[:-1])
    for folder in path.resolve().parents:
        if (folder / module).with_suffix(".py").is_file() or (folder / module / "__init__.py").is_file():
            return folder
    return None
