// Sessions as files: out of the server and into it.

import { sessionPath } from "./api.js";
import { el } from "./dom.js";

export async function saveFile(api, id) {
  const response = await api.request("GET", sessionPath(id, "export"));
  const url = URL.createObjectURL(await response.blob());
  el("a", { href: url, download: `${id}.nsm-session` }).click();
  URL.revokeObjectURL(url);
}

/** The new session, or null when the person did not want it so. `ask`: as `confirm` of dialogs.js. */
export async function importFile(api, file, ask, options = {}) {
  const query = new URLSearchParams(options);
  const path = `v1/sessions/import${query.size > 0 ? `?${query}` : ""}`;
  try {
    return await (await api.request("POST", path, new Blob([file], { type: "application/octet-stream" }))).json();
  } catch (error) {
    const question = questionFor(error, options);
    if (question === null) throw error;
    if (!(await ask(question))) return null;
    return importFile(api, file, ask, { ...options, ...question.options });
  }
}

function questionFor(error, options) {
  if (error.code === "version_conflict" && error.param === "id" && !("id" in options)) {
    const text = "A session with the id in this file is here already. Import it under a new id?";
    return { title: "Import as another session?", text, action: "Import", options: { id: newId() } };
  }
  if (error.code === "state_mismatch" && !("rebuild" in options)) {
    const text = `${error.message} The running model can read the file's text again and make a state of its own.`;
    return { title: "Read it with this model?", text, action: "Read it", options: { rebuild: "true" } };
  }
  return null;
}

function newId() {
  const numbers = crypto.getRandomValues(new Uint32Array(3));
  return `sess_${Array.from(numbers, (number) => number.toString(16).padStart(8, "0")).join("")}`;
}
