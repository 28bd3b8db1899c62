"""A worker's fast path, call by call as vLLM drives it: the toy engine of test_load_layout,
and a wire that brings what it is told.
"""

from types import SimpleNamespace as Record

import pytest
import torch
from test_load_layout import WEIGHTS, Engine, ToyReload, final, right_digest, targets

from mrl.engine import receive
from mrl.engine.load_layout import layers_of
from mrl.engine.read_back import hf_block
from mrl.engine.receive import FastPath, InitInfo, UpdateInfo
from mrl.errors import EnvironmentFault
from mrl.reshard.execute import ReceiveReport


class ToyAdapter(ToyReload):
    """Reads the toy's kernels back."""

    def final_parts(self, model, layer, target):
        return final(model)(target)

    def reads_by_identity(self, layer, target):
        return False

    def attention_backends(self, model):
        return {"FLASH_ATTN"}

    def moe_backends(self, model):
        return {"TRITON", "BATCHED_TRITON"}


class Receiver:
    """Writes all targets but those of the module `lacks`."""

    lacks = ""

    def receive(self, writer, update):
        for module in ("layers.1.fused", "embed", "layers.0.fused"):
            if module == self.lacks:
                continue
            for target in (t for t in targets() if t.module == module):
                for piece in target.pieces:
                    hf_block(writer.tensor(target.name), piece).copy_(WEIGHTS[piece.hf_name][piece.hf_box.slices])
            writer.complete(module)
        return ReceiveReport(3, bytes_moved=10, bytes_local=4, bytes_remote=6, staging_bytes=7, seconds={"wait": 0.5})


def check_hash(expected: str, who: str) -> None:
    if expected != "right":
        raise EnvironmentFault(f"{who} plans otherwise")


@pytest.fixture
def receiver(monkeypatch):
    setup = Record(worker=lambda engine, position: 2 * engine + position, check_hash=check_hash)
    setup.model = setup.rollout_layout = setup.dialect = setup.dtype = None
    setup.fp8_block = 0
    wire = Receiver()
    monkeypatch.setattr(receive.SyncSetup, "from_json", classmethod(lambda cls, data: setup))
    monkeypatch.setattr(receive, "target_parameters", lambda *given: targets())
    monkeypatch.setattr(receive, "connect_receiver", lambda setup, worker: wire)
    for name in ("check_degrees", "check_engine"):
        monkeypatch.setattr(receive, name, lambda *given: None)
    return wire


def path_of(engine: Engine, plan_hash: str = "right") -> FastPath:
    path = FastPath(
        engine, None, ToyAdapter(), InitInfo("fast", setup={}, engine=1, plan_hash=plan_hash), Record(position=1)
    )
    path.meet()
    return path


def test_an_engine_is_checked_before_any_rank_waits_for_it(receiver, monkeypatch):
    said = []
    monkeypatch.setattr(receive, "check_engine", lambda *given: said.append("checked"))
    monkeypatch.setattr(receive, "connect_receiver", lambda setup, worker: said.append("met"))
    info = InitInfo("fast", setup={}, engine=1, plan_hash="right")
    path = FastPath(Engine(), None, ToyAdapter(), info, Record(position=1))
    path.close()  # nothing is held yet
    assert said == ["checked"]
    path.meet()
    assert said == ["checked", "met"]


@pytest.mark.parametrize("read_back", [True, False])
def test_an_update_is_reported_with_its_digests_and_bytes(receiver, read_back):
    path = path_of(Engine())
    path.start()
    path.receive(UpdateInfo(update=5, read_back=read_back))
    assert path.has_everything()
    path.finish()
    report, digests = path.report(), {t.name: right_digest(t) for t in targets()}
    assert report["worker"] == 3 and report["received"] == report["shown"] == digests
    assert report["held"] == (digests if read_back else None)
    assert {name: report[name] for name in ("bytes_moved", "bytes_local", "bytes_remote", "staging_bytes")} == {
        "bytes_moved": 10, "bytes_local": 4, "bytes_remote": 6, "staging_bytes": 7,
    }  # fmt: skip
    assert report["kernels"] == {"attention": ["FLASH_ATTN"], "moe": ["BATCHED_TRITON", "TRITON"]}
    assert set(report["seconds"]) == {"wait", "digest", "process", "finalise", "read_back"}


def test_an_update_that_fails_names_engine_and_worker_and_the_next_one_is_whole(receiver):
    engine = Engine()
    path = path_of(engine)
    receiver.lacks = "embed"
    path.start()
    path.receive(UpdateInfo(update=1))
    with pytest.raises(RuntimeError, match=r"^engine 1 worker 3: the update left 1 of 3 modules incomplete: embed$"):
        path.finish()
    path.abandon()
    assert path.report() == {}
    receiver.lacks = ""
    path.start()
    path.receive(UpdateInfo(update=2))
    path.finish()
    assert path.held_digests() == path.report()["received"]
    assert torch.equal(layers_of(engine, ToyReload())["embed"].weight.data.t()[:3], WEIGHTS["embed.weight"][2:])


def test_another_plan_is_refused_before_anything_is_opened(receiver):
    with pytest.raises(EnvironmentFault, match=r"^engine 1 worker 3 plans otherwise$"):
        path_of(Engine(), plan_hash="other")
