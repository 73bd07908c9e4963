// Which states a token is written to and read from: all layers of one token, and one layer over the tokens of a turn.

import { el } from "./dom.js";

const MAX_COLUMNS = 160; // newest tokens of a turn that the map over time shows
const ROW_PX = 14; // of a layer
const NUM_STRONGEST = 3; // states of a layer that the table names
const STATE_PX = 3; // of a state, in the map over time
const NOTES = {
  waiting: "Send something: the map fills while tokens come.",
  unasked: "Routing was not asked for.",
  absent: "This server does not report the routing of tokens.",
  limited: "No routing for this turn: it was too long. Lower “Max tokens”.",
  busy: "No routing for this turn: the server reports it for a few turns at a time. Try again later.",
  lost: "No routing for this turn: this tab did not see it, or dropped it to save memory.",
};

export class Heatmap {
  /** `onSelect(turn, index)`: a column was clicked. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.side = choice("Weights", [["write", "written"], ["read", "read"]]);
    this.layer = choice("Layer", []);
    this.note = el("p", { class: "hint" });
    this.token = map();
    this.time = map();
    this.table = el("tbody");
    this.maps = el("div", { hidden: true }, ...this.parts());
    this.root = el("div", { class: "card", role: "group", "aria-label": "Routing" }, el("h3", {}, "Routing to states"), this.note, this.maps);
    for (const { select } of [this.side, this.layer]) select.addEventListener("change", () => this.draw());
    this.time.canvas.addEventListener("click", (event) => this.onClick(event));
    document.addEventListener("themechange", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.root);
    this.clear("waiting");
  }

  parts() {
    const head = ["Layer", "Strongest states"].map((name) => el("th", { scope: "col" }, name));
    head.push(el("th", { scope: "col", class: "number" }, "States"));
    return [
      el("div", { class: "choices" }, this.side.label, this.layer.label),
      el("figure", {}, this.token.frame, this.token.scale, this.token.caption),
      el("figure", {}, this.time.frame, this.time.scale, this.time.caption),
      el("table", { class: "routes" }, el("caption", {}, "This token in numbers"), el("thead", {}, el("tr", {}, ...head)), this.table),
      el("p", { class: "hint" }, "All layers of a whole text, as a page: ", el("code", {}, "nsm inspect --html page.html")),
    ];
  }

  /** `why`: a key of NOTES. */
  clear(why) {
    this.turn = null;
    this.maps.hidden = true;
    this.note.hidden = false;
    this.note.textContent = NOTES[why];
  }

