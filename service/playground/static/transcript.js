// The turns of a conversation: prompts, sampled tokens, and times.

import { pieceAt, textOf } from "./branches.js";
import { el, button } from "./dom.js";
import { ROLES, count, harmless, joules, levelOf, percent, seconds, visible } from "./format.js";

const FINISHES = { stop: "ended by itself", length: "cut at max tokens", rewound: "taken back to here" };
const STATUSES = {
  running: "running",
  stopped: "stopped: nothing of this turn is kept",
  failed: "failed: nothing of this turn is kept",
  cut: "the connection was lost; the turn goes on at the server",
};

export class Transcript {
  /**
   * `on`: {select(turn, index), rewind(turn), fork(turn), edit(turn), again(turn), copy(turn, kind), readOn(turn),
   * discard(turn)}; `empty()`: what stands in an empty conversation.
   */
  constructor(name, on, empty) {
    this.on = on;
    this.empty = empty;
    this.views = new Map();
    this.root = el("div", { class: "transcript", tabindex: "0", role: "region", "aria-label": `Turns of the ${name} conversation` });
    this.selected = null; // its element
    this.current = null; // {turn, index} of it
    this.isAtEnd = true;
    this.root.addEventListener("scroll", () => {
      this.isAtEnd = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 48;
    });
    new ResizeObserver(() => this.keepEnd()).observe(this.root);
  }

  show(turns) {
    this.views.clear();
    this.selected = null;
    this.current = null;
    this.root.replaceChildren();
    if (turns.length === 0) this.root.append(this.empty());
    turns.forEach((turn, index) => this.add(turn, index + 1));
  }

  add(turn, number) {
    this.root.querySelector(".empty")?.remove();
    const view = turnView(turn, number, this.on);
    this.views.set(turn, view);
    view.answer.addEventListener("click", (event) => this.onClick(turn, event));
    view.answer.addEventListener("keydown", (event) => this.onKey(turn, event));
    this.root.append(view.root);
    this.fill(turn);
    this.isAtEnd = true;
    this.update(turn);
  }

  addPiece(turn, piece) {
    this.views.get(turn)?.answer.append(tokenView(piece, turn));
    this.keepEnd();
  }

  /** All pieces of a turn, once more: their probabilities have become known. */
  fill(turn) {
    this.views.get(turn)?.answer.replaceChildren(...turn.pieces.map((piece) => tokenView(piece, turn)));
  }

  /** Who reads at the end stays there; who has scrolled back is left in peace. */
  keepEnd() {
    if (this.isAtEnd) this.root.scrollTop = this.root.scrollHeight;
  }

  /** What the turn took and what may be done with it. */
  update(turn) {
    const view = this.views.get(turn);
    if (view === undefined) return;
    view.root.dataset.status = turn.status;
    view.foot.replaceChildren(facts(turn), tools(turn, this.on));
    this.keepEnd();
  }

  select(turn, index) {
    this.selected?.classList.remove("selected");
    const answer = this.views.get(turn)?.answer;
    this.selected = answer?.children[index] ?? null;
    this.selected?.classList.add("selected");
    this.selected?.scrollIntoView({ block: "nearest" });
    this.current = { turn, index };
  }

  /** Shows where another branch parts from this one; null: nowhere. `parting`: as of `partingOf`. */
  mark(turn, parting) {
    this.root.querySelector(".parting")?.classList.remove("parting");
    const view = this.views.get(turn);
    if (parting === null || view === undefined) return;
    const place = parting.chars === null ? view.root.querySelector(".input") : view.answer.children[pieceAt(turn, parting.chars)];
    place?.classList.add("parting");
  }

  onClick(turn, event) {
    const token = event.target.closest(".token");
    if (token !== null) this.on.select(turn, Array.prototype.indexOf.call(token.parentNode.children, token));
  }

  onKey(turn, event) {
    const last = turn.pieces.length - 1;
    const index = this.current?.turn === turn ? this.current.index : -1;
    const targets = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: last };
    if (!(event.key in targets) || last < 0) return;
    event.preventDefault();
    this.on.select(turn, Math.min(last, Math.max(0, targets[event.key])));
  }
}

function turnView(turn, number, on) {
  const answer = el("div", {
    class: "answer",
    dir: "auto", // of the whole: tokens each on their own would stand in the wrong order in Arabic or Hebrew
    tabindex: "0",
    role: "group",
    "aria-label": `Answer of turn ${number}; arrow keys go from token to token`,
  });
  const foot = el("footer", { class: "turn-foot" });
  const read = turn.messages ? [...turn.messages.map(messageView), el("p", { class: "role" }, ROLES.assistant)] : [inputView(turn.input)];
  const root = el("article", { class: "turn", "data-kind": turn.messages ? "chat" : "text", "aria-label": `Turn ${number}` }, ...read, answer, foot);
  return { root, answer, foot };
}

