// Time series, drawn by uPlot: lines and stacks, thresholds, marks, a legend that hides and shows.

import { element, styled } from "./elements.js";
import { clock, number, text, ticks } from "./format.js";

const SERIES_MAX = 100;
const PALETTE = ["#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#e0528b", "#b877d9", "#37a6a0", "#8ab8ff", "#c15c17", "#a3a948", "#9f6b4a", "#7c6fd6"];
const AXIS_PX = 58;
/** Room of a time on the axis, with and without its seconds. */
const WIDE_PX = 68, NARROW_PX = 48;

/** Draw into `body`; false when there is no series. `scene` has marks, and what to do with a chosen range. */
export function graph(panel, answer, body, scene) {
  body.plot?.destroy();
  body.plot = null;
  const all = answer.targets.flatMap((target) => target.series);
  const drawn = all.slice(0, SERIES_MAX).filter((one) => one.values.some(([, written]) => Number.isFinite(number(written))));
  if (!drawn.length) {
    body.replaceChildren(element("div", { class: "nothing" }, "No data"));
    return false;
  }
  const { unit, min, max, custom = {}, thresholds } = panel.fieldConfig.defaults;
  const count = Math.round((answer.end_s - answer.start_s) / answer.step_s) + 1;
  const moments = Array.from({ length: count }, (_, i) => answer.start_s + i * answer.step_s);
  const values = drawn.map((one) => onGrid(one.values, answer, count));
  const isStack = custom.stacking?.mode === "normal";
  const heights = isStack ? stacked(values) : values;
  const colors = colorsOf(drawn.map((one) => one.name));
  const limits = custom.thresholdsStyle?.mode === "dashed" ? thresholds.steps.filter((step) => step.value != null) : [];

  const box = element("div", { class: "plot" });
  const tip = element("div", { class: "tip", hidden: true });
  const total = answer.targets.reduce((sum, target) => sum + target.series_count, 0);
  const left = total - all.slice(0, SERIES_MAX).length;
  body.replaceChildren(box, legend(drawn, values, colors, unit, left, (i) => toggle(body.plot, i)), tip);

  const fill = (custom.fillOpacity ?? 0) / 100;
  const order = heights.map((_, i) => i);
  if (isStack) order.reverse(); // The highest sum first: what lies in front of it hides its lower part.
  const series = order.map((i) => ({
    label: drawn[i].name,
    stroke: colors[i],
    fill: withAlpha(colors[i], fill),
    width: 1.5,
    points: { show: false, filter: lonely, size: 4 },
    spanGaps: false,
  }));
  const ink = styled("faint"), line = styled("grid");
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    ...sizeOf(box),
    legend: { show: false },
    padding: [8, 26, 0, 0],
    series: [{}, ...series],
    scales: { x: { time: true, range: () => [answer.start_s, answer.end_s] }, y: { range: (_, low, high) => yRange(low, high, min, max, unit) } },
    axes: [
      { ...axis, size: 22, space: (_, __, low, high, px) => ((high - low) / (px / NARROW_PX) < 60 ? WIDE_PX : NARROW_PX), values: (_, seconds) => seconds.map((s) => clock(s, seconds[1] - seconds[0] < 60)) },
      { ...axis, size: AXIS_PX, splits: (_, __, low, high) => ticks(low, high, unit), values: (_, marks) => marks.map((v) => text(v, unit)) },
    ],
    cursor: { sync: { key: "kvstrata" }, drag: { x: true, y: false, setScale: false }, points: { size: 5 }, focus: { prox: 24 } },
    hooks: {
      draw: [(plot) => drawLimits(plot, limits), (plot) => drawMarks(plot, scene.marks)],
      setSelect: [(plot) => plot.select.width > 8 && scene.zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"))],
      setCursor: [(plot) => point(plot, tip, drawn, values, order, colors, unit, moments, scene.marks)],
    },
  };
  body.plot = new uPlot(options, [moments, ...order.map((i) => heights[i])], box);
  body.plot.order = order;
  new ResizeObserver((_, watcher) => (body.plot ? body.plot.setSize(sizeOf(box)) : watcher.disconnect())).observe(box);
  return true;
}

function sizeOf(box) {
  return { width: Math.max(80, box.clientWidth), height: Math.max(60, box.clientHeight) };
}

/** Values on the steps of the answer; null where Prometheus had none. */
function onGrid(points, answer, count) {
  const row = new Array(count).fill(null);
  for (const [second, written] of points) {
    const value = number(written);
    const at = Math.round((second - answer.start_s) / answer.step_s);
    if (at >= 0 && at < count && Number.isFinite(value)) row[at] = value;
  }
  return row;
}

function stacked(rows) {
  const below = new Array(rows[0].length).fill(0);
  return rows.map((row) => row.map((value, i) => (value == null ? null : (below[i] += value))));
}

