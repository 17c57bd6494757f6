// The settings that a PNG carries in its text chunks: darkroom's own, or A1111's.

import { AUTOMATIC, SCHEDULES, SOLVERS } from "./solvers.js";

const UPSCALERS = { "latent": "latent", "latent (bilinear)": "latent", "lanczos": "lanczos" };
// What A1111's text says that is restored, or that says nothing of the settings.
const READ = new Set(["steps", "sampler", "schedule type", "cfg scale", "seed", "size", "model", "eta", "eta ddim", "rng", "clip skip",
  "cfg rescale", "denoising strength", "variation seed", "variation seed strength", "seed resize from", "hires upscale", "hires steps", "hires upscaler",
  "version", "model hash", "vae hash", "lora hashes", "ti hashes", "hashes", "user", "time taken"]);
const TAG = /<lora:([^:<>]+)(?::([^:<>]*))?>/g;
const SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
const MOST_TEXT = 1 << 20;

/** Settings by darkroom's names, or null where the file carries none. */
export async function settingsIn(blob) {
  const texts = await textsIn(blob);
  try {
    const own = JSON.parse(texts.darkroom ?? "null");
    // A seed may have 19 digits, more than a JavaScript number holds.
    const seed = /"seed": (\d+)/.exec(texts.darkroom)?.[1];
    if (own && typeof own.prompt === "string") return seed ? { ...own, seed } : own;
  } catch { /* somebody else's chunk of that name */ }
  return texts.parameters ? ofA1111(texts.parameters) : null;
}

async function textsIn(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  const texts = {};
  if (SIGNATURE.some((one, i) => bytes[i] !== one)) return texts;
  const view = new DataView(bytes.buffer);
  for (let at = 8; at + 12 <= bytes.length;) {
    const length = view.getUint32(at);
    const kind = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    const data = bytes.subarray(at + 8, at + 8 + length);
    if (kind === "IEND" || kind === "IDAT" && texts.darkroom) break;
    if (length < MOST_TEXT) await readText(kind, data, texts);
    at += 12 + length;
  }
  return texts;
}

async function readText(kind, data, texts) {
  const end = data.indexOf(0);
  if (end < 1 || end > 79) return;
  const name = latin(data.subarray(0, end));
  const rest = data.subarray(end + 1);
  try {
    if (kind === "tEXt") texts[name] = latin(rest);
    if (kind === "zTXt") texts[name] = latin(await inflated(rest.subarray(1)));
    if (kind === "iTXt") {
      const language = rest.indexOf(0, 2);
      const word = rest.indexOf(0, language + 1);
      const body = rest.subarray(word + 1);
      texts[name] = new TextDecoder().decode(rest[0] ? await inflated(body) : body);
    }
  } catch { /* a chunk that cannot be read is none */ }
}

const TEXTS = new Set(["tEXt", "zTXt", "iTXt"]);

/** A PNG's bytes with the texts of another, which say how it was made, after its header. */
export async function withTextOf(blob, bytes) {
  const from = new Uint8Array(await blob.arrayBuffer());
  const view = new DataView(from.buffer);
  const texts = [];
  for (let at = 8; at + 12 <= from.length;) {
    const length = view.getUint32(at);
    const kind = String.fromCharCode(...from.subarray(at + 4, at + 8));
    if (TEXTS.has(kind)) texts.push(from.subarray(at, at + 12 + length));
    at += 12 + length;
  }
  const header = 8 + 12 + 13; // the signature and IHDR
  return new Uint8Array(await new Blob([bytes.subarray(0, header), ...texts, bytes.subarray(header)]).arrayBuffer());
}

const latin = (bytes) => new TextDecoder("latin1").decode(bytes);

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const reader = stream.getReader();
  const parts = [];
  for (let total = 0; total < MOST_TEXT;) {
    const { value, done } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    total += value.length;
    parts.push(value);
  }
  throw new Error("too long");
}

