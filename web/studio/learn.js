// From the files of a folder to a run: what is learned, what is measured, and the loop of steps.

import { Trainer, checkpoints, compare, evaluate, select } from './elapid/index.js';
import * as store from './store.js';
import { mask } from './secrets.js';

/** @typedef {import('./elapid/index.js').Model} Model */
/** @typedef {import('./elapid/index.js').TextFile} TextFile */
/** @typedef {import('./elapid/index.js').Step} Step */
/** @typedef {import('./elapid/index.js').Selection} Selection */
/** @typedef {import('./elapid/index.js').Evaluation} Evaluation */
/** @typedef {Selection & { masked: number, measured: TextFile[] }} Chosen */

/** @type {import('./elapid/index.js').TrainerOptions} */
const SETTINGS = {
  method: 'lora',
  rank: 16,
  alpha: 32,
  lr: 1e-3,
  batch: 4,
  context: 256,
  fim: 0.5,
};
export const STEP_TOKENS = (SETTINGS.batch ?? 1) * (SETTINGS.context ?? 1);

/** Held-out text that is measured: what more would say is not worth the minutes. */
const MEASURED_BYTES_MAX = 32_000;
const MEASURED_FILE_BYTES_MIN = 4000;
/** Measurements on the way: so many, or as many as take this share of the time. */
const N_EVALS_MAX = 10;
const EVALS_SHARE = 0.2;
/** Between two checkpoints. */
const SAVE_SECONDS = 10;
const N_STEPS_MIN = 4;
/** Passes over the files: a small model soon knows them by heart. */
const N_EPOCHS_MAX = 12;

/** What a page takes into memory at most. */
const TRAIN_BYTES_MAX = 32_000_000;

/**
 * Which files are learned and which are measured, without secrets.
 * @param {import('./folder.js').Folder} folder
 * @returns {Promise<Chosen>}
 */
export async function choose(folder) {
  const selection = await select(folder.files);
  let masked = 0;
  /** @param {TextFile} file */
  const clean = ({ name, text }) => {
    const { text: safe, found } = mask(text);
    masked += found;
    return { name, text: safe };
  };
  const leftOut = [...folder.leftOut, ...selection.leftOut];
  const train = [];
  let bytes = 0;
  for (const file of selection.train) {
    bytes += file.text.length;
    if (bytes <= TRAIN_BYTES_MAX) train.push(clean(file));
    else leftOut.push({ name: file.name, reason: 'past the first 32 MB, which are learned' });
  }
  const heldOut = selection.heldOut.map(clean);
  return { ...selection, train, heldOut, leftOut, masked, measured: sample(heldOut) };
}

/** The beginnings of held-out files, up to a bound. @param {TextFile[]} files */
function sample(files) {
  const most = Math.max(MEASURED_FILE_BYTES_MIN, Math.floor(MEASURED_BYTES_MAX / files.length));
  const list = [];
  let bytes = 0;
  for (const { name, text } of files) {
    const end = text.length <= most ? text.length : text.lastIndexOf('\n', most) + 1 || most;
    bytes += end;
    if (bytes > MEASURED_BYTES_MAX && list.length > 0) break;
    list.push({ name, text: text.slice(0, end) });
  }
  return list;
}

/** Bytes in UTF-8. @param {TextFile[]} files */
export const sizeOf = (files) => new Blob(files.map((file) => file.text)).size;

/** What a run would take; nothing is changed. @param {Model} model @param {TextFile[]} train */
export const plan = (model, train) => new Trainer(model, SETTINGS).plan(train);

/**
 * Steps that fit into some minutes.
 * @param {import('./elapid/index.js').Plan} known
 * @param {number} minutes
 */
export function stepsIn(known, minutes) {
  const most = Math.max(N_STEPS_MIN, Math.ceil(known.stepsPerEpoch * N_EPOCHS_MAX));
  const wanted = Math.round((minutes * 60) / known.stepSeconds);
  return Math.min(most, Math.max(N_STEPS_MIN, wanted));
}

