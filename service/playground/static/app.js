// The page: two panes, the list of sessions, the model's facts. Everything the server does is in its HTTP API.

import { idsInAddress, showInAddress } from "./address.js";
import { Api, sessionPath } from "./api.js";
import { compareBranches, partingOf } from "./branches.js";
import { copy } from "./copying.js";
import { Keyring, askName, bindDialogs, confirm } from "./dialogs.js";
import { announce, button } from "./dom.js";
import { Memory } from "./memory.js";
import { Models, modelInWords, modelOf } from "./models.js";
import { Notice } from "./notice.js";
import { Pane } from "./pane.js";
import { SessionList } from "./session_list.js";
import { renameSession, titleOf } from "./session.js";
import { saveFile, importFile } from "./session_files.js";
import { StateList } from "./state_list.js";
import { bindTheme } from "./theme.js";

const memory = new Memory(sessionStorage);
const keyring = new Keyring(memory, takeKey);
const api = new Api(keyring);
const models = new Models(api);
const notice = new Notice("page-notice");
const on = { changed, showModel, openBeside, rename, exportFile: (id) => saveFile(api, id), hasKey: () => keyring.key !== null };
const panes = ["left", "right"].map((name) => new Pane(name, { api, memory, models, on }));
const sessions = new SessionList(byId("session-list"), byId("search"), { api, models }, { open, openBeside, isOpen, rename, keepState, remove });
const states = new StateList(byId("states"), { api, models }, { start: startFrom, copyName, remove: removeState });
const choices = panes.map((pane) => button(pane.name === "left" ? "Left" : "Right", () => activate(pane)));
const isNarrow = matchMedia("(max-width: 52rem)"); // as in style.css: one pane is shown at a time
let active = panes[0];
let isStarted = false; // the view from before a reload may be opened
let isStarting = false;

function byId(id) {
  return document.getElementById(id);
}

/** In the pane that was used last; a session that is open already is only looked at. */
async function open(id) {
  const there = panes.find((pane) => pane.session?.head.id === id && !pane.root.hidden);
  if (there !== undefined) {
    activate(there);
    there.composer.text.focus();
  } else await active.open(id);
  closeDrawer();
}

/** `settings`: of the pane that a fork comes from. */
async function openBeside(id, settings = null) {
  const other = active === panes[0] ? panes[1] : panes[0];
  setComparing(true);
  const there = panes.find((pane) => pane.session?.head.id === id);
  if (isNarrow.matches) activate(there ?? other);
  if (settings !== null) other.composer.values = settings;
  if (there === undefined) await other.open(id);
  closeDrawer();
}

async function rename(head) {
  const name = await askName(head.metadata.title ?? "");
  if (name === null) return;
  try {
    const renamed = await renameSession(api, head, name);
    for (const pane of panes) pane.takeHead(renamed);
    changed({ isStep: false });
  } catch (error) {
    notice.show(error);
  }
}

async function remove(head) {
  const pane = panes.find((one) => one.session?.head.id === head.id);
  if (pane !== undefined) return pane.sessionTools.remove();
  const text = `The state, the text and the turns of “${titleOf(head)}” are gone for good.`;
  if (!(await confirm({ title: "Delete this session?", text, action: "Delete" }))) return;
  try {
    await api.request("DELETE", sessionPath(head.id));
    memory.removeSession(head.id);
  } catch (error) {
    notice.show(error);
  }
  sessions.refresh();
}

/** The session's newest state, as the next version of a name. */
async function keepState(head) {
  const hint = "1 to 64 letters, digits, _ and -. A name that exists gets a new version.";
  const name = await askName("", { title: "Name of the state", hint });
  if (name === null) return;
  try {
    const state = await api.json("POST", "v1/states", { name, session: { id: head.id } });
    announce(`Kept as ${state.id}`);
    byId("states").open = true;
    await states.refresh();
  } catch (error) {
    notice.show(error);
  }
}

/** A new session that has read what the state has read. */
async function startFrom(state) {
  try {
    const head = await api.json("POST", "v1/sessions", { state: state.id, ...modelOf(state), metadata: { title: state.id } });
    await open(head.id);
    sessions.refresh();
  } catch (error) {
    notice.show(error);
  }
}

/** Sessions follow from their texts, and no text leads to a tuned state. */
async function copyName(name) {
  const done = (await copy(name)) ? `Copied: ${name}.` : `Its name is ${name}.`;
  notice.tell(`${done} Send it as the model of a request. No session starts from a tuned state.`);
}

async function removeState(state) {
  const text = "Sessions that have started from it stay. Its version number is not used again.";
  if (!(await confirm({ title: `Delete the state ${state.id}?`, text, action: "Delete" }))) return;
  try {
    await api.request("DELETE", `v1/states/${encodeURIComponent(state.id)}`);
  } catch (error) {
    notice.show(error);
  }
  states.refresh();
}

/** The pane that sessions are opened in, and that a narrow screen shows. */
function activate(pane) {
  active = pane;
  byId("panes").dataset.shown = pane.name;
  choices.forEach((choice, index) => choice.setAttribute("aria-pressed", String(panes[index] === pane)));
  showModel();
}

function isOpen(id) {
  return panes.some((pane) => pane.session?.head.id === id && !pane.root.hidden);
}

