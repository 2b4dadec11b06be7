// A chart: curves, the part of them that is looked at, and the values under the pointer.

const SHOWN_VALUES = 12;

class Chart {
  constructor(canvas, tip, live) {
    Object.assign(this, { canvas, tip, live });
    this.curves = [];
    this.view = null; // the numbers along x between which is looked, or null for all
    this.cursor = null;
    this.emphasis = null;
    this.pending = false;
    this.layer = document.createElement("canvas");
  }

  /** Draw other curves; the part that is looked at stays where it was asked to. */
  show(curves, options, keep) {
    Object.assign(this, { curves, options });
    if (!keep) this.view = null;
    this.cursor = null;
    this.extent = this.extentOf(curves);
    this.redraw();
  }

  extentOf(curves) {
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of curves) {
      const first = this.options.logx ? x.find((each) => each > 0) : x[0];
      if (first < low) low = first;
      if (x[x.length - 1] > high) high = x[x.length - 1];
    }
    if (!(low <= high)) return this.options.logx ? [1, 10] : [0, 1];
    if (this.options.logx) return low === high ? [low / 2, low * 2] : [low, high];
    return [0, high || 1]; // training begins at zero
  }

  /** Soon, and once, however often it is asked for; nothing is drawn that hasn't been looked at. */
  redraw(curves = true) {
    this.stale ||= curves;
    if (this.pending || !this.seen) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw(sharper = 1) {
    const { pen, width, height } = prepared(this.canvas, sharper);
    if (!width || !this.options) return;
    const colours = palette();
    if (this.stale || sharper !== 1) this.drawCurves(pen, width, height, colours);
    else copied(this.layer, this.canvas);
    pen.save();
    this.clip(pen);
    if (this.selection) this.paintSelection(pen, colours);
    if (this.cursor !== null) this.paintCursor(pen, colours);
    pen.restore();
  }

  /** The axes and curves, kept so that a pointer that moves doesn't draw them again. */
  drawCurves(pen, width, height, colours) {
    const [low, high] = this.view ?? this.extent;
    const [bottom, top] = this.heights(low, high);
    const margin = 14;
    const rough = new Scale(bottom, top, 0, 1, this.options.logy).ticks(6);
    const left = Math.ceil(Math.max(24, ...rough.map((tick) => pen.measureText(told(tick, 4)).width))) + 12;
    this.box = { left, right: width - margin, top: 10, bottom: height - 28, margin };
    this.x = new Scale(low, high, this.box.left, this.box.right, this.options.logx);
    this.y = new Scale(bottom, top, this.box.bottom, this.box.top, this.options.logy);
    paintAxes(pen, this.box, this.x, this.y, colours);
    pen.save();
    this.clip(pen);
    const ordered = [...this.curves].sort((a, b) => (a.key === this.emphasis) - (b.key === this.emphasis));
    const weight = this.curves.length > 40 ? 1 : 1.75;
    for (const curve of ordered) {
      const chosen = curve.key === this.emphasis;
      pen.globalAlpha = this.emphasis === null || chosen ? 1 : 0.15;
      paintCurve(pen, curve, this.x, this.y, colours, chosen ? weight + 1 : weight);
    }
    pen.restore();
    Object.assign(this.canvas.dataset, { drawn: this.curves.length, from: low, to: high, bottom, top });
    Object.assign(this.layer, { width: this.canvas.width, height: this.canvas.height });
    copied(this.canvas, this.layer);
    this.stale = false;
  }

  clip(pen) {
    pen.beginPath();
    pen.rect(this.box.left, 0, this.box.right - this.box.left + 6, this.box.bottom + 1);
    pen.clip();
  }

  /** What the curves reach from and to where it is looked. */
  heights(from, to) {
    let [low, high] = [Infinity, -Infinity];
    const { logy } = this.options;
    for (const curve of this.curves) {
      const [first, last] = within(curve, from, to);
      const parts = [curve.y, curve.low, curve.high, ...(curve.inner ?? [])];
      for (let i = first; i <= last; i++) {
        if (curve.x[i] < from || curve.x[i] > to) continue;
        for (const part of parts) {
          if (!part || Number.isNaN(part[i]) || (logy && part[i] <= 0)) continue;
          if (part[i] < low) low = part[i];
          if (part[i] > high) high = part[i];
        }
      }
    }
    if (!(low <= high)) return logy ? [1, 10] : [0, 1];
    if (low === high) return logy ? [low / 1.5, low * 1.5] : [low - (Math.abs(low) || 1) / 10, low + (Math.abs(low) || 1) / 10];
    if (!logy) return [low - (high - low) * 0.04, high + (high - low) * 0.04];
    const more = (high / low) ** 0.04;
    return [low / more, high * more];
  }

  /** Look at the numbers from low to high; all of them if there is nothing beyond. */
  look(low, high) {
    const [first, last] = this.extent;
    const smallest = (last - first) * 1e-6;
    [low, high] = [Math.max(low, first), Math.min(high, last)];
    if (!(high - low >= smallest)) return;
    this.view = low <= first && high >= last ? null : [low, high];
    this.redraw();
  }

  /** Closer by a factor, or away, around a number. */
  zoom(factor, around) {
    const [low, high] = this.view ?? this.extent;
    const scale = new Scale(low, high, 0, 1, this.options.logx);
    const middle = scale.at(Math.min(Math.max(around ?? scale.value(0.5), low), high));
    this.look(scale.value(middle - middle * factor), scale.value(middle + (1 - middle) * factor));
  }

  /** Aside by a part of what is looked at, as far as there is something. */
  move(part) {
    if (!this.view) return;
    const full = new Scale(...this.extent, 0, 1, this.options.logx);
    const [low, high] = this.view.map((each) => full.at(each));
    const by = Math.min(Math.max(part * (high - low), -low), 1 - high);
    this.look(full.value(low + by), full.value(high + by));
  }

  reset() {
    this.view = null;
    this.redraw();
  }

  paintSelection(pen, colours) {
    const [from, to] = this.selection;
    pen.fillStyle = pen.strokeStyle = colours.accent;
    pen.globalAlpha = 0.14;
    pen.fillRect(from, this.box.top, to - from, this.box.bottom - this.box.top);
    pen.globalAlpha = 0.7;
    pen.lineWidth = 1;
    line(pen, from, this.box.top, from, this.box.bottom);
    line(pen, to, this.box.top, to, this.box.bottom);
    pen.globalAlpha = 1;
  }

  paintCursor(pen, colours) {
    const place = this.x.at(this.cursor);
    pen.strokeStyle = colours.quiet;
    pen.lineWidth = 1;
    line(pen, place, this.box.top, place, this.box.bottom);
    for (const { curve, i } of this.values()) {
      pen.fillStyle = pen.strokeStyle = colours.lines[curve.style.colour];
      const height = this.y.at(curve.y[i]);
      if (Number.isFinite(height)) marker(pen, 0, this.x.at(curve.x[i]), height, 4);
    }
  }

  /** The points of the curves that are nearest to the cursor, those that reach there. */
  values() {
    const reach = Math.abs(this.x.value(this.x.start + 12) - this.x.value(this.x.start));
    const found = [];
    for (const curve of this.curves) {
      if (!curve.x.length) continue;
      const i = nearest(curve.x, this.cursor);
      const [first, last] = [curve.x[0], curve.x[curve.x.length - 1]];
      if (this.cursor < first - reach || this.cursor > last + reach || Number.isNaN(curve.y[i])) continue;
      found.push({ curve, i });
    }
    return found;
  }

  /** Read values at the point nearest to a number along x; those nearest in height, where a height is given and there are many. */
  point(value, height, spoken = false) {
    if (!this.x) return;
    this.cursor = value === null ? null : this.snapped(value);
    if (value === null) {
      this.tip.hidden = true;
      this.redraw(false);
      return;
    }
    const found = this.values();
    const away = ({ curve, i }) => Math.abs(this.y.at(curve.y[i]) - height);
    if (found.length > SHOWN_VALUES && height !== undefined) found.sort((a, b) => away(a) - away(b));
    const rows = found.slice(0, SHOWN_VALUES).sort((a, b) => b.curve.y[b.i] - a.curve.y[a.i]);
    fillTip(this.tip, this.options.along, this.cursor, rows, found.length - rows.length);
    this.placeTip();
    if (spoken) {
      const said = rows.slice(0, 6).map(({ curve, i }) => `${curve.label} ${told(curve.y[i])}`);
      this.live.textContent = `${this.options.along} ${told(this.cursor)}: ${said.join(", ") || "nothing"}`;
    }
    this.redraw(false);
  }

  /** Where a curve has a point, as near as there is one in sight. */
  snapped(value) {
    const [low, high] = this.view ?? this.extent;
    let found = value;
    let least = Infinity;
    for (const { x } of this.curves) {
      if (!x.length) continue;
      const near = x[nearest(x, value)];
      if (near >= low && near <= high && Math.abs(near - value) < least) [found, least] = [near, Math.abs(near - value)];
    }
    return found;
  }

  placeTip() {
    this.tip.hidden = false;
    const place = this.x.at(this.cursor);
    const { width, height } = this.tip.getBoundingClientRect();
    const left = place + 14 + width < this.box.right ? place + 14 : Math.max(0, place - 14 - width);
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(0, (this.box.bottom - height) / 4))}px)`;
  }

  /** The cursor at the next point, or at the one before. */
  step(by) {
    const curve = this.curves.find((each) => each.key === this.emphasis) ?? this.curves[0];
    if (!curve || !curve.x.length) return;
    const [low, high] = this.view ?? this.extent;
    const at = this.cursor === null ? (by > 0 ? nearest(curve.x, low) - 1 : nearest(curve.x, high) + 1) : nearest(curve.x, this.cursor);
    const next = curve.x[Math.min(Math.max(at + by, 0), curve.x.length - 1)];
    this.point(Math.min(Math.max(next, low), high), undefined, true);
  }
}

function fillTip(tip, along, value, rows, more) {
  const table = document.createElement("table");
  for (const { curve, i } of rows) {
    const row = table.insertRow();
    const swatch = row.insertCell();
    swatch.append(swatchOf(curve));
    const name = document.createElement("th");
    name.textContent = curve.label + (curve.detail && !curve.count ? `, ${curve.detail}` : "");
    row.append(name);
    row.insertCell().textContent = told(curve.y[i]);
    const [low, high] = curve.inner ?? [curve.low, curve.high];
    const range = low && !(low[i] === high[i]) && !Number.isNaN(low[i]) ? `${told(low[i], 4)} – ${told(high[i], 4)}` : "";
    row.insertCell().textContent = range + (curve.count ? `${range ? ", " : ""}${curve.count[i]} seeds` : "");
  }
  const where = document.createElement("div");
  where.className = "where";
  where.textContent = `${along} ${told(value, 6)}`;
  const rest = document.createElement("div");
  rest.textContent = rows.length === 0 ? "nothing measured here" : more > 0 ? `and ${more} more` : "";
  tip.replaceChildren(where, table, rest);
}
