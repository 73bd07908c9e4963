// Where a person writes: the text, how it is sampled, send and stop.

import { button, el } from "./dom.js";

const FIELDS = [
  ["max_tokens", "Max tokens", "128"],
  ["temperature", "Temperature", "0.8"],
  ["top_p", "Top p", "1"],
  ["seed", "Seed", ""],
];
const NUM_ALTERNATIVES = 5;

export class Composer {
  /** `on`: {send(), stop()}; `name` tells the panes' fields apart. */
  constructor(name, memory, on) {
    this.text = el("textarea", { id: `${name}-input`, name: "input", rows: "2", spellcheck: "false", placeholder: "Once upon a time" });
    this.fields = new Map(FIELDS.map(([field, , value]) => [field, numberField(`${name}-${field}`, field, value)]));
    this.routing = el("input", { type: "checkbox", id: `${name}-routing`, checked: true });
    this.sendButton = button("Send", on.send, { class: "primary", "aria-keyshortcuts": "Control+Enter" });
    this.stopButton = button("Stop", on.stop, { "aria-keyshortcuts": "Escape", hidden: true });
    this.root = el(
      "div",
      { class: "composer", role: "group", "aria-label": "Next turn" },
      el("label", { for: `${name}-input`, class: "visually-hidden" }, "Text for the model to read"),
      this.text,
      el(
        "div",
        { class: "sampling" },
        ...FIELDS.map(([field, words]) => labelled(words, this.fields.get(field))),
        el("label", {}, this.routing, "Routing"),
        el("div", { class: "send" }, el("p", { class: "hint" }, "Ctrl+Enter sends, Esc stops"), this.stopButton, this.sendButton),
      ),
    );
    this.restore(memory, `form.${name}`);
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) on.send();
    });
  }

  /** The options from before a reload; later changes are remembered. */
  restore(memory, place) {
    const known = memory.read(place, {});
    for (const [name, field] of this.fields) field.value = known[name] ?? field.value;
    this.routing.checked = known.routing ?? true;
    this.root.addEventListener("input", () => {
      const options = Array.from(this.fields, ([name, field]) => [name, field.value]);
      memory.write(place, { ...Object.fromEntries(options), routing: this.routing.checked });
    });
  }

  /** Text and options as the body of a turn. The server refuses options that must be numbers and are none. */
  body() {
    const made = { input: this.text.value };
    for (const [name, field] of this.fields) {
      const text = field.value.trim();
      if (text !== "") made[name] = Number.isNaN(Number(text)) ? text : Number(text);
    }
    const options = { stream: true, stream_options: { include_usage: true }, include_energy: true };
    return { ...made, ...options, logprobs: NUM_ALTERNATIVES, ...(this.routing.checked ? { include_routing: true } : {}) };
  }

  setRunning(isRunning) {
    const hadFocus = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.sendButton.hidden = isRunning;
    this.stopButton.hidden = !isRunning;
    if (hadFocus) (isRunning ? this.stopButton : this.sendButton).focus();
  }

  /** Puts a text back that was not taken, unless something new is written already. */
  giveBack(text) {
    if (this.text.value === "") this.text.value = text;
  }

  /** Marks the field that the server found at fault; null: none. `describedBy`: the id of the message. */
  mark(param, describedBy) {
    for (const [name, field] of [["input", this.text], ...this.fields]) {
      const isAtFault = name === param;
      field.toggleAttribute("aria-invalid", false);
      field.removeAttribute("aria-describedby");
      if (!isAtFault) continue;
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", describedBy);
      field.focus();
    }
  }
}

function numberField(id, name, value) {
  return el("input", { id, name, value, inputmode: "decimal", autocomplete: "off", size: "6", placeholder: value === "" ? "drawn" : null });
}

function labelled(words, field) {
  return el("label", { for: field.id }, el("span", {}, words), field);
}
