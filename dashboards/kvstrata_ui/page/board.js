// One dashboard: its variables, time and panels. What is chosen stands in the address, as in Grafana.

import { ask, element } from "./elements.js";
import { clock } from "./format.js";
import { draw, unknown } from "./panels.js";

const RANGES = [["now-5m", "Last 5 minutes"], ["now-15m", "Last 15 minutes"], ["now-30m", "Last 30 minutes"], ["now-1h", "Last hour"], ["now-3h", "Last 3 hours"], ["now-12h", "Last 12 hours"], ["now-1d", "Last day"], ["now-7d", "Last 7 days"], ["now-30d", "Last 30 days"]];
const REFRESHES = ["", "5s", "10s", "30s", "1m", "5m"];
const ALL = "$__all";
const PLOT_MARGIN_PX = 80;

export async function showBoard(uid, main, controls) {
  const board = await ask(`/api/dashboards/${encodeURIComponent(uid)}`);
  document.title = `${board.title} · kvstrata`;
  const chosen = new Chosen(board);
  const scene = { marks: [], zoom: (from, to) => chosen.setRange(String(Math.round(from * 1000)), String(Math.round(to * 1000))) };
  const panels = board.panels.map((panel) => new PanelBox(panel, chosen, scene));
  main.replaceChildren(
    element("div", { class: "about" }, element("h1", {}, board.title), element("p", {}, board.description)),
    element("div", { class: "board" }, panels.map((panel) => panel.box)));
  const toolbar = new Toolbar(board, chosen, controls);

  let running = null;
  async function load() {
    running?.abort();
    const mine = (running = new AbortController());
    const points = Math.max(50, Math.round((main.clientWidth - PLOT_MARGIN_PX) / 4));
    const query = chosen.query(points);
    const troubles = [];
    const [marks] = await Promise.all([
      ask(`/api/dashboards/${uid}/marks`, query, mine.signal).catch((error) => (troubles.push(`Annotations: ${error.message}`), { marks: [] })),
      toolbar.refreshChoices(query, mine.signal).catch((error) => troubles.push(`Variables: ${error.message}`)),
    ]);
    if (mine.signal.aborted) return;
    const colors = Object.fromEntries(board.annotations.list.map((mark) => [mark.name, mark.iconColor]));
    scene.marks = marks.marks.map((mark) => ({ ...mark, color: colors[mark.name], words: wordsOf(mark) }));
    toolbar.tell(troubles);
    await Promise.all(panels.map((panel) => panel.load(uid, query, mine.signal)));
    if (!mine.signal.aborted) document.body.dataset.state = "settled";
  }
  chosen.onChange = load;
  setInterval(() => document.hidden || toolbar.isDue() && load(), 1000);
  new MutationObserver(() => panels.forEach((panel) => panel.redraw())).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  await load();
}

function wordsOf(mark) {
  const { alertname, type, __name__, alertstate, instance, job, severity, ...rest } = mark.labels;
  const where = Object.values(rest).join(", ");
  const until = mark.end_s > mark.start_s ? ` until ${clock(mark.end_s, true)}` : "";
  return `${mark.name}: ${[alertname ?? type, where].filter(Boolean).join(", ") || "change"}${until}`;
}

/** What is chosen: time, refresh and variables; kept in the address. */
class Chosen {
  constructor(board) {
    const given = new URLSearchParams(location.search);
    this.board = board;
    this.from = given.get("from") ?? board.time.from;
    this.to = given.get("to") ?? board.time.to;
    this.refresh = given.get("refresh") ?? board.refresh;
    this.values = new Map();
    for (const variable of board.templating.list) {
      const values = given.getAll(`var-${variable.name}`);
      if (variable.type === "query") this.values.set(variable.name, values.length ? values : [ALL]);
      if (variable.type === "textbox") this.values.set(variable.name, values.length ? values : [variable.query]);
    }
    this.onChange = () => {};
  }

