// What tenants have cached: the tree of their prefixes at each agent, and the life of a session.

import { ask, element, shape, styled } from "./elements.js";
import { clock, text } from "./format.js";

const REFRESH_S = 10;
const ROW_PX = 22;
const NAME_PX = 340;
const GAP_PX = 1;
/** Ends of a tree that are drawn. */
const ENDS_MAX = 60;
const COLORS = ["green", "blue", "purple", "orange", "yellow", "red"];

export async function showPrefixes(main, controls) {
  document.title = "Prefixes · kvstrata";
  const told = element("span", { class: "when" });
  controls.replaceChildren(told);
  const life = element("aside", { class: "life", hidden: true });
  const trees = element("div", {});
  main.replaceChildren(element("div", { class: "about" }, element("h1", {}, "Prefixes"), element("p", {}, "What have tenants cached where, what do their prompts share, and who uses it?")), trees, life);
  async function load() {
    try {
      const found = await ask("/api/prefixes");
      trees.replaceChildren(...(found.is_asked ? found.trees.map((tree, i) => drawTree(tree, main.clientWidth, (name) => showLife(life, i, name))) : [explain()]));
      told.textContent = `as of ${clock(Date.now() / 1000, true)}, every ${REFRESH_S} s`;
      document.body.dataset.state = "settled";
    } catch (error) {
      trees.replaceChildren(element("p", { class: "failed", role: "alert" }, error.message));
      document.body.dataset.state = "failed";
    }
  }
  await load();
  setInterval(() => document.hidden || load(), 1000 * REFRESH_S);
}

function explain() {
  return element("p", { class: "hint" }, "An agent shows a tenant's prefixes to that tenant alone. Name agents of this machine, and tenants with files of their tokens: ",
    element("code", {}, "kvstrata ui --agent SOCKET --pool POOL --model MODEL --revision REVISION --tenant NAME=TOKEN_FILE"));
}

function drawTree(tree, width, onSession) {
  const head = element("h2", {}, tree.tenant, element("small", {}, `at ${tree.agent}`));
  const body = tree.error ? [element("p", { class: "failed", role: "alert" }, tree.error)] : scopesOf(tree).map((scope) => drawScope(scope, tree, width, onSession));
  return element("section", { class: "pool", "data-tenant": tree.tenant, "data-agent": tree.agent }, head, ...body);
}

/** Scopes with something in them, or else that of the tenant alone. */
function scopesOf(tree) {
  const filled = tree.scopes.filter((scope) => scope.runs.length);
  return filled.length ? filled : tree.scopes.slice(-1);
}

function drawScope(scope, tree, width, onSession) {
  const count = scope.runs.reduce((sum, run) => sum + run.blocks, 0);
  const what = scope.kind === "tenant" ? "private" : `${scope.kind} ${scope.name}, what this tenant has written`;
  const unseen = (scope.blocks_in_all ?? 0) - (scope.blocks ?? 0);
  const notes = [`${text(count, "short")} blocks of ${tree.block_tokens} tokens`, ...(unseen > 0 ? [`${text(unseen, "short")} older ones not looked at`] : []), ...(scope.runs_left_out ? [`${scope.runs_left_out} more branches`] : [])];
  const title = element("h3", {}, what, element("small", {}, notes.join(", ")), ...legend(scope));
  if (!count) return element("article", { class: "node total" }, title, element("p", { class: "nothing" }, "nothing cached"));
  return element("article", { class: "node total" }, title, picture(scope, tree, width - 60, onSession));
}

function legend(scope) {
  return scope.tiers.map((tier, i) => element("span", { class: "key" }, element("span", { class: "swatch", style: { background: colorOf(i) } }), tier));
}

function colorOf(number) {
  return styled(COLORS[number % COLORS.length]);
}

/** Prefixes from left to right, as long as they are; where two part, both rows stand behind what they share. */
function picture(scope, tree, width, onSession) {
  const runs = scope.runs.map((run) => ({ ...run, children: [] }));
  const roots = [];
  for (const run of runs) {
    run.from = run.parent < 0 ? 0 : runs[run.parent].from + runs[run.parent].blocks;
    (run.parent < 0 ? roots : runs[run.parent].children).push(run);
  }
  let row = 0;
  const place = (run) => {
    run.row = row;
    if (!run.children.length) run.rows = row++ < ENDS_MAX ? 1 : 0;
    else run.rows = run.children.reduce((sum, child) => sum + place(child), 0);
    return run.rows;
  };
  roots.forEach(place);
  const longest = Math.max(...runs.map((run) => run.from + run.blocks));
  const perBlock = (width - NAME_PX) / longest;
  const shown = runs.filter((run) => run.rows);
  const height = Math.min(row, ENDS_MAX) * ROW_PX;
  const drawn = shown.flatMap((run) => drawRun(run, scope, tree, perBlock, onSession));
  return element("div", {}, shape("svg", { class: "prefixes", width, height, viewBox: `0 0 ${width} ${height}` }, ...drawn),
    row > ENDS_MAX ? element("p", { class: "left-out" }, `${ENDS_MAX} of ${row} ends are drawn, those used last`) : null);
}

