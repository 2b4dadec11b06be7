// The curves, drawn by uPlot: a line a method (or a run), and around it the area from the smallest to the largest.
"use strict";
(() => {
  const experiments = JSON.parse(document.getElementById("payload").textContent);
  const DASHES = [[], [7, 4], [2, 3]];
  const HEIGHT = 360;

  /** A colour of the page as it is now, or with so much of it. */
  function colour(name, part = 1) {
    const probe = document.body.appendChild(document.createElement("span"));
    probe.style.color = part === 1 ? `var(--${name})` : `color-mix(in srgb, var(--${name}) ${100 * part}%, transparent)`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  /** What an axis reaches from and to, a little beyond the curves. */
  function range(low, high, log) {
    if (low === null) return [log ? 1 : 0, log ? 10 : 1];
    return log ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
  }

  class Panel {
    constructor(root) {
      this.root = root;
      this.metrics = experiments[root.dataset.experiment][root.dataset.kind];
      this.plot = root.querySelector(".plot");
      for (const input of root.querySelectorAll("[data-control]")) {
        input.addEventListener("change", () => {
          if (input.dataset.control === "metric") this.logByDefault();
          this.draw();
        });
      }
      root.hidden = false;
      this.logByDefault();
    }

    control(name) {
      return this.root.querySelector(`[data-control="${name}"]`);
    }

    get metric() {
      return this.metrics[this.control("metric").value];
    }

    logByDefault() {
      this.control("log").checked = /loss|objective/.test(this.metric.name);
    }

    /** The curves that are chosen, each with the place of its method. */
    curves() {
      const { methods } = this.metric;
      if (this.control("seeds").value === "together") return methods;
      return methods.flatMap(({ place, runs }) => runs.map((run) => ({ ...run, place })));
    }

    draw() {
      this.chart?.destroy();
      const along = this.control("along").value;
      const log = this.control("log").checked;
      const ok = (each) => (log && !(each > 0) ? null : each);
      const series = [{ label: along }];
      const bands = [];
      const tables = [];
      this.curves().forEach((curve, number) => {
        const x = curve[along].map((each, i) => [each, i]).filter(([each]) => each !== null);
        const pick = (name) => x.map(([, i]) => ok(curve[name][i]));
        tables.push([x.map(([each]) => each), pick("mean"), pick("high"), pick("low")]);
        const stroke = colour(`line-${curve.place % 8}`);
        series.push({ label: curve.label, stroke, width: 1.75, dash: DASHES[number % 3], spanGaps: true, points: { show: x.length === 1 } });
        const edge = { label: "", stroke: colour(`line-${curve.place % 8}`, 0.5), width: 0.75, spanGaps: true, points: { show: false } };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [series.length - 2, series.length - 1], fill: colour(`line-${curve.place % 8}`, 0.15) });
      });
      const axis = { stroke: colour("quiet"), grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule") } };
      const options = {
        width: this.plot.clientWidth,
        height: HEIGHT,
        scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: (chart, low, high) => range(low, high, log) } },
        axes: [axis, { ...axis, size: 64 }],
        series,
        bands,
        hooks: { setSeries: [(chart, place, how) => this.follow(chart, place, how)] },
      };
      this.chart = new uPlot(options, tables.length ? uPlot.join(tables) : [[]], this.plot);
      this.plot.querySelectorAll(".u-legend .u-series").forEach((row, place) => row.classList.toggle("area", place > 0 && place % 3 !== 1));
      this.plot.dataset.drawn = tables.length;
    }

    /** An area is shown and hidden with its line. */
    follow(chart, place, { show }) {
      if (show === undefined || place === null || place % 3 !== 1) return;
      for (const other of [place + 1, place + 2]) chart.setSeries(other, { show });
    }
  }

  const panels = [...document.querySelectorAll(".panel")].map((root) => new Panel(root));
  const redraw = () => panels.forEach((panel) => panel.draw());
  redraw();
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
  document.documentElement.dataset.ready = "yes";
})();
