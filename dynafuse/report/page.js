"use strict";
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const BOX = {width: 212, height: 42, pitch: 68, top: 14};
const ROW = 30; // height of a table's row
const FAR = 14; // rows that an edge may pass, and some
const LETTERS = {triton: "T", nvfuser: "N", inductor: "I", eager: "E"};
const SVG = "http://www.w3.org/2000/svg";
const by = id => document.getElementById(id);
const string = i => DATA.strings[i];

let graph; // the graph that is shown
let pinned = null; // the step that was clicked, which the details return to
let shown = null; // the step in the details

// ------------------------------------------------------------------ elements; whatever is text is set as text

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter(child => child !== null));
  return node;
}

function svgElement(name, attributes = {}, content = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (content !== null) node.textContent = content;
  return node;
}

const colour = executor => `var(--${executor in LETTERS ? executor : "other"})`;
const letter = executor => LETTERS[executor] ?? executor.slice(0, 1).toUpperCase();
const badge = executor => element("span", {class: "badge", "aria-hidden": "true", style: `background:${colour(executor)}`},
  letter(executor));
const fixed = (value, digits = 1) => value === undefined || value === null ? "–" : value.toFixed(digits);
const megabytes = bytes => bytes === undefined ? "–" : (bytes / 1e6).toFixed(3);
const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const percent = more => more < 9 ? `${more < 0 ? "-" : "+"}${Math.abs(Math.round(100 * more))} %` : `×${Math.round(1 + more)}`;
const others = step => (step.prices ?? []).filter(p => p[0] !== step.executor);

const pen = document.createElement("canvas").getContext("2d");

function fitting(text, width, font) { // as much of a text as fits, in pixels
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  let most = text.length;
  while (most > 1 && pen.measureText(cut(text, most)).width > width) most--;
  return cut(text, most);
}

// ------------------------------------------------------------------ a graph's indices, computed when it is first shown

function indexed(data) {
  if (data.rowsOf) return data;
  data.rowsOf = Array.from({length: data.rows}, () => []);
  data.reads = data.steps.map(() => []);
  data.readers = data.steps.map(() => []);
  data.from = Array.from({length: data.rows}, () => []);
  data.refusalsOf = data.steps.map(() => []);
  data.alike = new Map();
  data.steps.forEach((step, i) => {
    step.id = i;
    data.rowsOf[step.row].push(i);
    if (step.key) data.alike.set(step.key, [...(data.alike.get(step.key) ?? []), i]);
    step.search = [step.name, step.executor, step.key ?? "", string(step.label), ...step.ops.map(o => string(o[0])),
      step.forced ? `forced ${step.forced}` : ""].join(" ").toLowerCase();
  });
  for (const edge of [...data.edges, ...data.far]) {
    data.reads[edge[1]].push(edge[0]);
    data.readers[edge[0]].push(edge[1]);
  }
  data.edges.forEach((edge, i) => data.from[data.steps[edge[0]].row].push(i));
  data.refusals.forEach((refusal, i) => new Set([...refusal[4], ...refusal[5]]).forEach(s => data.refusalsOf[s].push(i)));
  data.rowsOf.forEach(row => row.sort((a, b) => data.steps[a].x - data.steps[b].x));
  return data;
}

// ------------------------------------------------------------------ the picture: only what is in view is there

const canvas = by("canvas"), picture = by("picture");
const edgeLayer = svgElement("g"), boxLayer = svgElement("g");
canvas.append(edgeLayer, boxLayer);
const boxes = new Map(), edges = new Map();
const topOf = row => BOX.top + row * BOX.pitch;

function drawPicture() {
  boxes.clear(); edges.clear(); edgeLayer.replaceChildren(); boxLayer.replaceChildren();
  const height = graph.rows ? topOf(graph.rows - 1) + BOX.height + BOX.top : 0;
  canvas.setAttribute("width", graph.width + 32);
  canvas.setAttribute("height", height);
  canvas.setAttribute("viewBox", `-16 0 ${graph.width + 32} ${height}`);
  by("plan").style.setProperty("--height", `${Math.min(Math.max(height + 2, 360), 620)}px`);
  picture.scrollTop = 0;
  picture.scrollLeft = Math.max(0, (graph.width + 32 - picture.clientWidth) / 2);
  drawView();
}

