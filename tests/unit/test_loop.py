"""One step of the loop with stand-ins for actor, engines and rewards: the order of its phases,
and the names of what it writes.
"""

import errno
import math
import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from generations import AnsweringEngines, Files, generation_of
from replicas import InMemory, ReplicaCritic, Replicas

from mrl.algo.correction import mismatch_of_rows
from mrl.cluster.hosts import Peak
from mrl.cluster.process_logs import concerning
from mrl.config.load import load_config
from mrl.data.batch import Prompt
from mrl.data.order import PromptStream
from mrl.data.samples import Sample
from mrl.driver import agreement, loop
from mrl.driver.agreement import Compared, check, compared_of
from mrl.driver.assemble import Run
from mrl.driver.placement import Colocated, Separate
from mrl.driver.resume import RunIdentity
from mrl.driver.sample_writer import reward_parts
from mrl.driver.saving import SavedRun, Saver
from mrl.driver.stop_signals import StopFlag
from mrl.engine.requests import Sampling
from mrl.errors import DataError, EnvironmentFault, Interrupted, LostLock, LostWeights, NumericAbort
from mrl.generate import judged_groups, kept_groups, rollouts
from mrl.generate.generation import Generation
from mrl.generate.rollouts import Responder
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record import run_lock
from mrl.record.run_dir import SHOWN_ROWS, RunDir
from mrl.record.sample_files import read_samples, write_samples
from mrl.record.spec import metric_spec
from mrl.reward.items import OK, RewardResult
from mrl.units import GIB

TINY = "parallel_configs/tiny-moe/cpu.yaml"
SIZES = ("data.train_batch_size=2", "rollout.n=2", "actor.ppo_mini_batch_size=1", "data.max_response_length=2")
KL_IN_REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1")


class World(AnsweringEngines):
    """Actor, engines, reward pool, sync and record in one, which note what they are called for.

    Engines answer once the loop asks for its batch.
    """

    def __init__(self):
        super().__init__()
        self.asked = threading.Semaphore(0)  # batches
        self.calls, self.lines, self.results = [], [], []
        self.are_stuck = False  # the ranks, in a transfer to an engine that is lost
        self.run, self.signal_in = None, ""  # SIGTERM comes to the run in this call
        self.empty = 0  # responses without a token, of a step

    def note(self, call):
        self.calls.append(call)
        if call == self.signal_in:
            self.run.stop.signal = signal.SIGTERM

    def offload(self):
        self.note("offload")

    def take(self, timeout_s):
        if not self.asked.acquire(timeout=0.001):
            return []
        self.note("generate")
        return super().take(timeout_s)

    def respond(self, requests):
        reasons, ids, log_probs = ("length", "stop"), (5, 6), (-1.0, -1.0)
        of_lengths = [0 if i < self.empty else 2 for i in range(len(requests))]
        return [
            Sample(r.prompt_id, r.group_id, r.sample_id, r.seed, r.prompt_ids, ids[:n], log_probs[:n],
                   reasons[i % 2] if n else "stop", 0)
            for i, (r, n) in enumerate(zip(requests, of_lengths, strict=True))
        ]  # fmt: skip

    def for_another(self):
        return self

    def withdraw_all(self):
        self.results = []

    def submit(self, samples, questions, engine, held_s):
        self.results += [RewardResult(each.sample_id, float(each.sample_id % 2), {}, OK) for each in questions]

    def collect(self, at_once):
        if self.results:
            self.note("rewards")
        results, self.results = self.results, []
        return results

    def wait(self, seconds): ...

    def each(self, method, arguments, phase, interruptible=False):
        """Of two ranks that are a replica each."""
        if method in ("update_critic", "update") and (False,) not in arguments:
            self.note(method)
        return self.ranks.each(method, arguments, phase, interruptible)

    def each_keeping(self, method, arguments, phase):
        self.note(f"{method} {arguments[0][0]}")
        return self.ranks.each_keeping(method, arguments, phase)

    def score(self, arguments):
        rows = arguments[0][0]
        self.note("score by reference" if rows.by_reference else "score")
        return self.ranks.score(arguments)

    def refs_each(self, method, arguments):
        return self.ranks.refs_each(method, arguments)

    def updated(self, counts, number):
        parts = [
            {"actor/grad_norm": (norm, 1.0), "actor/skipped_updates": (0.0, 1.0)} for norm in (1.0, 3.0)[: len(counts)]
        ]
        return [*(parts if number == 0 else []), {"perf/update_s": (0.5 if number == 0 else 0.25, 1.0)}]

    def are_free(self, within_s):
        return not self.are_stuck

    def memory_used(self):
        return 3 * GIB

    def take_checkpoint(self):
        self.note("take_checkpoint")
        return 0

    def write_checkpoint(self, work):
        raise OSError("no disk here")

    def bring_to(self, version):
        self.note(f"sync {version}")
        return {"reshard/weight_version": float(version)}

    def progress(self, phase, done, total): ...

    def write(self, step, metrics):
        self.lines.append((step, metrics))


