// Finished pictures, kept in this browser: IndexedDB, or memory where that is forbidden.

const memory = new Map();
let opening;

function database() {
  opening ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("darkroom", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("pictures", { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opening;
}

async function within(mode, act) {
  const db = await database();
  if (!db) return null;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction("pictures", mode);
    const request = act(transaction.objectStore("pictures"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** A picture: {id, blob, parameters, made (ms), job, index}. */
export async function keep(picture) {
  memory.set(picture.id, picture);
  await within("readwrite", (store) => store.put(picture)).catch(() => {});
}

export async function forget(id) {
  memory.delete(id);
  await within("readwrite", (store) => store.delete(id)).catch(() => {});
}

/** All pictures, newest first. */
export async function all() {
  for (const picture of (await within("readonly", (store) => store.getAll()).catch(() => null)) ?? []) {
    memory.set(picture.id, picture);
  }
  return [...memory.values()].sort((a, b) => b.made - a.made || a.index - b.index);
}
