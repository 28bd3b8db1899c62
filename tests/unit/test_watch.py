"""`mrl watch`: one page, on this machine, to who has the token, as new as the run directory."""

import http.client
import os
import socket
import threading

import pytest
from report_run import World, write_run

from mrl.cli.main import main
from mrl.record.run_dir import RunDir, json_line
from mrl.tools.report.columns import STEP
from mrl.tools.report.live import SHARE, LivePage, LiveServer, state_tag

LOADED = {"critic/score/mean": 0.75, "timing_s/step": 3.0}


@pytest.fixture
def served(tmp_path):
    """A run of 3 of 6 steps and its server."""
    run = write_run(tmp_path / "run", World(steps=3))
    server = LiveServer(run.path)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield run, server
    server.close()
    thread.join(10)


def ask(server, path=None, method="GET", **headers):
    """(status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, f"/?token={server.token}" if path is None else path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def append_step(run, step: int) -> None:
    with run.metrics.open("a") as file:
        file.write(json_line({STEP: step} | LOADED))


def test_the_page_is_for_who_has_the_token(served):
    _, server = served
    assert server.token in server.url and server.url.startswith(f"http://127.0.0.1:{server.port}/")
    assert ask(server)[0] == 200
    for path in ("/", "/?token=", f"/?token={server.token}x", f"/?token={server.token[:-1]}", "/?tok=en"):
        status, _, body = ask(server, path)
        assert status == 403 and "3 of 6" not in body
    assert LiveServer(served[0].path).token != server.token


def test_there_is_one_page_and_nothing_can_be_sent_to_it(served):
    _, server = served
    for path in ("/config.resolved.yaml", "/../../etc/passwd", "//run/metrics.jsonl"):
        assert ask(server, f"{path}?token={server.token}")[0] == 404
    assert ask(server, method="POST")[0] == 501


def test_another_hosts_name_for_this_address_is_refused(served):
    _, server = served
    assert ask(server, Host="evil.example")[0] == 403
    assert ask(server, Host=f"localhost:{server.port}")[0] == 200


def test_it_listens_on_the_loopback_address_alone(served):
    _, server = served
    assert server._server.server_address[0] == "127.0.0.1"


def test_answers_are_kept_by_nobody_and_framed_by_nobody(served):
    headers = ask(served[1])[1]
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_a_page_that_is_known_is_not_sent_again_until_a_step_is_written(served, monkeypatch):
    run, server = served
    monkeypatch.setattr("mrl.tools.report.live.SHARE", 1.0)  # no rest between two pages
    _, headers, body = ask(server)
    assert "3 of 6 steps" in body
    status, again, empty = ask(server, **{"If-None-Match": headers["ETag"]})
    assert (status, again["ETag"], empty) == (304, headers["ETag"], "")
    append_step(run, 4)
    status, later, body = ask(server, **{"If-None-Match": headers["ETag"]})
    assert status == 200 and later["ETag"] != headers["ETag"] and "4 of 6 steps" in body


def test_a_beat_of_the_lock_makes_no_new_page(tmp_path):
    run = write_run(tmp_path / "run", World(steps=1))
    going = RunDir.open(run.path, "", resume=True)
    before = state_tag(run.path)
    going.lock.beat()
    assert state_tag(run.path) == before
    going.close()
    assert state_tag(run.path) != before


def test_pages_are_made_a_tenth_of_the_time_at_most(tmp_path, monkeypatch):
    """A page takes 2 s here; then 18 s have to pass."""
    run, now = write_run(tmp_path / "run", World(steps=1)), [0.0]

    def made(*_, **__):
        now[0] += 2.0
        return "page"

    monkeypatch.setattr("mrl.tools.report.live.page_html", made)
    live = LivePage(run.path, lambda: now[0])
    first = live.page()
    append_step(run, 2)
    for at, new in ((3.0, False), (19.9, False), (20.1, True)):
        now[0] = at
        assert (live.page().tag != first.tag) == new
    assert SHARE == 0.1


def test_a_run_that_has_no_step_yet_is_waited_for(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", World(steps=0))
    monkeypatch.setattr(LiveServer, "serve", lambda self: self._server.server_close())
    main(["watch", str(run.path)])
    assert "no step is written yet" in capsys.readouterr().out
    live = LivePage(run.path)
    assert b"no step is written yet" in live.page().body
    append_step(run, 1)
    live._rest_until = 0.0
    assert b"1 of 6 steps" in live.page().body


def test_a_run_that_is_damaged_meanwhile_is_said_on_the_page(tmp_path):
    run = write_run(tmp_path / "run")
    live = LivePage(run.path)
    assert b"6 of 6" in live.page().body
    run.metrics.write_text("{not json}\n" + run.metrics.read_text())
    live._rest_until = 0.0
    assert b"metrics.jsonl:1: not a metrics line" in live.page().body


def test_ctrl_c_ends_the_watch_in_peace(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")

    def interrupted(self):
        self._server.server_close()
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve", interrupted)
    main(["watch", str(run.path)])
    assert "?token=" in capsys.readouterr().out


def test_what_cannot_be_watched_ends_with_one_message(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            (["watch", str(tmp_path / "nothing")], 2, "is not a folder"),
            (["watch", str(tmp_path)], 2, f"runs in it: {run.path}"),
            (["watch", str(run.path), "--port", str(taken.getsockname()[1])], 4, "cannot be listened on"),
        ]
        for arguments, code, words in cases:
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            said = capsys.readouterr()
            assert ended.value.code == code and words in said.err and said.err.count("\n") == 1, os.linesep.join(said)
