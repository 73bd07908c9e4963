// The server's HTTP API: paths relative to this page, the key if there is one, errors as the server words them.

const SESSION_ID = /^[A-Za-z0-9_-]{1,64}$/;

/** What the server refused; `param` names the field at fault. `status` is 0 when it could not be reached. */
export class ApiError extends Error {
  constructor(status, error, { requestId = null, retryAfterS = null } = {}) {
    super(error.message);
    this.status = status;
    this.type = error.type ?? null;
    this.param = error.param ?? null;
    this.code = error.code ?? null;
    this.requestId = requestId;
    this.retryAfterS = retryAfterS;
  }
}

export class Api {
  /** `keyring`: {key, ask(reason)}; `ask` resolves when there is a new key to try, or rejects. */
  constructor(keyring) {
    this.keyring = keyring;
  }

  async json(method, path, body, options = {}) {
    return (await this.request(method, path, body, options)).json();
  }

  /**
   * The answer if it is a good one. Raises ApiError, or an AbortError when `signal` says so. `asks`: whether a person is
   * asked for the key that is missing; what the page reads by itself does not ask.
   */
  async request(method, path, body, options = {}) {
    for (;;) {
      const { key } = this.keyring;
      try {
        return await this.once(method, path, body, options);
      } catch (error) {
        if (error.status !== 401 || options.asks === false) throw error;
        if (key === this.keyring.key) await this.keyring.ask(key === null ? null : "The server does not know this key.");
      }
    }
  }

  async once(method, path, body, { headers = {}, signal } = {}) {
    const sent = { ...headers };
    if (this.keyring.key !== null) sent.authorization = `Bearer ${this.keyring.key}`;
    let payload = body;
    if (body !== undefined && !(body instanceof Blob)) {
      sent["content-type"] = "application/json";
      payload = JSON.stringify(body);
    }
    const request = { method, headers: sent, body: payload, signal, cache: "no-store", credentials: "omit" };
    let response;
    try {
      response = await fetch(path, request);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "the server cannot be reached", code: "unreachable" });
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }
}

/** The path of a session, or of something of it. A text that could never be an id is an id that does not exist. */
export function sessionPath(id, ...parts) {
  if (!SESSION_ID.test(id)) throw new ApiError(404, { message: `the session '${id}' does not exist`, code: "session_not_found" });
  return ["v1/sessions", encodeURIComponent(id), ...parts].join("/");
}

async function errorOf(response) {
  const after = Number.parseFloat(response.headers.get("retry-after") ?? "");
  const context = {
    requestId: response.headers.get("x-request-id"),
    retryAfterS: Number.isFinite(after) ? after : null,
  };
  let error;
  try {
    ({ error } = await response.json());
  } catch {
    error = null; // a proxy's page, or nothing
  }
  return new ApiError(response.status, error ?? { message: `the answer was ${response.status}` }, context);
}
