"""Tools of Anthropic's API that a client runs itself and names by a type alone: their schemas, as its documentation
describes them (agents and tools: bash, text editor, memory).

A type ends with the day of its version. Types that are not here are run by Anthropic's servers, or answered by
pictures, and a model here cannot have them.
"""

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_FILE = {
    "path": _TEXT,
    "view_range": {"type": "array", "items": _WHOLE, "description": "first and last line to view; -1 is the last"},
    "file_text": {"type": "string", "description": "whole text of a file to create"},
    "old_str": {"type": "string", "description": "text to replace; it must occur exactly once in the file"},
    "insert_line": {"type": "integer", "description": "line after which text is inserted; 0 is the beginning"},
}
_UNDO = "text_editor_20241022", "text_editor_20250124"  # versions that can undo an edit
_INSERTS_NEW_STR = (*_UNDO, "text_editor_20250429")  # later ones have a parameter of its own for inserted text


def client_tool(kind: str) -> tuple[str, Mapping[str, Any]] | None:
    """Returns description and JSON schema of a tool of that type. None where its type says that no client runs it."""
    if kind.startswith("bash_"):
        restart = {"type": "boolean", "description": "begins a new shell instead"}
        return "Runs a command in a shell that stays.", _schema({"command": _TEXT, "restart": restart}, [])
    if kind.startswith("text_editor_"):
        commands = ["view", "create", "str_replace", "insert", *["undo_edit"] * (kind in _UNDO)]
        added = {"new_str": {"type": "string", "description": "text that replaces it, or is inserted"}}
        if kind not in _INSERTS_NEW_STR:
            added = {"new_str": {"type": "string", "description": "text that replaces it"}, "insert_text": _TEXT}
        return "Views and edits files.", _commands(commands, _FILE | added, ["command", "path"])
    if kind.startswith("memory_"):
        commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
        more = dict.fromkeys(("new_str", "insert_text", "old_path", "new_path"), _TEXT)
        return "Keeps files from one conversation to the next.", _commands(commands, _FILE | more, ["command"])
    return None


def _commands(commands: list[str], properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return _schema({"command": {"type": "string", "enum": commands}, **properties}, required)


def _schema(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": required}
