// Where the next turn is written: its text, the sampling fields of the API, send and stop.

import { button, el } from "./dom.js";

const FIELDS = [
  ["max_tokens", "Max tokens", "128"],
  ["temperature", "Temperature", "0.8"],
  ["top_p", "Top p", "1"],
  ["seed", "Seed", ""],
];
const MORE_FIELDS = [
  ["top_k", "Top k", ""],
  ["min_p", "Min p", ""],
  ["repetition_penalty", "Repetition penalty", "1.1"],
  ["presence_penalty", "Presence penalty", ""],
  ["frequency_penalty", "Frequency penalty", ""],
  ["stop", "Stop text", ""],
];
const KINDS = [["text", "Continue a text"], ["chat", "Chat"]];
const PLACEHOLDERS = { text: "Write the beginning of a text…", chat: "Write a message…" };
const EMPTY_WORDS = { seed: "drawn", stop: "none" };
const TEXT_FIELDS = new Set(["stop"]);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];
/** What a preset sets; the sampling fields it does not name are emptied. */
const PRESETS = [
  ["Balanced", { temperature: "0.8", top_p: "1", repetition_penalty: "1.1" }],
  ["Greedy", { temperature: "0", top_p: "1" }],
  ["Careful", { temperature: "0.6", top_p: "0.9", repetition_penalty: "1.1" }],
  ["Free", { temperature: "1.1", top_p: "0.98" }],
  ["No repeats", { temperature: "0.8", top_p: "1", repetition_penalty: "1.2" }],
];
const NUM_ALTERNATIVES = 5;
const NARROW = matchMedia("(max-width: 52rem)"); // as in style.css

