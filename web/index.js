// The API of the package: see index.d.ts. Everything here is a message to the engine.

import { call, callUntil, shutdown, started } from './src/client.js';
import { bad } from './src/errors.js';
import { bytes, source, texts } from './src/sources.js';
import { Training, plan } from './src/training.js';
import { zip } from './src/zip.js';

export * from './src/errors.js';
export { shutdown };
export const version = '0.1.0';

export async function init(options) {
  await started(options);
}

export const devices = () => call('devices');
export const kernels = () => call('kernels');

/** Without keys whose values are not set: the engine knows no `undefined`. */
const set = (options) =>
  Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));

const PRIVATE = Symbol('made by a static method');
function guard(key, how) {
  if (key !== PRIVATE) throw bad('this class has no constructor', `use ${how}`);
}

/** Objects that nobody holds any more are freed. */
const forgotten = new FinalizationRegistry((id) => call('free', { id }).catch(() => {}));

class Held {
  #id;
  constructor(id) {
    this.#id = id;
    forgotten.register(this, id, this);
  }
  get id() {
    if (this.#id === undefined) throw bad('it was freed', 'make a new one');
    return this.#id;
  }
  free() {
    if (this.#id === undefined) return;
    forgotten.unregister(this);
    call('free', { id: this.#id }).catch(() => {});
    this.#id = undefined;
  }
}

// ------------------------------------------------------------------------------------- tokenizers

export class Tokenizer {
  #held;
  constructor(key, { id, size }) {
    guard(key, '`Tokenizer.load` or `Tokenizer.train`');
    this.#held = new Held(id);
    this.size = size;
  }
  static async load(given) {
    return new Tokenizer(PRIVATE, await call('tokenizer', { source: source(given) }));
  }
  static async train(given, options = {}) {
    const { texts: list } = await texts(given);
    const args = { texts: list, options: set(options) };
    return new Tokenizer(PRIVATE, await call('trainTokenizer', args));
  }
  /** @internal */
  get handle() {
    return this.#held.id;
  }
  encode(text, { special = false } = {}) {
    return call('encode', { id: this.handle, text, special });
  }
  decode(ids) {
    return call('decode', { id: this.handle, ids: Uint32Array.from(ids) });
  }
  toJSON() {
    return call('tokenizerJson', { id: this.handle });
  }
  free() {
    this.#held.free();
  }
}

// ----------------------------------------------------------------------------------------- models

/** An answer as it is made. */
class Generation {
  /** Held, so that it is not freed before the answer has ended. */
  #model;
  #begun;
  #answer;
  #signal;
  #tokens = [];
  #isOver = false;
  #tail = Promise.resolve();
  finish = undefined;

  constructor(model, kind, args, { signal, stop, ...options } = {}) {
    this.#model = model;
    this.#signal = signal;
    const stops = stop === undefined ? [] : [stop].flat();
    const all = { id: model.handle, kind, args, options: { ...set(options), stop: stops } };
    this.#begun = () => callUntil(signal, 'begin', all);
  }
  [Symbol.asyncIterator]() {
    return this;
  }
  next() {
    const answer = this.#tail.then(() => this.#next());
    this.#tail = answer.catch(() => {});
    return answer;
  }
  async #next() {
    while (!this.#tokens.length && !this.#isOver) {
      try {
        this.#answer ??= await this.#begun();
        this.#signal?.throwIfAborted();
        const args = { id: this.#model.handle, answer: this.#answer };
        const { tokens, finish } = await callUntil(this.#signal, 'next', args);
        this.#tokens.push(...tokens);
        this.finish = finish;
        if (finish) this.#isOver = true;
      } catch (error) {
        this.#cancel();
        throw error;
      }
    }
    const value = this.#tokens.shift();
    return value ? { done: false, value } : { done: true, value: undefined };
  }
  #cancel() {
    if (!this.#isOver && this.#answer !== undefined) {
      call('cancel', { id: this.#model.handle, answer: this.#answer }).catch(() => {});
    }
    this.#isOver = true;
    this.#tokens = [];
  }
  async return() {
    this.#cancel();
    return { done: true, value: undefined };
  }
  async text() {
    let text = '';
    for await (const token of this) text += token.text;
    return text;
  }
}

const TYPES = { gguf: 'application/octet-stream', zip: 'application/zip' };

export class Model {
  #held;
  constructor(key, { id, info, tokenizer }) {
    guard(key, '`Model.load` or `Model.create`');
    this.#held = new Held(id);
    this.info = info;
    this.tokenizer = new Tokenizer(PRIVATE, tokenizer);
  }
  static async load(given, options = {}) {
    const { device = 'auto', adapter, name, onProgress, signal } = options;
    const from = source(given);
    const args = { source: from, name: name ?? from.name, device };
    if (adapter) args.adapter = source(adapter);
    const told = onProgress && (([size, all]) => onProgress(size, all));
    return new Model(PRIVATE, await callUntil(signal, 'load', args, told));
  }
  static async create({ vocabulary, ...options }) {
    if (vocabulary instanceof Tokenizer) {
      const args = { options: set(options), texts: [], tokenizer: vocabulary.handle };
      return new Model(PRIVATE, await call('create', args));
    }
    const { texts: list } = await texts(vocabulary);
    return new Model(PRIVATE, await call('create', { options: set(options), texts: list }));
  }
  /** @internal */
  get handle() {
    return this.#held.id;
  }
  generate(prompt, options) {
    const kind = typeof prompt === 'string' ? 'generate' : 'chat';
    return new Generation(this, kind, [prompt], options);
  }
  fill(prefix, suffix, options) {
    return new Generation(this, 'fill', [prefix, suffix], options);
  }
  async embed(given) {
    const list = await call('embed', { id: this.handle, texts: [given].flat() });
    return Array.isArray(given) ? list : list[0];
  }
  async score(text, options) {
    return (await evaluate(this, [text], options)).texts[0];
  }
  async snapshot(prompt) {
    const { number } = await call('snapshot', { id: this.handle, prompt });
    const tokens = (await this.tokenizer.encode(prompt)).length;
    const generate = (text, options) => new Generation(this, 'fork', [number, text], options);
    return { tokens, generate };
  }
  async files(format = '', { quant } = {}) {
    return call('save', { id: this.handle, format, quant });
  }
  async save(format, options) {
    const files = await this.files(format, options);
    const list = Object.values(files);
    if (list.length === 1) return new Blob(list, { type: TYPES.gguf });
    return new Blob(zip(files), { type: TYPES.zip });
  }
  free() {
    this.#held.free();
    this.tokenizer.free();
  }
}

// --------------------------------------------------------------------------------------- training

export class Trainer {
  #options;
  constructor(model, options = {}) {
    if (!(model instanceof Model)) throw bad('a trainer needs a model', 'load or create one first');
    this.model = model;
    this.#options = { ...options };
  }
  train(given, options) {
    return new Training(this.model, this.#options, given, { ...options });
  }
  plan(given, options) {
    return plan(this.model, this.#options, given, options);
  }
}

export const checkpoints = {
  async list() {
    const all = await call('stored');
    return all.map((entry) => ({ ...entry, modified: new Date(entry.modified) }));
  },
  async get(name) {
    const found = await call('storedBytes', { name });
    return found && new Blob([found]);
  },
  delete: (name) => call('forget', { name }),
};

// -------------------------------------------------------------------------------------- measuring

export async function evaluate(model, given, { onProgress, signal, ...options } = {}) {
  const { names, texts: list } = await texts(given);
  const args = { id: model.handle, names, texts: list, options: set(options) };
  const told = onProgress && (([done, all]) => onProgress(done, all));
  return callUntil(signal, 'evaluate', args, told);
}

export const compare = (first, second) =>
  call('compare', { first: first.texts, second: second.texts });

// -------------------------------------------------------------------------------- files of a folder

/** Files that are looked at in one message. */
const N_TOGETHER = 500;

export async function select(files, { heldOut = 0.1 } = {}) {
  const all = Array.from(files, (file) => {
    if (!(file instanceof Blob)) return file;
    const read = () => file.arrayBuffer();
    const path = file.webkitRelativePath || file.name;
    return { path, bytes: file.size, read, modified: file.lastModified };
  });
  const id = await call('folder');
  for (let at = 0; at < all.length; at += N_TOGETHER) {
    const some = all.slice(at, at + N_TOGETHER);
    const paths = some.map(({ path, bytes: size }) => [path, size]);
    const wanted = await call('wants', { id, files: paths });
    for (const [idx, { path, read, modified }] of some.entries()) {
      if (!wanted[idx]) continue;
      const found = await read();
      const content =
        typeof found === 'string' ? new TextEncoder().encode(found) : await bytes(found);
      await call('addFile', { id, path, bytes: content, modified });
    }
  }
  return call('divide', { id, share: heldOut });
}

// ----------------------------------------------------------------------------------------- limbic

export class Limbic {
  #held;
  constructor(key, id) {
    guard(key, '`Limbic.create` or `Limbic.load`');
    this.#held = new Held(id);
  }
  static async create({ inputs, hidden = 16, seed = 0 }) {
    return new Limbic(PRIVATE, await call('limbic', { inputs, hidden, seed }));
  }
  static async load(given) {
    return new Limbic(PRIVATE, await call('loadLimbic', { source: source(given) }));
  }
  static setPoint(personality = {}) {
    return call('setPoint', { personality });
  }
  async train(samples, options = {}) {
    const whole = samples.map((sample) => ({ reward: 0, ...sample }));
    const args = { id: this.#held.id, samples: whole, options: set(options) };
    return { loss: await call('trainLimbic', args) };
  }
  async step(state, input, hidden) {
    const made = await call('stepLimbic', { id: this.#held.id, state, input, hidden });
    return { ...made, hidden: Float32Array.from(made.hidden) };
  }
  async save() {
    return new Blob([await call('saveLimbic', { id: this.#held.id })]);
  }
  free() {
    this.#held.free();
  }
}

// ------------------------------------------------------------------------------- reference values

export const checkGolden = (files, { device = 'auto' } = {}) =>
  call('golden', { source: source(files), device });
