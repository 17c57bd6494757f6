// What is on its way, in a corner that is always in reach: each job with its state and a button that cancels it.
import { $, make } from "./common.js";

export class Queue {
  /** `jobs()` gives those on their way, oldest first. */
  constructor(jobs) {
    this.jobs = jobs;
    $("queue-cancel").onclick = () => this.jobs().at(-1)?.cancel();
    $("queue-cancel-all").onclick = () => { for (const job of this.jobs()) job.cancel(); };
    $("queue-fold").onclick = () => this.fold($("queue-list").hidden);
  }

  fold(open) {
    $("queue-list").hidden = !open;
    $("queue-fold").setAttribute("aria-expanded", String(open));
    this.show();
  }

  show() {
    const found = this.jobs();
    $("queue").hidden = !found.length;
    document.documentElement.dataset.queue = String(found.length > 0);
    if (!found.length) { $("queue-list").hidden = true; $("queue-fold").setAttribute("aria-expanded", "false"); return; }
    const newest = found.at(-1);
    $("queue-count").textContent = found.length > 1 ? `${found.length} jobs` : newest.line.textContent;
    $("queue-cancel").textContent = found.length > 1 ? "Cancel newest" : "Cancel";
    $("queue-cancel").setAttribute("aria-label", `Cancel the newest job: ${newest.prompt || "picture"}`);
    $("queue-cancel-all").hidden = found.length < 2;
    if (!$("queue-list").hidden) this.list(found);
  }

  /** Items stay the same elements, so that the focus does not jump while they change. */
  list(found) {
    const there = new Map([...$("queue-list").children].map((one) => [one.dataset.job, one]));
    $("queue-list").replaceChildren(...found.map((job) => {
      const item = there.get(job.id) ?? this.item(job);
      item.querySelector(".queue-state").textContent = job.line.textContent;
      item.querySelector("progress").value = job.meter.value;
      return item;
    }));
  }

  item(job) {
    const stop = make("button", { type: "button", className: "link" }, "Cancel");
    stop.setAttribute("aria-label", `Cancel: ${job.prompt || "picture"}`);
    stop.onclick = () => job.cancel();
    const meter = make("progress", { max: 1, value: 0 });
    meter.setAttribute("aria-label", `Progress: ${job.prompt || "picture"}`);
    const item = make("li", {}, make("span", { className: "clip" }, job.prompt || "(no prompt)"), stop,
      make("span", { className: "queue-state small" }), meter);
    item.dataset.job = job.id;
    return item;
  }
}
