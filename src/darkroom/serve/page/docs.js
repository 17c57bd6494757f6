// The server's routes, as openapi.json has them: what each takes, and a form that asks it.
import { $, addThemes, askJson, make, withKey } from "./common.js";

const SCHEMES = {
  http: ({ scheme }) => (scheme === "basic" ? "Authorization: Basic, the key as the password" : "Authorization: Bearer KEY"),
  apiKey: ({ name }) => `${name}: KEY`,
};
const MOST_SHOWN = 20000;
let schema;

const resolve = (part) => (part?.$ref ? part.$ref.split("/").slice(1).reduce((at, name) => at[name], schema) : part) ?? {};
const kinds = (part) => {
  const found = resolve(part);
  if (found.enum) return found.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (found.const !== undefined) return JSON.stringify(found.const);
  if (found.anyOf) return found.anyOf.map(kinds).join(" | ");
  return found.type === "array" ? `list of ${kinds(found.items)}` : found.type ?? "any";
};

/** A value to begin with: what must be there, in its type. */
function example(part) {
  const found = resolve(part);
  if (found.default !== undefined) return found.default;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return example(found.anyOf[0]);
  if (found.type === "object") {
    const needed = found.required ?? (found.properties?.prompt ? ["prompt"] : []);
    return Object.fromEntries(needed.map((name) => [name, name === "prompt" ? "a red circle" : example(found.properties[name])]));
  }
  return { array: [], integer: found.minimum ?? 0, number: found.minimum ?? 0, boolean: false, string: "" }[found.type] ?? null;
}

