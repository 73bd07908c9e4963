// What the server refused, in its words: the field at fault first.

import { ApiError } from "./api.js";
import { button, el } from "./dom.js";

export class Notice {
  constructor(id) {
    this.root = el("div", { id, class: "notice", role: "alert", hidden: true });
  }

  show(error) {
    this.root.replaceChildren(
      el("p", {}, ...message(error)),
      el("p", { class: "hint" }, details(error)),
      button("Dismiss", () => this.clear()),
    );
    this.root.dataset.kind = "error";
    this.root.hidden = false;
  }

  /** `text`: progress, no error. */
  tell(text) {
    this.root.dataset.kind = "progress";
    this.root.replaceChildren(el("p", {}, text));
    this.root.hidden = false;
  }

  clear() {
    this.root.replaceChildren();
    this.root.hidden = true;
  }
}

// Most messages begin with the field they are about.
function message({ param, message: text }) {
  if (!param) return [text];
  const field = el("strong", { class: "param" }, param);
  return text.startsWith(`${param} `) ? [field, text.slice(param.length)] : [field, ": ", text];
}

function details(error) {
  if (!(error instanceof ApiError)) return "This is a fault of the page.";
  const parts = [
    error.status > 200 ? `HTTP ${error.status}` : null,
    error.code ?? error.type,
    error.retryAfterS === null ? null : `try again in ${error.retryAfterS} s`,
    error.requestId,
  ];
  return parts.filter((part) => part !== null).join(" · ");
}