class Writer:
    """Of files of samples, each when it is waited for."""

    failed = 0

    def __init__(self, folder):
        self.folder = folder
        self.under_way = []

    def write(self, step, samples, results, truth_of=None):
        self.finish()
        self.under_way = [(step, samples, results)]

    def finish(self):
        for step, samples, results in self.under_way:
            write_samples(self.folder, step, [samples.read()], reward_parts(results))
        self.under_way = []


BEGUN = []  # by the test that runs


def end_generations():
    while BEGUN:
        BEGUN.pop().close()


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    for module in (rollouts, judged_groups, kept_groups):
        monkeypatch.setattr(module, "ResponseStore", InMemory)
    yield
    end_generations()


@pytest.fixture(autouse=True)
def compare_with_engines(monkeypatch):
    """Ranks here differ from engines by 0.1 nats, so that numbers of both are told apart."""
    compare = loop.compare_with_engines
    monkeypatch.setattr(loop, "compare_with_engines", lambda run: None)
    return compare


@pytest.fixture
def world():
    return World()


class SharedDevices(World):
    """The same on devices that ranks and engines share; a call that would have both there is refused."""

    def __init__(self):
        super().__init__()
        self.engines, self.kinds, self.version, self.lost_in = set(), {"parameters", "gradients", "optimizer"}, None, ""
        self.lost = "rank 1"
        self.taken = []  # (step that the weights are of, engines that were awake) of every copy for a checkpoint
        self.updates = 0

    def note(self, call):
        super().note(call)
        if call == self.lost_in:
            raise concerning(Interrupted(f"{call}: {self.lost} died"), self.lost)
        assert not ({"gradients", "optimizer"} & self.kinds and self.engines) and not (
            self.kinds and "cache" in self.engines
        ), call

    def bring(self, *kinds):
        self.kinds = set(kinds)
        self.note(f"bring {' '.join(kinds)}")

    def offload(self):
        self.kinds = set()
        super().offload()

    def stop(self):
        self.engines, self.lost_in = set(), ""

    def call(self, verb):
        getattr(self, verb)()

    def sleep(self):
        self.engines, self.version = set(), None
        self.note("sleep")

    def wake_weights(self):
        self.engines = {"weights"}
        self.note("wake_weights")

    def transfer(self, version):
        self.note("transfer")
        return {"reshard/weight_version": float(version)}

    def wake_cache(self):
        self.engines = {"weights", "cache"}
        self.note("wake_cache")

    def commit(self, version):
        self.version = version
        self.note("commit")
        return {"rollout/stale_prefix_tokens": 0.0}

    def respond(self, requests):
        assert self.version == self.updates, "engines serve the newest weights"
        return super().respond(requests)

    def each(self, method, arguments, phase, interruptible=False):
        self.updates += method == "update"
        answers = super().each(method, arguments, phase, interruptible)
        if interruptible:
            self.run.stop.raise_if_set()  # whoever waits for the ranks looks for signals
        return answers

    def score(self, arguments):
        answers = super().score(arguments)
        self.run.stop.raise_if_set()
        return answers

    def take_checkpoint(self):
        self.taken.append((self.updates, set(self.engines)))
        return super().take_checkpoint()


def generation_for(world, config, responder, stream, state, spool) -> Generation:
    """Begins when it is first asked to."""
    end_generations()
    world.under_way = []
    generation = generation_of(config, responder, stream, state, spool)
    begin, take = generation.begin, generation.next_batch

    def begun():
        if generation not in BEGUN:
            BEGUN.append(generation)
            begin()

    def taken(timer):
        begun()
        world.asked.release()
        return take(timer)

    generation.begin, generation.next_batch = begun, taken
    return generation


