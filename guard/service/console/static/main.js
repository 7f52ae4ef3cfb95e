// Keeps the page in step with the service: asks for numbers every few seconds, and at once when an event arrives.

import { Failure, get, stream, token, url } from "./api.js";
import { byId, el, open, setText, show } from "./dom.js";
import { drawEngines } from "./engines.js";
import { addEvent, addHistory, drawEvents } from "./events.js";
import { coarse } from "./format.js";
import { draw } from "./picture.js";
import { drawRequests } from "./requests.js";
import { openSwitch, sentence } from "./switching.js";

const SLOW = 2000; // ms between two looks at the numbers
const HIDDEN = 15000; // the same while nobody looks
const TRAFFIC_SECONDS = 60;
const REPLAY = 60; // events of before this page was opened
const chosen = { model: "", backend: "", class: "all" };
let offload = null;
let traffic = null;
let reasons = {};
let lastAnswer = 0;
let streaming = false;
let timer = 0;
let asking = false;
let again = false;

// -- data -----------------------------------------------------------------------------------------------------------

async function refresh() {
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  clearTimeout(timer);
  try {
    const [switched, seen, drawn, rows] = await Promise.all([
      get("v1/offload"),
      get("v1/correlation", { since_seconds: TRAFFIC_SECONDS }),
      get("v1/picture", chosen),
      get("v1/requests", { limit: 12 }),
      streaming ? null : history(),
    ]);
    [offload, traffic] = [switched, seen];
    lastAnswer = Date.now();
    banner("");
    headline(drawn.headline);
    choosers(drawn.choices, drawn.picture);
    draw(drawn.picture);
    show(byId("simulated"), Boolean(traffic.simulated));
    reasons = drawn.reasons;
    drawEngines(offload, traffic, reasons, switchFor);
    drawRequests(rows.requests);
    drawEvents();
  } catch (failure) {
    troubled(failure);
  } finally {
    asking = false;
    live();
    timer = setTimeout(refresh, again ? 0 : document.hidden ? HIDDEN : SLOW);
    again = false;
  }
}

async function history() {
  const { switches } = await get("v1/offload/history", { limit: 30 });
  addHistory(switches);
}

function troubled(failure) {
  if (failure instanceof Failure && failure.status === 401) {
    askToken(token.get() ? "The service does not know this token." : "");
    banner("A token is needed to look.");
  } else if (failure instanceof Failure && failure.status === 403) {
    askToken(failure.message);
    banner(failure.message);
  } else if (failure instanceof Failure) {
    const age = lastAnswer ? ` What is shown is ${coarse((Date.now() - lastAnswer) / 1000)} old.` : "";
    banner(failure.status ? `${failure.message}.${age}` : `kvguard does not answer.${age} vLLM goes on without it: hooks keep their directive for its lease, then read as without kvguard (an off holds as its switch says).`);
  } else {
    throw failure;
  }
}

/** Follows the stream of events; without one the numbers are asked for all the same. */
async function follow() {
  let last = "";
  for (let wait = 1000; ; wait = Math.min(wait * 2, 30000)) {
    try {
      await stream(url("v1/events", { replay: last ? "" : REPLAY }), last, () => {
        streaming = true;
        wait = 1000;
        refresh();
      }, (event) => {
        last = event.id || last;
        if (event.event === "gap") return; // some were missed for good; the numbers are asked for all the same
        const data = JSON.parse(event.data);
        addEvent(event.id || `${data.at} ${data.kind} ${data.message}`, data);
        refresh();
      });
    } catch (failure) {
      if (failure.status === 401 || failure.status === 403) wait = Math.min(wait, 2000);
    }
    streaming = false;
    live();
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

// -- what is shown ----------------------------------------------------------------------------------------------------

function headline(told) {
  const node = byId("headline");
  setText(node, told.title);
  setText(byId("headline-why"), told.why);
  node.className = `verdict-line ${told.state}`;
  document.title = told.state === "harmful" ? "⚠ kvguard" : "kvguard";
}

function choosers(choices, picture) {
  if (!picture) return;
  const backends = choices.map((one) => [`${one.model}\n${one.backend}`, choices.some((other) => other !== one && other.backend === one.backend) ? `${one.backend} · ${one.model}` : one.backend]);
  options(byId("choose-backend"), backends, `${picture.model}\n${picture.backend}`);
  const mine = choices.find((one) => one.model === picture.model && one.backend === picture.backend);
  options(byId("choose-class"), [["all", "all"], ...mine.classes.map((name) => [name, name])], picture.class);
}

function options(select, pairs, value) {
  const wanted = JSON.stringify(pairs);
  if (select.drawn !== wanted) {
    select.drawn = wanted;
    select.replaceChildren(...pairs.map(([key, text]) => el("option", { value: key }, text)));
  }
  if (document.activeElement !== select) select.value = value;
}

byId("choose-backend").addEventListener("change", (event) => {
  [chosen.model, chosen.backend] = event.target.value.split("\n");
  chosen.class = "all";
  refresh();
});
byId("choose-class").addEventListener("change", (event) => {
  chosen.class = event.target.value;
  refresh();
});
byId("filter").addEventListener("input", () => offload && drawEngines(offload, traffic, reasons, switchFor));

function switchFor(scope) {
  openSwitch(scope, new Set((offload?.engines ?? []).map((row) => row.engine_id)).size, (answer) => {
    toast(sentence(answer));
    refresh();
  });
}
byId("fleet").addEventListener("click", () => switchFor("fleet"));

function live() {
  const node = byId("live");
  const fresh = Date.now() - lastAnswer < 3 * SLOW;
  setText(node, fresh ? (streaming ? "live" : "live, by polling") : lastAnswer ? "not live" : "connecting");
  node.dataset.state = fresh ? "good" : "bad";
}

function banner(text) {
  const node = byId("banner");
  setText(node, text);
  show(node, Boolean(text));
}

function toast(text) {
  const node = byId("toast");
  setText(node, text);
  show(node, true);
  clearTimeout(node.timer);
  node.timer = setTimeout(() => show(node, false), 6000);
}

// -- token, theme, dialogs --------------------------------------------------------------------------------------------

function askToken(text) {
  const dialog = byId("token-dialog");
  if (dialog.open) return;
  setText(byId("token-error"), text);
  show(byId("token-error"), Boolean(text));
  byId("token").value = "";
  open(dialog);
}

byId("token-form").addEventListener("submit", () => {
  token.set(byId("token").value.trim());
  show(byId("sign-out"), true);
  refresh();
});
byId("sign-out").addEventListener("click", () => {
  token.forget();
  location.reload();
});
show(byId("sign-out"), Boolean(token.get()));

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("kvguard-theme", root.dataset.theme);
});

for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
document.addEventListener("visibilitychange", () => document.hidden || refresh());

history().catch(() => {}); // what went before, also where the stream tells the rest
refresh();
follow();
