// Draws each plot of the page from the JSON in front of it. Drag to zoom, double-click to zoom out.
"use strict";
(() => {
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shown = [];

  function number(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
    return String(+value.toPrecision(4));
  }

  function around(low, high) {
    if (low !== high || low == null) return uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true);
    const room = Math.abs(low) * 0.1 || 1;  // a constant curve is in the middle
    return [low - room, high + room];
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
             { ...axis, size: 56, values: (u, ticks) => ticks.map(number) }],
      series: [{ label: plot.x_name, value: (u, value) => number(value) }, ...series],
    }, [plot.x, ...plot.series.map(each => each.values)], card);
  }

  for (const source of document.querySelectorAll("script.plot")) {
    const entry = { plot: JSON.parse(source.textContent), card: source.nextElementSibling };
    shown.push(entry);
    draw(entry);
  }
  const redraw = () => shown.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 150); });
})();
