// What is kept of a run in the origin's private file system, so that it survives the closing of the
// tab: the texts and figures here, the weights in the engine's checkpoint of the same name.

/**
 * @typedef {object} Kept
 * @property {string} id Name of the checkpoint.
 * @property {string} folder
 * @property {import('./elapid/index.js').TextFile[]} train
 * @property {import('./elapid/index.js').TextFile[]} heldOut What is measured.
 * @property {import('./elapid/index.js').DeviceName} device
 * @property {number} steps
 * @property {number} evalEvery
 * @property {number} saveEvery
 * @property {number} tokensPerByte Of the training texts.
 * @property {import('./elapid/index.js').Evaluation} before
 * @property {import('./chart.js').Point[]} points
 * @property {boolean} isDone
 */

const TEXTS = 'studio-run.json';
const PROGRESS = 'studio-progress.json';

/** @param {string} name @param {unknown} value */
async function write(name, value) {
  const root = await navigator.storage.getDirectory();
  const file = await root.getFileHandle(name, { create: true });
  // Takes the place of the old file when it is closed, and not before.
  const stream = await file.createWritable();
  await stream.write(JSON.stringify(value));
  await stream.close();
}

/** @param {string} name */
async function read(name) {
  const root = await navigator.storage.getDirectory();
  return JSON.parse(await (await (await root.getFileHandle(name)).getFile()).text());
}

/** Keeps a run from its start. @param {Kept} run */
export async function keep(run) {
  await navigator.storage.persist?.();
  const { points, isDone, ...texts } = run;
  await write(TEXTS, texts);
  await keepProgress(run);
}

/** Keeps how far a run is: small beside its texts. @param {Kept} run */
export function keepProgress({ id, points, isDone }) {
  return write(PROGRESS, { id, points, isDone });
}

/** The run that was kept, if any. @returns {Promise<Kept | undefined>} */
export async function kept() {
  try {
    const [texts, progress] = [await read(TEXTS), await read(PROGRESS)];
    return texts.id === progress.id ? { ...texts, ...progress } : undefined;
  } catch {
    return undefined; // nothing there, or no such file system
  }
}

export async function forget() {
  const root = await navigator.storage.getDirectory();
  for (const name of [TEXTS, PROGRESS]) await root.removeEntry(name).catch(() => undefined);
}
