"""Several ranks and workers on one device, each a process: what weight syncs and layouts do with real communicators.

NCCL refuses two ranks of one device on one host. It compares hosts before devices (init.cc), and takes a host's
identity from NCCL_HOSTID. So each process names a host of its own, and they meet over the loopback: slow, but with
NCCL's own order, waits and errors. On the CPU the processes have gloo, and for syncs what waits as NCCL does
(tests/unit/nccl_like.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]
sys.path.append(str(ROOT / "tests" / "unit"))  # the small world of the tests of syncs

from checks import Figures, Machine, check, expect  # noqa: E402

from mrl.units import MIB  # noqa: E402

_MEET_S = 60
_ROUNDS = 5  # of a measured transfer; the first does not count
# two nodes of two devices, a rank and a worker on each; a pipeline stage on either node
PP2 = {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
       "expert_model_parallel_size": 2}  # fmt: skip
PLACES = [[0, 0], [0, 1], [1, 2], [1, 3]]
FOUR = range(4)
# how a sync goes: in the order of mrl.reshard.actions or the one before; with communicators made while it connects or
# by its first messages; with waits for a stream or for the whole device
WAYS = {
    "as it is": (),
    "order of before": ("order",),
    "cured order, with blocking first use and waits for the device": ("greeting", "device"),
    "as before": ("order", "greeting", "device"),
}
LAYOUTS = {
    "tp2 pp2": {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "ep2": {"world_size": 2, "expert_model_parallel_size": 2},
    "cp2": {"world_size": 2, "context_parallel_size": 2},
}
_GRADIENT = 1e-4  # a gradient's difference by its norm, in float32


# ---------------------------------------------------------------------------------------------------- processes


def together(calls: Mapping[str, list[Any]], limit_s: float, gone: Collection[str] = ()) -> dict[str, Any]:
    """What each call (role, then its arguments as JSON) answers, each in a process of its own: an error as its text,
    None where it ended without a word or not in time. Those of `gone` are not waited for.
    """
    started = {}
    for number, (name, call) in enumerate(calls.items()):
        own = {"NCCL_HOSTID": f"mrl-ladder-{os.getpid()}-{number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
               "NCCL_MAX_NCHANNELS": "1", "NCCL_BUFFSIZE": str(MIB), "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN",
               "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        command = [sys.executable, __file__, *(word if isinstance(word, str) else json.dumps(word) for word in call)]
        started[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | own
        )
    until = time.monotonic() + limit_s
    try:
        waited = {name: _answer(each, until) for name, each in started.items() if name not in gone}
    finally:
        for each in started.values():
            each.kill()
    return waited | {name: _answer(started[name], until) for name in gone}


def _answer(process: subprocess.Popen, until: float) -> Any:
    try:
        out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    lines = [line for line in out.splitlines() if line.startswith(("{", "[", '"'))]
    if lines:
        return json.loads(lines[-1])
    return f"ended with {process.returncode}: {(err.strip().splitlines() or [''])[-1]}"[:300]


def ended_well(answers: Mapping[str, Any]) -> bool:
    """Whether each gave figures, not an error or nothing."""
    return all(answer is not None and not isinstance(answer, str) for answer in answers.values())


def _errors(answers: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {said}" for name, said in answers.items() if said is None or isinstance(said, str))[:900]


# ------------------------------------------------------------------------------------------------- communicators


@check(fast=True, limit_s=90)
def communicators(machine: Machine) -> Figures:
    """Two peers of one process: seconds and device memory of each pair's communicator, and GB/s through it, by the
    group that weight syncs use.
    """
    from mrl.process.free_ports import free_port

    size = machine.size(256 * MIB, 4 * MIB, "pair_bytes")
    port = free_port()
    calls = {str(number): ["pair", machine.device, number, port, size] for number in range(3)}
    answers = together(calls, _MEET_S + 20)
    expect(ended_well(answers), f"pairs did not meet: {_errors(answers)}")
    return answers["0"]


def pair(device: str, number: int, port: int, size: int) -> Figures:
    """Process 0 meets 1, then 2."""
    import torch
    import torch.distributed as dist

    from mrl.platforms.transfer import get_transfer

    machine = Machine(device)
    machine.platform.set_device(0)
    transfer = get_transfer(device)
    data = torch.full((size,), number, dtype=torch.uint8, device=transfer.device)
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=number == 0, wait_for_workers=False)
    group = transfer.point_to_point_group(store, number, 3, _MEET_S, "127.0.0.1")

    def move(peer: int, tag: int) -> float:
        began = time.perf_counter()
        work = group.send([data], peer, tag) if number == 0 else group.recv([data], 0, tag)
        expect(transfer.wait(work, _MEET_S), f"process {number} met nobody within {_MEET_S} s")
        machine.platform.synchronize()
        return time.perf_counter() - began

    found: Figures = {}
    for peer in (1, 2):
        if number not in (0, peer):
            continue
        free = transfer.free_bytes()
        first = move(peer, 1)
        if free is not None:  # both ends are on this device
            found[f"pair_{peer}_mib"] = (free - transfer.free_bytes()) / 2 / MIB
        best = min(move(peer, tag) for tag in range(2, 2 + _ROUNDS))
        found |= {f"pair_{peer}_first_s": first, f"pair_{peer}_gb_per_s": size / best / 1e9}
    expect(bool((data == 0).all()), "what arrived is not what was sent")
    store.set(f"done {number}", "1")
    store.wait([f"done {other}" for other in range(3)])
    return found | {"bytes": size}


# --------------------------------------------------------------------------------------------------------- syncs


@check(limit_s=200)
def sync_order(machine: Machine) -> Figures:
    """Four ranks and four workers on two nodes that are none, PP2: each way of WAYS ends, or is stuck until its
    deadline. As it is it must end with the same digests on both sides, and so must the order alone.
    """
    found: Figures = {}
    ways = {way: WAYS[way] for way in WAYS if not machine.small or way in ("as it is", "as before")}
    for way, undone in ways.items():
        timeout_s = machine.size(20, 15, "sync_timeout_s")
        setup = _two_nodes(machine, timeout_s)
        began = time.monotonic()
        limit_s = machine.size(3 * timeout_s + 60, 180)  # eight processes on two cores take long to begin
        answers = together(_both("sync", machine, setup, list(undone), 2), limit_s)
        said = "ends" if ended_well(answers) else "is stuck"
        if said == "ends":
            _same_digests(answers)
        found |= machine.part({way: said, f"{way}, s": round(time.monotonic() - began, 2)})
        if "order" not in undone:
            expect(said == "ends", f"a sync {way} {said}: {_errors(answers)}")
        if machine.small and way == "as before":  # NCCL's waits are played there, so it is known
            expect(said == "is stuck", f"a sync {way} {said}, so the check would see no deadlock")
    return found


@check(limit_s=150)
def lost_worker(machine: Machine) -> Figures:
    """A worker is killed in the middle of a sync: ranks and workers live on, and the rest is synced again over a new
    connection with the same digests on both sides.
    """
    timeout_s = machine.size(15, 10, "sync_timeout_s")
    first = _two_nodes(machine, timeout_s)
    second = _again(first, [0, 1, 2])
    answers = together(_both("lose", machine, first, second.to_json()), 3 * timeout_s + 70, gone=["worker 3"])
    died = [name for name, answer in answers.items() if not isinstance(answer, dict) and name != "worker 3"]
    expect(not died, f"{', '.join(died)} did not outlive worker 3: {_errors(answers)}")
    _same_digests({name: [answer["digests"]] for name, answer in answers.items() if isinstance(answer, dict)})
    return {"lived_on": 7, "said": answers["rank 2"]["said"]}


def _two_nodes(machine: Machine, timeout_s: float) -> Any:
    from reshard_world import setup_for

    topology = {"ranks": PLACES, "workers": PLACES}
    return setup_for(
        PP2, {"num_engines": 4}, "auto", topology=topology, timeout_s=float(timeout_s), dialect=machine.device
    )


def _again(setup: Any, workers: list[int]) -> Any:
    from mrl.process.free_ports import free_port

    own = {"name": f"{setup.transport['name']}-2", "workers": workers, "address": f"127.0.0.1:{free_port()}"}
    return replace(setup, timeout_s=60.0, transport=setup.transport | own)


def _both(role: str, machine: Machine, setup: Any, *more: Any) -> dict[str, list[Any]]:
    return {
        f"{side} {number}": [role, machine.device, side, number, setup.to_json(), *more]
        for side in ("rank", "worker")
        for number in FOUR
    }


def _same_digests(answers: Mapping[str, list[Any]]) -> None:
    """Raises Wrong unless each worker has, in each sync, what all ranks together sent to it."""
    from mrl.reshard.digest import MODULUS

    ranks = [syncs for name, syncs in answers.items() if name.startswith("rank")]
    for name, syncs in answers.items():
        side, number = name.split()
        for update, digests in enumerate(syncs if side == "worker" else ()):
            sent: dict[str, int] = {}
            for of_rank in ranks:
                for parameter, digest in of_rank[update].get(number, {}).items():
                    sent[parameter] = (sent.get(parameter, 0) + digest) % MODULUS
            expect(sent == digests, f"{name} does not hold what the ranks sent, in sync {update + 1}")


def sync(device: str, side: str, number: int, setup: dict[str, Any], undone: list[str], updates: int) -> Any:
    """The digests of some syncs of a rank or a worker, with some of the cures undone."""
    import nccl_like

    from mrl.reshard.setup import SyncSetup

    with _small_world(device, undone) as call:
        send = nccl_like.send_all if side == "rank" else nccl_like.receive_all
        return call(send, SyncSetup.from_json(setup), number, updates)


def lose(device: str, side: str, number: int, first: dict[str, Any], second: dict[str, Any]) -> Figures:
    """A sync in which worker 3 ends, and one without it."""
    import nccl_like

    from mrl.reshard.setup import SyncSetup

    with _small_world(device, []) as call:
        run = nccl_like.send_again if side == "rank" else nccl_like.receive_again
        said, digests = call(run, SyncSetup.from_json(first), SyncSetup.from_json(second), number)
    return {"said": said, "digests": digests}


class _small_world:
    """Gives this process the transfers of its device, without the cures that are `undone`, and its tensors a place."""

    def __init__(self, device: str, undone: Collection[str]):
        self._device, self._undone = device, undone

    def __enter__(self) -> Callable[..., Any]:
        import nccl_like
        import torch

        from mrl.platforms.transfer import CudaTransfer
        from mrl.reshard import execute
        from mrl.reshard.transport_p2p import PointToPointReceiver, PointToPointSender

        torch.set_num_threads(1)
        if self._device == "cpu":
            self._folder = tempfile.TemporaryDirectory()
            nccl_like._be_like_nccl(Path("/dev/shm"), False)
            self._place = nullcontext()
        else:
            Machine(self._device).platform.set_device(0)
            self._place = torch.device(self._device)
            whole = nccl_like.hf_weights
            nccl_like.hf_weights = lambda setup: {name: t.to(self._device) for name, t in whole(setup).items()}
        if "order" in self._undone:
            execute.receiving = nccl_like.each_transport_two_rounds_ahead
        if "greeting" in self._undone:
            PointToPointSender._greet = PointToPointReceiver._greet = lambda *_: iter(())
        if "device" in self._undone and self._device != "cpu":
            CudaTransfer.mark = _wait_for_all
        return self._call

    def _call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        if self._device == "cpu":
            return run(*arguments)
        with self._place:
            return run(*arguments)

    def __exit__(self, *_: Any) -> None:
        if self._device == "cpu":
            self._folder.cleanup()


def _wait_for_all(self: Any) -> Callable[[], bool]:
    self._module.synchronize()
    return lambda: True


# ----------------------------------------------------------------------------------------------- bytes in a device


@check(limit_s=150)
def ipc_rounds(machine: Machine) -> Figures:
    """10 GB from a rank to a worker of the same device in 40 rounds: seconds of each part, beside the plan's, with
    waits for the stream and for the whole device.
    """
    layers = machine.size(8, 1, "layers")
    setup = _one_device(machine, layers)
    plan = setup.plan()
    found: Figures = {"bytes": plan.bytes_required or sum(m.nbytes for m in plan.sends(0)), "rounds": plan.num_rounds}
    for way, undone in (("stream", []), ("device", ["device"])):
        setup = _one_device(machine, layers)
        calls = {side: ["stream", machine.device, side, setup.to_json(), undone] for side in ("rank", "worker")}
        answers = together(calls, 100)
        expect(ended_well(answers), f"ipc of {found['bytes'] / 1e9:.1f} GB: {_errors(answers)}")
        expect(answers["rank"]["digests"] == answers["worker"]["digests"], "the worker does not hold what was sent")
        seconds = answers["worker"]["seconds"]
        found |= machine.part({f"{way}_s": seconds, f"{way}_gb_per_s": found["bytes"] / seconds / 1e9,
                               f"{way}_parts": answers["rank"]["parts"]})  # fmt: skip
    return found


def _one_device(machine: Machine, layers: int) -> Any:
    from reshard_world import setup_for

    from mrl.model.registry import known_hf_config

    config = dict(known_hf_config("Qwen3-30B-A3B")) | {"num_hidden_layers": layers}
    budget = machine.size(256 * MIB, 2 * MIB, "budget_bytes")
    if machine.small:
        config |= {"hidden_size": 256, "moe_intermediate_size": 64, "vocab_size": 1024, "num_experts": 16}
    one = [[0, 0]]
    return setup_for({"world_size": 1}, {}, "auto", topology={"ranks": one, "workers": one}, hf_config=config,
                     dtype="bfloat16", budget_bytes=budget, timeout_s=60.0, dialect=machine.device)  # fmt: skip


def stream(device: str, side: str, setup: dict[str, Any], undone: list[str]) -> Figures:
    """Three syncs of random weights, of which the last counts."""
    import torch
    from reshard_world import DictWriter

    from mrl.model.megatron_shards import source_shards
    from mrl.reshard.connect import connect_receiver, connect_sender
    from mrl.reshard.setup import SyncSetup

    agreed = SyncSetup.from_json(setup)
    with _small_world(device, undone) as call:
        if side == "rank":

            def held_by_rank() -> dict[tuple[str, int], Any]:
                return {
                    (s.megatron_name, s.vp_chunk): torch.empty(s.local_shape, dtype=torch.bfloat16).normal_()
                    for s in source_shards(agreed.model, agreed.train_layout, 0)
                }

            held = call(held_by_rank)
            sender = connect_sender(agreed, 0, lambda name, chunk: held[name, chunk])
            reports = [sender.send(update, [0]) for update in (1, 2, 3)]
            return {"digests": reports[-1].digests[0], "parts": reports[-1].seconds}
        receiver = call(connect_receiver, agreed, 0)
        seconds = 0.0
        for update in (1, 2, 3):
            writer = DictWriter(agreed, 0)
            writer.digest = lambda spec: 0  # the proof is not what is timed
            began = time.perf_counter()
            call(receiver.receive, writer, update)
            Machine(device).platform.synchronize()
            seconds = time.perf_counter() - began
        del writer.digest
        return {"digests": {n: call(writer.digest, p) for n, p in writer.parameters.items()}, "seconds": seconds}


# ------------------------------------------------------------------------------------------------------- layouts


@check(limit_s=200)
def layouts(machine: Machine) -> Figures:
    """Gradients of a tiny Qwen3-MoE in float32, cut as in LAYOUTS over real communicators, against one rank's."""
    from layers import tiny_moe

    from mrl.process.free_ports import free_port

    found: Figures = {}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
        tiny_moe(Path(model))
        for name, layout in ({"one rank": {"world_size": 1}} | LAYOUTS).items():
            began, port = time.monotonic(), free_port()
            file = str(Path(folder) / f"{name}.safetensors")
            calls = {
                str(rank): ["gradients", machine.device, model, layout, rank, port, file]
                for rank in range(layout["world_size"])
            }
            answers = together(calls, machine.size(60, 180))
            expect(ended_well(answers), f"{name}: {_errors(answers)}")
            if name == "one rank":
                one = file
                continue
            worst, error = _worst(one, file)
            found |= machine.part({name: error, f"{name}, worst": worst, f"{name}, s": time.monotonic() - began})
            expect(error < _GRADIENT, f"{name}: gradient of {worst} is off by {error:.2g} of its norm from one rank's")
    return found


