"""Whatever is made of a file that is read: one of mrl's own errors or an answer, within two seconds.

Each reader gets files that are right but for a few places, where something hostile stands. MRL_FUZZ_CASES: how many
each gets (the usual number is that of continuous integration, the same ones every time). What such a search found is
kept in test_hostile_input.py.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_run import World, write_run
from safetensors.numpy import save

from mrl.checkpoint.manifest import Manifest, RankFiles, facts_of, read_manifest, sealed, write_manifest
from mrl.cli.validate import check_config
from mrl.config.load import load_config
from mrl.data.prepare import prepare
from mrl.data.sources import SOURCES
from mrl.errors import MrlError
from mrl.generate.lost_engines import LostEngines, whole_losses
from mrl.generate.sampled_by import UNKNOWN
from mrl.generate.spool_lines import left_files
from mrl.model.hf_files import read_safetensors_header
from mrl.model.registry import known_hf_config, load_model_spec
from mrl.plan.run_plan import load_plan, plan_hash
from mrl.record.attempts import read_attempts
from mrl.record.goodput import AGAIN, RESTARTING, STARTING, goodput, goodput_of
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sample_files import read_samples, readable
from mrl.tools.import_verl.translate import import_script
from mrl.tools.report.columns import curves_of
from mrl.tools.report.paired_tests import read_responses
from mrl.tools.report.run_record import read_run
from mrl.tools.report.samples import looked_at
from mrl.tools.report.sections import run_page

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
SCRIPT = Path(__file__).parent / "verl_scripts" / "dapo_8b_custom_reward.sh"
CASES = int(os.environ.get("MRL_FUZZ_CASES", "44"))
SECONDS = 2.0

fuzzed = settings(
    max_examples=CASES,
    derandomize="MRL_FUZZ_CASES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

ATOMS = st.sampled_from(
    [None, True, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "\0",
     "\x1b[31m", "\ud800", "../../x", "/dev/zero", "9" * 5000, [], {}, [[]], {"": None}, [None], {"a": {"a": [1]}},
     "x" * 10_000, list(range(50))]
)  # fmt: skip
TOKENS = st.sampled_from(
    ["", "\0", "\n", "\t", "\x1b", "[", "]", "{", "}", '"', "'", ":", ": ", "- ", "&a ", "*a", "!!x ", "|", ">", "%",
     "#", "null", "NaN", "9" * 5000, "1e999", "-", "~", "<<: ", "${", "`", "$(", "\\", "[" * 300, "{" * 300, "a" * 2000,
     "\r", "\u2028", "é", "\U0001f600", "0x", "=", ";", "&&", "/dev/zero", "../"]
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of everything in plain data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple, new: Any) -> Any:
    """The same with something else at a path; a place that is gone by then is left alone."""
    if not path:
        return new
    if not isinstance(value, dict | list):
        return value
    copy = dict(value) if isinstance(value, dict) else list(value)
    if isinstance(copy, dict) or path[0] < len(copy):
        copy[path[0]] = replaced(copy[path[0]], path[1:], new) if path[0] in places_of(copy) else new
    return copy


def places_of(value: dict | list) -> Any:
    return value if isinstance(value, dict) else range(len(value))


@st.composite
def altered(draw: Callable, value: Any) -> Any:
    """Plain data with up to three hostile places."""
    for _ in range(draw(st.integers(1, 3))):
        value = replaced(value, draw(st.sampled_from(list(places(value)))), draw(ATOMS))
    return value


@st.composite
def spliced(draw: Callable, text: str) -> str:
    """A text with up to four stretches replaced."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(TOKENS) + text[at + draw(st.integers(0, 12)) :]
    return text


@st.composite
def flipped(draw: Callable, data: bytes) -> bytes:
    """Bytes with up to four of them changed, or an end cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.sampled_from([len(changed), len(changed) // 2, len(changed) - 1]))])


def survives(read: Callable[[], object]) -> None:
    """It answers, or says in one of mrl's errors why not, within SECONDS of this process."""
    began = time.process_time()
    try:
        read()
    except MrlError as error:
        assert error.exit_code in (2, 3, 4) and len(str(error)) < 50_000
    assert time.process_time() - began < SECONDS


