"""Builds the output of `mrl --version`: the installed versions beside the tested ones."""

import platform
from collections.abc import Mapping

from mrl.platforms.inventory import detect_kind
from mrl.platforms.versions import bare, installed_versions, row_of


def version_lines(installed: Mapping[str, str] | None = None, device: str | None = None) -> list[str]:
    """Returns `mrl 0.1.0+gCOMMIT`, then a line for each package of the device's row. It imports none of them."""
    installed = installed_versions() if installed is None else installed
    row = row_of(device or detect_kind())
    lines = [f"mrl {installed['mrl']}, Python {platform.python_version()}, {platform.machine()}"]
    lines.append(f"row {row.name} ({row.tested}):")
    for name, wanted in {**row.packages, **row.compiled, **row.loose}.items():
        version = installed.get(name)
        other = ""
        if not (version is not None and bare(version) == wanted):
            other = f"   tested: {wanted}"
        lines.append(f"  {name:<26}{version or 'not installed'}{other}")
    return lines
