// What this page asks in a window of its own: whether something may be deleted, a name, the API key.

import { ApiError } from "./api.js";

/** Resolves to whether the person agreed. */
export function confirm({ title, text, action }) {
  const dialog = document.getElementById("confirm");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("p").textContent = text;
  dialog.querySelector(".yes").textContent = action;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Resolves to the new name, or to null when the person keeps the old one. */
export function askName(name, { title = "Name of the session", hint = "Without a name the session goes by its id." } = {}) {
  const dialog = document.getElementById("name-dialog");
  document.getElementById("name-title").textContent = title;
  document.getElementById("name-hint").textContent = hint;
  const field = document.getElementById("name");
  field.value = name;
  dialog.returnValue = "";
  dialog.showModal();
  field.select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? field.value : null), { once: true });
  });
}

/** Buttons close their dialog with their value: the page's policy lets no form be sent. */
export function bindDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const closing of dialog.querySelectorAll("button[value]")) {
      closing.addEventListener("click", () => dialog.close(closing.value));
    }
  }
  document.getElementById("name-form").addEventListener("submit", (event) => {
    event.preventDefault();
    document.getElementById("name-dialog").close("yes");
  });
}

/** The API key: asked for when the server wants one, kept until the tab is closed or the person forgets it. */
export class Keyring {
  /** `onChange(key)`: there is another one; null: none any more. */
  constructor(memory, onChange) {
    this.memory = memory;
    this.onChange = onChange;
    this.key = memory.read("key", null);
    this.asking = null;
    this.dialog = document.getElementById("key-dialog");
    this.field = document.getElementById("key");
    document.getElementById("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close("yes");
    });
  }

  /** Requests that are refused at the same time wait for one answer. `reason`: why the last key was refused. */
  ask(reason) {
    this.asking ??= this.askOnce(reason).finally(() => {
      this.asking = null;
    });
    return this.asking;
  }

  askOnce(reason) {
    document.getElementById("key-reason").textContent = reason ?? "This server asks for an API key.";
    this.field.value = "";
    this.dialog.returnValue = "";
    this.dialog.showModal();
    return new Promise((resolve, reject) => {
      const onClose = () => {
        const key = this.field.value.trim();
        this.field.value = "";
        if (this.dialog.returnValue !== "yes" || key === "") {
          reject(new ApiError(401, { message: reason ?? "no API key was given", code: "invalid_api_key" }));
          return;
        }
        this.set(key);
        resolve();
      };
      this.dialog.addEventListener("close", onClose, { once: true });
    });
  }

  set(key) {
    this.key = key;
    if (key === null) this.memory.remove("key");
    else this.memory.write("key", key);
    this.onChange(key);
  }
}
