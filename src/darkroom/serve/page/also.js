// What a picture's settings say that the form has no field for: shown beside it, sent along, removable.
import { $, make } from "./common.js";

const SAYS = {
  karras: (on) => (on ? "Karras sigmas" : "no Karras sigmas"),
  variation_seed: (seed) => `variation seed ${seed}`,
  variation_strength: (share) => `variation strength ${share}`,
  seed_width: (side) => `noise of a picture ${side} wide`,
  seed_height: (side) => `noise of a picture ${side} high`,
  exponential: (on) => (on ? "exponential sigmas" : "no exponential sigmas"),
  sigmas: (name) => `${name.replaceAll("_", " ")} sigmas`,
  spacing: (name) => `${name} timesteps`,
  eta: (share) => `eta ${share}`,
  guidance_rescale: (share) => `guidance rescale ${share}`,
  clip_skip: (layers) => `clip skip ${layers}`,
  weighting: (syntax) => `weights as in ${syntax === "a1111" ? "A1111" : syntax}`,
  hires: ({ scale, strength, upscaler }) => `enlarged ${scale} times (${upscaler}), ${Math.round(strength * 100)} % redone`,
};
const NEUTRAL = { variation_strength: 0, eta: 0, guidance_rescale: 0, clip_skip: 0, weighting: "none" };

export class Also {
  constructor(onChange) {
    this.told = {};
    this.onChange = onChange;
  }

  /** Take up what `told` says beyond the form, and `lost`: what cannot be restored, in words. */
  restore(told, usual, lost) {
    this.told = Object.fromEntries(Object.keys(SAYS)
      .filter((name) => told[name] !== undefined && told[name] !== null && told[name] !== (NEUTRAL[name] ?? usual?.[name]))
      .map((name) => [name, told[name]]));
    $("lost").textContent = lost.length ? `Not restored: ${lost.join(", ")}` : "";
    this.show();
  }

  without(name) {
    const together = name.startsWith("seed_") ? ["seed_width", "seed_height"] : [name];
    for (const one of together) delete this.told[one];
    this.show();
    this.onChange();
  }

  show() {
    $("also").replaceChildren(...Object.entries(this.told).map(([name, value]) => {
      const text = SAYS[name](value);
      const gone = make("button", { type: "button" }, "\u00d7");
      gone.setAttribute("aria-label", `Without ${text}`);
      gone.onclick = () => this.without(name);
      return make("li", {}, text, gone);
    }));
    $("also-box").hidden = !$("also").children.length && !$("lost").textContent;
    $("also-head").hidden = !$("also").children.length;
  }
}
