// The way to the engine: a worker, or the engine itself in this thread.

import { exception } from './errors.js';

const isNode = typeof process === 'object' && !!process.versions?.node;
const WASM = new URL('../elapid_bg.wasm', import.meta.url);

let client;

/** Starts the engine, or waits until it is started. */
export function started(options = {}) {
  client ??= start(options).catch((error) => {
    client = undefined;
    throw error;
  });
  return client;
}

async function start({ wasm = WASM, worker = !isNode && typeof Worker === 'function' }) {
  const made = worker ? await withWorker() : await withoutWorker();
  const source = typeof wasm === 'string' || wasm instanceof URL ? absolute(wasm) : wasm;
  await made.call('init', { source });
  return made;
}

/** An address that means the same in the worker. */
export function absolute(url) {
  const base = globalThis.document?.baseURI ?? globalThis.location?.href;
  return base ? new URL(url, base).href : String(url);
}

async function withoutWorker() {
  const { Engine } = await import('./engine.js');
  const listeners = new Map();
  const engine = new Engine((id, value) => listeners.get(id)?.(value));
  let last = 0;
  return {
    async call(name, args, onProgress) {
      const id = ++last;
      if (onProgress) listeners.set(id, onProgress);
      try {
        return await engine.call(name, args, id);
      } finally {
        listeners.delete(id);
      }
    },
    stop() {},
  };
}

async function withWorker() {
  const worker = isNode
    ? nodeWorker(new (await import('node:worker_threads')).Worker(
        new URL('./node-worker.js', import.meta.url), { execArgv: [] },
      ))
    : new Worker(new URL('./worker.js', import.meta.url), { type: 'module', name: 'elapid' });
  const waiting = new Map();
  let last = 0;
  let dead;
  const stop = (error) => {
    dead = error;
    worker.terminate();
    for (const { reject } of waiting.values()) reject(error);
    waiting.clear();
  };
  worker.onmessage = ({ data: { id, value, error, progress } }) => {
    const call = waiting.get(id);
    if (!call) return;
    if (progress !== undefined) return void call.onProgress?.(progress);
    waiting.delete(id);
    if (error) call.reject(exception(error));
    else call.resolve(value);
  };
  worker.onerror = (event) => {
    const message = `the worker stopped: ${event.message ?? 'its script cannot be loaded'}`;
    const hint = 'serve all files of the package from one place; call `shutdown()` to start again';
    stop(exception({ code: 'defect', message, hint }));
  };
  return {
    call(name, args, onProgress) {
      if (dead) return Promise.reject(dead);
      return new Promise((resolve, reject) => {
        const id = ++last;
        waiting.set(id, { resolve, reject, onProgress });
        worker.postMessage({ id, name, args });
      });
    },
    stop: () => stop(exception({ code: 'input', message: 'the engine was shut down', hint: '' })),
  };
}

/** A worker of node with the manners of a browser's. */
function nodeWorker(worker) {
  const like = {
    postMessage: (message) => worker.postMessage(message),
    terminate: () => void worker.terminate(),
  };
  worker.on('message', (data) => like.onmessage({ data }));
  worker.on('error', (error) => like.onerror(error));
  return like;
}

/** Calls the engine; starts it where it was not. */
export async function call(name, args, onProgress) {
  return (await started()).call(name, args, onProgress);
}

/** The same, until a signal says otherwise. The engine may still finish what it began. */
export async function callUntil(signal, name, args, onProgress) {
  signal?.throwIfAborted();
  if (!signal) return call(name, args, onProgress);
  let stop;
  const stopped = new Promise((_, reject) => {
    stop = () => reject(signal.reason);
    signal.addEventListener('abort', stop, { once: true });
  });
  try {
    return await Promise.race([call(name, args, onProgress), stopped]);
  } finally {
    signal.removeEventListener('abort', stop);
  }
}

/** Ends the engine. */
export function shutdown() {
  client?.then((made) => made.stop(), () => {});
  client = undefined;
}
