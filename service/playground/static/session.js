// A session as this page holds it: {head, turns, states}; where it can be taken back to.

import { sessionPath } from "./api.js";
import { bytes, count, harmless, joules } from "./format.js";
import { messagesOf, readChatWords } from "./chat_words.js";
import { modelOf } from "./models.js";
import { isUnscored } from "./scoring.js";
import { turnsFromLog } from "./session_log.js";
import { inputOf } from "./turn_stream.js";

const MAX_TITLE_CHARS = 60;
const KIND = "kind"; // of the metadata
const CHAT = "chat";

/** From this tab's memory as far as that is the server's newest version, else from the server's log. */
export async function loadSession(api, memory, id) {
  const head = await api.json("GET", sessionPath(id));
  const known = memory.session(id) ?? { turns: [], states: [] };
  const last = known.turns.at(-1);
  if (last?.status === "cut") last.status = "running"; // it is read on at once
  const newest = known.turns.findLast((turn) => turn.status === "done")?.version ?? 0;
  // a reload may have come before the model had read the log
  const isKnown = last?.status === "running" || (newest === head.version && !isUnscored(known.turns));
  if (isKnown) return { head, turns: known.turns, states: known.states, ids: [] };
  const { turns, ids } = await turnsFromLog(api, head, known.turns);
  if (isChat(head)) await readMessages(api, head, turns);
  return { head, turns, states: known.states, ids };
}

/** Whether its turns are messages: this page says so when it makes the session. */
export function isChat(head) {
  return head.metadata[KIND] === CHAT;
}

async function readMessages(api, head, turns) {
  const unread = turns.filter((turn) => turn.body === null);
  if (unread.length === 0) return;
  const words = await readChatWords(api, head);
  for (const turn of unread) {
    const messages = messagesOf(words, turn.input, turn === turns[0]);
    if (messages !== null) Object.assign(turn, { messages, input: messages.at(-1).content });
  }
}

/** Its title is how its first input begins. `model`: the name of its model, null for the server's first. */
export function createSession(api, body, model) {
  const title = inputOf(body).trim().slice(0, MAX_TITLE_CHARS).trim();
  const metadata = { ...(title === "" ? {} : { title }), ...(body.messages === undefined ? {} : { [KIND]: CHAT }) };
  return api.json("POST", "v1/sessions", { metadata, ...modelOf({ model }) });
}

/** A session without a name goes by its id again. */
export function renameSession(api, head, title) {
  const metadata = { ...head.metadata, title: title.trim() };
  if (metadata.title === "") delete metadata.title;
  return api.json("PATCH", sessionPath(head.id), { metadata });
}

export function titleOf(head) {
  return harmless(head.metadata.title ?? head.id);
}

/** In short words, beside its title. */
export function factsOf(head, turns, { hasSeveralModels }) {
  const model = hasSeveralModels && head.model !== null ? [head.model] : [];
  const facts = [shortened(head.id), ...model, `version ${head.version}`, `${count(head.position, "token")} read`];
  if (head.snapshot_bytes > 0) facts.push(`${bytes(head.snapshot_bytes)} stored`); // a state may follow its text
  const measured = turns.flatMap((turn) => turn.usage?.energy ?? []);
  if (measured.length > 0) facts.push(`${joules(measured.reduce((sum, one) => sum + one.joules, 0))} for ${turnsShown(measured, turns)}`);
  if (head.forked_from !== null) {
    const [origin, position] = head.forked_from.split("@");
    facts.push(`forked from ${shortened(origin)} at token ${position}`);
  }
  return facts;
}

// A stopped turn is not measured to its end, and one that this tab did not see is not told of.
function turnsShown(measured, turns) {
  return measured.length === turns.length ? "the turns shown" : `${measured.length} of the ${count(turns.length, "turn")} shown`;
}

function shortened(id) {
  return id.length > 18 ? `${id.slice(0, 11)}…${id.slice(-4)}` : id;
}

/** A place in the log: the end of a turn, or one of its tokens. `prefix`: of the fields' names, as a rewind has it. */
export function placeOf(turn, piece, prefix = "") {
  if (piece === null) return { [`${prefix}version`]: turn.version };
  return { [`${prefix}position`]: turn.promptTokens + piece.number };
}

/** Up to a place; the last turn then ends at `version`. */
export function turnsUpTo(turns, turn, piece, version) {
  const kept = turns.slice(0, turns.indexOf(turn));
  if (piece === null) return [...kept, { ...turn, version }];
  const pieces = turn.pieces.slice(0, turn.pieces.indexOf(piece) + 1);
  const span = turn.span === undefined ? undefined : [turn.span[0], turn.span[0] + piece.number];
  // what was counted and measured was that of the whole turn
  return [...kept, { ...turn, pieces, span, version, finish: "rewound", session: null, usage: null, decodeS: null }];
}
