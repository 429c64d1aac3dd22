// The route with its runner-up, the hand-off by pages, and what host-caches fetched.

import { el, table } from "./dom.js";
import { bytes, count, milliseconds, shortId, sourceText, TIERS } from "./words.js";

const PARTS = [
  ["queue", "queue_seconds"], ["fetch", "fetch_seconds"], ["load", "load_seconds"], ["prefill", "prefill_seconds"],
  ["hand-off", "handoff_seconds"], ["a row at decode", "row_seconds"], ["predicted in all", "total_seconds"],
];

/** One table for each attempt: the choice, and the best of those that were not chosen. */
export function routeView(detail) {
  if (!detail.routes.length) return el("p", { class: "quiet" }, "Not routed: it waits, or was refused before.");
  return el("div", {}, detail.routes.map((route) => oneRoute(route, detail.routes.length > 1)));
}

function oneRoute(route, hasOthers) {
  const candidates = [route.chosen, ...route.others.slice(0, 1)];
  const columns = (read) => candidates.map(read);
  const rows = [
    ["prefill worker", ...columns((c) => shortId(c.prefill_worker_id))],
    ["decode worker", ...columns((c) => shortId(c.decode_worker_id))],
    ...PARTS.filter(([, field]) => candidates.some((c) => c[field]))
      .map(([name, field]) => [name, ...columns((c) => milliseconds(c[field] * 1000))]),
    ["tokens it can use", ...columns((c) => tiersOf(c))],
    ["exactness", ...columns((c) => c.exactness)],
    ["data plane", ...columns((c) => c.plane)],
  ];
  const attempt = hasOthers ? ` of attempt ${route.attempt}` : "";
  const more = route.others.length - 1;
  return el("div", {},
    table(`Numbers of the route${attempt}`, ["", "chosen", ...(candidates.length > 1 ? ["runner-up"] : [])], rows, "route"),
    candidates.length > 1 ? "" : el("p", { class: "quiet" }, "There was no other pair of workers."),
    more > 0 ? el("p", { class: "quiet" }, `and ${more} more`) : "");
}

function tiersOf(candidate) {
  const parts = TIERS.filter((tier) => candidate[`${tier}_tokens`])
    .map((tier) => `${candidate[`${tier}_tokens`]} ${tier}`);
  return parts.length ? parts.join(", ") : "0";
}

const UNITS = { full: "pages", window: "window pages", recurrent: "recurrent state at" };

export function handoffView(detail) {
  const { handoff, fetched } = detail;
  const lines = fetched.map((unit) => `${shortId(unit.worker)} brought ${count(Number(unit.units), "unit")} from ${unit.origin}`);
  if (!handoff) return el("div", {}, el("p", { class: "quiet" }, "Nothing was handed off yet."), list(lines));
  for (const [kind, [first, end]] of Object.entries(handoff.wanted)) {
    if (end > first) lines.push(`sent: ${rangeText(kind, first, end)}`);
  }
  for (const [tier, tokens] of Object.entries(handoff.held)) {
    if (tokens) lines.push(`not sent: ${count(tokens, "token")} that decode had itself, in ${sourceText(tier)}`);
  }
  if (handoff.units) lines.push(`${count(handoff.units, "unit")} verified by digest before the first token`);
  const speed = handoff.num_bytes ? `${bytes(handoff.num_bytes)} in ${milliseconds(handoff.seconds * 1000)}` : "under way";
  return el("div", {},
    el("p", {}, el("strong", {}, speed), handoff.path ? ` by ${handoff.path}` : "", handoff.why ? ` (${handoff.why})` : ""),
    list(lines));
}

function rangeText(kind, first, end) {
  if (kind === "recurrent") return `${UNITS.recurrent} token ${first}`;
  const range = end - first === 1 ? `${first}` : `${first} – ${end - 1}`;
  return `${UNITS[kind] ?? kind} ${range} (${end - first})`;
}

const list = (lines) => el("ul", { class: "notes" }, lines.map((text) => el("li", {}, text)));
