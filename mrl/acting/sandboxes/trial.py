"""Tries each backend of sandboxes on this machine, for `mrl doctor`."""

import importlib.util

from mrl.acting.sandboxes.containers import left_behind
from mrl.acting.sandboxes.remote import REMOTE
from mrl.acting.sandboxes.sandbox import SandboxError, SandboxSpec
from mrl.acting.sandboxes.starting import start
from mrl.errors import ConfigError

_THIS_HOST = "/"  # a root folder that is always there


def faults() -> dict[str, str]:
    """Returns why sandboxes cannot be started, by backend; empty where they can, as far as that can be tried here."""
    found = {"bubblewrap": _of_bubblewrap(), "docker": _of_docker()}
    for name in REMOTE:
        if importlib.util.find_spec(name) is None:
            found[name] = f"the package {name} is not installed: pip install 'mrl[{name}]'"
        else:
            found[name] = "the package is installed; whether its service answers was not tried"
    return found


def _of_bubblewrap() -> str:
    try:
        with start(SandboxSpec(), _THIS_HOST) as sandbox:
            ran = sandbox.shell("true")
    except (SandboxError, OSError) as error:
        return str(error)
    if ran.is_well:
        return ""
    return ran.text.strip()[:300] or f"a command ended by {ran.reason or ran.status}"


def _of_docker() -> str:
    try:
        names = left_behind(None)
    except (ConfigError, SandboxError) as error:
        return str(error)
    if names:
        return f"a daemon answers, and has containers of runs, under way or killed: {', '.join(names[:5])}"
    return ""
