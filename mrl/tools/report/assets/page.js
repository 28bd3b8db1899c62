// Draws the charts of a page from its data element; where the page is served live, takes newer ones in without losing the view.
(() => {
  "use strict";
  const view = { smooth: 0, log: {}, zoom: {}, chosen: {} };
  const report = (window.mrlReport = { plots: {}, curve: null, draw, view });

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hues = () => Array.from({ length: 14 }, (_, i) => color("--k" + i));

  function readData() {
    const raw = JSON.parse(document.getElementById("data").textContent);
    const curves = {};
    for (const [name, c] of Object.entries(raw.curves)) {
      curves[name] = { x: Array.from(new Int32Array(bytes(c.x))), y: Array.from(new Float64Array(bytes(c.y))), of: c.of };
    }
    return { ...raw, curves };
  }

  // exponential moving average that counts what is missing before the first point, as TensorBoard's does
  function smoothed(y, weight) {
    let sum = 0, mass = 0;
    return y.map((v) => {
      sum = sum * weight + (1 - weight) * v;
      mass = mass * weight + (1 - weight);
      return sum / mass;
    });
  }

  const shown = (v) => (v == null ? "–" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(3) : +v.toPrecision(5) + "");
  const short = (v) => {  // of a tick
    const size = Math.abs(v);
    if (size >= 1e4) return size >= 1e6 ? +(v / 1e6).toPrecision(3) + "M" : +(v / 1e3).toPrecision(3) + "k";
    return v !== 0 && size < 1e-3 ? v.toExponential(1).replace(".0e", "e") : +v.toPrecision(3) + "";
  };
  const isPower = (v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9; // the ticks that a logarithmic axis names
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000]; // steps between ticks
  const positive = (y) => y.map((v) => (v > 0 ? v : null));

  const same = (a, b) => a.x.length === b.x.length && a.x.every((x, i) => x === b.x[i] && a.y[i] === b.y[i]);

  function lines(chart, curves) {
    const drawn = [];
    const tables = [], series = [{ label: "step" }], bands = [], palette = hues();
    chart.series.forEach((s, i) => {
      const c = curves[s.curve];
      if (!c) return;
      const stroke = palette[(s.color ?? i) % palette.length], take = view.log[chart.id] ? positive : (y) => y;
      const few = c.x.length < 40;
      const twin = drawn.find((other) => same(c, curves[other.curve]));
      const label = twin ? `${s.label} (equal to ${twin.label})` : s.label;
      const dash = twin ? [6, 6] : undefined;
      if (!twin) drawn.push(s);
      const add = (y, options) => (tables.push([c.x, take(y)]), series.push({ spanGaps: true, value: (_, v) => shown(v), ...options }));
      if (s.band && s.band.every((key) => curves[key]) && !view.log[chart.id]) {
        const at = series.length;
        [...s.band].reverse().forEach((key) => {  // the upper end first, as uPlot wants its bands
          const end = new Map(curves[key].x.map((x, j) => [x, curves[key].y[j]]));
          add(c.x.map((x) => end.get(x) ?? null), { label: "", class: "edge", stroke: "transparent", points: { show: false } });
        });
        bands.push({ series: [at, at + 1], fill: stroke + "33" });
      }
      if (view.smooth > 0) {
        add(c.y, { label, name: s.curve, stroke: stroke + "55", width: 1, dash, points: { show: false } });
        add(smoothed(c.y, view.smooth), { label: label + ", smoothed", name: s.curve, stroke, width: 2, dash, points: { show: false } });
      } else {
        add(c.y, { label, name: s.curve, stroke, width: 1.5, dash, points: { show: few, size: 5 } });
      }
    });
    return { tables, series, bands };
  }

  function layers(stack, curves) {
    const palette = hues(), series = [{ label: "step" }], bands = [];
    const parts = stack.series.filter((s) => curves[s.curve]);
    const steps = [...new Set(parts.flatMap((s) => curves[s.curve].x))].sort((a, b) => a - b);
    const sums = steps.map(() => 0), columns = [];
    parts.forEach((s, i) => {
      const c = curves[s.curve], at = new Map(c.x.map((x, j) => [x, c.y[j]]));
      const own = steps.map((x) => at.get(x) ?? 0);
      columns.push(own.map((v, j) => (sums[j] += v)));
      const stroke = palette[(s.color ?? i) % palette.length];
      series.push({ label: s.label, name: s.curve.replace("stack/", "timing_s/"), stroke, fill: stroke + "aa", width: 1, points: { show: false }, value: (u, v, _, j) => (j == null ? "–" : shown(own[j])) });
      if (i) bands.push({ series: [i + 1, i] });
    });
    return { tables: [[steps, ...columns]], series, bands };
  }

  function options(id, title, drawn, width, log) {
    const ink = color("--ink"), grid = { stroke: color("--grid"), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui, sans-serif" };
    const zoomed = (u, key) => {
      if (key !== "x" || !u.data[0].length) return;
      const { min, max } = u.scales.x, whole = min <= u.data[0][0] && max >= u.data[0][u.data[0].length - 1];
      view.zoom[id] = whole ? null : [min, max];
    };
    // values of the newest step where nothing is pointed at, and the metric's name where its words are
    const newest = (u) => {
      if (u.cursor.idx != null) return;
      const idxs = u.data.map((column) => {
        let i = column.length - 1;
        while (i > 0 && column[i] == null) i -= 1;
        return i;
      });
      if (u.data[0].length) u.setLegend({ idxs }, false);
    };
    const named = (u) => {
      const rows = u.root.querySelectorAll(".u-series");
      u.series.forEach((one, i) => { if (one.name && rows[i]) rows[i].title = one.name; });
    };
    // a curve of one value would get an axis to 100 around it
    const flat = (_, low, high) => (low !== high ? uPlot.rangeNum(low, high, 0.1, true) : low === 0 ? [0, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10]);
    return {
      width, height: 240, series: drawn.series, bands: drawn.bands,
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: flat } },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 62, values: (_, ticks) => ticks.map((v) => (v == null || (log && !isPower(v)) ? "" : short(v))) }],
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false } },
      legend: { live: true }, hooks: { setScale: [zoomed], setCursor: [newest], ready: [named, newest] },
    };
  }

  function place(id, title, drawn, log) {
    const figure = document.getElementById(id);
    if (!figure) return;
    report.plots[id]?.destroy();
    const data = drawn.tables.length ? uPlot.join(drawn.tables) : [[]];
    const zoom = view.zoom[id];
    const plot = new uPlot(options(id, title, drawn, Math.max(figure.clientWidth - 4, 240), log), data, figure);
    if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
    report.plots[id] = plot;
  }

  function draw(id) {
    const { charts, stacks, explorers, curves } = report.data;
    for (const chart of charts) if (!id || chart.id === id) place(chart.id, chart.title, lines(chart, curves), view.log[chart.id]);
    for (const stack of stacks) if (!id || stack.id === id) place(stack.id, stack.title, layers(stack, curves), false);
    for (const one of explorers) {
      if (id && one.id !== id) continue;
      const name = view.chosen[one.id] ?? (one.first || one.names[0]);
      if (name) place(one.id, name, lines({ id: one.id, series: one.runs.map(([run, key]) => ({ label: run || name, curve: key + name })) }, curves), view.log[one.id]);
    }
  }

  function logButton(id, byDefault) {
    const caption = document.querySelector(`#${CSS.escape(id)} figcaption`);
    if (!caption) return;
    view.log[id] ??= byDefault;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "log";
    button.setAttribute("aria-pressed", view.log[id]);
    button.addEventListener("click", () => {
      view.log[id] = !view.log[id];
      button.setAttribute("aria-pressed", view.log[id]);
      draw(id);
    });
    caption.append(button);
  }

  function chooser(explorer) {
    const caption = document.querySelector(`#${CSS.escape(explorer.id)} figcaption`), select = document.createElement("select");
    for (const name of explorer.names) select.add(new Option(name, name));
    select.setAttribute("aria-label", "metric");
    select.value = view.chosen[explorer.id] ?? (explorer.first || explorer.names[0]);
    select.addEventListener("change", () => {
      view.chosen[explorer.id] = select.value;
      view.zoom[explorer.id] = null;
      draw(explorer.id);
    });
    const search = document.createElement("input");
    Object.assign(search, { type: "search", placeholder: "search metrics" });
    search.setAttribute("aria-label", "search metrics");
    search.addEventListener("input", () => {
      const found = explorer.names.filter((name) => name.toLowerCase().includes(search.value.toLowerCase()));
      select.replaceChildren(...found.map((name) => new Option(name, name)));
      if (found.length) select.value = found[0], select.dispatchEvent(new Event("change"));
    });
    caption.append(select, search);
  }

  // ---- all stored responses: search, a step, pages of SHOWN
  const SHOWN = 20;
  function rollouts() {
    const figure = document.getElementById("rollouts"), rows = report.data.rollouts;
    if (!figure || !rows.length) return;
    const make = (tag, more = {}) => Object.assign(document.createElement(tag), more);
    const search = make("input", { type: "search", placeholder: "search prompts, responses, ground truths" });
    const step = make("select"), order = make("select"), before = make("button", { type: "button", textContent: "previous" }), after = make("button", { type: "button", textContent: "next" });
    const count = make("span"), body = make("tbody"), head = make("tr"), table = make("table"), bar = make("p", { className: "tools" }), box = make("div", { className: "scroll" });
    search.setAttribute("aria-label", "search responses"), step.setAttribute("aria-label", "step"), order.setAttribute("aria-label", "order");
    count.setAttribute("role", "status");
    box.tabIndex = 0, box.setAttribute("role", "region"), box.setAttribute("aria-label", "responses");
    step.append(new Option("all steps", ""), ...[...new Set(rows.map((r) => r[0]))].map((n) => new Option(`step ${n}`, n)));
    order.append(new Option("newest first", ""), new Option("worst first", "1"), new Option("best first", "-1"));
    ["step", "row", "score", "prompt", "response", "ground truth"].forEach((text) => head.append(make("th", { textContent: text, scope: "col" })));
    let page = 0;
    const fill = () => {
      const wanted = search.value.toLowerCase();
      const found = rows.filter((r) => (!step.value || r[0] === +step.value) && (!wanted || [r[4], r[5], r[6]].some((text) => text.toLowerCase().includes(wanted))));
      if (order.value) found.sort((a, b) => order.value * (a[2] - b[2]));
      const pages = Math.max(1, Math.ceil(found.length / SHOWN));
      page = Math.min(page, pages - 1);
      body.replaceChildren(...found.slice(page * SHOWN, (page + 1) * SHOWN).map((r) => {
        const row = make("tr");
        [r[0], r[1], r[3] || shown(r[2]), r[4], r[5], r[6]].forEach((text, i) => row.append(make("td", { textContent: text, className: i < 3 ? "n" : "text" })));
        return row;
      }));
      count.textContent = ` ${found.length} of ${rows.length} responses, page ${page + 1} of ${pages} `;
      before.disabled = page === 0, after.disabled = page === pages - 1;
    };
    for (const one of [search, step, order]) one.addEventListener("input", () => ((page = 0), fill()));
    before.addEventListener("click", () => ((page -= 1), fill()));
    after.addEventListener("click", () => ((page += 1), fill()));
    bar.append(search, " ", step, " ", order, " ", before, count, after);
    const top = make("thead");
    top.append(head), table.append(top, body), box.append(table), figure.append(bar, box);
    fill();
  }

  function tools() {
    const first = document.querySelector(".chart:not(.wide)");
    if (!first) return;
    const bar = document.createElement("p"), range = document.createElement("input"), label = document.createElement("label");
    bar.className = "tools";
    Object.assign(range, { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, id: "smoothing" });
    label.append("Smoothing ", range);
    bar.append(label, " Drag across a chart to zoom, double-click to see all of it; point at it for values.");
    range.addEventListener("input", () => ((view.smooth = +range.value), draw()));
    first.parentElement.before(bar);
  }

  function begin() {
    report.data = readData();
    tools();
    for (const chart of report.data.charts) logButton(chart.id, chart.log);
    for (const one of report.data.explorers) logButton(one.id, false), chooser(one);
    rollouts();
    draw();
    report.ready = true;
  }

  // ---- live: the same page again, when the server has a newer one
  let tag = `"${document.body.dataset.live}"`;
  async function renew() {
    const sign = document.getElementById("live");
    try {
      const answer = await fetch(location.href, { cache: "no-store", headers: { "If-None-Match": tag } });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const next = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const plot of Object.values(report.plots)) plot.destroy();
        report.plots = {};
        for (const part of ["header", "nav", "main"]) document.querySelector(part).replaceWith(document.adoptNode(next.querySelector(part)));
        begin();
      }
      document.getElementById("live").textContent = "live";
    } catch {
      sign.textContent = "the server is gone; this is the last that it said";
    }
  }

  begin();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  if (document.body.dataset.live) setInterval(renew, 2000);
})();
