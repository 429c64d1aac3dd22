// The viewer's keys: kept in this tab (sessionStorage), sent in headers, never in a URL.

import { byId } from "./dom.js";

const API_KEY = "ferryman.api-key";
const TOKEN = "ferryman.token";

/** Headers for the page's own data: the observer's token if there is one, and the API key. */
export function dataHeaders() {
  const [key, token] = [sessionStorage.getItem(API_KEY), sessionStorage.getItem(TOKEN)];
  return { ...(token ? { authorization: `Bearer ${token}` } : {}), ...(key ? { "x-api-key": key } : {}) };
}

/** Headers for the API. */
export function apiHeaders() {
  const key = sessionStorage.getItem(API_KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export const hasToken = () => Boolean(sessionStorage.getItem(TOKEN));

/** Asks for keys; `changed` is called when there are others. */
export class KeyDialog {
  constructor(changed) {
    this.dialog = byId("keys");
    byId("open-keys").addEventListener("click", () => this.open(""));
    byId("cancel-keys").addEventListener("click", () => this.dialog.close());
    byId("keys-form").addEventListener("submit", () => {
      store(API_KEY, byId("api-key").value.trim());
      store(TOKEN, byId("token").value.trim());
      changed();
    });
  }

  open(why) {
    byId("keys-error").textContent = why;
    byId("api-key").value = sessionStorage.getItem(API_KEY) ?? "";
    byId("token").value = sessionStorage.getItem(TOKEN) ?? "";
    if (!this.dialog.open) this.dialog.showModal();
  }
}

function store(name, value) {
  if (value) sessionStorage.setItem(name, value);
  else sessionStorage.removeItem(name);
}
