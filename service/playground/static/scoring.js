// Probabilities and routing of turns that this tab did not see: the model reads the session's log once more.

import { sessionPath } from "./api.js";
import { modelOf } from "./models.js";
import { scoredTokens } from "./turn_stream.js";

export const MAX_SCORED_TOKENS = 2_048; // of a log that is read again without being asked
const MAX_ROUTED_TOKENS = 160; // of the newest turn, as many as the map shows

/** Whether some turn shows its text alone. */
export function isUnscored(turns) {
  return turns.some((turn) => turn.span !== undefined && turn.pieces.some((piece) => piece.tokens.length === 0));
}

/** The turns that have their probabilities now, the newest its routing too. `ids`: of the session's whole log. */
export async function scoreSession(api, { head, turns }, ids, signal) {
  const wanted = turns.filter((turn) => turn.span !== undefined && turn.span[1] > turn.span[0]);
  await scoreTurns(api, head, wanted, ids, signal);
  if (wanted.at(-1) === turns.at(-1)) await routeNewest(api, head.id, turns.at(-1), signal).catch(() => {}); // Triton servers tell none
  return wanted;
}

/** Gives each turn a piece for each of its tokens. */
async function scoreTurns(api, head, wanted, ids, signal) {
  const end = Math.max(0, ...wanted.map((turn) => turn.span[1]));
  const body = { prompt: ids.slice(0, end), max_tokens: 0, echo: true, logprobs: 5, cache_prompt: false, ...modelOf(head) };
  const { choices } = await api.json("POST", "v1/completions", body, { signal, asks: false });
  const { text, logprobs } = choices[0];
  const characters = Array.from(text); // offsets count characters, not halves of them
  const scored = scoredTokens(logprobs);
  const textAt = (index) => characters.slice(logprobs.text_offset[index], logprobs.text_offset[index + 1] ?? characters.length).join("");
  for (const turn of wanted) turn.pieces = piecesOf(turn.span, scored, textAt);
}

/** Tokens that end within a character share a piece with the next. */
function piecesOf([begin, end], scored, textAt) {
  const pieces = [];
  let waiting = [];
  for (let index = begin; index < end; index += 1) {
    waiting.push(scored[index]);
    const text = textAt(index);
    if (text === "") continue; // the end of text, at the end
    pieces.push({ number: index - begin + 1, text, tokens: waiting, routing: null });
    waiting = [];
  }
  return pieces;
}

/** The routing of the newest turn's last tokens, as far as the server tells it. */
async function routeNewest(api, sessionId, turn, signal) {
  const [begin, end] = turn.span ?? [0, 0];
  if (end === begin) return;
  const query = new URLSearchParams({ recent: String(Math.min(MAX_ROUTED_TOKENS, end - begin) + 1), tokens: "true" });
  const { recent } = await api.json("GET", `${sessionPath(sessionId, "states")}?${query}`, undefined, { signal, asks: false });
  // a token comes out of the reading of the one before it
  const read = new Map((recent.tokens ?? []).map((token) => [token.position + 1, token.layers]));
  let last = begin;
  for (const piece of turn.pieces) {
    const layers = read.get(begin + piece.number - 1);
    if (layers?.length > 0) piece.routing = [{ token_id: null, position: last, layers }];
    last = begin + piece.number;
  }
}