def run_of(world, tmp_path, *overrides, state=TrainState()) -> Run:  # noqa: B008
    config = load_config(TINY, None, [*SIZES, "trainer.test_freq=-1", "trainer.save_freq=-1", *overrides]).config
    stream = PromptStream([Prompt(p, (1, 2, 3), "test", "x") for p in range(4)], 2, seed=0, shuffle=False)
    stop = StopFlag()
    world.ranks = Replicas(config, 2, -0.1, -0.2, world.updated)
    world.config, world.model, world.layout, world.route_readers = config, world.ranks.model, world.ranks.layout, {}
    world.teacher = None
    world.critic_layout = world.layout
    responder = Responder(world, world, config.reward, world, stop.raise_if_set)
    run_dir = RunDir.open(tmp_path / "run", "")
    shared = isinstance(world, SharedDevices)
    placement = Colocated(world, world, world, lambda phase: None) if shared else Separate(world, world)
    saved = SavedRun(RunIdentity.of(config), config.actor.layout, "fingerprint")
    saver = Saver(config.trainer, saved, run_dir.checkpoints, placement, 0)
    spool = Spool(run_dir.spool, Files())
    return Run(
        config=config, run_dir=run_dir, prompts=stream.prompts, val_prompts=None, total_steps=2,
        stop=stop, record=world, responder=responder, actor=world, placement=placement, saver=saver,
        sample_writer=Writer(run_dir.samples),
        generation=generation_for(world, config, responder, stream, state, spool), spool=spool,
        hosts=world, peak=Peak(1e9, 2e9), state=state,
    )  # fmt: skip


def test_a_step_goes_through_its_phases_in_order_and_advances_the_state(world, tmp_path):
    run = run_of(world, tmp_path)
    loop.train_step(run)
    assert world.calls == ["offload", "generate", "rewards", "score", "update", "sync 1"]
    assert (run.state.step, run.state.cursor.index) == (1, 2)
    loop.train_step(run)
    assert [step for step, _ in world.lines] == [1, 2] and world.lines[1][1]["reshard/weight_version"] == 2
    run.sample_writer.finish()
    assert len(read_samples(run.run_dir.samples, 2)) == 4


def agreeing(world, gap=0.0):
    for actor in world.ranks.actors:
        actor.gap = gap
    world.asked.release()


def test_a_start_compares_engines_with_ranks_and_the_next_line_has_its_seconds(world, tmp_path, compare_with_engines):
    run = run_of(world, tmp_path)
    agreeing(world, gap=0.0009)
    asked = []
    respond = world.respond
    world.respond = lambda requests: asked.extend(requests) or respond(requests)
    compare_with_engines(run)
    assert world.calls == ["offload", "generate", "score"] and run.state == TrainState()
    assert len(asked) == 8 and {request.prompt_ids for request in asked} == {(2, 3)}, "no later prompt begins like them"
    loop.train_step(run)
    loop.train_step(run)
    assert ["timing_s/agreement" in metrics for _, metrics in world.lines] == [True, False]


@pytest.mark.parametrize(
    ("overrides", "brought"),
    [((), "parameters"), (("algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=2"), "update")],
)
def test_a_start_gives_shared_devices_back_to_the_engines(shared, tmp_path, compare_with_engines, overrides, brought):
    run = shared.run = run_of(shared, tmp_path, *overrides)
    run.placement.begin(0)
    agreeing(shared)
    begun = len(shared.calls)
    compare_with_engines(run)
    states = {"parameters": "bring parameters", "update": "bring parameters gradients optimizer"}
    assert shared.calls[begun : begun + 4] == ["generate", "sleep", states[brought], "score"]
    assert shared.calls[-1] == "commit" and shared.engines == {"weights", "cache"} and shared.version == 0


