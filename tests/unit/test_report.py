"""`mrl report`: the page says what the run directory holds, as text and nothing else; directories that are none end
with one message.
"""

import base64
import json
import math
import os
import re
import shutil
import struct
from html.parser import HTMLParser

import numpy as np
import pytest
from report_run import HOSTILE, ROOT, World, write_run

from mrl.cli.main import main
from mrl.data.samples import Sample, Turn, TurnCall, packed
from mrl.errors import Interrupted, NumericAbort
from mrl.record.attempts import attempt, read_attempts
from mrl.record.run_dir import RunDir, json_line, read_metrics
from mrl.record.sample_files import write_samples
from mrl.record.shown_rows import extreme_rows, read_shown_rows, write_shown_rows
from mrl.tools.explain.band import Break
from mrl.tools.explain.explain import Explanation, LikelyCause
from mrl.tools.report import stored_responses
from mrl.tools.report.columns import STEP, Curve, curves_of
from mrl.tools.report.html import page_html
from mrl.tools.report.page import Chart, color_of
from mrl.tools.report.paired_tests import Response, differences, paired, prompt_means
from mrl.tools.report.run_record import read_run, read_settings
from mrl.tools.report.samples import PartHead, TrainingSample, decoder, looked_at, parts_of, tokens_of
from mrl.tools.report.sections import curve_charts, explained, run_page
from mrl.tools.report.sections_run import PHASES
from mrl.tools.report.verdict import verdict
from mrl.tools.report.write import APART_S, ReportView, report_at_the_end, write_report

RISING = {0: [0.0] * 8 + [1.0] * 8, 6: [0.0] * 2 + [1.0] * 14}


