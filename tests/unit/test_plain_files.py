"""Files of strangers are read within limits, and what a command writes takes the place of nothing else."""

import json
import os
import stat
from pathlib import Path

import pytest
from report_run import World, write_run
from test_hostile_input import run

from mrl.plain_files import parse_json, read_bytes, read_json

SCRIPTS = Path(__file__).parent / "verl_scripts"
SCRIPT = SCRIPTS / "dapo_8b_custom_reward.sh"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "a", World()).path, write_run(folder / "b", World()).path


def commands(runs: tuple[Path, Path], output: Path) -> list[tuple[object, ...]]:
    """All that write a file under a name that somebody gives, over an older one."""
    first, second = runs
    return [
        ("report", first, "-o", output),
        ("compare", first, second, "-o", output),
        ("import-verl", SCRIPT, "-o", output),
    ]


@pytest.mark.parametrize("which", range(3))
def test_a_link_a_pipe_a_device_and_a_folder_are_never_replaced(which, runs, tmp_path, capsys):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("link", "pipe", "null"):
        before = os.lstat(tmp_path / name)
        assert run(*commands(runs, tmp_path / name)[which]) == 2
        assert f"{tmp_path / name} is a" in capsys.readouterr().err
        assert os.lstat(tmp_path / name).st_ino == before.st_ino
    assert run(*commands(runs, tmp_path / "folder")[which]) in (2, 4)
    assert (tmp_path / "precious").read_text() == "precious"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "link", "null", "pipe", "precious"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
@pytest.mark.parametrize("which", range(3))
def test_a_device_node_stays_one(which, runs, tmp_path):
    node = tmp_path / "node"
    os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    assert run(*commands(runs, node)[which]) == 2
    assert stat.S_ISCHR(os.lstat(node).st_mode)


@pytest.mark.parametrize("which", range(2))
def test_a_page_takes_the_place_of_an_older_page_alone(which, runs, tmp_path):
    page, text = tmp_path / "page.html", tmp_path / "notes.txt"
    text.write_text("mine")
    command = commands(runs, page)[which]
    assert run(*command) == 0 and run(*command) == 0
    assert run(*commands(runs, text)[which]) == 2
    assert text.read_text() == "mine"
    metrics = runs[0] / "metrics.jsonl"
    before = metrics.read_bytes()
    assert run(*commands(runs, metrics)[which]) == 2
    assert metrics.read_bytes() == before


def test_a_script_is_not_overwritten_by_what_is_made_of_it(tmp_path):
    script = tmp_path / "run.yaml"  # so that the name made in a folder is its own
    script.write_bytes(SCRIPT.read_bytes())
    os.link(script, tmp_path / "same")
    for output in (script, tmp_path / "same"):
        assert run("import-verl", script, "-o", output) == 2
    other = tmp_path / "other.sh"
    other.write_bytes(SCRIPT.read_bytes())
    run("import-verl", script, other, "-o", tmp_path)
    assert script.read_bytes() == SCRIPT.read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        "1" * 5000,
        "1" * 400,
        "NaN",
        "-Infinity",
        "1e999",
        "1e400",
        "",
        "{",
        '{"a": 1} x',
        b"\xff\xfe\xfa",
        b"\x00",
    ],
)
def test_what_is_no_json_is_a_value_error_and_nothing_else(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_is_read_as_the_library_reads_it(tmp_path):
    value = {"a": [1, -2.5e10, "e123 " + "7" * 200, None, True], "b": {"c": 2**128}, "d": 1e308}
    (tmp_path / "file").write_text(json.dumps(value))
    assert read_json(tmp_path / "file") == value


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "big").write_bytes(b"x" * 11)
    for name in ("pipe", "loop", "absent", "", "/dev/zero", "/dev/stdin"):
        with pytest.raises(OSError):
            read_bytes(tmp_path / name, 10)
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        read_bytes(tmp_path / "big", 10)
    assert read_bytes(tmp_path / "big", 11) == b"x" * 11
