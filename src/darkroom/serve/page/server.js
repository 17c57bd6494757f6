// The server at a glance: its state, rows by step, pace, adapters, and what went wrong.
import { $, addThemes, ask, askJson, make } from "./common.js";

const EVERY_MS = 1000;
const KEPT = 120;
const LOOK_AT_MODEL = 5;
const paces = [];
const queues = [];
let before = null;
let round = 0;

/** Prometheus' text as a map from name and labels to value. */
export function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+(?:\{[^}]*\})?) (\S+)$/.exec(line);
    if (match) found.set(match[1], Number(match[2]));
  }
  return found;
}

const labelled = (metrics, name, label) => [...metrics].flatMap(([key, value]) => {
  const match = new RegExp(`^${name}\\{.*${label}="([^"]*)"`).exec(key);
  return match && value ? [[match[1], value]] : [];
});

function tell(status, metrics) {
  const get = (name) => metrics.get(`darkroom_${name}`) ?? 0;
  const now = { at: performance.now(), steps: get("picture_steps_total"), pictures: get("pictures_total") };
  const passed = before ? (now.at - before.at) / 1000 : 0;
  const pace = passed ? Math.max(0, now.steps - before.steps) / passed : 0;
  before = now;
  push(paces, pace);
  push(queues, status.waiting);
  const mean = (name) => (get(`${name}_count`) ? get(`${name}_sum`) / get(`${name}_count`) : null);
  showNumbers([
    ["Pictures made", whole(now.pictures)],
    ["On their way", status.rows.length, `of load ${short(status.load)} / ${short(status.capacity)}`],
    ["Waiting", status.waiting],
    ["A step of one size", seconds(status.step_s)],
    ["Rows a step", short(mean("step_evaluations")), "mean"],
    ["Wait in the queue", seconds(mean("queue_wait_seconds")), "mean"],
    ["From asked to stored", seconds(mean("job_seconds")), "mean"],
    ["Device time", seconds(get("device_seconds_total")), get("usd_total") ? `${get("usd_total").toFixed(4)} USD` : ""],
  ]);
  $("pace-now").textContent = `${short(pace)} now`;
  $("queue-now").textContent = `${status.waiting} now`;
  draw($("pace"), paces, "--amber");
  draw($("queue"), queues, "--lamp");
  showRows(status.rows);
  showErrors(metrics);
}

function push(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}

function showNumbers(told) {
  $("numbers").replaceChildren(...told.map(([label, value, more]) => make("div", {}, make("dt", {}, label),
    make("dd", {}, String(value ?? "\u2013"), more ? make("small", {}, ` ${more}`) : ""))));
}

function showRows(rows) {
  $("rows-count").textContent = rows.length ? String(rows.length) : "";
  $("rows-none").hidden = rows.length > 0;
  $("rows").replaceChildren(...[...rows].sort((a, b) => b.step / b.of - a.step / a.of).slice(0, 64).map((row) => {
    const bar = make("span", {});
    bar.style.width = `${(row.step / row.of) * 100}%`;
    const track = make("div", { className: "track" }, bar);
    return make("li", {}, make("span", { className: row.job ? "mine" : "what" }, row.size.replace("x", "\u00d7")), track,
      make("span", { className: "at" }, `${row.step}/${row.of}`));
  }));
}

function showErrors(metrics) {
  const rows = [
    ...labelled(metrics, "darkroom_jobs_over_total", "state").map(([state, n]) => [`jobs ${state}`, n]),
    ...labelled(metrics, "darkroom_requests_refused_total", "code").map(([code, n]) => [`refused: ${code.replaceAll("_", " ")}`, n]),
  ];
  const shown = rows.length ? rows : [["nothing yet", 0]];
  $("errors").tBodies[0].replaceChildren(...shown.map(([what, n]) => make("tr", {}, make("td", {}, what), make("td", { className: "n" }, whole(n)))));
}

function showModel(model) {
  $("model").textContent = `${model.name}, ${model.family}, ${model.precision}`;
  $("adapters-count").textContent = model.adapters.length ? String(model.adapters.length) : "";
  const shown = [...model.adapters].sort((a, b) => Number(b.loaded) - Number(a.loaded)).slice(0, 200);
  const rows = shown.map((card) => make("tr", {}, make("td", {}, card.name),
    make("td", {}, card.trouble ?? (card.loaded ? "on the device" : "in the folder")),
    make("td", { className: "n" }, bytes(card.bytes))));
  const none = make("tr", {}, make("td", { colSpan: 3, className: "none" }, "None."));
  $("adapters").tBodies[0].replaceChildren(...(rows.length ? rows : [none]));
}

function draw(canvas, values, colour) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  Object.assign(canvas, { width: width * scale, height: height * scale });
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const [ink, faint] = [resolved(colour), resolved("--quiet")];
  pen.scale(scale, scale);
  const most = Math.max(1, ...values);
  const x = (i) => width - (values.length - 1 - i) * (width / (KEPT - 1));
  const y = (value) => height - 16 - (value / most) * (height - 28);
  pen.strokeStyle = faint;
  pen.globalAlpha = 0.25;
  pen.beginPath();
  for (const share of [0, 0.5, 1]) { pen.moveTo(0, y(most * share) + 0.5); pen.lineTo(width, y(most * share) + 0.5); }
  pen.stroke();
  pen.globalAlpha = 1;
  pen.strokeStyle = ink;
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(x(i), y(value)));
  pen.stroke();
  pen.lineTo(width, y(0));
  pen.lineTo(x(0), y(0));
  pen.globalAlpha = 0.12;
  pen.fillStyle = ink;
  pen.fill();
  pen.globalAlpha = 1;
  pen.fillStyle = faint;
  pen.font = `11px ${style.getPropertyValue("--mono")}`;
  pen.fillText(short(most), 2, 10);
  pen.fillText("2 min", 2, height - 3);
}

/** A colour of the style sheet as the canvas knows colours. */
function resolved(colour) {
  const probe = make("i", {});
  probe.style.color = `var(${colour})`;
  document.body.append(probe);
  const ink = getComputedStyle(probe).color;
  probe.remove();
  return ink;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value === null ? null : value >= 100 ? whole(value) : String(Math.round(value * 10) / 10));
function seconds(value) {
  if (value === null || !value) return null;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 3600 ? `${short(value)} s` : `${short(value / 3600)} h`;
}
const bytes = (value) => (value < 1e6 ? `${(value / 1e3).toFixed(0)} kB` : `${(value / 1e6).toFixed(1)} MB`);

function showState(state, why) {
  if ($("state").textContent !== state) $("state").textContent = state;
  $("state").dataset.state = state;
  $("why").textContent = why;
}

async function look() {
  try {
    const [status, text] = await Promise.all([askJson("/status"), ask("/metrics").then((answer) => answer.text())]);
    showState(status.why && status.state === "ready" ? "broken" : status.state, status.why);
    tell(status, readMetrics(text));
    if (round++ % LOOK_AT_MODEL === 0) await askJson("/model").then(showModel, () => {});
  } catch (error) {
    showState(error.status === 401 ? "a key is needed" : "unreachable", error.message);
    if (error.status === 401) return;
  }
  setTimeout(look, document.hidden ? EVERY_MS * 5 : EVERY_MS);
}

addThemes();
look();
