// The page comes to life: charts when they are looked at, colours as they are chosen, everything for print.

const charts = new Map();
const seeing = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    seeing.unobserve(target);
    see(charts.get(target));
  }
}, { rootMargin: "400px" });

function see(chart) {
  chart.seen = true;
  chart.redraw();
}

for (const root of document.querySelectorAll(".panel")) {
  charts.set(root, new Panel(root, experiments[root.dataset.experiment][root.dataset.kind]).chart);
}
for (const root of document.querySelectorAll(".spectra")) {
  charts.set(root, new Spectra(root, experiments[root.dataset.experiment].spectra));
}
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => charts.get(target).redraw()));
for (const root of charts.keys()) {
  seeing.observe(root);
  resized.observe(root);
}

const redrawAll = () => charts.forEach((chart) => chart.redraw());
const themes = document.querySelector(".themes");
themes.hidden = false;

function choose(theme, kept) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const button of themes.children) button.setAttribute("aria-pressed", String(button.dataset.themeChoice === theme));
  if (kept) {
    try {
      localStorage.setItem("llqr-report-theme", theme);
    } catch {
      // no storage: the choice holds while the page is open
    }
  }
  redrawAll();
}

for (const button of themes.children) button.addEventListener("click", () => choose(button.dataset.themeChoice, true));
choose(document.documentElement.dataset.theme ?? "system", false);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

// on paper everything is open and drawn, finer than on the screen
let closed = [];
function print(on) {
  if (on && !closed.length) closed = [...document.querySelectorAll("details:not([open])")];
  for (const details of closed) details.open = on;
  if (!on) closed = [];
  charts.forEach((chart) => {
    chart.seen = true;
    chart.draw(on ? 2 : 1);
  });
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
matchMedia("print").addEventListener("change", (event) => print(event.matches));
document.documentElement.dataset.ready = "yes";
