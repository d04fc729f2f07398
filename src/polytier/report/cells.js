// Heat maps and matrices over time. A cell is one pixel of a small picture that is enlarged.

const BORDERS = 40; // with more groups than this no borders are drawn

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

function rgb(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
  return [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16));
}

// a cell holds one of 255 levels, so more digits would be false precision
const brief = (value) => figure(value === null ? null : +value.toPrecision(3));

// a colour for each of the levels 1 .. 255 between low and high; level 0 is no value
function ramp(low, high, diverging, zero) {
  const stops = diverging ? [rgb("--less"), rgb("--zero"), rgb("--more")] : [rgb("--none"), rgb("--half"), rgb("--full")];
  const most = diverging ? Math.max(Math.abs(low), Math.abs(high)) || 1 : 1;
  const colours = [rgb("--void")];
  for (let level = 0; level < 255; level++) {
    const value = low + ((high - low) * level) / 254;
    const floor = zero ? Math.min(0, low) : low;
    const share = diverging ? (value / most + 1) / 2 : (value - floor) / (high - floor || 1);
    const at = Math.max(0, Math.min(1, share)) * 2, part = at < 1 ? 0 : 1;
    colours.push(stops[part].map((from, k) => from + (stops[part + 1][k] - from) * (at - part)));
  }
  return colours;
}

