"""Implements `mrl doctor`."""

import argparse
import json
import os
import time

from mrl.cli.config_arguments import add_config, positive, resolved_config
from mrl.errors import EnvironmentFault
from mrl.platforms import PLATFORMS

PORTS = (6379, 8265)  # a Ray head's own port, and its dashboard's
_DEEP_DEADLINE_S = 120.0


def add(commands) -> None:
    """Registers the command."""
    doctor = commands.add_parser(
        "doctor", help="check this host for a run: versions, devices, limits, Ray, engine; takes seconds"
    )
    add_config(
        doctor, optional=True, help_text="a configuration whose MCP servers and agent are tried too; default: none"
    )
    doctor.add_argument("--device", choices=PLATFORMS, help="check for runs on this device; default: what the host has")
    doctor.add_argument(
        "--port", type=_port, action="append", metavar="PORT", help="a port to check; repeatable; default: 6379, 8265"
    )
    doctor.add_argument("--address", help="a Ray head to try, HOST:PORT; default: $RAY_ADDRESS")
    doctor.add_argument(
        "--nnodes",
        type=positive,
        default=1,
        metavar="N",
        help="nodes of the run; with several, the network between them is checked",
    )
    doctor.add_argument(
        "--deep", action="store_true", help="also import mbridge and vLLM, each in a separate process (a minute)"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no port: 1 to 65535")
    return int(text)


def _doctor(options: argparse.Namespace) -> None:
    began = time.monotonic()
    from mrl.platforms.inventory import detect_kind

    device = options.device or detect_kind()
    checks = _checks(device, options)
    failed = any(check.status == "failure" for check in checks)
    if options.json:
        rows = [check.to_json() for check in checks]
        print(
            json.dumps(
                {"ok": not failed, "device": device, "seconds": round(time.monotonic() - began, 2), "checks": rows}
            )
        )
    else:
        _print_table(device, checks)
    if failed:
        raise SystemExit(EnvironmentFault.exit_code)


def _checks(device: str, options: argparse.Namespace) -> list:
    from mrl.tools.doctor.agent_checks import agent_checks, checks_of
    from mrl.tools.doctor.host_checks import cluster_checks, host_checks
    from mrl.tools.doctor.host_facts import read_host
    from mrl.tools.doctor.probes import DEADLINE_S, probes, run_probes
    from mrl.tools.doctor.version_checks import engine_checks, version_checks

    of_run = []
    if options.config is not None:
        of_run = [*checks_of(resolved_config(options).config)]
    host = read_host(device, options.port or PORTS, options.nnodes)
    judged = [check for part in (version_checks, host_checks, cluster_checks, engine_checks) for check in part(host)]
    address = options.address or os.environ.get("RAY_ADDRESS")
    tried = probes(device, None if address in ("", "local") else address, options.deep, options.nnodes)
    patient = options.deep or (address and options.nnodes > 1)
    return [*judged, *agent_checks(), *of_run, *run_probes(tried, _DEEP_DEADLINE_S if patient else DEADLINE_S)]


def _print_table(device: str, checks: list) -> None:
    print(f"as a host for runs on {device}:")
    for check in checks:
        print(f"  {check.status:8}{check.name}: {check.found}")
        if check.cure:
            print(f"          -> {check.cure}")
    failures = sum(check.status == "failure" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    print(f"{len(checks)} checks, {failures} failures, {warnings} warnings")
