// The dialog that shows one picture large, with what it was made with.
import { $, make } from "./common.js";

const FACTS = {
  seed: "Seed", steps: "Steps", guidance: "Guidance", solver: "Solver", strength: "Redone", model: "Model",
};

export class Viewer {
  /** `pictures()` gives those on the sheet, newest first. */
  constructor(pictures, { onSettings, onStart, onRemove }) {
    this.pictures = pictures;
    const dialog = $("viewer");
    $("viewer-close").onclick = () => dialog.close();
    $("viewer-newer").onclick = () => this.walk(-1);
    $("viewer-older").onclick = () => this.walk(1);
    $("viewer-settings").onclick = () => { onSettings(this.now.parameters); dialog.close(); };
    $("viewer-start").onclick = () => { onStart(this.now.blob); dialog.close(); };
    $("viewer-remove").onclick = () => this.remove(onRemove);
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft") this.walk(-1);
      if (event.key === "ArrowRight") this.walk(1);
    });
  }

  open(picture) {
    this.show(picture);
    if (!$("viewer").open) $("viewer").showModal();
  }

  walk(by) {
    const found = this.pictures();
    const next = found[found.findIndex((one) => one.id === this.now.id) + by];
    if (next) this.show(next);
  }

  remove(onRemove) {
    const found = this.pictures();
    const at = found.findIndex((one) => one.id === this.now.id);
    const next = found[at + 1] ?? found[at - 1];
    onRemove(this.now);
    if (next) this.show(next);
    else $("viewer").close();
  }

  show(picture) {
    this.now = picture;
    const told = picture.parameters;
    $("viewer-image").src = picture.url;
    $("viewer-image").alt = told.prompt || "A picture without a prompt";
    $("viewer-prompt").textContent = told.prompt || "(no prompt)";
    $("viewer-save").href = picture.url;
    $("viewer-save").download = `${picture.job}-${picture.index}.png`;
    $("viewer-facts").replaceChildren(...facts(told));
    const found = this.pictures();
    const at = found.findIndex((one) => one.id === picture.id);
    $("viewer-newer").disabled = at <= 0;
    $("viewer-older").disabled = at >= found.length - 1;
  }
}

function facts(told) {
  const rows = [["Size", `${told.width} \u00d7 ${told.height}`]];
  for (const [name, label] of Object.entries(FACTS)) {
    if (told[name] !== undefined && told[name] !== null) rows.push([label, String(told[name])]);
  }
  if (told.negative) rows.push(["Left out", told.negative]);
  const adapters = adaptersOf(told).map(({ name, weight }) => `${name} ${weight}`);
  if (adapters.length) rows.push(["Adapters", adapters.join(", ")]);
  return rows.flatMap(([label, value]) => [make("dt", {}, label), make("dd", {}, value)]);
}

/** Adapters as PNGs tell them: a list of {name, weight}, or weights by name. */
export function adaptersOf(told) {
  const given = told.adapters ?? [];
  if (Array.isArray(given)) return given.filter((one) => one && typeof one.name === "string");
  return Object.entries(given).map(([name, weight]) => ({ name, weight }));
}
