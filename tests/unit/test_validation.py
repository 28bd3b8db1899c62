"""Validation from prompts to numbers, files and loggers, with engines stood in for;
and what `mrl eval` refuses at once.
"""

import json
from types import SimpleNamespace

import pytest
from generations import AnsweringEngines
from replicas import scorers
from test_data import CharTokenizer, load, row, write_jsonl

from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.data.batch import Prompt
from mrl.data.samples import Sample
from mrl.driver.loop import due, validation_metrics
from mrl.driver.placement import Separate
from mrl.driver.stop_signals import StopFlag
from mrl.driver.validation import ValidationSettings, answer_and_score
from mrl.engine.requests import Sampling
from mrl.errors import DataError, EnvironmentFault, LostLock
from mrl.generate.rollouts import Responder
from mrl.generate.train_state import TrainState
from mrl.record.run_dir import RunDir
from mrl.record.validation_metrics import evenly_spread
from mrl.reward.items import RewardSpec
from mrl.reward.pool import RewardPool

TINY = "parallel_configs/tiny-moe/cpu.yaml"


class Chars(CharTokenizer):
    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def answered(request, ids, version):
    """Of `!` the environment failed."""
    failed = tuple(ids) == (ord("!"),)
    return Sample(
        request.prompt_id,
        request.group_id,
        request.sample_id,
        request.seed,
        request.prompt_ids,
        ids,
        (0.0,) * len(ids),
        "environment" if failed else "stop",
        version,
        sampled=(True,) if failed else None,
    )


class Engines(AnsweringEngines):
    """Answers by seed: the k-th response to a prompt is what the test lists for its text,
    whatever order requests come in.
    """

    def __init__(self, answers):
        super().__init__()
        self.answers, self.requests, self.counts = answers, [], {}

    def send(self, engine, requests, sampling, kept=None):
        self.requests, self.sampling = requests, sampling
        super().send(engine, requests, sampling)

    def respond(self, requests):
        done = []
        for request in requests:
            text = "".join(map(chr, request.prompt_ids)).removeprefix("u:")
            k = self.counts[text] = self.counts.get(text, -1) + 1
            answer = self.answers[text][k % len(self.answers[text])]
            ids = tuple(map(ord, answer))
            done.append(answered(request, ids, 3))
        return done[::-1]


class World:
    """A run that validates at step 2 on two sets, with real scoring processes."""

    def __init__(self, tmp_path, answers, rows, *overrides):
        self.shown, self.engines = [], Engines(answers)
        file = write_jsonl(tmp_path / "val.jsonl", rows)
        record = SimpleNamespace(
            progress=lambda *_: None, generations=lambda step, found: self.shown.append((step, found))
        )
        config = load_config(TINY, None, ["rollout.val_kwargs.n=2", "data.max_response_length=16", *overrides]).config
        self.run = SimpleNamespace(
            config=config, val_prompts=load(file, tokenizer=Chars()), record=record, responder=None,
            state=TrainState(2),
            run_dir=RunDir(tmp_path / "run"), placement=SimpleNamespace(to_generation=lambda: None),
        )  # fmt: skip

    def responder(self, pool):
        return Responder(
            self.engines,
            scorers(pool, Chars()),
            self.run.config.reward,
            self.run.record,
            StopFlag().raise_if_set,
        )

    def validate(self, spec):
        with RewardPool(spec, num_workers=1, timeout_s=5.0) as pool:
            self.run.responder = self.responder(pool)
            return validation_metrics(self.run)


@pytest.fixture(autouse=True)
def no_model_files(monkeypatch):
    sampling = Sampling(temperature=0.5, max_tokens=16, stop_token_ids=())
    monkeypatch.setattr("mrl.driver.validation.validation_sampling", lambda *sections: sampling)


ROWS = [row("a", "1", source="math_dapo"), row("b", "2", source="math_dapo"), row("c", "3", source="exact_match")]
ANSWERS = {"a": ["Answer: 1", "Answer: 9"], "b": ["Answer: 2", "Answer: 2"], "c": ["4", "4"]}