def dumped(value: Any) -> str:
    return json.dumps(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def run(folder) -> RunDir:
    return write_run(folder / "run", World())


@fuzzed
@given(text=spliced(PRESET.read_text()))
def test_configurations(text, folder):
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    survives(lambda: check_config(load_config(file)))


@pytest.fixture(scope="module")
def has_imported():
    """What the import of a script loads first takes a second, which is not the script's."""
    import_script(SCRIPT.read_text(), "script.sh", {}, [])


@settings(fuzzed, max_examples=max(1, CASES // 3))
@given(text=spliced(SCRIPT.read_text()))
def test_scripts_of_verl(text, has_imported):
    survives(lambda: import_script(text, "script.sh", {}, []).to_yaml())


MODELS = ("Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B")
ALSO = {
    "DeepSeek-V3": {
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
    }
}


@fuzzed
@given(config=st.one_of(*(altered(known_hf_config(name) | ALSO.get(name, {})) for name in MODELS)))
def test_configurations_of_models(config, folder):
    (folder / "config.json").write_text(dumped(config))
    survives(lambda: load_model_spec(folder))


TENSORS = save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)})
HEADER = json.loads(TENSORS[8 : 8 + int.from_bytes(TENSORS[:8], "little")])


@fuzzed
@given(header=altered(HEADER), data=flipped(TENSORS))
def test_headers_of_tensors(header, data, folder):
    text = dumped(header).encode()
    for content in (len(text).to_bytes(8, "little") + text + bytes(32), data):
        (folder / "model.safetensors").write_bytes(content)
        survives(lambda: read_safetensors_header(folder / "model.safetensors"))


def manifest(folder: Path) -> dict[str, Any]:
    """A small one, with its files."""
    (folder / "rank-00000.safetensors").write_bytes(TENSORS)
    optimizer = {"num_updates": 2, "step": 2, "lr": [0.5]}
    ranks = (RankFiles((), {"rank-00000.safetensors": facts_of(TENSORS)}, optimizer),)
    config = known_hf_config("Qwen3-30B-A3B")
    trainer = {"cursor": {"epoch": 0, "index": 4}, "metrics": {"a": 0.5}, "fixed": {"seed": 0}}
    write_manifest(folder, Manifest(2, {"world_size": 1}, "float32", config, ranks, trainer, {"mrl": "1"}))
    return json.loads((folder / "manifest.json").read_text())


@fuzzed
@given(data=st.data())
def test_manifests(data, folder):
    step = folder / "step-2"
    step.mkdir(exist_ok=True)
    value = data.draw(altered(manifest(step)))
    for each in (value, sealed(value) if isinstance(value, dict) else value):
        (step / "manifest.json").write_text(dumped(each))
        survives(lambda: (read := read_manifest(step)) and list(read.read_entries(step)))


@fuzzed
@given(data=st.data())
def test_plans(data, run):
    value = data.draw(altered(PLAN))
    run.plan.write_text(dumped(value))
    survives(lambda: load_plan(run.plan))


PLAN = {"format": 1, "reshard": {"plan_seconds": 0.1, "hash": "x"}, "memory": {"phases": {}}, "layout": {}}
PLAN |= {"hash": plan_hash(PLAN)}
ROW = {"training/global_step": 1, "critic/score/mean": 0.5, "timing_s/step": 1.0, "actor/lr": 1e-6}


@fuzzed
@given(rows=st.lists(altered(ROW), min_size=1, max_size=3), text=spliced(dumped(ROW) + "\n"))
def test_metrics(rows, text, folder):
    file = folder / "metrics.jsonl"
    for content in ("".join(f"{dumped(row)}\n" for row in rows), text):
        file.write_text(content, encoding="utf-8", errors="replace")
        survives(lambda: curves_of(read_metrics(file)))
        survives(lambda: goodput(EVENTS, read_metrics(file), 0.0))


