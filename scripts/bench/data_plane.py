"""What a step's data costs the driver: real Ray, engines and ranks without models, responses of the lengths of a large
run.

    python scripts/bench/data_plane.py [--responses 64 256 1024] [--routes] [--json]

Engines synthesise responses (lognormal lengths: mean 7,385 tokens, 1,190 to 20,480, 3.9 % cut off) and hand them on by
the product's code, as many a second as make 8,192 in 200 s, with seats for all at once; ranks fetch their rows and
compute of tokens what is computed beside a model. The driver runs a step of the product's loop, but for sync and save.
Each size is a run of its own, in a process of its own, so its peak is its own. Extrapolated by a line through the
sizes to 8,192 responses; `error` is the largest relative distance of a size from that line. `phases`: of each of the
loop's, the driver's processor seconds, all seconds, and what it then holds more, or less; `outside_over_step`: of the
step's seconds, those that no phase counts. `--routes`: with routes of replayed experts.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PRESET = "parallel_configs/tiny-moe/cpu.yaml"
FULL, MEAN, SHORTEST, LONGEST = 8192, 7385, 1190, 20480
PROMPT, N, ENGINES, REPLICAS, LAYERS, TOPK = 120, 8, 2, 2, 94, 8
RATE = FULL / 200  # responses a second, all engines together
SIGMA = 0.62  # of the logarithm: 3.9 % beyond LONGEST, with that mean
GAP = np.float32(1e-4)  # of ranks' log-probs, over generation's
UPDATE_METRICS = {"actor/grad_norm": (1.0, 1.0), "actor/skipped_updates": (0.0, 1.0)}  # of a mini-batch


def lengths_of(responses: int) -> np.ndarray:
    """int [responses], the same at every call."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2 + 0.03, SIGMA, responses)
    return np.clip(drawn, SHORTEST, LONGEST).astype(int)


def settings(responses: int, routes: bool = False) -> list[str]:
    """Overrides of the preset. Where routes come, replicas have two pipeline stages and two context-parallel ranks."""
    cut = "pipeline_model_parallel_size: 2, context_parallel_size: 2, " if routes else ""
    replay = ["actor.router_replay=R3", "rollout.enable_prefix_caching=false"] if routes else []
    return [
        *replay,
        f"data.train_batch_size={responses // N}", f"rollout.n={N}", f"actor.ppo_mini_batch_size={responses // N // 4}",
        f"data.max_response_length={LONGEST}", f"data.max_prompt_length={PROMPT}", f"rollout.num_engines={ENGINES}",
        f"rollout.max_num_seqs={responses // ENGINES}", "trainer.save_freq=-1", "trainer.test_freq=-1",
        f"actor.layout={{{cut}world_size: {REPLICAS * (4 if routes else 1)}, tensor_model_parallel_size: 1, "
        "expert_model_parallel_size: 1, sequence_parallel: false}",
    ]  # fmt: skip


def rss() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Bytes, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Pace:
    """Of one engine: how long each response waits for its turn, whichever call asks for it."""

    def __init__(self):
        self.begun, self.made = None, 0

    async def turn(self) -> None:
        """Ends when the next response is due."""
        self.begun = self.begun or time.monotonic()
        due = self.begun + self.made * ENGINES / RATE
        self.made += 1
        await asyncio.sleep(due - time.monotonic())


class Measured:
    """From here on: bytes over what is held now, and processor seconds."""

    def __init__(self):
        self.rss = rss()
        self.cpu = time.process_time()

    def of(self, tokens: int, **more) -> dict:
        return {
            "tokens": tokens,
            "driver_peak_bytes": peak() - self.rss,
            "driver_busy_s": time.process_time() - self.cpu,
            **more,
        }


