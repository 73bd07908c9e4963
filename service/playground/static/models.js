// The models that this server serves: the first, and those that it loads when a conversation names them.

import { el } from "./dom.js";
import { bytes, millions } from "./format.js";

const STATUSES = { unloaded: "loaded when it is first used", loading: "is being loaded" };

export class Models {
  constructor(api) {
    this.api = api;
    this.all = []; // objects of GET /v1/models
  }

  async refresh() {
    this.all = (await this.api.json("GET", "v1/models")).data;
  }

  get hasSeveral() {
    return this.all.length > 1;
  }

  get names() {
    return this.all.map((model) => model.id);
  }

  /** Whose a session or a state is, where that is worth a line. */
  lineOf(head) {
    return this.hasSeveral && head.model !== null ? [el("span", { class: "session-facts" }, head.model)] : [];
  }

  /** The model of a name, the first for null; null where there is none. */
  named(name) {
    const found = name === null ? this.all[0] : this.all.find((model) => model.id === name);
    return found ?? null;
  }
}

/** In one line, for a person. */
export function modelInWords(model) {
  if (model.status === "failed") return `${model.id} · could not be loaded: ${model.error}`;
  if (model.num_parameters === null) return `${model.id} · ${STATUSES[model.status] ?? model.status}`;
  const facts = [`${millions(model.num_parameters)} parameters`, `state ${bytes(model.state_bytes)}, ${model.state_dtype}`, model.numerics];
  return [model.id, ...facts].join(" · ");
}

/** What a call needs beside a session or a state so that its own model answers. */
export function modelOf(head) {
  return head.model === null ? {} : { model: head.model };
}
