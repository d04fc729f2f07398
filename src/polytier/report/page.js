// The page: makes headings, tables and charts from the data it holds. A live page does so again when the data change.

let page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, THEME = "polytier-theme";
const kept = {}; // choices of the reader, by block: sorting, hidden lines, sliders, unfolded sections
let drawers = []; // [host, function that draws it], called again when the width or the colours change

const slug = (words) => words.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "part";

function memory(id) {
  kept[id] = kept[id] || { id, hidden: new Set() };
  return kept[id];
}

function chart(block, id, kind, inside) {
  const title = id + "-title";
  return el("figure", { class: `card ${kind}`, id, "aria-labelledby": title },
    el("h4", { id: title }, block.title), inside, block.note && el("figcaption", {}, block.note));
}

function drawn(draw) {
  const host = el("div", { class: "plot" });
  drawers.push([host, draw]);
  return host;
}

function small(block, id, kind, items, each) {
  return chart(block, id, kind, el("div", { class: "several" }, items.map((item) => drawn((host) => each(host, item)))));
}

const makers = {
  Heading: (block, id) => el(`h${block.level}`, { id }, block.text),
  Text: (block) => el("p", { class: "text" }, block.text),
  Table: table,
  Lines(block, id) {
    const { hidden } = memory(id);
    if (!block.series.length) return null;
    const plot = drawn((host) => lines(host, block, { hidden }));
    const again = () => lines(plot, block, { hidden });
    return chart(block, id, "lines", [legend(block.series, hidden, again), plot]);
  },
  Panels(block, id) {
    const { hidden } = memory(id);
    const charts = block.charts.filter((each) => each.series.length);
    if (!charts.length) return null;
    const shared = (one) => {
      const same = charts.filter((each) => each.y === one.y).map((each) => extent(each, hidden));
      return [Math.min(...same.map(([low]) => low)), Math.max(...same.map(([, high]) => high))];
    };
    const each = (one) => (host) => lines(host, one, { hidden, range: shared(one), height: 240, named: false, title: `${block.title}, ${one.title}` });
    const plots = charts.map((one) => drawn(each(one)));
    const again = () => plots.forEach((plot, k) => each(charts[k])(plot));
    const several = el("div", { class: "several panels" }, plots.map((plot, k) => el("div", {}, el("h5", {}, charts[k].title), plot)));
    return chart(block, id, "lines", [legend(charts.flatMap((one) => one.series), hidden, again), several]);
  },
  Histogram(block, id) {
    const most = Math.max(...block.series.flatMap(([, heights]) => heights));
    const figures = small(block, id, "bars", block.series, (host, item) => bars(host, block, item, most));
    figures.querySelector(".several").after(el("p", { class: "axes" }, `Across: ${block.x}. Up: ${block.y}.`));
    return figures;
  },
  Tree(block, id) {
    const most = Math.max(...block.methods.flatMap(([, , links]) => links.flatMap(([, down, up]) => [down, up])));
    return small(block, id, "tree", block.methods, (host, item) => tree(host, item, most));
  },
  Heat: (block, id) => chart(block, id, "heat", drawn((host) => heat(host, block))),
  Matrices: (block, id) => chart(block, id, "matrices", drawn((host) => matrices(host, block, memory(id)))),
  Section(block, id) {
    const inside = block.blocks.map((each, k) => make(each, `${id}-${slug(each.title || each.text || each.kind)}`));
    if (!block.folded) return el("section", { id, "aria-label": block.title }, el("h3", {}, block.title), inside);
    const state = memory(id);
    const fold = el("details", { id, on: { toggle: () => { state.open = fold.open; if (fold.open) drawAll(); } } },
      el("summary", {}, el("h3", {}, block.title)), inside);
    fold.open = Boolean(state.open);
    return fold;
  },
};

const used = new Map();
function make(block, id) {
  const times = used.get(id) || 0; // of two blocks with one title the second gets a number
  used.set(id, times + 1);
  return makers[block.kind](block, times ? `${id}-${times + 1}` : id);
}

// -- tables -----------------------------------------------------------------------------------------

