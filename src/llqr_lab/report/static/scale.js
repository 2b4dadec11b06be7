// From numbers to places on the canvas, and the ticks between.

class Scale {
  /** Numbers from low to high, to pixels from start to end. */
  constructor(low, high, start, end, log) {
    Object.assign(this, { low, high, start, end, log });
    this.from = this.inner(low);
    this.per = (end - start) / (this.inner(high) - this.from || 1);
  }

  inner(value) {
    return this.log ? Math.log10(value) : value;
  }

  at(value) {
    return this.start + (this.inner(value) - this.from) * this.per;
  }

  value(pixel) {
    const inner = this.from + (pixel - this.start) / this.per;
    return this.log ? 10 ** inner : inner;
  }

  ticks(count) {
    if (!this.log) return evenTicks(this.low, this.high, count);
    const decades = Math.log10(this.high / this.low);
    if (decades < 0.8) return evenTicks(this.low, this.high, count).filter((each) => each > 0);
    const steps = decades < 2.2 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / count));
    const found = [];
    for (let power = Math.floor(Math.log10(this.low)); power <= Math.log10(this.high); power++) {
      if (power % every) continue;
      for (const step of steps) found.push(step * 10 ** power);
    }
    return found.filter((each) => each >= this.low * 0.9999 && each <= this.high * 1.0001);
  }
}

function evenTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.9999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 100; i++) found.push(i * step);
  return found;
}

/** A number with so many digits that count. */
function told(value, digits = 5) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1))))).toLocaleString("en", { maximumFractionDigits: 12 });
}

/** The place in rising numbers that is nearest. */
function nearest(values, wanted) {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}
