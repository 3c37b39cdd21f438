// The fleet as it stands: nodes by tiers, how full they are, what is wrong, and what moves.

import { ask, element, shape, styled } from "./elements.js";
import { clock, text } from "./format.js";

const REFRESH_S = 10;
const FILL = [[0.98, "red"], [0.92, "orange"], [0.85, "yellow"], [0, "green"]];
/** More nodes than this are squares, not cards. */
const CARDS_MAX = 24;
const ROW_PX = 26;
const ARC_PX = 74;
/** Largest flows that are written out; others are when an arc is pointed at. */
const FLOWS_SAID = 3;
const REMOTE = "remote";

export async function showMap(main, controls) {
  document.title = "Map · kvstrata";
  const told = element("span", { class: "when" });
  controls.replaceChildren(told);
  async function load() {
    try {
      const fleet = await ask("/api/fleet");
      main.replaceChildren(...drawFleet(fleet));
      told.textContent = `as of ${clock(fleet.at_s, true)}, every ${REFRESH_S} s`;
      document.body.dataset.state = "settled";
    } catch (error) {
      main.replaceChildren(element("p", { class: "failed", role: "alert" }, error.message));
      document.body.dataset.state = "failed";
    }
  }
  await load();
  setInterval(() => document.hidden || load(), 1000 * REFRESH_S);
}

function drawFleet(fleet) {
  const pools = fleet.pools.map((pool) => drawPool(pool));
  const none = pools.length ? [] : [element("p", { class: "nothing" }, "No agent reports to this Prometheus.")];
  return [element("div", { class: "about" }, element("h1", {}, "Map of the fleet"), element("p", {}, "How full is what, what is wrong, and what moved in the last five minutes: blue to slower tiers, green to faster ones?")),
    ...drawDirectory(fleet.directory), ...drawAlerts(fleet.alerts), ...pools, ...none];
}

function drawDirectory(directory) {
  if (!directory) return [];
  if (directory.error) return [element("p", { class: "failed", role: "alert" }, directory.error)];
  const { agents_by_state: states, redis } = directory;
  const facts = [
    ["agents", `${states.live} live, ${states.silent} silent, ${states.fenced} fenced`],
    ["leader", directory.leader || "nobody"],
    ["Redis", `${redis.is_full ? "full" : redis.is_up ? "up" : "away"}, ${text(redis.fill_ratio, "percentunit")} of its memory`],
    ["copies known", text(directory.locations, "short")],
  ];
  return [element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))))];
}

function drawAlerts(alerts) {
  if (!alerts.length) return [];
  const words = ({ alertname, severity, ...labels }) => `${alertname} ${Object.values(labels).join(" ")}`;
  return [element("ul", { class: "alerts" }, alerts.slice(0, 20).map((alert) => element("li", { class: alert.severity === "critical" ? "bad" : "warn" }, words(alert))),
    alerts.length > 20 ? element("li", {}, `and ${alerts.length - 20} more`) : null)];
}

function drawPool(pool) {
  const ready = pool.is_ready == null ? "" : pool.is_ready ? "ready" : "not ready";
  const trouble = pool.troubled_count ? `${pool.troubled_count} with trouble` : "nothing wrong";
  const head = element("h2", {}, pool.pool, element("small", {}, [pool.node_count === 1 ? "1 node" : `${pool.node_count} nodes`, trouble, ready].filter(Boolean).join(", ")));
  const total = pool.node_count === 1 ? null : element("article", { class: "node total" }, element("h3", {}, "All nodes together"), ladder(pool.tiers, pool.flows));
  const isSmall = pool.nodes.length <= CARDS_MAX;
  const nodes = pool.nodes.map(isSmall ? card : square);
  const left = pool.node_count - pool.nodes.length;
  return element("section", { class: "pool", "data-pool": pool.pool }, head,
    element("div", { class: isSmall ? "cards" : "squares" }, [total, ...nodes]),
    left > 0 ? element("p", { class: "left-out" }, `${left} more nodes: those in trouble and the fullest are shown`) : null);
}

function degreeOf(node) {
  return node.troubles.some((one) => one.degree === "bad") ? "bad" : node.troubles.length ? "warn" : "well";
}

function card(node) {
  const engines = node.engines === 1 ? "1 engine" : `${node.engines} engines`;
  return element("article", { class: `node ${degreeOf(node)}`, "data-node": node.node },
    element("h3", {}, element("span", { class: "dot" }), node.node, element("small", {}, engines)),
    node.tiers.length ? ladder(node.tiers, node.flows) : element("p", { class: "nothing" }, "no metrics"),
    element("ul", {}, node.troubles.map((one) => element("li", { class: one.degree }, one.words))));
}

