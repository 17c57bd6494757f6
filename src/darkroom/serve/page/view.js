// The dialog that shows one picture large, with what it was made with.
import { $, ask, make, say } from "./common.js";
import { dataUrl } from "./pictures.js";
import { withTextOf } from "./png.js";

const FACTS = {
  seed: "Seed", steps: "Steps", guidance: "Guidance", solver: "Solver", strength: "Redone", model: "Model", upscaled: "Upscaled",
};

export class Viewer {
  /** `pictures()` gives those on the sheet, newest first. */
  constructor(pictures, { onSettings, onStart, onRemove, onShare, onMade }) {
    Object.assign(this, { pictures, onMade });
    const dialog = $("viewer");
    $("viewer-close").onclick = () => dialog.close();
    $("viewer-newer").onclick = () => this.walk(-1);
    $("viewer-older").onclick = () => this.walk(1);
    $("viewer-settings").onclick = () => { dialog.close(); onSettings(this.now.parameters); };
    $("viewer-start").onclick = () => { dialog.close(); onStart(this.now.blob); };
    $("viewer-remove").onclick = () => this.remove(onRemove);
    $("viewer-share").onclick = () => onShare(this.now.parameters);
    $("compare-with").onchange = () => this.compare($("compare-with").value);
    $("compare-at").oninput = () => this.divide();
    $("upscale-go").onclick = () => this.upscale();
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      if (event.target.matches("input, select")) return;
      if (event.key === "ArrowLeft") this.walk(-1);
      if (event.key === "ArrowRight") this.walk(1);
    });
  }

  open(picture) {
    this.show(picture);
    if (!$("viewer").open) $("viewer").showModal();
  }

  /** What the server makes pictures larger with. */
  allow({ upscalers }) {
    $("upscaler").replaceChildren(...["Lanczos", ...upscalers].map((name) => make("option", { value: name }, name)));
  }

  // ---- two pictures, one over the other, parted by a line

  compare(id) {
    const other = this.pictures().find((one) => one.id === id);
    $("compare").hidden = !other;
    $("viewer-image").hidden = !!other;
    if (!other) return;
    $("compare-over").src = this.now.url;
    $("compare-over").alt = this.now.parameters.prompt || "This picture";
    $("compare-under").src = other.url;
    $("compare-under").alt = other.parameters.prompt || "The other picture";
    const { width, height } = this.now.parameters;
    $("compare").style.aspectRatio = `${width} / ${height}`;
    $("compare").style.setProperty("--ratio", width / height);
    $("compare-at").value = 50;
    this.divide();
  }

  divide() {
    $("compare").style.setProperty("--at", `${$("compare-at").value}%`);
  }

  listOthers() {
    const others = this.pictures().filter((one) => one.id !== this.now.id).slice(0, 100);
    const name = ({ parameters: told }) => `${(told.prompt || "untitled").slice(0, 50)}, seed ${told.seed}`;
    $("compare-with").replaceChildren(make("option", { value: "" }, "No other picture"), ...others.map((one) => make("option", { value: one.id }, name(one))));
    $("compare-with").disabled = !others.length;
    this.compare("");
  }

  // ---- larger

  async upscale() {
    const { now } = this;
    const factor = Number($("upscale-factor").value);
    const upscaler = $("upscaler").value;
    $("upscale-go").disabled = true;
    say(`Upscaling ${factor} times`);
    try {
      const body = { image: await dataUrl(now.blob), upscaler_1: upscaler, upscaling_resize: factor };
      const answer = await ask("/sdapi/v1/extra-single-image", { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
      const { image } = await answer.json();
      const bytes = Uint8Array.from(atob(image), (one) => one.charCodeAt(0));
      const blob = new Blob([await withTextOf(now.blob, bytes)], { type: "image/png" });
      const { width, height } = await createImageBitmap(blob);
      const upscaled = `${factor} times by ${upscaler}, to ${width} \u00d7 ${height}`;
      const made = await this.onMade({ ...now, blob, parameters: { ...now.parameters, upscaled } });
      this.show(made);
      say(`Upscaled ${factor} times.`);
    } catch (error) {
      say(error.message);
    } finally {
      $("upscale-go").disabled = false;
    }
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
    this.listOthers();
  }
}

function facts(told) {
  const rows = [["Size", `${told.width} \u00d7 ${told.height}`]];
  for (const [name, label] of Object.entries(FACTS)) {
    if (told[name] !== undefined && told[name] !== null) rows.push([label, String(told[name])]);
  }
  if (told.negative) rows.push(["Negative prompt", told.negative]);
  const adapters = adaptersOf(told).map(({ name, weight }) => `${name} ${weight}`);
  if (adapters.length) rows.push(["Adapters", adapters.join(", ")]);
  const nets = netsOf(told).map(({ name, weight }) => `${name} ${weight}`);
  if (nets.length) rows.push(["Nets", nets.join(", ")]);
  return rows.flatMap(([label, value]) => [make("dt", {}, label), make("dd", {}, value)]);
}

/** Nets as PNGs tell them: a list of {name, weight}. */
export function netsOf(told) {
  return (Array.isArray(told.controls) ? told.controls : []).filter((one) => one && typeof one.name === "string");
}

/** Adapters as PNGs tell them: a list of {name, weight}, or weights by name. */
export function adaptersOf(told) {
  const given = told.adapters ?? [];
  if (Array.isArray(given)) return given.filter((one) => one && typeof one.name === "string");
  return Object.entries(given).map(([name, weight]) => ({ name, weight }));
}
