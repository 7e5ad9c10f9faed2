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
  const choosing = () => $("#live input[type=checkbox]:checked") || $("#live details[open]:not(.more)");
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
  document.body.addEventListener("htmx:sendError", () => root.classList.add("offline"));
  document.body.addEventListener("htmx:afterRequest", (e) => { if (e.detail.xhr && e.detail.xhr.status) root.classList.remove("offline"); });

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
  const seconds = (n) => n === 0 ? "0" : n < 1 ? +(n * 1000).toPrecision(3) + " ms" : +n.toPrecision(3) + " s";
  const clock = (t) => new Date(t * 1000).toTimeString().slice(0, 5);
  const kinds = {
    rates: (s) => ({ data: [s.times, s.delivered, s.retried, s.failed], lines: [["Delivered", "--good", true], ["Retried", "--odd"], ["Failed", "--bad"]], format: short, least: 6 }),
    latency: (s) => ({ data: [s.times, s.latency_p50, s.latency_p95, s.latency_p99], lines: [["p50", "--accent"], ["p95", "--p95"], ["p99", "--p99"]], format: seconds, least: 0.01 }),
    response: (s) => ({ data: [s.times, s.p50, s.p95, s.p99], lines: [["p50", "--accent"], ["p95", "--p95"], ["p99", "--p99"]], format: seconds, least: 0.01 }),
  };
  const read = (figure) => {
    const s = JSON.parse($("template.series", figure).content.textContent);
    const shown = kinds[figure.dataset.kind](s);
    // At least ten minutes wide, so that a relay that has just started does not stretch a few points over everything.
    const now = s.times.length ? s.times[s.times.length - 1] : Math.floor(Date.now() / 1000);
    shown.from = Math.min(s.times.length ? s.times[0] : now, now - 600);
    shown.to = now;
    return shown;
  };
  const draw = (anew) => {
    if (!window.uPlot) return;
    const seen = new Set();
    for (const figure of all("figure.chart")) {
      const box = $(".plot", figure), shown = read(figure);
      seen.add(box);
      const old = charts.get(box);
      if (old && !anew) {
        old.least = shown.least;
        old.range = [shown.from, shown.to];
        old.plot.setData(shown.data);
        continue;
      }
      if (old) old.plot.destroy();
      box.textContent = "";
      const chart = { range: [shown.from, shown.to], least: shown.least };
      const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
      chart.plot = new uPlot({
        width: box.clientWidth, height: 180, padding: [8, 10, 0, 0],
        cursor: { y: false, points: { size: 6 } },
        legend: { live: true },
        scales: { x: { range: () => chart.range }, y: { range: (u, low, high) => [0, Math.max(high || 0, chart.least) * 1.1] } },
        axes: [{ ...axis, grid: { show: false }, size: 26, space: 48, values: (u, ticks) => ticks.map(clock) }, { ...axis, size: 56, space: 28, values: (u, ticks) => ticks.map(shown.format) }],
        series: [{ label: "Time" }, ...shown.lines.map(([label, name, filled]) => ({
          label, stroke: color(name), width: 1.5, points: { show: false }, spanGaps: false,
          fill: filled ? color(name) + "1f" : undefined, value: (u, v) => v == null ? "" : shown.format(v),
        }))],
      }, shown.data, box);
      charts.set(box, chart);
    }
    for (const [box, chart] of charts) if (!seen.has(box)) { chart.plot.destroy(); charts.delete(box); }
  };
  addEventListener("resize", () => { for (const [box, chart] of charts) chart.plot.setSize({ width: box.clientWidth, height: 180 }); });

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
  document.body.addEventListener("htmx:afterSettle", () => draw(false));
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
