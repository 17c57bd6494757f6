// The form: what the model allows, what is kept between visits, and what it says as a request.
import { Also } from "./also.js";
import { $, kept, make, say } from "./common.js";
import { Controls } from "./controls.js";
import { Painter } from "./mask.js";
import { encoded, extended, onCanvas } from "./pictures.js";
import { SOLVER_NAMES } from "./solvers.js";
import { adaptersOf, netsOf } from "./view.js";

const SHAPES = [["1:1", 1, 1], ["3:2", 3, 2], ["2:3", 2, 3], ["16:9", 16, 9], ["9:16", 9, 16]];
const PLAIN = ["prompt", "negative", "width", "height", "steps", "guidance", "seed", "num", "solver", "strength", "enlarge"];
const FINE = { steps: 1, guidance: 0.1, strength: 0.05 }; // of the sliders
const REFINED = 0.6; // of the steps, once more at the larger size
const SIDES = ["left", "top", "right", "bottom"];

export class Form {
  constructor() {
    this.adapters = new Map();
    this.start = null;
    this.also = new Also(() => this.keep());
    this.controls = new Controls(() => {});
    this.painter = new Painter(() => this.showStart());
    this.addExtending();
    $("seed-dice").onclick = () => { $("seed").value = ""; this.keep(); say("Each picture has a random seed."); };
    for (const id of ["steps", "guidance", "strength"]) $(id).addEventListener("input", () => this.tellSlides());
    $("form").addEventListener("input", () => this.keep());
    $("adapter-add").onchange = () => this.addAdapter($("adapter-add").value, 1);
    $("enlarge").onchange = () => this.also.without("hires");
    $("start-file").onchange = () => { const [file] = $("start-file").files; if (file) this.startFrom(file); };
    $("start-clear").onclick = () => this.clearStart();
    $("mask-open").onclick = () => this.painter.open();
    if (matchMedia("(max-width: 60rem)").matches) $("settings").open = false;
  }

  /** What the model can do, as the server tells it. */
  allow(model) {
    this.model = model;
    const { limits } = model;
    $("solver").replaceChildren(...model.solvers.map((name) => make("option", { value: name }, solverName(name))));
    $("solver").value = model.solver;
    $("steps").max = Math.min(limits.steps, 100);
    $("guidance").max = Math.min(limits.guidance, Math.max(20, model.guidance));
    $("guidance").value = model.guidance;
    $("num").max = limits.pictures;
    for (const id of ["width", "height"]) {
      Object.assign($(id), { min: model.size_step, max: limits.side_pixels, step: model.size_step });
      $(id).value = model[id];
    }
    const shapes = SHAPES.map((shape) => this.shapeButton(...shape));
    $("shapes").replaceChildren(...shapes.filter((one, i) => shapes.findIndex(({ size }) => size === one.size) === i));
    this.listAdapters(model.adapters);
    this.controls.allow(model);
    this.listModels(model);
    this.restore(kept.get(`form of ${model.name}`, {}));
  }

  listModels({ name, models }) {
    $("model-box").hidden = models.length < 2;
    $("model-pick").replaceChildren(...models.map((one) => make("option", { value: one }, one)));
    $("model-pick").value = name;
  }

  shapeButton(name, across, down) {
    const [width, height] = this.sized(across / down);
    const button = make("button", { type: "button", className: "shape", title: `${width} by ${height}` });
    const sample = make("span", { className: "shape-box" });
    sample.style.aspectRatio = `${across} / ${down}`;
    button.append(sample, name);
    button.setAttribute("aria-pressed", "false");
    button.onclick = () => { $("width").value = width; $("height").value = height; this.keep(); };
    return Object.assign(button, { size: `${width}x${height}` });
  }

  /** A size of about the model's own area, in the steps that it can do. */
  sized(ratio) {
    const { width, size_step: step, limits } = this.model;
    const whole = (side) => Math.max(step, Math.min(limits.side_pixels, Math.round(side / step) * step));
    return [whole(width * Math.sqrt(ratio)), whole(width / Math.sqrt(ratio))];
  }

  listAdapters(cards) {
    $("adapters").hidden = !cards.length;
    const options = cards.map((card) => make("option", { value: card.name, disabled: !!card.trouble },
      card.trouble ? `${card.name} (cannot be used)` : card.name));
    $("adapter-add").replaceChildren(make("option", { value: "" }, "Add an adapter"), ...options);
    this.known = new Set(cards.map((card) => card.name));
    this.adapters = new Map([...this.adapters].filter(([name]) => this.known.has(name)));
  }

  addAdapter(name, weight) {
    $("adapter-add").value = "";
    if (!name || this.adapters.has(name) || !this.known.has(name)) return;
    this.adapters.set(name, weight);
    this.showAdapters();
    this.keep();
  }

