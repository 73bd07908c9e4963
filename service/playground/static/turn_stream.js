// One turn, from its request to its end, over as many connections as it takes.
//
// A turn is a plain object, so that it can be kept over a reload: `key` (its Idempotency-Key), `body`, `streamId` and
// `lastId` (how far its frames were read), `pieces`, `status`, and at the end `finish`, `session` and `usage`.

import { ApiError, sessionPath } from "./api.js";
import { StreamCut, readEvents } from "./event_stream.js";

const FIRST_PAUSE_S = 0.25;
const LONGEST_PAUSE_S = 4;
const MAX_TRIES = 9; // about 20 s without a single frame
const WORTH_ANOTHER_TRY = new Set([0, 408, 429, 502, 503, 504]);

/** What a person wrote: the text, or the newest message. */
export function inputOf(body) {
  return body.messages?.at(-1).content ?? body.input;
}

/** `seed`: the one that it draws with, null where this page does not know it. */
export function newTurn(sessionId, body, seed) {
  return {
    key: randomKey(),
    seed,
    sessionId,
    body,
    input: inputOf(body),
    messages: body.messages ?? null, // of a chat
    promptTokens: null, // of the log before its first sampled one
    status: "running", // then done, stopped, failed or cut
    streamId: null,
    lastId: 0,
    pieces: [],
    finish: null,
    usage: null,
    version: null,
    ttftS: null,
    decodeS: null,
    isReadOn: false,
    error: null,
  };
}

/**
 * Reads the turn to its end; resolves when it has ended, and raises ApiError when it failed or cannot be read on.
 * `onPiece(piece)` and `onPause(seconds)` (the connection was lost; the next try comes then).
 */
export async function followTurn(api, turn, { onPiece, onPause, signal }) {
  const clock = { sentAt: turn.isReadOn ? null : performance.now(), firstAt: null };
  for (let tries = 0; ; tries += 1) {
    const before = turn.lastId;
    let wait = null;
    try {
      if (await readOnce(api, turn, clock, { onPiece, signal })) return;
    } catch (error) {
      if (!isPassing(error, turn) || tries >= MAX_TRIES) throw error;
      wait = error.retryAfterS ?? null;
    }
    if (turn.lastId > before) tries = 0;
    if (tries >= MAX_TRIES) throw new ApiError(0, { message: "the stream was cut again and again", code: "cut" });
    turn.isReadOn = turn.streamId !== null;
    const pauseS = wait ?? Math.min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** tries);
    onPause(pauseS);
    await pause(pauseS, signal);
  }
}

/** One connection; whether it brought the end. */
async function readOnce(api, turn, clock, { onPiece, signal }) {
  const response = await connect(api, turn, signal);
  try {
    for await (const event of readEvents(response.body)) {
      if (event.data === "[DONE]") return turn.finish !== null;
      takeFrame(turn, JSON.parse(event.data), event.id, clock, onPiece);
    }
  } catch (error) {
    if (!(error instanceof StreamCut)) throw error;
    throw new ApiError(0, { message: "the connection was lost", code: "cut" });
  }
  return false;
}

// With its key, the same request again is the same turn: one that got no answer may have begun all the same.
function connect(api, turn, signal) {
  if (turn.streamId === null) {
    const headers = { "idempotency-key": turn.key };
    return api.request("POST", sessionPath(turn.sessionId, "generate"), turn.body, { headers, signal });
  }
  const headers = { "last-event-id": String(turn.lastId) };
  return api.request("GET", `v1/streams/${encodeURIComponent(turn.streamId)}`, undefined, { headers, signal });
}

function takeFrame(turn, data, id, clock, onPiece) {
  if (data.error) throw new ApiError(200, data.error);
  turn.streamId = data.id;
  const choice = data.choices[0];
  if (choice !== undefined && choice.finish_reason !== null) {
    turn.finish = choice.finish_reason;
    turn.version = data.session.version;
    turn.session = data.session;
  } else if (choice !== undefined) {
    const piece = pieceOf(choice, Number(id));
    turn.pieces.push(piece);
    measure(turn, clock);
    onPiece(piece);
  }
  if (data.usage) Object.assign(turn, { usage: data.usage, promptTokens: data.usage.prompt_tokens });
  if (id !== null) turn.lastId = Number(id);
}

/** What one frame shows: `number` is that of its last token in the turn. */
function pieceOf(choice, number) {
  return { number, text: choice.text, tokens: scoredTokens(choice.logprobs), routing: choice.routing ?? null };
}

/** The tokens of a completion's `logprobs`, each with its alternatives, likeliest first. */
export function scoredTokens(logprobs) {
  const { tokens = [], token_logprobs: chosen = [], top_logprobs: tops = [] } = logprobs ?? {};
  return tokens.map((text, index) => ({
    text,
    logprob: chosen[index],
    top: Object.entries(tops[index] ?? {}).sort((one, other) => other[1] - one[1]),
  }));
}

// Only tokens that were read without a break are timed: a token that waited for the next connection says nothing of the server.
function measure(turn, clock) {
  const now = performance.now();
  if (turn.isReadOn || clock.sentAt === null) return;
  if (clock.firstAt === null) {
    clock.firstAt = now;
    turn.ttftS = (now - clock.sentAt) / 1000;
  } else {
    turn.decodeS = (now - clock.firstAt) / 1000;
  }
}

/** Whether the turn may go on for all that: another try, later or elsewhere, can bring the rest. */
export function isPassing(error, turn) {
  if (!(error instanceof ApiError)) return false;
  if (error.status === 200) return error.code === "server_stopping";
  // A first refusal is for the person to see; a stream that had begun is there to be read on.
  if (turn.streamId === null && error.status !== 0) return turn.isReadOn && WORTH_ANOTHER_TRY.has(error.status);
  return WORTH_ANOTHER_TRY.has(error.status);
}

/**
 * Why the server would take the turn without `include_routing`: it tells no routing (its model runs elsewhere), not of so
 * many tokens as the turn may have, or not of more turns at a time. Null: it refused something else.
 */
export function routingRefusal({ param, code, message }) {
  if (param === "include_routing") return "absent";
  if (!message.includes("include_routing")) return null;
  if (param === "max_tokens") return "limited";
  return code === "overloaded" ? "busy" : null;
}

function pause(timeS, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, timeS * 1000);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

/** For a session's first turn: small enough to be written down and typed again. */
export function drawnSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

// crypto.randomUUID is not there on plain HTTP beyond localhost.
function randomKey() {
  const numbers = crypto.getRandomValues(new Uint8Array(16));
  return `playground-${Array.from(numbers, (number) => number.toString(16).padStart(2, "0")).join("")}`;
}
