// The fleet as a live map: a card for each worker, grouped by its role.

import { byId, el, fill } from "./dom.js";
import { bytes, count, percent, shortId } from "./words.js";

const ROLES = { prefill: "Prefill", decode: "Decode", both: "Prefill and decode", hostcache: "Host caches" };
const KINDS = { full: "pages", window: "window pages", recurrent: "recurrent states" };

/** Shows the latest state; `askForToken` opens the dialog of keys. */
export function showFleet(state, askForToken) {
  const fleet = state.fleet;
  if (!fleet) {
    fill(byId("fleet-body"), el("p", { class: "quiet" },
      "How busy the cluster is, only its observer may see: ",
      el("button", { type: "button", class: "link", on: { click: askForToken } }, "show the observer's token"),
      " (", el("code", {}, "cat .ferryman/metrics.token"), ")."));
    return;
  }
  const groups = Object.entries(ROLES).map(([role, title]) => [title, fleet.workers.filter((w) => w.role === role)]);
  fill(byId("fleet-body"),
    el("ul", { class: "facts", "aria-label": "This router" },
      fact(fleet.in_flight, "under way"),
      fact(fleet.queued, "in the queue", fleet.queued ? `≈ ${fleet.queue_seconds} s` : ""),
      state.broker ? "" : el("li", { class: "bad" }, "the broker is away")),
    fleet.starts.map((start) => el("p", { class: "notice" }, start)),
    el("div", { class: "groups" }, groups.filter(([, workers]) => workers.length).map(([title, workers]) =>
      el("section", { class: "group", "aria-label": title, vars: { "--cards": workers.length } },
        el("h3", {}, title), el("ul", { class: "cards" }, workers.map(card))))));
}

function fact(number, what, more = "") {
  return el("li", {}, el("strong", {}, number), ` ${what} `, more ? el("span", { class: "quiet" }, more) : "");
}

function card(worker) {
  const isCache = worker.role === "hostcache";
  return el("li", { class: `card ${worker.state}` },
    el("div", { class: "bar" },
      el("strong", { title: worker.id }, shortId(worker.id)),
      el("span", { class: `pill ${worker.state}` }, worker.state)),
    isCache ? el("p", { class: "quiet" }, `node ${worker.node}`) : load(worker),
    Object.entries(worker.slots).map(([kind, slots]) => pool(kind, slots)),
    el("p", { class: "quiet" }, speeds(worker)));
}

function load(worker) {
  const waiting = worker.queued ? `, ${worker.queued} waiting` : "";
  const tokens = worker.queue_tokens ? ` (${count(worker.queue_tokens, "token")} to compute)` : "";
  return meter(`${worker.running} of ${worker.max_running} running${waiting}${tokens}`,
    worker.running, worker.max_running, "run");
}

function pool(kind, { free, total }) {
  const name = KINDS[kind] ?? kind;
  if (!total) return el("p", { class: "quiet" }, `${count(free, "slot")} free for ${name}`);
  return meter(`${name}: ${free.toLocaleString("en")} of ${total.toLocaleString("en")} slots free`,
    total - free, total, "pool");
}

/** A bar with its words beside it, so no one needs to see the bar. */
function meter(text, value, whole, kind) {
  return el("div", { class: "meter" }, el("span", {}, text),
    el("span", { class: `track ${kind}`, "aria-hidden": "true", vars: { "--part": whole ? value / whole : 0 } }));
}

function speeds(worker) {
  const parts = [];
  if (worker.tokens_per_second) parts.push(`${worker.tokens_per_second.toLocaleString("en")} tokens/s`);
  if (worker.step_ms) parts.push(`${worker.step_ms} ms a step`);
  if (worker.accepted_drafts !== null) parts.push(`${percent(worker.accepted_drafts, 1)} of drafts right`);
  for (const [tier, speed] of Object.entries(worker.bytes_per_second)) {
    if (speed) parts.push(`${tier} ${bytes(speed)}/s`);
  }
  return parts.join(" · ") || "nothing measured yet";
}
