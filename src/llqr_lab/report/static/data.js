// What the page carries: curves by experiment, their numbers as bytes that are read when they are drawn.

const experiments = JSON.parse(document.getElementById("payload").textContent);
const decoded = new WeakMap();

/** The numbers of an encoded column. */
function numbers(column) {
  if (!decoded.has(column)) decoded.set(column, decode(column));
  return decoded.get(column);
}

function decode(column) {
  if ("c" in column) return new Float64Array(column.n).fill(column.c);
  const bytes = bytesOf(column.d ?? column.f);
  return "d" in column ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const plain = atob(text);
  const bytes = new Uint8Array(plain.length);
  for (let i = 0; i < plain.length; i++) bytes[i] = plain.charCodeAt(i);
  return bytes;
}

/** Curves of a metric, as `choice` asks for them: {key, label, detail, status, cut, style, x, y, low, high, inner, count, edges}. */
function curvesOf(source, choice) {
  const together = choice.view === "methods";
  const found = [];
  source.methods.forEach((method, place) => {
    const entries = together && method.band ? [bandCurve(method, choice)] : method.runs.map((run) => runCurve(run, choice));
    entries.forEach((curve, number) => {
      if (!curve) return;
      const seeds = method.runs.length;
      const detail = together && method.band ? `${seeds} seeds` : seeds > 1 || !together ? `seed ${method.runs[number].seed}` : "";
      const runs = together ? method.runs : [method.runs[number]];
      const unfinished = runs.filter((run) => run.status !== "finished").map((run) => run.status);
      const { label } = method;
      const several = runs.length > 1 && unfinished.length ? `${unfinished.length} ` : "";
      const status = several + [...new Set(unfinished)].join(" or ");
      const cut = unfinished.length === runs.length;
      found.push({ ...curve, key: together ? `${place}` : `${place}.${number}`, label, detail, status, cut, style: styleOf(place, together ? 0 : number) });
    });
  });
  return found;
}

function styleOf(place, number) {
  return { colour: place % 8, dash: (place + Math.floor(place / 8) + number) % 4, marker: (place + number) % 5 };
}

/** What a table has by a name; a metric may be called "constructor". */
function own(table, name) {
  return Object.hasOwn(table, name) ? table[name] : null;
}

function runCurve(run, choice) {
  const metric = own(run.metrics, choice.metric);
  const along = choice.along === "step" ? run.step : run.metrics.seconds?.last;
  if (!metric || !along) return null;
  const edges = metric.low && run.width > 1;
  return joined(numbers(along), numbers(metric.last), {
    low: edges ? numbers(metric.low) : null,
    high: edges ? numbers(metric.high) : null,
    edges,
    width: run.width,
  });
}

function bandCurve(method, choice) {
  const { band } = method;
  const spread = own(band.metrics, choice.metric);
  const along = choice.along === "step" ? band.step : band.metrics.seconds?.mean;
  if (!spread || !along) return null;
  const middle = numbers(spread[choice.middle]);
  let low = null;
  let high = null;
  const edges = band.width > 1;
  if (choice.band === "range" || edges) [low, high] = [numbers(spread.low), numbers(spread.high)];
  let inner = null;
  if (choice.band === "deviation") {
    const deviation = numbers(spread.deviation);
    const mean = numbers(spread.mean);
    inner = [mean.map((each, i) => each - (deviation[i] || 0)), mean.map((each, i) => each + (deviation[i] || 0))];
    if (!edges) [[low, high], inner] = [inner, null];
  }
  return joined(numbers(along), middle, { low, high, inner, edges, width: band.width, count: numbers(spread.count) });
}

/** A curve without the places where nothing was measured; where it wasn't finite, y is NaN and the line is broken. */
function joined(x, y, more) {
  const places = new Uint32Array(y.length);
  let count = 0;
  for (let i = 0; i < y.length; i++) if (!Number.isNaN(y[i]) && Number.isFinite(x[i])) places[count++] = i;
  const pick = (values) => {
    if (!values) return null;
    const picked = new Float64Array(count);
    for (let i = 0; i < count; i++) picked[i] = Number.isFinite(values[places[i]]) ? values[places[i]] : NaN;
    return picked;
  };
  return {
    x: pick(x), y: pick(y), low: pick(more.low), high: pick(more.high), inner: more.inner?.map(pick) ?? null,
    count: pick(more.count), edges: Boolean(more.edges), width: more.width,
  };
}
