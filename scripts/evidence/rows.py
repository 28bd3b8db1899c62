"""The rows of docs/evidence.md: what somebody asks who decides, the goal, the command that shows it, and how its answer
becomes a figure. release.py runs them; scripts/generate_docs.py writes the page. OUT in a command is a file that it
writes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_name("figures.json")  # by the row's key: figure, met, date, commit, machine
TWO_CORES = "two cores of x86-64"
H100 = "one H100"
NODES = "four network namespaces of two cores"
Figure = tuple[str, bool]  # in words, and whether the goal is met


@dataclass(frozen=True)
class Row:
    """`guarantees`: which of README's list it shows. A row without minutes is made by hand, on its machine."""

    key: str
    asked: str
    goal: str
    command: str
    minutes: float | None = None  # of two quiet cores
    read: Callable[[Any], Figure] | None = None  # of the JSON that the command prints or writes; None: pytest's report
    machine: str = TWO_CORES
    guarantees: tuple[int, ...] = ()
    why: str = ""  # a goal is missed


def tests(key: str, asked: str, files: str, minutes: float | None, *guarantees: int, goal: str = "all pass") -> Row:
    """Tests, long ones too."""
    return Row(key, asked, goal, f"pytest {files}", minutes, guarantees=guarantees)


def _presets(found: dict) -> Figure:
    over = [row["over_best"] for row in found["rows"]]
    met = all(row["over_best"] <= 1.1 or row["reason"] for row in found["rows"])
    return f"{sum(one <= 1.1 for one in over)} of {len(over)}; the others, up to {max(over):.2f} times, say why", met


def _reshard(found: dict) -> Figure:
    shm, total = found["shm"], found["shm"]["total_s"]
    moved = f"{found['bytes_moved'] / 1e6:.0f} of {found['bytes_required'] / 1e6:.0f} MB moved"
    times = f"{total:.2f} s, {shm['total_ratio']:.3f} of the export"
    return f"{times}; {moved}", shm["total_ratio"] <= 0.12 and found["bytes_moved"] == found["bytes_required"]


def _data_plane(found: dict) -> Figure:
    row = found["rows"][-1]
    a_token, share = row["driver_peak_bytes"] / row["tokens"], row["driver_busy_s"] / 300
    return f"{a_token:.2f} bytes a token; busy {100 * share:.1f} % of 300 s", a_token <= 1 and share <= 0.02


def _logprob(found: dict) -> Figure:
    met = found["time_ratio"] <= 1.35 and found["memory_ratio"] >= 12
    return f"{found['time_ratio']:.2f} times the seconds, 1/{found['memory_ratio']:.0f} of the memory", met


def _peers(found: dict) -> Figure:
    short, long = found["short"]["trl_over_mrl"], found["long"]["trl_over_mrl"]
    return f"{short:.2f} times as fast at 3 tokens, {long:.2f} at 300", short >= 1 and long >= 2


def _quickstart(found: dict) -> Figure:
    before, after = (100 * found[name] for name in ("before", "after"))
    return f"{found['seconds']:.0f} s; validation exact match {before:.0f} to {after:.0f} %", found["seconds"] <= 480


def _predicted(_: str) -> Figure:
    sys.path.append(str(ROOT / "scripts"))
    import published_runs

    runs = list(published_runs.compared())
    worst = max(abs(run.error) for run in runs if "goal" in run.row)
    others = [run.error for run in runs if "goal" not in run.row]
    return (
        f"at most {100 * worst:.0f} % off; all others {100 * min(others):+.0f} to {100 * max(others):+.0f} %",
        worst <= 0.15,
    )


