// The sessions that the server keeps for this caller, newest first.

import { button, el } from "./dom.js";
import { ago } from "./format.js";
import { titleOf } from "./session.js";

const PAGE = 30;

export class SessionList {
  /** `on`: {open(id), openBeside(id), isOpen(id)} */
  constructor(root, api, on) {
    this.api = api;
    this.on = on;
    this.heads = [];
    this.cursor = null;
    this.list = el("ul", { class: "sessions" });
    this.more = button("More", () => this.load(this.cursor), { hidden: true });
    this.note = el("p", { class: "hint" });
    root.append(this.list, this.note, this.more);
  }

  refresh() {
    return this.load(null);
  }

  async load(cursor) {
    const query = new URLSearchParams({ limit: String(PAGE), ...(cursor === null ? {} : { after: cursor }) });
    try {
      const page = await this.api.json("GET", `v1/sessions?${query}`, undefined, { asks: false });
      this.heads = cursor === null ? page.data : [...this.heads, ...page.data];
      this.cursor = page.next_cursor;
      this.note.textContent = this.heads.length === 0 ? "No sessions yet." : "";
    } catch (error) {
      this.note.textContent = error.status === 401 ? "Listed once there is a key." : `The list cannot be read: ${error.message}`;
    }
    this.show();
  }

  /** The focus stays where it is, although the rows are made anew. */
  show() {
    const focused = document.activeElement?.dataset?.key;
    this.list.replaceChildren(...this.heads.map((head) => this.row(head)));
    this.more.hidden = this.cursor === null;
    if (focused) this.list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  row(head) {
    const facts = `version ${head.version}, ${ago(head.updated_at)}${head.forked_from === null ? "" : ", a fork"}`;
    const open = el(
      "button",
      {
        type: "button",
        class: "session",
        "data-key": `open ${head.id}`,
        "aria-current": this.on.isOpen(head.id) ? "true" : null,
        onclick: () => this.on.open(head.id),
      },
      el("span", { class: "session-title" }, titleOf(head)),
      el("span", { class: "session-facts" }, facts),
    );
    const beside = button("Beside", () => this.on.openBeside(head.id), {
      class: "quiet",
      "data-key": `beside ${head.id}`,
      "aria-label": `Open beside: ${titleOf(head)}`,
    });
    return el("li", {}, open, beside);
  }
}
