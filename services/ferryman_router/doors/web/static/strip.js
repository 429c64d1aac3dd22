// The prompt as a strip: where the state of each range of its tokens came from, and why not.

import { el, table } from "./dom.js";
import { count, milliseconds, percent, reasonText, sourceText } from "./words.js";

const MIN_LABEL_SHARE = 0.09;

/** The strip, its marks, and a table with the same in words. */
export function stripView(detail) {
  const { strip, parting, places } = detail;
  const total = Math.max(1, strip.tokens);
  const isExact = detail.events.some((event) => event.name === "admitted" && event.facts.exactness === "bits");
  const reused = strip.spans.filter((span) => span.source !== "computed");
  const numReused = reused.reduce((sum, span) => sum + span.end - span.start, 0);
  const at = (position) => ({ "--at": position / total });
  const marks = strip.snapshots.map((position) =>
    el("span", { class: "mark snapshot", vars: at(position), title: `snapshot at token ${position}` }, "◆"));
  if (parting) marks.push(el("span", { class: "mark parts", vars: at(parting.at), title: `parts at token ${parting.at}` }, "⑂"));
  return el("div", {},
    el("p", { class: "headline" }, el("strong", {}, `${numReused} of ${count(strip.tokens, "token")} reused`),
      ` (${percent(numReused, strip.tokens)}), ${strip.tokens - numReused} computed`),
    el("div", { class: "strip-box", "aria-hidden": "true" },
      places.length ? el("div", { class: "places" }, placesOf(places, total)) : "",
      el("div", { class: "strip" }, strip.spans.map((span) => spanView(span, total))),
      el("div", { class: "marks" }, marks),
      el("div", { class: "ends" }, el("span", {}, "0"), el("span", {}, strip.tokens))),
    table("Ranges of the prompt", ["tokens", "how many", "from", "why"], strip.spans.map((span) => rangeRow(span, isExact)), "ranges"),
    el("ul", { class: "notes" }, notes(strip), partingNotes(parting)));
}

function spanView(span, total) {
  const share = (span.end - span.start) / total;
  return el("span", { class: `span ${span.source}`, vars: { "--share": share },
    title: `tokens ${span.start} to ${span.end - 1}: ${sourceText(span.source)}` },
  share >= MIN_LABEL_SHARE ? el("span", {}, span.source) : "");
}

function placesOf(places, total) {
  return places.map((place, index) => {
    const end = places[index + 1]?.position ?? total;
    const share = (end - place.position) / total;
    return el("span", { class: "place", vars: { "--at": place.position / total, "--share": share }, title: place.name },
      share >= MIN_LABEL_SHARE ? place.name : "");
  });
}

function rangeRow(span, isExact) {
  const why = span.source === "computed" ? reasonText(span.reason) : `its state was there${isExact ? ", to the bit" : ""}`;
  return [`${span.start} – ${span.end - 1}`, span.end - span.start,
    el("span", { class: `key ${span.source}` }, sourceText(span.source)), why];
}

function notes(strip) {
  const made = [];
  const states = { copy: "a copy of the recurrent state there", load: "the recurrent state there, loaded",
    clear: "an empty state", receive: "a state that was sent" };
  if (strip.position) made.push(`It went on at token ${strip.position}, from ${states[strip.recurrent] ?? "the state there"}.`);
  if (strip.snapshots.length) {
    made.push(`◆ Later prompts can go on from ${strip.snapshots.map((at) => `token ${at}`).join(", ")}.`);
  }
  if (strip.seconds.recompute > strip.seconds.load) {
    made.push(`Predicted: ${milliseconds(strip.seconds.load * 1000)} to load, ${milliseconds(strip.seconds.recompute * 1000)} to compute the same.`);
  }
  return made.map((text) => el("li", {}, text));
}

function partingNotes(parting) {
  if (!parting) return [];
  const words = parting.ours === undefined ? [] : [": after ", el("q", {}, parting.before), " it has ",
    el("q", {}, parting.ours), " where that one has ", el("q", {}, parting.theirs)];
  return [el("li", {}, `⑂ It parts at token ${parting.at}, in `, el("strong", {}, parting.place), ", from ",
    el("code", {}, parting.from), words, `. ${count(parting.missed, "token")} after that could have been cached.`)];
}
