// Painting a mask: red over the picture is what will be redone.
import { $ } from "./common.js";

const RED = "rgb(229, 72, 47)";

export class Painter {
  constructor(onDone) {
    this.canvas = $("mask-canvas");
    this.layer = document.createElement("canvas");
    this.erasing = false;
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
    this.canvas.addEventListener("pointermove", (event) => this.draw(event));
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => { this.last = null; });
    $("mask-erase").onclick = () => this.erase(!this.erasing);
    $("mask-clear").onclick = () => this.clear();
    $("mask-invert").onclick = () => this.invert();
    $("mask-done").onclick = () => $("mask-dialog").close();
    $("mask-dialog").addEventListener("close", onDone);
  }

  /** A new picture: the mask is empty. */
  set(image) {
    this.image = image;
    for (const one of [this.canvas, this.layer]) Object.assign(one, { width: image.width, height: image.height });
    this.touched = false;
    this.erase(false);
    this.show();
  }

  open() {
    this.show();
    $("mask-dialog").showModal();
  }

  erase(on) {
    this.erasing = on;
    $("mask-erase").setAttribute("aria-pressed", String(on));
  }

  begin(event) {
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
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
    const pen = this.layer.getContext("2d");
    pen.globalCompositeOperation = this.erasing ? "destination-out" : "source-over";
    pen.strokeStyle = RED;
    pen.lineCap = "round";
    pen.lineWidth = Number($("brush").value) / 100 * Math.max(this.layer.width, this.layer.height);
    pen.beginPath();
    pen.moveTo(...this.last);
    pen.lineTo(to[0] + 0.01, to[1]);
    pen.stroke();
    this.last = to;
    this.touched = true;
    this.show();
  }

  clear() {
    this.layer.getContext("2d").clearRect(0, 0, this.layer.width, this.layer.height);
    this.touched = false;
    this.show();
  }

  invert() {
    const pen = this.layer.getContext("2d");
    pen.globalCompositeOperation = "xor";
    pen.fillStyle = RED;
    pen.fillRect(0, 0, this.layer.width, this.layer.height);
    this.touched = true;
    this.show();
  }

  show() {
    this.paintOn(this.canvas);
  }

  /** The picture with the mask over it, on any canvas. */
  paintOn(canvas) {
    const pen = canvas.getContext("2d");
    pen.globalAlpha = 1;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(this.image, 0, 0, canvas.width, canvas.height);
    pen.globalAlpha = 0.6;
    pen.drawImage(this.layer, 0, 0, canvas.width, canvas.height);
    pen.globalAlpha = 1;
  }

  /** White where it is redone, as PNG in base64; null where nothing is painted. */
  async base64() {
    if (!this.touched) return null;
    const canvas = Object.assign(document.createElement("canvas"), { width: this.layer.width, height: this.layer.height });
    const pen = canvas.getContext("2d");
    pen.drawImage(this.layer, 0, 0);
    pen.globalCompositeOperation = "source-in";
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.globalCompositeOperation = "destination-over";
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/png");
  }
}
