// The engine in a worker: calls come as messages, answers go back with their numbers.

import { Engine } from './engine.js';
import { plain } from './errors.js';

const engine = new Engine((id, value) => self.postMessage({ id, progress: value }));

self.onmessage = async ({ data: { id, name, args } }) => {
  try {
    const value = await engine.call(name, args, id);
    self.postMessage({ id, value }, transferable(value));
  } catch (thrown) {
    self.postMessage({ id, error: plain(thrown) });
  }
};

/** Buffers that nobody here needs any more. */
function transferable(value) {
  const list = [];
  const visit = (it) => {
    if (ArrayBuffer.isView(it)) list.push(it.buffer);
    else if (it && typeof it === 'object' && !(it instanceof Blob)) Object.values(it).forEach(visit);
  };
  visit(value);
  return [...new Set(list)];
}
