// How much of its states a session uses, turn after turn: a row for each layer, with a line over time.

import { el, svg } from "./dom.js";
import { count } from "./format.js";

const WIDTH = 96;
const HEIGHT = 22;
const PAD = 3;
const USE_WORDS = "In use: number of states, if all shared the change evenly (windows: tokens held).";
const MOVED_WORDS = " Moved: mean distance from the learned start.";

/** The fields kept of an answer of GET /v1/sessions/{id}/states. */
export function sampleOf(answer) {
  return { version: answer.version, position: answer.position, layers: answer.layers.map(layerOf) };
}

function layerOf({ layer, kind, window, filled, use }) {
  if (use !== undefined && use !== null) {
    const [used, most] = [use.effective_slots, use.num_slots];
    return { layer, kind, used, most, untouched: use.untouched_share, moved: use.mean?.moved ?? null };
  }
  return { layer, kind, used: filled ?? null, most: window ?? null, untouched: null, moved: null };
}

export class Utilisation {
  constructor() {
    this.body = el("div", { class: "card-body" });
    this.root = el("div", { class: "card", role: "group", "aria-label": "States in use" }, el("h3", {}, "States in use"), this.body);
    this.show([]);
  }

  /** `samples`: oldest first. */
  show(samples) {
    const latest = samples.at(-1);
    if (latest === undefined) {
      this.body.replaceChildren(el("p", { class: "hint" }, "They are read after each turn."));
      return;
    }
    const hasMoved = latest.layers.some((layer) => layer.moved !== null); // keyed slots have no learned start
    const names = [["Layer"], ["Over time"], ["In use", "number"], ...(hasMoved ? [["Moved", "number"]] : [])];
    const head = names.map(([name, kind]) => el("th", { scope: "col", class: kind }, name));
    const rows = latest.layers.map((layer, index) => row(layer, samples.map((sample) => sample.layers[index]), hasMoved));
    const words = `After ${count(latest.position, "token")}, version ${latest.version}; ${count(samples.length, "reading")}`;
    this.body.replaceChildren(
      el("table", { class: "use" }, el("caption", {}, words), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
      el("p", { class: "hint" }, `${USE_WORDS}${hasMoved ? MOVED_WORDS : ""}`),
    );
  }

  fail(message) {
    this.body.replaceChildren(el("p", { class: "hint" }, `The states cannot be read: ${message}`));
  }
}

function row(layer, history, hasMoved) {
  const used = layer.used === null ? "not told" : `${trimmed(layer.used)} of ${layer.most}`;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, `${layer.layer} ${layer.kind}`),
    el("td", {}, layer.used === null ? "" : line(history)),
    el("td", { class: "number" }, used),
    ...(hasMoved ? [el("td", { class: "number" }, layer.moved === null ? "" : layer.moved.toFixed(2))] : []),
  );
}

function trimmed(value) {
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

/** From none to all of the layer's states; the numbers beside it say the same of the newest. */
function line(history) {
  const step = history.length > 1 ? (WIDTH - 2 * PAD) / (history.length - 1) : 0;
  const points = history.map((layer, index) => {
    const share = layer?.used === null || layer === undefined ? 0 : layer.used / layer.most;
    return [PAD + index * step, HEIGHT - PAD - share * (HEIGHT - 2 * PAD)];
  });
  const [x, y] = points.at(-1);
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, "aria-hidden": "true" },
    svg("polyline", { points: points.map((point) => point.join(",")).join(" ") }),
    svg("circle", { cx: x, cy: y, r: 2 }),
  );
}
