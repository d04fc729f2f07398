// The page: makes headings, tables and charts from the data it holds. A live page does so again when the data change.

let page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, THEME = "polytier-theme";
const kept = {}; // choices of the reader, by block: sorting, hidden lines, sliders, unfolded sections
let depth = 2; // the level of the next heading
let drawers = []; // [host, function that draws it], called again when the width or the colours change

const together = (words) => words.replace(/ (?=[±%])|(?<=±) /g, "\u00a0"); // no line break within a value and its unit
const slug = (words) => words.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "part";

function memory(id) {
  kept[id] = kept[id] || { id, hidden: new Set() };
  return kept[id];
}

function chart(block, id, kind, inside) {
  const title = id + "-title";
  return el("figure", { class: `card ${kind}`, id, "aria-labelledby": title },
    heading("title", block.title, title), inside, block.note && el("figcaption", {}, together(block.note)));
}

function heading(style, words, id) {
  return el(`h${depth}`, { class: style, id }, words);
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
  Heading(block, id) {
    depth = block.level;
    const made = heading("part", block.text, id);
    depth += 1;
    return made;
  },
  Text: (block) => el("p", { class: block.leading ? "text finding" : "text" }, together(block.text)),
  Table: (block, id) => card(block, id, [table(block, id)]),
  Devices(block, id) {
    const state = memory(id), names = block.methods.map(([name]) => name), host = el("div", {});
    if (!names.includes(state.method)) state.method = names[0];
    const show = () => host.replaceChildren(...table(devices(block, names.indexOf(state.method)), id, names.length > 1 && choice));
    const choice = el("label", {}, "Method ", el("select", { id: `${id}-method`, on: { change: (event) => {
      state.method = event.currentTarget.value;
      state.column = undefined; // the columns may be others
      show();
    } } }, names.map((name) => el("option", { selected: name === state.method && "" }, name))));
    show();
    return card(block, id, [host]);
  },
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
    const several = el("div", { class: "several panels" }, plots.map((plot, k) => el("div", {}, el("p", { class: "small" }, charts[k].title), plot)));
    return chart(block, id, "lines", [legend(charts.flatMap((one) => one.series), hidden, again), several]);
  },
  Histogram(block, id) {
    const most = Math.max(...block.series.flatMap(([, heights]) => heights));
    return small(block, id, "bars", block.series, (host, item) => bars(host, block, item, most));
  },
  Tree(block, id) {
    const most = Math.max(...block.methods.flatMap(([, , links]) => links.flatMap(([, down, up]) => [down, up])));
    return small(block, id, "tree", block.methods, (host, item) => tree(host, item, most));
  },
  Heat: (block, id) => chart(block, id, "heat", drawn((host) => heat(host, block))),
  Matrices: (block, id) => chart(block, id, "matrices", drawn((host) => matrices(host, block, memory(id)))),
  Section(block, id) {
    const title = heading("section", block.title), outer = depth;
    depth += 1;
    const inside = block.blocks.map((each, k) => make(each, `${id}-${slug(each.title || each.text || each.kind)}`));
    depth = outer;
    if (!block.folded) return el("section", { id }, title, inside);
    const state = memory(id);
    const fold = el("details", { id, on: { toggle: () => { state.open = fold.open; if (fold.open) drawAll(); } } },
      el("summary", {}, title), inside);
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

const ROWS = 20; // longer tables are shown in pages and can be searched

function card(block, id, inside) {
  return el("div", { class: "card table", id }, heading("title", block.title, `${id}-title`), inside, block.note && el("p", { class: "note" }, together(block.note)));
}

// `block` has columns, rows of [text, value to sort by, tone] and perhaps the column by which they are sorted at first
function table(block, id, choice) {
  const state = memory(id);
  const numeric = block.columns.map((_, k) => block.rows.some((row) => typeof row[k][1] === "number"));
  const long = block.rows.length > ROWS;
  const body = el("tbody", {}), where = el("output", {});
  const heads = block.columns.map((name, k) => el("th", { scope: "col", class: numeric[k] ? "number" : "" },
    el("button", { type: "button", id: `${id}-${k}`, on: { click: () => sort(k) } }, name, el("span", { class: "arrow", "aria-hidden": "true" }))));
  if (state.column === undefined || state.column >= heads.length) [state.column, state.down] = block.sorted || [];
  const show = () => {
    heads.forEach((head, k) => {
      if (k === state.column) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const rows = found();
    const last = Math.max(0, Math.ceil(rows.length / ROWS) - 1), first = ROWS * (state.page = Math.min(last, state.page || 0));
    const shown = long ? rows.slice(first, first + ROWS) : rows;
    where.textContent = rows.length ? `${(first + 1).toLocaleString("en")} to ${(first + shown.length).toLocaleString("en")} of ${rows.length.toLocaleString("en")}` : "nothing found";
    [back.disabled, on.disabled] = [state.page === 0, state.page === last];
    body.replaceChildren(...shown.map(([row]) => el("tr", {}, row.map(([words, , tone], k) =>
      el(k ? "td" : "th", { scope: k ? null : "row", class: `${numeric[k] || words.length < 25 ? "whole" : ""} ${numeric[k] ? "number" : ""} ${tone || ""}`.trim() || null }, words)))));
  };
  // the rows that contain what is searched for in a column of text, in order; equal texts come first
  const found = () => {
    const wanted = (state.search || "").trim().toLowerCase(), texts = block.columns.map((_, k) => k).filter((k) => !numeric[k]);
    const fits = (row, test) => texts.some((k) => test(row[k][0].toLowerCase()));
    const rows = block.rows.map((row, k) => [row, k, wanted && fits(row, (cell) => cell === wanted) ? 0 : 1])
      .filter(([row]) => !wanted || fits(row, (cell) => cell.includes(wanted)));
    const by = state.column === undefined ? () => 0 : (a, b) => order(a[0][state.column][1], b[0][state.column][1]);
    return rows.sort((a, b) => a[2] - b[2] || by(a, b) || a[1] - b[1]);
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
    state.page = 0;
    show();
  };
  const turn = (words, by) => el("button", { type: "button", class: "turn", id: `${id}-${words}`, on: { click: () => { state.page += by; show(); } } }, words);
  const back = turn("Previous", -1), on = turn("Next", 1);
  const search = el("input", { type: "search", id: `${id}-search`, value: state.search, on: { input: () => { state.search = search.value; state.page = 0; show(); } } });
  show();
  const named = new Intl.ListFormat("en", { type: "disjunction" }).format(block.columns.filter((_, k) => !numeric[k]));
  return [
    (long || choice) && el("div", { class: "tools" }, choice, long && el("label", {}, `Search ${named} `, search)),
    el("div", { class: long ? "scroll paged" : "scroll", tabindex: 0, role: "group", "aria-labelledby": `${id}-title` },
      el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
    long && el("div", { class: "tools" }, back, where, on)].filter(Boolean);
}

// the table of all devices for one method: columns with the unit of the values, gains against Local
function devices(block, method) {
  const [, kinds, judge] = block.methods[method], percent = block.unit === "%";
  const digits = (value) => (percent ? value.toFixed(2) : figure(value));
  const cell = (value) => (value === null ? ["-", null, "muted"] : [digits(value), value]);
  const own = kinds.findIndex(([kind]) => kind === judge), sign = block.better === "higher" ? 1 : -1;
  const gain = (k) => {
    const value = kinds[own][1][k], base = block.local[k];
    if (value === null || base === null) return cell(null);
    const more = +(sign * (value - base)).toPrecision(4);
    return [(more > 0 ? "+" : "") + digits(more), more, more < 0 ? "bad" : ""];
  };
  const unit = block.unit ? `, ${block.unit}` : "", compared = block.local.length > 0;
  const counted = ([, values]) => typeof values[0] === "number"; // numbers of samples come last: a phone shows the first columns
  const names = block.facts.filter((fact) => !counted(fact)), counts = block.facts.filter(counted);
  return {
    columns: ["device", ...names.map(([name]) => name), ...kinds.map(([kind]) => kind + unit),
      ...(compared ? [`${judge}: gain over Local${percent ? ", points" : unit}`] : []), ...counts.map(([name]) => name)],
    rows: block.ids.map((id, k) => [[id, id], ...names.map(([, values]) => [values[k], values[k]]), ...kinds.map(([, values]) => cell(values[k])),
      ...(compared ? [gain(k)] : []), ...counts.map(([, values]) => [values[k].toLocaleString("en"), values[k]])]),
    sorted: [1 + names.length + own, sign < 0],
  };
}

// -- the whole page ---------------------------------------------------------------------------------

function drawAll() {
  const shown = drawers.filter(([host]) => !host.closest("details:not([open])")); // what is folded is drawn when it is opened
  for (const [host] of shown) host.wide = host.clientWidth; // all before the first drawing, which would force a new layout
  for (const [host, draw] of shown) draw(host);
}

function build() {
  drawers = [];
  depth = 2;
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
    shown.length > 1 ? el("nav", { "aria-label": "Parts of this page" }, shown.map(([id, name]) => el("a", { href: `#${id}`, on: { click: () => unfold(id) } }, name))) : "");
  document.getElementById("end").replaceChildren(el("p", {}, page.live ? `${page.made}; live, follows the run` : page.made));
  document.title = page.title;
  setTheme(root.dataset.theme);
}

function unfold(id) {
  const part = document.getElementById(id);
  if (part instanceof HTMLDetailsElement) part.open = true;
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
