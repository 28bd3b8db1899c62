"""The first hour of somebody who comes from verl: what is done, and what goes wrong, each with its seconds.

    python tests/proofs/first_hour.py [--work FOLDER] [--part steps|mistakes] [--skip STEP ...]

Steps are a newcomer's, in an empty HOME: a script of verl's, a first configuration, a rehearsal, own data and reward, a
resume, a second run beside it, runs without a HOME, Ctrl-C, a conversion, and the commands of launch/ as
docs/tutorial/to_a_cluster.md has them, on ports of their own, with a job and a run that have another token than the
head. Mistakes are such as can be known before Ray starts: each has to end with its exit code and its
words, in one message; those that took longer than LIMIT_S are named. On a machine that does other work too, the seconds
of the processors say more than the clock's, so both are written, with the load; a mistake that took longer is made
again, TRIES times at most, and the shortest counts. Steps and mistakes are stored each by themselves: the mistakes need
no Ray, and those of a run are made where the folder has one. The environment has mrl and a tiny world
(scripts/make_tiny_world.py).
"""

import argparse
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))
import stamp

from mrl.process.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "first_hour.json"
PRESET = "parallel_configs/tiny-moe/cpu.yaml"
PAGE = ROOT / "docs" / "tutorial" / "to_a_cluster.md"
STARTS = "launch/start_head.sh\n"  # how the page's block of one machine begins
NOT_YET = "No available agent"  # of a head that has just started
LIMIT_S = 2.0
TRIES = 3
DEADLINE_S = 1200.0
LONGEST = 1000  # characters of a message that are kept
LINE = 200  # of the line of it that says what is wrong
ROWS, HELD_OUT = 90, 10
REWARD = "reward.custom_reward_function.path"
LOSS = "algorithm.policy_loss.custom.path"
OWN = f"--set data.train_files=train.jsonl --set data.val_files=val.jsonl --set {REWARD}"
CONFIG = "hour.yaml"
# sent once the first step is saved; a shell without jobs leaves SIGINT to the run itself
CTRL_C = (
    "{train} --set trainer.total_training_steps=50 >stopped.log 2>&1 & run=$!; "
    "while kill -0 $run && [ ! -d runs/stopped/checkpoints/step-1 ]; do sleep 0.2; done; "
    "kill -INT $run; wait $run; [ $? = 5 ] && tail -n 3 stopped.log"
)
FILES_ELSEWHERE = "--set model.path=/models/m --set data.train_files=/t.parquet --set data.val_files=/v.parquet"
ELSEWHERE = f"{PRESET} --run-dir /tmp/none {FILES_ELSEWHERE}"
FILES = {
    "my_reward.py": "def compute_score(solution_str, ground_truth, **_):\n"
    "    right = float(solution_str.strip() == ground_truth)\n    return {'score': right + 0.1, 'acc': right}\n",
    "plain_reward.py": "def compute_score(solution_str, ground_truth, **_):\n"
    "    return float(solution_str.strip() == ground_truth)\n",
    "raises.py": "def compute_score(**_):\n    raise KeyError('answer')\n",
    "none.py": "def compute_score(**_):\n    return None\n",
    "my_loss.py": "from mrl.algo.losses import register_loss\n\n\n@register_loss('mine')\ndef mine(*_):\n    ...\n",
    "verl.sh": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_files=$DATA/train.parquet\n",
    "env.yaml": "working_dir: .\nimage_url: somewhere\n",
    "all.yaml": "working_dir: .\n",
    "sent.yaml": "working_dir: .\nexcludes: [tiny-world/]\n",
}