def test_each_set_has_its_numbers_under_verls_names(tmp_path):
    metrics = World(tmp_path, ANSWERS, ROWS).validate(RewardSpec())
    assert metrics["val-core/math_dapo/acc/mean@2"] == (0.5 + 1.0) / 2
    assert metrics["val-core/math_dapo/acc/best@2/mean"] == (0.75 + 1.0) / 2
    assert metrics["val-aux/math_dapo/reward/mean@2"] == (0.0 + 1.0) / 2  # -1 and 1, 1 and 1
    # a number alone is acc
    assert metrics["val-core/exact_match/acc/mean@2"] == metrics["val-aux/exact_match/reward/mean@2"] == 0.0
    assert "val-core/math_dapo/acc/maj@2/mean" in metrics and "val-core/exact_match/acc/maj@2/mean" not in metrics
    assert (metrics["val-aux/response_length/mean"], metrics["val-aux/reward_failed"]) == ((9 * 4 + 2) / 6, 0.0)


def test_every_response_is_kept_and_a_few_are_shown(tmp_path):
    world = World(tmp_path, ANSWERS, ROWS, "trainer.log_val_generations=2")
    world.validate(RewardSpec())
    rows = [json.loads(line) for line in (tmp_path / "run" / "validation" / "step-2.jsonl").read_text().splitlines()]
    assert [(r["input"], r["output"], r["gts"], r["score"]) for r in rows[:2]] == [
        ("u:a", "Answer: 1", "1", 1.0),
        ("u:a", "Answer: 9", "1", -1.0),
    ]
    assert rows[1]["reward"]["pred"] == "9" and rows[1]["weight_version"] == 3
    ((step, shown),) = world.shown
    assert step == 2 and [r["input"] for r in shown] == ["u:a", "u:b"]


def test_nothing_is_shown_unless_asked_for_and_nothing_done_without_prompts(tmp_path):
    world = World(tmp_path, ANSWERS, ROWS)
    world.validate(RewardSpec())
    assert world.shown == []
    world.run.val_prompts = None
    assert validation_metrics(world.run) == {}


def test_a_run_that_lost_its_directory_keeps_no_responses_in_it(tmp_path):
    world = World(tmp_path, ANSWERS, ROWS)
    world.run.run_dir = RunDir.open(tmp_path / "run", "")
    (tmp_path / "run" / "run.lock.1").unlink()
    with pytest.raises(LostLock):
        world.validate(RewardSpec())
    assert not (tmp_path / "run" / "validation").exists()


def test_validation_has_its_own_sampling_and_the_same_seeds_every_time(tmp_path):
    world = World(tmp_path, ANSWERS, ROWS)
    world.validate(RewardSpec())
    first = world.engines.requests
    assert world.engines.sampling.temperature == 0.5
    world.run.state = TrainState(40)
    world.validate(RewardSpec())
    assert [r.seed for r in world.engines.requests] == [r.seed for r in first]
    assert len({r.seed for r in first}) == 6


def test_a_prompt_whose_environment_failed_is_in_no_number_and_is_told(tmp_path):
    """By hand: of b one answer of two is right; a has one left, which would make it 3 of 4 or 2 of 3."""
    (tmp_path / "mine.py").write_text("def compute_score(solution_str, **_):\n    return float(solution_str == 'y')\n")
    spec = RewardSpec(path=str(tmp_path / "mine.py"))
    rows, answers = [row("a", "1"), row("b", "1")], {"a": ["!", "y"], "b": ["y", "x"]}
    metrics = World(tmp_path, answers, rows, "reward.max_failure_share=0.25").validate(spec)
    assert (metrics["val-core/toy/acc/mean@2"], metrics["val-aux/reward_failed"]) == (0.5, 0.0)
    assert metrics["val-aux/environment_failed"] == 1.0
    with pytest.raises(EnvironmentFault, match="the environment failed in 1 of"):
        World(tmp_path, answers, rows, "reward.max_failure_share=0.2").validate(spec)


def test_a_failed_reward_counts_with_its_score_and_is_told(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, **_):\n"
        "    if solution_str == 'x': raise ValueError('no')\n"
        "    return {'score': 1.0, 'acc': 1.0, 'pred': 'y'}\n"
    )
    spec = RewardSpec(path=str(tmp_path / "mine.py"))
    rows, answers = [row("a", "1"), row("b", "1")], {"a": ["x", "y"], "b": ["y", "y"]}
    metrics = World(tmp_path, answers, rows, "reward.max_failure_share=0.5").validate(spec)
    assert (metrics["val-core/toy/acc/mean@2"], metrics["val-aux/reward_failed"]) == (0.75, 1.0)
    with pytest.raises(DataError, match="max_failure_share"):
        World(tmp_path, answers, rows, "reward.max_failure_share=0.2").validate(spec)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("failing", ["a", "c"])