function drawRun(run, scope, tree, perBlock, onSession) {
  const x = run.from * perBlock, width = Math.max(1, run.blocks * perBlock - GAP_PX);
  const y = run.row * ROW_PX, height = run.rows * ROW_PX - 2;
  const places = scope.tiers.map((tier, i) => [tier, run.tiers[tier] ?? 0, colorOf(i)]).filter(([, count]) => count);
  if (run.tiers[""]) places.push(["on the way", run.tiers[""], styled("faint")]);
  const words = [`${run.blocks} blocks, ${run.blocks * tree.block_tokens} tokens`, ...places.map(([name, count]) => `${count} in ${name}`),
    usedOf(run), ...(run.held ? [`${run.held} in use`] : []), ...(run.is_beginning || run.parent >= 0 ? [] : ["its beginning is not here"]), ...run.sessions.map((name) => `session ${name}`)].join("\n");
  let at = x;
  const parts = places.map(([, count, color]) => {
    const part = shape("rect", { x: at, y, width: (width * count) / run.blocks, height, fill: color, "fill-opacity": 0.75 });
    at += (width * count) / run.blocks;
    return part;
  });
  const isOpen = run.parent < 0 && !run.is_beginning;
  if (isOpen) parts.push(shape("rect", { x, y, width: 3, height, fill: styled("red") }));
  const made = [shape("g", { "data-run": run.blocks }, shape("title", {}, words), ...parts)];
  if (width > 90 && height >= ROW_PX - 2) made.push(shape("text", { class: "length", x: x + 6, y: y + height / 2 + 4 }, `${run.blocks * tree.block_tokens} tokens`));
  if (!run.children.length) {
    const idle = usedOf(run);
    made.push(shape("text", { x: x + width + 8, y: y + ROW_PX / 2 + 3 }, run.sessions.length ? "" : idle, ...run.sessions.slice(0, 3).map((name) => shape("tspan", { class: "session", tabindex: 0, onclick: () => onSession(name), onkeydown: (event) => event.key === "Enter" && onSession(name) }, `${name}  `)), run.sessions.length ? shape("tspan", {}, idle) : ""));
  }
  return made;
}

function usedOf(run) {
  return run.idle_s == null ? "the first to go" : `used ${text(run.idle_s, "s")} ago`;
}

async function showLife(life, tree, name) {
  life.hidden = false;
  const close = element("button", { type: "button", onclick: () => (life.hidden = true) }, "Close");
  try {
    const found = await ask(`/api/prefixes/${tree}/session`, new URLSearchParams({ name }).toString());
    life.replaceChildren(element("h2", {}, `Session ${name}`, close), ...drawLife(found));
  } catch (error) {
    life.replaceChildren(element("h2", {}, `Session ${name}`, close), element("p", { class: "failed", role: "alert" }, error.message));
  }
}

function drawLife(found) {
  if (!found.log) return [element("p", { class: "nothing" }, "The agent knows none of that name any more.")];
  const counted = (blocks) => Object.entries(blocks).sort((a, b) => b[1] - a[1]).map(([place, count]) => `${count} ${place || "on the way"}`).join(", ") || "-";
  const about = [["state", found.state], ["class", found.priority_class], ["turns", found.turns], ["blocks", counted(found.blocks)],
    ...(found.expected_return_s > 0 ? [["expected back in", text(found.expected_return_s, "s")]] : [])];
  const rows = found.log.map((event) => element("tr", {}, element("td", {}, `${text(event.ago_s, "s")} ago`), element("td", {}, event.state || event.what), element("td", {}, counted(event.blocks)),
    element("td", { class: "number" }, event.lacking_blocks || "-"), element("td", { class: "number" }, event.waited_s ? text(event.waited_s, "s") : "-"),
    element("td", {}, event.choice ? `${event.choice}, regret ${text(event.regret_s, "s")}` : "-")));
  const head = ["when", "what", "blocks", "lacking", "waited", "choice"].map((name) => element("th", {}, name));
  return [element("dl", { class: "facts" }, about.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value))))),
    element("div", { class: "scrolls" }, element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)))];
}
