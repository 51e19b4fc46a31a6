// Draws a page's data; embodied/reporting/page.py says what they hold. All words in them are text, never markup.
"use strict";
let page = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const SHAPES = new Set(["svg", "line", "text", "rect", "path", "circle"]);
const COLORS = 8, AREAS = 16; // distinct colours of lines and of areas; later ones look different
const LEVELS = [0.9, 0.5, 0.1, 0.01, 0]; // least probabilities of a token, from unmarked to the strongest mark
const IN_WORDS = ["90% or more", "50% to 90%", "10% to 50%", "1% to 10%", "below 1%"];

function el(name, attributes, ...children) {
  const made = SHAPES.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return made;
}

// Numbers and axes

function short(value) {
  const size = Math.abs(value), digits = (number, count) => String(Number(number.toPrecision(count)));
  for (const [least, unit, name] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= least) return digits(value / unit, 4) + name;
  }
  return digits(value, size < 1e-3 ? 3 : 4);
}

const written = (unit) => (value) => (unit === "share" ? `${Number((100 * value).toPrecision(3))}%` : short(value));

function scale(low, high, start, end) {
  return { low, high, start, end, at: (value) => Number((start + ((value - low) / (high - low)) * (end - start)).toFixed(1)) };
}

// Round numbers, 1, 2 or 5 times a power of ten apart, about `most` of them.
function ticks(low, high, most, whole) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max([1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power, whole ? 1 : 0);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Edges of about 20 bins of a round width; bins of whole numbers lie around them.
function bins(values, whole) {
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (!whole && low === high) return [low - 0.5, low + 0.5];
  if (whole) {
    const spare = Math.max(0, 4 - (high - low)), width = Math.max(1, Math.ceil((high - low + spare + 1) / 24));
    low -= Math.floor(spare / 2);
    high += Math.ceil(spare / 2);
    return Array.from({ length: Math.ceil((high - low + 1) / width) + 1 }, (_, i) => low - 0.5 + i * width);
  }
  const [one, two] = ticks(low, high, 20), step = two - one, first = Math.floor(low / step);
  return Array.from({ length: Math.max(Math.ceil(high / step) - first, 1) + 1 }, (_, i) => (first + i) * step);
}

// Colours

const known = { success: "success", failure: "failure", played: "played", error: "error", measured: "c0", predicted: "c7" };
const activities = new Map(); // their colours, the same throughout the page

function areaColors(names, places = activities) {
  const taken = new Set(), isNew = (name) => Number(!places.has(name)); // colours in use are taken first
  return new Map([...names].sort((a, b) => isNew(a) - isNew(b)).map((name) => {
    if (known[name]) return [name, known[name]];
    const begin = places.get(name) ?? places.size % AREAS;
    const free = Array.from({ length: AREAS }, (_, i) => (begin + i) % AREAS).find((one) => !taken.has(one));
    const place = free ?? taken.size;
    taken.add(place);
    if (!places.has(name)) places.set(name, place % AREAS);
    return [name, `c${place % AREAS}${place >= AREAS ? " again" : ""}`];
  }));
}

const lineColor = (place) => `c${place % COLORS}${place >= COLORS ? " again" : ""}`;
const swatch = (color) => el("i", { class: `swatch ${lineColor(color)}` });

// Charts

function figure(title, entries, svg, read) {
  const marks = entries.map(([name, style]) => el("li", {}, el("i", { class: style }), name));
  const explained = entries.length > 1 || entries.some(([name]) => name === "success" || name === "failure");
  const save = el("a", { class: "save", href: "#", title: "save this chart as an SVG file" }, "SVG");
  save.addEventListener("click", (event) => saveChart(event, title, svg));
  const made = el("figure", {}, save, el("figcaption", {}, title), explained && el("ul", { class: "legend" }, marks), svg);
  followPointer(made, svg, read);
  return made;
}

function canvas(title, width, height, ...shapes) {
  return el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, shapes);
}

