// What a mouse, fingers and keys do to a chart.

function gestures(chart) {
  const { canvas } = chart;
  const fingers = new Map();
  let begun = null;
  let pinch = null;
  const placeOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const heightOf = (event) => event.clientY - canvas.getBoundingClientRect().top;
  const inside = (pixel) => Math.min(Math.max(pixel, chart.box.left), chart.box.right);
  const read = (event) => chart.point(chart.x.value(inside(placeOf(event))), heightOf(event));

  canvas.addEventListener("pointerdown", (event) => {
    if (!chart.x || event.button > 0) return;
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, placeOf(event));
    begun = { at: inside(placeOf(event)), touch: event.pointerType === "touch" };
    if (fingers.size === 2) {
      const [one, other] = [...fingers.values()].sort((a, b) => a - b);
      pinch = [chart.x.value(one), chart.x.value(other)];
    }
  });

  canvas.addEventListener("pointermove", (event) => {
    if (!chart.x) return;
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, placeOf(event));
    if (fingers.size === 2) {
      pinched();
    } else if (begun && begun.touch && chart.view) {
      const moved = placeOf(event) - begun.at;
      begun.at = placeOf(event);
      chart.move(-moved / (chart.box.right - chart.box.left));
    } else if (begun && !begun.touch) {
      chart.selection = [begun.at, inside(placeOf(event))].sort((a, b) => a - b);
      read(event);
    } else {
      read(event);
    }
  });

  /** The numbers that were under the two fingers stay under them. */
  function pinched() {
    const [one, other] = [...fingers.values()].sort((a, b) => a - b);
    if (other - one < 10) return;
    const inner = (value) => (chart.options.logx ? Math.log10(value) : value);
    const outer = (value) => (chart.options.logx ? 10 ** value : value);
    const per = (inner(pinch[1]) - inner(pinch[0])) / (other - one);
    const low = inner(pinch[0]) - (one - chart.box.left) * per;
    chart.look(outer(low), outer(low + (chart.box.right - chart.box.left) * per));
  }

  const ended = (event) => {
    fingers.delete(event.pointerId);
    if (fingers.size < 2) pinch = null;
    const { selection } = chart;
    chart.selection = null;
    if (selection && selection[1] - selection[0] > 5) {
      chart.look(chart.x.value(selection[0]), chart.x.value(selection[1]));
      chart.point(null);
    } else if (begun) chart.redraw(false);
    begun = null;
  };
  canvas.addEventListener("pointerup", ended);
  canvas.addEventListener("pointercancel", ended);
  canvas.addEventListener("pointerleave", () => begun || chart.point(null));
  canvas.addEventListener("blur", () => chart.point(null));
  canvas.addEventListener("dblclick", () => chart.reset());

  // the wheel scrolls the page until the chart was clicked; a pinch on a touchpad is a wheel with ctrl
  canvas.addEventListener("wheel", (event) => {
    if (!chart.x || !(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    chart.zoom(Math.exp(Math.min(Math.max(event.deltaY * lines, -200), 200) * (event.ctrlKey ? 0.01 : 0.002)), chart.x.value(inside(placeOf(event))));
  }, { passive: false });

  const keys = {
    ArrowLeft: (event) => (event.shiftKey ? chart.move(-0.25) : chart.step(-1)),
    ArrowRight: (event) => (event.shiftKey ? chart.move(0.25) : chart.step(1)),
    "+": () => chart.zoom(0.5, chart.cursor ?? undefined),
    "=": () => chart.zoom(0.5, chart.cursor ?? undefined),
    "-": () => chart.zoom(2, chart.cursor ?? undefined),
    0: () => chart.reset(),
    Escape: () => chart.point(null),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key](event);
  });
}