  showAdapters() {
    $("adapter-list").replaceChildren(...[...this.adapters].map(([name, weight], i) => {
      const id = `adapter-${i}`;
      const told = make("output", {}, weight.toFixed(2));
      const range = make("input", { id, type: "range", min: -1, max: 2, step: 0.05, value: weight });
      range.oninput = () => { this.adapters.set(name, Number(range.value)); told.textContent = Number(range.value).toFixed(2); };
      const gone = make("button", { type: "button", className: "link" }, "Remove");
      gone.setAttribute("aria-label", `Remove ${name}`);
      gone.onclick = () => { this.adapters.delete(name); this.showAdapters(); this.keep(); };
      return make("li", {}, make("label", { htmlFor: id }, name), told, gone, range);
    }));
  }

  tellSlides() {
    $("steps-told").textContent = $("steps").value;
    $("guidance-told").textContent = Number($("guidance").value) > 1 ? Number($("guidance").value).toFixed(2).replace(/0$/, "") : "off";
    $("strength-told").textContent = `${Math.round($("strength").value * 100)} %`;
    const size = `${$("width").value}x${$("height").value}`;
    for (const one of $("shapes").children) one.setAttribute("aria-pressed", String(one.size === size));
  }

  keep() {
    if (!this.model) return;
    this.tellSlides();
    const told = Object.fromEntries(PLAIN.map((id) => [id, $(id).value]));
    kept.set(`form of ${this.model.name}`, { ...told, adapters: [...this.adapters].map(([name, weight]) => ({ name, weight })), ...this.also.told });
  }

  /** Take up settings: of a picture, or of the last visit. What they do not say stays. */
  restore(told) {
    const lost = this.lost(told);
    if (told.enlarge === undefined) told = { ...told, ...this.firstPass(told) };
    for (const id of PLAIN) if (told[id] !== undefined && told[id] !== null) this.put(id, told[id]);
    if (!$("solver").value) $("solver").value = this.model.solver;
    if (told.adapters) {
      this.adapters = new Map(adaptersOf(told).filter((one) => this.known.has(one.name)).map((one) => [one.name, Number(one.weight ?? 1)]));
    }
    this.showAdapters();
    this.also.restore(told, this.model.defaults[$("solver").value], lost);
    $("negative-box").open = !!$("negative").value;
    this.keep();
  }

  /** A field's value; a slider is made as long and as fine as it takes. */
  put(id, value) {
    const field = $(id);
    if (field.type === "range") {
      field.step = FINE[id];
      if (Number(value) > Number(field.max)) field.max = Math.min(this.model.limits[id] ?? 1, Number(value));
      field.value = value;
      if (Number(field.value) !== Number(value)) field.step = "any";
    }
    field.value = value;
  }

  /** What of a picture's settings there is no way to take up here, in words. */
  lost(told) {
    const lost = [...(told.lost ?? [])];
    const { name, solvers, limits } = this.model;
    if (told.model && told.model !== name) lost.push(`the model ${told.model}`);
    if (told.solver && !solvers.includes(told.solver)) lost.push(`solver ${told.solver}`);
    lost.push(...adaptersOf(told).filter((one) => !this.known.has(one.name)).map((one) => `adapter ${one.name}`));
    for (const id of ["steps", "guidance"]) if (told[id] > limits[id]) lost.push(`${told[id]} ${id}`);
    for (const { name: net } of netsOf(told)) lost.push(`the picture of net ${net}`);
    if (told.image) lost.push(told.mask ? "the picture it started from, and its mask" : "the picture it started from");
    return lost;
  }

  /** Of a picture's settings: the size before it was enlarged, and by how much, if not as the form does it. */
  firstPass({ width, height, hires }) {
    const scale = hires?.scale;
    if (!scale || !width) return { enlarge: "" };
    const step = this.model.size_step;
    const before = (side) => Math.round(side / scale / step) * step;
    const first = { width: before(width), height: before(height) };
    const plain = hires.strength === REFINED && !hires.steps && hires.upscaler === "latent";
    if (plain && [...$("enlarge").options].some((one) => Number(one.value) === scale)) return { ...first, enlarge: String(scale), hires: null };
    return { ...first, enlarge: "" };
  }

  // ---- the picture to start from

  async startFrom(blob) {
    const found = await onCanvas(blob);
    if (!found) { say("This is no picture that can be read."); return; }
    this.start = await encoded(blob, found);
    this.also.without("hires");
    this.painter.set(found.canvas);
    const chosen = document.activeElement === $("start-file");
    this.putSize(this.sized(found.canvas.width / found.canvas.height));
    this.showStart();
    if (chosen) $("mask-open").focus();
    this.keep();
    say("The next picture starts from this one.");
  }

