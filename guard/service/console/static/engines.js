// One row per engine and backend: what is asked of it, whether its hook does it, what both roads cost, and the switch.

import { byId, el, keyed, setText, show } from "./dom.js";
import { bytes, coarse, count, percent, seconds } from "./format.js";

const MOST = 60; // rows drawn at once; the filter finds the others
const keyOf = (row) => `${row.engine_id}\n${row.backend}`;

/** Draws `GET /v1/offload` joined with the engines of `GET /v1/correlation`; `reasons` in words, `onSwitch(scope)` opens the switch. */
export function drawEngines(offload, traffic, reasons, onSwitch) {
  const seen = new Map((traffic?.engines ?? []).map((row) => [keyOf(row), row]));
  const wanted = byId("filter").value.trim().toLowerCase();
  const all = offload.engines.map((row) => ({
    ...row, traffic: seen.get(keyOf(row)) ?? null, because: reasons[row.control?.reason] ?? row.control?.reason ?? "",
  }));
  const found = all.filter((row) => `${row.engine_id} ${row.backend} ${row.model}`.toLowerCase().includes(wanted));
  // In the order of their names, so that nothing moves under the pointer; only where not all fit, trouble comes first.
  const first = found.length > MOST ? (a, b) => trouble(b) - trouble(a) : () => 0;
  found.sort((a, b) => first(a, b) || (keyOf(a) < keyOf(b) ? -1 : 1));
  const shown = found.slice(0, MOST);
  show(byId("filter-label"), all.length > 6 || wanted !== "");
  setText(byId("engines-note"), note(all, found, shown, offload.default_mode));
  switches(offload.overrides, onSwitch);
  keyed(byId("engines"), shown, keyOf, (row) => card(row, onSwitch));
  const empty = byId("engines-empty");
  show(empty, !shown.length);
  setText(empty, all.length ? "No engine matches the filter." : "No engine has polled yet. Set KVGUARD_ENDPOINT in vLLM's environment; kvguard doctor says what is missing.");
}

const trouble = (row) => (row.silent ? 4 : 0) + (row.state !== "open" ? 2 : 0) + (row.acknowledged ? 0 : 1);

function note(all, found, shown, mode) {
  const live = all.filter((row) => !row.silent).length;
  const cut = shown.length < found.length ? `; the first ${shown.length} of ${found.length} shown` : "";
  return all.length ? `${live} of ${all.length} live; without a switch the mode is ${mode}${cut}` : "";
}

function switches(overrides, onSwitch) {
  keyed(byId("switches"), overrides, (one) => one.scope, (first) => {
    const text = el("span", {});
    const chip = el("span", {});
    const button = el("button", { type: "button", class: "quiet", onclick: () => onSwitch(first.scope) }, "Change");
    return {
      node: el("div", { class: "switch-row" }, chip, text, el("span", { class: "grow" }), button),
      update(one) {
        chip.className = `chip mode-${one.mode}`;
        setText(chip, one.mode);
        const end = one.ttl_seconds === null ? "no end" : `${coarse(one.ttl_seconds)} left`;
        setText(text, `${one.scope}${one.stores ? "" : ", no stores"} · ${end} · ${one.who}${one.reason ? ` · ${one.reason}` : ""}`);
        button.setAttribute("aria-label", `Change the switch of ${one.scope}`);
      },
    };
  });
}

function card(row, onSwitch) {
  const part = {
    hook: el("span", {}), mode: el("span", {}), state: el("span", {}), why: el("div", { class: "why" }),
    remote: bar("remote"), recompute: bar("recompute"), roads: el("div", { class: "roads" }), numbers: el("dl", { class: "numbers" }),
  };
  const cells = Object.fromEntries(["req/s", "hits", "TTFT p50", "TTFT p95", "miss p50", "RTT p50"].map((name) => {
    const value = el("dd", {}, "–");
    part.numbers.append(el("div", {}, el("dt", {}, name), value));
    return [name, value];
  }));
  const button = el("button", { type: "button", class: "quiet", onclick: () => onSwitch(`engine:${row.engine_id}`), "aria-label": `Switch ${row.engine_id}` }, "Switch");
  part.roads.append(part.remote.node, part.recompute.node);
  const node = el("li", { class: "engine", "data-engine": row.engine_id, "data-backend": row.backend },
    el("div", { class: "engine-head" }, el("div", { class: "names" }, el("b", {}, row.engine_id), el("span", {}, row.backend)), part.mode, part.state, part.hook, el("span", { class: "grow" }), button),
    part.why, part.roads, part.numbers);
  return { node, update: (now) => update(now, node, part, cells) };
}