export class Composer {
  /** `on`: {send(), stop()}; `name` tells the panes' fields apart. */
  constructor(name, memory, on) {
    this.memory = memory;
    this.place = `form.${name}`;
    this.kind = "text";
    this.model = null; // the name of the one that was chosen; null: the server's first
    this.isFixed = false; // the session has turns of its kind
    this.system = el("textarea", { id: `${name}-system`, rows: "1", spellcheck: "false", placeholder: "How the model should answer (optional)" });
    this.systemPart = el("label", { class: "system", hidden: true }, el("span", {}, "System text"), this.system);
    this.kinds = new Map(KINDS.map(([kind, words]) => [kind, button(words, () => this.choose(kind), { "aria-pressed": "false" })]));
    this.kindPart = el("div", { class: "segments", role: "group", "aria-label": "Kind of conversation" }, ...this.kinds.values());
    this.modelChoice = el("select", { id: `${name}-model` });
    this.modelPart = el("label", { class: "model-choice", hidden: true }, el("span", {}, "Model"), this.modelChoice);
    this.text = el("textarea", { id: `${name}-input`, name: "input", rows: "2", spellcheck: "false", placeholder: PLACEHOLDERS.text });
    this.fields = new Map([...FIELDS, ...MORE_FIELDS].map(([field, , value]) => [field, entry(`${name}-${field}`, field, value)]));
    this.preset = el("select", { id: `${name}-preset` }, ...[["", "own values"], ...PRESETS.map(([words]) => [words, words])].map(([value, words]) => el("option", { value }, words)));
    this.routing = el("input", { type: "checkbox", id: `${name}-routing`, checked: true });
    this.enterSends = el("input", { type: "checkbox", id: `${name}-enter-sends` });
    this.sendButton = button("Send", on.send, { class: "primary", "aria-keyshortcuts": "Control+Enter" });
    this.stopButton = button("Stop", on.stop, { "aria-keyshortcuts": "Escape", hidden: true });
    this.hint = el("p", { class: "hint" });
    this.root = el(
      "div",
      { class: "composer", role: "group", "aria-label": "Next turn" },
      el("div", { class: "choices" }, this.kindPart, this.modelPart),
      this.systemPart,
      el("label", { for: `${name}-input`, class: "visually-hidden" }, "Text for the model to read"),
      this.text,
      el("div", { class: "send" }, el("label", {}, this.enterSends, "Enter sends"), this.hint, this.stopButton, this.sendButton),
      this.settings(),
    );
    this.restore();
    this.modelChoice.addEventListener("input", () => this.chooseModel(this.modelChoice.value)); // before the form is kept
    this.root.addEventListener("input", (event) => (event.target === this.preset ? this.takePreset() : this.changed()));
    this.text.addEventListener("keydown", (event) => this.onKey(event, on));
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) on.send();
    });
  }

  settings() {
    const shown = (fields) => fields.map(([field, words]) => labelled(words, this.fields.get(field)));
    const more = el("details", { class: "more" }, el("summary", {}, "More"), el("div", { class: "sampling" }, ...shown(MORE_FIELDS)));
    this.settingsPart = el(
      "details",
      { class: "settings", open: !NARROW.matches },
      el("summary", {}, "Sampling"),
      el("div", { class: "sampling" }, labelled("Preset", this.preset), ...shown(FIELDS), el("label", {}, this.routing, "Routing")),
      more,
    );
    return this.settingsPart;
  }

  /** On a phone, and where two conversations stand side by side, the text has the room. */
  makeRoom({ always = false } = {}) {
    if (always || NARROW.matches) this.settingsPart.open = false;
  }

  // Enter alone sends only if the person switched that on; with Shift it is always a new line.
  onKey(event, on) {
    const isPlain = !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.isComposing;
    if (event.key !== "Enter" || !isPlain || !this.enterSends.checked) return;
    event.preventDefault();
    on.send();
  }

  /** The form as it was before a reload. */
  restore() {
    const known = this.memory.read(this.place, {});
    for (const [name, field] of this.fields) field.value = known[name] ?? field.value;
    this.routing.checked = known.routing ?? true;
    this.system.value = known.system ?? "";
    this.model = known.model ?? null;
    this.choose(known.kind ?? "text");
    this.enterSends.checked = this.memory.read("enter-sends", false);
    this.showState();
  }

  changed() {
    this.memory.write(this.place, this.values);
    this.memory.write("enter-sends", this.enterSends.checked);
    this.showState();
  }

  /** The settings of the next turn, its text aside. */
  get values() {
    return { ...Object.fromEntries(Array.from(this.fields, ([name, field]) => [name, field.value])), routing: this.routing.checked, kind: this.kind, system: this.system.value, model: this.model };
  }

  set values(values) {
    for (const [name, field] of this.fields) field.value = values[name] ?? "";
    this.routing.checked = values.routing ?? true;
    this.system.value = values.system ?? "";
    this.chooseModel(values.model ?? null);
    this.changed();
  }

  takePreset() {
    const found = PRESETS.find(([words]) => words === this.preset.value);
    if (found === undefined) return;
    for (const name of SAMPLING) this.fields.get(name).value = found[1][name] ?? "";
    this.changed();
  }

  /** The preset whose values the fields have, if one does; which key sends. */
  showState() {
    const isOf = (values) => SAMPLING.every((name) => this.fields.get(name).value === (values[name] ?? ""));
    this.preset.value = PRESETS.find(([, values]) => isOf(values))?.[0] ?? "";
    this.hint.textContent = this.enterSends.checked ? "Shift+Enter: new line, Esc stops" : "Ctrl+Enter sends, Esc stops";
  }

  /** The text and the fields as the body of a turn. The server refuses options that must be numbers and are none. */
  body(text = this.text.value) {
    const made = this.kind === "chat" && text !== "" ? { messages: this.messages(text) } : { input: text };
    for (const [name, field] of this.fields) {
      const text = TEXT_FIELDS.has(name) ? field.value : field.value.trim();
      if (text !== "") made[name] = TEXT_FIELDS.has(name) || Number.isNaN(Number(text)) ? text : Number(text);
    }
    const options = { stream: true, stream_options: { include_usage: true }, include_energy: true };
    return { ...made, ...options, logprobs: NUM_ALTERNATIVES, ...(this.routing.checked ? { include_routing: true } : {}) };
  }

  /** Of a chat: the system text belongs in front of its first message. */
  messages(text) {
    const system = this.isFixed || this.system.value.trim() === "" ? [] : [{ role: "system", content: this.system.value }];
    return [...system, { role: "user", content: text }];
  }

  /** What the next conversation is: a text to be continued, or a chat. */
  choose(kind) {
    this.kind = kind;
    this.text.placeholder = PLACEHOLDERS[kind];
    for (const [one, choice] of this.kinds) choice.setAttribute("aria-pressed", String(one === kind));
    this.systemPart.hidden = kind !== "chat" || this.isFixed;
    this.memory.write(this.place, this.values);
    this.onChoice?.();
  }

  /** The names of the server's models: where there are several, a new conversation takes one of them. */
  offerModels(names) {
    this.modelChoice.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    this.chooseModel(names.includes(this.model) ? this.model : null);
  }

  /** `name`: null for the server's first. */
  chooseModel(name) {
    this.model = name;
    this.modelChoice.value = name ?? this.modelChoice.options[0]?.value;
    this.onChoice?.();
  }

  /** The kind of the session that is shown, null: there is none yet, and the person chooses. `isFixed`: it has turns. */
  setKind(kind, { isFixed }) {
    this.isFixed = isFixed;
    this.kindPart.hidden = kind !== null;
    this.modelPart.hidden = kind !== null || this.modelChoice.options.length < 2;
    this.choose(kind ?? this.kind);
  }

  setRunning(isRunning) {
    const hadFocus = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.sendButton.hidden = isRunning;
    this.stopButton.hidden = !isRunning;
    if (hadFocus) (isRunning ? this.stopButton : this.sendButton).focus();
  }

  /** Replaces the text: an example, or the input of a turn that is edited. */
  write(text) {
    this.text.value = text;
    this.text.focus();
  }

  /** Puts a text back that was not taken, unless something new is written already. */
  giveBack(text) {
    if (this.text.value === "") this.text.value = text;
  }

  /** Marks the field that the server found at fault; null: none. `describedBy`: the id of the message. */
  mark(param, describedBy) {
    for (const [name, field] of [["input", this.text], ["messages", this.text], ["model", this.modelChoice], ...this.fields]) {
      const isAtFault = name === param;
      field.toggleAttribute("aria-invalid", false);
      field.removeAttribute("aria-describedby");
      if (!isAtFault) continue;
      field.closest("details")?.setAttribute("open", "");
      field.closest(".settings")?.setAttribute("open", "");
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", describedBy);
      field.focus();
    }
  }
}

function entry(id, name, value) {
  const words = EMPTY_WORDS[name] ?? (value === "" ? "off" : null);
  return el("input", { id, name, value, inputmode: TEXT_FIELDS.has(name) ? null : "decimal", autocomplete: "off", size: "6", placeholder: words });
}

function labelled(words, field) {
  return el("label", { for: field.id }, el("span", {}, words), field);
}
