// The latest requests, and one of them explained: seven parts as a bar, its fetches, the decision and the other road.

import { get } from "./api.js";
import { byId, el, keyed, open, setText, show } from "./dom.js";
import { bytes, clock, count, percent, seconds } from "./format.js";

const PARTS = ["intake", "queue", "lookup", "slot", "fetch", "resume", "prefill"];

/** Draws a page of `GET /v1/requests`; all bars are to one scale. */
export function drawRequests(rows) {
  const top = Math.max(...rows.map((row) => row.ttft_seconds ?? 0), 0.001);
  keyed(byId("requests"), rows, (row) => row.internal_id, line);
  for (const row of rows) byId("requests").keyedChildren.get(row.internal_id).scale(top);
  show(byId("requests-empty"), !rows.length);
}

function line(first) {
  const id = first.internal_id;
  const ttft = el("b", { class: "number" });
  const decision = el("span", {});
  const text = el("span", { class: "request-text" });
  const bar = el("span", { class: "minibar", "aria-hidden": "true" });
  const button = el("button", { type: "button", class: "request", onclick: () => explain(id) }, el("time", {}, clock(new Date(first.arrival))), decision, text, bar, ttft);
  const segments = Object.fromEntries(PARTS.map((part) => [part, el("span", { class: `part ${part}` })]));
  let row = first;
  return {
    node: el("li", {}, button),
    update(now) {
      row = now;
      decision.className = `chip road-${row.decision}`;
      setText(decision, row.decision === "none" ? "no hit" : row.decision);
      setText(text, `${count(row.tokens.prompt)} tokens · ${row.engine_id}`);
      setText(ttft, row.ttft_seconds === null ? "aborted" : seconds(row.ttft_seconds));
      const label = `Explain request ${row.request_id || id}: ${row.decision}, TTFT ${seconds(row.ttft_seconds)}`;
      if (button.getAttribute("aria-label") !== label) button.setAttribute("aria-label", label);
    },
    scale(top) {
      if (!bar.childElementCount) bar.append(...PARTS.map((part) => segments[part]));
      for (const part of PARTS) segments[part].style.width = `${(100 * row.parts[part]) / top}%`;
    },
  };
}

/** Opens the explanation of a request by any of its ids. */
export async function explain(id) {
  const body = byId("request-body");
  setText(byId("request-title"), "Request");
  body.replaceChildren(el("p", { class: "empty" }, "Looking it up…"));
  open(byId("request-dialog"));
  try {
    const data = await get(`v1/requests/${id.split("/").map(encodeURIComponent).join("/")}`);
    setText(byId("request-title"), `Request ${data.requests[0].request_id || data.requests[0].internal_id}`);
    body.replaceChildren(...data.requests.map(story));
  } catch (failure) {
    body.replaceChildren(el("p", { class: "error" }, failure.message));
  }
}

function story(one) {
  const { tokens } = one;
  return el("article", { class: "story" },
    el("p", { class: "why" }, `${one.engine_id} · ${one.model} · ${one.backend || "no remote tier"} · class ${one.class} · ${new Date(one.arrival).toLocaleString()}${one.simulated ? " · simulated" : ""}`),
    el("p", { class: "decision" }, el("span", { class: `chip road-${one.decision}` }, one.decision === "none" ? "no hit" : one.decision), one.reason ? ` ${one.reason}` : ""),
    timeline(one),
    el("ul", { class: "words" }, one.words.map((word) => el("li", {}, word))),
    otherRoad(one),
    el("p", { class: "note" }, `${count(tokens.prompt)} prompt tokens: ${count(tokens.local)} held locally, ${count(tokens.remote_loaded)} of ${count(tokens.remote_matched)} matched loaded from remote, ${count(tokens.computed)} computed`),
    fetches(one),
    el("p", { class: "note ids" }, `internal id ${one.internal_id} · trace ${one.trace_id}`));
}

function timeline(one) {
  const spent = one.timeline.reduce((sum, part) => sum + part.seconds, 0);
  const total = Math.max(spent, one.ttft_seconds ?? 0) || 1;
  const bar = el("div", { class: "parts", "aria-hidden": "true" }, one.timeline.map((part) => {
    const piece = el("span", { class: `part ${part.part}`, title: `${part.part} ${seconds(part.seconds)}` });
    piece.style.width = `${(100 * part.seconds) / total}%`;
    return piece;
  }));
  return el("div", { class: "timeline" },
    el("p", { class: "ttft" }, el("b", {}, one.ttft_seconds === null ? "aborted" : seconds(one.ttft_seconds)), " to first token",
      el("span", { class: "chip measured" }, "measured")),
    bar,
    el("table", { class: "parts-table" },
      el("caption", { class: "hidden" }, "Parts of TTFT"),
      el("thead", { class: "hidden" }, el("tr", {}, ["part", "time", "share", "what it is"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, one.timeline.map((part) => el("tr", { class: part.seconds / total < 0.005 ? "small" : null },
        el("th", { scope: "row" }, el("span", { class: `part swatch ${part.part}`, "aria-hidden": "true" }), part.part),
        el("td", { class: "number" }, seconds(part.seconds)), el("td", { class: "number" }, percent(part.seconds / total)), el("td", {}, part.meaning))))));
}

/** What the road not taken was projected to cost, or why nobody can say; nothing where there was no choice. */
function otherRoad({ other_road: other }) {
  if (!other?.choice) return null;
  const { value, low, high, n, source, reason } = other.ttft_seconds;
  if (value === null) return el("p", { class: "other" }, el("b", {}, `${other.choice} instead: `), reason);
  const more = other.difference_seconds;
  return el("p", { class: "other" },
    el("b", {}, `${other.choice} instead: ${seconds(value)}`), el("span", { class: "chip projected" }, source),
    ` ${seconds(Math.abs(more))} ${more < 0 ? "less" : "more"}; 95 %: ${seconds(low)} to ${seconds(high)}, n = ${count(n)}`);
}

function fetches(one) {
  if (!one.fetches.length) return null;
  const names = ["attempt", "outcome", "took", "tokens", "bytes", "round trips", "RTT", "in flight"];
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Fetches" }, el("table", {},
    el("caption", {}, "Fetches"),
    el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, one.fetches.map((fetch) => el("tr", {}, [
      fetch.attempt, fetch.error_type ? `${fetch.outcome}: ${fetch.error_type}` : fetch.outcome, seconds(fetch.seconds), count(fetch.tokens), bytes(fetch.bytes),
      fetch.round_trips ?? "–", seconds(fetch.network_rtt_seconds), fetch.inflight,
    ].map((value) => el("td", {}, String(value))))))));
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("find-id").value.trim();
  if (id) explain(id);
});
