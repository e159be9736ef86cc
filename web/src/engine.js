// The engine behind its calls: the same in a worker and in the thread that calls it.
//
// Objects of the wasm module stay here and are known outside by numbers. Calls are answered one
// after the other, in the order in which they come.

import start, * as wasm from '../elapid.js';
import { bad, exception, plain } from './errors.js';
import * as store from './store.js';

const isNode = typeof process === 'object' && !!process.versions?.node;
/** Milliseconds for which tokens are gathered before they are handed out. */
const GATHER_MS = 20;

/** A trap without a panic: memory that could not be had. */
const NO_MEMORY = {
  code: 'out_of_memory',
  message: 'the memory of wasm is used up',
  hint: 'use a smaller model, batch or context; call `shutdown()` and start again',
};

export class Engine {
  /** `tell(id, value)` hears of progress of the call `id`. */
  constructor(tell) {
    this.tell = tell;
    this.objects = new Map();
    this.last = 0;
    this.queue = Promise.resolve();
    globalThis.addEventListener?.('error', (event) => {
      if (this.isTrap(event.error)) event.preventDefault();
    });
  }

  /** Calls a function by its name, once all calls before it are answered. */
  call(name, args, id) {
    const answer = this.queue.then(() => this.answer(name, args, id));
    this.queue = answer.catch(() => {});
    return answer;
  }

  async answer(name, args, id) {
    if (this.dead) throw exception(this.dead);
    if (!Object.hasOwn(CALLS, name)) throw bad(`there is no call ${name}`, '');
    if (name !== 'init' && !this.module) throw bad('the engine was not started', 'call `init`');
    // A trap inside of a promise of wasm would leave it open forever: the panic hook tells of it,
    // and what nobody caught.
    const stopped = new Promise((_, reject) => {
      this.stop = (dead) => {
        this.dead ??= dead;
        reject(exception(this.dead));
      };
    });
    stopped.catch(() => {});
    globalThis.elapidDefect = (words) => {
      const hint = 'call `shutdown()` and start again; please report it';
      this.stop({ code: 'defect', message: `this is a defect: ${words}`, hint });
    };
    const uncaught = (error) => {
      if (!this.isTrap(error)) throw error;
    };
    if (isNode) process.on('uncaughtException', uncaught);
    try {
      return await Promise.race([CALLS[name].call(this, args ?? {}, id), stopped]);
    } catch (thrown) {
      if (this.isTrap(thrown)) this.dead ??= NO_MEMORY;
      throw exception(this.dead ?? plain(thrown));
    } finally {
      if (isNode) process.off('uncaughtException', uncaught);
      if (this.module && !this.dead) wasm.forgetFiles();
    }
  }

  /** Hears of errors that nobody caught; whether they were wasm's. */
  isTrap(error) {
    if (!(error instanceof WebAssembly.RuntimeError)) return false;
    this.stop?.(NO_MEMORY);
    return true;
  }

  keep(object) {
    this.objects.set(++this.last, object);
    return this.last;
  }

  get(id) {
    const found = this.objects.get(id);
    if (!found) throw bad('it was freed', 'make a new one');
    return found;
  }

  memory(of = {}) {
    return { ...of, wasm: this.module.memory.buffer.byteLength };
  }
}

/** Reads what was given: `{url}`, `{blob}`, `{bytes}`, or `{files: [[name, one of these]]}`. */
async function give(source, prefix, tell) {
  if (source.files) {
    for (const [name, part] of source.files) wasm.giveFile(prefix + name, await bytesOf(part));
  } else {
    wasm.giveFile(prefix + (source.name ?? 'model.gguf'), await bytesOf(source, tell));
  }
}

async function bytesOf(part, tell) {
  if (part.bytes) return part.bytes;
  if (part.blob) return new Uint8Array(await part.blob.arrayBuffer());
  try {
    return await fetched(part.url, tell);
  } catch (cause) {
    const message = `cannot read ${part.url}: ${cause.message}`;
    throw exception({ code: 'read', message, hint: 'check the address, and what the server says' });
  }
}