function drawView() {
  const first = Math.max(0, Math.floor(picture.scrollTop / BOX.pitch) - 3);
  const last = Math.min(graph.rows - 1, Math.ceil((picture.scrollTop + picture.clientHeight) / BOX.pitch) + 3);
  const wanted = new Set(), lines = new Set();
  for (let row = first; row <= last; row++) graph.rowsOf[row].forEach(i => wanted.add(i));
  for (let row = Math.max(0, first - FAR); row <= last; row++) {
    for (const i of graph.from[row]) if (graph.steps[graph.edges[i][1]].row >= first) lines.add(i);
  }
  if (boxes.has(focusable)) wanted.add(focusable);
  keep(boxes, wanted, boxLayer, box);
  keep(edges, lines, edgeLayer, i => line(graph.edges[i]));
  mark();
}

function keep(map, wanted, layer, make) {
  for (const [i, node] of map) if (!wanted.has(i)) { node.remove(); map.delete(i); }
  for (const i of wanted) if (!map.has(i)) { const node = make(i); map.set(i, node); layer.append(node); }
}

function box(i) {
  const step = graph.steps[i];
  const label = `${step.name}, ${step.executor}: ${string(step.label)}; ${fixed(step.us)} microseconds`;
  const us = step.us === undefined ? "" : `${fixed(step.us)} µs`, room = BOX.width - 40;
  const group = svgElement("g", {class: "box", role: "button", tabindex: i === focusable ? 0 : -1, "data-step": i,
    "aria-label": label, transform: `translate(${step.x - BOX.width / 2} ${topOf(step.row)})`});
  group.append(
    svgElement("rect", {class: "body", width: BOX.width, height: BOX.height, rx: 6}),
    svgElement("rect", {width: 24, height: BOX.height, rx: 6, fill: colour(step.executor)}),
    svgElement("text", {class: "letter", x: 12, y: 26}, letter(step.executor)),
    svgElement("text", {class: "name", x: 32, y: 17}, fitting(step.name, room - 7.5 * us.length - 6, "600 12px")),
    svgElement("text", {class: "us", x: BOX.width - 8, y: 17}, us),
    svgElement("text", {class: "ops", x: 32, y: 33}, fitting(cut(string(step.label), 48), room, "11px")));
  return group;
}

