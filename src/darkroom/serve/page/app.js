// The page: jobs on the easel while they are denoised, finished pictures in the gallery.
import { $, addThemes, ask, askJson, follow, kept, make, Refusal, say } from "./common.js";
import { Form } from "./form.js";
import { Grid, sheetOf, tableOf } from "./grid.js";
import { History } from "./history.js";
import { all, forget, keep } from "./keep.js";
import { settingsIn } from "./png.js";
import { Queue } from "./queue.js";
import { Viewer } from "./view.js";

const PREFIX = "page-";
const AGAIN_MS = 1500;
const MOST_REMOVED = 2000;
const jobs = new Map();
let pictures = [];
const form = new Form();
const viewer = new Viewer(() => shown(), {
  onSettings: takeUp, onStart: (blob) => form.startFrom(blob), onRemove: remove, onShare: share, onMade: addMade,
});
const queue = new Queue(() => [...jobs.values()]);
const history = new History(({ prompt, negative }) => form.restore({ prompt, negative }));
new Grid(form, exposeGrid);

// ---- a job on the easel

class OnEasel {
  constructor(id, num, ratio, prompt) {
    Object.assign(this, { id, prompt, state: "queued", abort: new AbortController() });
    this.frames = Array.from({ length: num }, () => this.frame(ratio));
    this.line = make("span", { className: "line" }, "Sending");
    this.meter = make("progress", { max: 1, value: 0 });
    this.meter.setAttribute("aria-label", "Progress");
    this.stop = make("button", { type: "button", className: "soft" }, "Cancel");
    this.stop.setAttribute("aria-label", `Cancel: ${prompt || "picture"}`);
    this.stop.onclick = () => this.cancel();
    const frames = make("div", { className: "frames" }, ...this.frames.map((one) => one.box));
    frames.dataset.count = num > 4 ? "many" : String(num);
    this.card = make("article", { className: "exposure", tabIndex: -1 }, frames, this.meter,
      make("div", { className: "exposure-line" }, this.line, this.stop));
    this.card.setAttribute("aria-label", prompt || "Picture being made");
    Object.assign(this.card.dataset, { job: id, state: this.state });
  }

  frame(ratio) {
    const image = make("img", { alt: "", hidden: true });
    const box = make("div", { className: "frame" }, image, make("span", { className: "safelight" }));
    box.style.aspectRatio = String(ratio);
    box.style.setProperty("--ratio", ratio);
    box.style.setProperty("--left", "1");
    return { box, image };
  }

  tell(kind, data) {
    if (kind === "queued") this.say(data.place ? `Place ${data.place + 1} in the queue` : "Next in the queue", "queued");
    if (kind === "step") this.stepped(data);
    if (kind === "preview") this.preview(data);
  }

  say(text, state) {
    this.line.textContent = text;
    if (state && state !== this.state) say(text, { quietly: true });
    this.state = state ?? this.state;
    this.card.dataset.state = this.state;
    queue.show();
  }

  stepped({ picture, step, of, done, total }) {
    this.meter.value = done / total;
    const which = this.frames.length > 1 ? `Picture ${picture + 1} of ${this.frames.length}, ` : "";
    this.line.textContent = done >= total ? "Finishing" : `${which}step ${step} of ${of}`;
    if (this.state !== "running") say("Generating", { quietly: true });
    const quarter = Math.floor((done / total) * 4);
    if (quarter > (this.quarter ?? 0) && quarter < 4) say(`${quarter * 25} percent`, { quietly: true });
    this.quarter = quarter;
    this.state = this.card.dataset.state = "running";
    queue.show();
    for (const { box } of this.frames) box.style.setProperty("--left", String(1 - done / total));
  }

  preview({ picture, png }) {
    const { image } = this.frames[picture] ?? {};
    if (!image) return;
    image.src = `data:image/png;base64,${png}`;
    image.hidden = false;
    this.card.dataset.previews = String(Number(this.card.dataset.previews ?? 0) + 1);
  }

  /** Sent to the server; a cancel waits until it is accepted. */
  submit(body) {
    this.accepted = put(this.id, body);
    return this.accepted;
  }

  async cancel() {
    this.stop.disabled = true;
    this.say("Cancelling");
    try {
      await this.accepted;
    } catch {
      return; // it was refused: nothing is left to cancel
    }
    await ask(`/jobs/${this.id}`, { method: "DELETE" }).catch((error) => {
      this.stop.disabled = false;
      tellProblem(error);
    });
  }

  /** Its pictures are there: the last job's stay on the easel until the next one comes. */
  done(made) {
    this.say(made.length > 1 ? `${made.length} pictures finished` : "Finished", "done");
    this.meter.value = 1;
    this.stop.hidden = true;
    made.forEach((picture, i) => {
      const { box, image } = this.frames[i];
      Object.assign(image, { src: picture.url, hidden: false, alt: picture.parameters.prompt });
      box.style.setProperty("--left", "0");
      const open = make("button", { type: "button", className: "frame-open" });
      open.setAttribute("aria-label", `Open picture ${i + 1}: ${picture.parameters.prompt}`);
      open.onclick = () => viewer.open(picture);
      box.append(open);
    });
  }

