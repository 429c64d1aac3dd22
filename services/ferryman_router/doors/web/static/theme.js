// Dark, light, or as the system has it. The choice is no secret: it stays in this browser.

import { byId } from "./dom.js";

const NAME = "ferryman.theme";
const NEXT = { system: "dark", dark: "light", light: "system" };

export function watchTheme() {
  const button = byId("theme");
  let theme = NEXT[localStorage.getItem(NAME)] ? localStorage.getItem(NAME) : "system";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}. Change to ${NEXT[theme]}`);
  };
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(NAME, theme);
    show();
  });
  show();
}