def test_engines_that_disagree_with_ranks_end_the_run_before_its_first_step(world, tmp_path, compare_with_engines):
    run = run_of(world, tmp_path, "rollout.engine_kwargs.vllm={kv_cache_dtype: fp8, stream_interval: 2}")
    agreeing(world, gap=0.0011)
    with pytest.raises(NumericAbort, match=r"differ by 0\.0011 nats.*float32 explains 0\.001") as error:
        compare_with_engines(run)
    assert "unusual: rollout.engine_kwargs.vllm.kv_cache_dtype = 'fp8'; leave it out" in str(error.value)
    assert "update" not in world.calls and not world.lines


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ((), 1e-3),
        (("rollout.dtype=bfloat16",), 0.05),
        (("model.dtype=bfloat16",), 0.05),
        (("model.dtype=bfloat16", "rollout.quantization=fp8"), 0.2),
    ],
)
def test_the_largest_gap_is_that_of_the_least_exact_number_format(overrides, most):
    config = load_config(TINY, None, [*SIZES, *overrides]).config
    check(config, Compared(most, 256))
    for gap, said in (
        (most * 1.01, "no argument of vLLM is unusual"),
        (float("nan"), "are not finite .* convert --check"),
    ):
        with pytest.raises(NumericAbort, match=said):
            check(config, Compared(gap, 256))


def test_log_probs_that_are_no_numbers_are_no_agreement():
    rollout, actor = np.array([-1.0, np.nan, -2.0]), np.array([-1.0, np.nan, -2.0])
    of_rows = mismatch_of_rows(rollout, actor, np.array([2, 1]))
    assert math.isnan(compared_of(of_rows, 3).gap)
    whole = mismatch_of_rows(np.array([-1.0, -2.0]), np.array([-1.5, -2.0]), np.array([1, 1]))
    assert compared_of(whole, 2) == Compared(0.25, 2)


def test_engines_are_compared_without_a_filter_of_tokens(world, tmp_path, monkeypatch):
    """With one an engine's log-probs are those of what it leaves, a rank's those of all tokens."""
    asked = []
    monkeypatch.setattr(agreement, "generate", lambda engines, requests, sampling, poll: asked.append(sampling))
    config = load_config(TINY, None, [*SIZES, "rollout.top_p=0.7", "rollout.top_k=5"]).config
    prompt = SimpleNamespace(token_ids=[5, 6, 7], prompt_id="a", images=())
    responder = SimpleNamespace(engines=SimpleNamespace(names=["engine-0"]), look_after=None)
    monkeypatch.setattr(agreement, "training_sampling", lambda *of: Sampling(1.0, 9, (3,), top_p=0.7, top_k=5))
    agreement._short_responses(config, [prompt], responder, 2)
    assert (asked[0].top_p, asked[0].top_k, asked[0].stop_token_ids) == (1.0, -1, ())


def test_a_step_of_a_run_that_lost_its_directory_ends_before_its_first_file(world, tmp_path):
    run = run_of(world, tmp_path)
    (run.run_dir.path / "run.lock.1").rename(run.run_dir.path / "run.lock.2")
    with pytest.raises(LostLock):
        loop.train_step(run)
    assert not list(run.run_dir.samples.iterdir()) and "update" not in world.calls and not world.lines


@pytest.mark.parametrize("settings", [(), ("record.trainer_log_probs=true",)])
def test_a_step_of_a_run_that_loses_its_directory_later_writes_no_log_probs(world, tmp_path, monkeypatch, settings):
    run = run_of(world, tmp_path, *settings)
    note, written = world.note, []

    def lose(call):
        note(call)
        if call == "score":
            (run.run_dir.path / "run.lock.1").rename(run.run_dir.path / "run.lock.2")

    monkeypatch.setattr(world, "note", lose)
    run.sample_writer.write_differences = lambda *_: written.append(True)
    with pytest.raises(LostLock):
        loop.train_step(run)
    assert not written and not (run.run_dir.path / SHOWN_ROWS).exists()


@pytest.mark.parametrize("settings", [(), ("algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=2")])
def test_a_step_of_empty_responses_ends_before_anything_is_computed_or_written(world, tmp_path, settings):
    run = run_of(world, tmp_path, *settings)
    world.empty = 4
    with pytest.raises(DataError, match=r"all 4 responses of the step are empty.*logs/engine"):
        loop.train_step(run)
    assert world.calls == ["offload", "generate", "rewards"] and run.state == TrainState()
    assert not list(run.run_dir.samples.iterdir())


@pytest.mark.parametrize("empty", [1, 3])
def test_a_step_is_trained_on_as_long_as_one_response_has_a_token(world, tmp_path, empty):
    run = run_of(world, tmp_path)
    world.empty = empty
    loop.train_step(run)
    assert run.state.step == 1 and world.lines[0][1]["response_length/mean"] == 2 * (4 - empty) / 4


