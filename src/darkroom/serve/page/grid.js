// A grid: the form's picture once for each pair of values, in a table with its values beside and above.
import { $, make } from "./common.js";

const AXES = {
  "": "None", steps: "Steps", guidance: "Guidance", seed: "Seed", solver: "Solver", strength: "How much to redo",
  prompt: "Words of the prompt", adapter: "Weight of an adapter",
};
const MOST = 64;

export class Grid {
  /** `form` says what is chosen; `run(cells, table)` draws them. */
  constructor(form, run) {
    Object.assign(this, { form, run });
    for (const axis of ["x", "y"]) {
      $(`grid-${axis}`).replaceChildren(...Object.entries(AXES).map(([value, name]) => make("option", { value }, name)));
      $(`grid-${axis}`).onchange = () => this.suggest(axis);
    }
    $("grid-go").onclick = () => this.go();
  }

  /** Values to begin with, around what the form has. */
  suggest(axis) {
    const name = $(`grid-${axis}`).value;
    const now = Number($(name)?.value);
    const values = {
      steps: () => [Math.ceil(now / 2), now, now * 2], guidance: () => [now / 2, now, now * 1.5].map((one) => one.toFixed(1)),
      seed: () => [1, 2, 3], strength: () => [0.3, 0.6, 0.9], adapter: () => [0, 0.5, 1],
      solver: () => [...$("solver").options].slice(0, 3).map((one) => one.value), prompt: () => $("prompt").value.split(/\s+/).slice(0, 1),
    };
    $(`grid-${axis}-values`).value = values[name]?.().join(", ") ?? "";
    $(`grid-${axis}-values`).placeholder = name ? "values, with commas" : "none";
  }

  axis(axis) {
    const name = $(`grid-${axis}`).value;
    const values = $(`grid-${axis}-values`).value.split(",").map((one) => one.trim()).filter(Boolean);
    if (!name) return { name, values: [""] };
    const refuse = (message) => { throw Object.assign(new Error(message), { param: `grid-${axis}-values` }); };
    if (!values.length) refuse(`${AXES[name]}: one value or more, with commas.`);
    if (!["solver", "prompt"].includes(name) && values.some((one) => !Number.isFinite(Number(one)))) refuse(`${AXES[name]}: numbers, with commas.`);
    const solvers = [...$("solver").options].map((one) => one.value);
    const unknown = name === "solver" && values.find((one) => !solvers.includes(one));
    if (unknown) refuse(`Solver ${unknown}: one of ${solvers.join(", ")}.`);
    if (name === "adapter" && !this.form.adapters.size) refuse("Add an adapter first: its weight is what changes.");
    if (name === "prompt" && !$("prompt").value.includes(values[0])) refuse(`The prompt does not have “${values[0]}”, whose place the others would take.`);
    return { name, values };
  }

  /** A request's body with one value in its place; numbers stay as they were written. */
  with(told, { name, values }, value) {
    if (!name) return told;
    if (name === "prompt") return { ...told, prompt: told.prompt.replace(values[0], value) };
    if (name === "adapter") {
      const last = told.adapters.length - 1;
      return { ...told, adapters: told.adapters.map((one, i) => (i === last ? { ...one, weight: Number(value) } : one)) };
    }
    return { ...told, [name]: name === "solver" ? value : Number(value) };
  }

  async go() {
    let x, y;
    try {
      [x, y] = [this.axis("x"), this.axis("y")];
      if (!x.name && !y.name) throw Object.assign(new Error("Choose what changes along the columns or the rows."), { param: "grid-x" });
      if (x.values.length * y.values.length > MOST) throw Object.assign(new Error(`At most ${MOST} pictures.`), { param: "grid-x-values" });
    } catch (error) {
      this.run(null, null, error);
      return;
    }
    // One seed for all, so that only what is named differs.
    const seed = $("seed").value.trim() || String(crypto.getRandomValues(new Uint32Array(1))[0]);
    const told = { ...JSON.parse(await this.form.request()), num: 1, previews: 0 };
    delete told.seed;
    const cells = y.values.flatMap((down) => x.values.map((across) => {
      const body = this.with(this.with(told, x, across), y, down);
      return { body: body.seed === undefined ? `${JSON.stringify(body).slice(0, -1)},"seed":${seed}}` : JSON.stringify(body), across, down };
    }));
    this.run(cells, { x, y, title: `Grid of ${[x, y].filter((one) => one.name).map((one) => AXES[one.name]).join(" and ")}: ${told.prompt}` });
  }
}

/** The table of a grid, with an empty place for each picture. */
export function tableOf(cells, { x, y, title }) {
  const places = cells.map(() => make("td", {}));
  const head = make("tr", {}, make("td", { className: "grid-axes" }, axesOf(x, y)), ...x.values.map((value) => make("th", { scope: "col" }, value)));
  const rows = y.values.map((value, j) => make("tr", {}, make("th", { scope: "row" }, value), ...places.slice(j * x.values.length, (j + 1) * x.values.length)));
  const table = make("table", { className: "grid" }, make("caption", { className: "hidden" }, title), make("thead", {}, head), make("tbody", {}, ...rows));
  return { table, places };
}

/** What changes down the rows and along the columns. */
const axesOf = (x, y) => [y.name && `${AXES[y.name]}\u00a0\u2193`, x.name && `${AXES[x.name]}\u00a0\u2192`].filter(Boolean).join(" ");

/** A grid as one PNG, with its values: for saving. */
export async function sheetOf({ x, y }, images) {
  const { naturalWidth: width, naturalHeight: height } = images.find(Boolean);
  const room = Math.max(14, Math.round(height / 12));
  const canvas = make("canvas", { width: 6 * room + x.values.length * (width + 4), height: 2 * room + y.values.length * (height + 4) });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  Object.assign(pen, { fillStyle: "#000", font: `${room}px sans-serif`, textAlign: "center", textBaseline: "middle" });
  pen.fillText(axesOf(x, y), 3 * room, room, 6 * room - 8);
  x.values.forEach((value, i) => pen.fillText(value, 6 * room + (i + 0.5) * (width + 4), room, width));
  y.values.forEach((value, j) => pen.fillText(value, 3 * room, 2 * room + (j + 0.5) * (height + 4), 6 * room - 8));
  images.forEach((image, n) => {
    if (image) pen.drawImage(image, 6 * room + (n % x.values.length) * (width + 4), 2 * room + Math.floor(n / x.values.length) * (height + 4), width, height);
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