function picture(levels, columns, rows, colours) {
  const canvas = el("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  levels.forEach((level, k) => image.data.set([...colours[level], 255], 4 * k));
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

function colourBar(low, high, unit, colours) {
  const stops = [1, 64, 128, 191, 255].map((level) => `rgb(${colours[level].map(Math.round).join(" ")})`);
  return el("div", { class: "bar" }, el("span", {}, brief(low)),
    el("span", { class: "ramp", style: `background: linear-gradient(to right, ${stops.join(", ")})` }),
    el("span", {}, `${brief(high)} ${unit}`));
}

// the first and the last column of each group
function groupsOf(groups) {
  const found = [];
  groups.forEach((name, k) => {
    if (!k || name !== groups[k - 1]) found.push({ name, start: k, end: k + 1 });
    else found[found.length - 1].end = k + 1;
  });
  return found;
}

// arrow keys and the pointer choose a cell; `read(row, column)` gives [title, rows]
function readableCells(host, drawing, columns, rows, box, read) {
  const cursor = svg("rect", { class: "cursor", visibility: "hidden" });
  drawing.append(cursor);
  const shown = tip(host);
  let at = null;
  const step = box.width / columns, high = box.pitch;
  const go = (row, column, spoken) => {
    at = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
    const x = box.left + at[1] * step, y = box.top + at[0] * high;
    for (const [name, value] of Object.entries({ x, y, width: step, height: box.cell, visibility: "visible" })) cursor.setAttribute(name, value);
    shown.show(x + step, y + box.cell + 6, ...read(...at), spoken);
  };
  const leave = () => { at = null; cursor.setAttribute("visibility", "hidden"); shown.hide(); };
  const point = (event) => {
    const frame = drawing.getBoundingClientRect();
    const column = Math.floor((event.clientX - frame.left - box.left) / step), row = Math.floor((event.clientY - frame.top - box.top) / high);
    if (column >= 0 && column < columns && row >= 0 && row < rows) go(row, column, false);
    else leave();
  };
  drawing.setAttribute("tabindex", 0);
  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("keydown", (event) => {
    const [row, column] = at || [0, -1], far = event.shiftKey ? 10 : 1;
    const to = { ArrowRight: [row, column + far], ArrowLeft: [row, column - far], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column] }[event.key];
    if (event.key === "Escape") leave();
    if (!to) return;
    event.preventDefault();
    go(...to, true);
  });
}

function heat(host, block) {
  host.replaceChildren();
  const frame = el("div", { class: "plot" });
  host.append(frame);
  const rows = block.rows.length, columns = block.columns.length;
  const width = Math.max(240, host.wide);
  const longest = Math.max(...block.rows.map(wide));
  const above = block.ends.length > 0 || longest > 90; // whether names are above their rows
  // the lines above each row, as pairs of what is at their left and at their right end
  const heads = block.rows.map((name, k) => {
    const end = block.ends[k] || "";
    return wide(name) + wide(end) + 12 < width ? [[name, end]] : [...wrapped(name, width).map((part) => [part, ""]), ["", end]];
  });
  const lead = above ? 4 + 15 * Math.max(...heads.map((lines) => lines.length)) : 4;
  const pitch = above ? lead + 19 : Math.max(4, Math.min(20, Math.floor(380 / rows))), cell = above ? 18 : pitch;
  const left = above ? 0 : longest + 10, top = lead;
  const step = (width - left) / columns, levels = bytesOf(block.values);
  const groups = groupsOf(block.groups), below = groups.length ? groups : groupsOf(block.columns);
  const named = below.length <= 12 && below.every((group) => (group.end - group.start) * step > wide(group.name) + 6);
  const edge = top + (rows - 1) * pitch + cell, height = edge + (named ? 22 : 4) + (block.x ? 16 : 0);
  const colours = ramp(block.low, block.high, block.diverging, block.zero);
  const every = Math.ceil(11 / pitch);
  const value = (row, column) => {
    const level = levels[row * columns + column];
    return level ? block.low + ((block.high - block.low) * (level - 1)) / 254 : null;
  };
  const strips = above ? Array.from({ length: rows }, (_, k) => k) : [0];
  const drawing = svg("svg", { width, height, role: "img", "aria-label": `${block.title}. ${block.rows.map((name, k) => [name, block.ends[k]].filter(Boolean).join(": ")).join("; ")}` },
    strips.map((k) => svg("image", {
      x: left, y: top + k * pitch, width: width - left, height: above ? cell : rows * pitch, preserveAspectRatio: "none",
      href: above ? picture(levels.subarray(k * columns, (k + 1) * columns), columns, 1, colours) : picture(levels, columns, rows, colours),
    })),
    block.rows.map((name, k) => (above
      ? heads[k].map(([start, end], line) => {
        const y = top + k * pitch - 5 - 15 * (heads[k].length - 1 - line);
        return [text(0, y, start, { class: "tick strong" }), text(width, y, end, { class: "tick", "text-anchor": "end" })];
      })
      : k % every === 0 && text(left - 6, top + k * pitch + cell / 2 + 4, name, { class: "tick", "text-anchor": "end" }))),
    groups.length <= BORDERS && groups.slice(1).map((group) => svg("path", { class: "border", d: `M${left + group.start * step} ${top}V${edge}` })),
    named && below.map((group) => text(left + ((group.start + group.end) / 2) * step, edge + 14, group.name, { class: "tick", "text-anchor": "middle" })),
    block.x && text(width, height - 4, block.x, { class: "label", "text-anchor": "end" }));
  frame.append(drawing);
  host.append(colourBar(block.low, block.high, block.unit, colours));
  readableCells(frame, drawing, columns, rows, { left, top, width: width - left, pitch, cell }, (row, column) => {
    const place = [block.columns[column], block.groups[column]].filter((part, k, all) => part && all.indexOf(part) === k).join(", ");
    return [place, [[null, block.rows[row], `${brief(value(row, column))} ${block.unit}`]]];
  });
}

function matrices(host, block, state) {
  host.replaceChildren();
  const n = block.size, last = block.frames.length - 1;
  if (state.moved === undefined || state.frame > last) state.frame = last; // the newest one, until the slider is moved
  const groups = groupsOf(block.groups);
  const frame = el("div", { class: "plot" });
  host.append(frame);
  const named = groups.length > 1 && groups.length <= 12;
  const left = named ? Math.max(...groups.map((group) => wide(group.name))) + 12 : 2, top = 18;
  const side = Math.min(520, Math.max(200, host.wide - left - 2)), cell = side / n;
  const colours = ramp(block.low, block.high, false, true);
  let levels = bytesOf(block.frames[state.frame][1]);
  const image = svg("image", { x: left, y: top, width: side, height: side, preserveAspectRatio: "none" });
  const drawing = svg("svg", { width: left + side + 2, height: top + side + 18, role: "img" }, image,
    text(0, 12, "rows: who listens", { class: "label" }),
    text(left + side, top + side + 14, "columns: to whom", { class: "label", "text-anchor": "end" }),
    groups.length <= BORDERS && groups.slice(1).map((group) => svg("path", { class: "border", d: `M${left + group.start * cell} ${top}v${side}M${left} ${top + group.start * cell}h${side}` })),
    named && groups.map((group) => text(left - 6, top + ((group.start + group.end) / 2) * cell + 4, group.name, { class: "tick", "text-anchor": "end" })));
  frame.append(drawing);
  const label = el("output", {});
  const slider = el("input", {
    type: "range", min: 0, max: last, step: 1, value: state.frame, id: `${state.id}-slider`, "aria-label": `${block.title}: round`,
    on: { input: () => { state.frame = +slider.value; state.moved = true; show(); } },
  });
  const show = () => {
    const [name, values] = block.frames[state.frame];
    levels = bytesOf(values);
    image.setAttribute("href", picture(levels, n, n, colours));
    drawing.setAttribute("aria-label", `${block.title}: who listens to whom, ${name}`);
    slider.setAttribute("aria-valuetext", name);
    label.textContent = name;
  };
  show();
  host.append(el("div", { class: "slide" }, slider, label), colourBar(block.low, block.high, "weight", colours));
  readableCells(frame, drawing, n, n, { left, top, width: side, pitch: cell, cell }, (row, column) => {
    const level = levels[row * n + column], of = (k) => (block.groups.length ? ` (group ${block.groups[k]})` : "");
    const value = brief(level ? block.low + ((block.high - block.low) * (level - 1)) / 254 : null);
    return [`row ${row + 1}${of(row)}`, [[null, `column ${column + 1}${of(column)}`, value]]];
  });
}