function table(block, id) {
  const state = memory(id);
  const numeric = block.columns.map((_, k) => block.rows.some((row) => typeof row[k][1] === "number"));
  const body = el("tbody", {});
  const heads = block.columns.map((name, k) => el("th", { scope: "col", class: numeric[k] ? "number" : "" },
    el("button", { type: "button", id: `${id}-${k}`, on: { click: () => sort(k) } }, name, el("span", { class: "arrow", "aria-hidden": "true" }))));
  const show = () => {
    const rows = block.rows.map((row, k) => [row, k]);
    if (state.column !== undefined && state.column < heads.length) rows.sort((a, b) => order(a[0][state.column][1], b[0][state.column][1]) || a[1] - b[1]);
    heads.forEach((head, k) => {
      if (k === state.column) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...rows.map(([row]) => el("tr", {}, row.map(([shown, , tone], k) =>
      el(k ? "td" : "th", { scope: k ? null : "row", class: `${numeric[k] || shown.length < 25 ? "whole" : ""} ${numeric[k] ? "number" : ""} ${tone || ""}`.trim() || null }, shown)))));
  };
  const order = (a, b) => {
    const texts = numeric[state.column], lost = (value) => value === null || (texts && typeof value === "string");
    if (lost(a) || lost(b)) return lost(a) - lost(b); // rows without a value come last in both directions
    const found = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return state.down ? -found : found;
  };
  const sort = (k) => {
    state.down = state.column === k ? !state.down : numeric[k];
    state.column = k;
    show();
  };
  show();
  const title = `${id}-title`;
  return el("div", { class: "card table", id }, el("h4", { id: title }, block.title),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": title },
      el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
    block.note && el("p", { class: "note" }, block.note));
}

// -- the whole page ---------------------------------------------------------------------------------

function drawAll() {
  for (const [host] of drawers) host.wide = host.clientWidth; // all before the first drawing, which would force a new layout
  for (const [host, draw] of drawers) draw(host);
}

function build() {
  drawers = [];
  used.clear();
  const main = document.getElementById("main"), links = [];
  let part = "";
  const made = page.blocks.map((block) => {
    const name = block.title || block.text || block.kind;
    if (block.kind === "Heading" && block.level <= 2) part = `${slug(name)}-`;
    const node = make(block, block.kind === "Heading" ? slug(name) : part + slug(name));
    if (node && (block.kind === "Section" || block.kind === "Heading")) links.push([node.id, name, block.kind]);
    return node;
  });
  main.replaceChildren(...made.filter((node) => node));
  const parts = links.filter(([, , kind]) => kind === "Heading"), shown = parts.length > 1 ? parts : links;
  const button = el("button", { type: "button", class: "theme", id: "theme", on: { click: () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem(THEME, root.dataset.theme); } catch { /* not remembered */ }
  } } });
  document.getElementById("top").replaceChildren(
    el("div", { class: "head" }, el("div", {}, el("h1", {}, page.title), page.subtitle && el("p", {}, page.subtitle)), button),
    shown.length > 1 ? el("nav", { "aria-label": "Parts of this page" }, shown.map(([id, name]) => el("a", { href: `#${id}` }, name))) : "");
  document.getElementById("end").replaceChildren(el("p", {}, page.live ? `${page.made}; live, follows the run` : page.made));
  document.title = page.title;
  setTheme(root.dataset.theme);
}

function setTheme(theme) {
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  drawAll(); // heat maps are pictures, so they are drawn again in the new colours
}

function remembered() {
  try { return localStorage.getItem(THEME); } catch { return null; } // a page from a file may have no storage
}

const system = matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = remembered() || (system.matches ? "dark" : "light");
build();
root.dataset.ready = "yes";

let width = document.getElementById("main").clientWidth;
new ResizeObserver(() => {
  const now = document.getElementById("main").clientWidth;
  if (now !== width) { width = now; drawAll(); }
}).observe(document.getElementById("main"));
system.addEventListener("change", () => { if (!remembered()) setTheme(system.matches ? "dark" : "light"); });

// -- live: new data replace old ones; the choices, the focus and the scroll position stay --------------

async function news() {
  try {
    const version = await (await fetch("version")).text();
    if (version !== page.live) {
      const text = await (await fetch(location.href)).text();
      page = JSON.parse(new DOMParser().parseFromString(text, "text/html").getElementById("data").textContent);
      const at = window.scrollY, focus = document.activeElement && document.activeElement.id;
      build();
      window.scrollTo(0, at);
      if (focus && document.getElementById(focus)) document.getElementById(focus).focus({ preventScroll: true });
    }
    root.dataset.live = "on";
  } catch {
    root.dataset.live = "lost"; // the server has ended; the page stays as it is
  }
  setTimeout(news, 1000);
}
if (page.live) news();