function setComparing(isComparing) {
  if (isComparing && panes[1].root.hidden) panes.forEach((pane) => pane.composer.makeRoom({ always: true }));
  panes[1].root.hidden = !isComparing;
  if (!isComparing) {
    panes[1].clear();
    activate(panes[0]);
  }
  byId("panes").dataset.panes = isComparing ? "2" : "1";
  byId("compare").setAttribute("aria-pressed", String(isComparing));
  changed();
}

/** `isStep`: whether *back* leads to the view before. */
function changed({ isStep = true } = {}) {
  const ids = panes.map((pane) => pane.sessionId);
  memory.write("panes", ids);
  if (isStarted) showInAddress(ids, { isStep });
  memory.write("comparing", !panes[1].root.hidden);
  const isComparing = panes.every((pane) => pane.session !== null) && !panes[1].root.hidden;
  byId("branches").hidden = !isComparing;
  const [left, right] = panes.map((pane) => pane.turns);
  if (isComparing) byId("branches").textContent = compareBranches(left, right);
  const parting = isComparing ? partingOf(left, right) : null;
  panes.forEach((pane) => pane.transcript.mark(pane.turns[parting?.turn], parting));
  const head = active.session?.head ?? panes[0].session?.head;
  document.title = head === undefined ? "nsm playground" : `${titleOf(head)} · nsm`;
  followModel();
  sessions.refresh();
}

async function chooseFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (file === undefined) return;
  notice.tell("Importing…");
  try {
    const head = await importFile(api, file, confirm);
    notice.clear();
    if (head === null) return;
    announce(`Imported ${head.id}`);
    await open(head.id);
    sessions.refresh();
  } catch (error) {
    notice.show(error);
  }
}

/** The facts of the model that the active pane talks to. */
function showModel() {
  if (models.all.length === 0) return; // the panes are being built
  const { model } = active;
  if (model !== null) byId("model").textContent = modelInWords(model);
}

/** A model that was not loaded may be by now. */
async function followModel() {
  const { model } = active;
  if (model !== null && model.status !== "loaded") await models.refresh().catch(() => {}); // the facts stay as they were
  showModel();
}

/** False: not without a key. */
async function readModels() {
  try {
    await models.refresh();
    byId("model").classList.remove("loading");
    panes.forEach((pane) => pane.takeModels());
    showModel();
    return true;
  } catch (error) {
    byId("model").textContent = "The model’s data could not be read.";
    byId("model").classList.remove("loading");
    notice.show(error);
    return error.status !== 401;
  }
}

/** A key may come later, with a turn: then the page loads the rest. */
function takeKey(key) {
  showKey();
  notice.clear();
  if (key !== null && !isStarted && !isStarting) restore();
}

function showKey() {
  byId("forget-key").hidden = keyring.key === null;
}

// On narrow screens the list of sessions is a drawer.
function closeDrawer() {
  byId("sessions").classList.remove("open");
  byId("drawer").setAttribute("aria-expanded", "false");
}

function bind() {
  bindTheme(byId("theme"));
  bindDialogs();
  byId("forget-key").addEventListener("click", () => {
    keyring.set(null);
    location.reload();
  });
  byId("new-session").addEventListener("click", () => {
    active.clear();
    changed();
    closeDrawer();
    active.composer.text.focus();
  });
  byId("compare").addEventListener("click", () => setComparing(panes[1].root.hidden));
  bindLook();
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", chooseFile);
  bindToggle("drawer", "sessions");
  bindToggle("view", "switches");
  addEventListener("popstate", followAddress);
  addEventListener("pagehide", () => panes.forEach((pane) => pane.save()));
  for (const pane of panes) {
    for (const event of ["focusin", "pointerdown"]) {
      pane.root.addEventListener(event, () => activate(pane));
    }
  }
}

/** On narrow screens these parts are shown when their button is pressed. */
function bindToggle(name, part) {
  byId(name).addEventListener("click", () => {
    const isOpen = byId(part).classList.toggle("open");
    byId(name).setAttribute("aria-expanded", String(isOpen));
  });
}

/** How tokens look: plain text, tinted by probability, or with the numbers too. */
function bindLook() {
  const look = byId("look");
  look.value = memory.read("look", "tint");
  const show = () => {
    byId("panes").dataset.look = look.value;
    memory.write("look", look.value);
  };
  look.addEventListener("change", show);
  show();
}

/** Everything as it was before a reload, turns that are still running included. */
async function restore() {
  showKey();
  isStarting = true;
  isStarted = await readModels(); // asks for a key where there must be one: once, before all else asks
  isStarting = false;
  if (!isStarted) {
    sessions.refresh();
    return;
  }
  const ids = idsInAddress() ?? memory.read("panes", []);
  const isComparing = Boolean(ids[1]) || memory.read("comparing", false);
  showInAddress([ids[0] ?? null, isComparing ? (ids[1] ?? null) : null], { isStep: false });
  panes.forEach((pane, index) => {
    if (ids[index] && pane.sessionId === null && !pane.isSending) pane.open(ids[index]);
  });
  setComparing(isComparing);
}

/** Back, forward, or a link to a session followed in this tab. */
function followAddress() {
  if (!isStarted) return;
  const ids = idsInAddress() ?? [null, null];
  panes.forEach((pane, index) => {
    if (ids[index] === pane.sessionId) return;
    if (ids[index] === null) pane.clear();
    else pane.open(ids[index]);
  });
  setComparing(ids[1] !== null);
}

byId("panes").append(...panes.map((pane) => pane.root));
byId("pane-choice").append(...choices);
activate(panes[0]);
panes[1].root.hidden = true;
byId("page-notice-place").append(notice.root);
bind();
restore();