function ofA1111(text) {
  const lines = text.split("\n");
  const last = lines.findLastIndex((line) => /^Steps: \d+/.test(line));
  if (last < 0) return null;
  const facts = {};
  for (const [, name, quoted, plain] of lines[last].matchAll(/([\w ]+): (?:"((?:[^"\\]|\\.)*)"|([^,]*))(?:, |$)/g)) {
    facts[name.trim().toLowerCase()] = quoted ?? plain;
  }
  const [prompt, negative] = lines.slice(0, last).join("\n").split(/\n?Negative prompt: /);
  const number = (name) => (facts[name] !== undefined && Number.isFinite(Number(facts[name])) ? Number(facts[name]) : undefined);
  const ours = facts.version?.startsWith("darkroom");
  const lost = Object.keys(facts).filter((name) => !READ.has(name)).map((name) => `${name} ${facts[name]}`.slice(0, 60));
  return {
    prompt: ours ? prompt.trim() : prompt.replace(TAG, " ").replace(/ {2,}/g, " ").trim(), negative: negative?.trim() ?? "",
    variation_seed: number("variation seed"), variation_strength: number("variation seed strength"),
    ...sides(facts["seed resize from"]),
    steps: number("steps"), guidance: number("cfg scale"), seed: facts.seed, model: facts.model,
    ...(ours ? {} : { adapters: tagged(prompt), weighting: "a1111" }),
    ...sampled(facts, number, lost), ...passes(facts, number, lost), lost,
  };
}

/** Of the picture whose noise is kept in the middle. */
function sides(text) {
  const [width, height] = (text ?? "").split("x").map(Number);
  return width > 0 && height > 0 ? { seed_width: width, seed_height: height } : {};
}

function tagged(prompt) {
  return [...prompt.matchAll(TAG)].map(([, name, weight]) => ({ name: name.trim(), weight: Number(weight ?? 1) || 0 }));
}

function sampled(facts, number, lost) {
  const name = (facts.sampler ?? "").toLowerCase();
  const plain = name.replace(/ karras$/, "");
  const type = (facts["schedule type"] ?? "").toLowerCase();
  const spacing = { uniform: "linspace", "sgm uniform": "trailing" }[type];
  if (type && type !== "automatic" && !spacing && !SCHEDULES[type]) lost.push(`schedule ${type}`);
  const solver = SOLVERS[plain] ?? (plain || undefined);
  const skip = number("clip skip");
  if (solver !== "ddim" && facts.eta !== undefined) lost.push(`eta ${facts.eta}`);
  const sigmas = type === "automatic" ? AUTOMATIC[solver] : SCHEDULES[type];
  const karras = plain !== name || sigmas === "karras";
  return {
    solver, karras: karras || (spacing ? false : undefined), spacing,
    sigmas: sigmas !== "karras" ? sigmas : undefined,
    eta: solver === "ddim" ? number("eta ddim") ?? number("eta") : undefined, guidance_rescale: number("cfg rescale"),
    clip_skip: skip === undefined ? undefined : Math.max(0, skip - 1), // A1111 counts the last layer as 1
  };
}

/** Size and second pass: the size told is the one before it; both strengths have one name. */
function passes(facts, number, lost) {
  const [across, down] = (facts.size ?? "").split("x").map((side) => Number(side) || undefined);
  const scale = number("hires upscale");
  const strength = number("denoising strength");
  if (!scale) return { width: across, height: down, strength, image: strength === undefined ? undefined : "unknown" };
  const taken = number("hires steps") || number("steps"); // A1111 takes them all, here they are a share
  const upscaler = UPSCALERS[(facts["hires upscaler"] ?? "latent").toLowerCase()];
  if (!upscaler) {
    lost.push(`hires upscaler ${facts["hires upscaler"]}`);
    return { width: across, height: down };
  }
  return {
    width: across && Math.round(across * scale), height: down && Math.round(down * scale),
    hires: { scale, strength: strength ?? 0.7, steps: taken ? Math.ceil(taken / (strength || 0.7)) : null, upscaler },
  };
}
