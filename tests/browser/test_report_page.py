"""The pages in a real browser: what it draws is metrics.jsonl, a model's text does nothing, and no request leaves."""

import json
import threading

import numpy as np
import pytest
from report_run import HOSTILE, World, write_run

from mrl.cli.main import main
from mrl.record.run_dir import json_line
from mrl.tools.report.columns import STEP
from mrl.tools.report.live import LiveServer

HELD_OUT = {0: [0.0] * 8 + [1.0] * 8, 6: [0.0] * 2 + [1.0] * 14}
SECTIONS = ["verdict", "curves", "next", "settings", "steps", "sync", "incidents", "samples", "reproducibility"]
THEMES = ("light", "dark")
# every piece of text whose contrast with what is behind it is below that of WCAG 2.2, AA
LOW_CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, k, i) => {
  const v = c[i] / 255;
  return sum + k * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
}, 0);
const behind = (e) => {
  const layers = [];
  for (let at = e; at; at = at.parentElement) {
    const c = rgb(getComputedStyle(at).backgroundColor);
    if ((c[3] ?? 1) > 0) layers.unshift(c);
    if ((c[3] ?? 1) === 1) break;
  }
  return layers.reduce((under, c) => under.map((v, i) => v + (c[3] ?? 1) * (c[i] - v)), [255, 255, 255]);
};
const outside = "svg, script, style, noscript, .u-wrap";
return [...document.querySelectorAll("body *")].filter((e) => !e.closest(outside) &&
  !e.disabled && e.checkVisibility() &&
  [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).filter((e) => {
  const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 4.5;
}).map((e) => e.outerHTML.slice(0, 120));
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = write_run(
        tmp_path_factory.mktemp("runs") / "run",
        World(held_out=HELD_OUT, settings=[f"trainer.experiment_name={json.dumps(HOSTILE)}"]),
    )
    main(["report", str(run.path)])
    return run


@pytest.fixture
def page(run, browser):
    browser.open(run.report)
    return browser


def rows(run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def drawn(browser, chart: str) -> list[list[float]]:
    """x and then every series of a chart, as the plotting library holds them."""
    return browser.ask("return window.mrlReport.plots[arguments[0]].data.map((c) => Array.from(c))", chart)


def test_every_section_is_there_and_nothing_is_complained_of(page):
    assert page.ask("return [...document.querySelectorAll('section')].map((s) => s.id)") == SECTIONS
    assert not page.complaints()


def test_points_of_the_curves_are_those_of_metrics_jsonl(page, run):
    for chart, name in (
        ("reward", "critic/score/mean"),
        ("entropy", "actor/entropy"),
        ("mismatch", "rollout_corr/k3_kl"),
    ):
        assert drawn(page, chart) == [[row[STEP] for row in rows(run)], [row[name] for row in rows(run)]]


def test_a_legend_has_words_the_metrics_name_on_hover_and_the_newest_value(page, run):
    legend = "return [...document.querySelectorAll('#reward .u-series')].map((r) => [r.textContent, r.title])"
    (step, _), (text, title) = page.ask(legend)
    assert step.endswith(str(rows(run)[-1][STEP])) and title == "critic/score/mean"
    assert text.startswith("mean score") and text.endswith(f"{rows(run)[-1][title]:.5g}")
    assert "--" not in page.ask("return [...document.querySelectorAll('.u-legend')].map((l) => l.textContent).join()")


def test_curves_that_coincide_say_so(tmp_path, browser):
    score = [0.1, 0.4, 0.2, 0.6, 0.5, 0.7]
    same = {"critic/score/mean": score, "critic/rewards/mean": score}
    run = write_run(tmp_path / "run", World(metrics=same))
    main(["report", str(run.path)])
    browser.open(run.report)
    labels = browser.ask("return [...document.querySelectorAll('#reward .u-label')].map((l) => l.textContent)")
    assert labels[1:] == ["mean score", "after penalties (equal to mean score)"]


def test_all_stored_responses_are_found_by_text_step_and_page(tmp_path, browser):
    run = write_run(tmp_path / "run", World(sample_ids=range(50)))
    main(["report", str(run.path)])
    browser.open(run.report)
    shown = "return [...document.querySelectorAll('#rollouts tbody tr')].map((r) => +r.children[1].textContent)"
    press = "[...document.querySelectorAll('#rollouts button')].find((b) => b.textContent === arguments[0]).click()"
    assert browser.ask(shown) == list(range(1, 21))
    browser.ask(press, "next")
    browser.ask(press, "next")
    assert browser.ask(shown) == list(range(41, 51))
    choose = (
        "const e = document.querySelector(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"
    )
    browser.ask(choose, "#rollouts select[aria-label=order]", "-1")
    assert browser.ask(shown)[0] == 50, "the best first"
    browser.ask(choose, "#rollouts input[type=search]", "nothing like it")
    assert browser.ask(shown) == []
    assert "0 of 50" in browser.ask("return document.querySelector('#rollouts [role=status]').textContent")
    browser.ask(choose, "#rollouts input[type=search]", HOSTILE[:20].upper())
    assert len(browser.ask(shown)) == 20 and browser.ask("return window.hurt") is None


def in_theme(browser, theme: str) -> None:
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1400])
def test_text_is_readable_controls_have_names_and_nothing_overflows(page, run, theme, width):
    in_theme(page, theme)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.open(run.report)
    try:
        assert page.ask(LOW_CONTRAST) == []
        unnamed = (
            "return [...document.querySelectorAll('button, input, select, a')].filter((e) => e.tabIndex < 0 || "
            "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML)"
        )
        assert page.ask(unnamed) == []
        assert page.ask("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        in_theme(page, "light")
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_no_violation(page, run, theme, axe):
    """The accessibility checker axe-core (its rules of WCAG A and AA)."""
    in_theme(page, theme)
    page.open(run.report)
    page.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    page.ask(axe)
    found = page.driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run().then((r) => done(r.violations), (e) => done([{id: e + ''}]))"
    )
    page.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
    in_theme(page, "light")
    assert [(each["id"], [node["html"][:120] for node in each.get("nodes", [])][:3]) for each in found] == []


