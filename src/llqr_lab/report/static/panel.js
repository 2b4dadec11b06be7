// A chart with its controls and its legend.

const FILTER_FROM = 12;

class Panel {
  constructor(root, source) {
    Object.assign(this, { root, source });
    this.hidden = new Set();
    this.control = (name) => root.querySelector(`[data-control="${name}"]`);
    const find = (name) => root.querySelector(name);
    this.chart = new Chart(find("canvas"), find(".tip"), find("[data-live]"));
    this.entries = find("[data-entries]");
    this.filter = find("[data-filter]");
    root.hidden = false;
    this.offerWhatThereIs();
    this.logByDefault();
    this.listen();
    gestures(this.chart);
    this.update();
  }

  /** Choices that would change nothing aren't offered. */
  offerWhatThereIs() {
    const several = this.source.methods.some((method) => method.band);
    const timed = this.source.methods.some((method) => method.runs.some((run) => run.metrics.seconds));
    for (const label of this.root.querySelectorAll('[data-for="seeds"], [data-for="bands"]')) label.hidden = !several;
    this.control("along").querySelector('[value="seconds"]').disabled = !timed;
    if (!timed) this.control("along").closest("label").hidden = true;
  }

  logByDefault() {
    this.control("logy").checked = /loss|objective/.test(this.control("metric").value);
  }

  listen() {
    for (const input of this.root.querySelectorAll("[data-control]")) {
      input.addEventListener("change", () => {
        if (input.dataset.control === "metric") this.logByDefault();
        this.update(!["along", "logx", "view"].includes(input.dataset.control));
      });
    }
    for (const button of this.root.querySelectorAll("[data-zoom]")) {
      const actions = { in: () => this.chart.zoom(0.5), out: () => this.chart.zoom(2), reset: () => this.chart.reset() };
      button.addEventListener("click", actions[button.dataset.zoom]);
    }
    for (const button of this.root.querySelectorAll("[data-show]")) {
      button.addEventListener("click", () => this.showAll(button.dataset.show === "all"));
    }
    this.filter.addEventListener("input", () => {
      const wanted = this.filter.value.toLowerCase();
      for (const entry of this.entries.children) entry.hidden = !entry.textContent.toLowerCase().includes(wanted);
    });
  }

  get choice() {
    const values = ["metric", "along", "view", "middle", "band"].map((name) => [name, this.control(name).value]);
    return { ...Object.fromEntries(values), logx: this.control("logx").checked, logy: this.control("logy").checked };
  }

  /** Draw what is chosen, and list it. */
  update(keep = false) {
    this.curves = curvesOf(this.source, this.choice);
    for (const label of this.root.querySelectorAll('[data-for="bands"]')) {
      label.hidden = this.choice.view === "runs" || !this.source.methods.some((method) => method.band);
    }
    this.list();
    this.redraw(keep);
  }

  redraw(keep = true) {
    const shown = this.curves.filter((curve) => !this.hidden.has(curve.key));
    this.chart.show(shown, this.choice, keep);
    const { metric, along } = this.choice;
    const name = metric.replaceAll("_", " ");
    const unit = along === "step" ? "steps" : "seconds";
    this.chart.canvas.setAttribute("aria-label", `${name} along ${unit}: ${shown.length} of ${this.curves.length} curves shown`);
    this.root.querySelector("[data-caption]").textContent = this.caption(name, unit, shown);
  }

  /** What the lines and areas are. */
  caption(name, unit, shown) {
    const { logx, logy, middle, band } = this.choice;
    const axes = [logy && "log y", logx && "log x"].filter(Boolean).join(", ");
    const said = [`${name} along ${unit}${axes ? ` (${axes})` : ""}`];
    const over = shown.filter((curve) => curve.count);
    const edges = shown.some((curve) => curve.edges);
    if (over.length) {
      const area = { range: ", areas reach from the smallest to the largest of them", deviation: ", areas are ± one standard deviation", none: "" };
      said.push(`lines are the ${middle} over seeds${area[band]}`);
    }
    if (over.some((curve) => curve.status)) said.push("a seed that isn’t finished counts as far as it came");
    if (edges) said.push(`${over.length && band !== "range" ? "areas with edges" : "areas"} hold all values of a bucket`);
    if (shown.some((curve) => curve.cut)) said.push("a cross ends what isn’t finished");
    if (logy && shown.some((curve) => curve.y.some((each) => each <= 0))) said.push("zero and below can’t be shown on a log axis, and isn’t");
    return `${said.join("; ")}.`;
  }

  showAll(all) {
    for (const curve of this.curves) this.hidden[all ? "delete" : "add"](curve.key);
    for (const box of this.entries.querySelectorAll("input")) box.checked = all;
    this.redraw();
  }

  list() {
    this.filter.hidden = this.curves.length < FILTER_FROM;
    this.root.querySelector(".all").hidden = this.curves.length < 3;
    this.entries.replaceChildren(...this.curves.map((curve) => this.entry(curve)));
  }

  entry(curve) {
    const entry = document.createElement("li");
    const label = entry.appendChild(document.createElement("label"));
    const box = label.appendChild(document.createElement("input"));
    box.type = "checkbox";
    box.checked = !this.hidden.has(curve.key);
    box.addEventListener("change", () => {
      this.hidden[box.checked ? "delete" : "add"](curve.key);
      this.redraw();
    });
    const name = document.createElement("span");
    name.textContent = curve.label;
    const more = [curve.detail, curve.status].filter(Boolean).join(", ");
    if (more) {
      const detail = document.createElement("span");
      detail.className = "quiet";
      detail.textContent = ` ${more}`;
      name.append(detail);
    }
    label.append(swatchOf(curve), name);
    const emphasise = (key) => () => {
      this.chart.emphasis = key;
      this.chart.redraw();
    };
    for (const [event, key] of [["mouseenter", curve.key], ["mouseleave", null], ["focusin", curve.key], ["focusout", null]]) {
      entry.addEventListener(event, emphasise(key));
    }
    return entry;
  }
}

/** A curve's line and marker, as they are drawn. */
function swatchOf({ style }) {
  const made = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const swatch = made("svg", { viewBox: "0 0 36 14", width: 36, height: 14, "aria-hidden": "true" });
  swatch.append(made("path", { d: "M1 7H35", class: `stroke-${style.colour}`, "stroke-dasharray": DASHES[style.dash].join(" ") }));
  const shapes = [
    "M14.5 7a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M14.5 3.5h7v7h-7z",
    "M18 2.8L21.9 10.2H14.1z",
    "M18 2.4L22.6 7L18 11.6L13.4 7z",
    "M14.5 7a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
  ];
  swatch.append(made("path", { d: shapes[style.marker], class: style.marker === 4 ? `stroke-${style.colour}` : `fill-${style.colour}` }));
  return swatch;
}
