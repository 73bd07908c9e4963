// What this tab remembers over a reload, in sessionStorage only: the key, the open view, the form, and how turns looked.
// The server keeps the conversations themselves.

const PREFIX = "nsm.";
const SESSION = `${PREFIX}session.`;

export class Memory {
  constructor(storage) {
    this.storage = storage;
  }

  read(name, otherwise) {
    try {
      return JSON.parse(this.storage.getItem(PREFIX + name)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  write(name, value) {
    this.put(PREFIX + name, value);
  }

  remove(name) {
    this.storage.removeItem(PREFIX + name);
  }

  /** {turns, states} of a session as this tab saw it, or null. */
  session(id) {
    return this.read(`session.${id}`, null);
  }

  /** Routing is large: it is kept for the newest turn alone. */
  writeSession(id, { turns, states }) {
    const kept = turns.map((turn, index) => (index === turns.length - 1 ? turn : withoutRouting(turn)));
    const isWritten = this.put(SESSION + id, { turns: kept, states, at: Date.now() });
    if (!isWritten) this.put(SESSION + id, { turns: turns.map(withoutRouting), states, at: Date.now() });
  }

  removeSession(id) {
    this.storage.removeItem(SESSION + id);
  }

  // When the tab's share is full, the session that was not used for longest makes room. False: there is none.
  put(name, value) {
    const text = JSON.stringify(value);
    for (;;) {
      try {
        this.storage.setItem(name, text);
        return true;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
        const oldest = this.oldestSession(name);
        if (oldest === null) return false; // the turns are then read from the server
        this.storage.removeItem(oldest);
      }
    }
  }

  oldestSession(but) {
    let oldest = null;
    for (const name of Object.keys(this.storage)) {
      if (!name.startsWith(SESSION) || name === but) continue;
      const { at } = JSON.parse(this.storage.getItem(name));
      if (oldest === null || at < oldest.at) oldest = { name, at };
    }
    return oldest?.name ?? null;
  }
}

function withoutRouting(turn) {
  return { ...turn, pieces: turn.pieces.map((piece) => ({ ...piece, routing: null })) };
}