def test_a_run_that_goes_on_syncs_before_it_generates_and_a_new_one_has_nothing_to_sync(world, tmp_path, monkeypatch):
    monkeypatch.setattr(Saver, "save_last", lambda saver, state, metrics: None)
    run = run_of(world, tmp_path, state=TrainState(step=1))
    loop.train(run)
    seen = [call for call in world.calls if call == "generate" or call.startswith("sync")]
    assert seen == ["sync 1", "generate", "sync 2"]
    world.calls.clear()
    loop.train(run_of(world, tmp_path / "new"))
    assert world.calls.index("generate") < world.calls.index("sync 1") and world.calls[-1] == "sync 2"


@pytest.mark.parametrize("fault", [None, EnvironmentFault("no disk")], ids=["it has ended", "it is to go on"])
def test_a_run_that_has_ended_leaves_no_responses_and_one_that_is_to_go_on_does(world, tmp_path, monkeypatch, fault):
    def save_last(saver, state, metrics):
        if fault:
            raise fault

    monkeypatch.setattr(Saver, "save_last", save_last)
    run = run_of(world, tmp_path)
    with pytest.raises(EnvironmentFault) if fault else nullcontext():
        loop.train(run)
    run.generation.close()
    run.spool.close()
    assert run.run_dir.spool.exists() == bool(list(run.run_dir.spool.glob("*/group-*.npz"))) == bool(fault)


def test_a_critic_is_trained_first_and_alone_before_the_step_that_trains_the_actor_too(world, tmp_path):
    """And no reference is asked where the loss alone wants it."""
    given = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "algorithm.use_kl_loss=true")
    run = run_of(world, tmp_path, *given)
    for actor in world.ranks.actors:
        actor.critic = ReplicaCritic()
    loop.train_step(run)
    first = ["offload", "generate", "rewards", "score_by critic", "score", "update_critic", "sync 1"]
    assert world.calls == first and run.is_whole
    loop.train_step(run)
    both = [*first[:4], "score by reference", "update_critic", "update", "sync 2"]
    assert world.calls[len(first) :] == both
    (_, alone), (_, later) = world.lines
    assert alone["actor/updates"] == 0 and "perf/mfu/actor" not in alone and later["perf/mfu/actor"] > 0
    for metrics in (alone, later):
        assert {"critic/vf_loss", "critic/vf_explained_var", "timing_s/update_critic"} <= metrics.keys()
        for name in metrics:
            metric_spec(name)


ON_POLICY = ("algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=2")


def test_on_policy_no_pass_comes_before_the_update_and_the_line_has_what_the_pass_would_say(world, tmp_path):
    lines = []
    for overrides in (ON_POLICY[1:], ON_POLICY):
        run = run_of(world, tmp_path / str(len(overrides)), *overrides)
        loop.train_step(run)
        lines.append(
            {name: value for name, value in world.lines[-1][1].items() if not name.startswith(("timing", "perf/"))}
        )
    assert world.calls[-6:] == ["offload", "generate", "rewards", "score", "update", "sync 1"]
    assert lines[0] == lines[1] and "training/rollout_probs_diff_mean" in lines[1]
    assert not [name for name in world.lines[-1][1] if "old_log_prob" in name]


@pytest.mark.parametrize("reference", [False, True])
def test_on_policy_shared_devices_go_from_the_engines_to_the_update_unless_a_reference_is_asked_between(
    shared, tmp_path, reference
):
    run = shared.run = run_of(
        shared, tmp_path, *ON_POLICY, f"algorithm.use_kl_loss={str(reference).lower()}", "algorithm.kl_loss_coef=0.1"
    )
    run.placement.begin(0)
    begun = len(shared.calls)
    loop.train_step(run)
    between = ["sleep", "bring parameters", "score by reference"] if reference else ["score", "sleep"]
    assert shared.calls[begun:] == [
        "generate",
        "rewards",
        *between,
        *FROM_UPDATE[:2],
        "bring parameters",
        *FROM_UPDATE[3:4],
        "transfer",
        "offload",
        "wake_cache",
        "commit",
    ]


