// Turns and sessions as text for elsewhere: the clipboard, a call for a shell or for Python, Markdown.

import { sessionPath } from "./api.js";
import { textOf } from "./branches.js";
import { el } from "./dom.js";
import { ROLES } from "./format.js";
import { titleOf } from "./session.js";

// Options of this page's own display; the call answers the same text without them.
const DISPLAY_OPTIONS = ["stream", "stream_options", "include_energy", "include_routing", "logprobs", "expected_version"];

/** The body of a turn without this page's display options. `seed`: the one that the turn drew with, or null. */
function callOf(turn) {
  const body = Object.fromEntries(Object.entries(turn.body ?? (turn.messages ? { messages: turn.messages } : { input: turn.input })).filter(([name]) => !DISPLAY_OPTIONS.includes(name)));
  return turn.seed === null || turn.seed === undefined ? body : { ...body, seed: turn.seed };
}

function urlOf(turn) {
  return new URL(sessionPath(turn.sessionId, "generate"), location.href.split("#")[0]).href;
}

/** `hasKey`: whether the server wants one; the key itself is never copied. */
export function asCurl(turn, { hasKey }) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl -s ${quoted(urlOf(turn))}`, "-H 'content-type: application/json'"];
  if (hasKey) lines.push('-H "authorization: Bearer $NSM_API_KEY"');
  return [...lines, `-d ${quoted(JSON.stringify(callOf(turn)))}`].join(" \\\n  ");
}

export function asPython(turn, { hasKey }) {
  const headers = hasKey ? ', headers={"Authorization": f"Bearer {os.environ[\'NSM_API_KEY\']}"}' : "";
  return [
    ...(hasKey ? ["import os", ""] : []),
    "import httpx",
    "",
    `body = ${JSON.stringify(callOf(turn), null, 4)}`,
    `answer = httpx.post(${JSON.stringify(urlOf(turn))}, json=body, timeout=600${headers}).raise_for_status().json()`,
    'print(answer["choices"][0]["text"])',
    "",
  ].join("\n");
}

/** Inputs are quotations, answers are plain; the messages of a chat have their roles in front. */
export function asMarkdown(head, turns) {
  const parts = [`# ${titleOf(head)}`];
  for (const turn of turns.filter((one) => one.status === "done")) {
    for (const { role, content } of turn.messages ?? []) parts.push(`**${ROLES[role]}:** ${content}`);
    if (!turn.messages && turn.input !== "") parts.push(turn.input.split("\n").map((line) => `> ${line}`).join("\n"));
    parts.push(!turn.messages ? textOf(turn).trim() : `**${ROLES.assistant}:** ${textOf(turn).trim()}`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** Resolves to whether the text is in the clipboard. */
export async function copy(text) {
  if (navigator.clipboard !== undefined) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed: the older way may be
    }
  }
  const field = el("textarea", { class: "visually-hidden", "aria-hidden": "true", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy"); // on plain HTTP beyond localhost there is no clipboard object
  field.remove();
  return isCopied;
}

export function save(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
