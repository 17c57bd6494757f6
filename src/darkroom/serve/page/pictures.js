// Pictures on their way to the server: read, made small enough, and larger canvases for what is to be added.
import { make } from "./common.js";

const MOST_SIDE = 2048;
const MOST_BYTES = 6e6;

/** A picture on a canvas: {canvas, scale}; null where it cannot be read. */
export async function onCanvas(blob) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    return null;
  }
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return { canvas, scale };
}

/** The file itself where it is small and of a kind that the server reads, else as it lies on the canvas. */
export async function encoded(blob, { canvas, scale }) {
  if (scale === 1 && blob.size < MOST_BYTES && /^image\/(png|jpeg|webp)$/.test(blob.type)) return dataUrl(blob);
  return canvas.toDataURL("image/jpeg", 0.95);
}

export const dataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** A larger canvas with the picture on it; what is new continues its border, so that drawing has colours to
 * begin with. */
export function extended(picture, { left, top, right, bottom }) {
  const { width, height } = picture;
  const canvas = make("canvas", { width: width + left + right, height: height + top + bottom });
  const pen = canvas.getContext("2d");
  const strips = [
    [0, 0, 1, height, 0, top, left, height], [width - 1, 0, 1, height, left + width, top, right, height],
  ];
  for (const strip of strips) if (strip[6]) pen.drawImage(picture, ...strip);
  pen.drawImage(picture, left, top);
  if (top) pen.drawImage(canvas, 0, top, canvas.width, 1, 0, 0, canvas.width, top);
  if (bottom) pen.drawImage(canvas, 0, top + height - 1, canvas.width, 1, 0, top + height, canvas.width, bottom);
  return canvas;
}