def test_what_is_saved_is_copied_before_the_weights_leave_for_the_engines(world, tmp_path):
    """Colocated engines wake there, and the ranks' devices have no room any more for what a copy needs."""
    run = run_of(world, tmp_path, "trainer.save_freq=1")
    loop.train_step(run)
    run.saver.close()
    assert world.calls[-3:] == ["update", "take_checkpoint", "sync 1"]


def test_the_samples_of_a_step_are_on_disk_before_its_checkpoint_is(world, tmp_path, monkeypatch):
    """Who starts from it after a kill does not make them again."""
    there = []
    run = run_of(world, tmp_path, "trainer.save_freq=1")
    monkeypatch.setattr(Saver, "_write", lambda *_: there.extend(sorted(run.run_dir.samples.iterdir())))
    loop.train_step(run)
    run.saver.close()
    assert [path.name for path in there] == ["step-1.parquet"]


@pytest.mark.parametrize("overrides", [(), (*KL_IN_REWARD, "algorithm.overlong_filter=true")])
def test_every_name_that_a_step_writes_is_declared(world, tmp_path, overrides):
    loop.train_step(run_of(world, tmp_path, *overrides))
    ((_, metrics),) = world.lines
    for name in metrics:
        metric_spec(name)
    switched = {"actor/kl_coef", "actor/reward_kl_penalty", "train/overlong_filtered_share", "timing_s/ref"}
    assert switched & metrics.keys() == (switched if overrides else set())


def test_how_the_step_lies_on_the_ranks_is_in_the_line(world, tmp_path):
    """Two mini-batches of two sequences of five tokens, one on each rank."""
    loop.train_step(run_of(world, tmp_path))
    ((_, metrics),) = world.lines
    assert (metrics["actor/padding_share"], metrics["actor/dp_imbalance"], metrics["actor/updates"]) == (0.0, 0.0, 2.0)
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (10.0, 10.0)
    assert metrics["actor/grad_norm"] == 2.0


def test_a_signal_before_the_update_ends_the_step_and_changes_nothing(world, tmp_path):
    run = world.run = run_of(world, tmp_path)
    world.signal_in = "generate"
    with pytest.raises(Interrupted):
        loop.train_step(run)
    assert "score" not in world.calls and run.state == TrainState() and world.lines == []


def test_a_signal_from_the_update_on_waits_for_the_end_of_the_step(world, tmp_path):
    run = world.run = run_of(world, tmp_path)
    world.signal_in = "update"
    with pytest.raises(Interrupted):
        loop.train_step(run)
    assert world.calls[-1] == "sync 1" and run.state.step == 1 and len(world.lines) == 1


# what is asked of ranks and engines in a step, on devices that they share
BEFORE_UPDATE = ("generate", "rewards", "sleep", "bring parameters", "score")
FROM_UPDATE = (
    "bring parameters gradients optimizer",
    "update",
    "offload",
    "wake_weights",
    "transfer",
    "wake_cache",
    "commit",
)


@pytest.fixture
def shared(world, monkeypatch):
    """A run on shared devices whose saves are noted and not written."""
    monkeypatch.setattr(Saver, "_write", lambda saver, state, metrics: None)
    return SharedDevices()


def after_a_step(shared: SharedDevices, tmp_path) -> Run:
    run = shared.run = run_of(shared, tmp_path)
    run.placement.begin(0)
    loop.train_step(run)
    return run


def go_on(run: Run, monkeypatch) -> None:
    """`train` from where the run is: engines hold its weights already."""
    monkeypatch.setattr(run.placement, "begin", lambda step: None)
    with pytest.raises(Interrupted):
        loop.train(run)
    run.saver.close()


@pytest.mark.parametrize("call", BEFORE_UPDATE)
def test_a_signal_before_the_update_saves_the_step_before_with_the_engines_asleep(shared, tmp_path, monkeypatch, call):
    run = after_a_step(shared, tmp_path)
    shared.signal_in = call
    go_on(run, monkeypatch)
    assert (
        shared.taken == [(1, set())]
        and run.state.step == run.saver.saved_step == 1
        and [step for step, _ in shared.lines] == [1]
    )


