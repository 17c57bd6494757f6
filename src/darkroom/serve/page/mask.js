// Painting a mask: red over the picture is what will be redone.
import { $ } from "./common.js";

const RED = "rgb(229, 72, 47)";
const MOST_UNDO = 30;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Painter {
  constructor(onDone) {
    this.canvas = $("mask-canvas");
    this.layer = document.createElement("canvas");
    this.erasing = false;
    this.before = [];
    this.addPointer();
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    $("mask-dialog").addEventListener("keydown", (event) => {
      if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.undo(); }
    });
    $("mask-undo").onclick = () => this.undo();
    $("mask-erase").onclick = () => this.erase(!this.erasing);
    $("mask-clear").onclick = () => this.clear();
    $("mask-invert").onclick = () => this.invert();
    $("mask-done").onclick = () => $("mask-dialog").close();
    for (const id of ["brush", "mask-blur", "mask-zoom"]) $(id).oninput = () => { this.tell(); this.show(); };
    $("mask-dialog").addEventListener("close", onDone);
  }

  addPointer() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => { this.outline(this.place(event)); this.draw(event); });
    canvas.addEventListener("pointerleave", () => { $("mask-brush").hidden = true; });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { this.last = null; });
    $("mask-stage").addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Number($("mask-zoom").value) * (event.deltaY < 0 ? 1.25 : 0.8));
    }, { passive: false });
  }

  /** A new picture: the mask is empty. */
  set(image) {
    this.image = image;
    for (const one of [this.canvas, this.layer]) Object.assign(one, { width: image.width, height: image.height });
    Object.assign(this, { touched: false, before: [], at: [image.width / 2, image.height / 2] });
    $("mask-blur").value = 0;
    $("mask-zoom").value = 1;
    this.erase(false);
    this.show();
  }

  open() {
    $("mask-dialog").showModal();
    this.tell();
    this.show();
    this.canvas.focus();
  }

  tell() {
    $("brush-told").textContent = `${$("brush").value} %`;
    $("mask-blur-told").textContent = `${$("mask-blur").value} px`;
    $("mask-zoom-told").textContent = `\u00d7 ${Number($("mask-zoom").value)}`;
    $("mask-undo").disabled = !this.before.length;
    this.zoom(Number($("mask-zoom").value));
  }

  /** Of the canvas in its stage, about the middle of what is seen. */
  zoom(times) {
    const stage = $("mask-stage");
    const { width, height } = this.image;
    const fits = Math.min((stage.clientWidth - 24) / width, (stage.clientHeight - 24) / height);
    const middle = [(stage.scrollLeft + stage.clientWidth / 2) / (stage.scrollWidth || 1), (stage.scrollTop + stage.clientHeight / 2) / (stage.scrollHeight || 1)];
    $("mask-zoom").value = times;
    this.scale = Math.max(0.05, fits) * Number($("mask-zoom").value);
    $("mask-zoom-told").textContent = `\u00d7 ${Number($("mask-zoom").value)}`;
    this.canvas.style.width = `${Math.round(width * this.scale)}px`;
    this.canvas.style.height = `${Math.round(height * this.scale)}px`;
    stage.scrollLeft = middle[0] * stage.scrollWidth - stage.clientWidth / 2;
    stage.scrollTop = middle[1] * stage.scrollHeight - stage.clientHeight / 2;
    this.outline(this.at);
  }

  get brush() {
    return Number($("brush").value) / 100 * Math.max(this.layer.width, this.layer.height);
  }

  /** The brush's edge, where the pointer or the keys have it. */
  outline(at) {
    this.at = at;
    const brush = $("mask-brush");
    const scale = this.canvas.getBoundingClientRect().width / this.canvas.width;
    brush.hidden = !scale;
    brush.style.width = brush.style.height = `${this.brush * scale}px`;
    brush.style.left = `${at[0] * scale}px`;
    brush.style.top = `${at[1] * scale}px`;
  }

  erase(on) {
    this.erasing = on;
    $("mask-erase").setAttribute("aria-pressed", String(on));
  }

  remember() {
    const kept = document.createElement("canvas");
    Object.assign(kept, { width: this.layer.width, height: this.layer.height });
    kept.getContext("2d").drawImage(this.layer, 0, 0);
    this.before = [...this.before, { kept, touched: this.touched }].slice(-MOST_UNDO);
    $("mask-undo").disabled = false;
  }

  undo() {
    const last = this.before.pop();
    if (!last) return;
    const pen = this.pen("source-over");
    pen.clearRect(0, 0, this.layer.width, this.layer.height);
    pen.drawImage(last.kept, 0, 0);
    this.touched = last.touched;
    $("mask-undo").disabled = !this.before.length;
    this.show();
  }

  begin(event) {
    event.preventDefault();
    this.canvas.focus();
    this.canvas.setPointerCapture(event.pointerId);
    this.remember();
    this.last = this.place(event);
    this.draw(event);
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }

  draw(event) {
    if (!this.last) return;
    const to = this.place(event);
    this.stroke(this.last, to);
    this.last = to;
  }

  stroke(from, to) {
    const pen = this.pen(this.erasing ? "destination-out" : "source-over");
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(to[0] + 0.01, to[1]);
    pen.stroke();
    this.touched = true;
    this.show();
  }

  pen(how) {
    const pen = this.layer.getContext("2d");
    return Object.assign(pen, { globalCompositeOperation: how, strokeStyle: RED, fillStyle: RED, lineCap: "round", lineWidth: this.brush });
  }

  key(event) {
    const way = ARROWS[event.key];
    const size = { "[": -1, "]": 1 }[event.key];
    if (size) { $("brush").value = Number($("brush").value) + size; this.tell(); }
    if (event.key === " ") { event.preventDefault(); this.remember(); this.stroke(this.at, this.at); }
    if (!way) return;
    event.preventDefault();
    const far = event.shiftKey ? this.brush : Math.max(1, this.brush / 4);
    const to = this.at.map((one, i) => Math.max(0, Math.min([this.layer.width, this.layer.height][i], one + way[i] * far)));
    this.outline(to);
  }

  clear() {
    this.remember();
    this.layer.getContext("2d").clearRect(0, 0, this.layer.width, this.layer.height);
    this.touched = false;
    this.show();
  }

  invert() {
    this.remember();
    this.pen("xor").fillRect(0, 0, this.layer.width, this.layer.height);
    this.touched = true;
    this.show();
  }

  /** Mark all but this part, and a little of its edge, so that the new goes over into the old. */
  except({ left, top, width, height }, edge) {
    const pen = this.pen("source-over");
    pen.fillRect(0, 0, this.layer.width, this.layer.height);
    const inset = [left, this.layer.width - left - width, top, this.layer.height - top - height].map((room) => (room ? edge : 0));
    pen.clearRect(left + inset[0], top + inset[2], width - inset[0] - inset[1], height - inset[2] - inset[3]);
    $("mask-blur").value = Math.round(edge / 2);
    this.touched = true;
  }

  show() {
    this.paintOn(this.canvas);
  }

  /** The mask with its soft edge. */
  soft() {
    const blur = Number($("mask-blur").value);
    if (!blur) return this.layer;
    const canvas = Object.assign(document.createElement("canvas"), { width: this.layer.width, height: this.layer.height });
    const pen = canvas.getContext("2d");
    pen.filter = `blur(${blur}px)`;
    pen.drawImage(this.layer, 0, 0);
    return canvas;
  }

  /** The picture with the mask over it, on any canvas. */
  paintOn(canvas) {
    const pen = canvas.getContext("2d");
    pen.globalAlpha = 1;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(this.image, 0, 0, canvas.width, canvas.height);
    pen.globalAlpha = 0.6;
    pen.drawImage(this.soft(), 0, 0, canvas.width, canvas.height);
    pen.globalAlpha = 1;
  }

  /** White where it is redone, as PNG in base64; null where nothing is painted. */
  async base64() {
    if (!this.touched) return null;
    const canvas = Object.assign(document.createElement("canvas"), { width: this.layer.width, height: this.layer.height });
    const pen = canvas.getContext("2d");
    pen.drawImage(this.soft(), 0, 0);
    pen.globalCompositeOperation = "source-in";
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.globalCompositeOperation = "destination-over";
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/png");
  }
}
