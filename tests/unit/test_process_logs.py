"""An error of ranks or engines comes with the last lines of their logs."""

import pytest
import ray

from mrl.cli import main as command_line
from mrl.cluster.calls import Late, gather
from mrl.cluster.process_logs import LINES, concerning, log_tail, processes_of, with_log_tails
from mrl.errors import Interrupted


def test_the_last_lines_are_those_that_say_something_without_control_characters(tmp_path):
    file = tmp_path / "engine-0.log"
    file.write_bytes(
        b"first\n" * 40_000 + b"\x1b[31mred\x1b[0m\r\n\n  10%\r 20%\rlast \xff\x07\n" + b"x" * 1000 + b"\n\n"
    )
    tail = log_tail(file)
    assert tail[-5:] == ["red", "  10%", " 20%", "last \ufffd", "x" * 300 + "..."] and len(tail) == LINES
    assert log_tail(tmp_path / "none.log") == []


def test_an_error_says_what_its_processes_wrote_last_and_no_other(tmp_path):
    for name in ("actor-rank-0", "actor-rank-1", "engine-0-rank-1"):
        (tmp_path / f"{name}.log").write_text(f"said by {name}\n")
    with pytest.raises(Interrupted) as stopped, with_log_tails(tmp_path):
        raise concerning(concerning(Interrupted("lost"), "rank 1"), "engine 0 rank 1", "rank 7", "rank 1")
    assert processes_of(stopped.value) == ("rank 1", "engine 0 rank 1", "rank 7")
    assert [note.splitlines()[1] for note in stopped.value.__notes__] == [
        "  | said by actor-rank-1",
        "  | said by engine-0-rank-1",
    ]
    with pytest.raises(Interrupted) as stopped, with_log_tails(tmp_path):
        raise Interrupted("stopped by SIGTERM")
    assert not hasattr(stopped.value, "__notes__")


def test_a_defect_of_a_rank_has_the_lines_in_its_traceback(tmp_path):
    import traceback

    (tmp_path / "actor-rank-3.log").write_text("assertion of the rank\n")
    with pytest.raises(AssertionError) as defect, with_log_tails(tmp_path):
        raise concerning(AssertionError("broken"), "rank 3")
    assert "  | assertion of the rank" in "".join(traceback.format_exception(defect.value))


def test_the_command_line_prints_them_below_the_error(tmp_path, monkeypatch, capsys):
    def fails(options):
        (tmp_path / "engine-0.log").write_text("CUDA out of memory\n")
        with with_log_tails(tmp_path):
            raise concerning(Interrupted("generation: engine 0 died"), "engine 0")

    monkeypatch.setattr("mrl.cli.doctor._doctor", fails)
    with pytest.raises(SystemExit) as ended:
        command_line.main(["doctor"])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == Interrupted.exit_code
    assert said[0] == "mrl doctor: generation: engine 0 died" and said[-1] == "  | CUDA out of memory"


def test_whoever_does_not_answer_is_named(monkeypatch):
    """Real deadlines, no Ray: nothing is ever ready."""
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    with pytest.raises(Late) as late:
        gather({"rank 1": object(), "rank 0": object()}, 0.0, "update")
    assert processes_of(late.value) == ("rank 0", "rank 1")
