// Trainers and their runs.

import { call } from './client.js';
import { bad } from './errors.js';
import { Pace } from './pace.js';
import { bytes, texts } from './sources.js';

const STEPS_BETWEEN = 50;

/** Options of the engine: those that are set, and what the run says of its length. */
function engineOptions(options, { steps, epochs }) {
  const all = { ...options, steps, epochs };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== undefined));
}

function check({ steps, epochs, minutes }) {
  const given = { steps, epochs, minutes };
  const set = Object.entries(given).filter(([, value]) => value !== undefined);
  if (set.length !== 1) {
    throw bad('the length of the run is not clear', 'give one of `steps`, `epochs` and `minutes`');
  }
  const [[name, value]] = set;
  const isGood = Number.isFinite(value) && value > 0 && (name !== 'steps' || Number.isInteger(value));
  if (!isGood) throw bad(`\`${name}\` is ${value}`, 'it must be above zero; steps are whole');
}

/** A run of training, made step by step as it is asked for. */
export class Training {
  #model;
  #given;
  #trainer;
  #options;
  #isOver = false;
  #isBegun = false;
  #elapsed = 0;
  #saved = 0;
  #pace;
  #last;
  #tail = Promise.resolve();

  /** A run holds its model: it must not be freed before. */
  constructor(model, trainer, given, options) {
    this.#model = model;
    this.#trainer = trainer;
    this.#given = given;
    this.#options = options;
  }

  get #id() {
    return this.#model.handle;
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  next() {
    // Calls that come at once are answered one after the other.
    const answer = this.#tail.then(() => this.#next());
    this.#tail = answer.catch(() => {});
    return answer;
  }

  async #next() {
    if (this.#isOver) return { done: true, value: undefined };
    try {
      if (!this.#isBegun && (await this.#begin())) return await this.#end();
      if (this.#options.signal?.aborted) {
        await this.#end();
        throw this.#options.signal.reason;
      }
      if (this.#last?.isDone) return await this.#end();
      return { done: false, value: await this.#step() };
    } catch (error) {
      if (!this.#isOver) {
        this.#isOver = true;
        if (this.#isBegun) await call('endRun', { id: this.#id }).catch(() => {});
      }
      throw error;
    }
  }

  /** Whether all steps are made already, by what was resumed. */
  async #begin() {
    const { checkpoint, resume, heldOut, minutes, signal } = this.#options;
    check(this.#options);
    signal?.throwIfAborted();
    const [learned, held] = await Promise.all([texts(this.#given), texts(heldOut ?? [])]);
    this.hasHeldOut = held.texts.length > 0;
    const options = engineOptions(this.#trainer, this.#options);
    await call('beginRun', { id: this.#id, options, texts: learned, heldOut: held });
    this.#isBegun = true;
    const saved = resume && (await bytes(resume));
    const args = { id: this.#id, bytes: saved, name: checkpoint?.name };
    const [step, isDone, elapsed] = await call('resume', args);
    this.#elapsed = elapsed;
    this.#saved = step;
    this.first = step;
    if (minutes) this.#pace = new Pace(60 * minutes);
    this.#pace?.hear(elapsed, step);
    return isDone;
  }

  async #step() {
    const made = await call('step', { id: this.#id });
    const { stepTokens, isDone, ...step } = made;
    this.#elapsed += made.seconds;
    const end = this.#pace?.hear(this.#elapsed, made.step);
    if (end !== undefined) await call('turn', { id: this.#id, steps: end });
    const steps = this.#pace ? this.#pace.end ?? this.#pace.estimate ?? made.step : made.steps;
    this.#last = { ...step, isDone: this.#pace ? made.step >= (this.#pace.end ?? Infinity) : isDone };
    const value = {
      ...step,
      steps,
      tokensPerSecond: stepTokens / made.seconds,
      elapsed: this.#elapsed,
      remaining: Math.max(0, steps - made.step) * (this.#elapsed / made.step),
    };
    await this.#between(value);
    this.last = value;
    return value;
  }

  /** What happens after some of the steps: measuring and saving. */
  async #between(value) {
    const { evalEvery = STEPS_BETWEEN, checkpoint } = this.#options;
    const { isDone } = this.#last;
    if (this.hasHeldOut && (isDone || value.step % evalEvery === 0)) {
      value.heldOut = await call('measureRun', { id: this.#id });
    }
    if (checkpoint && (isDone || value.step - this.#saved >= (checkpoint.every ?? STEPS_BETWEEN))) {
      await this.#save();
      value.saved = true;
    }
  }

  async #save() {
    const { name } = this.#options.checkpoint;
    await call('checkpoint', { id: this.#id, elapsed: this.#elapsed, name });
    this.#saved = this.#last?.step ?? this.#saved;
  }

  async #end() {
    this.#isOver = true;
    if (this.#isBegun) {
      if (this.#options.checkpoint && (this.#last?.step ?? 0) > this.#saved) await this.#save();
      await call('endRun', { id: this.#id });
    }
    return { done: true, value: undefined };
  }

  async return() {
    await this.#tail;
    if (!this.#isOver) await this.#end();
    return { done: true, value: undefined };
  }

  async done() {
    while (!(await this.next()).done);
    return this.last;
  }

  async checkpoint() {
    await this.#tail;
    if (!this.#isBegun || this.#isOver) {
      throw bad('the run is not under way', 'ask between two of its steps');
    }
    const made = await call('checkpoint', { id: this.#id, elapsed: this.#elapsed });
    return new Blob([made], { type: 'application/octet-stream' });
  }
}

/** What a run would need. */
export async function plan(model, trainer, given, options = {}) {
  const id = model.handle;
  const [learned, held] = await Promise.all([texts(given), texts([])]);
  const run = engineOptions(trainer, options);
  const coverage = await call('beginRun', { id, options: run, texts: learned, heldOut: held });
  try {
    const found = await call('plan', { id });
    return { trainedParameters: undefined, ...coverage, documents: learned.texts.length, ...found };
  } finally {
    await call('endRun', { id });
  }
}
