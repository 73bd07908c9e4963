// One conversation on the screen: its session, its turns, and what can be done with them.

import { sessionPath } from "./api.js";
import { Composer } from "./composer.js";
import { announce, el } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { Inspector, tokenInWords } from "./inspector.js";
import { Notice } from "./notice.js";
import { PaneHead } from "./pane_head.js";
import { MAX_SCORED_TOKENS, isUnscored } from "./scoring.js";
import { isChat, loadSession } from "./session.js";
import { SessionTools } from "./session_tools.js";
import { Transcript, spoken } from "./transcript.js";
import { drawnSeed, followTurn, inputOf, isPassing, newTurn, routingRefusal } from "./turn_stream.js";
import { Utilisation } from "./utilisation.js";
import { welcome } from "./welcome.js";

const SAVE_EVERY_MS = 1000;

export class Pane {
  /** `on`: {changed({isStep}), showModel(), openBeside(id, settings), exportFile(id), rename(head), hasKey()} */
  constructor(name, { api, memory, models, on }) {
    Object.assign(this, { name, api, memory, models, on, session: null });
    this.sessionTools = new SessionTools(this, { api, memory, on });
    this.notice = new Notice(`${name}-notice`);
    this.composer = new Composer(name, memory, { send: () => this.send(), stop: () => this.stop() });
    this.composer.onChoice = () => this.showChoice();
    this.transcript = new Transcript(name, {
      select: (turn, index) => this.select(turn, index),
      rewind: (turn) => this.sessionTools.rewind(turn),
      fork: (turn) => this.sessionTools.fork(turn),
      edit: (turn) => this.sessionTools.edit(turn),
      again: (turn) => this.sessionTools.again(turn),
      copy: (turn, kind) => this.sessionTools.copy(turn, kind),
      readOn: (turn) => this.follow(turn),
      discard: (turn) => this.discard(turn),
    }, () => welcome(this.model, this.composer.kind, (text) => this.composer.write(text)));
    this.inspector = new Inspector({
      rewind: (turn, piece) => this.sessionTools.rewind(turn, piece),
      fork: (turn, piece) => this.sessionTools.fork(turn, piece),
    });
    this.heatmap = new Heatmap((turn, index) => this.select(turn, index));
    this.utilisation = new Utilisation();
    this.build();
    this.clear();
  }

  build() {
    this.head = new PaneHead({
      fork: () => this.sessionTools.fork(null),
      rename: () => this.on.rename(this.session.head),
      saveText: () => this.sessionTools.saveText(),
      exportFile: () => this.attempt(() => this.on.exportFile(this.session.head.id)),
      remove: () => this.sessionTools.remove(),
    });
    const looking = el(
      "div",
      { class: "looking", tabindex: "0", role: "region", "aria-label": `Token, routing and states of the ${this.name} conversation` },
      this.inspector.root, this.heatmap.root, this.utilisation.root,
    );
    const talk = el("div", { class: "talk" }, this.transcript.root, this.notice.root, this.composer.root);
    this.root = el("section", { class: "pane", id: this.name, "aria-label": `The ${this.name} conversation` }, this.head.root, el("div", { class: "pane-body" }, talk, looking));
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
  }

  get turns() {
    return this.session?.turns ?? [];
  }

  /** The session's, or the one that the next session will have; null: not known, or not served here. */
  get model() {
    const { head } = this.session ?? {};
    return head?.model === null ? null : this.models.named(head?.model ?? this.composer.model);
  }

  get running() {
    return this.turns.find((turn) => turn.status === "running") ?? null;
  }

  /** Of the session that is shown, or will be at once; null: none. */
  get sessionId() {
    return this.opening ?? this.session?.head.id ?? null;
  }

  /** No session yet: the first turn makes one. */
  clear() {
    this.leave();
    this.session = null;
    this.showSession();
  }

  /** Stops reading, not the turn: that goes on at the server, and is read on when the session is opened again. */
  leave() {
    this.save();
    this.reading?.abort();
    this.reading = null;
    this.opening = null;
  }