  gone() {
    this.card.remove();
  }
}

function place(id, request) {
  for (const one of [...$("easel").children]) if (["done", "failed"].includes(one.dataset.state)) one.remove();
  const { width, height } = request;
  const onEasel = new OnEasel(id, request.num, (width ?? form.model.width) / (height ?? form.model.height), request.prompt);
  jobs.set(id, onEasel);
  $("easel").prepend(onEasel.card);
  queue.show();
  showEmpty();
  return onEasel;
}

const newId = () => PREFIX + [...crypto.getRandomValues(new Uint8Array(12))].map((one) => one.toString(16).padStart(2, "0")).join("");
const put = (id, body) => ask(`/jobs/${id}`, { method: "PUT", body, headers: { "Content-Type": "application/json" } });

async function expose() {
  tellProblem(null);
  if (!form.model) return;
  const id = newId();
  let body;
  try {
    body = await form.request();
  } catch (error) {
    tellProblem(error);
    return;
  }
  history.add($("prompt").value, $("negative").value);
  const onEasel = place(id, JSON.parse(body));
  if (matchMedia("(max-width: 60rem)").matches) onEasel.card.scrollIntoView({ behavior: "smooth", block: "center" });
  try {
    await onEasel.submit(body);
  } catch (error) {
    jobs.delete(id);
    queue.show();
    onEasel.gone();
    showEmpty();
    tellProblem(error);
    return;
  }
  await watch(onEasel);
}

/** Each cell is a job of its own; its picture goes to its place in the table, and to the gallery. */
async function exposeGrid(cells, told, problem = null) {
  tellProblem(problem);
  if (problem) return;
  history.add($("prompt").value, $("negative").value);
  const { table, places } = tableOf(cells, told);
  const save = make("a", { className: "soft", hidden: true, download: "grid.png" }, "Save the grid");
  const card = make("article", { className: "exposure grid-card", tabIndex: -1 }, make("div", { className: "grid-scroll", tabIndex: 0, role: "region" }, table), save);
  card.setAttribute("aria-label", told.title);
  card.firstChild.setAttribute("aria-label", told.title);
  card.dataset.state = "running";
  $("easel").prepend(card);
  const images = await Promise.all(cells.map((cell, i) => inCell(cell, places[i])));
  card.dataset.state = "done";
  if (!images.some(Boolean)) return;
  save.href = URL.createObjectURL(await sheetOf(told, images));
  save.hidden = false;
  say("The grid is finished.");
}

async function inCell({ body }, place) {
  const request = JSON.parse(body);
  const job = new OnEasel(newId(), 1, (request.width ?? form.model.width) / (request.height ?? form.model.height), request.prompt);
  jobs.set(job.id, job);
  queue.show();
  place.append(job.card);
  try {
    await job.submit(body);
    await watch(job);
  } catch (error) {
    jobs.delete(job.id);
    job.say(error.message, "failed");
    job.stop.hidden = true;
    queue.show();
  }
  const [{ image }] = job.frames;
  if (job.state === "done") await image.decode().catch(() => {});
  return job.state === "done" ? image : null;
}

