// What both pages share: asking the server, its event streams, the key, colours, and saying things.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; text is never read as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Local storage that may be forbidden or full. */
export const kept = {
  get(name, otherwise = null) {
    try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
  },
  set(name, value) {
    try { localStorage.setItem(name, JSON.stringify(value)); } catch { /* not kept */ }
  },
};

export class Refusal extends Error {
  constructor(status, told, retryS) {
    super(told?.message ?? `the server answered ${status}`);
    Object.assign(this, { status, code: told?.code, param: told?.param, retryS });
  }
}

let waitingForKey = null;

/** A request's options with the key, where there is one. */
export function withKey(options) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  return { ...options, headers };
}

/** Fetch with the key; asks for one where the server wants it. Throws a Refusal for what is refused. */
export async function ask(path, options = {}) {
  for (;;) {
    let answer;
    try {
      // Relative to the page: the server may lie below a path of a proxy's.
      answer = await fetch(path.replace(/^\//, ""), withKey(options));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0, { message: "The server cannot be reached.", code: "unreachable" });
    }
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    if (answer.status === 401) {
      await askForKey(sessionStorage.getItem("key") ? "This key is not known to the server." : null);
      continue;
    }
    throw new Refusal(answer.status, told?.error, Number(answer.headers.get("Retry-After")) || null);
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

/** Server-sent events by fetch, so that the key can go along. Calls back for each; returns at the end. */
export async function follow(path, tell, signal) {
  const answer = await ask(path, { signal, headers: { Accept: "text/event-stream" } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const event = parsed(text.slice(0, end));
      text = text.slice(end + 2);
      if (event) tell(event.kind, event.data);
    }
  }
}

function parsed(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { kind, data: JSON.parse(data.join("\n")) } : null;
}

/** Opens the key's dialog; resolves once a key was given, rejects where it was not. */
export function askForKey(why) {
  waitingForKey ??= new Promise((resolve, reject) => {
    const dialog = $("key-dialog");
    if (why) $("key-why").textContent = why;
    $("key").value = "";
    const over = (event) => {
      event.preventDefault();
      const key = $("key").value.trim();
      if (!key) return;
      sessionStorage.setItem("key", key);
      dialog.close("given");
    };
    $("key-form").addEventListener("submit", over);
    $("key-cancel").onclick = () => dialog.close("");
    dialog.addEventListener("close", () => {
      $("key-form").removeEventListener("submit", over);
      waitingForKey = null;
      if (dialog.returnValue === "given") resolve();
      else reject(new Refusal(401, { message: "A key is needed: press Key above.", code: "no_key" }));
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
  return waitingForKey;
}

let toastEnds;

/** What tells something, in the open dialog or in the page: what a modal dialog covers is neither seen nor read out. */
function moveTold() {
  const place = document.querySelector("dialog[open]") ?? document.body;
  if ($("told").parentElement === place) return false;
  place.append($("told"), $("toast"));
  return true;
}
document.addEventListener("close", moveTold, true);

/** Tells something to the eye and to the screen reader. */
export function say(text, { quietly = false } = {}) {
  if (moveTold()) { // a region that is new here is read out once it changes
    $("told").textContent = "";
    setTimeout(() => { $("told").textContent = text; }, 100);
  } else $("told").textContent = text;
  if (quietly) return;
  $("toast").textContent = text;
  $("toast").dataset.shown = "true";
  clearTimeout(toastEnds);
  toastEnds = setTimeout(() => { delete $("toast").dataset.shown; }, 3500);
}

const THEMES = ["auto", "dark", "light"];

/** The button that goes through the colours. */
export function addThemes() {
  const show = (name) => {
    $("theme").textContent = name[0].toUpperCase() + name.slice(1);
    $("theme").setAttribute("aria-label", `Colours: ${name}`);
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  };
  let now = document.documentElement.dataset.theme ?? "auto";
  show(now);
  $("theme").onclick = () => {
    now = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    try { localStorage.setItem("theme", now); } catch { /* not kept */ }
    show(now);
  };
  $("key-open").onclick = () => askForKey().then(() => location.reload(), () => {});
}