/**
 * How well a model predicts texts, in windows as long as the rows that it learns.
 * @param {Model} model
 * @param {TextFile[]} texts
 */
export const measure = (model, texts) => evaluate(model, texts, { context: SETTINGS.context });

/**
 * Steps between two measurements, which take `evalSeconds` each, and between two checkpoints.
 * @param {number} steps
 * @param {number} stepSeconds
 * @param {number} evalSeconds
 */
export function rhythm(steps, stepSeconds, evalSeconds) {
  const evals = Math.floor((EVALS_SHARE * steps * stepSeconds) / evalSeconds);
  return {
    evalEvery: Math.ceil(steps / Math.min(N_EVALS_MAX, Math.max(1, evals))),
    saveEvery: Math.max(1, Math.round(SAVE_SECONDS / stepSeconds)),
  };
}

/**
 * Bits per byte of a loss in nats per token.
 * @param {number} loss
 * @param {number} tokensPerByte
 */
const toBits = (loss, tokensPerByte) => (loss / Math.LN2) * tokensPerByte;

/** A run that can be paused, stopped, and continued in another tab. */
export class Run {
  #stop = new AbortController();
  /** @type {(() => void) | undefined} */
  #wake = undefined;
  /** @type {Promise<void> | undefined} */
  #asleep = undefined;

  /**
   * @param {Model} model Learns.
   * @param {store.Kept} kept
   */
  constructor(model, kept) {
    this.model = model;
    this.kept = kept;
    /** What the last step has measured. @type {Evaluation | undefined} */
    this.last = undefined;
    /** Whether the run could be kept for another day. */
    this.isKept = false;
  }

  get isPaused() {
    return this.#asleep !== undefined;
  }

  pause() {
    this.#asleep ??= new Promise((wake) => {
      this.#wake = wake;
    });
  }

  go() {
    this.#wake?.();
    this.#asleep = undefined;
  }

  /** Ends after the current step; what was learned stays. */
  stop() {
    this.#stop.abort();
    this.go();
  }

  /**
   * Makes all steps that are left.
   * @param {(step: Step) => void} onStep
   */
  async learn(onStep) {
    const { kept } = this;
    this.isKept = await store.keep(kept).then(
      () => true,
      () => false,
    );
    const training = new Trainer(this.model, SETTINGS).train(kept.train, {
      steps: kept.steps,
      heldOut: kept.heldOut,
      evalEvery: kept.evalEvery,
      checkpoint: this.isKept ? { name: kept.id, every: kept.saveEvery } : undefined,
      signal: this.#stop.signal,
    });
    try {
      for await (const step of training) {
        this.#note(step);
        this.last = step.heldOut;
        onStep(step);
        if (this.isKept && step.saved) await store.keepProgress(kept);
        await this.#asleep;
      }
    } catch (error) {
      if (!this.#stop.signal.aborted) throw error;
    }
    kept.isDone = true;
    if (this.isKept) await store.keepProgress(kept);
  }

  /** @param {Step} step */
  #note(step) {
    const { points, tokensPerByte } = this.kept;
    // Steps after the checkpoint are made again when a run is continued.
    while ((points.at(-1)?.step ?? 0) >= step.step) points.pop();
    points.push({
      step: step.step,
      train: toBits(step.loss, tokensPerByte),
      held: step.heldOut?.bitsPerByte,
    });
  }

  /** Measures the model and compares it with what it was. */
  async measure() {
    const after = this.last ?? (await measure(this.model, this.kept.heldOut));
    return { after, comparison: await compare(after, this.kept.before) };
  }
}

/** The kept run with its checkpoint, if both are there. */
export async function unfinished() {
  const run = await store.kept();
  const found = run && (await checkpoints.list()).find(({ name }) => name === run.id);
  return run && found ? { run, step: found.step } : undefined;
}

/** Deletes a kept run. */
export async function discard() {
  const run = await store.kept();
  await store.forget();
  if (run) await checkpoints.delete(run.id);
}
