// A session as this page holds it: {head, turns, states}; where it can be taken back to.

import { sessionPath } from "./api.js";
import { bytes, count, harmless, joules } from "./format.js";
import { turnsFromLog } from "./session_log.js";

const MAX_TITLE_CHARS = 60;

/** From this tab's memory as far as that is the server's newest version, else from the server's log. */
export async function loadSession(api, memory, id) {
  const head = await api.json("GET", sessionPath(id));
  const known = memory.session(id) ?? { turns: [], states: [] };
  const last = known.turns.at(-1);
  if (last?.status === "cut") last.status = "running"; // it is read on at once
  const newest = known.turns.findLast((turn) => turn.status === "done")?.version ?? 0;
  const isKnown = last?.status === "running" || newest === head.version;
  return { head, turns: isKnown ? known.turns : await turnsFromLog(api, id, known.turns), states: known.states };
}

/** Its title is how its first input begins. */
export function createSession(api, input) {
  const title = input.trim().slice(0, MAX_TITLE_CHARS).trim();
  return api.json("POST", "v1/sessions", { metadata: title === "" ? {} : { title } });
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
export function factsOf(head, turns) {
  const facts = [shortened(head.id), `version ${head.version}`, `${count(head.position, "token")} read`, `${bytes(head.snapshot_bytes)} stored`];
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
  return { [`${prefix}position`]: turn.usage.prompt_tokens + piece.number };
}

/** Up to a place; the last turn then ends at `version`. */
export function turnsUpTo(turns, turn, piece, version) {
  const kept = turns.slice(0, turns.indexOf(turn));
  if (piece === null) return [...kept, { ...turn, version }];
  const pieces = turn.pieces.slice(0, turn.pieces.indexOf(piece) + 1);
  return [...kept, { ...turn, pieces, version, finish: "rewound", session: null }];
}
