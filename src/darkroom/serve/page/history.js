// Prompts of before, kept in this browser: a list to choose from, and Alt with the arrows in the prompt itself.
import { $, kept, make } from "./common.js";

const NAME = "prompts";
const MOST = 200;

export class History {
  /** `onPick({prompt, negative})` takes one up. */
  constructor(onPick) {
    this.onPick = onPick;
    this.at = -1;
    $("history-open").onclick = () => this.open();
    $("history-close").onclick = () => $("history-dialog").close();
    $("history-clear").onclick = () => { kept.set(NAME, []); this.show(); };
    $("history-search").oninput = () => this.show();
    $("prompt").addEventListener("keydown", (event) => {
      if (!event.altKey || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
      event.preventDefault();
      this.walk(event.key === "ArrowUp" ? 1 : -1);
    });
    $("prompt").addEventListener("input", () => { this.at = -1; });
  }

  get all() {
    return kept.get(NAME, []);
  }

  add(prompt, negative) {
    this.at = -1;
    if (!prompt.trim()) return;
    const others = this.all.filter((one) => one.prompt !== prompt || one.negative !== negative);
    kept.set(NAME, [{ prompt, negative }, ...others].slice(0, MOST));
  }

  walk(by) {
    const { all } = this;
    const next = Math.min(all.length - 1, this.at + by);
    if (next < 0 || !all.length) return;
    this.at = next;
    const at = this.at;
    this.onPick(all[at]);
    this.at = at;
  }

  open() {
    $("history-search").value = "";
    this.show();
    $("history-dialog").showModal();
  }

  show() {
    const words = $("history-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.all.filter(({ prompt, negative }) => words.every((word) => `${prompt} ${negative}`.toLowerCase().includes(word)));
    $("history-clear").hidden = !this.all.length;
    if (!found.length) {
      $("history-list").replaceChildren(make("li", { className: "quiet" }, this.all.length ? "None has all of these words." : "None yet: each prompt that is generated is kept here, in this browser."));
      return;
    }
    $("history-list").replaceChildren(...found.map((one) => {
      const button = make("button", { type: "button", className: "history-one" }, make("span", {}, one.prompt));
      if (one.negative) button.append(make("span", { className: "small" }, `Negative: ${one.negative}`));
      button.onclick = () => { this.onPick(one); $("history-dialog").close(); $("prompt").focus(); };
      return make("li", {}, button);
    }));
  }
}
