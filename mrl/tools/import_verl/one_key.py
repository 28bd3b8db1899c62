"""Explains one key of verl's to users who give it to a command of mrl."""

from mrl.config.schema import schema_paths
from mrl.config.yaml_tree import dump_value
from mrl.errors import ConfigError
from mrl.tools.import_verl.keys import ROWS, row_of
from mrl.tools.import_verl.report import KeyReport
from mrl.tools.import_verl.translate import import_overrides
from mrl.tools.import_verl.verl_keys import is_verls

_FIRST = "actor_rollout_ref."  # section that may be left out before a key


def as_mrl_key(key: str, value: str) -> str | None:
    """Says what `key=value` is here. `key` is verl's, or the end of one. Returns None for a key that verl does not
    have.
    """
    verls = _verls(key)
    if verls is None:
        return None
    try:
        of_all = import_overrides([f"{verls}={value}"]).entries
        entries = [entry for entry in of_all if entry.key == verls or entry.key.startswith(f"{verls}.")]
    except ConfigError:  # a value that cannot be read
        entries = []
    given = [f"--set {entry.to}={dump_value(entry.value)}" for entry in entries if entry.to]
    if given:
        return f"verl's {verls} is here {' '.join(dict.fromkeys(given))}"
    return f"verl's {verls} has no key here{_reasons(entries)}"


def _reasons(entries: list[KeyReport]) -> str:
    reasons = [f": {entry.kind.replace('_', ' ')}, {entry.why}" for entry in entries if entry.why]
    if reasons:
        return reasons[0]
    return ""


def _verls(key: str) -> str | None:
    """Returns verl's complete key for what was given, or None.

    The given key may lack the first section, or be in a section that mrl does not have. Otherwise its last part must be
    unique in verl and unknown to mrl.
    """
    if key.startswith(_FIRST):
        if row_of(key) is not None:
            return key
        return None
    for whole in (_FIRST + key, key):
        if whole in ROWS:
            return whole
    for whole in (key, _FIRST + key):
        if _in_a_section_of_verls(whole):
            return whole
    if any(path.rpartition(".")[2] == key.rpartition(".")[2] for path, _ in schema_paths()):
        return None  # mrl's key of that name was meant
    ending = [whole for whole in ROWS if whole.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(ending) == 1:
        return ending[0]
    return None


def _in_a_section_of_verls(key: str) -> bool:
    """Whether the nearest known section above a key exists in verl only."""
    parts = key.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    known = next((section for section in above if f"{section}." in ROWS), None)
    return known is not None and known.removeprefix(_FIRST) not in dict(schema_paths()) and is_verls(key)
