// Joins the parts of the page: one live stream, and the views that it feeds.

import { byId } from "./dom.js";
import { DetailView } from "./detail.js";
import { showFleet } from "./fleet.js";
import { hasToken, KeyDialog } from "./keys.js";
import { LiveFeed } from "./live.js";
import { Playground } from "./playground.js";
import { RequestList } from "./requests.js";
import { watchTheme } from "./theme.js";

const RATE_MS = 1000;

watchTheme();
const detail = new DetailView();
const list = new RequestList((row) => detail.show(row));
const keys = new KeyDialog(() => {
  list.clear();
  detail.clear();
  feed.open();
});
const refused = (why) => keys.open(why);
const playground = new Playground({ asked: (name) => list.await(name), refused });
const feed = new LiveFeed({ heard, told, refused });
let whose = null;

function heard(event, data) {
  if (event === "hello") {
    // Another viewer, or another life of the router: its rows are others.
    const now = `${data.router} ${data.tenant}`;
    if (whose !== null && whose !== now) {
      list.clear();
      detail.clear();
    }
    whose = now;
    playground.model = data.model;
    byId("served").textContent = data.tenant === null || data.tenant === "public"
      ? data.model : `${data.model}, as ${data.tenant}`;
  } else if (event === "state") {
    const exact = data.exactness === "bits" ? " · exact to the bit" : "";
    pill(`${data.status}${exact}`, data.status === "ready" ? "good" : "bad");
    showFleet(data, () => keys.open(hasToken() ? "this token is not the observer's" : ""));
  } else if (event === "rows") list.update(data);
}

function told(state, why) {
  if (state === "hidden") pill("paused", "");
  if (state === "away") pill(why, "bad");
}

function pill(text, kind) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `pill ${kind}`;
}

detail.clear();
feed.open();
setInterval(() => document.hidden || list.showRate(), RATE_MS);
