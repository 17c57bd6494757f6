// Nets that guide a picture: each with a picture of its own, the map that is made of it, and how much it counts.
import { $, ask, make, say } from "./common.js";
import { encoded, onCanvas } from "./pictures.js";

const NAMES = { none: "As it is (a finished map)", canny: "Edges (Canny)", blur: "Blurred", invert: "Inverted", scribble: "Scribble", colour: "Coarse colours" };
const MODES = { balanced: "Prompt and net alike", soft: "The prompt more", guess: "The net more" };
const SLIDES = [["weight", "Weight", 0, 2, 0.05], ["start", "From", 0, 0.95, 0.05], ["end", "To", 0.05, 1, 0.05]];
const told = (name, value) => (name === "weight" ? Number(value).toFixed(2) : `${Math.round(value * 100)} %`);

export class Controls {
  constructor(onChange) {
    this.units = [];
    this.onChange = onChange;
    $("control-add").onchange = () => this.add($("control-add").value);
  }

  /** What the server has for the model. */
  allow({ controls, maps, limits }) {
    Object.assign(this, { known: new Set(controls.map((card) => card.name)), maps, most: limits.controls });
    $("controls").hidden = !controls.length;
    const options = controls.map((card) => make("option", { value: card.name, disabled: !!card.trouble },
      card.trouble ? `${card.name} (cannot be used)` : card.name));
    $("control-add").replaceChildren(make("option", { value: "" }, "Add a net"), ...options);
    this.units = this.units.filter((unit) => this.known.has(unit.net));
    this.show();
  }

  add(net) {
    $("control-add").value = "";
    if (!net || !this.known.has(net)) return;
    if (this.units.length >= this.most) { say(`At most ${this.most} nets.`); return; }
    this.units.push({ net, map: "none", mode: "balanced", weight: 1, start: 0, end: 1, image: null });
    this.show();
    this.onChange();
    document.querySelector("#control-list li:last-child input[type=file]")?.focus();
  }

  show() {
    $("control-list").replaceChildren(...this.units.map((unit, i) => this.item(unit, i)));
    $("control-add").hidden = this.units.length >= this.most;
  }

  item(unit, i) {
    const named = (what) => `${what} of ${unit.net}`;
    const gone = make("button", { type: "button", className: "link" }, "Remove");
    gone.setAttribute("aria-label", `Remove ${unit.net}`);
    gone.onclick = () => { this.units.splice(i, 1); this.show(); this.onChange(); $("control-add").focus(); };
    const file = make("input", { type: "file", id: `control-file-${i}`, className: "hidden", accept: "image/png,image/jpeg,image/webp" });
    file.onchange = () => { if (file.files[0]) this.take(unit, file.files[0]); };
    const drop = make("label", { htmlFor: file.id, className: "drop" }, make("span", {}, unit.image ? "Another picture" : `Picture for ${unit.net}`));
    const box = make("div", { className: "control-pictures" }, file, drop);
    if (unit.image) box.append(this.shown(unit.image, named("Picture")), this.mapOf(unit, named("Map")));
    box.addEventListener("drop", (event) => {
      const [dropped] = event.dataTransfer?.files ?? [];
      if (dropped) { event.preventDefault(); this.take(unit, dropped); }
    });
    const map = make("select", { id: `control-map-${i}` }, ...this.maps.filter((name) => name !== "inpaint").map((name) => make("option", { value: name }, NAMES[name] ?? name)));
    map.value = unit.map;
    map.onchange = () => { unit.map = map.value; this.onChange(); this.preview(unit); };
    const mode = make("select", { id: `control-mode-${i}` }, ...Object.entries(MODES).map(([value, name]) => make("option", { value }, name)));
    mode.value = unit.mode;
    mode.onchange = () => { unit.mode = mode.value; this.onChange(); };
    const item = make("li", {}, make("div", { className: "control-head" }, make("strong", { className: "clip" }, unit.net), gone), box,
      make("label", { htmlFor: map.id, className: "small" }, "Preprocessor"), map,
      make("label", { htmlFor: mode.id, className: "small" }, "Balance"), mode, ...SLIDES.map((slide) => this.slide(unit, i, ...slide)));
    item.setAttribute("aria-label", unit.net);
    return item;
  }

  shown(src, alt) {
    return make("img", { src, alt, className: "control-picture" });
  }

  mapOf(unit, alt) {
    if (unit.problem) return make("span", { className: "control-map small", role: "status" }, unit.problem);
    if (!unit.preview) return make("span", { className: "control-map small", role: "status" }, "Making the map");
    const image = this.shown(unit.preview, `${alt}: ${NAMES[unit.map] ?? unit.map}`);
    image.classList.add("control-map");
    return image;
  }

  slide(unit, i, name, label, min, max, step) {
    const value = make("output", {}, told(name, unit[name]));
    const range = make("input", { id: `control-${name}-${i}`, type: "range", min, max, step, value: unit[name] });
    range.setAttribute("aria-label", `${label}: ${unit.net}`);
    range.oninput = () => {
      unit[name] = Number(range.value);
      value.textContent = told(name, unit[name]);
      this.onChange();
    };
    return make("div", { className: "field slide" }, make("label", { htmlFor: range.id }, label), value, range);
  }

  async take(unit, blob) {
    const found = await onCanvas(blob);
    if (!found) { say("This is no picture that can be read."); return; }
    unit.image = await encoded(blob, found);
    await this.preview(unit);
    this.onChange();
  }

  /** Ask the server what the net will see: the same function makes it of the job's picture. */
  async preview(unit) {
    const { map, image } = unit;
    if (!image) { this.show(); return; }
    Object.assign(unit, { preview: null, problem: null });
    this.show();
    try {
      const body = JSON.stringify({ map, image });
      const made = await (await ask("/maps", { method: "POST", body, headers: { "Content-Type": "application/json" } })).blob();
      if (unit.map !== map || unit.image !== image) return;
      unit.preview = URL.createObjectURL(made);
    } catch (error) {
      unit.problem = error.message;
    }
    this.show();
  }

  /** As a request has them; throws where one has no picture. */
  request() {
    const lacking = this.units.find((unit) => !unit.image);
    if (lacking) throw Object.assign(new Error(`${lacking.net} has no picture yet.`), { param: "controls" });
    return this.units.map(({ net, map, mode, weight, start, end, image }) => (
      { net, map, soft: mode === "soft", guess: mode === "guess", weight, start, end, image }));
  }
}
