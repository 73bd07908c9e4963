// What can be done with turns that have ended, and with their session: back, apart, again, copied, deleted.

import { sessionPath } from "./api.js";
import { textOf } from "./branches.js";
import { asCurl, asMarkdown, asPython, copy, save } from "./copying.js";
import { confirm } from "./dialogs.js";
import { announce } from "./dom.js";
import { rewindToAnswer } from "./forgotten_thoughts.js";
import { scoreSession } from "./scoring.js";
import { createSession, placeOf, titleOf, turnsUpTo } from "./session.js";
import { drawnSeed } from "./turn_stream.js";
import { sampleOf } from "./utilisation.js";

export class SessionTools {
  /** `pane`: shows the session; `on`: {openBeside(id, settings), changed({isStep}), hasKey()} */
  constructor(pane, { api, memory, on }) {
    Object.assign(this, { pane, api, memory, on });
  }

  /** A session for its first turn; another model than the first may have to be loaded. */
  begin(body) {
    const { model, models, notice, composer } = this.pane;
    if (model !== null && model.status !== "loaded") notice.tell(`Loading ${model.id}…`);
    return createSession(this.api, body, models.hasSeveral ? composer.model : null);
  }

  /** Turns that this tab did not see get their colours and the newest its routing: the model reads the log again. */
  async score(ids, signal) {
    const { pane } = this;
    pane.notice.tell("Reading the text again for its probabilities…");
    const scored = await scoreSession(this.api, pane.session, ids, signal).catch((error) => {
      if (!signal.aborted) pane.notice.show(error); // the text is there all the same
      return [];
    });
    if (signal.aborted || scored.length === 0) return;
    pane.notice.clear();
    scored.forEach((turn) => pane.transcript.fill(turn));
    pane.showMap();
    pane.save();
  }

  copy(turn, kind) {
    const call = { hasKey: this.on.hasKey() };
    const text = { text: () => textOf(turn), curl: () => asCurl(turn, call), python: () => asPython(turn, call) }[kind]();
    return this.pane.attempt(async () => announce((await copy(text)) ? "Copied" : "The browser did not allow it"));
  }

  saveText() {
    const { head } = this.pane.session;
    save(asMarkdown(head, this.pane.turns), `${head.id}.md`, "text/markdown");
  }

  /** The turn and those after it are taken back; its text is in the field again. */
  async edit(turn) {
    if (!(await isAgreed("Edit this turn?"))) return;
    if (await this.takeBack(turn)) this.pane.composer.write(turn.input);
  }

  /** Another answer to the same text, with another seed. */
  async again(turn) {
    const { pane } = this;
    if (pane.turns.at(-1) !== turn && !(await isAgreed("Sample this turn again?"))) return;
    if (!(await this.takeBack(turn))) return;
    const read = !turn.messages ? { input: turn.input } : { messages: turn.messages };
    const { input, messages, ...settings } = turn.body ?? pane.composer.body("");
    await pane.send({ ...settings, ...read, seed: drawnSeed() });
  }

  /** The session as it was before the turn. Resolves to whether it is so now. */
  takeBack(turn) {
    const { turns } = this.pane;
    const index = turns.indexOf(turn);
    const before = index === 0 ? 0 : turns[index - 1].version;
    const kept = (version) => turns.slice(0, index).map((one, place) => (place === index - 1 ? { ...one, version } : one));
    return this.pane.attempt(() => this.rewound((head) => rewindToAnswer(this.api, head, turn, before), kept));
  }

  /** Back to the end of a turn, or to one of its tokens; what came after it is deleted. */
  async rewind(turn, piece = null) {
    const title = piece === null ? "Rewind to the end of this turn?" : "Rewind to this token?";
    const text = "What came after it is deleted from the session. A fork keeps it.";
    if (!(await confirm({ title, text, action: "Rewind" }))) return;
    const { turns } = this.pane;
    const rewind = (head) => this.api.json("POST", sessionPath(head.id, "rewind"), { ...placeOf(turn, piece, "to_"), expected_version: head.version });
    await this.pane.attempt(() => this.rewound(rewind, (version) => turnsUpTo(turns, turn, piece, version)));
  }

  /** `rewind(head)` resolves to the new head. `turnsAt(version)`: the turns that stay, once the session is at that version. */
  async rewound(rewind, turnsAt) {
    const { session } = this.pane;
    session.head = await rewind(session.head);
    session.turns = turnsAt(session.head.version);
    session.states = session.states.filter((state) => state.position <= session.head.position);
    this.pane.save();
    this.pane.showSession();
    this.on.changed();
    if (session.head.position > 0) await this.readStates();
  }

  /** How much of its states the session uses now. */
  async readStates() {
    const { pane } = this;
    const { session } = pane;
    try {
      const answer = await this.api.json("GET", sessionPath(session.head.id, "states"));
      session.states = [...session.states.filter((state) => state.version < answer.version), sampleOf(answer)];
      pane.save(session);
      if (session === pane.session) pane.utilisation.show(session.states);
    } catch (error) {
      if (session === pane.session) pane.utilisation.fail(error.message);
    }
  }

  /** A new session beside this one; `turn` null: from its newest commit. */
  async fork(turn, piece = null) {
    const { pane } = this;
    await pane.attempt(async () => {
      const done = pane.turns.filter((one) => one.status === "done");
      const isEarlier = turn !== null && (piece !== null || turn !== done.at(-1));
      const place = isEarlier ? placeOf(turn, piece) : undefined;
      const head = await this.api.json("POST", sessionPath(pane.session.head.id, "fork"), place);
      const turns = isEarlier ? turnsUpTo(done, turn, piece, head.version) : done;
      const states = pane.session.states.filter((state) => state.position <= head.position);
      this.memory.writeSession(head.id, { turns, states });
      await this.on.openBeside(head.id, pane.composer.values);
    });
  }

  async remove() {
    const { head } = this.pane.session;
    const text = `The state, the text and the turns of “${titleOf(head)}” are gone for good.`;
    if (!(await confirm({ title: "Delete this session?", text, action: "Delete" }))) return;
    await this.pane.attempt(async () => {
      await this.api.request("DELETE", sessionPath(head.id));
      this.pane.forget(head.id);
    });
  }
}

function isAgreed(title) {
  const text = "This turn and those after it are deleted from the session. A fork keeps them.";
  return confirm({ title, text, action: "Take back" });
}
