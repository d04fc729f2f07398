"use strict";
// Functions that all charts share, and charts made of lines and bars. A chart is a function that fills its host element,
// which is `wide` pixels wide. It is called again when the width, the colours or the data of the page change.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "1.5 3"]; // the second one is for names beyond the number of colours
const SHAPES = [
  "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3-3h6v6h-6z", "M0-4l4 7h-8z", "M0-4.4l4.4 4.4l-4.4 4.4l-4.4-4.4z",
  "M0 4l4-7h-8z", "M-4-1.3h2.7v-2.7h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7z",
];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(9).filter((child) => child || child === 0)); // absent children are false, null or ""
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const text = (x, y, content, attributes) => svg("text", { x, y, ...attributes }, content);

const pen = document.createElement("canvas").getContext("2d");
pen.font = `550 12px ${getComputedStyle(document.body).fontFamily}`;
const wide = (words) => pen.measureText(words).width; // the width of a text in a chart, in pixels

// a text as lines of at most this width; a word that is too long is broken
function wrapped(words, width) {
  const lines = [""];
  for (const part of words.split(/(?<=\s)/).flatMap((word) => (wide(word) > width ? [...word] : [word]))) {
    if (wide(lines[lines.length - 1] + part.trimEnd()) > width) lines.push("");
    lines[lines.length - 1] += part;
  }
  return lines;
}

// -- numbers ----------------------------------------------------------------------------------------

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 999.5) return `${unit === "B" || bytes >= 9.95 ? Math.round(bytes) : bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} TB`;
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  const large = Math.abs(value);
  if (large >= 1e6 || (large > 0 && large < 1e-3)) return value.toExponential(2);
  return large >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : String(+value.toPrecision(4));
}

function ticks(low, high, about) {
  const raw = (high - low) / Math.max(1, about) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((each) => each * power >= raw * 0.999) * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

function logTicks(low, high, about) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const parts = last - first < 2 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil((last - first + 1) / about));
  const found = [];
  for (let power = first - 1; power <= last; power++)
    for (const part of parts)
      if ((power - first) % stride === 0 || parts.length > 1) found.push(part * 10 ** power);
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

function scale(low, high, from, to, log) {
  const turn = log ? Math.log10 : (value) => value;
  const a = turn(low), b = turn(high);
  return (value) => from + ((turn(value) - a) / (b - a || 1)) * (to - from);
}

// -- colours and markers ----------------------------------------------------------------------------

function look(name) {
  const place = Math.max(0, page.names.indexOf(name));
  return {
    colour: `var(--c${place % 10})`, shape: SHAPES[place % SHAPES.length],
    dash: DASHES[Math.min(DASHES.length - 1, Math.floor(place / 10))],
  };
}

function swatch(series) {
  const { colour, shape, dash } = look(series.like || series.name);
  return svg("svg", { class: "swatch", width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" },
    svg("path", { d: "M1 6H25", stroke: colour, "stroke-width": 2, "stroke-dasharray": series.dashed ? "5 3" : dash }),
    svg("path", { d: shape, transform: "translate(13 6)", fill: colour }));
}

function legend(all, hidden, changed) {
  const place = (series) => page.names.indexOf(series.like || series.name);
  const once = new Map([...all].sort((a, b) => place(a) - place(b)).map((series) => [series.name, series]));
  if (once.size < 2) return null;
  const buttons = [...once.values()].map((series) =>
    el("button", {
      type: "button", class: "entry", "aria-pressed": String(!hidden.has(series.name)), title: "Show or hide",
      on: {
        click(event) {
          if (!hidden.delete(series.name)) hidden.add(series.name);
          event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(series.name)));
          changed();
        },
      },
    }, swatch(series), el("span", {}, series.name)));
  return el("div", { class: "legend", role: "group", "aria-label": "Lines shown" }, buttons);
}

// -- reading values: by pointer, touch and arrow keys ------------------------------------------------

function tip(host) {
  const box = el("div", { class: "tip", hidden: "" });
  host.append(box);
  return {
    hide: () => { box.hidden = true; },
    show(x, y, title, rows, spoken) {
      box.setAttribute("aria-live", spoken ? "polite" : "off");
      box.replaceChildren(el("strong", {}, title), ...rows.map(([mark, name, value]) =>
        el("div", {}, mark, el("span", { class: "name" }, name), el("span", { class: "value" }, value))));
      box.hidden = false;
      const room = host.clientWidth - box.offsetWidth - 4;
      const left = x + 14 > room ? x - box.offsetWidth - 14 : x + 14;
      box.style.left = `${Math.max(4, Math.min(room, left))}px`;
      box.style.top = `${Math.max(0, y)}px`;
    },
  };
}

