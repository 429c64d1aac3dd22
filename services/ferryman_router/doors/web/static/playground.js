// A chat beside the fleet: it streams from the API as any client does, and names its request.

import { byId, el } from "./dom.js";
import { apiHeaders } from "./keys.js";
import { refusalText, serverSentEvents } from "./sse.js";
import { count, milliseconds, percent, sum } from "./words.js";

const EXAMPLE = "The red kite is in Oslo. A fox sleeps in the night. The blue kite is in Lima. Where is the red kite?";

export class Playground {
  /** `asked` gets the name of each request; `refused` the words of a 401. */
  constructor({ asked, refused }) {
    Object.assign(this, { asked, refused });
    this.turns = byId("turns");
    this.messages = [];
    this.latest = []; // the messages of the latest prompt
    this.abort = null;
    this.model = "";
    byId("ask").value = EXAMPLE;
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) return;
      this.#send(byId("ask").value);
      byId("ask").value = "";
    });
    byId("ask").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask-form").requestSubmit();
      }
    });
    byId("again").addEventListener("click", () => {
      this.messages = this.latest.slice(0, -1);
      this.#send(this.latest.at(-1).content, "the same prompt once more");
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("new-chat").addEventListener("click", () => this.#clear());
  }

  #clear() {
    this.abort?.abort();
    this.messages = [];
    this.turns.replaceChildren();
    byId("ask").focus();
  }

  async #send(text, remark = "") {
    const name = `page-${[...crypto.getRandomValues(new Uint8Array(4))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    const answer = el("div", { class: "words" });
    const note = el("p", { class: "note" }, "…");
    this.turns.append(
      el("div", { class: "turn user" }, el("span", { class: "aloud" }, "You: "), text,
        remark ? el("p", { class: "note" }, remark) : ""),
      el("div", { class: "turn assistant" }, el("span", { class: "aloud" }, "Answer: "), answer, note));
    this.turns.scrollTop = this.turns.scrollHeight;
    this.abort = new AbortController();
    byId("stop").hidden = false;
    byId("send").disabled = true;
    byId("again").disabled = true;
    this.messages.push({ role: "user", content: text });
    this.latest = [...this.messages];
    try {
      this.asked(name);
      const whole = await this.#stream(name, answer, note);
      this.messages.push({ role: "assistant", content: whole });
    } catch (error) {
      this.messages.pop();
      note.className = "note error";
      note.setAttribute("role", "alert");
      note.textContent = this.abort.signal.aborted ? "stopped" : error.message;
    } finally {
      this.abort = null;
      byId("stop").hidden = true;
      byId("send").disabled = byId("again").disabled = false;
      this.turns.scrollTop = this.turns.scrollHeight;
    }
  }

  /** Streams the answer into its element, and returns the whole. */
  async #stream(name, answer, note) {
    const begun = performance.now();
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal: this.abort.signal,
      headers: { "content-type": "application/json", "x-request-id": name, ...apiHeaders() },
      body: JSON.stringify({
        ...(this.model ? { model: this.model } : {}),
        messages: this.messages,
        max_tokens: Number(byId("max-tokens").value) || 200,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) {
      const why = await refusalText(response);
      if (response.status === 401) this.refused(why);
      throw new Error(why);
    }
    let [whole, first, usage] = ["", 0, null];
    for await (const { data } of serverSentEvents(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices?.[0]?.delta ?? {};
      const words = (delta.reasoning_content ?? delta.reasoning ?? "") + (delta.content ?? "");
      if (!words) continue;
      first ||= performance.now() - begun;
      whole += delta.content ?? "";
      answer.append(words);
      this.turns.scrollTop = this.turns.scrollHeight;
    }
    note.textContent = usage ? noteText(usage, first, performance.now() - begun) : "";
    return whole;
  }
}

function noteText(usage, first, total) {
  const { cached_tokens: cached, exactness } = usage.ferryman;
  const reused = sum(cached);
  const tiers = Object.entries(cached).filter(([, tokens]) => tokens).map(([tier, tokens]) => `${tokens} ${tier}`);
  const parts = [
    `${reused} of ${count(usage.prompt_tokens, "token")} reused (${percent(reused, usage.prompt_tokens)}${tiers.length ? `: ${tiers.join(", ")}` : ""})`,
    `first token after ${milliseconds(first)}`,
    `${count(usage.completion_tokens, "token")} in ${milliseconds(total)}`,
    exactness === "bits" ? "exact to the bit" : "exact in values",
  ];
  return parts.join(" · ");
}
