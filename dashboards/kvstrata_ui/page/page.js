// Which page is shown, and how to reach the others.

import { showBoard } from "./board.js";
import { ask, element } from "./elements.js";
import { showMap } from "./map.js";
import { showPrefixes } from "./prefixes.js";

const main = document.getElementById("main");
const controls = document.getElementById("controls");

async function start() {
  const { dashboards } = await ask("/api/dashboards");
  const board = /^\/d\/([^/]+)/.exec(location.pathname)?.[1];
  const page = board ? null : location.pathname === "/prefixes" ? showPrefixes : showMap;
  const links = [
    ["/map", "Map", "Nodes, tiers, and what moves between them", page === showMap],
    ["/prefixes", "Prefixes", "What tenants have cached, as trees", page === showPrefixes],
    ...dashboards.map(({ uid, title, description }) => [`/d/${uid}`, title, description, uid === board]),
  ].map(([path, title, hint, isCurrent]) => element("a", { href: path, title: hint, "aria-current": isCurrent && "page", onclick: keepChosen }, title.replace(/^KV /, "")));
  document.getElementById("pages").replaceChildren(element("b", {}, "kvstrata"), ...links, themes());
  await (board ? showBoard(board, main, controls) : page(main, controls));
}

/** Links of the head take along what is chosen, and the time. */
function keepChosen(event) {
  const link = event.currentTarget;
  link.search = /^\/d\//.test(location.pathname) ? location.search : "";
}

function themes() {
  const other = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  return element("button", { type: "button", class: "theme", title: "Light or dark", "aria-label": "Light or dark", onclick: () => localStorage.setItem("theme", (document.documentElement.dataset.theme = other())) }, "◐");
}

start().catch((error) => {
  main.replaceChildren(element("p", { class: "failed", role: "alert" }, error.message));
  document.body.dataset.state = "failed";
});
