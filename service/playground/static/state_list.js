// The named states of this caller, and those that the operator has published: where new sessions may start.

import { button, el } from "./dom.js";
import { bytes, count } from "./format.js";

export class StateList {
  /** `on`: {start(state), remove(state)}; `root`: the element that opens and closes. */
  constructor(root, api, on) {
    this.root = root;
    this.api = api;
    this.on = on;
    this.list = el("ul", { class: "sessions" });
    this.note = el("p", { class: "hint" });
    root.append(this.list, this.note);
    root.addEventListener("toggle", () => root.open && this.refresh());
  }

  async refresh() {
    if (!this.root.open) return;
    try {
      const { data } = await this.api.json("GET", "v1/states", undefined, { asks: false });
      this.list.replaceChildren(...data.map((state) => this.row(state)));
      this.note.textContent = data.length === 0 ? "No states yet. A session's menu keeps one." : "";
    } catch (error) {
      this.note.textContent = error.status === 401 ? "Listed once there is a key." : `The list cannot be read: ${error.message}`;
    }
  }

  row(state) {
    const facts = `${count(state.position, "token")}, ${bytes(state.num_bytes)}${state.published ? ", published" : ""}`;
    const start = el(
      "button",
      { type: "button", class: "session", "data-state": state.id, title: "Start a session from it", onclick: () => this.on.start(state) },
      el("span", { class: "session-title" }, state.id),
      el("span", { class: "session-facts" }, facts),
    );
    const remove = button("✕", () => this.on.remove(state), { class: "row-more", "aria-label": `Delete the state ${state.id}` });
    return el("li", {}, start, ...(state.published ? [] : [remove]));
  }
}