function inputView(text) {
  return text === "" ? el("p", { class: "input none" }, "(went on without input)") : el("p", { class: "input", dir: "auto" }, harmless(text));
}

function messageView({ role, content }) {
  const input = el("p", { class: "input", dir: "auto" }, harmless(content));
  return el("div", { class: "message", "data-role": role }, el("p", { class: "role" }, ROLES[role] ?? role), input);
}

/** Colour and underline by how likely it was; the percentage itself is shown when asked for. */
function tokenView(piece, turn) {
  // the blank that a chat template leaves to the model is no part of its message
  const text = turn.messages && piece === turn.pieces[0] ? piece.text.trimStart() : piece.text;
  const token = el("span", { class: "token", "data-break": piece.text.includes("\n") }, harmless(text));
  if (piece.tokens.length > 0 && piece.tokens.every((one) => one.logprob !== null)) {
    const probability = Math.exp(piece.tokens.reduce((sum, one) => sum + one.logprob, 0));
    token.dataset.level = levelOf(probability);
    token.dataset.percent = probability < 0.01 ? "<1%" : `${Math.round(probability * 100)}%`;
    token.title = `${visible(piece.text)}: ${percent(probability)}`;
  }
  return token;
}

function facts(turn) {
  const parts = [STATUSES[turn.status] ?? FINISHES[turn.finish] ?? "kept by the server"];
  const { usage } = turn;
  if (usage !== null) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(count(usage.completion_tokens, "token"));
    parts.push(`read ${(usage.prompt_tokens - cached).toLocaleString("en")}, resumed ${cached.toLocaleString("en")}`);
  }
  else if (turn.span) parts.push(count(turn.span[1] - turn.span[0], "token"));
  if (Number.isInteger(turn.seed)) parts.push(`seed ${turn.seed}`);
  if (turn.ttftS !== null) parts.push(`first token ${seconds(turn.ttftS)}`);
  if (turn.isReadOn) parts.push("read on after an interruption");
  else if (turn.decodeS > 0) parts.push(`${((turn.pieces.length - 1) / turn.decodeS).toFixed(1)} tokens/s`);
  if (usage !== null) parts.push(energyOf(usage));
  if (turn.body && !turn.body.include_routing) parts.push(turn.routingRefusal ? "routing left out" : "routing not asked for");
  return el("ul", { class: "facts" }, ...parts.map((part) => el("li", {}, part)));
}

function energyOf(usage) {
  if (!usage.energy) return "energy is not measured here";
  const methods = usage.energy.sources.map((source) => `${source.source}, ${source.method}`).join("; ");
  return `${joules(usage.energy.joules)}, ${joules(usage.energy.joules_per_token)} a token (${methods})`;
}

export const FORK_WORDS = "A new session continues from here; this one stays as it is";
const REWIND_WORDS = "The session returns to here; later turns are deleted";
const COPIES = [["text", "Text"], ["curl", "curl call"], ["python", "Python call"]];

function tools(turn, on) {
  const made = el("div", { class: "tools" });
  if (turn.status === "done") {
    made.append(
      button("Fork", () => on.fork(turn), { "aria-label": "Fork from here", title: FORK_WORDS }),
      button("Rewind", () => on.rewind(turn), { "aria-label": "Rewind to here", title: REWIND_WORDS }),
      button("Edit", () => on.edit(turn), { title: "Take the turn back and change its text" }),
      button("Again", () => on.again(turn), { title: "Take the turn back and sample another answer" }),
      copyMenu(turn, on),
    );
  } else if (turn.status === "cut") {
    made.append(button("Read on", () => on.readOn(turn)));
  } else if (turn.status !== "running") {
    made.append(button("Remove", () => on.discard(turn)));
  }
  return made;
}

function copyMenu(turn, on) {
  const menu = el("select", { "aria-label": "Copy of this turn" }, el("option", { value: "" }, "Copy…"), ...COPIES.map(([kind, words]) => el("option", { value: kind }, words)));
  menu.addEventListener("change", () => {
    on.copy(turn, menu.value);
    menu.value = "";
  });
  return menu;
}

/** For `announce`: a screen reader hears the answer once it is whole, not token by token. */
export function spoken(turn) {
  return `${FINISHES[turn.finish] ?? turn.status}: ${harmless(textOf(turn))}`;
}