class Elements(HTMLParser):
    """Every element that a browser would make, with attributes, and the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._inside = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text.append(data)

    def handle_endtag(self, tag):
        self._inside = ""


def test_what_a_run_spends_its_time_in_has_colours_of_its_own_that_the_page_knows():
    apart = ["gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv", "update_critic", "update_actor"]
    apart.append("reshard")
    colors = [color_of(name) for name in (*apart, "outside")]
    assert len(set(colors)) == len(colors) and set(apart) <= PHASES.keys()
    assert color_of("critic") == color_of("update_critic") and color_of("pause") == color_of("outside")
    style, script = ((ROOT / "mrl/tools/report/assets" / name).read_text() for name in ("page.css", "page.js"))
    for number in range(max(colors) + 1):
        assert style.count(f"--k{number}:") == 2 and f".k{number} {{" in style
    assert f"Array.from({{ length: {max(colors) + 1} }}" in script


def the_page(run) -> str:
    return page_html(run_page(read_run(run.path)))


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def points(curve: dict) -> dict[int, float]:
    x, y = base64.b64decode(curve["x"]), base64.b64decode(curve["y"])
    return dict(zip(struct.unpack(f"<{len(x) // 4}i", x), struct.unpack(f"<{len(y) // 8}d", y), strict=True))


# ---------------------------------------------------------------- the page


def test_every_section_is_there_and_every_curve_has_the_points_of_metrics_jsonl(tmp_path):
    run = write_run(tmp_path / "run", World(held_out=RISING))
    html = the_page(run)
    sections = [attributes["id"] for tag, attributes in Elements(html).found if tag == "section"]
    rest = ["settings", "steps", "sync", "incidents", "samples", "reproducibility"]
    assert sections == ["verdict", "curves", "next", *rest]
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    curves = data_of(html)["curves"]
    for name in set(rows[0]) - {STEP}:
        assert points(curves[name]) == {row[STEP]: row[name] for row in rows}


def test_the_newest_answer_of_explain_has_a_section_with_the_curves_that_left_the_band(tmp_path):
    run = write_run(tmp_path / "run")
    assert explained(read_run(run.path)) is None
    left = Break(4, "actor/entropy", float("inf"), 1.0, 2.0, 1e-5, "entropy")
    cause = LikelyCause("update", "the clip band was too wide", "step 4 does not repeat", "compare it")
    told = Explanation(
        str(run.path), 4, [left], [cause], False, "steps 1 to 4 again", {"without clipping": 0.9}, steps=6
    )
    run.explained.write_text(json_line(told.to_json()))
    page = run_page(read_run(run.path))
    (section,) = [each for each in page.sections if each.id == "explained"]
    assert section.title == "What mrl explain found"
    said, replayed, table, chart, experiments = section.blocks
    assert "Step 4: the clip band was too wide" in said.text and "does NOT repeat" in replayed.text
    assert table.rows == (("1", "update", cause.cause, cause.evidence, cause.change),)
    assert chart.series[0].curve in page.curves and "no finite number, usually 1 to 2" in chart.note
    assert experiments.rows == (("without clipping", "90%"),)
    run.explained.write_text(json_line(told.to_json() | {"steps": 4}))
    assert "has 6 steps now, and this answer is of 4" in explained(read_run(run.path)).blocks[2].text
    run.explained.write_text('{"verdicts": 4}')
    assert explained(read_run(run.path)) is None


def test_text_of_a_model_makes_no_element_and_no_attribute(tmp_path):
    run = write_run(
        tmp_path / "run", World(held_out=RISING, settings=[f"trainer.experiment_name={json.dumps(HOSTILE)}"])
    )
    page = Elements(the_page(run))
    assert [attributes.get("type") for tag, attributes in page.found if tag == "script"] == [
        "application/json",
        None,
        None,
    ]
    assert not [tag for tag, _ in page.found if tag in ("img", "iframe", "link", "object", "embed", "base", "form")]
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on") or name == "style"]
    assert "".join(page.text).count(HOSTILE) >= 6  # as it stands: of training samples, of held-out ones, the name


def test_nothing_on_the_page_names_another_place(tmp_path):
    page = Elements(the_page(write_run(tmp_path / "run")))
    links = [
        value
        for _, attributes in page.found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data")
    ]
    assert links and all(link.startswith("#") for link in links)


def test_the_policy_names_exactly_what_is_on_the_page(tmp_path):
    """Hashes by an independent reading of the file, so that a browser lets the page's own scripts run, and no other."""
    import hashlib

    html = the_page(write_run(tmp_path / "run"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    own = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", html, re.S)
    digests = {base64.b64encode(hashlib.sha256((a or b).encode()).digest()).decode() for a, b in own}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests and len(digests) == 4
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy


def test_a_browser_without_scripts_gets_the_curves_in_numbers(tmp_path):
    html = the_page(write_run(tmp_path / "run"))
    plain = re.search(r"<noscript>(.*?)</noscript>", html, re.S)[1]
    score = [f"{step / 10 + 1 / 3:.4g}" for step in (1, 6)]
    assert (
        f">critic/score/mean</td><td>reward</td><td class=n>6</td><td class=n>{score[0]}</td><td "
        f"class=n>{score[1]}</td>" in plain
    )


# ---------------------------------------------------------------- curves, settings, samples, held-out scores


def test_thinning_keeps_real_points_and_every_extreme():
    """The example of mrl/tools/report/columns.py, then any curve."""
    curve = Curve(np.arange(1, 7), np.array([5.0, 9, 1, 4, 4, 7]), 6)
    thin = curve.thinned(4)
    assert [*zip(thin.steps, thin.values, strict=True)] == [(2, 9), (3, 1), (4, 4), (6, 7)]
    noise = np.random.default_rng(0).normal(size=10_000)
    whole = Curve(np.arange(10_000), noise, 10_000)
    thin = whole.thinned(1000)
    assert len(thin) <= 1000 and thin.of == 10_000
    assert (noise[thin.steps] == thin.values).all() and (np.diff(thin.steps) > 0).all()
    assert thin.values.max() == noise.max() and thin.values.min() == noise.min()


def test_what_is_no_finite_number_is_no_point():
    rows = [{STEP: 1, "a": 1.5, "b": None}, {STEP: 2, "a": math.inf, "b": 2}, {STEP: 3, "a": 0, "c": "text"}]
    curves = curves_of(rows)
    assert {name: [*zip(c.steps.tolist(), c.values.tolist(), strict=True)] for name, c in curves.items()} == {
        "a": [(1, 1.5), (3, 0.0)],
        "b": [(2, 2.0)],
    }


def test_settings_that_differ_are_those_that_somebody_changed(tmp_path):
    """A value that a file repeats from the recipe, as 3e-4 for 0.0003, changes nothing."""
    run = write_run(
        tmp_path / "run", World(settings=["algorithm.policy_loss.clip_ratio_low=3e-4", "actor.optim.lr=5e-7"])
    )
    own = {setting.key: (setting.value, usual, setting.origin) for setting, usual in read_settings(run.config).own()}
    assert own["actor.optim.lr"] == ("5.0e-07", "1.0e-06", "--set")
    assert "algorithm.policy_loss.clip_ratio_low" not in own
    assert own["algorithm.policy_loss.clip_ratio_high"][:2] == ("0.01", "0.0004")


def test_best_worst_and_changed_are_of_different_prompts_while_there_are_such():
    scores, prompts = [1.0, 1.0, 1.0, 0.9, 0.1, 0.0, 0.0], [1, 1, 1, 2, 3, 4, 4]
    found = extreme_rows(scores, prompts, ["ok"] * 7, [0.0, 0.5, 0.0, 0.0, 9.0, 0.0, 0.0])
    assert [prompts[row] for row in found["best"]] == [1, 2, 3] and [scores[row] for row in found["best"]] == [
        1.0,
        0.9,
        0.1,
    ]
    assert [scores[row] for row in found["worst"]] == [0.0, 1.0, 0.0]
    rows = [row for kind in found.values() for row in kind]
    assert len(set(rows)) == len(rows) == 7  # row 4, the furthest of all, is one of the best already


def test_differences_of_log_probs_colour_the_tokens(tmp_path):
    """The engine gave -0.5 and -3 - row; the trainer 0.25 more and 0.5 less. Full colour is the largest, 0.5."""
    run = write_run(tmp_path / "run")
    write_shown_rows(run.path, 6, {row: np.array([-0.25, -3.5 - row]) for row in (0, 1, 5)})
    tokens = [
        a
        for tag, a in Elements(the_page(run)).found
        if tag == "span" and "trainer less engine" in (a.get("title") or "")
    ]
    assert {(a["class"], a["title"]) for a in tokens} == {
        ("t2", "trainer less engine, nats: 0.25"), ("t-5", "trainer less engine, nats: -0.5"),
    }  # fmt: skip
    assert len(tokens) == 2 * 3


def test_log_probs_stand_beside_their_own_response_where_not_all_are_kept(tmp_path):
    """Of a step of twelve every second one is in the file; the trainer's are of the first, the fifth, and one that is
    not there."""
    run = write_run(tmp_path / "run", World(sample_ids=range(0, 12, 2)))
    write_shown_rows(run.path, 6, {id: np.array([-0.25, -3.5 - id]) for id in (0, 8, 9)})
    found = looked_at(run.samples, 6, read_shown_rows(run.path))
    differing = {one.row: one.old_log_probs for kind in found.values() for one in kind if one.old_log_probs}
    assert differing == {0: [-0.25, -3.5], 4: [-0.25, -11.5]}


def test_a_held_out_score_has_its_interval(tmp_path):
    name, ends = "val-core/sum/reward/mean@1", [f"val-aux/sum/reward/mean@1/ci95_{end}" for end in ("low", "high")]
    metrics = {name: [0.5] * 6, ends[0]: [0.3] * 6, ends[1]: [0.6] * 6}
    run = read_run(write_run(tmp_path / "run", World(metrics=metrics)).path)
    (series,) = [s for chart in curve_charts(run) if isinstance(chart, Chart) for s in chart.series if s.curve == name]
    assert series.band == tuple(ends)
    page = run_page(run)
    assert all(end in page.curves for end in ends)


def test_rounding_stays_white_and_another_steps_log_probs_are_not_taken(tmp_path):
    run = write_run(tmp_path / "run")
    write_shown_rows(run.path, 6, {0: np.array([-0.5 + 1e-6, -3.0])})
    assert {a["class"] for tag, a in Elements(the_page(run)).found if "trainer less" in (a.get("title") or "")} == {
        "t0"
    }
    write_shown_rows(run.path, 5, {0: np.array([-0.25, -3.5])})
    assert "trainer less engine" not in the_page(run)
    RunDir.open(run.path, "", resume=True).truncate_metrics(6)
    assert read_shown_rows(run.path) is None


TALKED = Sample(
    0, 0, 0, 0, (0, 1), (2, 4, 3, 1, 0), (-0.5, -4.0, 0, 0, -1.0), "stop", 5, sampled=(1, 1, 0, 0, 1),
    turns=(Turn(0, "stop", 2, 0.75, 0.25), Turn(4, "stop")), parts={},
    calls=(TurnCall("guess", "ok", 0.5), TurnCall("<b>x</b>", "timeout", 0.25)),
)  # fmt: skip


def test_a_trajectory_stands_turn_by_turn_its_sampled_tokens_coloured(tmp_path):
    """What was read has no colour; calls and their seconds stand over the turn that made them."""
    run = write_run(tmp_path / "run", World(with_samples=False))
    write_samples(run.samples, 6, [packed([TALKED])], [{"score": 1.0, "reason": "ok"}], turns=True)
    page = the_page(run)
    response = page.partition('<pre class="response">')[2].partition("</pre>")[0]
    first, second = response.split("</b>")[1:]
    heads = [text for text in Elements(response).text if text.startswith("turn ")]
    assert heads == [
        "turn 1: guess ok 0.50 s, <b>x</b> timeout 0.25 s · 0.75 s in all · reward 0.25 · ended by stop",
        "turn 2: no call · ended by stop",
    ]
    kinds = [(a["class"], a["title"]) for tag, a in Elements(first).found if tag == "span"]
    read = ("context", "read, not sampled")
    assert kinds == [("t0", "log-prob -0.5"), ("t-2", "log-prob -4"), read, read]
    assert [a["class"] for tag, a in Elements(second).found if tag == "span"] == ["t-1"]
    assert "What is grey was read" in page and "What is grey was read" not in the_page(write_run(tmp_path / "other"))


def test_heads_of_turns_and_branches_stand_before_their_tokens_and_what_is_not_shown_has_none():
    sample = TrainingSample(
        0, 0, [], [1, 2, 3, 4], [0.0] * 4, "stop", (5,), 1.0, "ok", sampled=[True, False, False, True],
        heads=(PartHead(0, "turn 1"), PartHead(2, "branch 2"), PartHead(2, "turn 2"), PartHead(9, "turn 3")),
    )  # fmt: skip
    parts = parts_of(sample, [None] * 3, None)
    shown = [(part.head, [(token.text.strip(), token.is_context) for token in part.tokens]) for part in parts]
    assert shown == [
        ("turn 1", [("1", False), ("2", True)]), ("branch 2", []), ("turn 2", [("3", True)]), ("turn 3", []),
    ]  # fmt: skip


def test_tokens_that_only_together_are_a_character_stand_together():
    pieces = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"b"}
    tokens = tokens_of(
        [0, 1, 2, 3], [-1.0, -0.5, -2.0, None], lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")
    )
    assert [(token.text, token.value) for token in tokens] == [("a", -1.0), ("é", -2.0), ("b", None)]


def test_tokens_are_numbers_where_no_tokenizer_is_at_hand(tmp_path):
    assert decoder([tmp_path]) is None
    assert [token.text for token in tokens_of([7, 9], [None, None], None)] == ["7 ", "9 "]


def test_a_response_whose_environment_failed_is_no_extreme():
    """The 0 that stands there for want of a score would be the worst, and the row the most changed."""
    scores, reasons = [3.0, 0.0, 1.0, 2.0, 4.0, 5.0, 6.0], ["ok", "environment", *["ok"] * 5]
    found = extreme_rows(scores, range(7), reasons, [0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert found == {"best": [6, 5, 4], "worst": [2, 3, 0], "changed": []}


def held_out(prompt: int, sample: int, score: float, reason: str = "ok", output: str = "") -> Response:
    return Response("games", prompt, sample, "Go.", output, "", score, reason)


def test_a_prompt_that_an_environment_failed_in_is_compared_with_nothing():
    """By hand: prompt 1 has half an answer before; of the others, with 1 and 0, both rise by a half."""
    before = [held_out(0, 0, 1.0), held_out(0, 1, 0.0), held_out(1, 0, 1.0), held_out(1, 1, 0.0, "environment")]
    before += [held_out(2, 0, 0.0), held_out(2, 1, 0.0)]
    after = [held_out(row // 2, row % 2, score) for row, score in enumerate([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])]
    found = differences(before, after)["games"]
    assert (found.prompts, found.mean, found.first, found.second) == (2, 0.5, 0.25, 0.75)
    assert prompt_means(before, {"games": "reward"}) == {"games": {(0, "Go."): 0.5, (2, "Go."): 0.0}}


def test_no_pair_is_shown_of_which_one_was_not_judged(tmp_path):
    run = write_run(tmp_path / "run")
    run.validation.mkdir(exist_ok=True)
    given = {"data_source": "games", "input": "Go.", "gts": "", "sample_id": 0}
    for step, second in ((0, "environment"), (6, "ok")):
        rows = [
            given | {"prompt_id": p, "output": f"{p} at {step}", "score": 0.0, "reason": reason}
            for p, reason in enumerate(["ok", second])
        ]
        (run.validation / f"step-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = the_page(run)
    assert "0 at 6" in html and "1 at 6" not in html


def test_a_difference_of_prompts_by_hand():
    """8 of 16 prompts go from 0 to 1: mean 1/2, standard error 1/sqrt(60), z 3.873, two-sided chance 1.075e-4 (table of
    the normal).
    """
    found = paired(np.zeros(16), np.array([1.0] * 8 + [0.0] * 8))
    assert (found.mean, found.prompts) == (0.5, 16)
    assert found.standard_error == pytest.approx(1 / math.sqrt(60)) and found.p == pytest.approx(1.075e-4, rel=1e-3)
    assert found.significant() and paired(np.ones(16), np.ones(16)).p == 1.0
    assert not paired(np.zeros(4), np.array([1.0, 1, 1, 0.9])).significant()  # four prompts say nothing


# ---------------------------------------------------------------- verdict, attempts


@pytest.mark.parametrize(
    ("scores", "words", "tone"),
    [
        (RISING, "rose by more than chance", "good"),
        ({0: RISING[6], 6: RISING[0]}, "fell by more than chance", "warn"),
        ({0: RISING[0], 6: RISING[0][::-1]}, "have not moved by more than chance", "plain"),
    ],
)
def test_a_finished_run_is_judged_by_its_held_out_scores(tmp_path, scores, words, tone):
    said = verdict(read_run(write_run(tmp_path / "run", World(held_out=scores)).path))
    assert said.headline.startswith("Finished, 6 of 6 steps. ") and words in said.headline and said.tone == tone


@pytest.mark.parametrize("damage", ["NaN", "-Infinity", '"high"', "null"])
def test_scores_that_are_no_numbers_are_no_trend_and_are_told(tmp_path, damage):
    run = write_run(tmp_path / "run", World(held_out=RISING))
    file = run.validation / "step-6.jsonl"
    lines = [re.sub(r'"score": [-0-9.]+', f'"score": {damage}', line) for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines) + "\n")
    said = verdict(read_run(run.path))
    assert "Validation scores say nothing: validation/ is damaged at step 6" in said.headline, said.headline
    assert any(f"validation/step-6.jsonl has {len(lines)} damaged lines" in str(each) for each in said.next_steps)


def test_a_bonus_is_no_verdict_where_the_accuracy_stands_still(tmp_path):
    """The reward falls to every answer, and as many are right."""
    less = [score - 0.5 for score in RISING[6]]
    world = World(held_out={0: RISING[6], 6: less}, held_out_acc={0: RISING[6], 6: RISING[6]})
    said = verdict(read_run(write_run(tmp_path / "run", world).path))
    assert "have not moved by more than chance" in said.headline and said.tone == "plain", said


def without_lines(run: RunDir, *steps: int) -> None:
    rows = [row for row in read_metrics(run.metrics) if row[STEP] not in steps]
    run.metrics.write_text("".join(map(json_line, rows)))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ((5, 6), "steps 5 to 6"),
        ((6,), "step 6"),
        ((3,), "step 3"),
        ((1,), "step 1"),
        ((1, 3, 5, 6), "steps 1, 3 and 5 to 6"),
        ((1, 2, 3, 4, 5, 6), "steps 1 to 6"),
    ],
)
@pytest.mark.parametrize("total_is_known", [True, False])
def test_a_run_whose_lines_are_missing_is_not_finished(tmp_path, lost, words, total_is_known):
    """It ended well; of its six steps the end, or one in between, has no line."""
    run = write_run(tmp_path / "run", World(held_out=RISING))
    with attempt(run.path, 0, {}):
        without_lines(run, *lost)
    if not total_is_known:
        run.config.write_text(
            re.sub(r"total_training_steps: \d+", "total_training_steps: null", run.config.read_text())
        )
        (run.checkpoints / "step-6").mkdir()
    if len(lost) == 6:
        run.metrics.write_text(json_line({STEP: 0}))
    said = verdict(read_run(run.path))
    assert f"Ended with exit code 0, but metrics.jsonl has no line of {words}. " in said.headline
    assert said.tone == "bad" and "Finished" not in said.headline and "restore metrics.jsonl" in said.next_steps[0]


def test_a_gap_of_a_run_that_was_stopped_or_goes_on_is_said_beside_why(tmp_path):
    run = write_run(tmp_path / "run", World(steps=5))
    without_lines(run, 2)
    (run.checkpoints / "step-7").mkdir()
    ended_by(run.path, Interrupted("stopped by SIGTERM"))
    said = verdict(read_run(run.path))
    assert "stopped by SIGTERM" in said.headline
    assert any("no line of steps 2 and 6." in step for step in said.next_steps)
    again = RunDir.open(run.path, "", resume=True)
    said = verdict(read_run(run.path))  # the checkpoint of a step stands before its line
    assert said.headline.startswith("Running") and any("no line of step 2." in step for step in said.next_steps)
    again.close()


def test_the_line_of_the_step_that_a_resume_goes_on_from_is_not_missing(tmp_path):
    """What is whole is saved as a run ends after its update: the checkpoint has the line, and the resume writes it."""
    run = write_run(tmp_path / "run", World(steps=4))
    (run.checkpoints / "step-5").mkdir()
    ended_by(run.path, Interrupted("engine 0 died"))
    said = verdict(read_run(run.path))
    assert read_run(run.path).missing_steps == () and said.tone == "warn"
    assert "goes on from the checkpoint of step 5" in said.next_steps[0]
    assert not any("no line" in step for step in said.next_steps)


def test_a_run_that_began_from_anothers_checkpoint_lacks_nothing_before_it(tmp_path):
    run = write_run(tmp_path / "run")
    without_lines(run, 1, 2)
    assert verdict(read_run(run.path)).headline.startswith("Finished")  # of an older version, which wrote no starts
    with attempt(run.path, 2, {}):
        pass
    assert verdict(read_run(run.path)).headline.startswith("Finished, 6 of 6 steps")


def test_many_gaps_are_counted(tmp_path):
    run = write_run(tmp_path / "run", World(steps=14, total=14, with_samples=False))
    with attempt(run.path, 0, {}):
        without_lines(run, 1, 3, 5, 7, 9, 11, 13)
    assert "no line of steps 1, 3, 5, 7 and 3 others." in verdict(read_run(run.path)).headline


def ended_by(path, error) -> None:
    with pytest.raises(type(error)), attempt(path, 0, {"torch": "2"}):
        raise error


@pytest.mark.parametrize(
    ("error", "words", "next_step"),
    [
        (Interrupted("rank 3 is lost"), "Stopped after 3 of 6 steps, resumable: rank 3 is lost", "--resume"),
        (NumericAbort("nan"), "A numerical failure ended it after 3 of 6 steps: nan", "--resume"),
        (RuntimeError("a defect"), "Failed after 3 of 6 steps, exit code 1: a defect", "Incidents"),
    ],
)
def test_a_run_that_ended_early_says_why_and_how_to_go_on(tmp_path, error, words, next_step):
    run = write_run(tmp_path / "run", World(steps=3))
    ended_by(run.path, error)
    said = verdict(read_run(run.path))
    assert words in said.headline and next_step in said.next_steps[0] and said.tone in ("bad", "warn")


TAUGHT = ("distillation.enabled=true", "distillation.teacher_model.model_path=/a/teacher")
ALONE = (*TAUGHT, "distillation.distillation_loss.use_task_rewards=false")


@pytest.mark.parametrize(
    ("settings", "teach_nothing"),
    [
        ((), True),
        (TAUGHT, True),
        (ALONE, False),
        ((*ALONE, "rollout.n=1"), False),
        (("algorithm.adv_estimator=gae",), False),
        (("algorithm.adv_estimator=reinforce_plus_plus", "rollout.n=1"), False),
    ],
)
def test_groups_of_one_score_are_told_where_responses_are_compared(tmp_path, settings, teach_nothing):
    world = World(settings=settings, metrics={"train/uniform_group_share": [1.0] * 6})
    steps = verdict(read_run(write_run(tmp_path / "run", world).path)).next_steps
    assert any("rollout.n" in step for step in steps) == teach_nothing


def test_a_run_that_failed_before_its_first_step_has_a_page(tmp_path):
    run = write_run(tmp_path / "run", World(steps=0))
    ended_by(run.path, RuntimeError("no engine"))
    assert "no engine" in "".join(Elements(the_page(run)).text)


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path):
    run = write_run(tmp_path / "run", World(steps=3))
    with attempt(run.path, 0, {}):
        again = RunDir.open(run.path, "", resume=True)
        assert verdict(read_run(run.path)).headline.startswith("Running, 3 of 6 steps")
        again.close()
        assert "killed" in verdict(read_run(run.path)).headline


def test_attempts_say_command_versions_and_end_and_survive_a_resume(tmp_path):
    run = write_run(tmp_path / "run")
    with attempt(run.path, 0, {"torch": "2.13.0"}):
        pass
    ended_by(run.path, Interrupted("stopped by SIGTERM"))
    RunDir.open(run.path, "", resume=True).truncate_metrics(2)
    first, second = read_attempts(run.path)
    assert (first.exit_code, first.versions, first.is_of_this_process) == (0, {"torch": "2.13.0"}, True)
    assert (
        (second.exit_code, second.message, second.step) == (5, "stopped by SIGTERM", 0)
        and second.command
        and second.ended
    )


def test_what_is_generated_again_is_an_incident_of_the_report(tmp_path):
    run = write_run(tmp_path / "run")
    with attempt(run.path, 2, {}) as notes:
        notes.generated_again(156)
    assert the_page(run).count("156 responses generated again") == 2  # among incidents, and of the start


def test_a_torn_line_of_attempts_hides_no_other(tmp_path):
    with attempt(tmp_path, 3, {}):
        pass
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"event": "began", "ti')
    assert [one.step for one in read_attempts(tmp_path)] == [3]


# ---------------------------------------------------------------- beside a run


def test_the_report_at_the_end_is_of_the_run_that_this_process_held(tmp_path):
    run = write_run(tmp_path / "run")
    assert report_at_the_end(run.path) == "" and not run.report.exists()  # another's, or one that never began
    with attempt(run.path, 0, {}):
        pass
    assert str(run.report) in report_at_the_end(run.path) and run.report.stat().st_size > 50_000


def test_a_report_that_cannot_be_written_is_a_line_and_no_error(tmp_path):
    run = write_run(tmp_path / "run")
    with attempt(run.path, 0, {}):
        pass
    run.report.mkdir()
    assert report_at_the_end(run.path).startswith("note: no report was written: EnvironmentFault")


def test_reports_of_a_run_that_goes_on_come_after_saves_and_not_too_often(tmp_path, monkeypatch):
    began, now = [], [0.0]

    class Process:
        def __init__(self, command, **_):
            began.append(command[-2:])
            self.ended = None

        def poll(self):
            return self.ended

        def terminate(self):
            self.ended = -15

        def wait(self, timeout):
            return self.ended

    monkeypatch.setattr("mrl.tools.report.write.subprocess.Popen", Process)
    (tmp_path / "logs").mkdir()
    view = ReportView(tmp_path, lambda step: step % 2 == 0, lambda: now[0])
    for step, at in ((2, 1.0), (3, APART_S + 1), (4, APART_S + 2), (6, APART_S + 3), (8, 3 * APART_S)):
        now[0] = at
        view.write(step, {})
    assert began == [
        ["report", str(tmp_path)]
    ]  # at step 4 alone: 2 is early, 3 not saved, 6 too soon, and at 8 the first goes on
    view.close()
    view.write(8, {})
    assert len(began) == 2


# ---------------------------------------------------------------- bad input


def no_folder(path):
    return path / "nothing", "is not a folder"


def a_file(path):
    (path / "file").write_text("x")
    return path / "file", "is not a folder"


def empty(path):
    (path / "run").mkdir()
    return path / "run", "holds no run"


def above_runs(path):
    write_run(path / "run")
    return path, f"holds no run: there is no config.resolved.yaml; runs in it: {path / 'run'}"


def no_step(path):
    return write_run(path / "run", World(steps=0)).path, "no step is written yet"


def damaged_metrics(path):
    run = write_run(path / "run")
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([lines[0], lines[1][:40], lines[2], ""]))
    return run.path, "metrics.jsonl:2: not a metrics line"


def nested_metrics(path):
    """Metrics below a key, as in the rows of verl's FileLogger (verl/utils/tracking.py)."""
    run = write_run(path / "run")
    row = {"training/global_step": 1, "critic/score/mean": {"math": 0.5}}
    run.metrics.write_text(json.dumps(row) + "\n")
    return run.path, "metrics.jsonl:1: not a metrics line (ValueError('critic/score/mean is no number'))"


def damaged_config(path):
    run = write_run(path / "run")
    run.config.write_bytes(b"\x00\xff garbage")
    return run.path, "config.resolved.yaml"


def plan_of_another_version(path):
    run = write_run(path / "run")
    run.plan.write_text('{"format": 99}')
    return run.path, "is no plan of this version"


@pytest.mark.parametrize(
    "case",
    [
        no_folder,
        a_file,
        empty,
        above_runs,
        no_step,
        damaged_metrics,
        nested_metrics,
        damaged_config,
        plan_of_another_version,
    ],
    ids=lambda c: c.__name__,
)
def test_what_is_no_run_ends_with_one_message(tmp_path, capsys, case):
    path, words = case(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path)])
    out = capsys.readouterr()
    assert ended.value.code == 2 and words in out.err and not out.out
    assert out.err.startswith("mrl report: ") and out.err.count("\n") == 1
    assert not [file for file in tmp_path.rglob("*report.html*") if file.is_file()]


