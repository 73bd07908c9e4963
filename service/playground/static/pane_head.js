// Above a conversation: its session's title, its figures, and what can be done with it as a whole.

import { button, el } from "./dom.js";
import { factsOf, titleOf } from "./session.js";
import { FORK_WORDS } from "./transcript.js";

export class PaneHead {
  /** `on`: {fork(), rename(), saveText(), exportFile(), remove()} */
  constructor(on) {
    this.title = el("h2");
    this.facts = el("ul", { class: "facts" });
    this.tools = el(
      "div",
      { class: "tools" },
      button("Fork", on.fork, { title: FORK_WORDS }),
      button("Rename", on.rename),
      button("Markdown", on.saveText, { title: "The text as a file" }),
      button("Export", on.exportFile, { title: "State and text as a file that any server of this model can import" }),
      button("Delete", on.remove, { class: "danger" }),
    );
    this.root = el("header", { class: "pane-head" }, el("div", {}, this.title, this.facts), this.tools);
  }

  /** `head`: null where there is no session yet. */
  show(head, turns, { hasSeveralModels }) {
    this.title.textContent = head === null ? "New session" : titleOf(head);
    const facts = head === null ? ["It is made when you send its first turn."] : factsOf(head, turns, { hasSeveralModels });
    this.facts.replaceChildren(...facts.map((fact) => el("li", {}, fact)));
    this.facts.title = head?.id ?? "";
    this.tools.hidden = head === null;
  }
}
