"""Engines of several data-parallel ranks, with and without experts spread over them, answer as an engine of one rank
does.

Each rank has its own front end in its own Ray actor, and nothing of vLLM spreads requests or keeps ranks in step for
the driver: what is asked of one alone hangs. So all that happens to an engine in a run happens here: a rank without
requests, requests that arrive while it pauses, sleep and other weights in between, a rank that is killed.
"""

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from test_sync import CASES, config_for, start_engines, two_models, weights_of
from tiny_models import eagle_head, with_head
from transformers import AutoConfig

from mrl.cluster import rollout_group
from mrl.cluster.calls import Late
from mrl.cluster.process_logs import log_file
from mrl.cluster.ray_cluster import ray_cluster
from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.deployment import Deployment
from mrl.engine.requests import Request, Sampling
from mrl.errors import Interrupted
from mrl.generate.rollouts import generate

CASE = CASES["fp32-moe-to-two-engines"]
ONE = dict(num_engines=1)
PREDICTING = replace(CASE, model="glm")  # with a layer for multi-token prediction
NGRAM = {"method": "ngram", "tokens": 2, "lookup": 1}
MTP = {"method": "mtp", "tokens": 1}
HEAD = {"method": "head", "tokens": 2}  # whose folder the fixture makes
LAYOUTS = {
    "dp2ep2": dict(data_parallel_size=2, expert_parallel_size=2),
    "dp2": dict(data_parallel_size=2),
    "tp2ep2": dict(tensor_model_parallel_size=2, expert_parallel_size=2),
    "two-engines-of-dp2ep2": dict(num_engines=2, data_parallel_size=2, expert_parallel_size=2),
    "dp2ep2-ngram": dict(data_parallel_size=2, expert_parallel_size=2, speculation=NGRAM),
    "dp2ep2-mtp": dict(data_parallel_size=2, expert_parallel_size=2, speculation=MTP),
    "dp2ep2-head": dict(data_parallel_size=2, expert_parallel_size=2, speculation=HEAD),
}
pytestmark = pytest.mark.real


@dataclass
class World:
    """An engine of several ranks beside one of a single rank, with the same weights, and a checkpoint of others."""

    engines: RolloutGroup
    alone: RolloutGroup
    start: Path
    other: Path
    logs: Path
    speculation: dict | None = None

    @property
    def has_drafting_model(self) -> bool:
        return self.speculation not in (None, NGRAM)

    @property
    def has_ranks(self) -> bool:
        return self.engines.engine_ranks > 1