// `places` are the horizontal positions of values, in order; `read(k)` gives [title, rows]; `mark(k)` marks the position
function readable(host, picture, places, read, mark, top) {
  if (!places.length) return;
  const box = tip(host);
  let now = -1;
  const go = (k, spoken) => {
    now = k;
    mark(k);
    box.show(places[k], top, ...read(k), spoken);
  };
  const leave = () => { now = -1; mark(-1); box.hide(); };
  const nearest = (x) => places.reduce((best, place, k) => (Math.abs(place - x) < Math.abs(places[best] - x) ? k : best), 0);
  picture.setAttribute("tabindex", 0);
  picture.addEventListener("pointermove", (event) => go(nearest(event.clientX - picture.getBoundingClientRect().left), false));
  picture.addEventListener("pointerdown", (event) => go(nearest(event.clientX - picture.getBoundingClientRect().left), false));
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  picture.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1, last = places.length - 1;
    const to = { ArrowRight: now + far, ArrowLeft: now < 0 ? last : now - far, Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (to === undefined) return;
    event.preventDefault();
    go(Math.max(0, Math.min(last, to)), true);
  });
}

// -- lines ------------------------------------------------------------------------------------------

// the range of the lines; bands extend it by at most half of it, and percentages stay within 0 and 100
function extent(chart, hidden) {
  const reach = (columns) => {
    const values = chart.series.filter((series) => !hidden.has(series.name)).flatMap(columns)
      .filter((value) => value !== null && !(chart.scale === "log" && value <= 0));
    return [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  };
  let [low, high] = reach((series) => series.y);
  if (low > high) return [0, 1];
  if (chart.scale === "log") return [low, high > low ? high : low * 10];
  const [least, most] = reach((series) => [...series.low, ...series.high, ...series.y]);
  const beyond = (high - low) / 2 || Infinity, margin = (high - low) * 0.04 || Math.abs(high) * 0.05 || 0.5;
  const floor = low >= 0 ? 0 : -Infinity, roof = /%/.test(chart.y) && high <= 100 ? 100 : Infinity;
  low = Math.max(floor, Math.max(least, low - beyond) - margin);
  high = Math.min(roof, Math.min(most, high + beyond) + margin);
  return [low, high];
}

let clips = 0;

function pathOf(xs, ys) {
  let d = "", pen = "M";
  xs.forEach((x, k) => {
    if (ys[k] === null || Number.isNaN(ys[k])) { pen = "M"; return; }
    d += `${pen}${x.toFixed(1)} ${ys[k].toFixed(1)}`;
    pen = "L";
  });
  return d;
}

function lines(host, chart, { hidden, range, height = 320, named = true, title = chart.title }) {
  host.replaceChildren();
  const shown = chart.series.filter((series) => !hidden.has(series.name));
  const width = Math.max(240, host.wide);
  const [low, high] = range || extent(chart, hidden);
  const bytes = chart.scale === "bytes", log = chart.scale === "log";
  const every = shown.flatMap((series) => series.x).filter((x) => !bytes || x > 0);
  const xs = [...new Set(every)].sort((a, b) => a - b);
  const left = xs[0] ?? 0, right = xs[xs.length - 1] ?? 1;
  const yTicks = (log ? logTicks : ticks)(low, high, height / 55);
  const shownX = bytes ? (value) => size(value).replace(".0 ", " ") : figure;
  const longest = Math.max(0, ...shown.map((series) => wide(series.name)));
  const direct = named && width >= 620 && shown.length > 1 && shown.length <= 14 && longest < 0.3 * width;
  const room = {
    left: Math.max(...yTicks.map((tick) => wide(figure(tick))), 1) + 14, top: 24, bottom: 38,
    right: direct ? longest + 16 : Math.max(16, wide(shownX(right)) / 2 + 2),
  };
  const xAt = scale(left, right > left ? right : left + 1, room.left, width - room.right, bytes);
  const yAt = scale(low, high, height - room.bottom, room.top, log);
  const xTicks = (bytes ? logTicks : ticks)(left, right > left ? right : left + 1, (width - room.left - room.right) / (bytes ? 62 : 70));
  const ends = shown.map((series) => {
    const last = series.y.findLastIndex((value) => value !== null);
    return last < 0 ? null : { series, x: series.x[last], y: series.y[last] };
  }).filter((end) => end !== null);
  const spoken = ends.map((end) => `${end.series.name} ${figure(end.y)}`).join(", ");
  const cross = svg("g", { class: "cross" });
  const clip = `clip-${clips++}`;
  const whole = (value) => bytes || Number.isInteger(value) || xs.some((x) => !Number.isInteger(x));
  const picture = svg("svg", { width, height, role: "img", "aria-label": `${title}: ${chart.y} by ${chart.x}. Last: ${spoken || "nothing yet"}` },
    yTicks.map((tick) => [
      svg("path", { class: "grid", d: `M${room.left} ${yAt(tick)}H${width - room.right}` }),
      text(room.left - 7, yAt(tick) + 4, figure(tick), { class: "tick", "text-anchor": "end" })]),
    apart(xTicks.filter(whole), xAt, shownX).map((tick) => [
      svg("path", { class: "axis", d: `M${xAt(tick)} ${height - room.bottom}v4` }),
      text(xAt(tick), height - room.bottom + 16, shownX(tick), { class: "tick", "text-anchor": "middle" })]),
    svg("path", { class: "axis", d: `M${room.left} ${height - room.bottom}H${width - room.right}` }),
    text(0, 12, chart.y, { class: "label" }),
    text(width - room.right, height - 5, chart.x, { class: "label", "text-anchor": "end" }),
    svg("clipPath", { id: clip }, svg("rect", { x: room.left, y: room.top - 2, width: width - room.left - room.right, height: height - room.top - room.bottom + 2 })),
    shown.map((series) => {
      const { colour, dash, shape } = look(series.like || series.name);
      const keep = series.x.map((x, k) => k).filter((k) => !bytes || series.x[k] > 0);
      const px = keep.map((k) => xAt(series.x[k]));
      const py = (values) => keep.map((k) => (values[k] === null || (log && values[k] <= 0) ? null : yAt(values[k])));
      const band = series.low.length
        ? pathOf(px, py(series.high)) + pathOf([...px].reverse(), py(series.low).reverse()).replace("M", "L") + "Z" : "";
      const last = ends.find((end) => end.series === series);
      return svg("g", {},
        band && svg("path", { d: band, fill: colour, class: "band", "clip-path": `url(#${clip})` }),
        svg("path", { class: "line", d: pathOf(px, py(series.y)), stroke: colour, "stroke-dasharray": series.dashed ? "6 4" : dash }),
        last && (!bytes || last.x > 0) && svg("path", { d: shape, fill: colour, class: "end", transform: `translate(${xAt(last.x)} ${yAt(last.y)})` }));
    }),
    direct && endNames(ends, xAt, yAt, room.top, height - room.bottom),
    cross);
  host.append(picture);
  const mark = (k) => cross.replaceChildren(...(k < 0 ? [] : [svg("path", { d: `M${xAt(xs[k])} ${room.top}V${height - room.bottom}` })]));
  const read = (k) => {
    const rows = shown.map((series) => {
      const first = series.x[0], end = series.x[series.x.length - 1];
      if (xs[k] < first || xs[k] > end) return null;
      let near = 0;
      series.x.forEach((x, j) => { if (Math.abs(x - xs[k]) < Math.abs(series.x[near] - xs[k])) near = j; });
      const value = series.y[near], half = series.low.length && value !== null ? (series.high[near] - series.low[near]) / 2 : 0;
      return value === null ? null : [swatch(series), series.name, figure(value) + (half ? ` ± ${figure(+half.toPrecision(2))}` : ""), value];
    }).filter((row) => row !== null).sort((a, b) => b[3] - a[3]);
    return [`${bytes ? size(xs[k]) : `${chart.x} ${figure(xs[k])}`}: ${chart.y}`, rows];
  };
  readable(host, picture, xs.map(xAt), read, mark, room.top);
}

// the ticks whose labels do not run into the one before
function apart(ticks, at, shown) {
  let free = -Infinity;
  return ticks.filter((tick) => {
    const half = wide(shown(tick)) / 2, fits = at(tick) - half > free;
    if (fits) free = at(tick) + half + 6;
    return fits;
  });
}

// names beside the ends of lines; overlapping names are moved apart
function endNames(ends, xAt, yAt, top, bottom) {
  const places = ends.map((end) => ({ ...end, left: xAt(end.x) + 9, at: yAt(end.y) })).sort((a, b) => a.at - b.at);
  for (let times = 0; times < 300; times++) {
    places.forEach((one, j) => places.slice(j + 1).forEach((other) => {
      const lack = 13 - (other.at - one.at);
      if (lack > 0 && Math.abs(one.left - other.left) < 90) { one.at -= lack / 2; other.at += lack / 2; }
    }));
    for (const place of places) place.at = Math.max(top, Math.min(bottom, place.at));
  }
  return places.map(({ series, left, at }) => text(left, at + 4, series.name,
    { class: "direct", style: `fill: ${look(series.like || series.name).colour}` }));
}

// -- bars -------------------------------------------------------------------------------------------

function bars(host, block, [name, heights, middle], most) {
  host.replaceChildren(el("p", { class: "small" }, name));
  const frame = el("div", { class: "plot" });
  host.append(frame);
  const width = Math.max(120, host.wide), height = 136, bottom = 34, top = 22, left = wide(figure(+most.toPrecision(2))) + 8;
  const first = block.edges[0], last = block.edges[block.edges.length - 1];
  const xAt = scale(first, last, left, width - 6), yAt = scale(0, most || 1, height - bottom, top);
  const cross = svg("g", { class: "cross" });
  const spoken = middle === null ? "" : `mean ${figure(middle)}`;
  const picture = svg("svg", { width, height, role: "img", "aria-label": `${block.title}, ${name}: ${block.y} by ${block.x}. ${spoken}` },
    text(0, 11, block.y, { class: "label" }),
    text(width, height - 4, block.x, { class: "label", "text-anchor": "end" }),
    text(left - 5, top + 6, figure(+most.toPrecision(2)), { class: "tick", "text-anchor": "end" }),
    text(left - 5, height - bottom, "0", { class: "tick", "text-anchor": "end" }),
    heights.map((value, k) => svg("rect", {
      x: xAt(block.edges[k]) + 0.5, width: Math.max(0.5, xAt(block.edges[k + 1]) - xAt(block.edges[k]) - 1),
      y: yAt(value), height: height - bottom - yAt(value), fill: look(name).colour,
    })),
    svg("path", { class: "axis", d: `M${left} ${height - bottom}H${width - 6}` }),
    ticks(first, last, 4).map((tick) => text(xAt(tick), height - bottom + 14, figure(tick), { class: "tick", "text-anchor": tick === last ? "end" : "middle" })),
    middle !== null && svg("path", { class: "mean", d: `M${xAt(middle)} ${top - 4}V${height - bottom}` }), cross);
  frame.append(picture);
  const centres = heights.map((_, k) => (xAt(block.edges[k]) + xAt(block.edges[k + 1])) / 2);
  const mark = (k) => cross.replaceChildren(...(k < 0 ? [] : [svg("path", { d: `M${centres[k]} ${top - 4}V${height - bottom}` })]));
  const read = (k) => [`${block.x}: ${figure(block.edges[k])} to ${figure(block.edges[k + 1])}`,
    [[null, block.y, figure(heights[k])], ...(middle === null ? [] : [[null, "mean", figure(middle)]])]];
  readable(frame, picture, centres, read, mark, 0);
}

// -- traffic on the tree ----------------------------------------------------------------------------

function tree(host, [name, tiers, links], most) {
  host.replaceChildren(el("p", { class: "small" }, name));
  const width = Math.max(200, host.wide), step = 66, top = 14;
  const height = top * 2 + step * (tiers.length - 1) + 8;
  const span = Math.min(190, width * 0.42), from = span + 46, room = width - from - 62;
  const { colour } = look(name);
  const drawn = tiers.map(([, nodes], k) => Math.min(nodes, k === tiers.length - 1 ? 24 : 8));
  const place = (k, j) => [span * ((j + 0.5) / drawn[k]), top + k * step];
  const edges = tiers.slice(1).map((_, k) => Array.from({ length: drawn[k + 1] }, (_, j) => {
    const [x, y] = place(k + 1, j), [px, py] = place(k, Math.floor((j * drawn[k]) / drawn[k + 1]));
    return `M${px.toFixed(1)} ${py}L${x.toFixed(1)} ${y}`;
  }).join("")).join("");
  const called = tiers.map(([tier, nodes]) => (nodes === 1 ? tier : `${nodes.toLocaleString("en")} ${tier}s`));
  const spoken = links.map(([link, down, up]) => `${link}: ${size(down)} down, ${size(up)} up`).join("; ");
  host.append(svg("svg", { width, height, role: "img", "aria-label": `${name}, bytes by link. ${spoken}` },
    svg("path", { class: "edge", d: edges }),
    tiers.map((_, k) => Array.from({ length: drawn[k] }, (_, j) => {
      const [cx, cy] = place(k, j);
      return svg("circle", { cx, cy, r: k === 0 ? 6 : k === tiers.length - 1 ? 2.6 : 4.5, fill: colour, class: "node" });
    })),
    called.map((label, k) => text(from - 38, top + k * step + 4, label, { class: "tick tier" })),
    links.map(([, ...ways], k) => ways.map((amount, j) => {
      const y = top + k * step + 17 + j * 18, long = Math.max(amount > 0 ? 1.5 : 0, (amount / (most || 1)) * room);
      return [
        text(from - 6, y + 10, j ? "up" : "down", { class: "tick", "text-anchor": "end" }),
        svg("rect", { x: from, y, width: long, height: 13, rx: 1.5, fill: colour, opacity: j ? 0.55 : 1 }),
        text(from + long + 5, y + 10.5, size(amount), { class: "tick strong" })];
    }))));
}