def test_a_prompt_whose_responses_all_fail_counts_as_wrong_in_every_quantity(tmp_path, failing, n):
    """Three prompts, two of them right; which of them fails, the first or the last, changes no name and no number."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, **_):\n"
        "    if solution_str == 'x': raise ValueError('no')\n"
        "    return {'score': 1.0, 'acc': 1.0, 'pred': 'y', 'length': 1.0}\n"
    )
    answers = {key: ["x" if key == failing else "y"] for key in "abc"}
    world = World(
        tmp_path, answers, [row(key, "1") for key in "abc"], "reward.max_failure_share=0.5", f"rollout.val_kwargs.n={n}"
    )
    metrics = world.validate(RewardSpec(path=str(tmp_path / "mine.py")))
    core = ["mean@1"] if n == 1 else ["mean@2", "best@2/mean", "maj@2/mean"]
    assert {name: metrics.get(f"val-core/toy/acc/{name}") for name in core} == dict.fromkeys(core, pytest.approx(2 / 3))
    assert metrics[f"val-aux/toy/reward/mean@{n}"] == pytest.approx(2 / 3)
    assert not [name for name in metrics if name.startswith("val-core/toy/reward") or "length/mean@" in name]


def test_in_validation_a_failure_counts_as_the_lowest_of_its_own_data_source(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, **_):\n"
        "    if solution_str == 'x': raise ValueError('no')\n"
        "    return -100.0 if data_source == 'steep' else 1.0\n"
    )
    rows, answers = [row("a", "1", source="flat"), row("b", "1", source="steep")], {"a": ["x", "y"], "b": ["y", "x"]}
    world = World(tmp_path, answers, rows, "reward.max_failure_share=0.5")
    metrics = world.validate(RewardSpec(path=str(tmp_path / "mine.py")))
    for name in ("val-core/{}/acc/mean@2", "val-aux/{}/reward/mean@2"):  # a number alone is the accuracy too
        assert (metrics[name.format("flat")], metrics[name.format("steep")]) == (0.5, -100.0)


def test_a_prompt_that_comes_twice_in_a_batch_is_not_answered_alike(tmp_path):
    world = World(tmp_path, ANSWERS, ROWS)
    prompt = Prompt(7, (ord("a"),), "exact_match", "1")
    world.engines.answers = {"a": ["1"]}
    with RewardPool(RewardSpec(), num_workers=1) as pool:
        responder = world.responder(pool)
        samples = responder.respond(
            [prompt, prompt], 2, Sampling(1.0, 4, ()), lambda p, k: p.prompt_id * 10**9 + k, "train"
        )
        responder.rewards.drain()
    assert samples.rows.group_id.tolist() == [0, 0, 1, 1]
    assert len(set(samples.rows.seed.tolist())) == 4


def test_answers_come_back_in_the_order_of_prompts(tmp_path):
    world = World(tmp_path, ANSWERS, ROWS)
    with RewardPool(RewardSpec(), num_workers=1) as pool:
        responder = world.responder(pool)
        config = world.run.config
        settings = ValidationSettings.of(config.rollout, config.data, config.model.path, seed=0)
        validation = answer_and_score(settings, responder, world.run.val_prompts)
        shown = validation.write(responder, tmp_path / "all.jsonl", 2)
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["output"] for row in rows] == ["Answer: 1", "Answer: 9", "Answer: 2", "Answer: 2", "4", "4"]
    assert [row["data_source"] for row in rows] == validation.sources
    assert shown == [rows[i] for i in evenly_spread(6, 2)] and sorted(tmp_path.glob(".*")) == []


def test_a_resumed_run_drops_validations_past_its_checkpoint(tmp_path):
    run_dir = RunDir.open(tmp_path / "run", "")
    for step in (2, 4):
        (run_dir.validation).mkdir(exist_ok=True)
        (run_dir.validation / f"step-{step}.jsonl").write_text("")
    run_dir.truncate_metrics(2)
    assert [p.name for p in run_dir.validation.iterdir()] == ["step-2.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "data.val_files=[]"], 2, "names no file"),
        (["--set", "data.val_files=absent.parquet"], 2, "absent.parquet is no file"),
        (["--set", "data.val_files={dir}/val.jsonl", "--checkpoint", "absent"], 2, "--checkpoint: absent is no folder"),
        (["--set", "data.val_files={dir}/val.jsonl", "--model", "absent"], 4, "absent/config.json does not exist"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_at_once(tmp_path, capsys, arguments, code, message):
    write_jsonl(tmp_path / "val.jsonl", ROWS)
    with pytest.raises(SystemExit) as ended:
        main(["eval", TINY, *(a.format(dir=tmp_path) for a in arguments)])
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def test_the_table_of_an_evaluation_shows_each_core_metric_with_its_interval():
    from mrl.driver.evaluation import table

    metrics = {"val-core/a/acc/mean@2": 0.5, "val-core/a/acc/best@2/std": 0.3, "val-aux/a/acc/std@2": 0.2}
    metrics |= {"val-aux/a/acc/mean@2/ci95_low": 0.4, "val-aux/a/acc/mean@2/ci95_high": 0.7}
    lines = table({"prompts": 3, "responses": {"a": 6}, "seconds": 12.3, "metrics": metrics}).splitlines()
    assert lines[0] == "3 prompts, 6 responses, 12 s"
    assert [line.split() for line in lines[1:]] == [["a/acc/mean@2", "0.5000", "95", "%:", "0.4000", "to", "0.7000"]]


def test_validation_comes_before_training_every_few_steps_and_at_the_end(monkeypatch):
    """test_freq 2 of 5 steps: before the first, after 2 and 4, and after the last;
    a resumed run does not begin with one.
    """
    from mrl.driver import loop

    assert [step for step in range(1, 6) if due(2, step, total_steps=5)] == [2, 4, 5]
    assert not any(due(-1, step, total_steps=5) for step in range(1, 6))
    done = []
    monkeypatch.setattr(
        loop, "validation_metrics", lambda run: done.append(f"validate {run.state.step}") or {"val-core/x": 1.0}
    )
    monkeypatch.setattr(loop, "memory_metrics", lambda machines: {})
    monkeypatch.setattr(loop, "compare_with_engines", lambda run: done.append(f"compare {run.state.step}"))
    record = SimpleNamespace(write=lambda step, metrics: done.append(f"record {sorted(metrics)}"))
    sync = SimpleNamespace(bring_to=lambda version: done.append(f"sync {version}"))
    saver = SimpleNamespace(save_last=lambda state, metrics: done.append(f"save {state.step}"))

    def step(run):
        run.state = TrainState(run.state.step + 1)
        done.append(f"step {run.state.step}")

    monkeypatch.setattr(loop, "train_step", step)
    for first, before, only in (
        (0, True, False),
        (0, False, False),
        (1, True, False),
        (0, True, True),
        (1, True, True),
    ):
        given = [f"trainer.val_before_train={before}", f"trainer.val_only={only}"]
        config = load_config(TINY, None, given).config
        placement = Separate(SimpleNamespace(take_checkpoint=None, write_checkpoint=None), sync)
        run = SimpleNamespace(
            config=config, state=TrainState(first), total_steps=2, stop=StopFlag(), record=record, placement=placement,
            saver=saver, line={}, sample_writer=SimpleNamespace(finish=lambda: None),
            generation=SimpleNamespace(begin=lambda: done.append("begin")), hosts=None,
            spool=SimpleNamespace(ended=lambda: done.append("spool empty")),
        )  # fmt: skip
        loop.train(run)
    assert done == [
        "compare 0", "validate 0", "record ['val-core/x']", "begin", "step 1", "step 2", "save 2", "spool empty",
        "compare 0", "begin", "step 1", "step 2", "save 2", "spool empty",
        "sync 1", "compare 1", "begin", "step 2", "save 2", "spool empty",
        "compare 0", "validate 0", "record ['val-core/x']",
        "sync 1", "compare 1", "validate 1", "record ['val-core/x']",
    ]  # fmt: skip