@pytest.mark.parametrize("call", FROM_UPDATE)
def test_a_signal_at_a_later_hand_over_waits_for_the_step_and_saves_it_with_the_engines_asleep(
    shared, tmp_path, monkeypatch, call
):
    run = after_a_step(shared, tmp_path)
    shared.signal_in = call
    go_on(run, monkeypatch)
    assert (
        shared.taken == [(2, set())]
        and run.state.step == run.saver.saved_step == 2
        and [step for step, _ in shared.lines] == [1, 2]
    )


@pytest.mark.parametrize("call", [*BEFORE_UPDATE, *FROM_UPDATE])
def test_a_rank_that_is_lost_at_a_hand_over_ends_the_run_and_nothing_is_saved_of_what_it_left(
    shared, tmp_path, monkeypatch, call
):
    run = after_a_step(shared, tmp_path)
    shared.lost_in = call
    go_on(run, monkeypatch)
    assert shared.taken == [] and len(shared.lines) == 1


@pytest.mark.parametrize("call", [*BEFORE_UPDATE, *FROM_UPDATE])
def test_what_is_whole_on_the_ranks_is_saved_when_an_engine_is_lost(shared, tmp_path, monkeypatch, call):
    """At every hand-over: the step before until its update, the step itself after it; nothing in between."""
    run = after_a_step(shared, tmp_path)
    shared.lost, shared.lost_in = "engine 1", call
    go_on(run, monkeypatch)
    whole = 1 if call in BEFORE_UPDATE or call == FROM_UPDATE[0] else 2
    saved = [] if call == "update" else [(whole, set())]
    assert shared.taken == saved and run.saver.saved_step == (whole if saved else 0)
    assert run.line["training/epoch"] == 0.0 and "critic/score/mean" in run.line


def test_ranks_that_are_stuck_in_a_transfer_to_a_lost_engine_are_not_waited_for(shared, tmp_path, monkeypatch, capsys):
    run = after_a_step(shared, tmp_path)
    shared.are_stuck = True
    shared.lost, shared.lost_in = "engine 1", "transfer"
    go_on(run, monkeypatch)
    assert shared.taken == []
    assert "step 2 is not saved: the ranks still wait for what is lost" in capsys.readouterr().out


@pytest.mark.parametrize("error", [DataError("rewards fail"), EnvironmentFault("no disk")])
def test_what_is_whole_is_saved_whatever_ends_the_run_in_good_order(shared, tmp_path, monkeypatch, error):
    run = after_a_step(shared, tmp_path)
    monkeypatch.setattr(run.generation, "next_batch", lambda timer: (_ for _ in ()).throw(error))
    monkeypatch.setattr(run.placement, "begin", lambda step: None)
    with pytest.raises(type(error)):
        loop.train(run)
    run.saver.close()
    assert run.saver.saved_step == 1


@pytest.mark.parametrize(("repeats", "saved"), [(True, 0), (False, 2)])
def test_a_run_that_repeats_saves_no_weights_that_responses_were_not_begun_for(
    shared, tmp_path, monkeypatch, repeats, saved
):
    """It goes back to the newest checkpoint; another finishes those responses by the weights that are saved."""
    run = after_a_step(shared, tmp_path)
    trainer = run.config.trainer.model_copy(update={"deterministic": repeats})
    run.config = run.config.model_copy(update={"trainer": trainer})

    def drain(timer, saves):
        raise concerning(LostWeights("no engine is left"), "engine 1")

    monkeypatch.setattr(run.generation, "drain", drain)
    go_on(run, monkeypatch)
    assert run.saver.saved_step == saved


def test_what_is_whole_is_saved_when_the_disk_does_not_say_whose_the_run_directory_is(shared, tmp_path, monkeypatch):
    run = after_a_step(shared, tmp_path)

    def refused(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(run_lock, "_text", refused)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.0)
    monkeypatch.setattr(run.placement, "begin", lambda step: None)
    with pytest.raises(EnvironmentFault, match=r"run\.lock\.1 cannot be read"):
        loop.train(run)
    run.saver.close()
    assert run.saver.saved_step == 1


def test_weights_that_gave_no_numbers_are_not_kept(shared, tmp_path, monkeypatch):
    run = after_a_step(shared, tmp_path)
    monkeypatch.setattr(run.generation, "next_batch", lambda timer: (_ for _ in ()).throw(NumericAbort("NaN")))
    monkeypatch.setattr(run.placement, "begin", lambda step: None)
    with pytest.raises(NumericAbort):
        loop.train(run)
    assert shared.taken == []
