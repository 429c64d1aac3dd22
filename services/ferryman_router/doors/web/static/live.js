// The live stream: closed while the tab is hidden, opened again with growing pauses.

import { dataHeaders } from "./keys.js";
import { refusalText, serverSentEvents } from "./sse.js";

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 30_000;

export class LiveFeed {
  /** `heard` gets (event, data); `told` gets "live", "hidden", "away" and words; `refused` the words of a 401. */
  constructor({ heard, told, refused }) {
    Object.assign(this, { heard, told, refused });
    this.abort = null;
    this.pause = FIRST_PAUSE_MS;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close("hidden") : this.open()));
  }

  /** Opens the stream anew, with the keys of now. */
  open() {
    this.close("");
    if (document.hidden) return;
    this.abort = new AbortController();
    this.#read(this.abort);
  }

  close(state) {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
    if (state) this.told(state, "");
  }

  async #read(abort) {
    let why = "";
    try {
      const response = await fetch("/ferryman/live", { headers: dataHeaders(), signal: abort.signal });
      if (response.status === 401 || response.status === 403) {
        this.told("away", "a key is needed");
        this.refused(await refusalText(response));
        return;
      }
      if (response.ok) {
        this.told("live", "");
        for await (const { event, data } of serverSentEvents(response)) {
          this.pause = FIRST_PAUSE_MS;
          this.heard(event, JSON.parse(data));
        }
      } else why = await refusalText(response);
    } catch (error) {
      if (abort.signal.aborted) return;
      why = "the router cannot be reached";
    }
    if (abort !== this.abort) return;
    if (why) this.told("away", why);
    this.timer = setTimeout(() => this.open(), this.pause);
    this.pause = Math.min(LONGEST_PAUSE_MS, 2 * this.pause);
  }
}
