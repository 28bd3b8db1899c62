"""Ray as far as it can be judged without asking it: address and token."""

from collections.abc import Iterator

from mrl.plan.doctor.check import Check, failure, ok, warning
from mrl.plan.doctor.machine import Machine


def cluster_checks(machine: Machine) -> Iterator[Check]:
    address = machine.environment.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        yield ok("ray address", "RAY_ADDRESS is not set: a run starts a cluster of its own on this host")
    yield _authentication(machine)


def _authentication(machine: Machine) -> Check:
    mode = machine.environment.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        cure = "unset RAY_AUTH_MODE: Ray listens on every address and runs what it is sent; the token is what keeps others out"
        return failure("ray token", f"RAY_AUTH_MODE={mode}", cure)
    if machine.environment.get("RAY_AUTH_TOKEN"):
        return ok("ray token", "given in RAY_AUTH_TOKEN")
    if machine.token_mode is None:
        return ok("ray token", "none yet: the first head on this host makes ~/.ray/auth_token")
    if machine.token_mode & 0o077:
        return warning("ray token", f"~/.ray/auth_token can be read by others (mode {machine.token_mode:o})", "chmod 600 ~/.ray/auth_token")
    return ok("ray token", "in ~/.ray/auth_token")
