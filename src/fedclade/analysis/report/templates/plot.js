// A frame with axes, zoom, and values that can be read with mouse, touch or arrow keys. charts.js draws the contents.

const MARGIN = { top: 10, right: 14, bottom: 44, left: 66 };

function ticks([low, high], wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const first = Math.ceil(low / step - 1e-9);
  const marks = [];
  for (let at = first; at * step <= high + step * 1e-9; at += 1) marks.push(Number((at * step).toPrecision(12)));
  return marks;
}

// Add a margin, so that the range is not empty if all values are equal.
function padded([low, high], share = 0.04) {
  const room = (high - low) * share || Math.abs(low) * 0.05 || 1;
  return [low - room, high + room];
}

const plotWidth = (id) => Math.max(280, Math.min(byId(`${id}-plot`).clientWidth || 640, 1200));

/* A plot in the element `${id}-plot`. x and y: { label, domain, ticks: false for none, whole: true for integers }.
   inside(frame) draws and returns the values that can be read: [{ x, y, text, group }] in pixels. nearest: "x", "y" or "xy"; left, top, bottom: other margins. */
function plot(id, { label, x, y, height = 280, zoom = false, nearest = "xy", onpick = null, left = MARGIN.left, top = MARGIN.top, bottom = MARGIN.bottom }, inside) {
  const holder = byId(`${id}-plot`);
  const width = plotWidth(id);
  const shown = (zoom && chosen.zoom[id]) || { x: x.domain, y: y.domain };
  const area = { left, right: width - MARGIN.right, top, bottom: height - bottom };
  const scale =
    ([low, high], from, to) =>
    (value) =>
      from + ((value - low) / (high - low || 1)) * (to - from);
  const frame = { id, area, x: scale(shown.x, area.left, area.right), y: scale(shown.y, area.bottom, area.top), shown };

  const root = draw("svg", { id: `${id}-svg`, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": label });
  root.append(axes(frame, x, y));
  const clip = `${id}-clip`;
  root.append(
    draw(
      "clipPath",
      { id: clip },
      draw("rect", { x: area.left - 6, y: area.top - 6, width: area.right - area.left + 12, height: area.bottom - area.top + 12 }),
    ),
  );
  frame.root = root;
  frame.body = draw("g", { "clip-path": `url(#${clip})` });
  root.append(frame.body);
  const targets = inside(frame) ?? [];
  holder.replaceChildren(root);
  readable(
    root,
    frame,
    targets.filter((target) => within(target, area)),
    nearest,
    onpick,
  );
  if (zoom) zoomable(holder, root, frame, { x: x.domain, y: y.domain });
  return frame;
}

const within = (target, area) => target.x >= area.left - 6 && target.x <= area.right + 6 && target.y >= area.top - 6 && target.y <= area.bottom + 6;

function axes({ area, x: toX, y: toY, shown }, x, y) {
  const group = draw("g", { "aria-hidden": "true" });
  const whole = (axis, marks) => (axis.whole ? marks.filter(Number.isInteger) : marks);
  if (y.ticks !== false) {
    for (const mark of whole(y, ticks(shown.y, 5))) {
      group.append(draw("line", { class: "grid", x1: area.left, x2: area.right, y1: toY(mark), y2: toY(mark) }));
      group.append(draw("text", { x: area.left - 7, y: toY(mark) + 4, "text-anchor": "end" }, number(mark)));
    }
  }
  if (x.ticks !== false) {
    for (const mark of whole(x, ticks(shown.x, Math.min(8, (area.right - area.left) / 70)))) {
      group.append(draw("text", { x: toX(mark), y: area.bottom + 18, "text-anchor": "middle" }, number(mark)));
    }
  }
  group.append(draw("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
  const middle = (area.top + area.bottom) / 2;
  if (x.label) group.append(draw("text", { x: labelCenter(x.label, area), y: area.bottom + 38, "text-anchor": "middle" }, x.label));
  if (y.label) group.append(draw("text", { x: 0, y: 0, "text-anchor": "middle", transform: `translate(13,${middle}) rotate(-90)` }, y.label));
  return group;
}

// The middle of the axis; for a long label as near to it as the drawing allows.
function labelCenter(label, { left, right }) {
  const half = 3.6 * label.length;
  return Math.max(half, Math.min((left + right) / 2, right + MARGIN.right - half));
}

// The pointer's position in pixels of the drawing, which the browser may scale.
function position(root, event) {
  const box = root.getBoundingClientRect();
  const [, , width, height] = root.getAttribute("viewBox").split(" ").map(Number);
  return {
    x: ((event.clientX - box.left) / box.width) * width,
    y: ((event.clientY - box.top) / box.height) * height,
    ratio: box.width / width,
    box,
  };
}

function readable(root, frame, targets, nearest, onpick) {
  if (!targets.length) return;
  const ring =
    nearest === "x"
      ? draw("line", { class: "cursor", y1: frame.area.top, y2: frame.area.bottom, visibility: "hidden" })
      : draw("circle", { class: "ring", r: 8, visibility: "hidden" });
  root.append(ring);
  let at = null;

  function point(next, announce) {
    at = next;
    const target = targets[at];
    ring.setAttribute("visibility", "visible");
    for (const [name, value] of Object.entries(nearest === "x" ? { x1: target.x, x2: target.x } : { cx: target.x, cy: target.y }))
      ring.setAttribute(name, value);
    const { box, ratio } = position(root, { clientX: 0, clientY: 0 });
    tip.show(box.left + target.x * ratio, box.top + target.y * ratio, target.text);
    if (announce) tip.announce(target.text);
  }

  function leave() {
    ring.setAttribute("visibility", "hidden");
    tip.hide();
  }

  root.addEventListener("pointermove", (event) => {
    const { x, y } = position(root, event);
    const far = (target) =>
      nearest === "x" ? Math.abs(target.x - x) : nearest === "y" ? Math.abs(target.y - y) : Math.hypot(target.x - x, target.y - y);
    let best = 0;
    for (let next = 1; next < targets.length; next += 1) if (far(targets[next]) < far(targets[best])) best = next;
    if (far(targets[best]) < (nearest === "xy" ? 30 : Infinity)) point(best, false);
    else leave();
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      const next = at === null ? (step > 0 ? 0 : targets.length - 1) : at + step;
      point(Math.max(0, Math.min(targets.length - 1, next)), true);
    } else if (event.key === "Escape") leave();
    else if (event.key === "Enter" && at !== null && onpick) onpick(targets[at]);
  });
  if (onpick) root.addEventListener("click", () => at !== null && ring.getAttribute("visibility") === "visible" && onpick(targets[at]));
}

function zoomable(holder, root, frame, full) {
  const set = (domain) => change({ zoom: { ...chosen.zoom, [frame.id]: domain } });
  const inverse =
    ([low, high], from, to) =>
    (pixel) =>
      low + ((pixel - from) / (to - from)) * (high - low);
  const toX = inverse(frame.shown.x, frame.area.left, frame.area.right);
  const toY = inverse(frame.shown.y, frame.area.bottom, frame.area.top);
  const scaled = ([low, high], factor) => [(low + high) / 2 - ((high - low) / 2) * factor, (low + high) / 2 + ((high - low) / 2) * factor];
  const by = (factor) => () => set({ x: scaled(frame.shown.x, factor), y: scaled(frame.shown.y, factor) });
  const button = (name, text, onclick) => make("button", { type: "button", id: `${frame.id}-${name}`, onclick }, text);
  holder.append(
    make(
      "div",
      { class: "zoom" },
      button("in", "Zoom in", by(0.5)),
      button("out", "Zoom out", by(2)),
      button("whole", "Show all", () => set(full)),
    ),
  );

  // Touch scrolls the page, so it zooms with the buttons only.
  let begin = null;
  const box = draw("rect", { class: "brush", visibility: "hidden" });
  root.append(box);
  const sides = (now) => [Math.min(begin.x, now.x), Math.max(begin.x, now.x), Math.min(begin.y, now.y), Math.max(begin.y, now.y)];
  root.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) begin = position(root, event);
  });
  root.addEventListener("pointermove", (event) => {
    if (!begin) return;
    const [left, right, top, bottom] = sides(position(root, event));
    for (const [name, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top, visibility: "visible" }))
      box.setAttribute(name, value);
  });
  root.addEventListener("pointerup", (event) => {
    if (!begin) return;
    const [left, right, top, bottom] = sides(position(root, event));
    begin = null;
    box.setAttribute("visibility", "hidden");
    if (right - left > 8 && bottom - top > 8) set({ x: [toX(left), toX(right)], y: [toY(bottom), toY(top)] });
  });
  root.addEventListener("pointerleave", () => {
    begin = null;
    box.setAttribute("visibility", "hidden");
  });
}
