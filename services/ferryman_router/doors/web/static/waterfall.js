// The waterfall: one line an event, its bar up to the next event of the same process.

import { el } from "./dom.js";
import { milliseconds, shortId } from "./words.js";

const SAYS = {
  received: (f) => `${f.tokens} tokens`,
  routed: (f) => `predicted ${milliseconds(f.total_ms ?? 0)}`,
  admitted: (f) => `goes on at token ${f.position} of ${f.prompt_len}`,
  chunk: (f) => `tokens ${f.start} – ${f.end - 1}`,
  prefetched: (f) => `${f.brought} of ${f.asked} tokens brought`,
  reserved: (f) => (f.path ? `by ${f.path}` : ""),
  verified: (f) => `${f.units} units`,
  handed_off: (f) => `${(f.bytes ?? 0).toLocaleString("en")} bytes by ${f.path}`,
  retracted: (f) => `after ${f.tokens} tokens`,
  aborted: (f) => f.reason,
  failed: (f) => f.reason,
};

export function waterfallView(detail) {
  const total = Math.max(0.001, ...detail.events.map((event) => event.end_ms));
  const left = detail.events_left_out;
  return el("div", {},
    el("p", { class: "quiet" }, `${detail.events.length} events in ${milliseconds(total)}`,
      left ? `; ${left} between them are not shown` : "",
      detail.violations.length ? "" : left ? "" : ", in an order that the tables allow"),
    detail.violations.map((broken) => el("p", { class: "error" }, `${broken.rule}: ${broken.detail}`)),
    el("ol", { class: "waterfall", "aria-label": "Events in order of time" },
      detail.events.map((event) => line(event, total))));
}

function line(event, total) {
  const [begin, length] = [event.begin_ms / total, (event.end_ms - event.begin_ms) / total];
  const facts = JSON.stringify(event.facts, null, 1);
  const says = SAYS[event.name]?.(event.facts) || (event.facts.tokens ? `${event.facts.tokens} tokens` : event.facts.reason ?? "");
  return el("li", {},
    el("details", {},
      el("summary", {},
        el("span", { class: "ms" }, milliseconds(event.begin_ms)),
        el("span", { class: `who ${event.role}`, title: event.worker }, shortId(event.worker)),
        el("span", { class: "what" }, event.name, event.attempt > 1 ? ` #${event.attempt}` : ""),
        el("span", { class: "gantt", "aria-hidden": "true" },
          el("span", { class: `piece ${event.role}`, vars: { "--at": begin, "--share": length } })),
        el("span", { class: "quiet says" }, says)),
      el("pre", { tabindex: "0", "aria-label": `Facts of ${event.name}` }, facts)));
}
