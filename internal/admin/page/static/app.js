// What the page does beyond links and forms. Everything works without it, but for charts, live updates and shortcuts.
"use strict";
(() => {
  const $ = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const root = document.documentElement;
  const prefix = document.body.dataset.prefix;

  // Live updates: a tick every two seconds, while the page is visible and no field has the focus.
  let live = true;
  const typing = () => {
    const at = document.activeElement;
    return at && at.closest("#live") && at.matches("select, textarea, input:not([type=checkbox])");
  };
  const choosing = () => $("#live input[type=checkbox]:checked") || $("#live details.curl[open], #live details.raw[open]");
  setInterval(() => {
    if (live && !document.hidden && !typing() && !choosing() && !getSelection().toString()) htmx.trigger(document.body, "tick");
  }, 2000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && live) htmx.trigger(document.body, "tick"); });
  const liveSwitch = $("#live-switch");
  const setLive = (on) => {
    live = on;
    if (!liveSwitch) return;
    liveSwitch.setAttribute("aria-pressed", String(on));
    $("span", liveSwitch).textContent = on ? "Live" : "Paused";
  };
  if (liveSwitch) {
    liveSwitch.hidden = false;
    liveSwitch.addEventListener("click", () => setLive(!live));
  }
  // A relay that does not answer leaves an old page behind, which must not look like a new one.
  const unreached = $("#unreached");
  let heard = new Date();
  const lost = () => {
    root.classList.add("offline");
    if (unreached.hidden) unreached.textContent = "The relay has not answered since " + heard.toLocaleTimeString("en-GB") + ". Below is what it said then.";
    unreached.hidden = false;
    say();
  };
  for (const failed of ["htmx:sendError", "htmx:timeout"]) document.body.addEventListener(failed, lost);
  document.body.addEventListener("htmx:afterRequest", (e) => {
    if (!e.detail.xhr || !e.detail.xhr.status) return;
    heard = new Date();
    root.classList.remove("offline");
    unreached.hidden = true;
  });

  // Screen readers announce the headline when it changes, and not with each update.
  const headline = () => (unreached.hidden ? "" : unreached.textContent + " ") + all("#live .headline h1, #live .headline .first, #old").map((e) => e.id === "old" ? "Old data." : e.textContent).join(" ");
  let told = "";
  const say = () => {
    const now = headline();
    if (now !== told) $("#said").textContent = told = now;
  };

  // Light and dark.
  const themeSwitch = $("#theme-switch");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const switchTheme = () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage may be off */ }
    draw(true);
  };
  themeSwitch.hidden = false;
  themeSwitch.addEventListener("click", switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));

  // Charts.
  const charts = new Map();
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const short = (n) => n >= 1e6 ? n / 1e6 + "M" : n >= 1e4 ? n / 1e3 + "k" : String(+n.toPrecision(3));
  const seconds = (n) => n >= 60 ? +(n / 60).toPrecision(3) + " min" : n < 1 ? +(n * 1000).toPrecision(3) + " ms" : +n.toPrecision(3) + " s";
  const twoDigits = (n) => String(n).padStart(2, "0");
  const clock = (t) => { const d = new Date(t * 1000); return twoDigits(d.getHours()) + ":" + twoDigits(d.getMinutes()); };
  const day = (t) => new Date(t * 1000).toLocaleDateString("en", { month: "short", day: "numeric" });
  const quantiles = [["p50", "--accent"], ["p95", "--p95"], ["p99", "--p99"]];
  const kinds = {
    delivered: { of: ["delivered"], lines: [["Delivered", "--good", true]], format: short, none: "Nothing was delivered" },
    others: { of: ["retried", "failed", "probes"], lines: [["Retried", "--odd"], ["Failed", "--bad"], ["Held", "--p95"]], format: short, none: "None" },
    latency: { of: ["latency_p50", "latency_p95", "latency_p99"], lines: quantiles, format: seconds, log: true, none: "Nothing was delivered" },
    response: { of: ["p50", "p95", "p99"], lines: quantiles, format: seconds, log: true, none: "Nothing was delivered" },
    backlog: { of: ["backlog"], lines: [["Backlog", "--accent", true]], format: short, none: "Nothing waited" },
  };
  // A line through one point cannot be seen: such points are dots.
  const alone = (u, i) => {
    const y = u.data[i];
    return y.flatMap((v, at) => v != null && y[at - 1] == null && y[at + 1] == null ? [at] : []);
  };
  const bounds = (chart) => (u, low, high) => {
    if (!chart.kind.log) return [0, Math.max(high || 0, 1) * 1.1];
    return [10 ** Math.floor(Math.log10(low || 0.001)), 10 ** Math.ceil(Math.log10((high || 0.01) * 1.001))];
  };
  // Lines of a log scale at 1, 2 and 5 of each decade.
  const decades = (u, axis, low, high) => {
    const all = [];
    for (let d = 10 ** Math.floor(Math.log10(low)); d <= high * 1.001; d *= 10) all.push(...[d, 2 * d, 5 * d].filter((n) => n >= low * 0.999 && n <= high * 1.001));
    return all.length > 8 ? all.filter((n) => Math.abs(Math.log10(n) - Math.round(Math.log10(n))) < 1e-6) : all;
  };
  const make = (box, chart, data) => {
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const kind = chart.kind;
    chart.plot = new uPlot({
      width: box.clientWidth, height: 180, padding: [8, 20, 0, 0],
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true, markers: { dash: (u, i) => ["solid", "solid", "dashed", "dotted"][i] } },
      scales: { x: { range: () => chart.range }, y: { distr: kind.log ? 3 : 1, range: bounds(chart) } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, gap: 8, space: 52, values: (u, ticks) => ticks.map(chart.range[1] - chart.range[0] > 2 * 86400 ? day : clock) },
        { ...axis, size: 56, space: 28, incrs: kind.log ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6],
          splits: kind.log ? decades : undefined, filter: kind.log ? (u, ticks) => ticks : undefined, values: (u, ticks) => ticks.map((n) => kind.format(n)) },
      ],
      series: [{ label: "Time", value: (u, t) => t == null ? "" : day(t) + " " + clock(t) }, ...kind.lines.map(([label, name, filled], i) => ({
        label, stroke: color(name), width: 1.5, dash: [undefined, [7, 4], [2, 3]][i], points: { show: true, size: 5, fill: color(name), filter: alone }, spanGaps: false,
        fill: filled ? color(name) + "1f" : undefined, value: (u, v) => v == null ? "" : kind.format(v),
      }))],
    }, data, box);
  };
  const draw = (again) => {
    const source = $("template#series");
    if (!window.uPlot) return;
    const seen = new Set();
    const s = source && JSON.parse(source.content.textContent);
    for (const figure of all("figure.chart")) {
      const box = $(".plot", figure), kind = kinds[figure.dataset.kind];
      const lines = kind.of.map((name) => s[name]);
      const data = [s.times, ...lines];
      const something = lines.some((line) => line.some((v) => v > 0));
      seen.add(box);
      const old = charts.get(box);
      if (old && old.plot && something && !again) {
        old.range = [s.from, s.to];
        old.plot.setData(data);
        continue;
      }
      if (old && !old.plot && !something) continue;
      if (old && old.plot) old.plot.destroy();
      box.textContent = something ? "" : kind.none + ".";
      box.classList.toggle("none", !something);
      const chart = { kind, range: [s.from, s.to] };
      if (something) make(box, chart, data);
      charts.set(box, chart);
    }
    for (const [box, chart] of charts) if (!seen.has(box)) { if (chart.plot) chart.plot.destroy(); charts.delete(box); }
  };
  addEventListener("resize", () => { for (const [box, chart] of charts) if (chart.plot) chart.plot.setSize({ width: box.clientWidth, height: 180 }); });

  // What each new content needs: at once, or what is shown by scripts alone would blink with each update.
  const countChosen = () => {
    const n = all("td.check input:checked").length;
    for (const button of all("button[data-selected]")) {
      button.disabled = n === 0;
      button.textContent = button.dataset.selected.replace("%", n ? n + " " : "");
    }
  };
  const prepare = () => {
    countChosen();
    for (const button of all("button.copy")) button.hidden = !navigator.clipboard;
    const every = $("#check-all");
    if (every) every.hidden = false;
  };
  document.addEventListener("click", (e) => {
    const button = e.target.closest("button.copy");
    if (button) navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent).then(() => { button.textContent = "Copied"; });
  });
  document.addEventListener("change", (e) => {
    if (e.target.id === "check-all") for (const box of all("td.check input")) box.checked = e.target.checked;
    countChosen();
  });
  document.body.addEventListener("htmx:afterSwap", prepare);
  document.body.addEventListener("htmx:afterSettle", () => { draw(false); say(); });
  told = headline();
  prepare();
  draw(false);

  // Shortcuts.
  const dialog = $("#keys");
  const keysSwitch = $("#keys-switch");
  keysSwitch.hidden = false;
  keysSwitch.addEventListener("click", () => dialog.showModal());
  const places = { o: "/", e: "/events", a: "/alerts", r: "/relays", u: "/audit" };
  let going = 0;
  const step = (by) => {
    const links = all("table.list tbody tr").map((row) => $("a", row)).filter(Boolean);
    const at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    const to = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + by, 0), links.length - 1)];
    if (to) to.focus();
  };
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || dialog.open || e.target.matches("input:not([type=checkbox]), select, textarea")) return;
    if (Date.now() - going < 1500 && places[e.key]) { location.href = prefix + places[e.key]; going = 0; return; }
    switch (e.key) {
    case "g": going = Date.now(); break;
    case "j": step(1); break;
    case "k": step(-1); break;
    case "t": switchTheme(); break;
    case "p": setLive(!live); break;
    case "?": dialog.showModal(); break;
    case "/": e.preventDefault(); $("#find").focus(); break;
    }
  });
})();
