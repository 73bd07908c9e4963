// The turns of a session that this tab did not see: from the token log in its exported file (service/transfer/session_file.py).

import { sessionPath } from "./api.js";
import { modelOf } from "./models.js";

const PREFIX_BYTES = 32;

/** {turns, ids}: all turns, oldest first, and the log. Those that `known` has at the same version are taken from there. */
export async function turnsFromLog(api, head, known) {
  const { header, ids } = await readLog(api, head.id);
  const seen = new Map(known.filter((turn) => turn.status === "done").map((turn) => [turn.version, turn]));
  const turns = [];
  let start = 0;
  for (const [version, end, numSampled, seed] of header.marks) {
    if (end === start) {
      if (turns.length > 0) turns.at(-1).version = version; // a rewind or a migration: nothing was added
      continue;
    }
    turns.push(seen.get(version) ?? (await readTurn(api, head, { version, numSampled, seed }, ids.slice(start, end), end)));
    start = end;
  }
  return { turns, ids };
}

async function readTurn(api, head, { version, numSampled, seed }, ids, end) {
  const split = ids.length - numSampled;
  const [input, text] = await Promise.all([ids.slice(0, split), ids.slice(split)].map((part) => decode(api, head, part)));
  return {
    key: null, sessionId: head.id, body: null, input, messages: null, span: [end - numSampled, end], promptTokens: end - numSampled, status: "done", streamId: null, lastId: 0, finish: null, version,
    pieces: text === "" ? [] : [{ number: numSampled, text, tokens: [], routing: null }],
    seed: Number.isSafeInteger(seed) ? seed : null, usage: null, ttftS: null, decodeS: null, isReadOn: false, error: null,
  };
}

/** The text of tokens. */
export async function decode(api, head, tokens) {
  return tokens.length === 0 ? "" : (await api.json("POST", "detokenize", { tokens, ...modelOf(head) })).prompt;
}

/** The file is read up to its state, which is the larger part by far and is not needed here. */
export async function readLog(api, sessionId) {
  const response = await api.request("GET", sessionPath(sessionId, "export"));
  const reader = response.body.getReader();
  const prefix = await take(reader, [], PREFIX_BYTES);
  const view = new DataView(prefix.bytes.buffer);
  const headerBytes = view.getUint32(12, true);
  const logBytes = Number(view.getBigUint64(16, true));
  const rest = await take(reader, prefix.rest, headerBytes + logBytes);
  reader.cancel().catch(() => {});
  const header = JSON.parse(new TextDecoder().decode(rest.bytes.subarray(0, headerBytes)));
  const log = new DataView(rest.bytes.buffer, headerBytes, logBytes);
  return { header, ids: Array.from({ length: logBytes / 4 }, (_, index) => log.getUint32(index * 4, true)) };
}

/** `num` bytes, of chunks that are already here and of those that come; the chunks that are left. */
async function take(reader, here, num) {
  const bytes = new Uint8Array(num);
  const rest = [...here];
  let filled = 0;
  while (filled < num) {
    const chunk = rest.shift() ?? (await next(reader));
    const used = Math.min(chunk.length, num - filled);
    bytes.set(chunk.subarray(0, used), filled);
    filled += used;
    if (used < chunk.length) rest.unshift(chunk.subarray(used));
  }
  return { bytes, rest };
}

async function next(reader) {
  const { done, value } = await reader.read();
  if (done) throw new Error("the session's file ended early");
  return value;
}