@dataclass(frozen=True)
class Step:
    """`command`: of bash, in the work folder; those of launch/ in the checkout, as they are written.

    `code`: what it has to end with; `words`: of what it says.
    """

    name: str
    command: str
    of_launch: bool = False
    code: int = 0
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Mistake:
    """`code`: what it has to end with; `words`: of its message."""

    name: str
    command: str
    code: int
    words: Sequence[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: not set
    of_a_run: bool = False  # made in the folder of the run that the steps train


@dataclass(frozen=True)
class Ran:
    """What became of a command. `cpu_s`: of the processors, all processes of it that were waited for."""

    name: str
    command: str
    code: int
    seconds: float
    cpu_s: float
    message: str


# ---------------------------------------------------------------- what is done


def launch_commands() -> list[str]:
    """Lines of the page's block that starts a head, hands a job in and stops the head."""
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = [text for text in blocks if text.startswith(STARTS)]
    return block.splitlines()


def steps() -> list[Step]:
    """In their order."""
    train = f"mrl train {CONFIG} {OWN}=my_reward.py --run-dir runs/own"
    plain = f"mrl train {CONFIG} {OWN}=plain_reward.py --run-dir runs/plain"
    once = "--set trainer.total_training_steps=1"
    homeless = train.replace("runs/own", "runs/without-home")
    data = "--data train.jsonl"
    small = "--model tiny-world/model --devices '2 x cpu'"
    starts, job, stops = launch_commands()
    other = f"RAY_AUTH_TOKEN={'0' * 64}"
    joining = f"RAY_ADDRESS=127.0.0.1:$PORT mrl train {PRESET} --run-dir $HOME/joining"
    another = ["requires another token"]
    return [
        Step("import a script of verl's", "mrl import-verl verl.sh --set DATA=/data -o from_verl.yaml"),
        Step("validate what was imported", "mrl validate from_verl.yaml"),
        Step("first configuration", f"mrl init {small} {data} --reward exact_match -o my.yaml"),
        Step("validate it", "mrl validate my.yaml"),
        Step("plan it", "mrl plan my.yaml"),
        Step("search for a faster layout", "mrl plan --search my.yaml"),
        Step("rehearse it", "mrl rehearse my.yaml --work rehearsal"),
        Step("train on own data with an own reward", f"{train} --set trainer.total_training_steps=2"),
        Step("resume", f"{train} --set trainer.total_training_steps=3 --resume"),
        Step("train with another reward", f"{plain} --set trainer.total_training_steps=2"),
        Step("report", "mrl report runs/own"),
        Step("compare", "mrl compare runs/own runs/plain"),
        Step("convert", "mrl convert megatron-to-hf runs/own -o exported"),
        Step("train without HOME", f"env -u HOME {homeless} {once}"),
        Step("train where HOME takes nothing", f"HOME=/proc {homeless} {once.replace('=1', '=2')} --resume"),
        Step("Ctrl-C", CTRL_C.format(train=train.replace("runs/own", "runs/stopped")), words=["it goes on with: mrl"]),
        Step("start a head in an empty HOME", starts, of_launch=True),
        Step("a job of Ray's", job, of_launch=True),
        Step("a job for a head of another token", f"{other} mrl submit {ELSEWHERE}", True, 4, another),
        Step("a run on a head of another token", f"{other} {joining}", True, 4, another),
        Step("a run on the head", f"{joining} {once}", of_launch=True),
        Step("stop the head", stops, of_launch=True),
    ]  # fmt: skip


# ---------------------------------------------------------------- what goes wrong


def mistakes(taken: int) -> list[Mistake]:
    """All that can be known before Ray starts; `taken`: a port in use."""
    return [*_of_settings(), *_of_plug_ins(), *_of_data(), *_of_places(taken), *_of_jobs(), *_of_heads(taken)]


def _train(more: str) -> str:
    return f"mrl train {CONFIG} --run-dir runs/new {more}"


def _of_settings() -> Iterator[Mistake]:
    ours = "policy_loss.clip_ratio_low=0.2"
    yield Mistake("a key of verl's", _train("--set actor_rollout_ref.actor.clip_ratio=0.2"), 2, [ours])
    yield Mistake("verl's key in our section", _train("--set algorithm.policy_loss.clip_ratio=0.2"), 2, [ours])
    yield Mistake("a setting in hydra's way", _train("trainer.total_epochs=2"), 2, ["--set trainer.total_epochs=2"])
    yield Mistake("verl's key in hydra's way", _train("actor_rollout_ref.rollout.n=4"), 2, ["--set rollout.n=4"])
    sign = _train("--set ++actor_rollout_ref.actor.optim.lr=2e-6")
    yield Mistake("hydra's sign before a key", sign, 2, ["--set actor.optim.lr=2.0e-06"])
    yield Mistake("a key misspelt", _train("--set actor.optim.lrr=1e-6"), 2, ["did you mean lr?"])
    yield Mistake("a value of another type", _train("--set rollout.n=many"), 2, ["rollout.n", "whole number"])
    unset = ["carried with losses: data.train_files", "--set DATA=..."]
    yield Mistake("a script's unset variable", "mrl import-verl verl.sh -o x.yaml", 2, unset)


def _of_plug_ins() -> Iterator[Mistake]:
    loss = f"--set algorithm.policy_loss.loss_mode=other --set {LOSS}"
    not_there = ["is not a file that can be read"]
    yield Mistake("a loss that is not there", f"mrl validate {CONFIG} {loss}=/nope.py", 2, not_there)
    yield Mistake("a loss of another name", _train(f"{loss}=my_loss.py"), 2, ["registers mine, not other"])
    yield Mistake("a reward that is not there", _train(f"--set {REWARD}=gone.py"), 2, not_there)
    named = _train(f"--set {REWARD}=none.py --set reward.custom_reward_function.name=score")
    yield Mistake("a function that is not in it", named, 2, ["no function 'score'", "compute_score"])
    shared = "--set data.train_files=/shared/t.parquet --set data.val_files=/shared/v.parquet"
    elsewhere = f"mrl validate {CONFIG} {shared} --set {REWARD}=none.py --set {REWARD[:-4]}name=score"
    yield Mistake("the same, rows on another host", elsewhere, 2, ["no function 'score'", "compute_score"])
    raised, none = ["raised: KeyError: 'answer'"], ["NoneType 'None' where a number"]
    yield Mistake("a reward that raises", _train(f"--set {REWARD}=raises.py"), 3, raised)
    yield Mistake("a reward without a number", _train(f"--set {REWARD}=none.py"), 3, none)


def _of_data() -> Iterator[Mistake]:
    gone = _train("--set data.train_files=tarin.jsonl")
    yield Mistake("a data file that is not there", gone, 2, ["tarin.jsonl is not a file that can be read"])
    columns = _train("--set data.train_files=columns.jsonl")
    yield Mistake("a column that is missing", columns, 3, ["no column prompt", "more rows"])
    too_long = _train("--set data.max_prompt_length=1")
    yield Mistake("prompts that are too long", too_long, 3, ["data.max_prompt_length", "the shortest prompt has"])
    other = f"mrl train {CONFIG} --run-dir runs/own --resume"
    yield Mistake("other data on a resume", other, 3, ["trained on other prompts"], of_a_run=True)


def _of_places(taken: int) -> Iterator[Mistake]:
    again = f"mrl train {CONFIG} --run-dir runs/own"
    yield Mistake("a run in a folder that has one", again, 2, ["--resume"], of_a_run=True)
    kl = "--set algorithm.use_kl_loss=true --set algorithm.kl_loss_coef=0.001 --set ref.path=gone"
    yield Mistake("a reference model that is not there", _train(kl), 2, ["ref.path = gone (--set): is no folder"])
    begun = "--set trainer.resume_mode=resume_path --set trainer.resume_from_path=gone"
    no_folder = ["trainer.resume_from_path = gone (--set): is no folder"]
    yield Mistake("a checkpoint to begin from that is not there", _train(begun), 2, no_folder)
    yield Mistake("nothing to resume", _train("--resume"), 2, ["holds no run to resume"])
    yield Mistake("a port in use", _train(f"--set cluster.port={taken}"), 4, [f"cluster.port {taken} is in use"])


def _of_jobs() -> Iterator[Mistake]:
    submit = f"mrl submit {CONFIG} --run-dir /tmp/none --runtime-env"
    left_out = ["model.path: tiny-world/model is not sent"]
    yield Mistake("a job's path that is not sent", f"{submit} sent.yaml --set model.path=tiny-world/model", 2, left_out)
    yield Mistake("a runtime environment of another version", f"{submit} env.yaml", 2, ["image_url", "another version"])
    setting = f"{submit} all.yaml trainer.total_epochs=2"
    yield Mistake("a job's setting in hydra's way", setting, 2, ["--set trainer.total_epochs=2"])
    outside = f"mrl submit {CONFIG} --run-dir /tmp/none"
    yield Mistake("a job outside of a checkout", outside, 2, ["launch/runtime_env.cpu.yaml is not here"])
    yield from _of_addresses(f"{submit} all.yaml --address")
    none = ["no Ray token"]
    yield Mistake("a job without a token", f"{submit} all.yaml", 4, [*none, "does not exist"], {"HOME": "/nonexistent"})
    yield Mistake("a job without HOME", f"{submit} all.yaml", 4, [*none, "HOME is not set"], {"HOME": None})


def _of_addresses(submit: str) -> Iterator[Mistake]:
    token = {"RAY_AUTH_TOKEN": "0" * 64}
    wanted = ["must be the dashboard's address, as http://127.0.0.1:8265"]
    yield Mistake("a job at the port of a head", f"{submit} 127.0.0.1:6379", 2, wanted, token)
    nobody = ["no Ray dashboard answers at http://127.0.0.1:1"]
    yield Mistake("a job where no head is", f"{submit} http://127.0.0.1:1", 4, nobody, token)


def _of_heads(taken: int) -> Iterator[Mistake]:
    head, free = f"{ROOT}/launch/start_head.sh", {"PORT": str(free_port())}
    yield Mistake("a head on a port in use", head, 4, ["in use", "another user"], {"PORT": str(taken)})
    yield Mistake("a head on a port of the workers'", head, 4, ["10002 to 19999"], {"PORT": "10500"})
    yield Mistake("a head on a port that is none", head, 4, ["PORT=abc: a whole number"], {"PORT": "abc"})
    folder = free | {"TEMP": "/proc/none"}
    yield Mistake("a head in a folder of another's", head, 4, ["TEMP=/proc/none cannot be written"], folder)
    yield Mistake("a head without HOME", head, 4, ["HOME is not set"], free | {"HOME": None})
    yield Mistake("a head whose HOME takes nothing", head, 4, ["cannot be written"], free | {"HOME": "/proc"})


# ---------------------------------------------------------------- doing it


def run(name: str, command: str, folder: Path, environment: Mapping[str, str]) -> Ran:
    """Its seconds, and what it said."""
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(f"{name}: {ended.returncode}, {seconds:.1f} s ({cpu:.1f} of the processors)", flush=True)
    return Ran(name, command, ended.returncode, round(seconds, 2), round(cpu, 2), ended.stdout.strip())


def make_work(work: Path) -> None:
    """The work folder with a tiny world, own data, a configuration, an empty HOME and the files of the mistakes."""
    (work / "home").mkdir(parents=True)
    shutil.copytree(ROOT / "tiny-world", work / "tiny-world")
    for name, text in FILES.items():
        (work / name).write_text(text)
    rows = [
        {"data_source": "own", "prompt": f"{i}+{i % 7}=", "reward_model": {"ground_truth": str(i + i % 7)}}
        for i in range(ROWS)
    ]
    others = [{"question" if key == "prompt" else key: value for key, value in row.items()} for row in rows]
    for name, chosen in (("train", rows[HELD_OUT:]), ("val", rows[:HELD_OUT]), ("columns", others)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    settings = {
        "extends": str(ROOT / PRESET),
        "trainer": {"save_freq": 1, "test_freq": 2, "val_before_train": False},
        "data": {"train_batch_size": 16},
        "actor": {"ppo_mini_batch_size": 8, "optim": {"lr_warmup_steps": 0}},
    }
    (work / CONFIG).write_text(json.dumps(settings))  # JSON is YAML


def newcomers_environment(work: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return clean | {"HOME": str(work / "home"), "PYTHONPATH": str(ROOT)}


def do_steps(work: Path, skipped: Sequence[str]) -> Iterator[Ran]:
    """What became of each; a job is handed in again while the head that has just started takes none."""
    environment = newcomers_environment(work)
    dashboard = free_port()
    of_launch = environment | {
        "PORT": str(free_port()), "DASHBOARD_PORT": str(dashboard), "TEMP": f"/tmp/ray-hour-{os.getpid()}",
        "CPUS": "2", "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }  # fmt: skip
    for step in steps():
        if step.name in skipped:
            continue
        folder = ROOT if step.of_launch else work
        ran = run(step.name, step.command, folder, of_launch if step.of_launch else environment)
        while ran.code and NOT_YET in ran.message:
            ran = run(step.name, step.command, folder, of_launch)
        yield ran


def make_mistakes(work: Path) -> Iterator[tuple[Mistake, Ran]]:
    """Those of a run only where the steps have trained one."""
    trained = (work / "runs" / "own").is_dir()
    usual = newcomers_environment(work)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        for mistake in mistakes(listening.getsockname()[1]):
            if trained or not mistake.of_a_run:
                given = usual | mistake.environment
                environment = {name: value for name, value in given.items() if value is not None}
                yield mistake, shortest(mistake, work, environment)


def shortest(mistake: Mistake, work: Path, environment: Mapping[str, str]) -> Ran:
    """Of TRIES, or the first that is short enough."""
    tried = [run(mistake.name, mistake.command, work, environment)]
    while tried[-1].seconds > LIMIT_S and len(tried) < TRIES:
        tried.append(run(mistake.name, mistake.command, work, environment))
    return min(tried, key=lambda ran: ran.seconds)


def judged(wanted: Step | Mistake, ran: Ran) -> list[str]:
    """What is wrong with how a step ended, or how a mistake was told."""
    faults = [f"no {word!r}" for word in wanted.words if word not in ran.message]
    if ran.code != wanted.code:
        faults.append(f"ended with {ran.code}, not {wanted.code}")
    return faults + ["a traceback"] * ("Traceback" in ran.message)


def wrong(pairs: Iterable[tuple[Step | Mistake, Ran]]) -> list[str]:
    """Lines about those that did not end as they have to."""
    found = [(ran, judged(wanted, ran)) for wanted, ran in pairs]
    return [f"{ran.name}: {', '.join(faults)}: {ran.message[-1000:]}" for ran, faults in found if faults]


def kept(ran: Ran, work: Path) -> dict[str, Any]:
    """As it is stored: the message cut, and free of this machine's folders."""
    message = ran.message.replace(str(work), ".").replace(str(ROOT), "mrl")
    return asdict(ran) | {"command": ran.command.replace(f"{ROOT}/", ""), "message": message[-LONGEST:]}


def said(mistake: Mistake, stored: Mapping[str, Any]) -> dict[str, str]:
    """The line of the message with what the mistake is known by."""
    lines = [line.strip() for line in stored["message"].splitlines()]
    line = next(line for line in lines if mistake.words[0] in line)
    return {"said": line if len(line) <= LINE else f"{line[:LINE]} ..."}


def steps_of(done: Sequence[Ran], work: Path) -> dict[str, Any]:
    return {"rows": [kept(ran, work) for ran in done]}


def mistakes_of(pairs: Sequence[tuple[Mistake, Ran]], work: Path) -> dict[str, Any]:
    told = [ran for _, ran in pairs]
    return {
        "limit_s": LIMIT_S,
        "above_the_limit": [ran.name for ran in told if ran.seconds > LIMIT_S],
        "above_the_limit_on_the_processors": [ran.name for ran in told if ran.cpu_s > LIMIT_S],
        "rows": [(stored := kept(ran, work)) | said(mistake, stored) for mistake, ran in pairs],
    }


def store(part: str, command: str, result: Mapping[str, Any]) -> None:
    """The other part stays as it is."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(held | {part: stamp.facts(command) | result}, indent=1) + "\n", encoding="utf-8")


def refuse(faults: Sequence[str]) -> None:
    if faults:
        raise SystemExit("\n".join(faults))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "first-hour", help="an empty or new folder")
    parser.add_argument("--part", choices=["steps", "mistakes"], help="that alone")
    parser.add_argument("--skip", nargs="*", default=[], metavar="STEP", help="steps that are not done, by name")
    options = parser.parse_args()
    work = options.work.resolve()
    if work.exists() and options.part != "mistakes":
        raise SystemExit(f"{work} exists: a newcomer's folder is empty")
    if changed := stamp.changes():
        raise SystemExit(f"commit these first, results name a commit:\n{changed}")
    if not work.exists():
        make_work(work)
    command = "python tests/proofs/first_hour.py --part"
    if options.part != "mistakes":
        done = list(do_steps(work, options.skip))
        told = [step for step in steps() if step.name not in options.skip]
        refuse(wrong(zip(told, done, strict=True)))
        without = f" --skip {' '.join(map(repr, options.skip))}" if options.skip else ""
        store("steps", f"{command} steps{without}", steps_of(done, work))
    if options.part != "steps":
        pairs = list(make_mistakes(work))
        refuse(wrong(pairs))
        store("mistakes", f"{command} mistakes", mistakes_of(pairs, work))


if __name__ == "__main__":
    main()