  putSize([width, height]) {
    Object.assign($("width"), { value: width });
    Object.assign($("height"), { value: height });
  }

  // ---- a larger canvas, what is new of it painted

  addExtending() {
    const dialog = $("extend-dialog");
    const sides = () => Object.fromEntries(SIDES.map((side) => [side, Math.max(0, Math.round(Number($(`extend-${side}`).value) || 0))]));
    const told = () => {
      const { left, top, right, bottom } = sides();
      const { width, height } = this.painter.image;
      const [across, down] = this.drawn(width + left + right, height + top + bottom);
      $("extend-told").textContent = `${width + left + right} by ${height + top + bottom} pixels, drawn at ${across} by ${down}.`;
    };
    $("extend-open").onclick = () => {
      const quarter = Math.round(Math.max(this.painter.image.width, this.painter.image.height) / 4);
      for (const side of SIDES) Object.assign($(`extend-${side}`), { value: side === "right" ? quarter : 0, oninput: told });
      told();
      dialog.showModal();
    };
    $("extend-cancel").onclick = () => dialog.close();
    $("extend-form").addEventListener("submit", (event) => { event.preventDefault(); dialog.close(); this.extend(sides()); });
  }

  /** A size in the model's steps, no more than the server allows, of a canvas's shape. */
  drawn(width, height) {
    const { size_step: step, limits, most_pixels: most } = this.model;
    const scale = Math.min(1, limits.side_pixels / Math.max(width, height), Math.sqrt(most / (width * height)));
    return [width, height].map((side) => Math.max(step, Math.floor(side * scale / step) * step));
  }

  extend(sides) {
    const { image } = this.painter;
    if (!SIDES.some((side) => sides[side])) return;
    const canvas = extended(image, sides);
    this.painter.set(canvas);
    const edge = Math.round(Math.max(image.width, image.height) / 32);
    this.painter.except({ left: sides.left, top: sides.top, width: image.width, height: image.height }, edge);
    this.start = canvas.toDataURL("image/png");
    this.putSize(this.drawn(canvas.width, canvas.height));
    $("strength").value = 1;
    this.showStart();
    this.keep();
    say("The canvas is larger; what is new is in the mask.");
  }

  clearStart() {
    this.start = null;
    $("start-file").value = "";
    this.showStart();
    $("start-file").focus();
  }

  showStart() {
    $("start").dataset.empty = String(!this.start);
    $("strength-box").hidden = !this.start;
    $("enlarge-box").hidden = !!this.start;
    $("mask-open").textContent = this.painter.touched ? "Change the mask" : "Paint a mask";
    if (!this.start) return;
    const { width, height } = this.painter.image;
    const scale = 240 / Math.max(width, height);
    Object.assign($("start-thumb"), { width: Math.round(width * scale), height: Math.round(height * scale) });
    this.painter.paintOn($("start-thumb"));
  }

  /** The settings without pictures, for a link. */
  settings() {
    const told = Object.fromEntries(PLAIN.map((id) => [id, $(id).value]));
    const adapters = [...this.adapters].map(([name, weight]) => ({ name, weight }));
    return { ...told, adapters, ...this.also.told, model: this.model.name };
  }

  /** The body of a job. */
  async request() {
    const number = (id) => ($(id).value === "" ? null : Number($(id).value));
    const steps = number("steps");
    const told = {
      prompt: $("prompt").value, negative: $("negative").value || null, num: number("num") ?? 1,
      width: number("width"), height: number("height"), steps, guidance: number("guidance"),
      solver: $("solver").value || null,
      adapters: [...this.adapters].map(([name, weight]) => ({ name, weight })),
      controls: this.controls.request(),
      ...this.also.told,
      previews: Math.max(0, Math.min(this.model.limits.previews, steps - 1)),
    };
    if (this.model.models.length > 1) told.model = this.model.name;
    if (this.start) Object.assign(told, { image: this.start, mask: await this.painter.base64(), strength: number("strength") });
    else if ($("enlarge").value) told.hires = { scale: Number($("enlarge").value), strength: REFINED };
    // The seed as it stands: 19 digits are more than a JavaScript number holds.
    return withSeed(JSON.stringify(told), $("seed").value.trim());
  }
}

function withSeed(json, seed) {
  if (!seed) return json;
  const told = /^(0|[1-9]\d{0,18})$/.test(seed) ? seed : JSON.stringify(seed);
  return `${json.slice(0, -1)},"seed":${told}}`;
}

const solverName = (name) => SOLVER_NAMES[name] ?? name;