  setRange(from, to) {
    Object.assign(this, { from, to });
    this.changed();
  }

  setValues(name, values) {
    this.values.set(name, values.length ? values : [ALL]);
    this.changed();
  }

  setRefresh(refresh) {
    this.refresh = refresh;
    this.changed();
  }

  changed() {
    history.replaceState(null, "", `?${[this.variables(), this.time(), `refresh=${this.refresh}`].filter(Boolean).join("&")}`);
    document.dispatchEvent(new Event("chosen"));
    this.onChange();
  }

  variables() {
    const query = new URLSearchParams();
    for (const [name, values] of this.values) values.forEach((value) => query.append(`var-${name}`, value));
    return query.toString();
  }

  time() {
    return new URLSearchParams({ from: this.from, to: this.to }).toString();
  }

  query(points) {
    return [this.variables(), this.time(), `points=${points}`].filter(Boolean).join("&");
  }

  /** Address of a link in the dashboard's JSON. */
  address(url) {
    return url.replace("${__all_variables}", this.variables()).replace("${__url_time_range}", this.time());
  }

  get range() {
    const preset = this.to === "now" && RANGES.find(([from]) => from === this.from);
    if (preset) return preset[1];
    const [, last] = (this.to === "now" && /^now-(\d+[smhd])$/.exec(this.from)) || [];
    if (last) return `Last ${last}`;
    const moment = (written) => (/^\d+$/.test(written) ? clock(Number(written) / 1000, true) : written);
    return `${moment(this.from)} to ${moment(this.to)}`;
  }
}

/** Title, link and body of one panel; `data-state` says how it stands. */
class PanelBox {
  constructor(panel, chosen, scene) {
    const { x, y, w, h } = panel.gridPos;
    Object.assign(this, { panel, chosen, scene, answer: null });
    const style = { gridColumn: `${x + 1} / span ${w}`, gridRow: `${y + 1} / span ${h}` };
    if (panel.type === "row") {
      this.box = element("h2", { style }, panel.title);
      return;
    }
    this.body = element("div", { class: "body" });
    const links = (panel.links ?? []).map((link) => {
      const made = element("a", { class: "deeper", title: link.title, "aria-label": link.title, href: chosen.address(link.url) }, "›");
      document.addEventListener("chosen", () => (made.href = chosen.address(link.url)));
      return made;
    });
    this.box = element("section", { class: `panel ${panel.type}`, style, "data-panel": panel.title, "data-id": panel.id, "data-state": "loading" },
      element("h3", { title: panel.description }, element("span", {}, panel.title), ...links), this.body);
  }

  async load(uid, query, signal) {
    if (!this.body) return;
    const problem = unknown(this.panel);
    if (problem) return this.fail(problem);
    try {
      this.answer = await ask(`/api/dashboards/${uid}/panels/${this.panel.id}`, query, signal);
      this.redraw();
    } catch (error) {
      if (!signal.aborted) this.fail(error.message);
    }
  }

  redraw() {
    if (!this.answer) return;
    try {
      this.box.dataset.state = draw(this.panel, this.answer, this.body, this.scene) ? "drawn" : "empty";
    } catch (error) {
      this.fail(error.message);
    }
  }

  fail(reason) {
    this.answer = null;
    this.body.plot?.destroy();
    this.body.plot = null;
    this.body.replaceChildren(element("div", { class: "failed", role: "alert" }, reason));
    this.box.dataset.state = "error";
  }
}

/** Variables, time range and refresh of a dashboard. */
class Toolbar {
  constructor(board, chosen, controls) {
    this.chosen = chosen;
    this.choices = new Map();
    this.problem = element("span", { class: "failed", role: "alert", hidden: true });
    const made = board.templating.list.map((variable) => this.variable(variable));
    controls.replaceChildren(this.problem, ...made, this.range(), this.refresh());
    this.loaded_s = performance.now() / 1000;
  }