  /** Draws at the next frame of the screen, however many tokens come until then. */
  show(turn, index) {
    if (!turn.pieces.some((piece) => piece.routing?.length > 0)) {
      this.clear(whyNone(turn));
      return;
    }
    this.turn = turn;
    this.index = index;
    this.note.hidden = true;
    this.maps.hidden = false;
    if (this.frame !== undefined) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  /** A turn has ended: the awaited states may be known to be absent. */
  refresh(turn) {
    if (this.turn === null) this.show(turn, turn.pieces.length - 1);
  }

  draw() {
    if (this.turn === null) return;
    const entries = entriesOf(this.turn);
    const current = entries.find((entry) => entry.index >= this.index) ?? entries.at(-1);
    this.offerLayers(current.layers);
    const side = this.side.select.value;
    this.drawToken(current, side);
    this.drawTime(entries.slice(-MAX_COLUMNS), current, side);
    this.table.replaceChildren(...current.layers.map((layer) => routeRow(layer, side)));
  }

  offerLayers(layers) {
    const { select } = this.layer;
    const names = layers.map((layer) => layer.layer);
    if (Array.from(select.options, (option) => option.value).join() === names.join()) return;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }

  drawToken(entry, side) {
    const columns = Math.max(...entry.layers.map((layer) => layer.num_states));
    const paint = prepare(this.token.canvas, columns, entry.layers.length, ROW_PX);
    const most = strongest(entry.layers.flatMap((layer) => layer[side]));
    entry.layers.forEach((layer, row) => {
      for (const [state, weight] of layer[side]) paint(state, row, weight / most);
    });
    const names = entry.layers.map((layer) => layer.layer);
    label(this.token, { rows: [`layer ${names[0]}`, `layer ${names.at(-1)}`], columns: ["state 0", `state ${columns - 1}`], most });
    describe(this.token, `One token: each row a layer, each column one of ${columns} states.`);
  }

  drawTime(entries, current, side) {
    const name = this.layer.select.value;
    const rows = entries.map((entry) => entry.layers.find((layer) => layer.layer === name)).filter(Boolean);
    if (rows.length === 0) return;
    const paint = prepare(this.time.canvas, Math.max(rows.length, 48), rows[0].num_states, STATE_PX);
    const most = strongest(rows.flatMap((row) => row[side]));
    rows.forEach((row, column) => {
      for (const [state, weight] of row[side]) paint(column, state, weight / most);
    });
    this.columns = { entries, width: Math.max(rows.length, 48) };
    paint.outline(entries.indexOf(current));
    const [first, last] = [entries[0].index + 1, entries.at(-1).index + 1];
    label(this.time, { rows: ["state 0", `state ${rows[0].num_states - 1}`], columns: [`token ${first}`, `token ${last}`], most });
    describe(this.time, `Layer ${name} over ${rows.length} tokens, the newest on the right; each row a state.`);
  }

  onClick(event) {
    const share = event.offsetX / this.time.canvas.clientWidth;
    const entry = this.columns?.entries[Math.floor(share * this.columns.width)];
    if (entry !== undefined) this.onSelect(this.turn, entry.index);
  }
}

/** The entries of a turn's tokens, each with the index of the piece that carried it. */
function entriesOf(turn) {
  return turn.pieces.flatMap((piece, index) => (piece.routing ?? []).map((entry) => ({ ...entry, index })));
}

function whyNone(turn) {
  if (turn.hadRouting || turn.body === null) return "lost";
  if (!turn.body.include_routing) return turn.routingRefusal ?? "unasked";
  return turn.status === "running" ? "waiting" : "absent";
}

function strongest(pairs) {
  return Math.max(1e-9, ...pairs.map(([, weight]) => weight));
}

/** A cleared canvas of columns x rows cells; returns paint(column, row, share of the strongest). */
function prepare(canvas, columns, rows, rowPx) {
  const scale = devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * scale));
  const height = Math.round(rows * rowPx * scale);
  canvas.width = width;
  canvas.height = height;
  canvas.style.height = `${rows * rowPx}px`;
  const context = canvas.getContext("2d");
  const colours = getComputedStyle(canvas);
  const [cell, line] = [width / columns, height / rows];
  const paint = (column, row, share) => {
    context.globalAlpha = 0.12 + 0.88 * Math.sqrt(share); // small weights are to be seen too
    context.fillRect(column * cell, row * line, Math.max(1, cell - 0.5), Math.max(1, line - 0.5));
  };
  context.fillStyle = colours.color;
  paint.outline = (column) => {
    context.globalAlpha = 1;
    context.strokeStyle = colours.outlineColor;
    context.strokeRect(column * cell + 0.5, 0.5, Math.max(2, cell - 1), height - 1);
  };
  return paint;
}

function map() {
  const canvas = el("canvas", { role: "img", class: "heat" });
  const [rows, columns] = [el("div", { class: "heat-rows", "aria-hidden": "true" }), el("div", { class: "heat-columns", "aria-hidden": "true" })];
  const frame = el("div", { class: "heat-frame" }, rows, canvas, columns);
  return { canvas, rows, columns, frame, scale: el("p", { class: "heat-scale" }), caption: el("figcaption") };
}

/** Both ends of each axis, and the scale of the colours, from 0 to `most`, the strongest weight. */
function label(map, { rows, columns, most }) {
  map.rows.replaceChildren(...rows.map((words) => el("span", {}, words)));
  map.columns.replaceChildren(...columns.map((words) => el("span", {}, words)));
  map.scale.replaceChildren("weight 0", el("i"), most.toFixed(2));
}

function describe({ canvas, caption }, words) {
  caption.textContent = words;
  canvas.setAttribute("aria-label", words);
}

function choice(name, options) {
  const select = el("select", {}, ...options.map(([value, words]) => el("option", { value }, words)));
  return { select, label: el("label", {}, `${name} `, select) };
}

function routeRow(layer, side) {
  const states = layer[side].slice(0, NUM_STRONGEST).map(([state, weight]) => `${state} (${weight.toFixed(2)})`);
  const spread = side === "write" ? layer.states_per_token.toFixed(1) : "";
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, `${layer.layer} ${layer.kind}`),
    el("td", {}, states.join(", ") || "none"),
    el("td", { class: "number" }, spread),
  );
}