BEGAN = {"event": "began", "command": ["mrl"], "versions": {"mrl": "1"}, "host": "h", "pid": 1, "step": 0}
ENDED = {"event": "ended", "exit_code": 5, "message": "lost"}
READY = {"event": "ready"}
RESTARTED = {"event": "restarted", "step": 2, "why": "rank 1 died"}
REWOUND = {"event": "rewound", "step": 1, "seconds": 3.0}
EVENTS = [
    {"time": f"2026-01-01T00:00:{10 + second}+00:00"} | event
    for second, event in enumerate((BEGAN, READY, RESTARTED, REWOUND, READY, ENDED))
]
LOSS = {"step": 1, "engines": ["engine 0"], "why": "died", "groups": [{"number": 1, "prompt_id": 4, "tokens": 3}]}
ORIGIN = UNKNOWN.by(6, "9f")
KEPT = [asdict(ORIGIN), {"file": "group-3.0.npz", "bytes": 9, "sha256": "ab"}]
HELD_OUT = {"data_source": "a", "prompt_id": 1, "sample_id": 1, "input": "a", "output": "b", "gts": "c", "score": 1.0,
    "reason": "ok"}  # fmt: skip


def write_lines(file: Path, rows: Any) -> None:
    """Writes a line a row, or one line where something else stands for all of them."""
    lines = rows if isinstance(rows, list) else [rows]
    file.write_text("".join(f"{dumped(row)}\n" for row in lines))


def test_the_lines_that_are_altered_are_all_of_use(run):
    write_lines(run.path / "attempts.jsonl", EVENTS)
    assert set(goodput_of(run.path).lost) == {STARTING, RESTARTING, AGAIN}


@fuzzed
@given(events=altered(EVENTS), loss=altered(LOSS), held_out=altered(HELD_OUT), kept=altered(KEPT))
def test_lines_beside_the_metrics(events, loss, held_out, kept, run):
    run.validation.mkdir(exist_ok=True)
    write_lines(run.path / "attempts.jsonl", events)
    run.lost_engines.write_text(f"{dumped(loss)}\n" * 2)
    (run.spool / "x").mkdir(parents=True, exist_ok=True)
    (run.spool / "x" / "group-3.0.npz").touch()
    write_lines(run.spool / "x" / "by-6.jsonl", kept)
    (run.validation / "step-6.jsonl").write_text(f"{dumped(held_out)}\n")
    run.plan.unlink(missing_ok=True)
    survives(lambda: read_attempts(run.path))
    survives(lambda: goodput_of(run.path))
    survives(lambda: whole_losses(run.lost_engines))
    survives(lambda: LostEngines(run.lost_engines).suspects())
    survives(lambda: left_files(run.spool, ORIGIN))
    survives(lambda: read_responses(run.validation, 6))
    survives(lambda: read_run(run.path))


@settings(fuzzed, max_examples=max(1, CASES // 6))
@given(events=altered(EVENTS), held_out=altered(HELD_OUT))
def test_pages(events, held_out, run):
    run.validation.mkdir(exist_ok=True)
    write_lines(run.path / "attempts.jsonl", events)
    (run.validation / "step-6.jsonl").write_text(f"{dumped(held_out)}\n")
    run.plan.unlink(missing_ok=True)
    survives(lambda: run_page(read_run(run.path)))


@fuzzed
@given(data=st.data())
def test_samples(data, run, folder):
    whole = WHOLE.setdefault("samples", (run.samples / "step-6.parquet").read_bytes())
    place = folder / "samples"
    place.mkdir(exist_ok=True)
    (place / "step-6.parquet").write_bytes(data.draw(flipped(whole)))
    survives(lambda: looked_at(place, 6, None))

    def read() -> None:
        with readable(place, 6):
            read_samples(place, 6)

    survives(read)


WHOLE: dict[str, bytes] = {}
QUESTION = {"question": "1 + 1?", "answer": "because #### 2"}


@fuzzed
@given(row=altered(QUESTION), text=spliced(dumped(QUESTION)), data=st.data())
def test_rows(row, text, data, folder):
    files = {"rows.jsonl": f"{dumped(row)}\n{text}\n{dumped(QUESTION)}\n".encode("utf-8", "replace")}
    files["rows.json"] = dumped([row, QUESTION]).encode()
    files["rows.parquet"] = data.draw(flipped(parquet(folder)))
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / "out.parquet").unlink(missing_ok=True)
        survives(
            lambda name=name: prepare(SOURCES["gsm8k"], [str(folder / name)], folder / "out.parquet", "train", 0.9)
        )


def parquet(folder: Path) -> bytes:
    """Two good rows."""
    if "rows" not in WHOLE:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([QUESTION, QUESTION | {"question": "2?"}]), folder / "good.parquet")
        WHOLE["rows"] = (folder / "good.parquet").read_bytes()
    return WHOLE["rows"]
