// The list of requests: a listbox with one tab stop; arrow keys move, and what is moved to is shown.

import { byId, el } from "./dom.js";
import { clock, count, endText, isGood, milliseconds, percent, sum } from "./words.js";

const MAX_ROWS = 200;
const RATE_MS = 5000;

export class RequestList {
  /** `chosen` gets the row that is chosen, and again whenever it changes. */
  constructor(chosen) {
    this.list = byId("request-list");
    this.chosen = chosen;
    this.rows = new Map(); // by id: { row, option }; the newest last
    this.selected = "";
    this.awaited = ""; // the name of a request that is chosen once it is here
    this.drawn = []; // [time, tokens] of the last seconds
    this.list.addEventListener("keydown", (event) => this.#move(event));
  }

  clear() {
    this.rows.clear();
    this.list.replaceChildren();
    this.selected = "";
    byId("no-requests").hidden = false;
  }

  /** Rows that are new or have changed, the oldest first. */
  update(rows) {
    for (const row of rows) this.#put(row);
    while (this.rows.size > MAX_ROWS) {
      const [id, { option }] = this.rows.entries().next().value;
      option.remove();
      this.rows.delete(id);
    }
    byId("no-requests").hidden = this.rows.size > 0;
    if (!this.selected && this.rows.size) this.select([...this.rows.keys()].at(-1));
  }

  /** Chooses the request that its caller calls so, as soon as it is known. */
  await(name) {
    this.awaited = name;
  }

  #put(row) {
    const before = this.rows.get(row.id);
    this.#count(row.answer_tokens - (before?.row.answer_tokens ?? (row.end ? row.answer_tokens : 0)));
    const option = optionOf(row);
    option.addEventListener("click", () => this.select(row.id, true));
    this.rows.set(row.id, { row, option });
    if (before) {
      const had = document.activeElement === before.option;
      before.option.replaceWith(option);
      this.#mark(option, row.id === this.selected);
      if (had) option.focus();
    } else {
      this.list.prepend(option);
    }
    if (this.awaited && row.name === this.awaited) {
      this.awaited = "";
      this.select(row.id);
    } else if (row.id === this.selected) this.chosen(row);
  }

  /** Chooses a request; with `focuses` the focus follows. */
  select(id, focuses = false) {
    const [before, after] = [this.rows.get(this.selected), this.rows.get(id)];
    if (!after) return;
    if (before) this.#mark(before.option, false);
    this.selected = id;
    this.#mark(after.option, true);
    if (focuses) after.option.focus();
    this.chosen(after.row);
  }

  #mark(option, isSelected) {
    option.setAttribute("aria-selected", String(isSelected));
    option.tabIndex = isSelected ? 0 : -1;
  }

  #move(event) {
    const options = [...this.list.children];
    const at = options.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: options.length - 1 }[event.key];
    if (to === undefined || at < 0 || !options[to]) return;
    event.preventDefault();
    this.select(options[to].dataset.id, true);
  }

  /** Tokens a second, of the requests that are shown. */
  #count(tokens) {
    const now = performance.now();
    if (tokens > 0) this.drawn.push([now, tokens]);
    this.showRate();
  }

  showRate() {
    const now = performance.now();
    this.drawn = this.drawn.filter(([time]) => now - time < RATE_MS);
    const rate = this.drawn.reduce((total, [, tokens]) => total + tokens, 0) / (RATE_MS / 1000);
    byId("rate").textContent = rate ? `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s` : "";
  }
}

function optionOf(row) {
  const reused = sum(row.cached);
  const known = reused + sum(row.computed);
  const share = known ? percent(reused, row.prompt_tokens) : "–";
  const took = row.seconds ? milliseconds(row.seconds * 1000) : "";
  const label = `${row.name || row.id}, ${endText(row)}, ${count(row.prompt_tokens, "prompt token")}, ${share} reused`;
  return el("div", {
    class: `row ${row.end ? (isGood(row) ? "over" : "broken") : "running"}`,
    role: "option", "aria-selected": "false", "aria-label": label, "data-id": row.id, tabindex: "-1",
  },
  el("span", { class: "name" }, row.name || row.id),
  el("span", { class: "when" }, clock(row.begun_unix_ms)),
  el("span", { class: "track share", "aria-hidden": "true", vars: { "--part": known ? reused / row.prompt_tokens : 0 } }),
  el("span", { class: "quiet" }, row.tenant && row.tenant !== "public" ? `${row.tenant} · ` : "",
    `${row.prompt_tokens} → ${row.answer_tokens} · ${share} reused`),
  el("span", { class: "end" }, row.end ? (isGood(row) ? took : endText(row)) : endText(row)));
}