ROWS = (
    tests("parity", "Are log-probs and gradients those of Hugging Face, in every layout tried?",
          "tests/real/test_parity.py", 4, 1, 7, goal="1e-5; gradients 1e-4, layouts among each other 1e-5"),
    tests("peers_functions",
          "Do losses, advantages, corrections, metrics, parsers and rules give what peers' own functions give?",
          "tests/outside", 1, 3, goal="all but the differences below"),
    tests("sync", "Do engines have the trainer's weights after a sync, bit for bit?",
          "tests/real/test_sync.py tests/real/test_reshard_faults.py tests/real/test_reshard_target.py", 10, 2,
          goal="vLLM's own loader's bits; every fault named"),
    tests("fp8", "Engines in FP8: are words and scales those of vLLM's own loader?",
          "tests/real/test_quantised_loader.py tests/unit/test_quantised_rollouts.py", 1, 2),
    tests("resume", "Does a killed run go on to the same bits?",
          "tests/real/test_runs.py tests/real/test_resume.py", 12, 5, goal="metrics, weights, random states"),
    Row("random_kills", "And one that is killed again and again?", "20 kills in 40 steps, no bit differs",
        "pytest tests/proofs/test_kills.py -k twenty", 12, guarantees=(5,)),
    Row("faults", "How soon is a lost engine, rank, driver or Ray noticed, and do the bits stay the same?",
        "2 s, stopped ones 5 s behind their deadline; no bit differs",
        "pytest tests/proofs/test_kills.py -k point", guarantees=(5,)),
    Row("soak", "What do 300 steps under faults every 40 s cost?", "half of the time is steps, growth at most 2 %",
        "pytest tests/proofs/test_kills.py -k under_faults", guarantees=(5, 8)),
    tests("ahead", "Is generation ahead of training, in order, repeatable to the bit?",
          "tests/real/test_ahead_runs.py tests/real/test_weights_in_flight.py", 11,
          goal="equal twice, after a kill too; each token's log-prob is its version's"),
    tests("colocated", "Is a colocated run the bits of one with devices for each?", "tests/real/test_colocated.py", 8),
    tests("checkpoints", "Does a checkpoint load into any layout, and is an export byte for byte Hugging Face's?",
          "tests/real/test_checkpoint.py tests/real/test_convert_layouts.py tests/unit/test_convert.py", 5, 6),
    tests("memory", "Is the planned memory that of real ranks?", "tests/real/test_memory_truth.py", 7, 4,
          goal="state 2 %, activations 10 %, 37 tiny cases"),
    Row("seconds", "How far off are predicted seconds from runs that others published?",
        "NeMo-RL's four within 15 %", "python scripts/published_runs.py", 1, _predicted, guarantees=(4,)),
    Row("presets", "Are that commit's presets near the planner's best?", "at most 1.10 times, or the header says why",
        "python scripts/evidence/presets.py --out OUT", 10, _presets, guarantees=(3,)),
    tests("adapters", "LoRA, a critic, a teacher, replayed routes: are their numbers an oracle's in all layouts?",
          "tests/real/test_lora.py tests/real/test_critic.py tests/real/test_distillation.py tests/real/test_routes.py",
          None, 1),
    tests("turns", "Is every token of a conversation over updates of the weights that its row names?",
          "tests/real/test_held_turns.py tests/real/test_turns.py", None),
    Row("agents", "Can agents that know nothing of mrl be trained, on the tokens that vLLM sampled?",
        "every step an update; log-probs of engine and ranks 1e-4 apart", "pytest tests/proofs/test_agents.py"),
    tests("safety", "Is anything unsafe read, does bad input end in one message?",
          "tests/unit/test_security.py tests/unit/test_hostile_input.py tests/unit/test_fuzz.py "
          "tests/unit/test_bad_input.py",
          4, 8, 9),
    tests("combinations", "Do features hold beside each other?", "tests/proofs/test_kills.py -k rows", None,
          goal="each legal pair of 16 axes, each triple of four"),
    tests("mutants", "Do unit tests see mistakes?", "tests/proofs/test_all_mutants.py", None,
          goal="95 % of those that are not equivalent"),
    Row("quickstart", "Does it install and learn?", "8 minutes", "bash scripts/quickstart.sh", 6, _quickstart),
    Row("trl", "How fast is a step beside TRL's?", "1 and 2 times",
        "python scripts/bench/peers.py --json OUT", 16, _peers,
        why="many short requests go to the engine one by one; of long ones most is vLLM's and BLAS's time"),
    Row("sync_seconds", "What does a verified sync of 0.44 GB cost, of the bridge's export alone?",
        "0.12, and the least bytes",
        "python scripts/bench/reshard.py --json", 5, _reshard,
        why="the wire is 0.05 s of it; digests, copies and vLLM's reload the rest"),
    Row("driver", "What does the driver have of a step of 8,192 responses of 7,500 tokens?", "1 byte a token, 2 % busy",
        "python scripts/bench/data_plane.py --json --responses 8192", 6, _data_plane,
        why="a long response is an object of its own, which Ray counts at the driver"),
    Row("logprob", "What do log-probs cost without logits, of 4,096 tokens?", "1.35 times, 1/12",
        "python scripts/bench/logprob.py --json", None, _logprob),
    Row("verl", "What of verl's 407 public scripts comes through?", "no pair lost or different without a word",
        "python scripts/evidence/verl_scripts.py volcengine/verl=CLONE verl-project/verl-recipe=CLONE "
        "verl-project/verl=CLONE"),
    Row("rehearsals", "Do all presets of that commit run in small?", "all", "scripts/evidence/rehearsals.sh"),
    Row("nodes", "Are runs over several nodes those of one?", "no bit differs; a lost node is named in 10 s",
        "pytest tests/proofs/test_several_nodes.py", machine=NODES),
    Row("h100", "What ran on a device?",
        "engine and trainer 0.05 nats apart, FP8 0.2; layers 1.5 times Hugging Face's error",
        "scripts/hardware/run.sh cuda", machine=H100),
    Row("h100_update", "How far is an update of layers of 30B on it from its planned seconds?", "1.3 times",
        "scripts/hardware/run.sh cuda actor_32k", machine=H100,
        why="below 32,768 tokens a micro-batch it waits for the host, which launches a kernel in 8 us"),
)  # fmt: skip