  variable(variable) {
    const label = variable.label ?? variable.name;
    if (variable.type === "datasource") return element("label", { class: "choice", title: "This page has the one that it was started with" }, label, element("b", {}, "Prometheus"));
    if (variable.type === "textbox") {
      const [value] = this.chosen.values.get(variable.name);
      return element("label", { class: "choice" }, label, element("input", { value, size: 5, inputmode: "decimal", onchange: (event) => this.chosen.setValues(variable.name, [event.target.value.trim()]) }));
    }
    if (variable.type !== "query") return element("span", { class: "failed", role: "alert" }, `variable ${variable.name}: type ${variable.type} is not known here`);
    const summary = element("summary", {});
    const list = element("div", { class: "options" });
    this.choices.set(variable.name, { label, summary, list });
    this.offer(variable.name, []);
    return element("details", { class: "choice", name: "choice" }, summary, list);
  }

  /** Show what a variable may be, and what it is. */
  offer(name, values) {
    const { label, summary, list } = this.choices.get(name);
    const chosen = this.chosen.values.get(name);
    const isAll = chosen.includes(ALL);
    summary.replaceChildren(label, element("b", {}, isAll ? "All" : chosen.length > 2 ? `${chosen.length} chosen` : chosen.join(", ")));
    const option = (value, title, isOn, next) => element("label", {}, element("input", { type: "checkbox", checked: isOn, onchange: () => this.chosen.setValues(name, next()) }), title);
    const others = [...new Set([...values, ...chosen])].filter((value) => value !== ALL).sort();
    list.replaceChildren(option(ALL, "All", isAll, () => [ALL]), ...others.map((value) => {
      const isOn = chosen.includes(value);
      return option(value, value, isOn, () => (isOn ? chosen.filter((one) => one !== value) : [...chosen.filter((one) => one !== ALL), value]));
    }));
  }

  async refreshChoices(query, signal) {
    this.loaded_s = performance.now() / 1000;
    if (!this.choices.size) return;
    const found = await ask(`/api/dashboards/${this.chosen.board.uid}/variables`, query, signal);
    for (const [name, values] of Object.entries(found)) this.offer(name, values);
  }

  range() {
    const summary = element("summary", {}, element("b", {}, this.chosen.range));
    document.addEventListener("chosen", () => summary.replaceChildren(element("b", {}, this.chosen.range)));
    const presets = RANGES.map(([from, title]) => element("button", { type: "button", onclick: () => this.chosen.setRange(from, "now") }, title));
    const moment = (name) => element("input", { type: "datetime-local", step: 1, name, required: true });
    const form = element("form", { onsubmit: (event) => {
      event.preventDefault();
      const given = new FormData(event.target);
      this.chosen.setRange(...["from", "to"].map((name) => String(new Date(given.get(name)).getTime())));
    } }, moment("from"), "to", moment("to"), element("button", {}, "Show"));
    return element("details", { class: "choice range", name: "choice" }, summary, element("div", { class: "options" }, ...presets, form));
  }

  refresh() {
    const offered = [...new Set([...REFRESHES, this.chosen.refresh])];
    const options = offered.map((value) => element("option", { value, selected: value === this.chosen.refresh }, value ? `every ${value}` : "no refresh"));
    return element("select", { class: "choice", "aria-label": "Refresh", onchange: (event) => this.chosen.setRefresh(event.target.value) }, ...options);
  }

  isDue() {
    const match = /^(\d+)([sm])$/.exec(this.chosen.refresh);
    const every_s = match ? Number(match[1]) * (match[2] === "m" ? 60 : 1) : Infinity;
    return this.chosen.to === "now" && performance.now() / 1000 - this.loaded_s >= every_s;
  }

  tell(troubles) {
    this.problem.hidden = !troubles.length;
    this.problem.textContent = troubles.join("; ");
  }
}
