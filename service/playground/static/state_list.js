// The named states of this caller, and those that the operator has published: where new sessions may start.

import { button, el } from "./dom.js";
import { bytes, count } from "./format.js";

const TUNED = "tuned"; // trained on examples: requests start from it, sessions do not

export class StateList {
  /** `on`: {start(state), copyName(name), remove(state)}; `root`: the element that opens and closes. */
  constructor(root, { api, models }, on) {
    this.root = root;
    this.api = api;
    this.models = models;
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
      this.note.textContent = error.status === 401 ? "Enter a key to see the list." : `The list cannot be read: ${error.message}`;
    }
  }

  row(state) {
    const isTuned = state.source === TUNED;
    const origin = isTuned ? "tuned" : count(state.position, "token");
    const facts = `${origin}, ${bytes(state.num_bytes)}${state.published ? ", published" : ""}`;
    const title = isTuned ? "Copy the model name that requests use" : "Start a session from it";
    const onclick = () => (isTuned ? this.on.copyName(modelNameOf(state)) : this.on.start(state));
    const open = el(
      "button",
      { type: "button", class: "session", "data-state": state.id, title, onclick },
      el("span", { class: "session-title" }, state.id),
      el("span", { class: "session-facts" }, facts),
      ...this.models.lineOf(state),
    );
    const remove = button("✕", () => this.on.remove(state), { class: "row-more", "aria-label": `Delete the state ${state.id}` });
    return el("li", {}, open, ...(state.published ? [] : [remove]));
  }
}

/** What a request names as its model to start from a tuned state; its reference where the model is not served here. */
function modelNameOf(state) {
  return state.model === null ? state.id : `ft:${state.model}:${state.id}`;
}
