// Panels of Grafana's JSON: each type that our dashboards have. What is not known is an error, never left out.

import { element, styled } from "./elements.js";
import { number, text, UNITS } from "./format.js";
import { graph } from "./graph.js";

const ANY = null;
const COMMON = {
  "fieldConfig.defaults.min": ANY,
  "fieldConfig.defaults.unit": UNITS,
  "fieldConfig.defaults.thresholds.mode": ["absolute"],
  "fieldConfig.defaults.thresholds.steps.color": ["green", "yellow", "orange", "red", "blue", "purple"],
  "fieldConfig.defaults.thresholds.steps.value": ANY,
  repeatDirection: ["h"], // Says nothing without `repeat`, which is not known here.
  transparent: [false],
};

/** What is drawn of each type: every option that a panel may have, with the values that are meant here. */
const KNOWN = {
  stat: {
    ...COMMON,
    "options.graphMode": ["none"],
    "options.colorMode": ["value"],
    "options.justifyMode": ["auto"],
    "options.orientation": ["auto"],
    "options.textMode": ["auto"],
    "options.wideLayout": ANY,
    "options.showPercentChange": [false],
    "options.percentChangeColorMode": ANY,
  },
  bargauge: {
    ...COMMON,
    "fieldConfig.defaults.max": ANY,
    "options.displayMode": ["gradient"],
    "options.orientation": ["horizontal"],
    "options.namePlacement": ["auto"],
    "options.showUnfilled": [true],
    "options.valueMode": ["color"],
    "options.sizing": ["auto"],
    "options.legend.showLegend": [false],
    "options.legend.displayMode": ANY,
    "options.legend.placement": ANY,
    "options.maxVizHeight": ANY,
    "options.minVizHeight": ANY,
    "options.minVizWidth": ANY,
  },
  timeseries: {
    ...COMMON,
    "fieldConfig.defaults.max": ANY,
    "fieldConfig.defaults.color.mode": ["palette-classic-by-name"],
    "fieldConfig.defaults.custom.fillOpacity": ANY,
    "fieldConfig.defaults.custom.stacking.group": ["A"],
    "fieldConfig.defaults.custom.stacking.mode": ["normal"],
    "fieldConfig.defaults.custom.thresholdsStyle.mode": ["dashed"],
    "options.legend.calcs": ["lastNotNull", "max"],
    "options.legend.displayMode": ["table"],
    "options.legend.placement": ["bottom"],
    "options.legend.showLegend": [true],
    "options.tooltip.mode": ["single"],
    "options.tooltip.sort": ANY,
  },
  table: {
    ...COMMON,
    "fieldConfig.overrides.matcher.id": ["byName"],
    "fieldConfig.overrides.matcher.options": ANY,
    "fieldConfig.overrides.properties.id": ["unit"],
    "fieldConfig.overrides.properties.value": UNITS,
    "transformations.id": ["merge", "organize"],
    "transformations.options.excludeByName.*": ANY,
    "transformations.options.renameByName.*": ANY,
  },
};
const ELSEWHERE = new Set(["id", "type", "title", "description", "gridPos", "datasource", "links", "targets"]);
const NAMED = new Set(["excludeByName", "renameByName"]);
const ROWS_MAX = 200;

/** Why a panel cannot be drawn as its JSON means it; empty when it can. */
export function unknown(panel) {
  const known = KNOWN[panel.type];
  if (!known) return `panels of type ${panel.type} are not known here`;
  for (const [path, value] of leaves(panel, "")) {
    if (!(path in known)) return `option ${path} of type ${panel.type} is not known here`;
    if (known[path] && !known[path].includes(value)) return `option ${path}: ${JSON.stringify(value)} is not known here`;
  }
  return "";
}

function* leaves(part, path) {
  for (const [name, value] of Object.entries(part)) {
    if (!path && ELSEWHERE.has(name)) continue;
    const here = Array.isArray(part) ? path : path ? `${path}.${name}` : name;
    if (NAMED.has(name)) for (const one of Object.values(value)) yield [`${here}.*`, one];
    else if (value !== null && typeof value === "object") yield* leaves(value, here);
    else yield [here, value];
  }
}

