"""Handlers of verl's keys for responses of several turns.

They carry tools over that are functions, or classes of verl's. A file of tools on this machine is read for their names,
not run.
"""

import ast
from pathlib import Path
from typing import Any

from mrl.acting.verl_tool_config import SEARCH_R1, VERL_TOOLS, problem_of, read_tool_config
from mrl.errors import ConfigError
from mrl.plain_files import TEXT_BYTES, read_text
from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.keys import R
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

MULTI = R + "multi_turn."
ENABLE = MULTI + "enable"
FUNCTIONS = (MULTI + "function_tool_path", "data.function_tool_path")
CLASSES = (MULTI + "tool_config_path", "data.tool_config_path")
DECORATOR = "function_tool"
MAX_ANSWERS = "max_user_turns"
UNLIMITED = 1000  # turns in place of verl's None; the length of the response is the limit
# verl's keys, ours, and verl's default
_LIMITS = {
    "max_assistant_turns": ("max_turns", None),
    "max_parallel_calls": ("max_calls", 1),
    "max_tool_response_length": ("max_answer_characters", 256),
}
_NO_TOOLS = (
    "multi-turn rollouts have tools that are typed functions here, or classes of verl's, in a file that is not named "
    "or not at hand: set rollout.turns.tools and rollout.turns.path, or rollout.turns.tool_config_path (docs/tools.md)"
)


def _enable(o: Override, out: Import, settings: VerlSettings) -> None:
    if not o.value:
        out.leave("implied", o.key, o.value, "without rollout.turns a response is of one turn", o.line)
        return
    path, names = _functions(settings)
    classes, problem = _classes(settings)
    if problem or not (names or classes):
        out.leave("unsupported", o.key, o.value, problem or _NO_TOOLS, o.line)
        return
    if names:
        out.put("renamed", o.key, "rollout.turns.path", path, "several turns, with the tools of that file", o.line)
        out.put("implied", "", "rollout.turns.tools", names, f"the functions of {path} under @{DECORATOR}")
    if classes:
        key = "rollout.turns.tool_config_path"
        out.put("renamed", o.key, key, classes, "several turns, with the tools of that file", o.line)
        out.put("implied", "", "rollout.turns.environments", [VERL_TOOLS], f"the tools of {classes}")
        if any(entry.class_name == SEARCH_R1 for entry in read_tool_config(Path(classes))):
            out.put("implied", "", "rollout.turns.network", True, "SearchTool asks a service")
    for name, (ours, default) in _LIMITS.items():
        if settings.given(MULTI + name) is None:
            why = f"verl's {name} is {default} by default"
            out.put("implied", "", f"rollout.turns.{ours}", default or _most_turns(settings), why)


def _most_turns(settings: VerlSettings) -> int:
    """Returns the turns of the model that both limits leave: it speaks once more than it is answered."""
    own = settings.given(MULTI + "max_assistant_turns") or UNLIMITED
    answers = settings.given(MULTI + MAX_ANSWERS)
    return own if answers is None else min(own, answers + 1)


def _functions(settings: VerlSettings) -> tuple[str, list[str]]:
    """Returns the file and the names of its tools. No names where the file is not here or has none."""
    for key in FUNCTIONS:
        path = settings.given(key)
        if isinstance(path, str) and Path(path).is_file():
            return path, tool_names(read_text(Path(path), TEXT_BYTES))
    return "", []


def _classes(settings: VerlSettings) -> tuple[str, str]:
    """Returns verl's file of classes, and a problem with one of them. Each is empty where there is none."""
    for key in CLASSES:
        path = settings.given(key)
        if isinstance(path, str) and Path(path).is_file():
            try:
                problems = [problem_of(entry, Path(path)) for entry in read_tool_config(Path(path))]
            except ConfigError as error:
                return path, str(error)
            return path, next(filter(None, problems), "")
    return "", ""


def tool_names(source: str) -> list[str]:
    """Returns verl's names of the functions under its decorator. Empty where the file is no Python.

    Functions with a schema of their own are left out, because mrl derives the schema from the function.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    return [name for each in functions for mark in each.decorator_list if (name := _name(each.name, mark))]


def _name(own: str, mark: ast.expr) -> str | None:
    """Returns the name that a decorator gives a function. None for another decorator."""
    call = None
    if isinstance(mark, ast.Call):
        call = mark
    function = call.func if call else mark
    if getattr(function, "attr", getattr(function, "id", None)) != DECORATOR:
        return None
    given: dict[str | None, Any] = {} if call is None else {each.arg: each.value for each in call.keywords}
    if "schema" in given:
        return None
    named = given.get("name", call.args[0] if call and call.args else None)
    if isinstance(named, ast.Constant) and isinstance(named.value, str):
        return named.value
    return own


def _turns(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles the keys beside the switch."""
    name = o.key.removeprefix(MULTI)
    classes, problem = _classes(settings)
    # only several turns, with tools that exist here, are carried on
    if not settings.given(ENABLE) or problem or not (classes or _functions(settings)[1]):
        out.leave("not_applicable", o.key, o.value, "goes with multi_turn.enable", o.line)
    elif name == "max_assistant_turns" and o.value is not None:
        out.put("renamed", o.key, "rollout.turns.max_turns", _most_turns(settings), line=o.line)
    elif name == MAX_ANSWERS:
        out.leave("implied", o.key, o.value, "rollout.turns.max_turns is at most one more", o.line)
    elif name in _LIMITS and o.value is not None:
        out.put("renamed", o.key, f"rollout.turns.{_LIMITS[name][0]}", o.value, line=o.line)
    elif name in _LIMITS or o.key in FUNCTIONS or (o.key in CLASSES and _classes(settings)[0]):
        out.leave("implied", o.key, o.value, "goes with multi_turn.enable", o.line)
    elif name == "format":
        out.leave("implied", o.key, o.value, "the form of calls is that of the model's chat template", o.line)
    elif (name, o.value) == ("tool_response_truncate_side", "middle"):
        out.leave("implied", o.key, o.value, "so it is here", o.line)
    elif o.key in CLASSES:
        out.leave("unsupported", o.key, o.value, _NOT_HERE, o.line)
    elif name in _UNSUPPORTED and o.value is not None:
        out.leave("unsupported", o.key, o.value, _UNSUPPORTED[name], o.line)
    else:
        out.leave("not_applicable", o.key, o.value, "it concerns how verl renders conversations", o.line)


_NOT_HERE = "tools of verl's classes, in a file that is not at hand: set rollout.turns.tool_config_path"
_UNSUPPORTED = {
    "tool_response_truncate_side": "a long answer is cut in the middle",
    "completion_callback": "callbacks of verl's classes: write each as an environment (docs/tools.md)",
    "interaction_config_path": "interactions of verl's classes: write each as an environment (docs/tools.md)",
}

TURN_HANDLERS: dict[str, Handler] = {ENABLE: _enable, MULTI: _turns, FUNCTIONS[1]: _turns, CLASSES[1]: _turns}