const word = (x, y, style, words) => el("text", { x, y, class: style }, words);
const line = (style, x1, y1, x2, y2) => el("line", { class: style, x1, y1, x2, y2 });
const cut = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}\u2026` : words);

// A frame of 440 by 244 with the titles of both axes, about what a phone shows, and a grid.
function framed(block, across, up, whole) {
  const show = written(block.unit);
  return [
    ticks(up.low, up.high, 5, whole).map((value) => [
      line("grid", across.start, up.at(value), across.end, up.at(value)),
      word(across.start - 6, up.at(value) + 4, "y", show(value)),
    ]),
    ticks(across.low, across.high, 5).map((value) => word(across.at(value), 221, "x", short(value))),
    line("axis", across.start, 204, across.end, 204),
    word((across.start + across.end) / 2, 238, "x title", block.x),
    el("text", { class: "x title", transform: "translate(12 106) rotate(-90)" }, cut(block.y, 34)),
  ];
}

function lines(block) {
  const show = written(block.unit), all = block.series;
  const xs = all.flatMap((one) => one.x), ys = all.flatMap((one) => [...one.y, ...one.low, ...one.high]);
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  const first = Math.min(0, least(xs)), last = most(xs);
  const across = scale(first, last > first ? last : first + 1, 62, 430);
  let [low, high] = block.limits || [least(ys), most(ys)];
  if (!block.limits) {
    const pad = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    low = block.from_zero || (low >= 0 && low < 0.4 * high) ? 0 : low - pad;
    high += pad;
  }
  const up = scale(low, high, 204, 8);
  const legend = new Map();
  for (const one of [...all].sort((a, b) => a.points - b.points || a.faint - b.faint)) {
    if (!legend.has(one.color)) legend.set(one.color, [one.name, lineColor(one.color) + (one.points ? " dot" : "")]);
  }
  const svg = canvas(block.title, 440, 244, framed(block, across, up), all.map((one) => curve(one, across, up)));
  const read = (x) => {
    const near = all.map((one) => {
      const i = one.x.reduce((best, at, i) => (Math.abs(across.at(at) - x) < Math.abs(across.at(one.x[best]) - x) ? i : best), 0);
      const bounds = one.low.length ? ` [${show(one.low[i])}, ${show(one.high[i])}]` : "";
      return { x: across.at(one.x[i]), words: `${one.name}: ${show(one.y[i])}${bounds} at ${short(one.x[i])}` };
    });
    const nearest = near.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    return { x: nearest.x, words: near.map((one) => one.words).join("\n") };
  };
  return figure(block.title, [...legend.values()], svg, read);
}

// Dots with whiskers, or a line before its band.
function curve(one, across, up) {
  const style = lineColor(one.color), spots = one.x.map((x, i) => [across.at(x), up.at(one.y[i])]);
  const path = (points) => `M${points.map((point) => point.join(" ")).join("L")}`;
  const bound = (values) => values.map((value, i) => [spots[i][0], up.at(value)]);
  const dots = (r) => spots.map(([cx, cy]) => el("circle", { cx, cy, r, class: `dot ${style}` }));
  if (one.points) return [one.low.map((low, i) => line(`whisker ${style}`, spots[i][0], up.at(low), spots[i][0], up.at(one.high[i]))), dots(3.5)];
  const band = one.low.length && el("path", { d: `${path([...bound(one.high), ...bound(one.low).reverse()])}Z`, class: `band ${style}` });
  const drawn = el("path", { d: path(spots), class: `line ${style}${one.faint ? " faint" : ""}` });
  return [band || null, drawn, spots.length === 1 ? dots(3) : null];
}

function histogram(block) {
  const edges = bins(Object.values(block.groups).flat(), block.whole), last = edges.length - 2;
  const binOf = (value) => Math.min(edges.findLastIndex((edge) => edge <= value), last);
  const counts = Object.entries(block.groups).map(([name, values]) => {
    const column = edges.slice(1).map(() => 0);
    for (const value of values) column[Math.max(binOf(value), 0)] += 1;
    return [name, column];
  });
  const totals = edges.slice(1).map((_, i) => counts.reduce((sum, [, column]) => sum + column[i], 0));
  const across = scale(edges[0], edges[last + 1], 62, 430), up = scale(0, Math.max(...totals), 204, 8);
  const colors = areaColors(counts.map(([name]) => name)), base = edges.map(() => 0);
  const bars = counts.map(([name, column]) => column.map((count, i) => {
    const x = across.at(edges[i]) + 0.5, y = up.at((base[i] += count));
    return count > 0 && el("rect", { x, y, width: Math.max(across.at(edges[i + 1]) - x - 0.5, 1), height: up.at(base[i] - count) - y, class: `bar ${colors.get(name)}` });
  }));
  const read = (x) => {
    const i = Math.min(Math.max(Math.floor(((x - 62) / 368) * (last + 1)), 0), last);
    const ends = block.whole ? [Math.ceil(edges[i]), Math.floor(edges[i + 1])] : [short(edges[i]), short(edges[i + 1])];
    const where = ends[0] === ends[1] ? ends[0] : `${ends[0]} to ${ends[1]}`;
    return { x: across.at((edges[i] + edges[i + 1]) / 2), words: counts.map(([name, column]) => `${where}: ${column[i]} ${name}`).join("\n") };
  };
  return figure(block.title, counts.map(([name]) => [name, `area ${colors.get(name)}`]), canvas(block.title, 440, 244, framed(block, across, up, true), bars), read);
}

// Charts of rows under each other, as wide as the page, on axes from 0.
function rows(block) {
  const shown = new Set(block.charts.flatMap((chart) => chart.rows.flatMap((row) => Object.keys(row.bars))));
  const names = [...new Set([...block.names.filter((name) => shown.has(name)), ...shown])];
  const columns = block.charts.some((chart) => chart.columns.length);
  const colors = areaColors(names, columns ? new Map() : undefined), show = written(block.unit), width = Math.max(340, (main.clientWidth || 906) - 26);
  const longest = Math.max(0, ...block.charts.flatMap((chart) => chart.rows.map((row) => `${row.name} ${row.note}`.length)));
  const left = Math.min(14 + 6.3 * longest, 0.5 * width), shapes = [], spots = [];
  let y = 0;
  for (const chart of block.charts) {
    const across = scale(0, chart.high || 1, left, width - 24), top = (y += chart.title ? 22 : 6);
    if (chart.title) shapes.push(word(left, y - 7, "", cut(chart.title, (width - left) / 6)));
    y += 18 * chart.rows.length;
    const every = Math.ceil(chart.columns.length / 16) || 1;
    const marks = chart.columns.length
      ? chart.columns.map((name, i) => [i + 0.5, name]).filter((_, i) => i % every === 0)
      : ticks(0, across.high, width < 600 ? 5 : 10).map((value) => [value, show(value)]);
    for (const [value, words] of marks) {
      if (!chart.columns.length) shapes.push(line("grid", across.at(value), top, across.at(value), y));
      shapes.push(word(across.at(value), y + 14, "x", words));
    }
    shapes.push(line("axis", left, y, across.end, y));
    chart.rows.forEach((row, i) => {
      const middle = top + 18 * i + 9;
      shapes.push(word(left - 6, middle + 4, "y", cut(`${row.name} ${row.note}`.trim(), left / 6)));
      for (const [name, pieces] of Object.entries(row.bars)) {
        const d = pieces.map(([start, end]) => `M${across.at(start)} ${middle}h${Math.max(across.at(end) - across.at(start), 0.6).toFixed(1)}`).join("");
        shapes.push(el("path", { d, "stroke-width": 14, class: `spans ${colors.get(name)}` }));
      }
      if (row.whisker) shapes.push(line("edge", across.at(row.whisker[0]), middle, across.at(row.whisker[1]), middle));
      spots.push({ top: middle - 9, row, across });
    });
    if (chart.end !== null) shapes.push(line("edge", across.at(chart.end), top - 3, across.at(chart.end), y));
    y += 20;
  }
  const read = (x, at) => {
    const spot = spots.find((one) => at >= one.top && at < one.top + 18);
    if (!spot) return null;
    const value = spot.across.low + ((x - left) / (spot.across.end - left)) * spot.across.high, near = spot.across.high / width;
    const under = Object.entries(spot.row.bars).flatMap(([name, pieces]) => pieces
      .filter(([start, end]) => start - near <= value && value <= end + near)
      .map(([start, end]) => `${name}${columns ? "" : `, ${show(start)} to ${show(end)} (${show(end - start)})`}`));
    const range = spot.row.whisker ? `\nmiddle half: ${spot.row.whisker.map(show).join(" to ")}` : "";
    return { x, words: `${`${spot.row.name} ${spot.row.note}`.trim()}: ${under.pop() || "idle"}${range}` };
  };
  const svg = canvas(block.title, width, y + 16, shapes, word((left + width) / 2, y + 10, "x title", block.x));
  return figure(block.title, names.map((name) => [name, `area ${colors.get(name)}`]), svg, read);
}

// The numbers under the pointer, beside a mark.
function followPointer(made, svg, read) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const mark = line("mark", 0, 0, 0, height), box = el("div", { class: "readout" });
  const hide = () => [mark, box].forEach((one) => one.remove());
  const show = (event) => {
    const frame = svg.getBoundingClientRect(), x = ((event.clientX - frame.left) / frame.width) * width;
    const found = read(x, ((event.clientY - frame.top) / frame.height) * height);
    if (!found) return hide();
    mark.setAttribute("x1", found.x);
    mark.setAttribute("x2", found.x);
    box.textContent = found.words;
    box.style[x < width / 2 ? "right" : "left"] = "10px";
    box.style[x < width / 2 ? "left" : "right"] = "auto";
    svg.append(mark);
    made.append(box);
  };
  for (const name of ["pointerdown", "pointermove"]) svg.addEventListener(name, show);
  svg.addEventListener("pointerleave", hide);
}

// A chart as a file of its own, in the colours that the page has now.
function saveChart(event, title, svg) {
  event.preventDefault();
  const copy = svg.cloneNode(true), from = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((shape, i) => {
    const style = getComputedStyle(from[i]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "text-anchor"]) shape.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("style", `background: ${getComputedStyle(svg.parentNode).backgroundColor}`);
  const file = new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  el("a", { href: URL.createObjectURL(file), download: `${title.replace(/\W+/g, "_")}.svg` }).click();
}

// Words, tables, videos

function text(block) {
  const link = block.link && el("a", { href: block.link[1] }, block.link[0]);
  return el("p", { class: block.note && "note" }, block.text, link && " ", link);
}

const list = (block) => el("ul", {}, block.items.map((item) => el("li", {}, item)));
const fold = (block) => el("details", {}, el("summary", {}, block.summary), el("pre", {}, block.text));
const tiles = (block) => el("ul", { class: "tiles" }, block.tiles.map(([name, value, more]) => el("li", {}, el("span", {}, name), el("b", {}, value), el("span", {}, more))));

function cell(value, kind, how = {}) {
  if (value === null || typeof value !== "object") return el(kind, how, value === null ? "-" : String(value));
  const words = el(value.href ? "a" : "span", { href: value.href, class: value.state && `state ${value.state}` }, String(value.text));
  const pick = value.pick && el("input", { type: "checkbox", name: "run", value: value.pick, "aria-label": `compare ${value.text}` });
  return el(kind, how, pick, value.color !== undefined && swatch(value.color), words, value.more && [" ", el("small", {}, value.more)]);
}

// Rows and cells are patched one by one, so that ticks, focus and scrolling stay in a table that changes.
function table(block) {
  const head = block.head.length ? el("thead", {}, el("tr", {}, block.head.map((one) => cell(one, "th", { scope: "col" })))) : null;
  const style = head ? block.numeric && "numbers" : "facts", body = el("tbody", {});
  const made = el("div", { class: "scroll" }, el("table", { class: style, "aria-label": block.form && page.heading }, head, body));
  return Object.assign(block.form ? el("form", { action: "/" }, picking(block.form), made) : made, { body });
}

const tableRows = (block) => block.rows.map((row) => ({
  key: row[0] && row[0].pick ? row[0].pick : JSON.stringify(row[0]),
  draw: () => el("tr", {}),
  parts: row.map((one, i) => leaf(i, JSON.stringify(one), () => cell(one, block.head.length || i ? "td" : "th", { "data-head": block.form && block.head[i] }))),
}));

// The tools of a table of runs: a button that compares the ticked ones, and a search that hides rows.
function picking(words) {
  const search = el("input", { type: "search", id: "wanted" });
  search.addEventListener("input", hideRows);
  return el("p", { class: "tools" }, el("label", { for: "wanted" }, "Show runs with "), search, " ", el("button", {}, words));
}

function hideRows() {
  const wanted = document.getElementById("wanted");
  const words = wanted ? wanted.value.toLowerCase().split(/\s+/) : [];
  if (wanted) for (const row of main.querySelectorAll("form tbody tr")) row.hidden = !words.every((one) => row.textContent.toLowerCase().includes(one)) && !row.querySelector(":checked");
}

function videos(block) {
  return el("div", { class: "videos" }, block.videos.map((one) => {
    const video = el("video", { src: one.src, controls: true, loop: true, playsinline: true, preload: "auto" });
    video.muted = true;
    const outcome = one.outcome && el("span", { class: `outcome ${one.outcome}` }, one.outcome);
    return el("figure", { class: one.wide && "mosaic" }, video, el("figcaption", {}, one.label && `${one.label}: `, outcome, ` ${one.words} `, el("a", { href: one.src }, "file")));
  }));
}

// Conversations

function conversations(block) {
  const shown = block.items.map(conversation);
  const legend = IN_WORDS.map((words, level) => [el("span", { class: level > 0 && `p${level}` }, words), " "]);
  const side = block.columns > 1 && `--columns: ${block.columns}`;
  const box = el("div", { class: side ? "pairs conversations" : "conversations", style: side }, block.filter && controls(block.filter, block.items, shown), shown);
  return el("div", {}, block.legend && el("p", { class: "note" }, "Probability of a token at temperature 1: ", legend), box);
}

// Controls, of which each can hide conversations: buttons by outcome, or ranges of iterations and rewards.
function controls(kind, items, shown) {
  const tests = [];
  const watched = (input, fits) => {
    tests.push(fits);
    input.addEventListener("input", () => shown.forEach((one, i) => { one.hidden = !tests.every((each) => each(items[i])); }));
    return input;
  };
  const button = ([words, fits]) => {
    const input = el("input", { type: "radio", name: "only", checked: words === "all" }), count = items.filter(fits).length;
    return count > 0 && el("label", {}, watched(input, (one) => !input.checked || fits(one)), `${words} ${count}`);
  };
  const number = (step, fits) => {
    const input = el("input", { type: "number", step });
    return watched(input, (one) => input.value === "" || fits(one, Number(input.value)));
  };
  const range = (key, words, step) => el("label", {}, `${words} from `, number(step, (one, least) => one[key] >= least), " to ", number(step, (one, most) => one[key] <= most), " ");
  if (kind === "samples") return [el("p", { class: "note" }, range("iteration", "Iterations", 1), range("reward", "rewards", "any"))];
  const outcomes = ["failure", "success", "played", "error"].map((outcome) => [outcome, (one) => one.outcome === outcome]);
  return [["all", () => true], ...outcomes, ["cut off", (one) => one.cut_off]].map(button).filter(Boolean);
}

const cutOff = (one) => one.cut_off && el("span", { class: "cut" }, "cut off");

function conversation(one) {
  const summary = el("summary", {}, el("span", { class: "outcome" }, one.outcome), ` ${one.name} `, el("small", {}, `${one.words} `), cutOff(one), " ", el("code", {}, one.answer), el("small", {}, ` ${one.facts}`));
  return el("details", { class: `conversation ${one.outcome}`, open: one.open, "data-open": one.open }, summary, one.turns.map(turn), one.error && el("p", { class: "note" }, one.error));
}

function turn(one) {
  const row = (name, style, ...content) => [el("dt", {}, name), el("dd", { class: style }, content)];
  const part = (each) => (each.src ? el("img", { src: each.src, alt: each.text, title: each.text, class: "shown" }) : clipped(each));
  return el("dl", {},
    one.said.map((message) => row(message.role, null, message.parts.map(part))),
    row("answer", "answer", one.tokens ? one.tokens.map((token, i) => marked(token, one.logprobs[i])) : clipped(one.answer)),
    row("", null, el("small", {}, `${one.words} `), cutOff(one)),
    one.facts.text && row("facts", null, el("small", {}, clipped(one.facts))));
}

const clipped = (each) => [each.text, each.more > 0 && el("small", {}, ` \u2026 and ${each.more.toLocaleString("en")} more characters, in the file`)];

// A token, marked where the policy was unsure of it.
function marked(token, logprob) {
  const chance = logprob === null ? 0 : Math.exp(Math.min(0, logprob)), level = LEVELS.findIndex((least) => chance >= least);
  if (level === 0) return token;
  const numbers = logprob === null ? "unknown" : `${short(Number(chance.toPrecision(2)))}, log-prob ${logprob.toFixed(2)}`;
  return el("span", { class: `p${level}`, title: `probability ${numbers}` }, token.replaceAll("\n", "\u21b5\n") || "\u2205");
}

// The page

const DRAW = { text, list, fold, tiles, table, lines, histogram, rows, videos, conversations };

// A block that cannot be drawn leaves a line, and the rest of the page.
function drawn(block) {
  try {
    return DRAW[block.kind](block);
  } catch (err) {
    return el("p", { class: "note" }, `${block.title || block.kind} could not be drawn: ${err.message}`);
  }
}

// A page is a tree of parts: a part has a key, and either what it was `told` or `parts` of its own. Drawing a page again
// replaces only parts that were told something else, so a video goes on and an open conversation stays open.

const leaf = (key, told, draw) => ({ key, told, draw });

function part(block) {
  const key = `${block.kind} ${block.title || ""}`;
  if (block.kind !== "table") return leaf(key, JSON.stringify(block), () => drawn(block));
  return { key: `${key} ${JSON.stringify(block.head)}`, draw: () => drawn(block), parts: tableRows(block), inside: (made) => made.body };
}

function section(one) {
  const parts = [
    one.title && leaf("h2", one.title, () => el("h2", {}, one.title)),
    one.note && leaf("note", one.note, () => el("p", { class: "note" }, one.note)),
  ].filter(Boolean);
  let grid = null; // neighbouring small charts stand side by side
  for (const block of one.blocks) {
    const small = block.kind === "lines" || block.kind === "histogram";
    if (small && !grid) parts.push((grid = { key: "charts", draw: () => el("div", { class: "charts" }), parts: [] }));
    if (!small) grid = null;
    (grid ? grid.parts : parts).push(part(block));
  }
  return { key: `section ${one.title}`, draw: () => el("section", {}), parts };
}

function header() {
  const live = page.live_s > 0 && ` \u00b7 ${page.served ? "live" : `this page reloads every ${page.live_s} s`}`;
  const state = page.state && [el("span", { class: `state ${page.state}` }, page.state), " \u00b7 "];
  return [
    page.home && leaf("home", page.home, () => el("nav", {}, el("a", { href: page.home }, "All runs"))),
    leaf("h1", page.heading, () => el("h1", {}, page.heading)),
    leaf("words", `${page.state} ${page.words}`, () => el("p", {}, state, page.words, live)),
    page.command && leaf("command", page.command, () => el("p", {}, el("code", {}, page.command))),
    ...page.problems.map((words) => leaf("problem", words, () => el("p", { class: "problem" }, words))),
  ].filter(Boolean);
}

function patch(parent, parts) {
  const old = new Map([...parent.children].map((child) => [child.key, child])), count = new Map();
  let focused = null;
  const next = parts.map((one) => {
    count.set(one.key, (count.get(one.key) || 0) + 1);
    const key = `${one.key} ${count.get(one.key)}`, before = old.get(key);
    const stays = before && (one.parts || before.told === one.told || inUse(before));
    const child = stays ? before : Object.assign(one.draw(), { key, told: one.told });
    if (before && !stays && before.contains(document.activeElement)) focused = [child, stops(before).indexOf(document.activeElement)];
    if (one.parts) patch(one.inside ? one.inside(child) : child, one.parts);
    return child;
  });
  for (const child of [...parent.children]) if (!next.includes(child)) child.remove();
  next.forEach((child, i) => { if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] || null); });
  if (focused) stops(focused[0])[focused[1]]?.focus({ preventScroll: true }); // the keyboard stays where it was
}

const stops = (made) => [...made.querySelectorAll("a, button, input, summary, video")];

// What a reader is at stays as it is: numbers under the pointer, a playing video, an opened text, a filled field.
function inUse(made) {
  const all = (name) => [...made.querySelectorAll(name)];
  return made.querySelector(".readout") || all("video").some((one) => !one.paused)
    || all("details").some((one) => one.open !== one.hasAttribute("data-open"))
    || all("input").some((one) => one.value !== one.defaultValue || one.checked !== one.defaultChecked);
}

function show() {
  const footer = page.footer && leaf("footer", page.footer, () => el("footer", {}, page.footer));
  const top = { key: "header", draw: () => el("header", {}), parts: header() };
  patch(main, [top, ...page.sections.map(section), footer].filter(Boolean));
}

show();
if (page.live_s && !page.served) { // while nobody reads numbers or plays a video
  setInterval(() => inUse(main) || location.reload(), 1000 * page.live_s);
}

async function follow() {
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { headers: { accept: "application/json" } });
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.problems[0]);
      page = told;
      gone.remove();
      show();
      hideRows();
    } catch (err) {
      gone.textContent = `Not up to date: ${err.message}`;
      main.prepend(gone);
    }
  }
  setTimeout(follow, 1000 * page.live_s);
}
const gone = el("p", { class: "problem", role: "status" });
if (page.served && page.live_s) setTimeout(follow, 1000 * page.live_s);