async function fetched(url, tell) {
  if (isNode && !/^(https?|data|blob):/.test(url)) {
    const { readFile } = await import('node:fs/promises');
    return new Uint8Array(await readFile(url.startsWith('file:') ? new URL(url) : url));
  }
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`the server says ${answer.status} ${answer.statusText}`);
  const all = Number(answer.headers.get('content-length')) || undefined;
  const pieces = [];
  let size = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    pieces.push(value);
    size += value.length;
    tell?.([size, all]);
  }
  const whole = new Uint8Array(size);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

const json = (value) => JSON.stringify(value ?? {});

function opened(engine, model) {
  const tokenizer = model.tokenizer();
  const info = JSON.parse(model.info());
  const of = { id: engine.keep(tokenizer), size: tokenizer.size() };
  return { id: engine.keep({ model, answers: new Map() }), info, tokenizer: of };
}

/** Answers of a model in JavaScript's own words: what was begun, and when. */
function begun(entry, answer) {
  entry.answers.set(answer, { start: performance.now(), first: undefined });
  return answer;
}

function finish(told, answer) {
  const end = performance.now();
  const first = answer.first ?? end;
  const { reason, promptTokens, cachedTokens, tokens } = told;
  const seconds = (end - first) / 1e3;
  return {
    reason, promptTokens, cachedTokens, tokens,
    promptSeconds: (first - answer.start) / 1e3,
    tokensPerSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0,
  };
}

