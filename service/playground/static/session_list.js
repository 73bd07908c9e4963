// The sessions that the server keeps for this caller, newest first.

import { button, el } from "./dom.js";
import { ago } from "./format.js";
import { titleOf } from "./session.js";

const PAGE = 30;
const SEARCH_PAGE = 100; // as many as the server gives at once
const MAX_SEARCHED = 2_000;

export class SessionList {
  /** `on`: {open(id), openBeside(id), isOpen(id), rename(head), keepState(head), remove(head)}; `search`: the field to search with. */
  constructor(root, search, { api, models }, on) {
    this.api = api;
    this.models = models;
    this.on = on;
    this.search = search;
    this.heads = [];
    this.cursor = null;
    this.opened = null; // whose tools are shown
    this.listing = 0; // which reading from the start this is
    this.list = el("ul", { class: "sessions" });
    this.more = button("More", () => this.load(this.cursor), { hidden: true });
    this.note = el("p", { class: "hint" }, "Reading the list…");
    root.append(this.list, this.note, this.more);
    search.addEventListener("input", () => this.find());
  }

  get wanted() {
    return this.search.value.trim().toLowerCase();
  }

  /** Shows those whose name or id has the text; more pages are read until enough are known. */
  async find() {
    this.show();
    if (this.isFinding) return;
    this.isFinding = true;
    while (this.wanted !== "" && this.cursor !== null && this.heads.length < MAX_SEARCHED) {
      await this.load(this.cursor, SEARCH_PAGE);
    }
    this.isFinding = false;
  }

  async refresh() {
    await this.load(null);
    await this.find();
  }

  async load(cursor, limit = PAGE) {
    if (cursor === null) this.listing += 1;
    const { listing } = this;
    const query = new URLSearchParams({ limit: String(limit), ...(cursor === null ? {} : { after: cursor }) });
    try {
      const page = await this.api.json("GET", `v1/sessions?${query}`, undefined, { asks: false });
      if (listing !== this.listing) return; // it was read anew from the start meanwhile
      this.heads = cursor === null ? page.data : [...this.heads, ...page.data];
      this.cursor = page.next_cursor;
      this.note.textContent = "";
    } catch (error) {
      this.cursor = null;
      this.note.textContent = error.status === 401 ? "Enter a key to see the list." : `The list cannot be read: ${error.message}`;
    }
    this.show();
  }

  /** The focus stays where it is, although the rows are made anew. */
  show() {
    const focused = document.activeElement?.dataset?.key;
    const shown = this.heads.filter((head) => `${titleOf(head)} ${head.id}`.toLowerCase().includes(this.wanted));
    this.list.replaceChildren(...shown.map((head) => this.row(head)));
    if (shown.length === 0 && this.note.textContent === "") this.note.textContent = this.wanted === "" ? "No sessions yet." : "No session has this name.";
    else if (shown.length > 0) this.note.textContent = "";
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
      ...this.models.lineOf(head),
    );
    return el("li", {}, open, ...this.menu(head));
  }

  /** What is seldom wanted stands below the row, so that the title has its width. */
  menu(head) {
    const words = titleOf(head);
    const isOpen = this.opened === head.id;
    const then = (act) => () => {
      this.toggle(head.id);
      act(head);
    };
    const tools = el(
      "div",
      { class: "row-tools", id: `tools-${head.id}`, hidden: !isOpen },
      button("Beside", then(() => this.on.openBeside(head.id)), { class: "quiet", "data-key": `beside ${head.id}`, "aria-label": `Open beside: ${words}` }),
      button("Rename", then(this.on.rename), { class: "quiet", "data-key": `rename ${head.id}` }),
      button("Keep state", then(this.on.keepState), { class: "quiet", "data-key": `keep ${head.id}` }),
      button("Delete", then(this.on.remove), { class: "quiet danger", "data-key": `delete ${head.id}` }),
    );
    const more = button("⋯", () => this.toggle(head.id), {
      class: "row-more",
      "aria-label": `More for ${words}`,
      "aria-expanded": String(isOpen),
      "aria-controls": `tools-${head.id}`,
      "data-key": `more ${head.id}`,
    });
    return [more, tools];
  }

  /** One row's tools are shown at a time. */
  toggle(id) {
    this.opened = this.opened === id ? null : id;
    this.show();
  }
}