def measuring_timer(phases: dict[str, dict[str, float]]) -> type:
    """The loop's timer, which also notes in `phases` what the driver did in each."""
    from mrl.record.metrics import PhaseTimer

    class MeasuringTimer(PhaseTimer):
        @contextmanager
        def __call__(self, phase: str):
            before, entered = np.array([time.process_time(), rss()]), super().__call__(phase)
            with entered:
                yield
            busy, held = np.array([time.process_time(), rss()]) - before
            told = phases.setdefault(phase, {"busy_s": 0.0, "all_s": 0.0, "bytes": 0})
            told |= {"busy_s": told["busy_s"] + busy, "all_s": self.seconds[phase], "bytes": told["bytes"] + int(held)}

    return MeasuringTimer


def drawn(number: int, tokens: int, routes: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Ids and log-probs [tokens] of a response, and where they come routes [PROMPT + tokens, LAYERS, TOPK]; of a number
    always the same.
    """
    rng = np.random.default_rng(number)
    ids = rng.integers(1, 1000, tokens)
    known = None
    if routes:
        known = rng.integers(0, 127, (PROMPT + tokens, LAYERS, TOPK)).astype(np.int8)
    return ids, -rng.random(tokens).astype(np.float32), known


class FakeEngine:
    """Synthesises responses of the lengths, each when it is due. The first request has number 1."""

    def __init__(self, lengths: np.ndarray, routes: bool):
        self.lengths, self.routes = lengths, routes
        self.pace = Pace()

    async def generate(self, requests, sampling):
        from mrl.data.samples import Sample, packed

        for request in requests:
            await self.pace.turn()
            number = request.sample_id - 1
            ids, log_probs, routes = drawn(number, int(self.lengths[number]), self.routes)
            yield packed([
                Sample(request.prompt_id, request.group_id, request.sample_id, 0, request.prompt_ids,
                    ids.astype(np.int32), log_probs, "stop", 0, routes)
            ])  # fmt: skip


def prompts_of(responses: int) -> list:
    from mrl.data.batch import Prompt

    return [Prompt(i, (7,) * PROMPT, "test", "x") for i in range(responses // N)]


def warm(ray, *groups) -> None:
    """Processes are up, and what a first call imports is imported."""
    ray.get([actor.__ray_ready__.remote() for group in groups for actor in group])


def one_step(responses: int, routes: bool, folder: Path) -> dict:
    """One step of the loop. What stands in is made of nothing: model, saver, weight sync."""
    import ray

    from mrl.config.load import load_config
    from mrl.driver import loop
    from mrl.record.metrics import StepLine
    from mrl.record.run_dir import RunDir, read_metrics

    config = load_config(PRESET, "gspo", settings(responses, routes)).config
    lengths = lengths_of(responses)
    node = ray.get_runtime_context().get_node_id()
    engines = engine_group(config, node, FakeEngine(lengths, routes))
    run_dir = RunDir.open(folder / "run", "")
    actor = Ranks(config, node, routes)
    scorers = scorer_group(node, engines, folder)
    run = assembled(config, run_dir, actor, engines, scorers, prompts_of(responses), routes)
    phases = {}
    timer = measuring_timer(phases)
    loop.StepLine = lambda: StepLine(timer())
    warm(ray, actor.ranks, engines.workers)

    measured = Measured()
    run.generation.begin()
    loop.train_step(run)
    run.generation.close()
    said = read_metrics(run_dir.metrics)[0]
    found = measured.of(responses * PROMPT + int(lengths.sum()), phases=phases)
    found["outside_over_step"] = said["timing_s/outside"] / said["timing_s/step"]
    run.sample_writer.close()
    fetched = ray.get([rank.fetched.remote() for rank in actor.ranks])
    size = (run_dir.samples / "step-1.parquet").stat().st_size
    run.record.close()
    run_dir.close()
    received, needed = (sum(numbers) for numbers in zip(*fetched, strict=True))
    return found | {"received_over_needed": received / needed, "samples_bytes_per_token": size / found["tokens"]}


def placed(kind: type, node: str):
    """The kind as an actor of Ray on the node, which stores what it returns as engines and scorers do."""
    import ray

    from mrl.process.ray_nodes import on_node
    from mrl.store.response_store import SMALL_OBJECTS

    return ray.remote(kind).options(**on_node(node), runtime_env={"env_vars": SMALL_OBJECTS})


def engine_group(config, node: str, engine: FakeEngine):
    """The product's engines on the node, each with a copy of `engine` for vLLM."""
    from mrl.cluster.engine_fleet import EngineFleet
    from mrl.cluster.rollout_group import RolloutGroup, request_limit
    from mrl.config.deployment import Deployment
    from mrl.engine.engine_worker import EngineWorker
    from mrl.engine.outbox import Outboxes

    class Engine(EngineWorker):
        def __init__(self, engine):
            self.engine, self.outboxes = engine, Outboxes()

    engines = RolloutGroup.__new__(RolloutGroup)
    engines.cluster, engines.rollout, engines.poll = config.cluster, config.rollout, lambda: None
    engines.max_requests = request_limit(Deployment.of(config), config.trainer.deterministic)
    kind = placed(Engine, node)
    engines.workers = [kind.remote(engine) for _ in range(ENGINES)]
    engines.names, engines.engine_ranks = [f"engine {i}" for i in range(ENGINES)], 1
    engines.nodes = dict.fromkeys(engines.names, node)
    engines.fleet = EngineFleet(engines, 60.0)
    return engines


def scorer_group(node: str, engines, folder: Path):
    """The product's scorer on the node, with a tokenizer of one word."""
    import ray

    from mrl.cluster.scoring import Channel, PoolSettings, Scorer, ScorerGroup
    from mrl.reward.items import RewardSpec

    scorer = placed(Scorer, node).remote(lambda: SimpleNamespace(decode=lambda ids, **_: "text" * len(ids)))
    pool = PoolSettings(RewardSpec("exact_match"), 1, 60.0, 0.0, folder / "reward.log", dict(os.environ), str(folder))
    ray.get(scorer.start.remote(pool))
    return ScorerGroup([Channel("scorer 0", scorer)], dict.fromkeys(engines.names, 0))


class Rank:
    """A replica without a model: its log-probs are near generation's."""

    def __init__(self, config, rank, meeting, stage, context, degree, replica):
        self.config, self.rank, self.meeting = config, rank, meeting
        self.counts_updates = replica == 0  # as real ranks do, those of one replica alone
        self.stage, self.context = stage, context
        self.degree = degree  # number of stages, and of context-parallel ranks
        self.on_last_stage = stage == degree - 1
        self.holds_result = self.on_last_stage and context == 0

    def score(self, rows, own, stored, *handed):
        from mrl.rank import rank_batch
        from mrl.rank.rank_step import RankStep

        blocks = stored.fetched([block.samples for block in stored.blocks])
        samples = stored.assembled(blocks)
        self.needed = samples.rows(np.flatnonzero(own.own)).nbytes
        self.received = sum(block.nbytes for block in blocks)
        found = None
        if own.readers:
            found = self.read_routes(stored, blocks, samples, own.own, own.cut, own.readers)
        rank_batch.RankBatch.fetched = lambda actor, *_: rank_batch.RankBatch(actor, samples, own.own, own.cut, found)
        self.step = RankStep(self, rows)
        return self.step.score(own, stored, handed)

    def gather_bytes(self, data):
        import ray

        return ray.get(self.meeting.meet.remote(self.rank, data))

    def read_routes(self, stored, blocks, samples, own, cut, readers):
        """Routes of what this rank computes; counts their bytes."""
        from mrl.rank.cut import RowLengths
        from mrl.rank.packing import Shape
        from mrl.store.routes import read_routes

        layers = np.array_split(np.arange(LAYERS), self.degree)[self.stage]
        computed = cut.computed(RowLengths.of(samples), Shape(True, self.degree), self.context, 0)
        found = read_routes(stored, blocks, computed, layers, readers)
        self.received += found.values.nbytes
        trained = np.repeat(own, samples.lengths) & computed
        self.needed += int(trained.sum()) * len(layers) * TOPK
        return found

    def shown(self, numbers, less_rollout):
        return self.step.shown(numbers, less_rollout)

    def update(self):
        return self.step.update()

    def policy_log_probs(self, batch, micros):
        from mrl.rank.row_results import RowResult

        if self.on_last_stage:
            every = np.arange(len(batch))
            return RowResult(every, batch.rollout_log_probs[batch.is_sampled] + GAP, (0.0, 1.0))

    def update_replica(self, batch, mini_batches, counts):
        from mrl.rank.row_results import UpdateResult

        parts = [UPDATE_METRICS for _ in counts if self.holds_result and self.counts_updates]
        return UpdateResult(parts, [], spent={"perf/update_s": (1.0, 1.0)})

    def fetched(self):
        return self.received, self.needed


class Meeting:
    """Hands every rank what all of them gave."""

    def __init__(self, ranks):
        self.given, self.ranks = {}, ranks

    async def meet(self, rank, data):
        import asyncio

        if not self.given:
            self.all = asyncio.get_running_loop().create_future()
        self.given[rank] = data
        met = self.all
        if len(self.given) == self.ranks:
            met.set_result([self.given[number] for number in range(self.ranks)])
            self.given = {}
        return await met


class Ranks:
    """As ActorGroup: ranks of the configuration's layout."""

    def __init__(self, config, node: str, routes: bool):
        import ray

        from mrl.model import planning_model_spec
        from mrl.model.layout import TrainLayout
        from mrl.process.ray_nodes import on_node
        from mrl.store.routes import start_readers

        self.config, (self.model, _) = config, planning_model_spec(config.model.path)
        self.layout = TrainLayout.build(config.actor.layout.model_dump(), self.model)
        kind, layout = ray.remote(Rank).options(**on_node(node)), self.layout
        at = [layout.dense_coords(rank) for rank in range(layout.world_size)]
        meeting = ray.remote(Meeting).options(max_concurrency=len(at), **on_node(node)).remote(len(at))
        self.ranks = [
            kind.remote(config, rank, meeting, each.pp, each.cp, layout.pipeline, each.dp)
            for rank, each in enumerate(at)
        ]
        self.teacher = None
        self.route_readers = start_readers([node]) if routes else {}

    def each(self, method, arguments, phase, interruptible=False):
        import ray

        from mrl.cluster.actor_group import put_once

        return ray.get(
            [getattr(rank, method).remote(*own) for rank, own in zip(self.ranks, put_once(arguments), strict=True)]
        )

    def score(self, arguments):
        answers = self.each("score", arguments, "score")
        return [first for first, _ in answers], [second for _, second in answers]


def assembled(config, run_dir, actor: Ranks, engines, scorers, prompts: list, routes: bool):
    """A run of one step of the prompts, as the product's assembly makes it."""
    from mrl.driver.assemble import Run
    from mrl.driver.reporting import AdvisedRecord
    from mrl.driver.sample_writer import SampleWriter
    from mrl.driver.stop_signals import StopFlag
    from mrl.generate.group_writer import GroupWriter
    from mrl.generate.rollouts import Responder
    from mrl.generate.spool import Spool
    from mrl.generate.train_state import TrainState
    from mrl.record.attempts import UnderWay
    from mrl.record.sinks import make_sinks

    record = AdvisedRecord(make_sinks([], run_dir, 2), [], UnderWay(run_dir.path, 0))
    responder = Responder(engines, scorers, config.reward, record, lambda: None)
    spool = Spool(run_dir.spool, GroupWriter(600.0, 0))
    placement = SimpleNamespace(
        to_generation=lambda: None, to_log_probs=lambda: None, to_update=lambda: None, to_engines=lambda step: {},
        seconds=dict,
    )  # fmt: skip
    return Run(
        config=config, run_dir=run_dir, prompts=prompts, val_prompts=None, total_steps=2, stop=StopFlag(),
        record=record, responder=responder, actor=actor, placement=placement,
        saver=SimpleNamespace(finished=dict, failed_saves=0),
        sample_writer=SampleWriter(run_dir.samples, 600.0, config.record),
        generation=generation_of(config, run_dir, responder, spool, prompts, routes), spool=spool,
        hosts=SimpleNamespace(memory_used=lambda: 0), peak=SimpleNamespace(actor=1.0, run=1.0), state=TrainState(),
    )  # fmt: skip


def generation_of(config, run_dir, responder, spool, prompts: list, routes: bool):
    """Generation of one step, which is all the prompts."""
    from mrl.config.schedule_rules import schedule_of
    from mrl.engine.requests import Sampling
    from mrl.generate.generation import Generation
    from mrl.generate.generation_rules import GenerationRules
    from mrl.generate.lost_engines import LostEngines
    from mrl.generate.rollouts import Judge
    from mrl.generate.train_state import TrainState

    stream = SimpleNamespace(
        next_batch=lambda cursor: (prompts, cursor), batch_number=lambda cursor: 0, batch_size=len(prompts)
    )
    lost = LostEngines(run_dir.lost_engines)
    rules = GenerationRules(
        replace(schedule_of(config), total_steps=1),
        Judge(config.algorithm, config.reward, config.data.max_response_length),
        Sampling(1.0, LONGEST, (), routes=routes),
        0, spool, lost, lost.suspects(),
    )  # fmt: skip
    return Generation(rules, responder, stream, TrainState())


# ---------------------------------------------------------------- runs


def child(responses: int, routes: bool) -> None:
    """One run; prints its figures as JSON."""
    import ray

    from mrl.platforms.process_memory import few_heaps

    few_heaps()  # as ray_cluster does
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "samples").mkdir()
        ray.init(
            "local", log_to_driver=False, logging_level="error", num_cpus=2, include_dashboard=False,
            object_store_memory=store_bytes(responses, routes), _temp_dir=folder,
        )  # fmt: skip
        try:
            print(json.dumps(one_step(responses, routes, Path(folder, "samples"))))
        finally:
            ray.shutdown()


