// The inflection picture: TTFT against RTT on a log scale, remote against recompute, drawn as plain SVG.
// Filled marks are measured, dashed lines are projected, dotted lines are priors.

import { byId, el, setText, svg } from "./dom.js";
import { count, seconds, tick } from "./format.js";

const PAD = { top: 38, right: 18, bottom: 44, left: 62 };
const WIDEST_GAP = 2.3; // between two neighbouring points, as a ratio of their RTTs
let drawn = null;
let tip = null;

/** Draws `picture` of `GET /v1/picture`; null draws the empty state. */
export function draw(picture) {
  drawn = picture;
  const holder = byId("chart");
  if (!holder.observed) {
    holder.observed = true;
    new ResizeObserver(() => paint()).observe(holder);
  }
  paint();
  figures(picture);
  table(picture);
}

function paint() {
  const holder = byId("chart");
  const width = Math.max(280, holder.clientWidth);
  const height = Math.round(Math.min(400, Math.max(260, width * 0.5)));
  if (!drawn) {
    holder.replaceChildren(el("p", { class: "empty tall" }, "No request with a remote tier yet. Start vLLM with KVGUARD_ENDPOINT set, or try kvguard demo."));
    return;
  }
  const scale = scales(drawn, width, height);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": inWords(drawn) });
  chart.append(zones(drawn, scale), axes(scale), lines(drawn, scale), marks(drawn, scale), here(drawn, scale));
  tip = el("div", { class: "tip", "aria-hidden": "true", hidden: true });
  holder.replaceChildren(legend(drawn), chart, tip);
  chart.addEventListener("pointermove", (event) => hover(event, chart, scale));
  chart.addEventListener("pointerleave", () => (tip.hidden = true));
}

// -- scales -------------------------------------------------------------------------------------------------------

function scales(picture, width, height) {
  const { low, high } = picture.axis;
  const tops = [...picture.points.remote, ...picture.points.recompute].map((point) => point.ttft.p75);
  // The recompute line must be seen whole; a remote line may leave through the top.
  if (picture.curves) tops.push(Math.max(...picture.curves.recompute) * 1.6);
  if (picture.now.ttft) tops.push(picture.now.ttft);
  const step = niceStep(Math.max(0.01, ...tops) * 1.12, height < 300 ? 4 : 5);
  const top = Math.ceil((Math.max(0.01, ...tops) * 1.06) / step) * step;
  const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
  const span = Math.log(high / low);
  return {
    box, low, high, top, step,
    x: (rtt) => box.left + (Math.log(rtt / low) / span) * (box.right - box.left),
    y: (ttft) => box.bottom - (Math.min(ttft, top * 1.5) / top) * (box.bottom - box.top),
    rtt: (x) => low * Math.exp(((x - box.left) / (box.right - box.left)) * span),
    inside: (rtt) => rtt >= low && rtt <= high,
  };
}

function niceStep(top, steps) {
  const raw = top / steps;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
}

function decades({ low, high }, wide) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of wide ? [1, 2, 5] : [1, 3]) ticks.push(Number((factor * 10 ** power).toPrecision(3)));
  }
  return ticks.filter((value) => value >= low && value <= high);
}

// -- parts --------------------------------------------------------------------------------------------------------

function axes(s) {
  const group = svg("g", { class: "axes" });
  for (let value = 0; value <= s.top + s.step / 1e6; value += s.step) {
    const y = s.y(value);
    group.append(
      svg("line", { class: "grid", x1: s.box.left, x2: s.box.right, y1: y, y2: y }),
      svg("text", { x: s.box.left - 8, y: y + 4, "text-anchor": "end" }, tick(Number(value.toPrecision(6)))),
    );
  }
  let last = -Infinity;
  for (const value of decades(s, s.box.right - s.box.left > 300)) {
    const x = s.x(value);
    group.append(svg("line", { class: "grid", x1: x, x2: x, y1: s.box.bottom, y2: s.box.bottom + 5 }));
    if (x - last < 44) continue;
    last = x;
    group.append(svg("text", { x, y: s.box.bottom + 19, "text-anchor": "middle" }, tick(value)));
  }
  group.append(svg("text", { class: "axis-name", x: (s.box.left + s.box.right) / 2, y: s.box.bottom + 38, "text-anchor": "middle" }, "round-trip time to the store"));
  return group;
}