def test_a_run_that_is_being_written_is_read_without_its_torn_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", World(steps=3))
    with run.metrics.open("a") as file:
        file.write('{"training/global_step": 4, "critic/sc')
    main(["report", str(run.path)])
    assert "3 of 6 steps" in capsys.readouterr().out


def test_a_configuration_of_another_version_costs_only_what_needs_its_keys(tmp_path):
    run = write_run(tmp_path / "run")
    run.config.write_text(run.config.read_text() + "novelty:\n  key: 1  # default\n")
    record = read_run(run.path)
    assert record.config is None and "another version" in record.notes[0]
    assert "another version" in "".join(Elements(the_page(run)).text)


def test_damaged_samples_are_said_where_they_would_stand(tmp_path):
    run = write_run(tmp_path / "run")
    (run.samples / "step-6.parquet").write_bytes(b"PAR1 no more")
    assert "the samples of step 6 cannot be read" in "".join(Elements(the_page(run)).text)


def test_a_place_that_cannot_be_written_is_the_machine(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run.path), "-o", str(tmp_path / "no" / "page.html")])
    assert ended.value.code == 4 and "cannot be written" in capsys.readouterr().err


def test_output_goes_where_it_is_asked(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    main(["report", str(run.path), "-o", str(tmp_path / "page.html")])
    assert os.path.getsize(tmp_path / "page.html") < 5e6 and not run.report.exists()
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize("error", [None, RuntimeError("a defect")])
def test_mrl_train_leaves_a_report_behind_however_it_ends(tmp_path, monkeypatch, capsys, error):
    """With everything that `mrl train` does around a run, and none of its processes."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    from mrl.driver import assemble, loop, preflight

    folder = tmp_path / "run"

    @contextmanager
    def open_run(inputs, resume, views):
        assert list(views) == ["report", "plan"]
        with attempt(write_run(folder, World(steps=3, total=3)).path, 0, {}):
            yield SimpleNamespace(state=SimpleNamespace(step=3), run_dir=SimpleNamespace(path=folder))

    def train(_):
        if error:
            raise error

    monkeypatch.setattr(preflight, "preflight", lambda *_: None)
    monkeypatch.setattr(preflight, "with_models_at_hand", lambda resolved, **_: resolved)
    monkeypatch.setattr(preflight, "start_lines", lambda *_: [])
    monkeypatch.setattr(assemble, "open_run", open_run)
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr("mrl.cluster.prerequisites.ask_for_token_authentication", lambda: None)
    arguments = ["train", str(ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"), "--run-dir", str(folder)]
    if error:
        with pytest.raises(RuntimeError):
            main(arguments)
    else:
        main(arguments)
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    assert ("exit code 1: a defect" if error else "Finished, 3 of 3 steps") in (folder / "report.html").read_text()


def test_pages_beside_the_report_are_written_once(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", World(steps=4))
    newest = run.samples / "step-4.parquet"
    for step in (1, 2, 3):
        shutil.copy(newest, run.samples / f"step-{step}.parquet")
    read = []
    usual = stored_responses._step_rollouts
    monkeypatch.setattr(stored_responses, "PAGE_BYTES", 1)
    monkeypatch.setattr(stored_responses, "_step_rollouts", lambda *given: read.append(given[1]) or usual(*given))
    write_report(run.path)
    beside = tmp_path / "run" / "report-samples"
    assert read == [4, 3, 2, 1] and {page.name for page in beside.iterdir()} == {f"step-{s}.html" for s in (1, 2, 3)}
    first = run.report.read_text()
    assert "report-samples/step-1.html" in first
    (beside / "step-2.html").unlink()
    del read[:]
    write_report(run.path)
    assert read == [4, 2] and (beside / "step-2.html").exists()
    assert "report-samples/step-1.html" in run.report.read_text()