/** A node of a large fleet: a strip for each tier, and its words when pointed at. */
function square(node) {
  const words = [node.node, ...node.tiers.map(words_of), ...node.troubles.map((one) => one.words)].join("\n");
  return element("article", { class: `square ${degreeOf(node)}`, title: words, "data-node": node.node },
    node.tiers.map((tier) => element("span", { class: "strip" }, element("span", { class: "fill", style: { width: `${100 * fillOf(tier)}%`, background: styled(colorOf(tier)) } }))));
}

function fillOf(tier) {
  return tier.capacity_bytes ? Math.min(1, tier.used_bytes / tier.capacity_bytes) : 0;
}

function colorOf(tier) {
  return FILL.find(([least]) => fillOf(tier) >= least)[1];
}

function words_of(tier) {
  const emulated = tier.is_emulated ? ", emulated" : "";
  return `${tier.tier}: ${text(tier.used_bytes, "bytes")} of ${text(tier.capacity_bytes, "bytes")}, ${text(tier.blocks, "short")} blocks${emulated}`;
}

/** Tiers below each other, and beside them an arc for each path that bytes move on now. */
function ladder(tiers, flows) {
  const names = tiers.map((tier) => tier.tier);
  const isRemote = flows.some((flow) => flow.source === REMOTE || flow.target === REMOTE);
  const rows = tiers.map((tier) => element("div", { class: "tier", title: words_of(tier) },
    element("span", { class: "name" }, tier.tier), element("span", { class: "track" },
      element("span", { class: "fill", style: { width: `${100 * fillOf(tier)}%`, background: styled(colorOf(tier)) } }),
      element("span", { class: "label" }, `${text(tier.used_bytes, "bytes")} of ${text(tier.capacity_bytes, "bytes")}`)),
    element("span", { class: "value" }, text(fillOf(tier), "percentunit"))));
  if (isRemote) {
    names.push(REMOTE);
    rows.push(element("div", { class: "tier" }, element("span", { class: "name" }, REMOTE), element("span", { class: "elsewhere" }, "other nodes")));
  }
  const shown = flows.filter((flow) => names.includes(flow.source) && names.includes(flow.target) && flow.source !== flow.target);
  const most = [...shown].sort((a, b) => b.bytes_per_second - a.bytes_per_second).slice(0, FLOWS_SAID);
  const said = most.map((flow) => `${flow.source} → ${flow.target} ${text(flow.bytes_per_second, "binBps")}`).join(" · ");
  return element("div", {}, element("div", { class: "ladder" }, element("div", { class: "tiers" }, rows), arcs(names, shown)),
    said ? element("p", { class: "flows" }, said) : null);
}

function arcs(names, flows) {
  const height = names.length * ROW_PX;
  const most = Math.max(1, ...flows.map((flow) => flow.bytes_per_second));
  const center = (name) => (names.indexOf(name) + 0.5) * ROW_PX;
  const drawn = flows.flatMap((flow) => {
    const isDown = center(flow.target) > center(flow.source);
    const from = center(flow.source) + (isDown ? 5 : -5), to = center(flow.target) + (isDown ? -3 : 3);
    const reach = 12 + 14 * Math.abs(names.indexOf(flow.source) - names.indexOf(flow.target)) + (isDown ? 0 : 6);
    const color = styled(isDown ? "blue" : "green");
    const width = 1 + 4 * Math.sqrt(flow.bytes_per_second / most);
    const said = `${flow.source} to ${flow.target}: ${text(flow.bytes_per_second, "binBps")}`;
    return [shape("g", { "data-flow": `${flow.source}-${flow.target}` }, shape("title", {}, said),
      shape("path", { d: `M 6 ${from} C ${reach + 6} ${from}, ${reach + 6} ${to}, 8 ${to}`, fill: "none", stroke: color, "stroke-width": width, "stroke-opacity": 0.85 }),
      shape("path", { d: `M 1 ${to} l 8 -4 l 0 8 z`, fill: color }))];
  });
  return shape("svg", { class: "arcs", width: ARC_PX, height, viewBox: `0 0 ${ARC_PX} ${height}`, role: "img", "aria-label": flows.map((f) => `${f.source} to ${f.target} ${text(f.bytes_per_second, "binBps")}`).join(", ") || "nothing moves" }, ...drawn);
}