/** Draw the answer to a panel's queries into `body`; false when there was nothing to draw. */
export function draw(panel, answer, body, scene) {
  return { stat, bargauge: bars, timeseries: graph, table }[panel.type](panel, answer, body, scene);
}

/** Color of the highest threshold that a value reaches. */
export function colorAt(value, steps) {
  const reached = steps.filter((step) => step.value == null || value >= step.value);
  return styled(reached.length ? reached[reached.length - 1].color : "text");
}

export function seriesOf(answer) {
  return answer.targets.flatMap((target) => target.series);
}

function newest(series) {
  return number(series.values[series.values.length - 1][1]);
}

function nothing(body) {
  body.replaceChildren(element("div", { class: "nothing" }, "No data"));
  return false;
}

function stat(panel, answer, body) {
  const { unit, thresholds } = panel.fieldConfig.defaults;
  const values = seriesOf(answer).map(newest);
  if (!values.length) return nothing(body);
  const shown = values.map((value) =>
    element("div", { class: "stat", style: { color: colorAt(value, thresholds.steps) } }, text(value, unit)));
  body.replaceChildren(element("div", { class: "stats" }, shown));
  return true;
}

function bars(panel, answer, body) {
  const { unit, thresholds, min = 0, max } = panel.fieldConfig.defaults;
  const series = seriesOf(answer);
  if (!series.length) return nothing(body);
  const highest = max ?? Math.max(...series.map(newest).filter(Number.isFinite), min);
  const rows = series.map((one) => {
    const value = newest(one);
    const share = highest > min ? Math.min(1, Math.max(0, (value - min) / (highest - min))) : 0;
    const color = colorAt(value, thresholds.steps);
    const fill = element("span", { class: "fill", style: { width: `${100 * share}%`, background: `linear-gradient(90deg, color-mix(in srgb, ${color} 35%, transparent), ${color})` } });
    return element("div", { class: "bar", title: `${one.name}: ${text(value, unit)}` },
      element("span", { class: "name" }, one.name), element("span", { class: "track" }, fill),
      element("span", { class: "value", style: { color } }, text(value, unit)));
  });
  body.replaceChildren(element("div", { class: "bars" }, rows));
  return true;
}

/** Join the queries by their labels, as `merge` and `organize` do. */
function table(panel, answer, body) {
  const organize = panel.transformations.find((t) => t.id === "organize").options;
  const units = Object.fromEntries(panel.fieldConfig.overrides.map((o) => [o.matcher.options, o.properties[0].value]));
  const columns = answer.targets.map((t) => organize.renameByName[`Value #${t.ref}`] ?? `Value #${t.ref}`);
  const rows = new Map();
  const labels = new Set();
  answer.targets.forEach((target, i) => {
    for (const series of target.series) {
      Object.keys(series.labels).forEach((name) => labels.add(name));
      const key = JSON.stringify(Object.entries(series.labels).sort());
      if (!rows.has(key)) rows.set(key, { labels: series.labels, values: {} });
      rows.get(key).values[columns[i]] = newest(series);
    }
  });
  if (!rows.size) return nothing(body);
  const order = ["pool", "node", "tier"];
  const names = [...labels].sort((a, b) => (order.indexOf(a) + 1 || 9) - (order.indexOf(b) + 1 || 9) || a.localeCompare(b));
  const sorted = [...rows.values()].sort((a, b) => names.map((n) => (a.labels[n] ?? "").localeCompare(b.labels[n] ?? "")).find(Boolean) ?? 0);
  const cells = sorted.slice(0, ROWS_MAX).map((row) => element("tr", {},
    names.map((name) => element("td", {}, row.labels[name] ?? "")),
    columns.map((name) => element("td", { class: "number" },
      name in row.values ? text(row.values[name], units[name] ?? panel.fieldConfig.defaults.unit) : ""))));
  const head = element("tr", {}, names.map((name) => element("th", {}, name)), columns.map((name) => element("th", { class: "number" }, name)));
  const made = element("div", { class: "scrolls" }, element("table", {}, element("thead", {}, head), element("tbody", {}, cells)));
  const count = Math.max(sorted.length, ...answer.targets.map((t) => t.series_count));
  if (count > cells.length) made.append(element("p", { class: "left-out" }, `${cells.length} of ${count} rows`));
  body.replaceChildren(made);
  return true;
}
