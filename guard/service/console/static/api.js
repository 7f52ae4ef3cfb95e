// Talks to the service that served this page, and to nothing else.

const KEY = "kvguard-token"; // sessionStorage: gone with the tab

/** An answer that is not a success: `status`, and `message` for people. */
export class Failure extends Error {
  constructor(status, message, problem = {}) {
    super(message);
    this.status = status;
    this.problem = problem;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

function headers(more = {}) {
  const held = token.get();
  return held ? { ...more, Authorization: `Bearer ${held}` } : more;
}

/** `path` with a query; empty values are left out. */
export function url(path, query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return pairs.length ? `${path}?${new URLSearchParams(pairs)}` : path;
}

/** A scope as a part of a path: its slashes and colons stay, whatever else is not safe is encoded. */
export const scopePath = (scope) => scope.split("/").map(encodeURIComponent).join("/");

/** Calls; returns `{data, etag}`. Throws Failure; status 0 means that nobody answered. */
export async function call(method, path, { body, etag, onlyNew = false, timeout = 10000 } = {}) {
  const more = {};
  if (body !== undefined) more["Content-Type"] = "application/json";
  if (etag) more["If-Match"] = etag;
  if (onlyNew) more["If-None-Match"] = "*";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: headers(more),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(timeout),
      cache: "no-store",
      credentials: "omit",
      referrerPolicy: "no-referrer",
    });
  } catch {
    throw new Failure(0, "kvguard does not answer");
  }
  const data = await response.json().catch(() => null);
  if (!response.ok) throw new Failure(response.status, data?.detail ?? `the answer was ${response.status}`, data ?? {});
  return { data, etag: response.headers.get("ETag") ?? "" };
}

export const get = async (path, query) => (await call("GET", url(path, query))).data;

/**
 * Reads a stream of server-sent events until it ends; `opened()` when it begins, `on({id, event, data})` for each.
 * Not EventSource: that one cannot send a token.
 */
export async function stream(path, lastId, opened, on) {
  const more = { Accept: "text/event-stream" };
  if (lastId) more["Last-Event-ID"] = lastId;
  const response = await fetch(path, { headers: headers(more), cache: "no-store", credentials: "omit" });
  if (!response.ok) throw new Failure(response.status, `events: the answer was ${response.status}`);
  opened();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const blocks = held.split(/\r?\n\r?\n/);
      held = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event) on(event);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that is left open keeps its connection, and a browser has six
  }
}

function parse(block) {
  const event = { id: "", event: "message", data: "" };
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon < 1) continue; // a comment keeps the line open
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") event.data += (event.data ? "\n" : "") + value;
    else if (name in event) event[name] = value;
  }
  return event.data ? event : null;
}