def test_any_metric_opens_on_the_reward_and_another_can_be_chosen(page, run):
    assert drawn(page, "any-metric")[1] == [row["critic/score/mean"] for row in rows(run)]
    page.ask(
        "const s = document.querySelector('#any-metric select'); s.value = 'reshard/seconds'; s.dispatchEvent(new "
        "Event('change'))"
    )
    assert drawn(page, "any-metric")[1] == [row["reshard/seconds"] for row in rows(run)]


def test_the_stack_of_phases_ends_at_the_steps_time(page, run):
    top = drawn(page, "phases")[-1]
    assert top == pytest.approx([row["timing_s/step"] for row in rows(run)])


def test_smoothing_is_the_average_that_it_says_and_leaves_the_points_there(page, run):
    page.ask("const r = document.getElementById('smoothing'); r.value = 0.6; r.dispatchEvent(new Event('input'))")
    _, raw, smooth = drawn(page, "reward")
    values = np.array([row["critic/score/mean"] for row in rows(run)])
    weights = 0.6 ** np.arange(len(values))
    expected = [(weights[: n + 1][::-1] * values[: n + 1]).sum() / weights[: n + 1].sum() for n in range(len(values))]
    assert raw == values.tolist() and smooth == pytest.approx(expected)


def test_a_logarithmic_axis_and_back(page):
    scale = "return window.mrlReport.plots.entropy.scales.y.distr"
    press = "document.querySelector('#entropy figcaption button').click()"
    assert page.ask(scale) == 1
    page.ask(press)
    assert page.ask(scale) == 3
    page.ask(press)
    assert page.ask(scale) == 1 and page.ask("return window.mrlReport.plots.mismatch.scales.y.distr") == 3


def test_dragging_zooms_and_pointing_shows_values(page, run):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    over = page.driver.find_element(By.CSS_SELECTOR, "#reward .u-over")
    page.ask("arguments[0].scrollIntoView({block: 'center'})", over)
    wide = over.size["width"]
    ActionChains(page.driver).move_to_element_with_offset(over, -wide // 4, 0).click_and_hold().move_by_offset(
        wide // 2, 0
    ).release().perform()
    low, high = page.until(
        "const x = window.mrlReport.plots.reward.scales.x; return x.max - x.min < 4 && [x.min, x.max]"
    )
    assert 1 < low < high < 6
    legend = page.ask("return [...document.querySelectorAll('#reward .u-value')].map((v) => v.textContent)")
    assert legend[0] in {str(row[STEP]) for row in rows(run)} and legend[1] in {
        f"{row['critic/score/mean']:.5g}" for row in rows(run)
    }


def test_what_a_model_wrote_is_inert_and_stands_there(page):
    page.ask("return new Promise((done) => setTimeout(done, 300))")  # an onerror would have had its time
    assert page.ask("return window.hurt") is None
    assert page.ask("return document.querySelectorAll('main img, main iframe').length") == 0
    assert page.ask("return document.getElementById('samples').textContent.includes(arguments[0])", HOSTILE)
    assert page.ask("return document.title") == HOSTILE


