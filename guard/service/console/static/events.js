// What happened: the switches of the history first, then whatever the stream of events tells. Newest on top.

import { byId, el, keyed, show } from "./dom.js";
import { clock } from "./format.js";

const KEPT = 60;
const held = new Map(); // key -> {key, at, kind, scope, message, tone}

/** Adds one event of the stream. */
export function addEvent(id, event) {
  add({ key: `event ${id}`, at: Date.parse(event.at) / 1000, kind: event.kind, scope: event.scope, message: event.message });
}

/** Adds switches of `GET /v1/offload/history`: what was before this page looked. The stream tells the later ones. */
export function addHistory(switches, live) {
  for (const one of switches) {
    const what = { set: `${one.who} switched ${one.mode}`, clear: `${one.who} cleared ${one.mode}`, expire: `${one.mode} ran out` }[one.action] ?? one.action;
    add({ key: `switch ${one.id}`, at: Date.parse(one.at) / 1000, kind: "switch", scope: one.scope, message: what + (one.reason && one.action !== "expire" ? `: ${one.reason}` : "") }, live);
  }
}

function add(event, quiet) {
  if (quiet && held.has(event.key)) return;
  held.set(event.key, event);
}

/** Draws what is held. */
export function drawEvents() {
  const newest = [...held.values()].sort((a, b) => b.at - a.at).slice(0, KEPT);
  for (const key of [...held.keys()]) if (!newest.some((event) => event.key === key)) held.delete(key);
  keyed(byId("events"), newest, (event) => event.key, (event) => ({
    node: el("li", { class: `event ${event.kind}` },
      el("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(new Date(event.at * 1000))),
      el("span", { class: "event-kind" }, event.kind),
      el("span", {}, event.message, event.scope ? el("small", {}, ` ${event.scope}`) : null)),
  }));
  show(byId("events-empty"), !newest.length);
}