function zones(picture, s) {
  const group = svg("g", { class: "zones" });
  // A prior is a line, not a verdict: only the deployment's own figures colour the ground.
  const edge = (figure) => (figure.value && figure.source !== "prior" && s.inside(figure.value) ? s.x(figure.value) : null);
  const departed = edge(picture.departure);
  const even = edge(picture.break_even);
  const height = s.box.bottom - s.box.top;
  if (even !== null) group.append(svg("rect", { class: "zone harmful", x: even, y: s.box.top, width: s.box.right - even, height }));
  if (departed !== null) {
    const until = even !== null ? even : s.box.right;
    if (until > departed) group.append(svg("rect", { class: "zone departed", x: departed, y: s.box.top, width: until - departed, height }));
  }
  group.append(...threshold(picture.departure, "departure", s, 0), ...threshold(picture.break_even, "break-even", s, 1));
  return group;
}

function threshold(figure, name, s, row) {
  if (!figure.value || !s.inside(figure.value)) return [];
  const x = s.x(figure.value);
  const parts = [];
  if (figure.low !== null || figure.high !== null) {
    const from = s.x(Math.max(s.low, figure.low ?? s.low));
    const to = s.x(Math.min(s.high, figure.high ?? s.high));
    parts.push(svg("rect", { class: `interval ${name}`, x: from, y: s.box.top + 7 + 11 * row, width: Math.max(4, to - from), height: 5, rx: 2.5 }));
  }
  const right = x < (s.box.left + s.box.right) / 2 || x < s.box.left + 160;
  const up = row ? 8 : 23; // two rows: the lines may be close together
  parts.push(
    svg("line", { class: `threshold ${name} ${figure.source}`, x1: x, x2: x, y1: s.box.top - up - 8, y2: s.box.bottom }),
    svg("text", { class: `threshold-name ${name}`, x: right ? x + 6 : x - 6, y: s.box.top - up, "text-anchor": right ? "start" : "end" },
      `${name}${figure.source === "prior" ? " (prior)" : ""}`),
  );
  return parts;
}

function lines(picture, s) {
  const group = svg("g", { class: "lines", "clip-path": "url(#plot)" });
  group.append(svg("clipPath", { id: "plot" }, svg("rect", { x: s.box.left, y: s.box.top, width: s.box.right - s.box.left, height: s.box.bottom - s.box.top })));
  for (const road of ["recompute", "remote"]) {
    if (picture.curves) group.append(svg("path", { class: `curve ${road}`, d: path(picture.curves.rtt.map((rtt, at) => [rtt, picture.curves[road][at]]), s) }));
    const points = picture.points[road];
    if (points.length > 1) group.append(svg("path", { class: `through ${road}`, d: path(points.map((point) => [point.rtt, point.ttft.p50]), s) }));
  }
  return group;
}

/** A path through the points; where RTT was not seen in between it is broken. */
function path(pairs, s) {
  const joined = (at) => at > 0 && pairs[at][0] / pairs[at - 1][0] < WIDEST_GAP;
  return pairs.map(([rtt, ttft], at) => `${joined(at) ? "L" : "M"}${s.x(rtt).toFixed(1)},${s.y(ttft).toFixed(1)}`).join("");
}

function marks(picture, s) {
  const group = svg("g", { class: "marks" });
  for (const road of ["recompute", "remote"]) {
    for (const point of picture.points[road]) {
      if (!s.inside(point.rtt)) continue;
      const [x, y] = [s.x(point.rtt), s.y(point.ttft.p50)];
      group.append(svg("line", { class: `whisker ${road}`, x1: x, x2: x, y1: s.y(point.ttft.p25), y2: s.y(point.ttft.p75) }));
      group.append(road === "remote"
        ? svg("circle", { class: `mark ${road}`, cx: x, cy: y, r: 5 })
        : svg("rect", { class: `mark ${road}`, x: x - 4.2, y: y - 4.2, width: 8.4, height: 8.4, transform: `rotate(45 ${x} ${y})` }));
    }
  }
  return group;
}

function here(picture, s) {
  const group = svg("g", { class: "here" });
  const { now } = picture.rtt;
  if (!now || !s.inside(now)) return group;
  const x = s.x(now);
  group.append(svg("line", { class: "now", x1: x, x2: x, y1: s.box.top, y2: s.box.bottom }));
  if (picture.now.ttft) {
    const y = s.y(picture.now.ttft);
    group.append(svg("circle", { class: "pulse", cx: x, cy: y, r: 9 }), svg("circle", { class: "now-dot", cx: x, cy: y, r: 5.5 }));
  }
  const right = x < s.box.right - 70;
  group.append(svg("text", { class: "now-name", x: right ? x + 7 : x - 7, y: s.box.bottom - 8, "text-anchor": right ? "start" : "end" }, "now"));
  return group;
}

function legend(picture) {
  const item = (kind, text) => el("li", {}, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), text);
  const items = [item("dot remote", "remote, measured"), item("dot recompute", "recompute, measured")];
  if (picture.curves) items.push(item("dash remote", "remote, projected"), item("dash recompute", "recompute, projected"));
  items.push(item("now", "now"));
  return el("ul", { class: "legend" }, items);
}

