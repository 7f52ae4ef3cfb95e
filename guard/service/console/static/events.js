// What happened: whatever the stream of events tells, and before it what the history has. Newest on top.

import { byId, el, keyed, show } from "./dom.js";
import { clock } from "./format.js";

const KEPT = 60;
const held = new Map(); // key -> {key, at, kind, scope, message, old}
let streamed = Infinity; // time of the oldest event that the stream told

/** Adds one event of the stream. */
export function addEvent(id, event) {
  const at = Date.parse(event.at) / 1000;
  const key = `event ${id}`;
  streamed = Math.min(streamed, at);
  held.set(key, { key, at, kind: event.kind, scope: event.scope, message: event.message });
}

/** Adds switches of `GET /v1/offload/history`: they are shown as far as they are older than what the stream tells. */
export function addHistory(switches) {
  for (const one of switches) {
    const what = { set: `${one.who} switched ${one.mode}`, clear: `${one.who} cleared ${one.mode}`, expire: `${one.mode} ran out` }[one.action] ?? one.mode;
    const kind = one.action in { set: 0, clear: 0, expire: 0 } ? "switch" : one.action;
    const key = `history ${one.id}`;
    held.set(key, { key, old: true, at: Date.parse(one.at) / 1000, kind, scope: one.scope, message: what + (one.reason && one.action !== "expire" ? `: ${one.reason}` : "") });
  }
}

/** Draws what is held. */
export function drawEvents() {
  const newest = [...held.values()].filter((event) => !event.old || event.at < streamed - 1).sort((a, b) => b.at - a.at).slice(0, KEPT);
  for (const key of [...held.keys()]) if (!newest.some((event) => event.key === key)) held.delete(key);
  keyed(byId("events"), newest, (event) => event.key, (event) => ({
    node: el("li", { class: `event kind-${event.kind}` },
      el("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(new Date(event.at * 1000))),
      el("span", { class: "event-kind" }, event.kind),
      el("span", {}, event.message, event.scope && !event.message.includes(event.scope) ? el("small", {}, ` ${event.scope}`) : null)),
  }));
  show(byId("events-empty"), !newest.length);
}