/** Follow a job to its end, however often the connection breaks. */
async function watch(onEasel) {
  const { id } = onEasel;
  for (;;) {
    await follow(`/jobs/${id}/events`, (kind, data) => onEasel.tell(kind, data), onEasel.abort.signal).catch(() => {});
    try {
      const job = await askJson(`/jobs/${id}`);
      if (["done", "failed", "cancelled"].includes(job.state)) {
        await over(onEasel, job);
        return;
      }
    } catch (error) {
      if (error instanceof Refusal && error.status === 404) {
        await over(onEasel, { state: "cancelled", id });
        return;
      }
      onEasel.say("Waiting for the server");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function over(onEasel, job) {
  jobs.delete(job.id);
  queue.show();
  if (job.state === "done") {
    onEasel.done(await adopt(job));
    return;
  }
  if (job.state === "failed") {
    onEasel.say(job.error?.message ?? "It failed", "failed");
    onEasel.stop.hidden = true;
    return;
  }
  onEasel.gone();
  say("Cancelled.");
  showEmpty();
}

/** Fetch a done job's pictures and put them on the sheet. */
async function adopt(job) {
  const removed = new Set(kept.get("removed", []));
  const made = [];
  for (let index = 0; index < job.pictures.length; index++) {
    const id = `${job.id}/${index}`;
    const there = pictures.find((one) => one.id === id);
    if (there || removed.has(id)) {
      if (there) made.push(there);
      continue;
    }
    try {
      const blob = await (await ask(`/jobs/${job.id}/pictures/${index}`)).blob();
      const parameters = (await settingsIn(blob)) ?? job.pictures[index];
      const picture = { id, blob, parameters, made: (job.finished_s ?? job.created_s) * 1000, job: job.id, index };
      await keep(picture);
      made.push(onSheet(picture));
    } catch (error) {
      if (error.status !== 410) tellProblem(error);
    }
  }
  showSheet();
  return made;
}

// ---- the gallery

function onSheet(picture) {
  const shown = { ...picture, url: URL.createObjectURL(picture.blob) };
  pictures.push(shown);
  pictures.sort((a, b) => b.made - a.made || a.index - b.index);
  return shown;
}

/** The pictures that have all words of the search somewhere in their settings. */
function shown() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return pictures;
  const told = ({ parameters: p }) => [p.prompt, p.negative, p.model, p.solver, p.seed, JSON.stringify(p.adapters ?? "")].join(" ").toLowerCase();
  return pictures.filter((one) => { const text = told(one); return words.every((word) => text.includes(word)); });
}

function showSheet() {
  const there = new Map([...$("sheet").children].map((one) => [one.dataset.id, one]));
  const found = shown();
  const numbers = new Map(pictures.map((picture, i) => [picture.id, pictures.length - i]));
  $("sheet").replaceChildren(...found.map((picture) => {
    const item = there.get(picture.id) ?? frameOf(picture);
    item.querySelector(".number").dataset.number = String(numbers.get(picture.id));
    return item;
  }));
  const all = pictures.length ? `${pictures.length} kept in this browser` : "";
  $("sheet-count").textContent = found.length < pictures.length ? `${found.length} of ${all}` : all;
  $("nothing-found").hidden = !pictures.length || found.length > 0;
  showEmpty();
}

/** A picture made of another in this browser's gallery, such as a larger one. */
async function addMade(picture) {
  const made = { ...picture, id: newId(), made: Date.now() };
  delete made.url;
  await keep(made);
  const found = onSheet(made);
  showSheet();
  return found;
}

function frameOf(picture) {
  const { prompt, width, height } = picture.parameters;
  const image = make("img", { src: picture.url, alt: "", loading: "lazy", width, height });
  const open = make("button", { type: "button", className: "open" }, image,
    make("span", { className: "edge" }, make("span", { className: "number" }), make("span", { className: "clip" }, prompt || "untitled")));
  open.setAttribute("aria-label", `Open: ${prompt || "untitled"}, seed ${picture.parameters.seed}`);
  open.onclick = () => viewer.open(picture);
  const item = make("li", {}, open);
  item.dataset.id = picture.id;
  return item;
}

function showEmpty() {
  $("empty").hidden = pictures.length > 0 || $("easel").children.length > 0;
  document.querySelector(".sheet-head").hidden = pictures.length === 0;
}

function remove(picture) {
  pictures = pictures.filter((one) => one.id !== picture.id);
  URL.revokeObjectURL(picture.url);
  kept.set("removed", [...kept.get("removed", []), picture.id].slice(-MOST_REMOVED));
  forget(picture.id);
  for (const card of document.querySelectorAll(`.exposure[data-job="${picture.job}"]`)) card.remove();
  showSheet();
  say("Removed from this browser.");
}

// ---- settings out of pictures

async function takeUp(told) {
  if (told.model && told.model !== form.model.name && form.model.models.includes(told.model)) await pickModel(told.model);
  form.restore({ negative: "", ...told, num: 1 });
  say("Its settings are in the form.");
  $("prompt").focus();
}

const LINKED = ["prompt", "negative", "width", "height", "steps", "guidance", "seed", "solver", "strength", "enlarge", "adapters",
  "variation_seed", "variation_strength", "seed_width", "seed_height", "karras", "exponential", "sigmas", "spacing", "eta", "guidance_rescale", "clip_skip", "weighting", "hires", "model"];

/** A link that opens this page with settings in its form; pictures are not in it. */
async function share(told) {
  const said = Object.fromEntries(LINKED.filter((name) => told[name] !== undefined && told[name] !== null && told[name] !== "").map((name) => [name, told[name]]));
  const text = btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(said))));
  const link = `${location.href.replace(/#.*/, "")}#with=${text.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
  try {
    await navigator.clipboard.writeText(link);
    say("The link is in the clipboard.");
  } catch {
    window.history.replaceState(null, "", link);
    say("The link is in the address bar.");
  }
}

/** The settings of a link that was followed. */
async function takeLink() {
  const found = /^#with=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  window.history.replaceState(null, "", location.pathname + location.search);
  try {
    const bytes = Uint8Array.from(atob(found[1].replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
    const told = JSON.parse(new TextDecoder().decode(bytes));
    await takeUp({ seed: "", ...Object.fromEntries(LINKED.filter((name) => name in told).map((name) => [name, told[name]])) });
  } catch {
    say("The link's settings cannot be read.");
  }
}

async function takeFile(file) {
  const told = await settingsIn(file);
  if (told) takeUp(told);
  else if (file.type.startsWith("image/")) await form.startFrom(file);
  else say("This is no picture that can be read.");
}

function addDrops() {
  let depth = 0;
  const files = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const shown = (on) => { $("dropping").dataset.shown = String(on); };
  addEventListener("dragenter", (event) => { if (files(event)) { depth++; shown(true); } });
  addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); if (!depth) shown(false); });
  addEventListener("dragover", (event) => { if (files(event)) event.preventDefault(); });
  addEventListener("drop", (event) => {
    if (!files(event)) return;
    depth = 0;
    shown(false);
    if (event.defaultPrevented) return; // a net's picture
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (!file) return;
    if (event.target.closest?.("#start")) form.startFrom(file);
    else takeFile(file);
  });
  addEventListener("paste", (event) => {
    const [file] = event.clipboardData?.files ?? [];
    if (file) { event.preventDefault(); takeFile(file); }
  });
}

// ---- problems, keys, the beginning

function tellProblem(error) {
  for (const one of document.querySelectorAll('[aria-invalid="true"]')) one.removeAttribute("aria-invalid");
  if (!error) { $("problem").textContent = ""; return; }
  const wait = error.retryS ? ` Try again in ${error.retryS} s.` : "";
  $("problem").textContent = `${error.message}${wait}`;
  const field = error.param && $(error.param);
  if (field?.setAttribute && field.closest("#form")) {
    field.setAttribute("aria-invalid", "true");
    const fold = field.closest("details");
    if (fold) fold.open = true;
    if (field.matches("input, textarea, select")) field.focus();
  }
}

function addKeys() {
  addEventListener("keydown", (event) => {
    const open = document.querySelector("dialog[open]");
    const typing = event.target.matches?.("input, textarea, select");
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !open) { event.preventDefault(); expose(); }
    if (open) return;
    if (event.key === "Escape") [...jobs.values()].at(-1)?.cancel();
    if (typing) return;
    if (event.key === "/") { event.preventDefault(); $("prompt").focus(); }
    if (event.key === "?") { event.preventDefault(); $("help-dialog").showModal(); }
  });
  $("form").addEventListener("submit", (event) => { event.preventDefault(); expose(); });
  $("help-open").onclick = () => $("help-dialog").showModal();
  $("help-close").onclick = () => $("help-dialog").close();
}

/** Another model of the server: what it can do; prompt and pictures stay. */
async function pickModel(name) {
  const told = await askJson(`/model?name=${encodeURIComponent(name)}`);
  const { prompt, negative } = form.settings();
  form.allow(told);
  form.restore({ prompt, negative });
  viewer.allow(told);
  $("model").textContent = told.name;
  kept.set("model", told.name);
}

async function loadModel() {
  for (;;) {
    try {
      let told = await askJson("/model");
      const chosen = kept.get("model");
      if (chosen !== told.name && told.models.includes(chosen)) told = await askJson(`/model?name=${encodeURIComponent(chosen)}`);
      form.allow(told);
      viewer.allow(told);
      $("model").textContent = form.model.name;
      tellProblem(null);
      $("generate").disabled = false;
      return;
    } catch (error) {
      $("generate").disabled = true;
      tellProblem(error);
      if (![0, 503].includes(error.status)) return;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

/** What the server remembers: jobs on their way, and pictures made while this page was closed. */
async function takeUpJobs() {
  const { jobs: found } = await askJson("/jobs?limit=200");
  for (const job of found.filter((one) => one.id.startsWith(PREFIX)).reverse()) {
    if (job.state === "done") await adopt(job);
    else if (job.state === "queued" || job.state === "running") watch(place(job.id, job.request));
  }
}

async function begin() {
  addThemes();
  addKeys();
  addDrops();
  $("search").value = sessionStorage.getItem("search") ?? "";
  $("search").oninput = () => { sessionStorage.setItem("search", $("search").value); showSheet(); };
  $("share").onclick = () => share(form.settings());
  $("seed-again").onclick = () => {
    if (!pictures.length) { say("No picture yet."); return; }
    $("seed").value = String(pictures[0].parameters.seed);
    form.keep();
  };
  $("model-pick").onchange = () => pickModel($("model-pick").value).catch(tellProblem);
  addEventListener("hashchange", takeLink);
  for (const picture of await all()) onSheet(picture);
  showSheet();
  await loadModel();
  if (form.model) {
    await takeUpJobs().catch(tellProblem);
    await takeLink();
  }
  document.documentElement.dataset.ready = "true";
}

begin();