function hover(event, chart, s) {
  const box = chart.getBoundingClientRect();
  const at = { x: event.clientX - box.left, y: event.clientY - box.top };
  let best = null;
  for (const road of ["remote", "recompute"]) {
    for (const point of drawn.points[road]) {
      const away = Math.hypot(s.x(point.rtt) - at.x, s.y(point.ttft.p50) - at.y);
      if (away < 28 && (!best || away < best.away)) best = { away, point, road };
    }
  }
  if (!best) {
    tip.hidden = true;
    return;
  }
  const { point, road } = best;
  tip.replaceChildren(
    el("b", {}, `${road}, RTT ${seconds(point.rtt)}`),
    el("span", {}, `TTFT ${seconds(point.ttft.p50)}; half of the requests ${seconds(point.ttft.p25)} to ${seconds(point.ttft.p75)}`),
    el("span", {}, `measured, n = ${count(point.n)}`),
  );
  tip.hidden = false;
  const room = chart.clientWidth - tip.offsetWidth - 4;
  tip.style.left = `${Math.max(0, Math.min(room, s.x(point.rtt) + 12))}px`;
  tip.style.top = `${chart.offsetTop + Math.max(0, s.y(point.ttft.p50) - tip.offsetHeight - 8)}px`;
}

// -- words and numbers ----------------------------------------------------------------------------------------------

/** The interval and sample size behind a figure. */
export function proof(figure) {
  const parts = [];
  if (figure.low !== null || figure.high !== null) {
    const [low, high] = [figure.low, figure.high].map((value) => (value === null ? "open" : seconds(value)));
    parts.push(`95 %: ${low} to ${high}`);
  }
  if (figure.source === "prior") parts.push("one report's figure, until your own data say");
  else if (figure.n) parts.push(`n = ${count(figure.n)}`);
  if (figure.reason) parts.push(figure.reason);
  return parts.join(" · ");
}

function figures(picture) {
  const list = byId("figures");
  if (!picture) {
    list.replaceChildren();
    return;
  }
  const rows = [
    ["RTT now", picture.rtt.now, { source: "measured" }, picture.rtt.low ? `seen: ${seconds(picture.rtt.low)} to ${seconds(picture.rtt.high)}` : "no round trip seen yet", "now"],
    ["Departure", picture.departure.value, picture.departure, proof(picture.departure), "departure"],
    ["Break-even", picture.break_even.value, picture.break_even, [proof(picture.break_even), picture.break_even.source === "prior" ? "" : "lookups without a hit counted"].filter(Boolean).join(" · "), "break-even"],
    ["Knee", picture.knee.value, picture.knee, proof(picture.knee), "knee"],
  ];
  list.replaceChildren(
    ...rows.filter(([name, value]) => name !== "Knee" || value !== null).map(([name, value, { source }, why, kind]) =>
      el("div", { class: `figure ${kind}` },
        el("dt", {}, name, value === null ? null : el("span", { class: `chip ${source}` }, source)),
        el("dd", {}, el("b", {}, seconds(value)), el("small", {}, why)))),
  );
  const reference = picture.reference.prompt_tokens
    ? `; points: whatever took that road; lines: a prompt of ${count(picture.reference.prompt_tokens)} tokens, ${count(picture.reference.matched_tokens)} of them held remotely` : "";
  setText(byId("picture-note"), `TTFT against RTT, ${count(picture.n)} requests${reference}`);
}

function table(picture) {
  const holder = byId("chart-table");
  if (!picture) {
    holder.replaceChildren();
    return;
  }
  const rows = ["remote", "recompute"].flatMap((road) => picture.points[road].map((point) =>
    el("tr", {}, el("td", {}, road), ...[point.rtt, point.ttft.p25, point.ttft.p50, point.ttft.p75].map((value) => el("td", { class: "number" }, seconds(value))), el("td", { class: "number" }, count(point.n)))));
  holder.replaceChildren(el("table", {},
    el("caption", { class: "hidden" }, "Measured TTFT by road and RTT"),
    el("thead", {}, el("tr", {}, ["road", "RTT", "TTFT p25", "TTFT p50", "TTFT p75", "n"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows)));
}

function inWords(picture) {
  const figure = (name, one) => `${name} ${one.value === null ? one.reason || "not known" : `${seconds(one.value)} (${one.source})`}`;
  return `TTFT against round-trip time for ${picture.backend}. RTT now ${seconds(picture.rtt.now)}; ` +
    `${figure("departure", picture.departure)}; ${figure("break-even", picture.break_even)}. ` +
    `${picture.points.remote.length + picture.points.recompute.length} measured points: the table below has them.`;
}
