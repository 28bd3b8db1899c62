"""Builds what a run generates with, for tests: engines that answer at once, files of groups written at once."""

from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace

from replicas import stored

from mrl.checkpoint.group_files import write_group
from mrl.cluster.request_streams import FinishedResponses, FleetChange
from mrl.config.schedule_rules import schedule_of
from mrl.engine.requests import Sampling
from mrl.generate.generation import Generation
from mrl.generate.generation_rules import GenerationRules
from mrl.generate.group_writer import record_of
from mrl.generate.lost_engines import LostEngines
from mrl.generate.rollouts import Judge
from mrl.generate.sampled_by import SampledBy
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState

_FOLDERS = TemporaryDirectory(prefix="mrl-tests-")  # goes with the process


def new_folder() -> Path:
    """An empty folder of its own."""
    return Path(mkdtemp(dir=_FOLDERS.name))


def origin_in(said) -> SampledBy:
    """What made the groups of a checkpoint, as it says itself: a start with the same inputs has the same."""
    return SampledBy(**said["sampled_by"])


class Files:
    """Writes groups at once."""

    def begin(self, path, parts):
        return write_group(path, record_of(parts))

    def facts(self, begun):
        return dict(begun)

    def written(self, begun):
        return begun


class SteadyFleet:
    """Engines that are never started again: a lost one ends the run."""

    none_ready = False

    def count(self, what, number): ...

    def hold_starts(self, poll): ...

    def allow_starts(self): ...

    def end_starts(self): ...

    def metrics(self):
        return {"fleet/engines_ready": 1.0}


class AnsweringEngines:
    """One engine that answers all that it has been sent at once; see `respond`."""

    names = ("engine 0",)
    max_requests = None

    def poll(self): ...

    def __init__(self):
        self.under_way = []
        self.fleet = SteadyFleet()

    def streams(self):
        return _Streams(self)

    def send(self, engine, requests, sampling, kept=None):
        self.under_way += requests

    def take(self, timeout_s):
        asked, self.under_way = self.under_way, []
        return [FinishedResponses(stored(self.respond(asked)), self.names[0])]

    def respond(self, requests):
        """Samples in any order."""
        raise NotImplementedError

    def end_requests(self, handles):
        ended = {number for numbers in handles.values() for number in numbers}
        self.under_way = [request for request in self.under_way if request.handle not in ended]


class _Streams:
    progress = SimpleNamespace(pause=lambda: None, resume=lambda: None)

    def __init__(self, engines):
        self.engines, self.send, self.take = engines, engines.send, engines.take

    @property
    def names(self):
        return list(self.engines.names)

    def follow(self):
        return FleetChange([], [])

    @property
    def waiting_for(self):
        return [name for name in self.engines.names if self.engines.under_way]


def generation_of(
    config, responder, stream, state=None, spool=None, lost=None, left=None, groups_again=lambda groups: None
) -> Generation:
    """As a run has it, sampling at temperature 1."""
    lost = lost or LostEngines(new_folder() / "lost")
    rules = GenerationRules(
        schedule_of(config),
        Judge(config.algorithm, config.reward, config.data.max_response_length),
        Sampling(1.0, config.data.max_response_length, ()),
        config.trainer.seed,
        spool or Spool(new_folder() / "spool", Files()),
        lost,
        lost.suspects(),
        groups_again=groups_again,
    )
    return Generation(rules, responder, stream, state or TrainState(), left or {})
