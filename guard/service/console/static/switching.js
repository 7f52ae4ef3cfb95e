// The switch: a dialog that shows what is in force, and writes only over what it has shown (If-Match).

import { call, Failure, get, scopePath } from "./api.js";
import { byId, open, setText, show } from "./dom.js";
import { coarse, duration } from "./format.js";

const form = byId("switch-form");
const dialog = byId("switch-dialog");
let scope = "fleet";
let seen = null; // {override, etag} as it was when the dialog opened
let done = () => {};

/** Opens the switch for `wanted`; `engines` is how many it concerns, `changed(answer)` is told of success. */
export async function openSwitch(wanted, engines, changed) {
  scope = wanted;
  done = changed;
  byId("switch-title").textContent = wanted === "fleet" ? "Switch the whole fleet" : `Switch ${wanted}`;
  problem("");
  form.reset();
  const fleet = wanted === "fleet";
  show(byId("switch-confirm-label"), fleet);
  byId("switch-confirm").required = fleet;
  setText(byId("switch-confirm-text"), `Yes, for all ${engines} engines`);
  show(byId("switch-other-label"), false);
  await look();
  open(dialog);
}

async function look() {
  try {
    // The list, not the scope's own address: "no switch" is an answer there, and a 404 here would look like an error.
    const { overrides } = await get("v1/offload");
    const override = overrides.find((item) => item.scope === scope) ?? null;
    seen = { override, etag: override?.etag ?? "" };
  } catch (failure) {
    problem(failure.message);
    seen = null;
  }
  const one = seen?.override;
  const until = one && one.ttl_seconds !== null ? `, ends in ${coarse(one.ttl_seconds)}` : "";
  setText(byId("switch-now"), one ? `Now ${one.mode}, set by ${one.who}${one.reason ? `: ${one.reason}` : ""}${until}` : "No switch is in force for this scope.");
  show(byId("switch-clear"), Boolean(one));
  form.elements.mode.value = one?.mode ?? "off";
}

byId("switch-ttl").addEventListener("change", (event) => {
  const other = event.target.value === "other";
  show(byId("switch-other-label"), other);
  if (other) byId("switch-other").focus();
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const choice = byId("switch-ttl").value;
  const ttl = choice === "other" ? byId("switch-other").value : choice;
  const seconds = ttl ? duration(ttl) : null;
  if (choice === "other" && seconds === null) {
    problem("Say how long: 90s, 10m, 2h or 1d.");
    byId("switch-other").focus();
    return;
  }
  if (scope === "fleet" && !byId("switch-confirm").checked) {
    problem("Confirm that this is for the whole fleet.");
    byId("switch-confirm").focus();
    return;
  }
  await send("PUT", "", {
    mode: form.elements.mode.value,
    stores: byId("switch-stores").checked,
    ttl_seconds: seconds,
    reason: byId("switch-reason").value.trim(),
  });
});

byId("switch-clear").addEventListener("click", () => {
  const reason = byId("switch-reason").value.trim();
  if (scope === "fleet" && !byId("switch-confirm").checked) {
    problem("Confirm that this is for the whole fleet.");
    byId("switch-confirm").focus();
    return;
  }
  send("DELETE", reason ? `?${new URLSearchParams({ reason })}` : "");
});

async function send(method, query, body) {
  if (!seen) await look();
  if (!seen) return; // what is in force could not be read, and is not written over blindly
  const go = byId("switch-go");
  go.disabled = true;
  try {
    const { data } = await call(method, `v1/offload/${scopePath(scope)}${query}`, { body, etag: seen.etag, onlyNew: !seen.override });
    dialog.close();
    done(data);
  } catch (failure) {
    if (!(failure instanceof Failure)) throw failure;
    await refused(failure);
  } finally {
    go.disabled = false;
  }
}

async function refused(failure) {
  if (failure.status === 412) {
    const chosen = form.elements.mode.value;
    await look(); // so that the next try is over what is shown now
    form.elements.mode.value = chosen;
    problem("Somebody switched this meanwhile, so nothing was changed. What is in force now is shown above: look, then switch again.");
  } else if (failure.status === 403) {
    problem(`Not allowed: ${failure.message}`);
  } else {
    problem(failure.status ? failure.message : "kvguard does not answer: nothing is known of this switch. Look before you try again.");
  }
}

function problem(text) {
  const node = byId("switch-error");
  setText(node, text);
  show(node, Boolean(text));
}

/** What a switch did, as a sentence. */
export function sentence(answer) {
  const what = answer.override ? `${answer.scope}: ${answer.override.mode}` : `${answer.scope}: cleared`;
  return answer.engines ? `${what}; ${answer.engines} live ${answer.engines === 1 ? "engine" : "engines"}` : `${what}; no live engine in this scope now`;
}