def test_the_policy_stops_what_would_run_if_escaping_failed(page):
    """As if a text had become an element after all."""
    page.ask(
        "document.getElementById('samples').innerHTML += arguments[0]", "<img src='data:,' onerror='window.hurt = 2'>"
    )
    page.ask("const s = document.createElement('script'); s.textContent = 'window.hurt = 3'; document.body.append(s)")
    page.ask("return new Promise((done) => setTimeout(done, 300))")
    assert page.ask("return window.hurt") is None
    assert any("Content Security Policy" in said for said in page.complaints())


def test_no_request_leaves_the_page(page, run):
    asked = page.requests()
    assert set(asked) == {run.report.as_uri()}
    refused = page.ask("return fetch('http://127.0.0.1:9/').then(() => 'sent', (e) => 'refused')")
    assert refused == "refused" and any("connect-src" in said for said in page.complaints())


def test_a_browser_without_scripts_shows_the_summary(run, browsers):
    plain = browsers({"profile.managed_default_content_settings.javascript": 2})
    plain.driver.get(run.report.as_uri())
    body = plain.driver.find_element("css selector", "noscript").text
    assert "Curves need scripts" in body and "critic/score/mean" in body and "0.4333" in body
    assert "Finished, 6 of 6 steps" in plain.driver.find_element("id", "verdict").text


def test_a_run_of_ten_thousand_steps_opens_in_three_seconds(tmp_path, browser):
    """60 metrics of noise, which nothing compresses and nobody can thin without being seen."""
    run = write_run(tmp_path / "long", World(steps=1, total=10_000))
    noise = np.random.default_rng(0).normal(size=(10_000, 60))
    phases = {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 3.0}
    run.metrics.write_text(
        "".join(
            json_line(
                {
                    STEP: i + 1,
                    "critic/score/mean": float(row[0]),
                    **{f"rollout_corr/{k}": v for k, v in enumerate(row.tolist())},
                }
                | phases
            )
            for i, row in enumerate(noise)
        )
    )
    main(["report", str(run.path)])
    assert run.report.stat().st_size < 5e6
    assert browser.open(run.report) < 3.0
    steps, values = drawn(browser, "reward")
    assert len(steps) > 2000 and values == noise[np.array(steps) - 1, 0].tolist()
    assert max(values) == noise[:, 0].max() and min(values) == noise[:, 0].min()


def test_runs_side_by_side_share_an_axis(tmp_path, browser, capsys):
    """The second learns, the first does not; its name is hostile too."""
    for name, scores in (("a", HELD_OUT[0]), ("<b>", HELD_OUT[6])):
        write_run(tmp_path / name, World(held_out={0: HELD_OUT[0], 6: scores}, settings=[f"trainer.seed={len(name)}"]))
    main(["compare", str(tmp_path / "a"), str(tmp_path / "<b>"), "-o", str(tmp_path / "compare.html")])
    assert "<b> beats a" in capsys.readouterr().out
    browser.open(tmp_path / "compare.html")
    data = drawn(browser, "compare-critic-score-mean")
    assert len(data) == 3 and data[1] == data[2]
    assert browser.ask("return document.querySelector('#verdict p').textContent").startswith("<b> beats a")
    assert browser.ask("return [...document.querySelectorAll('#settings td')].map((c) => c.textContent)") == [
        "trainer.seed",
        "1",
        "3",
    ]
    assert not browser.complaints()


def test_a_watched_page_takes_new_steps_in_and_keeps_the_view(tmp_path, browser):
    run = write_run(tmp_path / "run", World(steps=4))
    server = LiveServer(run.path)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        browser.open(server.url)
        browser.ask("window.mrlReport.plots.reward.setScale('x', {min: 1.5, max: 3.5})")
        browser.ask("document.querySelector('#entropy figcaption button').click()")
        with run.metrics.open("a") as file:
            file.write(json_line({STEP: 5, "critic/score/mean": 0.9, "actor/entropy": 1.0}))
        browser.until("return window.mrlReport.plots.reward.data[0].length === 5")
        assert drawn(browser, "reward")[1][-1] == 0.9
        zoom = browser.ask("const x = window.mrlReport.plots.reward.scales.x; return [x.min, x.max]")
        assert (
            zoom == pytest.approx([1.5, 3.5])
            and browser.ask("return window.mrlReport.plots.entropy.scales.y.distr") == 3
        )
        assert "5 of 6 steps" in browser.ask("return document.getElementById('verdict').textContent")
        assert {url.split("?")[0] for url in browser.requests()} == {f"http://127.0.0.1:{server.port}/"}
        assert not browser.complaints()
    finally:
        server.close()
        thread.join(10)
