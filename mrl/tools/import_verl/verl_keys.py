"""Says whether verl has a key, by verl_keys.txt, a table that scripts/generate_verl_keys.py makes of its wheels."""

from difflib import get_close_matches
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("verl_keys.txt")
# Free mappings and sections of recipes beside verl's wheels, which the handlers read name by name.
_OF_RECIPES = (
    "reward_model.overlong_buffer",
    # verl hands it on to a package
    *(f"actor_rollout_ref.{part}.fsdp_config.turbo_config" for part in ("actor", "ref")),
    # of the fully asynchronous trainer in verl's repository, between two releases
    *(f"async_training.{name}" for name in ("use_rollout_log_probs", "compute_prox_log_prob")),
)


@cache
def _table() -> tuple[frozenset[str], frozenset[str]]:
    """Returns (keys and the sections above them, mappings below which verl takes any name)."""
    rows = [line.split(" ") for line in _TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    keys = {key for _, _, key in rows}
    free = {key.removesuffix(".*") for key in keys if key.endswith(".*")} | set(_OF_RECIPES)
    plain = {key.removesuffix(".*") for key in keys}
    sections = {section for key in plain for section in _sections(key)}
    return frozenset(plain | sections), frozenset(free)


def releases() -> tuple[str, ...]:
    """Returns the releases of verl that the table knows, the oldest first."""
    head = _TABLE.read_text(encoding="utf-8").splitlines()[1]
    return tuple(head.removeprefix("# releases: ").split(" "))


def is_verls(key: str) -> bool:
    """Whether a release of verl has this key or section, or takes any name in the mapping that it is in."""
    known, free = _table()
    return key in known or not free.isdisjoint((key, *_sections(key)))


def is_section(key: str) -> bool:
    """Whether verl has keys of its own below this one, so that its value is a mapping of them."""
    known, free = _table()
    return free.isdisjoint((key, *_sections(key))) and any(other.startswith(f"{key}.") for other in known)


def nearest(key: str) -> str:
    """Returns verl's key of the same section whose last part looks most like that of `key`; "" where none does."""
    section, dot, name = key.rpartition(".")
    parts = [known.rpartition(".") for known in _table()[0]]
    close = get_close_matches(name, [last for above, _, last in parts if above == section], 1, 0.75)
    return f"{section}{dot}{close[0]}" if close else ""


def _sections(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
