// An empty conversation: what the model does, examples to click, the page's words in one sentence each.

import { button, el } from "./dom.js";

const EXAMPLES = {
  text: [
    "The old house stood at the end of the lane.",
    "“You are late,” said the captain, without looking up from his charts.",
    "It was the last evening of the year, and the snow",
  ],
  chat: ["Where does the captain live?", "Tell me about the storm.", "Who are you?"],
};
const KNOWN_MODELS = {
  "pulse-books": "It was trained on nineteenth-century novels. It continues a text; it was not taught to answer questions.",
  "pulse-books-keyed": "It was trained on English books. It continues a text; it was not taught to answer questions.",
  "pulse-books-small": "A small model for tests, trained on novels. It continues a text; it was not taught to answer questions.",
};
const OTHER_MODEL = "It continues the text that you write.";
const WORDS = [
  ["Session", "a conversation that the server keeps. It survives a restart of the server."],
  ["State", "all that the model holds of a session, always of the same size."],
  ["Fork", "a new session that continues from here. The first one stays as it is."],
  ["Rewind", "the session returns to this place. The later turns are deleted."],
];

/** `model`: an object of GET /v1/models, or null; `kind`: text or chat; `onExample(text)`: one was clicked. */
export function welcome(model, kind, onExample) {
  const about = model === null ? OTHER_MODEL : (KNOWN_MODELS[model.root] ?? OTHER_MODEL);
  return el(
    "div",
    { class: "empty" },
    el("p", {}, about),
    el("p", {}, kind === "chat" ? chatWords(model) : "Write the beginning of a text below, or take one of these:"),
    el("ul", { class: "examples" }, ...EXAMPLES[kind].map((text) => el("li", {}, button(text, () => onExample(text), { class: "example" })))),
    el("dl", { class: "words" }, ...WORDS.flatMap(([word, meaning]) => [el("dt", {}, word), el("dd", {}, meaning)])),
  );
}

function chatWords(model) {
  const name = model?.chat_template ?? null; // a model that is not loaded tells none
  const template = name === null ? "its chat template" : `its chat template, ${name}`;
  return `In a chat it reads your messages in the words of ${template}. Write one below, or take one of these:`;
}