  async open(id) {
    this.leave();
    const reading = (this.reading = new AbortController());
    this.opening = id;
    this.notice.tell("Opening the session…");
    try {
      const session = await loadSession(this.api, this.memory, id);
      if (reading.signal.aborted) return;
      this.opening = null;
      this.session = session;
      this.showSession();
    } catch (error) {
      if (reading.signal.aborted) return;
      this.opening = null;
      if (error.status === 404) this.forget(id);
      this.fail(error);
      return;
    }
    this.on.changed();
    const { ids, head } = this.session;
    delete this.session.ids;
    if (head.model === null) this.notice.tell("The model of this session is not served here.");
    else if (this.running === null && isUnscored(this.turns) && ids.length <= MAX_SCORED_TOKENS) await this.sessionTools.score(ids, reading.signal);
    if (reading.signal.aborted) return;
    if (this.running !== null) {
      this.running.isReadOn = true;
      await this.follow(this.running);
    } else if (this.session.states.at(-1)?.version !== this.session.head.version) {
      await this.sessionTools.readStates();
    }
  }

  forget(id) {
    this.clear();
    this.memory.removeSession(id);
    this.on.changed({ isStep: false }); // nothing is there to go back to
  }

  showSession() {
    this.notice.clear();
    this.composer.mark(null);
    this.transcript.show(this.turns);
    this.inspector.clear();
    this.showMap();
    this.utilisation.show(this.session?.states ?? []);
    this.showHead();
  }

  /** Another name, say. */
  takeHead(head) {
    if (this.session?.head.id !== head.id) return;
    this.session.head = head;
    this.showHead();
  }

  /** The routing of the newest turn. */
  showMap() {
    const newest = this.turns.at(-1);
    if (newest?.pieces.length > 0) this.heatmap.show(newest, newest.pieces.length - 1);
    else this.heatmap.clear("waiting");
  }

  showHead() {
    const head = this.session?.head ?? null;
    this.head.show(head, this.turns, { hasSeveralModels: this.models.hasSeveral });
    this.composer.setKind(head === null ? null : isChat(head) ? "chat" : "text", { isFixed: (head?.position ?? 0) > 0 });
    this.root.toggleAttribute("data-busy", this.running !== null);
    this.composer.setRunning(this.running !== null);
  }

  /** The server's models have become known. */
  takeModels() {
    this.composer.offerModels(this.models.names);
    this.showHead();
  }

  /** The kind and the model of a new conversation. */
  showChoice() {
    if (this.turns.length === 0) this.transcript.show([]);
    this.on.showModel();
  }

  async send(body = this.composer.body()) {
    if (this.running !== null || this.isSending) return;
    this.notice.clear();
    this.composer.mark(null);
    if (inputOf(body) === "" && (this.session?.head.position ?? 0) === 0) {
      this.notice.tell(this.composer.kind === "chat" ? "Write a message first." : "Write something for the model to read first.");
      this.composer.text.focus();
      return;
    }
    this.isSending = true;
    try {
      this.session ??= { head: await this.sessionTools.begin(body), turns: [], states: [], isFresh: true };
    } catch (error) {
      this.fail(error);
      return;
    } finally {
      this.isSending = false;
    }
    this.turns.filter((turn) => turn.status !== "done").forEach((turn) => this.discard(turn));
    const { head } = this.session;
    // The first turn's seed is the session's: drawn here, so that the page can tell it.
    const isFirst = head.position === 0;
    const seed = body.seed ?? (isFirst ? drawnSeed() : (this.turns.at(-1)?.seed ?? null));
    const turn = newTurn(head.id, { ...body, ...(isFirst ? { seed } : {}), expected_version: head.version }, seed);
    this.turns.push(turn);
    this.transcript.add(turn, this.turns.length);
    this.composer.text.value = "";
    this.composer.makeRoom();
    this.heatmap.show(turn, 0);
    this.on.changed();
    await this.follow(turn);
  }

