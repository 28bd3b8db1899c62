"""What the tests' modules import (torch, Megatron) is left out of garbage collection, while it is imported and while
tests run: a seventh of their time. What tests leave is collected seldom: a twentieth. And no call of Ray's starts a
cluster by itself. Files of tests are in memory, where there is room: what waits for a disk thousands of times is no
slower on a slow one.
"""

import gc
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from small_model import SEEING_WHOLE, TINY

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # that of trio looks at every object of the process
MEMORY = "/dev/shm"
ROOM_BYTES = 4 << 30
OWN_FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before pytest itself chooses; workers of pytest-xdist are told."""
    # With Python's own handler asyncio.run sets another in its place, and Python's signal module then makes the text of
    # all that the run returned.
    signal.signal(signal.SIGINT, _interrupted)
    if config.option.basetemp or not os.path.isdir(MEMORY) or shutil.disk_usage(MEMORY).free < ROOM_BYTES:
        return
    config.stash[OWN_FOLDER] = config.option.basetemp = tempfile.mkdtemp(prefix="mrl-tests-", dir=MEMORY)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(OWN_FOLDER, None):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What is logged meanwhile, from INFO on.

    For pytest's own `caplog` each of some thousand loggers is asked six times a test, which was a fifteenth of all
    tests' time. So `scripts/test.sh` leaves it out.
    """
    records: list[logging.LogRecord] = []
    handler, root = logging.Handler(), logging.getLogger()
    handler.emit = records.append
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield records
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def tiny_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory in which the tiny presets find their models and what rewards them."""
    for name in ("tiny-world", "long-world", "tool-world"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text(json.dumps(TINY))
    _make_it_call(tmp_path / "tool-world" / "model")
    seeing = tmp_path / "vision-world" / "model"
    seeing.mkdir(parents=True)
    (seeing / "config.json").write_text(json.dumps(SEEING_WHOLE))
    (seeing / "preprocessor_config.json").write_text("{}")
    (tmp_path / "tool-world" / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)


def _make_it_call(model: Path) -> None:
    """Gives a model's folder a tokenizer whose template writes calls of tools, and turns that end as it says."""
    files, ends = _calling()
    for name, content in files.items():
        (model / name).write_bytes(content)
    (model / "config.json").write_text(json.dumps(TINY | {"vocab_size": 512} | ends))


@cache
def _calling() -> tuple[dict[str, bytes], dict[str, int]]:
    """The tokenizer's files, made once, and its token that ends a turn."""
    from dialect_templates import tokenizer  # here: transformers with it

    made = tokenizer("hermes")
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, {"eos_token_id": made.convert_tokens_to_ids("<|im_end|>")}
