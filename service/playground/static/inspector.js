// One token: how likely it was, what else might have come, and where a session can be taken back to it.

import { button, el } from "./dom.js";
import { LEVELS, levelOf, percent, visible } from "./format.js";

export class Inspector {
  /** `on`: {rewind(turn, piece), fork(turn, piece)} */
  constructor(on) {
    this.on = on;
    this.body = el("div", { class: "card-body" });
    this.root = el("div", { class: "card", role: "group", "aria-label": "Token" }, el("h3", {}, "Token"), this.body);
    this.clear();
  }

  clear() {
    this.body.replaceChildren(el("p", { class: "hint" }, "Choose a token in an answer: click it, or use the arrow keys."), legend());
  }

  show(turn, index) {
    const piece = turn.pieces[index];
    const isLast = index === turn.pieces.length - 1;
    this.body.replaceChildren(
      el("p", { class: "place" }, `${index + 1} of ${turn.pieces.length}`),
      ...(piece.tokens.length === 0 ? [unscored(piece)] : piece.tokens.map(scored)),
      turn.status === "done" && turn.promptTokens !== null && !isLast ? this.tools(turn, piece) : "",
      legend(),
    );
  }

  tools(turn, piece) {
    return el(
      "div",
      { class: "tools" },
      button("Rewind to this token", () => this.on.rewind(turn, piece)),
      button("Fork from this token", () => this.on.fork(turn, piece)),
    );
  }
}

/** The announcement for screen readers when a token is chosen. */
export function tokenInWords(turn, index) {
  const piece = turn.pieces[index];
  const chances = piece.tokens.map((token) => percent(Math.exp(token.logprob))).join(", ");
  return `${visible(piece.text)}${chances === "" ? "" : `, ${chances}`}, ${index + 1} of ${turn.pieces.length}`;
}

function unscored(piece) {
  const short = piece.text.length > 40 ? `${piece.text.slice(0, 40)}…` : piece.text;
  const note = "Its probability is not known: this tab did not see the turn.";
  return el("div", {}, el("p", { class: "chosen" }, visible(short)), el("p", { class: "hint" }, note));
}

function scored(token) {
  const rows = token.top.some(([text]) => text === token.text) ? token.top : [...token.top, [token.text, token.logprob]];
  return el(
    "table",
    { class: "chances" },
    el("caption", {}, "Next token, by probability"),
    el("tbody", {}, ...rows.map(([text, logprob]) => chance(text, Math.exp(logprob), text === token.text))),
  );
}

function chance(text, probability, isChosen) {
  const bar = el("meter", { min: "0", max: "1", value: String(probability), "aria-label": `${visible(text)} probability` });
  return el(
    "tr",
    { class: isChosen ? "chosen-row" : null },
    el("th", { scope: "row" }, el("code", {}, visible(text)), isChosen ? el("span", { class: "mark" }, " sampled") : ""),
    el("td", {}, bar),
    el("td", { class: "number" }, percent(probability)),
  );
}

function legend() {
  return el(
    "ul",
    { class: "legend", "aria-label": "Colours and underlines" },
    ...LEVELS.map(([least, words]) => el("li", {}, el("span", { class: "token", "data-level": levelOf(least) }, "token"), ` ${words}`)),
  );
}