def _worst(one: str, other: str) -> tuple[str, float]:
    from safetensors.torch import load_file

    expected, found = load_file(one), load_file(other)
    errors = {
        name: float((found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12))
        for name, gradient in expected.items()
    }
    worst = max(errors, key=errors.get)
    return worst, errors[worst]


def gradients(device: str, folder: str, layout: dict[str, int], rank: int, port: int, file: str) -> Figures:
    """One rank's part of an update; rank 0 writes the whole gradient under Hugging Face's names."""
    import torch
    from layers import exported_gradients, one_rank, some_batch
    from safetensors.torch import save_file

    torch.backends.cuda.matmul.allow_tf32 = False
    actor = one_rank(Machine(device), Path(folder), "float32", layout=layout, rank=rank, port=port)
    actor.gradients(some_batch())
    whole = exported_gradients(actor)
    if rank == 0:
        save_file({name: tensor.float().cpu().contiguous() for name, tensor in whole.items()}, file)
    kernels = actor.kernels()
    actor.close()
    return {"kernels": kernels}


_ROLES = {role.__name__: role for role in (pair, sync, lose, stream, gradients)}


def main() -> None:
    """One role: arguments are JSON, or words."""
    from checks import quiet

    quiet()

    def read(word: str) -> Any:
        try:
            return json.loads(word)
        except ValueError:
            return word

    try:
        answer = _ROLES[sys.argv[1]](*map(read, sys.argv[2:]))
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
    os._exit(0)  # what a lost peer has left in a library does not keep the process


if __name__ == "__main__":
    main()