  async follow(turn) {
    turn.status = "running";
    this.reading?.abort();
    const { signal } = (this.reading = new AbortController());
    this.transcript.update(turn);
    this.showHead();
    this.save();
    try {
      await followTurn(this.api, turn, {
        signal,
        onPiece: (piece) => this.takePiece(turn, piece),
        onPause: (pauseS) => this.notice.tell(`The connection was lost; reading on in ${pauseS.toFixed(1)} s…`),
      });
      turn.status = "done";
      if (turn.session) Object.assign(this.session.head, { version: turn.session.version, position: turn.session.position });
      this.notice.clear();
    } catch (error) {
      if (signal.aborted) return;
      if (this.isWithoutRouting(turn, error)) return this.follow(turn);
      this.endBadly(turn, error);
      if (error.code === "stream_not_found" || error.code === "version_conflict") return this.reopen(turn, error);
      if (this.session.isFresh && turn.status === "failed" && turn.streamId === null) return this.dropFresh();
    }
    await this.afterTurn(turn);
  }

  /** A first turn that the server refused leaves no empty session behind. */
  async dropFresh() {
    const { id } = this.session.head;
    this.session = null;
    this.memory.removeSession(id);
    this.showHead();
    await this.api.request("DELETE", sessionPath(id)).catch(() => {}); // it stays in the list then, to be deleted there
    this.on.changed({ isStep: false });
  }

  takePiece(turn, piece) {
    if (piece.routing?.length > 0) turn.hadRouting = true;
    this.notice.clear();
    this.transcript.addPiece(turn, piece);
    const { current } = this.transcript; // a token that was chosen stays so
    this.heatmap.show(turn, current?.turn === turn ? current.index : turn.pieces.length - 1);
    this.saveTimer ??= setTimeout(() => this.save(), SAVE_EVERY_MS);
  }

  /** Once without routing is without it from then on where the server never tells it. */
  isWithoutRouting(turn, error) {
    const refusal = turn.streamId === null ? routingRefusal(error) : null;
    if (refusal === null) return false;
    if (refusal === "absent") this.composer.routing.checked = false;
    turn.routingRefusal = refusal;
    delete turn.body.include_routing;
    turn.key += "-plain";
    return true;
  }

  endBadly(turn, error) {
    const isCut = turn.streamId !== null && isPassing(error, turn);
    turn.status = error.code === "turn_cancelled" ? "stopped" : isCut ? "cut" : "failed";
    turn.error = error.message;
    if (turn.status !== "cut") this.composer.giveBack(turn.input);
    if (turn.pieces.length === 0 && turn.status === "failed") this.discard(turn);
    if (turn.status !== "stopped") this.fail(error);
  }

  /** The session has gone on without this page. */
  async reopen(turn, error) {
    this.discard(turn);
    await this.open(turn.sessionId);
    this.fail(error);
  }

  async afterTurn(turn) {
    this.transcript.update(turn);
    if (this.turns.includes(turn)) this.heatmap.refresh(turn);
    this.showHead();
    this.save();
    announce(spoken(turn));
    const { session } = this;
    try {
      session.head = await this.api.json("GET", sessionPath(turn.sessionId));
    } catch {
      return; // what prevents it has been shown, or is at the next call
    }
    delete session.isFresh;
    if (session !== this.session) return; // another one was opened meanwhile
    this.showHead();
    this.on.changed();
    if (turn.status === "done") await this.sessionTools.readStates();
  }

  async stop() {
    const turn = this.running;
    if (turn !== null) await this.attempt(() => this.api.request("POST", sessionPath(turn.sessionId, "cancel")));
  }

  discard(turn) {
    if (!this.turns.includes(turn)) return;
    this.turns.splice(this.turns.indexOf(turn), 1);
    this.transcript.show(this.turns);
    this.showMap();
    this.save();
  }

  select(turn, index) {
    this.transcript.select(turn, index);
    this.inspector.show(turn, index);
    this.heatmap.show(turn, index);
    announce(tokenInWords(turn, index));
  }

  /** Resolves to whether it was done; an error is shown. */
  async attempt(work) {
    this.notice.clear();
    try {
      await work();
      return true;
    } catch (error) {
      this.fail(error);
      return false;
    }
  }

  fail(error) {
    this.notice.show(error);
    this.composer.mark(error.param, this.notice.root.id);
  }

  save(session = this.session) {
    clearTimeout(this.saveTimer);
    this.saveTimer = undefined;
    if (session !== null) this.memory.writeSession(session.head.id, session);
  }
}
