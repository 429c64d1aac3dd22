// One request in full. It is read again while it runs, at most once a second, and once after its end.

import { byId, el, fill } from "./dom.js";
import { dataHeaders } from "./keys.js";
import { handoffView, routeView } from "./route.js";
import { refusalText } from "./sse.js";
import { stripView } from "./strip.js";
import { waterfallView } from "./waterfall.js";
import { count, endText, milliseconds } from "./words.js";

const PAUSE_MS = 1000;

export class DetailView {
  constructor() {
    this.row = null;
    this.timer = 0;
    this.isReading = false;
    this.open = new Set(["Prompt"]); // panels that stay open from request to request
  }

  clear() {
    clearTimeout(this.timer);
    this.row = null;
    byId("detail-title").textContent = "Request";
    fill(byId("detail-body"), el("p", { class: "quiet" }, "Choose a request, or ask something."));
  }

  /** Shows this request; called again whenever its row has changed. */
  show(row) {
    const isOther = this.row?.id !== row.id;
    const hasEnded = Boolean(row.end) && !this.row?.end;
    this.row = row;
    byId("detail-title").textContent = row.name || row.id;
    if (isOther) {
      clearTimeout(this.timer);
      this.timer = 0;
      this.#read();
    } else if (!this.timer && (hasEnded || !row.end)) {
      this.timer = setTimeout(() => this.#read(), PAUSE_MS);
    }
  }

  async #read() {
    this.timer = 0;
    const row = this.row;
    if (!row || document.hidden) return;
    const body = byId("detail-body");
    try {
      const response = await fetch(`/ferryman/requests/${encodeURIComponent(row.id)}`, { headers: dataHeaders() });
      if (this.row?.id !== row.id) return;
      if (!response.ok) {
        fill(body, heading(this.row), el("p", { class: "error" }, await refusalText(response)));
        return;
      }
      const detail = await response.json();
      if (this.row?.id === row.id) this.#draw(body, detail);
      // The last events of workers come a moment after the router's own end.
      if (detail.is_over && !this.settled?.has(row.id)) this.#readOnceMore(row.id);
    } catch {
      if (this.row?.id === row.id) fill(body, el("p", { class: "error" }, "The router cannot be reached."));
    }
  }

  #readOnceMore(id) {
    this.settled = new Set([id]);
    this.timer = setTimeout(() => this.#read(), PAUSE_MS);
  }

  #draw(body, detail) {
    // What is drawn anew under a reader's hands loses the focus: it goes back to the same part.
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.part : "";
    const shown = [...body.querySelectorAll(".waterfall details")].map((part) => part.open);
    fill(body, heading(this.row, detail),
      this.#part("Prompt", detail.strip ? stripView(detail) : el("p", { class: "quiet" }, "Not admitted yet.")),
      this.#part("Route", routeView(detail)),
      this.#part("Events", waterfallView(detail)),
      this.#part("Hand-off", handoffView(detail)));
    [...body.querySelectorAll(".waterfall details")].forEach((part, index) => (part.open = Boolean(shown[index])));
    if (focused) body.querySelector(`[data-part="${focused}"]`)?.focus();
  }

  #part(title, content) {
    return el("section", { class: "part", "aria-label": title }, el("h3", { tabindex: "-1", "data-part": title }, title), content);
  }
}

function heading(row, detail) {
  const took = row.seconds ? ` in ${milliseconds(row.seconds * 1000)}` : "";
  const ended = detail?.events.find((event) => event.role === "router" && event.name === "finished");
  const first = ended?.facts.ttft_ms ? ` · first token after ${milliseconds(ended.facts.ttft_ms)}` : "";
  const exact = row.exactness === "bits" ? "exact to the bit" : row.exactness === "values" ? "exact in values" : "";
  return el("p", { class: "summary" },
    el("span", { class: `pill ${row.end && !["stop", "length"].includes(row.end) ? "bad" : ""}` }, endText(row)),
    ` ${count(row.prompt_tokens, "prompt token")}, ${count(row.answer_tokens, "answer token")}${took}${first}`,
    row.attempt > 1 ? ` · attempt ${row.attempt}` : "",
    exact ? el("span", { class: "pill good" }, exact) : "");
}
