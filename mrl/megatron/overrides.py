"""Values that a user hands straight through to Megatron, held against the fields that really exist."""

import difflib
from dataclasses import fields
from typing import Any

from mrl.errors import ConfigError


def checked_overrides(key: str, overrides: dict[str, Any], config_class: type) -> dict[str, Any]:
    """`overrides` as given, after a check against the fields of the dataclass `config_class`. `key` is where they stand in the YAML.

    Raises ConfigError that lists every unknown name with the nearest real ones.
    """
    known = [f.name for f in fields(config_class)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        lines = [
            f"  {name}: did you mean {' or '.join(difflib.get_close_matches(name, known) or ['none of its fields'])}?" for name in unknown
        ]
        raise ConfigError(f"{key}: not a field of Megatron's {config_class.__name__}:\n" + "\n".join(lines))
    return dict(overrides)
