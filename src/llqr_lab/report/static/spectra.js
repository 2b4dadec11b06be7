// Spectra of U: a small chart a block, all on one scale.

class Spectra {
  constructor(root, runs) {
    Object.assign(this, { root, runs });
    this.grid = root.querySelector(".grid");
    this.choice = root.querySelector('[data-control="run"]');
    this.choice.addEventListener("change", () => this.update());
    root.hidden = false;
    this.update();
  }

  update() {
    const run = this.runs[Number(this.choice.value)];
    const step = numbers(run.step);
    this.charts = run.blocks.map((block) => ({ name: block.name, curve: fan(step, block.quantiles.map(numbers)) }));
    this.grid.replaceChildren(
      ...this.charts.map((chart) => {
        const figure = document.createElement("figure");
        const caption = figure.appendChild(document.createElement("figcaption"));
        const name = caption.appendChild(document.createElement("span"));
        name.textContent = chart.name;
        const end = caption.appendChild(document.createElement("span"));
        end.className = "quiet";
        const ends = chart.curve.quantiles.map((values) => values[values.length - 1]);
        end.textContent = ` ${told(ends[0], 3)} – ${told(ends[ends.length - 1], 3)}`;
        chart.canvas = figure.appendChild(document.createElement("canvas"));
        chart.canvas.setAttribute("role", "img");
        chart.canvas.setAttribute("aria-label", `Spectrum of ${chart.name}: at the end from ${told(ends[0], 3)} to ${told(ends[ends.length - 1], 3)}`);
        return figure;
      }),
    );
    this.redraw();
  }

  redraw() {
    if (this.seen) requestAnimationFrame(() => this.draw());
  }

  draw(sharper = 1) {
    const values = this.charts.flatMap(({ curve }) => curve.quantiles.flatMap((each) => [...each].filter(Number.isFinite)));
    if (!values.length) return;
    let [low, high] = [Infinity, -Infinity];
    for (const each of values) [low, high] = [Math.min(low, each), Math.max(high, each)];
    const log = low > 0;
    if (low === high) [low, high] = log ? [low / 2, low * 2] : [low - 1, low + 1];
    const colours = palette();
    for (const { canvas, curve } of this.charts) {
      const { pen, width, height } = prepared(canvas, sharper);
      pen.font = pen.font.replace("12px", "11px");
      const box = { left: 44, right: width - 8, top: 6, bottom: height - 22, margin: 8 };
      const last = curve.x[curve.x.length - 1];
      const x = new Scale(Math.min(curve.x[0], last - 1), last, box.left, box.right, false);
      const y = new Scale(low, high, box.bottom, box.top, log);
      paintAxes(pen, box, x, y, colours, true);
      pen.fillStyle = pen.strokeStyle = colours.lines[1];
      const range = [0, curve.x.length - 1];
      const count = curve.quantiles.length;
      for (let i = 0; i < Math.floor(count / 2); i++) paintArea(pen, curve, curve.quantiles[i], curve.quantiles[count - 1 - i], x, y, range, { edges: i === 0 });
      paintCurve(pen, { ...curve, y: curve.quantiles[count >> 1], style: { colour: 1, dash: 0, marker: null } }, x, y, colours, 1.5);
    }
    this.grid.dataset.drawn = this.charts.length;
  }
}

function fan(x, quantiles) {
  return { x: Float64Array.from(x), quantiles: quantiles.map((each) => Float64Array.from(each, (value) => (Number.isFinite(value) ? value : NaN))) };
}