function update(row, node, part, cells) {
  node.dataset.state = row.state;
  node.dataset.mode = row.mode;
  chip(part.mode, row.mode, `mode-${row.mode}`, `mode ${row.mode}, from ${row.scope ?? "the default"}`);
  chip(part.state, row.state, `state-${row.state}`, `state ${row.state}`);
  const [hook, kind] = row.silent ? [`silent for ${coarse(row.last_poll_age_seconds)}`, "bad"] : row.acknowledged ? ["applied", "good"] : ["applying…", "wait"];
  chip(part.hook, hook, `hook-${kind}`, `hook: ${hook}`);
  lines(part.why, [sentence(row.because), limits(row.limit), objective(row), wouldHave(row), row.scope ? `switched for ${row.scope} by ${row.who}${row.reason ? `: ${row.reason}` : ""}` : null]);
  projections(row, part);
  const seen = row.traffic;
  setText(cells["req/s"], seen ? seen.requests_per_second.toFixed(1) : "–");
  setText(cells.hits, percent(seen?.hit_share));
  setText(cells["TTFT p50"], seconds(seen?.ttft.p50));
  setText(cells["TTFT p95"], seconds(seen?.ttft.p95));
  setText(cells["miss p50"], seconds(seen?.miss_latency.p50));
  setText(cells["RTT p50"], seconds(seen?.network_rtt.p50));
}

/** TTFT projected both ways, where the models are fitted. */
function projections(row, part) {
  const { remote = null, recompute = null, n = 0 } = row.projected ?? {};
  show(part.roads, remote !== null || recompute !== null);
  const top = Math.max(remote ?? 0, recompute ?? 0);
  part.remote.set(remote, top, n);
  part.recompute.set(recompute, top, n);
}

/** The limits that the controller asks for, in words; null: none. */
function limits(limit) {
  if (!limit) return null;
  const parts = [
    limit.max_inflight === null ? null : `at most ${limit.max_inflight} reads in flight`,
    limit.max_inflight_bytes === null ? null : `at most ${bytes(limit.max_inflight_bytes)} in flight`,
    limit.min_tokens ? `only from ${count(limit.min_tokens)} tokens on` : null,
    limit.share === 0 ? "no reads" : limit.share < 1 ? `${percent(limit.share)} of the traffic` : null,
    limit.trickle_seconds ? `a trial read every ${coarse(limit.trickle_seconds)}` : null,
  ].filter(Boolean);
  return parts.length ? `Limit: ${parts.join(", ")}` : null;
}

const sentence = (text) => text && text[0].toUpperCase() + text.slice(1);

function objective(row) {
  const one = row.control?.objective;
  const out = row.projected && !row.projected.attainable ? "Neither road meets the objective" : null;
  if (!one || one.attained === null) return out;
  const met = `TTFT within ${seconds(one.ttft_seconds)}: ${percent(one.attained)} of the last ${coarse(one.seconds)} (${percent(one.percentile > 1 ? one.percentile / 100 : one.percentile)} wanted)`;
  return [out, met].filter(Boolean).join(". ");
}

function wouldHave(row) {
  const would = row.control?.would;
  if (row.mode !== "observe" || !would?.requests) return null;
  return `auto would have refused ${count(would.requests)} requests: ${seconds(would.gained_seconds)} gained (projected)`;
}

/** Sets the lines of a paragraph list; nothing is touched where nothing changed. */
function lines(node, texts) {
  const wanted = texts.filter(Boolean);
  show(node, wanted.length > 0);
  while (node.childElementCount > wanted.length) node.lastElementChild.remove();
  wanted.forEach((text, at) => setText(node.children[at] ?? node.appendChild(el("p", {})), text));
}

function bar(road) {
  const fill = el("span", { class: `fill ${road}` });
  const value = el("b", {});
  const source = el("span", { class: "chip projected" });
  const node = el("div", { class: "road" }, el("span", { class: "road-name" }, road), el("span", { class: "track", "aria-hidden": "true" }, fill), value, source);
  return {
    node,
    set(number, top, n) {
      setText(source, `projected, n = ${count(n)}`);
      fill.style.width = `${number && top ? Math.max(2, (100 * number) / top) : 0}%`;
      setText(value, seconds(number));
    },
  };
}

function chip(node, text, kind, title) {
  const name = `chip ${kind}`;
  if (node.className !== name) node.className = name;
  if (node.title !== title) node.title = title;
  setText(node, text);
}