const CALLS = {
  async init({ source }) {
    if (this.module) return;
    let bytes = source;
    if (typeof source === 'string' && source.startsWith('file:')) bytes = await fetched(source);
    this.module = await start({ module_or_path: bytes });
  },

  async devices() {
    return JSON.parse(await wasm.devices());
  },
  async kernels() {
    return JSON.parse(wasm.kernels());
  },

  async load({ source, adapter, name, device }, id) {
    await give(source, '', (value) => this.tell(id, value));
    if (adapter) await give(adapter, 'adapter/');
    return opened(this, await wasm.WebModel.open(name, device));
  },
  async create({ options, texts, tokenizer }) {
    // The engine takes a tokenizer over: it is given a copy.
    let copy;
    if (tokenizer !== undefined) {
      const text = this.get(tokenizer).toJson();
      wasm.giveFile('tokenizer.json', new TextEncoder().encode(text));
      copy = wasm.Vocabulary.open();
    }
    return opened(this, await wasm.WebModel.create(json(options), texts, copy));
  },
  async free({ id }) {
    const object = this.objects.get(id);
    this.objects.delete(id);
    (object?.model ?? object)?.free();
  },

  async begin({ id, kind, args, options }) {
    const entry = this.get(id);
    const { model } = entry;
    const made = {
      generate: () => model.generate(args[0], json(options)),
      chat: () => model.chat(JSON.stringify(args[0]), json(options)),
      fill: () => model.fill(args[0], args[1], json(options)),
      fork: () => model.fork(args[0], args[1], json(options)),
    };
    return begun(entry, await made[kind]());
  },
  async next({ id, answer }) {
    const entry = this.get(id);
    const known = entry.answers.get(answer);
    const tokens = [];
    const until = performance.now() + GATHER_MS;
    while (known) {
      const told = await entry.model.nextToken(answer);
      const event = told === undefined ? { reason: 'end', tokens: 0 } : JSON.parse(told);
      if (event.reason) {
        entry.answers.delete(answer);
        const last = tokens.at(-1);
        // Text that was held back belongs to the last token; alone, it is an item of its own.
        if (event.text && last) last.text += event.text;
        else if (event.text) tokens.push({ id: -1, text: event.text });
        return { tokens, finish: finish(event, known) };
      }
      known.first ??= performance.now();
      tokens.push(event);
      if (performance.now() >= until) break;
    }
    return { tokens };
  },
  async cancel({ id, answer }) {
    const entry = this.objects.get(id);
    entry?.answers.delete(answer);
    entry?.model.cancel(answer);
  },
  async snapshot({ id, prompt }) {
    return { number: await this.get(id).model.snapshot(prompt) };
  },
  async embed({ id, texts }) {
    const list = [];
    for (const text of texts) list.push(await this.get(id).model.embed(text));
    return list;
  },
  async evaluate({ id, names, texts, options }, call) {
    const tell = (done, all) => this.tell(call, [done, all]);
    return JSON.parse(await this.get(id).model.evaluate(names, texts, json(options), tell));
  },
  async compare({ first, second }) {
    return JSON.parse(wasm.compare(json(first), json(second)));
  },
  async save({ id, format, quant }) {
    const list = await this.get(id).model.save(format, quant);
    const files = {};
    for (let at = 0; at < list.length; at += 2) files[list[at]] = list[at + 1];
    return files;
  },

  async beginRun({ id, options, texts, heldOut }) {
    const { model } = this.get(id);
    const found = await model.beginRun(
      json(options), texts.names, texts.texts, heldOut.names, heldOut.texts,
    );
    return JSON.parse(found);
  },
  /** A checkpoint to continue from, if there is one: `[step, isDone, seconds]`. */
  async resume({ id, bytes, name }) {
    const { model } = this.get(id);
    const saved = bytes ?? (name === undefined ? undefined : await store.read(name));
    const seconds = saved ? await model.resume(saved) : 0;
    return [...JSON.parse(model.progress()), seconds];
  },
  async step({ id }) {
    const start = performance.now();
    const made = JSON.parse(await this.get(id).model.stepRun());
    made.seconds = (performance.now() - start) / 1e3;
    made.memory = this.memory(made.memory);
    return made;
  },
  async turn({ id, steps }) {
    this.get(id).model.turn(steps);
  },
  async measureRun({ id }) {
    return JSON.parse(await this.get(id).model.measureRun());
  },
  async checkpoint({ id, elapsed, name }) {
    const bytes = await this.get(id).model.checkpoint(elapsed);
    if (name === undefined) return bytes;
    await store.write(name, bytes);
    return bytes.length;
  },
  async plan({ id }) {
    return JSON.parse(await this.get(id).model.plan());
  },
  async endRun({ id }) {
    this.objects.get(id)?.model.endRun();
  },
  async stored() {
    const list = [];
    for (const entry of await store.list()) {
      list.push({ ...entry, step: stepOf(await store.read(entry.name)) });
    }
    return list;
  },
  async storedBytes({ name }) {
    return store.read(name);
  },
  async forget({ name }) {
    await store.remove(name);
  },

  async tokenizer({ source }) {
    await give(source, '');
    const tokenizer = wasm.Vocabulary.open();
    return { id: this.keep(tokenizer), size: tokenizer.size() };
  },
  async trainTokenizer({ texts, options }) {
    const tokenizer = wasm.Vocabulary.train(texts, json(options));
    return { id: this.keep(tokenizer), size: tokenizer.size() };
  },
  async encode({ id, text, special }) {
    return this.get(id).encode(text, special);
  },
  async decode({ id, ids }) {
    return this.get(id).decode(ids);
  },
  async tokenizerJson({ id }) {
    return this.get(id).toJson();
  },

  async folder() {
    return this.keep(new wasm.Folder());
  },
  async wants({ id, files }) {
    const folder = this.get(id);
    return files.map(([path, bytes]) => folder.wants(path, bytes));
  },
  async addFile({ id, path, bytes, modified }) {
    this.get(id).add(path, bytes, modified);
  },
  async divide({ id, share }) {
    const folder = this.get(id);
    this.objects.delete(id);
    return JSON.parse(folder.divide(share));
  },

  async limbic({ inputs, hidden, seed }) {
    return this.keep(wasm.WebLimbic.create(inputs, hidden, seed));
  },
  async loadLimbic({ source }) {
    return this.keep(wasm.WebLimbic.load(await bytesOf(source)));
  },
  async setPoint({ personality }) {
    return JSON.parse(wasm.setPoint(json(personality)));
  },
  async trainLimbic({ id, samples, options }) {
    return Array.from(this.get(id).train(samples.map(json), json(options)));
  },
  async stepLimbic({ id, state, input, hidden }) {
    const memory = Float32Array.from(hidden ?? []);
    return JSON.parse(this.get(id).step(json(state), Float32Array.from(input), memory));
  },
  async saveLimbic({ id }) {
    return this.get(id).save();
  },

  async golden({ source, device }) {
    await give(source, '');
    return JSON.parse(await wasm.checkGolden(device));
  },
};

/** The step of a checkpoint, as the name of its package says it: `step 12`. */
function stepOf(bytes) {
  const tail = new TextDecoder().decode(bytes?.slice(-4096));
  return Number(/"step (\d+)"/.exec(tail)?.[1] ?? 0);
}
