"""Reports the result of a rehearsal: for a terminal, and as one JSON object."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mrl.errors import shown
from mrl.tools.rehearse.compose import STEPS, Rehearsal, WorkFolder
from mrl.tools.rehearse.evidence import Evidence, evidence_of
from mrl.tools.rehearse.marks import Exercised, judge
from mrl.tools.rehearse.notes import OutOfReach
from mrl.tools.rehearse.prepare import Prepared
from mrl.tools.rehearse.stages import Ended


@dataclass(frozen=True)
class Failed:
    """A failure. `log` names the file and line that show it."""

    phase: str
    why: str
    log: str
    code: int  # exit code of the command


@dataclass(frozen=True)
class Answer:
    """The whole result. It is `ok` when nothing failed."""

    config: str
    work: WorkFolder
    prepared: Prepared
    seconds: float
    phases: dict[str, float]
    exercised: tuple[Exercised, ...]
    not_exercised: tuple[OutOfReach, ...]
    failed: tuple[Failed, ...]
    seeded: str

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def exit_code(self) -> int:
        """0 when nothing failed, otherwise the exit code of the command that failed."""
        if self.failed:
            return self.failed[0].code
        return 0

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        rehearsal = self.prepared.rehearsal
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "config": self.config,
            "work": str(self.work.path),
            "model": self.prepared.model,
            "ranks": rehearsal.layout.ranks,
            "engine_workers": rehearsal.layout.engines.world_size,
            "factor": rehearsal.batch.factor,
            "phases": {phase: round(seconds, 1) for phase, seconds in self.phases.items()},
            "stand_ins": [*self.prepared.substitutes, *filter(None, [self.seeded])],
            "exercised": [vars(entry) for entry in self.exercised],
            "not_exercised": [vars(entry) for entry in self.not_exercised],
            "failed": [{name: value for name, value in vars(entry).items() if name != "code"} for entry in self.failed],
            "changes": [vars(change) for change in rehearsal.changes],
        }


def answer(config: str, work: WorkFolder, prepared: Prepared, ended: list[Ended], seconds: float) -> Answer:
    """Builds the result from what the commands left behind."""
    evidence = evidence_of(work.run, work.exercised)
    exercised, lost = judge(prepared.rehearsal, evidence)
    failed = [
        Failed(e.phase, e.why, f"{e.log}:{e.line}", e.code if e.code and e.code > 0 else 1)
        for e in ended
        if e.code != 0
    ]
    if not failed and len(evidence.steps) != STEPS:
        log = f"{work.log(ended[-1].phase)}:1"
        failed.append(Failed(ended[-1].phase, f"{len(evidence.steps)} of {STEPS} steps are in metrics.jsonl", log, 1))
    phases = {e.phase: e.seconds for e in ended}
    return Answer(
        config, work, prepared, seconds, phases, tuple(exercised), tuple(lost), tuple(failed), _seeded(evidence)
    )


def _seeded(evidence: Evidence) -> str:
    calls = evidence.reward_calls
    replaced = sum(call["given"] is not None for call in calls)
    if replaced:
        return f"reward: {replaced} of {len(calls)} scores are seeded, where a group had but one"
    return ""


def first_lines(prepared: Prepared) -> Iterator[str]:
    """Yields lines on what will run."""
    rehearsal = prepared.rehearsal
    yield f"model      {prepared.model}"
    yield f"layout     {_layout(rehearsal)}"
    data = rehearsal.config.data
    lengths = f"prompts of {data.max_prompt_length} and responses of {data.max_response_length} tokens"
    batch = f"{data.train_batch_size} prompts a step in mini-batches of {rehearsal.config.actor.ppo_mini_batch_size}"
    yield f"factor     {rehearsal.batch.factor}: {lengths}, {batch}, {rehearsal.config.rollout.n} responses each"
    for text in prepared.substitutes:
        yield f"replaced   {text}"


def _layout(rehearsal: Rehearsal) -> str:
    small = rehearsal.layout
    engines = rehearsal.layout.engines
    was = rehearsal.original
    there = was.rollout.num_engines * was.rollout.workers_per_engine
    ranks = f"ranks {was.actor.layout.world_size} to {small.ranks}, engine workers {there} to {engines.world_size}"
    return f"{ranks}, {rehearsal.config.cluster.placement}"


def last_lines(found: Answer) -> Iterator[str]:
    """Yields lines on the result."""
    if found.seeded:
        yield f"replaced   {found.seeded}"
    yield f"exercised ({len(found.exercised)})"
    width = max((len(entry.switch) for entry in found.exercised), default=0)
    for entry in found.exercised:
        yield f"  {entry.switch:<{width}}  {shown(entry.value)}: {entry.mark}"
    yield f"not exercised ({len(found.not_exercised)})"
    for entry in found.not_exercised:
        yield f"  {entry.switch}: {entry.why}"
    for failed in found.failed:
        yield f"BROKE in {failed.phase} ({failed.log})"
        yield from (f"  {line}" for line in failed.why.splitlines())
    took = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in found.phases.items())
    yield f"{'ok' if found.ok else 'FAULT'}: {found.seconds:.0f} s ({took}); all of it is in {found.work.path}"