function line(edge, kind = "") {
  const [source, target, ...lanes] = edge, a = graph.steps[source], b = graph.steps[target];
  const points = [[a.x, topOf(a.row) + BOX.height]];
  lanes.forEach((x, i) => points.push([x, topOf(a.row + 1 + i)], [x, topOf(a.row + 1 + i) + BOX.height]));
  points.push([b.x, topOf(b.row)]);
  let path = `M${points[0]}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i], middle = (y0 + y1) / 2;
    path += x0 === x1 ? `L${points[i]}` : `C${x0},${middle} ${x1},${middle} ${x1},${y1}`;
  }
  return svgElement("path", {class: `edge ${kind}`, d: path});
}

function mark() { // what the step that is shown has to do with the others
  const step = shown === null ? null : graph.steps[shown];
  const alike = new Set(step?.key ? graph.alike.get(step.key) : []);
  for (const [i, group] of boxes) {
    group.classList.toggle("shown", i === shown);
    group.classList.toggle("alike", i !== shown && alike.has(i));
  }
  for (const [i, path] of edges) path.classList.toggle("shown", graph.edges[i][0] === shown || graph.edges[i][1] === shown);
  edgeLayer.querySelectorAll(".far").forEach(path => path.remove());
  if (step) graph.far.filter(e => e.includes(shown)).slice(0, 60).forEach(e => edgeLayer.append(line(e, "far shown")));
  drawMark();
  document.querySelectorAll("#steps tr[data-step]").forEach(row => row.classList.toggle("shown", +row.dataset.step === shown));
}

let focusable = 0, frame = 0;
picture.addEventListener("scroll", () => { frame ||= requestAnimationFrame(() => { frame = 0; drawView(); }); });

function focusBox(i) {
  boxes.get(focusable)?.setAttribute("tabindex", -1);
  focusable = i;
  reveal(i);
  drawView();
  boxes.get(i).setAttribute("tabindex", 0);
  boxes.get(i).focus({preventScroll: true});
}

function reveal(i) {
  const step = graph.steps[i], top = topOf(step.row);
  if (top < picture.scrollTop + 10 || top + BOX.height > picture.scrollTop + picture.clientHeight - 10) {
    picture.scrollTop = top - picture.clientHeight / 2 + BOX.height / 2;
  }
  const left = step.x + 16 - BOX.width / 2;
  if (left < picture.scrollLeft || left + BOX.width > picture.scrollLeft + picture.clientWidth) {
    picture.scrollLeft = left - picture.clientWidth / 2 + BOX.width / 2;
  }
}

function neighbour(i, key) {
  const step = graph.steps[i], row = graph.rowsOf[step.row], at = row.indexOf(i);
  if (key === "ArrowLeft") return row[at - 1];
  if (key === "ArrowRight") return row[at + 1];
  if (key === "Home") return 0;
  if (key === "End") return graph.steps.length - 1;
  const next = graph.rowsOf[step.row + (key === "ArrowUp" ? -1 : 1)];
  return next?.reduce((best, j) => Math.abs(graph.steps[j].x - step.x) < Math.abs(graph.steps[best].x - step.x) ? j : best);
}

const stepAt = event => event.target.closest?.("[data-step]");
canvas.addEventListener("pointerover", event => { const at = stepAt(event); if (at) show(+at.dataset.step); });
canvas.addEventListener("pointerleave", () => show(pinned));
canvas.addEventListener("focusin", event => { const at = stepAt(event); if (at) { focusable = +at.dataset.step; show(focusable); } });
canvas.addEventListener("click", event => { const at = stepAt(event); if (at) pin(+at.dataset.step); });
canvas.addEventListener("keydown", event => {
  const at = stepAt(event);
  if (!at) return;
  if (["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
    const next = neighbour(+at.dataset.step, event.key);
    if (next !== undefined) focusBox(next);
    event.preventDefault();
  } else if (event.key === "Enter" || event.key === " ") {
    pin(+at.dataset.step);
    event.preventDefault();
  }
});

// ------------------------------------------------------------------ totals, and the time of all steps as a strip

const timeline = by("timeline");

function drawTotals() {
  by("summary").textContent = graph.summary;
  by("total").textContent = graph.total;
  const used = new Set(graph.steps.map(step => step.executor));
  const sums = new Map([...Object.keys(LETTERS), ...used].filter(name => used.has(name)).map(name => [name, [0, 0]]));
  for (const step of graph.steps) {
    const [number, us] = sums.get(step.executor);
    sums.set(step.executor, [number + 1, us + (step.us ?? 0)]);
  }
  by("legend").replaceChildren(...[...sums].map(([name, [number, us]]) => element("li", {}, badge(name),
    element("span", {}, `${name}: ${number} ${number === 1 ? "step" : "steps"}, ${fixed(us)} µs`))));
  const total = graph.steps.reduce((sum, step) => sum + (step.us ?? 0), 0);
  timeline.replaceChildren();
  timeline.style.display = total ? "" : "none";
  timeline.setAttribute("viewBox", "0 0 10000 30");
  let x = 0;
  graph.ends = graph.steps.map(step => {
    const width = total ? (step.us ?? 0) / total * 10000 : 0;
    timeline.append(svgElement("rect", {x, y: 4, width: Math.max(width - Math.min(7, 0.15 * width), 1), height: 22,
      fill: colour(step.executor)}));
    return x += width;
  });
  timeline.append(svgElement("rect", {class: "mark", y: 1, height: 28, width: 0}));
}

function drawMark() {
  const marker = timeline.querySelector(".mark");
  if (!marker) return;
  const start = shown === null || shown === 0 ? 0 : graph.ends[shown - 1];
  marker.setAttribute("x", start);
  marker.setAttribute("width", shown === null ? 0 : Math.max(graph.ends[shown] - start, 10));
  marker.style.display = shown === null ? "none" : "";
}

function stepUnder(event) {
  const bounds = timeline.getBoundingClientRect(), x = (event.clientX - bounds.left) / bounds.width * 10000;
  return Math.max(0, graph.ends.findIndex(end => end >= x));
}

timeline.addEventListener("pointermove", event => show(stepUnder(event)));
timeline.addEventListener("pointerleave", () => show(pinned));
timeline.addEventListener("click", event => { pin(stepUnder(event)); reveal(pinned); });

// ------------------------------------------------------------------ the details of one step

function pin(i) {
  pinned = i;
  show(i);
}

function show(i) {
  if (i === shown) return;
  shown = i;
  by("detail").replaceChildren(...(i === null ? hint() : details(graph.steps[i])));
  by("detail").scrollTop = 0;
  mark();
}

function hint() {
  return [element("p", {class: "hint"}, "Point at a step, or go through them with the arrow keys, to see what it computes, " +
    "what it would cost elsewhere and which merges it was refused. A click keeps it here.")];
}

function details(step) {
  const parts = [element("div", {class: "title"}, badge(step.executor), element("h3", {}, step.name),
    element("span", {class: "soft"}, step.executor + (step.kernel_class ? `, ${step.kernel_class} kernel` : "")))];
  const facts = [`${megabytes(step.bytes)} MB`, `${fixed(step.us)} µs on the device`, `${fixed(step.host)} µs on the host`];
  parts.push(element("p", {}, facts.join(" · ")));
  if (step.reason !== undefined) parts.push(element("p", {}, `Runs eager: ${string(step.reason)}`));
  if (step.forced) parts.push(element("p", {}, `Forced to ${step.forced}`));
  for (const reason of step.fallback ?? []) parts.push(element("p", {}, `Fell back: asked for ${string(reason)}`));
  for (const note of step.notes ?? []) parts.push(element("p", {}, string(note)));
  parts.push(...prices(step), ...section("Ops", list(step.ops.map(([name, n]) => string(name) + (n > 1 ? ` ×${n}` : "")), 30)));
  if (step.key) parts.push(...kernel(step));
  parts.push(...section("Reads", links(graph.reads[step.id])), ...section("Read by", links(graph.readers[step.id])));
  if (step.lines) parts.push(...section("Your code", list(step.lines.map(string), 8, "code")));
  if (step.merges) parts.push(...section("Merged along", list(step.merges.map(string), 12)));
  const refused = graph.refusalsOf[step.id];
  if (refused.length) parts.push(...section(`Rejected merges (${refused.length})`, list(refused.map(refusalText), 12)));
  return parts;
}

const section = (title, content) => content ? [element("h4", {}, title), content] : [];

function list(texts, most, kind = "span") {
  if (!texts.length) return null;
  const items = texts.slice(0, most).map(text => element("li", {}, element(kind, {}, text)));
  if (texts.length > most) items.push(element("li", {class: "soft"}, `${texts.length - most} more`));
  return element("ul", {}, ...items);
}

function links(steps) {
  if (!steps.length) return null;
  const buttons = steps.slice(0, 24).map(i => stepButton(i));
  if (steps.length > 24) buttons.push(element("span", {class: "soft"}, `${steps.length - 24} more`));
  return element("div", {class: "links"}, ...buttons);
}

function stepButton(i) {
  const button = element("button", {type: "button"}, cut(graph.steps[i].name, 40));
  button.addEventListener("click", event => { event.stopPropagation(); pin(i); reveal(i); });
  return button;
}

function prices(step) {
  const measured = step.measured ?? {};
  const names = [...new Set([...(step.prices ?? []).map(p => p[0]), ...Object.keys(measured)])];
  if (names.length < 2 && !step.measured) return [];
  const priceOf = new Map((step.prices ?? []).map(p => [p[0], p]));
  const head = ["executor", "device µs", "host µs", ...(step.measured ? ["measured µs"] : [])];
  const rows = names.map(name => {
    const [, us, host] = priceOf.get(name) ?? [];
    const cells = [name, fixed(us), fixed(host), ...(step.measured ? [fixed(measured[name])] : [])];
    return element("tr", name === step.executor ? {class: "chosen"} : {}, ...cells.map(cell => element("td", {}, cell)));
  });
  const table = element("table", {}, element("thead", {}, element("tr", {},
    ...head.map(title => element("th", {scope: "col"}, title)))), element("tbody", {}, ...rows));
  const parts = section("Prices", table);
  if (step.second) {
    const [name, of, , more] = step.second;
    parts.push(element("p", {}, `Next best is ${name}` + (more === null ? "." : `: ${percent(more)} of ${of} time.`)));
  }
  if (step.unsure) parts.push(element("p", {}, `Too close to call: ${step.unsure.join(", ")}.`));
  for (const [name, , , override] of others(step)) {
    if (override) parts.push(element("p", {}, `${name} would win with `, element("code", {}, override), "."));
  }
  return parts;
}

function reuse(step) {
  return step.family ? `family: ${step.family}` : step.reused ? "reused" : step.origin;
}

function kernel(step) {
  const alike = graph.alike.get(step.key).filter(i => i !== step.id);
  const parts = section("Kernel", element("code", {}, step.key));
  if (step.reused) parts.push(element("p", {class: "soft"}, "Reused: an earlier step has made it."));
  if (step.apart) parts.push(...section(`Nearly the kernel of ${string(step.nearly)}, but`, list(step.apart.map(string), 12)));
  if (step.family) parts.push(element("p", {class: "soft"}, `Not its own, but one that other lengths share: ${step.family}.`));
  return alike.length ? [...parts, ...section(`Same kernel in this graph (${alike.length})`, links(alike))] : parts;
}

function refusalText(i) {
  const [kind, first, second, detail] = graph.refusals[i].slice(0, 4).map(string);
  return `${first} | ${second}: ${kind}` + (detail ? ` (${detail})` : "");
}

// ------------------------------------------------------------------ tables whose rows are built when they come into view

function virtual(id, columns, row) {
  const table = by(id), scroll = table.parentElement, body = table.tBodies[0];
  let rows = [], sorted = null, waiting = 0;
  const heads = columns.map((column, i) => {
    const button = element("button", {type: "button"}, column.title);
    button.addEventListener("click", () => sort(i));
    const head = element("th", {scope: "col", "aria-sort": "none", style: `width:${column.width}`}, button);
    if (column.number) head.classList.add("number");
    if (column.wide) head.classList.add("wide"); // left out where there is no room for it: the step's details have it
    return head;
  });
  table.tHead.append(element("tr", {}, ...heads));

  function sort(i) {
    sorted = {i, down: sorted?.i === i ? !sorted.down : Boolean(columns[i].number)};
    order();
  }

  function order() {
    heads.forEach((head, i) => head.setAttribute("aria-sort", sorted?.i !== i ? "none" : sorted.down ? "descending" : "ascending"));
    if (sorted) {
      const {key} = columns[sorted.i], sign = sorted.down ? -1 : 1;
      rows.sort((a, b) => { // what has no value stays at the end
        const x = key(a), y = key(b);
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || a.id - b.id;
        return sign * (typeof x === "number" ? x - y : x.localeCompare(y, "en", {numeric: true})) || a.id - b.id;
      });
    }
    scroll.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 10);
    const last = Math.min(rows.length, first + Math.ceil((scroll.clientHeight || 470) / ROW) + 20);
    const space = height => {
      const filler = element("tr", {class: "space", "aria-hidden": "true"}, element("td", {}));
      filler.firstChild.style.height = `${height}px`;
      return filler;
    };
    body.replaceChildren(space(first * ROW), ...rows.slice(first, last).map((item, i) => {
      const line = row(item);
      line.setAttribute("aria-rowindex", first + i + 2);
      columns.forEach((column, j) => { if (column.wide) line.children[j].classList.add("wide"); });
      return line;
    }), space((rows.length - last) * ROW));
    table.setAttribute("aria-rowcount", rows.length + 1);
  }

  scroll.addEventListener("scroll", () => { waiting ||= requestAnimationFrame(() => { waiting = 0; draw(); mark(); }); });
  return {
    fill(items, anew) {
      rows = [...items];
      if (anew) sorted = null;
      order();
    },
  };
}

const cell = (content, kind = "") => element("td", kind ? {class: kind} : {}, content);

const compared = DATA.graphs.some(data => data.steps.some(step => step.second)); // else there is one executor in all columns

function nextBest(step) { // the next best executor with its time, and how much more that is
  const [name, of, us, more] = step.second ?? [];
  return name === undefined ? ["", ""] : [`${name} ${fixed(us)}${of === "host" ? " host" : ""}`, more === null ? "" : percent(more)];
}

const steps = virtual("steps", [
  {title: "#", width: "48px", number: true, wide: true, key: s => s.id},
  {title: "step", width: "var(--name, 14%)", key: s => s.name},
  {title: "executor", width: "98px", key: s => s.executor},
  {title: "ops", width: "auto", key: s => string(s.label)},
  {title: "MB", width: "84px", number: true, wide: true, key: s => s.bytes},
  {title: "device µs", width: "92px", number: true, key: s => s.us},
  {title: "host µs", width: "78px", number: true, wide: true, key: s => s.host},
  ...(compared ? [{title: "next best", width: "130px", wide: true, key: s => s.second?.[0]},
    {title: "more", width: "70px", number: true, wide: true, key: s => s.second?.[3] ?? undefined}] : []),
  {title: "kernel", width: "84px", wide: true, key: s => s.key},
  {title: "reuse", width: "140px", wide: true, key: reuse},
], step => {
  const executor = element("span", {style: "display:flex;gap:6px;align-items:center"}, badge(step.executor), step.executor);
  const line = element("tr", {"data-step": step.id}, cell(String(step.id + 1), "number"), cell(stepButton(step.id)), cell(executor),
    cell(string(step.label)), cell(megabytes(step.bytes), "number"), cell(fixed(step.us), "number"), cell(fixed(step.host), "number"),
    ...(compared ? [cell(nextBest(step)[0]), cell(nextBest(step)[1], "number")] : []),
    cell(element("code", {}, step.key ? step.key.slice(0, 8) : "–")), cell(reuse(step) ?? ""));
  line.children[3].title = string(step.label);
  if (step.id === shown) line.classList.add("shown");
  line.addEventListener("click", () => { pin(step.id); reveal(step.id); });
  return line;
});

const refusals = virtual("refusals", [
  {title: "first", width: "20%", key: r => string(r[1])},
  {title: "second", width: "20%", key: r => string(r[2])},
  {title: "why", width: "26%", key: r => string(r[0])},
  {title: "numbers", width: "auto", key: r => string(r[3])},
], refusal => {
  const nodeCell = (name, holders) => {
    const content = cell(string(name) + " ");
    if (holders.length) content.append(stepButton(holders[0]));
    return content;
  };
  const line = element("tr", {}, nodeCell(refusal[1], refusal[4]), nodeCell(refusal[2], refusal[5]), cell(string(refusal[0])),
    cell(string(refusal[3])));
  for (const column of line.children) column.title = column.textContent;
  return line;
});

function filtered(anew = false) {
  const words = by("step-filter").value.toLowerCase().split(" ").filter(Boolean);
  const matches = graph.steps.filter(step => words.every(word => step.search.includes(word)));
  by("step-count").textContent = words.length ? `${matches.length} of ${graph.steps.length}` : `${matches.length}`;
  steps.fill(matches, anew);
}

function filteredRefusals(anew = false) {
  const words = by("refusal-filter").value.toLowerCase();
  const matches = graph.refusals.filter((refusal, i) => { refusal.id = i; return refusalText(i).toLowerCase().includes(words); });
  const left = graph.refused > graph.refusals.length ? ` (the first ${graph.refusals.length} are here)` : "";
  by("refusal-count").textContent = (words ? `${matches.length} of ` : "") + graph.refused + left;
  refusals.fill(matches, anew);
}

by("step-filter").addEventListener("input", () => filtered());
by("refusal-filter").addEventListener("input", () => filteredRefusals());

// ------------------------------------------------------------------ graphs

function open(number) {
  graph = indexed(DATA.graphs[number]);
  pinned = null; focusable = 0; shown = null;
  [...by("tabs").children].forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === number);
    tab.tabIndex = i === number ? 0 : -1;
  });
  by("graph").setAttribute("aria-labelledby", `tab-${number}`);
  by("detail").replaceChildren(...hint());
  drawTotals();
  drawPicture();
  filtered(true);
  filteredRefusals(true);
}

DATA.graphs.forEach((data, i) => {
  const tab = element("button", {type: "button", role: "tab", id: `tab-${i}`, "aria-controls": "graph"}, `${i + 1} ${data.kind}`);
  tab.addEventListener("click", () => open(i));
  tab.addEventListener("keydown", event => {
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    const next = move && by("tabs").children[(i + move + DATA.graphs.length) % DATA.graphs.length];
    if (next) { next.click(); next.focus(); }
  });
  by("tabs").append(tab);
});
if (DATA.graphs.length) {
  by("main").hidden = false;
  open(0);
}
})();