/** By name, as Grafana's `palette-classic-by-name`: the same name has the same color, unless a neighbor took it. */
function colorsOf(names) {
  const taken = new Set();
  return names.map((name) => {
    let at = [...name].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) >>> 0, 7) % PALETTE.length;
    for (let i = 0; taken.has(at) && i < PALETTE.length; i++) at = (at + 1) % PALETTE.length;
    if (taken.size < PALETTE.length) taken.add(at);
    return PALETTE[at];
  });
}

function withAlpha(color, share) {
  return share ? color + Math.round(share * 255).toString(16).padStart(2, "0") : undefined;
}

function yRange(low, high, min, max, unit) {
  const from = min ?? Math.min(low ?? 0, 0);
  const marks = ticks(from, max ?? Math.max(high ?? 0, from), unit);
  return [from, max ?? marks[marks.length - 1]];
}

/** Points without a neighbor make no line: they are drawn as dots. */
function lonely(plot, at) {
  const row = plot.data[at];
  return row.flatMap((value, i) => (value != null && row[i - 1] == null && row[i + 1] == null ? [i] : []));
}

function legend(series, values, colors, unit, leftOut, onToggle) {
  const rows = series.map((one, i) => {
    const known = values[i].filter((value) => value != null);
    const row = element("tr", { title: `${one.name}: click hides or shows it`, onclick: () => row.classList.toggle("off", !onToggle(i)) },
      element("td", {}, element("span", { class: "swatch", style: { background: colors[i] } }), one.name || "value"),
      element("td", { class: "number" }, text(known[known.length - 1], unit)),
      element("td", { class: "number" }, text(Math.max(...known), unit)));
    return row;
  });
  const head = element("tr", {}, element("th", {}, "Name"), element("th", { class: "number" }, "Last"), element("th", { class: "number" }, "Max"));
  const made = element("div", { class: "legend scrolls" }, element("table", {}, element("thead", {}, head), element("tbody", {}, rows)));
  if (leftOut > 0) made.append(element("p", { class: "left-out" }, `${leftOut} more series are not drawn; choose fewer`));
  return made;
}

/** Hide or show series `i`; true when it is shown now. */
function toggle(plot, i) {
  const at = plot.order.indexOf(i) + 1;
  plot.setSeries(at, { show: !plot.series[at].show });
  return plot.series[at].show;
}

function drawLimits(plot, limits) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.lineWidth = devicePixelRatio;
  for (const { value, color } of limits) {
    const y = plot.valToPos(value, "y", true);
    if (y < bbox.top || y > bbox.top + bbox.height) continue;
    ctx.strokeStyle = styled(color);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
  }
  ctx.restore();
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height + 6 * devicePixelRatio);
  ctx.clip();
  for (const mark of marks) {
    const from = plot.valToPos(mark.start_s, "x", true), to = plot.valToPos(mark.end_s, "x", true);
    const width = Math.max(devicePixelRatio, to - from), foot = bbox.top + bbox.height;
    ctx.fillStyle = styled(mark.color);
    ctx.globalAlpha = 0.07;
    ctx.fillRect(from, bbox.top, width, bbox.height);
    ctx.globalAlpha = 0.7;
    ctx.fillRect(from, bbox.top, devicePixelRatio, bbox.height);
    ctx.globalAlpha = 1;
    ctx.fillRect(from, foot, Math.max(4 * devicePixelRatio, width), 3 * devicePixelRatio);
  }
  ctx.restore();
}

/** The value next to the pointer, and the marks of that moment. */
function point(plot, tip, drawn, values, order, colors, unit, moments, marks) {
  const { idx, left, top, event } = plot.cursor;
  tip.hidden = idx == null || left < 0 || !event; // Synchronized plots have a crosshair and no words.
  if (tip.hidden) return;
  const y = plot.posToVal(top, "y");
  const seen = order.map((i, at) => ({ i, value: values[i][idx], height: plot.data[at + 1][idx], show: plot.series[at + 1].show }))
    .filter((one) => one.value != null && one.show);
  const nearest = seen.sort((a, b) => Math.abs(a.height - y) - Math.abs(b.height - y))[0];
  const second = moments[idx];
  const here = marks.filter((mark) => mark.start_s - 1 <= second && second <= mark.end_s + 1);
  tip.replaceChildren(element("div", { class: "when" }, clock(second, true)),
    ...(nearest ? [element("div", {}, element("span", { class: "swatch", style: { background: colors[nearest.i] } }), `${drawn[nearest.i].name || "value"}: ${text(nearest.value, unit)}`)] : []),
    ...here.slice(0, 6).map((mark) => element("div", { style: { color: styled(mark.color) } }, mark.words)));
  const isRight = left > plot.over.clientWidth / 2;
  Object.assign(tip.style, { top: `${Math.max(0, top - 10)}px`, left: isRight ? "" : `${left + AXIS_PX + 16}px`, right: isRight ? `${plot.over.clientWidth - left + 24}px` : "" });
}