def store_bytes(responses: int, routes: bool) -> int:
    """Of an object store: with routes a response takes 6 MB in the mean."""
    return max(4 * 1024**3, responses * 7_000_000) if routes else 1024**3


def measured_apart(responses: int, routes: bool) -> dict:
    """Figures of a size, from a child process."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", "--responses", str(responses), *(["--routes"] if routes else [])]
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    return {"responses": responses} | json.loads(done.stdout.splitlines()[-1])


def extrapolated(rows: list[dict], key: str) -> dict:
    """At FULL responses, by a line through the sizes."""
    tokens, values = (np.array([row[name] for row in rows], float) for name in ("tokens", key))
    if len(rows) < 2:
        return {}
    slope, start = np.polyfit(tokens, values, 1)
    line = slope * tokens + start
    full = FULL * tokens.sum() / sum(row["responses"] for row in rows)
    return {"value": slope * full + start, "per_token": slope, "error": float(np.abs(line / values - 1).max())}


def show(rows: list[dict], full: dict[str, dict]) -> None:
    """Prints a line a run, and one for each figure at FULL responses."""
    for row in rows:
        print(
            f"{row['responses']:6} responses {row['tokens']:10,} tokens  peak "
            f"{row['driver_peak_bytes'] / 1e6:8.1f} MB ({row['driver_peak_bytes'] / row['tokens']:6.2f} B/token)  busy "
            f"{row['driver_busy_s']:6.2f} s  received/needed {row['received_over_needed']:.3f}  file "
            f"{row['samples_bytes_per_token']:.2f} B/token"
        )
    for name, values in full.items():
        print(f"{name} at {FULL} responses: {json.dumps(values)}")


def main() -> None:
    """Prints a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--routes", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.responses[0], args.routes)
    rows = [measured_apart(size, args.routes) for size in args.responses]
    full = {key: extrapolated(rows, key) for key in ("driver_peak_bytes", "driver_busy_s")}
    if args.json:
        return print(json.dumps({"rows": rows, "extrapolated": full}))
    show(rows, full)


if __name__ == "__main__":
    main()
