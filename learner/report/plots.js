// Draws each plot of the page from the JSON in front of it, in light and dark. Drag to zoom, double-click to zoom out.
"use strict";
(() => {
  const root = document.documentElement, shown = [], prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme || (prefersDark.matches ? "dark" : "light")) === "dark";

  function style(name) {  // a canvas needs the colour itself: the variable holds one for light and one for dark
    root.style.outlineColor = `var(${name})`;
    return getComputedStyle(root).outlineColor;
  }

  function number(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
    return String(+value.toPrecision(4));
  }

  function labels(ticks) {  // as many digits as keep neighbours apart
    const texts = ticks.map(number), step = Math.abs(ticks[1] - ticks[0]);
    return new Set(texts).size === texts.length ? texts : ticks.map(tick => tick.toFixed(Math.max(0, Math.ceil(-Math.log10(step)))));
  }

  function around(low, high) {
    if (low !== high || low == null) return uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true);
    const room = Math.abs(low) * 0.1 || 1;  // a constant curve is in the middle
    return [low - room, high + room];
  }

  function shade(u, [low, high]) {
    const { left, top, width, height } = u.bbox, bottom = top + height;
    const at = (value, edge) => value == null ? edge : Math.min(bottom, Math.max(top, u.valToPos(value, "y", true)));
    const upper = at(high, top);
    u.ctx.fillStyle = style("--band");
    u.ctx.fillRect(left, upper, width, at(low, bottom) - upper);
  }

  function line(series, colour) {
    const entry = { label: series.label, stroke: colour, width: 1.6, spanGaps: true, points: { show: false },
                    value: (plot, value) => number(value) };
    if (series.style === "faint") { entry.alpha = 0.3; entry.width = 1; }
    if (series.style === "dotted") entry.points = { show: true, size: 6, fill: colour };
    if (series.values.filter(value => value != null).length === 1) entry.points = { show: true, size: 6, fill: colour };
    return entry;
  }

  function draw({ plot, card }) {
    card.replaceChildren();
    card.classList.toggle("single", plot.series.length === 1);  // its title is its legend
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
    let colour = -1;  // a faint curve shares the colour of the next one, its moving mean
    const series = plot.series.map((each, i) => {
      if (i === 0 || plot.series[i - 1].style !== "faint") colour += 1;
      return line(each, style("--c" + colour % 6));
    });
    const whole = { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] };
    new uPlot({
      width: card.clientWidth, height: plot.is_wide ? 240 : 170,
      scales: {
        x: { time: false },
        y: { range: (u, low, high) => around(low, high) },
      },
      axes: [{ ...axis, size: 30, ...whole },
             { ...axis, size: 56, values: (u, ticks) => labels(ticks) }],
      series: [{ label: "step", value: (u, value) => number(value) }, ...series],
      hooks: { drawClear: plot.band ? [u => shade(u, plot.band)] : [] },
    }, [plot.x, ...plot.series.map(each => each.values)], card);
  }

  const button = document.getElementById("dark");
  function redraw() {
    if (button) button.textContent = isDark() ? "light" : "dark";
    shown.forEach(draw);
  }
  for (const source of document.querySelectorAll("script.plot"))
    shown.push({ plot: JSON.parse(source.textContent), card: source.nextElementSibling });
  redraw();
  window.sluicePlots = {  // for pages whose plots come later
    number,
    show(plot, card) { shown.push({ plot, card }); draw(shown.at(-1)); },
    forget() { shown.length = 0; },
  };
  button?.addEventListener("click", () => { root.style.colorScheme = isDark() ? "light" : "dark"; redraw(); });
  prefersDark.addEventListener("change", redraw);
  let timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 150); });
})();
