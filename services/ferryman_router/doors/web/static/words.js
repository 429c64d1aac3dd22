// Numbers and names as people read them.

const REASONS = {
  never_seen: "new: no earlier prompt had it",
  no_snapshot: "seen, but no recurrent state was kept at its end",
  window_evicted: "seen, but the window before it was given up",
  page_alignment: "does not fill a page, so it is in no cache",
  cheaper_to_recompute: "cached, but computing it is quicker than loading it",
  cache_off: "the prefix cache is off",
  no_room: "the pools had no room to keep it",
  host_full: "the host tier had no room to bring it",
  storage_timeout: "storage was too slow to bring it",
  below_threshold: "too few tokens to be worth a fetch",
  rate_limited: "fetches are limited, and others were first",
  tier_failed: "a tier failed while bringing it",
  prompt_logprobs: "its log probabilities were asked for",
  other_arithmetic: "kept in another arithmetic alone",
  quarantined: "the worker is quarantined, and reuses nothing",
};

export const TIERS = ["device", "host", "storage", "peer"];
const SOURCES = {
  device: "device memory", host: "host memory", storage: "storage", peer: "another node",
  computed: "computed",
};

/** Why tokens were computed. */
export const reasonText = (reason) => REASONS[reason] ?? (reason ? reason.replaceAll("_", " ") : "no reason given");
export const sourceText = (source) => SOURCES[source] ?? source;

/** `prefill-0a1b2c…` without most of its number. */
export const shortId = (id) => (id.length > 16 ? `${id.slice(0, id.indexOf("-") + 5)}…` : id);

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

export function bytes(number) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (number >= size) return `${(number / size).toFixed(number >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${number} bytes`;
}

export function milliseconds(ms) {
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
export const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);
export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");

/** How a request ended, or where it is. */
export function endText(row) {
  const ends = { stop: "done", length: "done: all tokens asked for", Cancelled: "cancelled" };
  return row.end ? ends[row.end] ?? row.end : row.stage;
}

/** Whether a row ended as it should. */
export const isGood = (row) => ["", "stop", "length"].includes(row.end);
