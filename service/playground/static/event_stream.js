// Server-sent events from a body that fetch reads: EventSource can neither POST nor send a key.

/** The connection was lost. */
export class StreamCut extends Error {}

/** Yields {id, data} for each complete event; a half one at the end is left out. Raises StreamCut. */
export async function* readEvents(body) {
  const decoder = new TextDecoder();
  let rest = "";
  let event = fresh();
  for await (const chunk of chunksOf(body)) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const text = line.endsWith("\r") ? line.slice(0, -1) : line;
      if (text !== "") take(event, text);
      else {
        if (event.data.length > 0) yield { id: event.id, data: event.data.join("\n") };
        event = fresh();
      }
    }
  }
}

// Not every browser lets a body be iterated.
async function* chunksOf(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(asCut);
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {}); // of a connection that is already lost
  }
}

function asCut(error) {
  throw error.name === "AbortError" ? error : new StreamCut(error.message);
}

function fresh() {
  return { id: null, data: [] };
}

function take(event, line) {
  const colon = line.indexOf(":");
  if (colon === 0) return; // a comment that keeps the connection open
  const field = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (field === "data") event.data.push(value);
  else if (field === "id") event.id = value;
}
