"""What a run needs from its cluster, checked before Ray is imported: a reachable head, a free port, enough devices."""

import json
import os
import re
import secrets
import socket
import sys
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from mrl.config.deployment import Deployment, rank_devices, rollout_layout
from mrl.config.schema import ClusterConfig, LayoutConfig
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.device_grid import DeviceId
from mrl.platforms.hosting import get_hosting
from mrl.platforms.inventory import shows_devices
from mrl.units import GIB

CONNECT_TIMEOUT_S = 10.0
# RFC 9113: preface, empty SETTINGS frame
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
ASKED = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # a call that the head answers to whoever may join
_LONGEST_ANSWER = 100_000  # bytes, for a dashboard's version


def ray_address(cluster: ClusterConfig) -> str | None:
    """Returns the address of the cluster to join; None when the run starts its own."""
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        return None
    return address


def check_reachable(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raises EnvironmentFault unless a gRPC server, such as a Ray head, answers at `address` in time.

    Ray itself would try for minutes and then end the process.
    """
    if address == "auto":  # Ray looks for a cluster on this machine and says at once if there is none
        return
    match = re.fullmatch(r"(?:ray://)?\[?([^/\]]+?)\]?:(\d{1,5})", address)
    if match is None:
        raise unreachable(address, "it does not read HOST:PORT")
    try:
        with socket.create_connection((match[1], int(match[2])), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            connection.sendall(_HTTP2_HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise unreachable(address, str(error)) from error
    if len(answer) < 9 or answer[3] != _SETTINGS:
        raise unreachable(
            address, "something else listens there; the dashboard's port, where jobs are submitted, is not the head's"
        )


def follow_head(address: str) -> None:
    """Sets RAY_AUTH_MODE, if it is not set, to what the head at `address` requires.

    Raises EnvironmentFault if that head accepts none of this user's tokens. Ray itself would try for half a minute, and
    then say that nobody answers.
    """
    if address == "auto" or os.environ.get("RAY_USE_TLS", "0") == "1" or not _turns_away(address, None):
        return
    if (mode := os.environ.setdefault(_MODE, "token")) != "token":
        raise EnvironmentFault(f"the head at {address} requires a token, but {_MODE}={mode} sends none; unset it")
    check_token(address)
    if _turns_away(address, _token()):
        raise EnvironmentFault(_another_token(address, "cluster.address or RAY_ADDRESS"))


def _turns_away(address: str, token: str | None) -> bool:
    """Tells whether a head rejects the caller. One that gives any other answer may be joined."""
    # from ray[default]; imported here, as it takes a fifth of a second and most runs start their own cluster
    import grpc

    given = (("authorization", f"Bearer {token}"),) if token else ()
    options = (("grpc.enable_http_proxy", 0),)  # as in Ray's own channels
    with grpc.insecure_channel(address.removeprefix("ray://"), options) as channel:
        try:
            channel.unary_unary(ASKED)(b"", timeout=CONNECT_TIMEOUT_S, metadata=given)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def check_dashboard(address: str) -> None:
    """Raises ConfigError for an address that is no dashboard's, EnvironmentFault unless a dashboard there accepts the
    token.

    Ray's own client would take other addresses for that of a head, and search for a dashboard for a minute.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        host = parts.hostname or address.partition(":")[0]
        host = "HOST" if host in ("", "auto", "http", "https") else host
        raise ConfigError(
            f"--address {address} (or RAY_API_SERVER_ADDRESS): must be the dashboard's address, as http://{host}:8265"
        )
    token = None
    if os.environ.get(_MODE) == "token":
        token = _token()
    headers = {}
    if token:
        headers = {"Authorization": f"Bearer {token}"}
    try:
        with urlopen(
            Request(f"{address.rstrip('/')}/api/version", headers=headers), timeout=CONNECT_TIMEOUT_S
        ) as answer:
            is_ray = "ray_version" in json.loads(answer.read(_LONGEST_ANSWER))
    except HTTPError as error:
        if error.code in (401, 403):
            raise EnvironmentFault(_another_token(address, "--address")) from error
        is_ray = False
    except ValueError:  # not JSON
        is_ray = False
    except HTTPException as error:
        raise EnvironmentFault(no_dashboard(address, "no answer in HTTP")) from error
    except OSError as error:
        raise EnvironmentFault(no_dashboard(address, str(getattr(error, "reason", error)))) from error
    if not is_ray:
        raise EnvironmentFault(f"what answers at {address} is not a Ray dashboard; give --address")


def no_dashboard(address: str, why: str) -> str:
    """Returns the message for a dashboard that does not answer."""
    return (
        f"no Ray dashboard answers at {address} ({why}); start a head with launch/start_head.sh, or give --address; a "
        "head elsewhere also wants its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _another_token(address: str, key: str) -> str:
    named = _TOKEN if os.environ.get(_TOKEN) else str(_token_file())
    return (
        f"the head at {address} requires another token than the one in {named}; it may belong to another user. Copy "
        f"it from the head's host, or name a head of yours ({key})"
    )


def unreachable(address: str, why: str) -> EnvironmentFault:
    """Returns the error for a cluster that cannot be joined."""
    return EnvironmentFault(
        f"no Ray head answers at {address} (from cluster.address or $RAY_ADDRESS): {why}; start one with "
        "launch/start_head.sh and give HOST:6379, or unset both, so that the run starts its own cluster"
    )


def check_port_free(port: int) -> None:
    """Raises EnvironmentFault when something listens on `port` of this machine."""
    with socket.socket() as probe:
        # a lingering connection of an ended run is no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise EnvironmentFault(
                f"cluster.port {port} is in use; choose another, or leave it out for a free one"
            ) from error


OPEN_RAY = "MRL_ALLOW_OPEN_RAY"


def refuse_open_ray() -> None:
    """Raises EnvironmentFault if Ray's token is disabled and the user did not confirm it.

    Ray listens on all addresses of a host and executes what it receives.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token" and os.environ.get(OPEN_RAY) != "1":
        raise EnvironmentFault(
            f"RAY_AUTH_MODE={mode}: anybody who reaches this host could make Ray run anything; unset it, or set "
            f"{OPEN_RAY}=1 where the network itself keeps others out"
        )


def ask_for_token_authentication(own_cluster: bool = True) -> None:
    """Sets Ray's own default for clusters that it starts, which avoids its warning. A value set by the user stays.

    Ray reads the variable on import, and a later change would make its parts disagree. If Ray could not write a token
    below HOME, a cluster of the run's own (`own_cluster`) gets a temporary one.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault(_MODE, "token")
    if own_cluster and os.environ.get(_MODE) == "token" and not has_token():
        token = secrets.token_hex(32)
        if not _written(token):
            os.environ[_TOKEN] = token


def has_token() -> bool:
    """Tells whether Ray finds a token: in RAY_AUTH_TOKEN, or in the file of RAY_AUTH_TOKEN_PATH or HOME."""
    file = _token_file()
    return bool(os.environ.get(_TOKEN)) or (file is not None and file.is_file() and file.stat().st_size > 0)


def check_token(address: str) -> None:
    """Raises EnvironmentFault if a head at `address` would be asked without a token."""
    if os.environ.get(_MODE) != "token" or has_token():
        return
    file = _token_file()
    where = "HOME is not set"
    if file is not None:
        where = f"{file} does not exist"
    raise EnvironmentFault(
        f"no Ray token for the head at {address}: {where}. launch/start_head.sh makes one on its host; copy it "
        "from there, or set RAY_AUTH_TOKEN"
    )


def _token() -> str | None:
    """Returns the token that Ray would send."""
    file = _token_file()
    return os.environ.get(_TOKEN) or (file.read_text(encoding="utf-8").strip() if has_token() else None)


def _token_file() -> Path | None:
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(path)
    home = os.environ.get("HOME")
    if home:
        return Path(home) / ".ray" / "auth_token"
    return None


def _written(token: str) -> bool:
    """Writes the token where Ray looks for it, for this user's eyes alone: Ray itself would write it by the umask.

    Returns False where the file cannot be written. A file that another process makes meanwhile stays.
    """
    file = _token_file()
    if file is None:
        return False
    own = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(token)
        if file.is_file() and not file.stat().st_size:
            file.unlink()
        with suppress(FileExistsError):
            os.link(own, file)
    except OSError:
        return False
    finally:
        own.unlink(missing_ok=True)
    return True


def needed_resources(deployment: Deployment, actor: bool = True) -> dict[str, float]:
    """Returns the Ray resources of the whole run by name; without `actor` those of its engines."""
    if actor and deployment.is_colocated:
        bundles = device_bundles(deployment)
    else:
        bundles = []
        if actor:
            bundles = actor_bundles(deployment.cluster, deployment.layout)
        bundles += engine_bundles(deployment)
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def actor_bundles(cluster: ClusterConfig, layout: LayoutConfig) -> list[dict[str, float]]:
    """Returns the resources of each actor rank."""
    return [get_hosting(cluster.device).ray_resources(cluster.cpus_per_actor, devices=1)] * layout.world_size


def engine_bundles(deployment: Deployment) -> list[dict[str, float]]:
    """Returns the resources of each data-parallel rank of each engine. Its tensor workers share one node.

    Raises ConfigError when engines do not fit.
    """
    rank_devices(deployment)  # raises
    cluster = deployment.cluster
    layout = rollout_layout(deployment.rollout)
    bundle = get_hosting(cluster.device).ray_resources(cluster.cpus_per_engine / layout.data, devices=layout.tensor)
    return [bundle] * layout.num_engines * layout.data


def shared_devices(deployment: Deployment) -> tuple[DeviceId, ...]:
    """Returns the devices of a colocated run, node by node. Raises ConfigError when engines do not fit."""
    ranks, workers = rank_devices(deployment)
    return tuple(sorted({*ranks, *workers}))


def device_bundles(deployment: Deployment) -> list[dict[str, float]]:
    """Returns the resources of each device of a colocated run.

    They are equal, so that any bundle can be any device, on whatever node Ray puts it.
    """
    devices = len(shared_devices(deployment))
    ranks = actor_bundles(deployment.cluster, deployment.layout)
    engines = engine_bundles(deployment)
    cpus = sum(bundle["CPU"] for bundle in (*ranks, *engines)) / devices
    return [get_hosting(deployment.cluster.device).ray_resources(cpus, devices=1)] * devices


def check_size(
    deployment: Deployment, have: dict[str, float], names: tuple[str, ...] | None = None, actor: bool = True
) -> None:
    """Raises EnvironmentFault when the run needs more than `have`.

    `names`: check only these resources. `actor`: as in needed_resources.
    """
    need = needed_resources(deployment, actor)
    short = {
        n: amount for n, amount in need.items() if (names is None or n in names) and have.get(n, 0.0) + 1e-6 < amount
    }
    if not short:
        return
    lines = [
        f"{name}: the run needs {amount:g}, the cluster has {have.get(name, 0.0):g}" for name, amount in short.items()
    ]
    cluster = deployment.cluster
    raise EnvironmentFault(
        f"the cluster is too small: {'; '.join(lines)}. {deployment.layout.world_size if actor else 0} actor ranks "
        f"(cluster.cpus_per_actor {cluster.cpus_per_actor:g}) and {deployment.rollout.num_engines} engines "
        f"(cluster.cpus_per_engine {cluster.cpus_per_engine:g}) must fit at once; "
        "add nodes, choose a smaller layout or lower the CPUs per process"
    )


def check_devices_here(cluster: ClusterConfig) -> None:
    """Raises EnvironmentFault for a run that starts its own cluster on a host that shows none of its devices."""
    if ray_address(cluster) is None and not shows_devices(cluster.device):
        raise EnvironmentFault(
            f"cluster.device is {cluster.device}, and this host shows no such device: run where there are some, or set "
            "RAY_ADDRESS (or cluster.address) to the head of a cluster that has them. mrl rehearse CONFIG runs it in "
            "small on CPUs"
        )


def check_object_stores(need: int, have: dict[str, int]) -> None:
    """Raises EnvironmentFault if a node's object store is smaller than `need`. Both are in bytes, `have` by the node's
    name.

    Ray would spill to disk several times in a step, and end the run when the disk is full.
    """
    small = {node: size for node, size in have.items() if size < need}
    if not small:
        return
    node, size = min(small.items(), key=lambda known: known[1])
    raise EnvironmentFault(
        f"the object store of {len(small)} of {len(have)} nodes is too small: Ray on {node} has one of "
        f"{size / GIB:.2f} GiB. The responses that exist at once take {need / GIB:.2f} GiB of a node when all have "
        f"data.max_response_length tokens. Start Ray there with --object-store-memory {need} or more "
        "(launch/start_head.sh and start_worker.sh hand it on). Or lower data.train_batch_size, rollout.n, "
        "data.max_response_length, trainer.max_staleness or data.val_max_samples. Routes of "
        "actor.router_replay: R3 are most of it where they are on"
    )