@pytest.fixture(
    scope="module",
    params=[name if name == "dp2ep2" else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS],
)
def world(request, tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp(request.param)
    layout = LAYOUTS[request.param]
    speculation = layout.get("speculation")
    case = PREDICTING if speculation == MTP else CASE
    start, other = two_models(folder, case)
    if case is PREDICTING:
        for checkpoint in (start, other):
            with_head(checkpoint)
    if speculation == HEAD:
        head = eagle_head(folder / "head", AutoConfig.from_pretrained(start), 24)
        layout = layout | {"speculation": (speculation := speculation | {"method": str(head)})}
    alone, several = (
        config_for(start, case, {}, **{**ONE, **engines}) for engines in (dict(speculation=speculation), layout)
    )
    groups = []
    with ray_cluster(Deployment.of(several), actor=False):
        try:
            for name, config in (("several", several), ("alone", alone)):
                groups.append(start_engines(config, folder / name))
            for group in groups:
                group.wait_started()
            yield World(*groups, start, other, folder / "several" / "logs", speculation)
        finally:
            for group in groups:
                group.stop()


def prompt(number: int) -> tuple[int, ...]:
    return tuple(3 + (7 * number + j) % 100 for j in range(4 + 5 * (number % 8)))


def requests(prompts: range, responses: int = 2) -> list[Request]:
    return [
        Request(number * 10 + k, prompt(number), 100 + number * 10 + k) for number in prompts for k in range(responses)
    ]


@dataclass(frozen=True)
class Answer:
    """One response."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_version: int


def answers(group: RolloutGroup, prompts: range = range(8), tokens: int = 24) -> list[Answer]:
    by_prompt = [requests(range(number, number + 1)) for number in prompts]
    done = generate(group, by_prompt, Sampling(1.0, tokens, ())).read()
    log_probs = np.split(done.rollout_log_probs, np.cumsum(done.response_lengths)[:-1])
    versions = done.weight_version.tolist()
    return [
        Answer(tuple(i.tolist()), tuple(p.tolist()), v)
        for i, p, v in zip(done.responses(), log_probs, versions, strict=True)
    ]


def check_same(found: list[Answer], expected: list[Answer]) -> None:
    """Tokens equal, log-probs to 1e-5: ranks add the parts of experts up in another order than one kernel does."""
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(
        np.concatenate([c.log_probs for c in found]), np.concatenate([c.log_probs for c in expected]), rtol=0, atol=1e-5
    )


def bring(group: RolloutGroup, checkpoint: Path) -> None:
    """All weights of a checkpoint through vLLM's own loader; `commit` comes after it."""
    data = (checkpoint / "model.safetensors").read_bytes()
    group.load_weights(
        [(ray.put(np.frombuffer(data, np.uint8)), hashlib.sha256(data).hexdigest())], group.fleet.reached()
    )


def test_what_happens_to_an_engine_in_a_run(world):
    """In one test: starting its engines takes longest."""
    ranks_answer_as_one_does(world)
    a_rank_without_requests_holds_up_nobody(world)
    requests_that_arrive_while_it_pauses_get_the_same_answers(world)
    if not world.has_drafting_model:  # which no checkpoint is brought to: test_drafts_run.py
        after_a_sleep_it_serves_the_weights_that_it_was_brought(world)


@pytest.mark.long
def test_whoever_is_lost_is_named(world):
    """The last of its engines' tests: they do not outlive it."""
    whoever_does_not_answer_is_named_before_others_wait_for_it(world)
    a_killed_rank_ends_all_requests_and_is_named(world)


def ranks_answer_as_one_does(world):
    first = answers(world.engines)
    check_same(first, answers(world.alone))
    assert answers(world.engines) == first, "the engine itself must repeat its bits"


def a_rank_without_requests_holds_up_nobody(world):
    check_same(answers(world.engines, range(1)), answers(world.alone, range(1)))
    assert world.engines.call("check_there") == [None] * len(world.engines.names)


def requests_that_arrive_while_it_pauses_get_the_same_answers(world):
    whole, rng = (
        {number: answers(world.engines, range(number, number + 1), 48) for number in range(6)},
        random.Random(0),
    )

    def late(number: int, after_s: float) -> list[Answer]:
        time.sleep(after_s)
        return answers(world.engines, range(number, number + 1), 48)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            coming = {number: pool.submit(late, number, rng.random() * 0.5) for number in whole}
            time.sleep(rng.random() * 0.5)
            world.engines.call("pause")
            time.sleep(rng.random() * 0.3)
            world.engines.call("resume")
            found = {number: one.result(60) for number, one in coming.items()}
            if world.speculation is None:
                assert found == whole
            else:  # a pause preempts: nothing is drafted for the next token, which takes another random number
                assert lengths(found) == lengths(whole)


def lengths(found: dict[int, list[Answer]]) -> dict[int, list[int]]:
    return {number: [len(one.token_ids) for one in each] for number, each in found.items()}


def after_a_sleep_it_serves_the_weights_that_it_was_brought(world):
    before, held = answers(world.engines), [weights_of(one) for one in world.engines.fingerprints()]
    for number, checkpoint in enumerate((world.other, world.start), 1):
        for group in (world.engines, world.alone):
            group.call("sleep")
            with pytest.raises(RuntimeError, match=r"is ASLEEP and refuses generate"):
                answers(group)
            group.call("wake_weights")
            bring(group, checkpoint)
            group.call("wake_cache")
            commit(group, number)
        if checkpoint is world.other:
            others = answers(world.engines)
            assert not any(
                list(now.token_ids) == list(then.token_ids) for now, then in zip(others, before, strict=True)
            )
    check_same(answers(world.engines), answers(world.alone))
    assert answers(world.engines) == [replace(c, weight_version=2) for c in before]
    assert [weights_of(one) for one in world.engines.fingerprints()] == held
    bring(world.engines, world.other)  # awake: ranks that still step together stand still first
    commit(world.engines, 3)
    bring(world.engines, world.start)
    commit(world.engines, 4)
    assert [c.log_probs for c in answers(world.engines)] == [c.log_probs for c in before]


def commit(group: RolloutGroup, version: int) -> None:
    """As a weight sync does once digests are equal."""
    group.fleet.proven(group.fleet.reached(), version)
    group.commit(version, group.fleet.reached())


def below(world: World, name: str, kind: str) -> psutil.Process:
    """A process of vLLM below a rank: it writes to that rank's log."""
    log = str(world.logs / log_file(name))
    for process in psutil.process_iter(["cmdline"]):
        try:
            if kind in " ".join(process.info["cmdline"] or ()) and log in {
                os.readlink(f"/proc/{process.pid}/fd/{n}") for n in (1, 2)
            }:
                return process
        except OSError:
            continue
    raise AssertionError(f"{name} has no {kind}")


def whoever_does_not_answer_is_named_before_others_wait_for_it(world):
    if not world.has_ranks:
        return
    stopped = below(world, "engine 0 rank 1", "VLLM::Worker")
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout_group, "PREPARE_S", 5.0)
            said = (
                r"pause, asking who is there: no answer from .*engine 0 rank 1 within 5 s.*; engine 0 rank 1: "
                r"VLLM::Worker.* is stopped"
            )
            with pytest.raises(Late, match=said):  # rank 0 may be in a step with it, and then is late, too
                world.engines.call("pause")
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    answers(world.engines)  # nobody was paused


def a_killed_rank_ends_all_requests_and_is_named(world):
    last = world.engines.names[-1]
    victim = below(world, last, "VLLM::Worker")
    killed = []

    def kill() -> None:
        time.sleep(1.0)
        os.kill(victim.pid, signal.SIGKILL)
        killed.append(time.monotonic())

    timer = threading.Thread(target=kill)
    timer.start()
    with pytest.raises(Interrupted, match=rf"{last}: vLLM's process below it died"):
        while True:
            answers(world.engines, tokens=48)
    timer.join()
    assert time.monotonic() - killed[0] < 20