function facts(part) {
  const { properties = {}, required = [] } = resolve(part);
  const rows = Object.entries(properties).map(([name, field]) => {
    const found = resolve(field);
    const bounds = [["minimum", "at least"], ["maximum", "at most"], ["maxLength", "characters at most"]]
      .filter(([key]) => found[key] !== undefined).map(([key, words]) => `${words} ${found[key]}`);
    const usual = found.default !== undefined && found.default !== null ? [`usually ${JSON.stringify(found.default)}`] : [];
    return make("tr", {}, make("th", { scope: "row" }, name + (required.includes(name) ? " *" : "")), make("td", {}, make("code", {}, kinds(field))),
      make("td", {}, [field.description ?? found.description, ...usual, ...bounds].filter(Boolean).join("; ")));
  });
  if (!rows.length) return "";
  const head = make("tr", {}, ...["Field", "Type", "Meaning"].map((name) => make("th", { scope: "col" }, name)));
  return make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: "Fields of the body" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

let count = 0;

class Route {
  constructor(path, method, told) {
    Object.assign(this, { path, method: method.toUpperCase(), told, number: count++, fields: [] });
    this.box = make("details", { className: "route" }, make("summary", {}, make("span", { className: "method" }, this.method),
      make("code", {}, path), make("span", { className: "quiet clip" }, told.description ?? told.summary ?? "")));
    this.box.dataset.text = `${this.method} ${path} ${told.description ?? ""} ${(told.tags ?? []).join(" ")}`.toLowerCase();
    this.box.addEventListener("toggle", () => { if (this.box.open && !this.form) this.fill(); });
  }

  fill() {
    const { told } = this;
    this.form = make("form", { className: "route-form" });
    if (told.security && !told.security.length) this.form.append(make("p", { className: "small" }, "Needs no key."));
    for (const parameter of told.parameters ?? []) this.form.append(this.parameter(parameter));
    this.addBody(told.requestBody);
    this.answer = make("div", { className: "answer", role: "status" });
    const send = make("button", { type: "submit", className: "primary" }, "Send");
    send.setAttribute("aria-label", `Send ${this.method} ${this.path}`);
    this.form.append(make("div", { className: "route-send" }, send, make("code", { className: "curl" })), this.answer);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.send(send); });
    this.form.addEventListener("input", () => this.tellCurl());
    this.box.append(this.form);
    this.tellCurl();
  }

  parameter({ name, in: place, required, schema: of, description }) {
    const id = `route-${this.number}-${place}-${name}`;
    const input = make("input", { id, placeholder: kinds(of), required: !!required, spellcheck: false });
    if (resolve(of).default !== undefined && resolve(of).default !== null) input.placeholder = `usually ${resolve(of).default}`;
    this.fields.push({ name, place, input });
    return make("div", { className: "field" }, make("label", { htmlFor: id }, `${name} (${place})${required ? " *" : ""}${description ? `: ${description}` : ""}`), input);
  }

  addBody(body) {
    const found = resolve(body);
    const [kind] = Object.keys(found.content ?? {});
    if (!kind) return;
    const of = found.content[kind].schema;
    this.kind = kind;
    const id = `route-${this.number}-body`;
    if (kind === "application/json") {
      this.body = make("textarea", { id, rows: 6, spellcheck: false, value: JSON.stringify(example(of), null, 2) });
      this.form.append(make("div", { className: "field" }, make("label", { htmlFor: id }, `Body (${kind})`), this.body));
    } else {
      this.parts = Object.entries(resolve(of).properties ?? {}).map(([name, part]) => {
        const input = make("input", { id: `${id}-${name}`, type: resolve(part).format === "binary" ? "file" : "text" });
        this.form.append(make("div", { className: "field" }, make("label", { htmlFor: input.id }, name), input));
        return { name, input };
      });
    }
    this.form.append(facts(of));
  }

  /** The address with its parameters, relative to the page. */
  address() {
    let path = this.path;
    const query = new URLSearchParams();
    for (const { name, place, input } of this.fields) {
      if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value)).replace(`{${name}:path}`, input.value);
      if (place === "query" && input.value) query.set(name, input.value);
    }
    const text = query.toString();
    return path.replace(/^\//, "") + (text ? `?${text}` : "");
  }

  tellCurl() {
    const words = ["curl", this.method === "GET" ? "" : `-X ${this.method}`, `'${new URL(this.address(), location.href)}'`, "-H 'Authorization: Bearer KEY'"];
    if (this.body) words.push("-H 'Content-Type: application/json'", `-d '${this.body.value.replaceAll("'", "'\\''").replace(/\s*\n\s*/g, " ")}'`);
    this.form.querySelector(".curl").textContent = words.filter(Boolean).join(" ");
  }

  async send(button) {
    const headers = Object.fromEntries(this.fields.filter(({ place, input }) => place === "header" && input.value).map(({ name, input }) => [name, input.value]));
    let body;
    if (this.body) { body = this.body.value; headers["Content-Type"] = "application/json"; }
    if (this.parts) {
      body = new FormData();
      for (const { name, input } of this.parts) {
        if (input.type === "file" ? input.files[0] : input.value) body.append(name, input.type === "file" ? input.files[0] : input.value);
      }
    }
    button.disabled = true;
    this.answer.replaceChildren("Asking");
    const start = performance.now();
    try {
      const answer = await fetch(this.address() || "./", withKey({ method: this.method, headers, body }));
      await this.show(answer, start);
    } catch (error) {
      this.answer.replaceChildren(`The server cannot be reached: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  }

  async show(answer, start) {
    const kind = answer.headers.get("content-type") ?? "";
    const blob = await answer.blob();
    const line = `${answer.status} in ${Math.round(performance.now() - start)} ms, ${kind || "no body"}, ${blob.size} bytes`;
    const head = make("p", { className: answer.ok ? "answer-line" : "answer-line problem" }, line);
    if (kind.startsWith("image/")) {
      this.answer.replaceChildren(head, make("img", { src: URL.createObjectURL(blob), alt: "The picture of the answer" }));
      return;
    }
    let text = await blob.text();
    if (kind.includes("json")) text = JSON.stringify(JSON.parse(text), null, 2);
    if (text.length > MOST_SHOWN) text = `${text.slice(0, MOST_SHOWN)}\n… ${text.length - MOST_SHOWN} characters more`;
    this.answer.replaceChildren(head, make("pre", { tabIndex: 0, ariaLabel: "The answer's body" }, text));
  }
}

function show() {
  $("version").textContent = schema.info.version;
  const schemes = Object.entries(schema.components?.securitySchemes ?? {});
  $("security").replaceChildren(...schemes.flatMap(([name, scheme]) => [make("dt", {}, name), make("dd", {}, SCHEMES[scheme.type]?.(scheme) ?? scheme.type)]));
  const tags = new Map();
  for (const [path, methods] of Object.entries(schema.paths)) {
    for (const [method, told] of Object.entries(methods)) {
      const tag = told.tags?.[0] ?? "others";
      tags.set(tag, [...(tags.get(tag) ?? []), new Route(path, method, told)]);
    }
  }
  $("routes").replaceChildren(...[...tags].map(([tag, routes]) => {
    const title = make("h2", { id: `tag-${tag}` }, tag);
    const panel = make("section", { className: "panel" }, title, ...routes.map((one) => one.box));
    panel.setAttribute("aria-labelledby", title.id);
    return panel;
  }));
}

function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const box of document.querySelectorAll(".route")) box.hidden = !words.every((word) => box.dataset.text.includes(word));
  for (const panel of $("routes").children) panel.hidden = !panel.querySelector(".route:not([hidden])");
}

async function begin() {
  addThemes();
  $("filter").oninput = filter;
  try {
    schema = await askJson("/openapi.json");
    show();
  } catch (error) {
    $("problem").textContent = error.message;
  }
  document.documentElement.dataset.ready = "true";
}

begin();
