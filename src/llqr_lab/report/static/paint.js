// Drawing on a canvas: colours of the page, axes, curves with their areas.

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

/** The colours that the page has now; custom properties are resolved by an element that uses them. */
function palette() {
  const probe = document.body.appendChild(document.createElement("span"));
  const resolved = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = { lines: [...Array(8).keys()].map((number) => resolved(`line-${number}`)) };
  for (const name of ["ink", "quiet", "grid", "paper", "accent"]) found[name] = resolved(name);
  probe.remove();
  return found;
}

/** A canvas of as many pixels as the screen has, and its size on the page. */
function prepared(canvas, sharper = 1) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = Math.min(4, (window.devicePixelRatio || 1) * sharper);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return { pen, width, height };
}

/** One canvas onto another of as many pixels. */
function copied(from, to) {
  const pen = to.getContext("2d");
  pen.save();
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(from, 0, 0);
  pen.restore();
}

function paintAxes(pen, box, x, y, colours, small = false) {
  pen.lineWidth = 1;
  pen.fillStyle = colours.quiet;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const wanted = (pixels, each) => Math.max(2, Math.floor(pixels / each));
  for (const tick of y.ticks(wanted(box.bottom - box.top, small ? 22 : 44))) {
    const place = Math.round(y.at(tick)) + 0.5;
    pen.strokeStyle = colours.grid;
    line(pen, box.left, place, box.right, place);
    pen.fillText(told(tick, 4), box.left - 8, place);
  }
  pen.textBaseline = "top";
  let taken = -Infinity;
  for (const tick of x.ticks(wanted(box.right - box.left, 78))) {
    const place = Math.round(x.at(tick)) + 0.5;
    const text = told(tick, 4);
    const half = pen.measureText(text).width / 2;
    pen.strokeStyle = colours.grid;
    line(pen, place, box.bottom, place, box.bottom + 4);
    const middle = Math.min(Math.max(place, half), box.right + box.margin - half);
    if (middle - half < taken + 8) continue;
    pen.textAlign = "center";
    pen.fillText(text, middle, box.bottom + 8);
    taken = middle + half;
  }
  pen.strokeStyle = colours.quiet;
  line(pen, box.left, box.bottom + 0.5, box.right, box.bottom + 0.5);
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

/** The first and last place of a curve that show between two numbers, with one more on each side. */
function within(curve, low, high) {
  const last = curve.x.length - 1;
  let [from, to] = [0, last];
  while (from < last && curve.x[from + 1] < low) from++;
  while (to > 0 && curve.x[to - 1] > high) to--;
  return [from, Math.max(from, to)];
}

/** The area between two lines, in as many pieces as there are gaps; buckets are as wide as they are. */
function paintArea(pen, curve, lower, upper, x, y, [from, to], { edges = false, buckets = false } = {}) {
  const shown = (i) => !Number.isNaN(lower[i]) && !Number.isNaN(upper[i]) && (!y.log || upper[i] > 0) && (!x.log || curve.x[i] > 0);
  const foot = (i) => y.at(y.log && lower[i] <= 0 ? y.low : lower[i]);
  const begin = (i) => x.at(i > 0 ? curve.x[i - 1] : x.log ? curve.x[0] : Math.max(0, 2 * curve.x[0] - curve.x[1]) || 0);
  const alpha = pen.globalAlpha;
  for (let i = from; i <= to; i++) {
    if (!shown(i)) continue;
    let end = i;
    while (end < to && shown(end + 1)) end++;
    pen.beginPath();
    for (let k = i; k <= end; k++) {
      if (buckets) pen.lineTo(begin(k), y.at(upper[k]));
      pen.lineTo(x.at(curve.x[k]), y.at(upper[k]));
    }
    for (let k = end; k >= i; k--) {
      pen.lineTo(x.at(curve.x[k]), foot(k));
      if (buckets) pen.lineTo(begin(k), foot(k));
    }
    pen.closePath();
    pen.globalAlpha = alpha * 0.16;
    pen.fill();
    if (edges) {
      pen.globalAlpha = alpha * 0.45;
      pen.lineWidth = 0.75;
      pen.stroke();
    }
    i = end;
  }
  pen.globalAlpha = alpha;
}

function paintCurve(pen, curve, x, y, colours, weight) {
  const range = within(curve, x.low, x.high);
  const [from, to] = range;
  pen.fillStyle = pen.strokeStyle = colours.lines[curve.style.colour];
  pen.setLineDash([]);
  if (curve.low) paintArea(pen, curve, curve.low, curve.high, x, y, range, { edges: curve.edges, buckets: curve.edges });
  if (curve.inner) paintArea(pen, curve, ...curve.inner, x, y, range);
  const shown = (i) => !Number.isNaN(curve.y[i]) && (!y.log || curve.y[i] > 0) && (!x.log || curve.x[i] > 0);
  pen.lineWidth = weight;
  pen.lineJoin = "round";
  pen.setLineDash(DASHES[curve.style.dash]);
  pen.beginPath();
  let drawing = false;
  for (let i = from; i <= to; i++) {
    if (!shown(i)) drawing = false;
    else if (drawing) pen.lineTo(x.at(curve.x[i]), y.at(curve.y[i]));
    else {
      pen.moveTo(x.at(curve.x[i]), y.at(curve.y[i]));
      drawing = true;
    }
  }
  pen.stroke();
  pen.setLineDash([]);
  if (curve.style.marker === null) return;
  // markers at places of their own for each curve, so that lines that coincide can be told apart; single points always
  const gap = Math.max(24, Math.abs(x.end - x.start) / 7);
  let next = x.start + ((curve.style.marker * 0.37 + curve.style.colour * 0.23) % 1) * gap * 0.6;
  for (let i = from; i <= to; i++) {
    if (!shown(i)) continue;
    const place = x.at(curve.x[i]);
    const alone = !(i > from && shown(i - 1)) && !(i < to && shown(i + 1));
    const ends = i === to && curve.cut && i === curve.x.length - 1;
    if (place < x.start - 1 || place > x.end + 1 || (place < next && !alone && !ends)) continue;
    marker(pen, ends ? 5 : curve.style.marker, place, y.at(curve.y[i]), ends ? 5 : 3.5);
    while (next <= place) next += gap;
  }
}

/** A disc, square, triangle, diamond, ring, or (5) a cross for a run that didn't come to its end. */
function marker(pen, kind, x, y, size) {
  pen.beginPath();
  if (kind === 0 || kind === 4) pen.arc(x, y, size, 0, 2 * Math.PI);
  else if (kind === 1) pen.rect(x - size, y - size, 2 * size, 2 * size);
  else if (kind === 2) polygon(pen, [[x, y - size * 1.2], [x + size * 1.1, y + size * 0.9], [x - size * 1.1, y + size * 0.9]]);
  else if (kind === 3) polygon(pen, [[x, y - size * 1.3], [x + size * 1.3, y], [x, y + size * 1.3], [x - size * 1.3, y]]);
  else {
    pen.moveTo(x - size, y - size);
    pen.lineTo(x + size, y + size);
    pen.moveTo(x + size, y - size);
    pen.lineTo(x - size, y + size);
  }
  pen.lineWidth = 1.5;
  if (kind > 3) pen.stroke();
  else pen.fill();
}

function polygon(pen, corners) {
  corners.forEach(([x, y]) => pen.lineTo(x, y));
  pen.closePath();
}
