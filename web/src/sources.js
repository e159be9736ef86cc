// What people give: addresses, bytes, files, texts.

import { absolute } from './client.js';
import { bad } from './errors.js';

const isBytes = (it) => it instanceof ArrayBuffer || ArrayBuffer.isView(it) || it instanceof Blob;

function part(bytes) {
  if (bytes instanceof Blob) return { blob: bytes };
  if (bytes instanceof ArrayBuffer) return { bytes: new Uint8Array(bytes) };
  if (ArrayBuffer.isView(bytes)) {
    return { bytes: new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength) };
  }
  throw bad('this is neither bytes nor a file', 'give a Blob, an ArrayBuffer or a Uint8Array');
}

const last = (path) => String(path).split(/[?#]/)[0].split('/').pop() || 'model';

/** A source as it is sent to the engine, and its name. */
export function source(given) {
  if (typeof given === 'string' || given instanceof URL) {
    return { url: absolute(given), name: last(given) };
  }
  if (isBytes(given)) return { ...part(given), name: given.name ? last(given.name) : 'model.gguf' };
  if (given && typeof given === 'object') {
    const named =
      typeof given[Symbol.iterator] === 'function'
        ? Array.from(given, (file) => [last(file.name), file])
        : Object.entries(given);
    if (named.length === 1) return { ...part(named[0][1]), name: last(named[0][0]) };
    const files = named.map(([name, bytes]) => [last(name), part(bytes)]);
    return { files, name: 'model' };
  }
  throw bad('there is nothing to load', 'give an address, bytes, or files by name');
}

/** Texts and their names: `{names, texts}`. */
export async function texts(given) {
  const list = typeof given === 'string' ? [given] : Array.from(given ?? []);
  const names = [];
  const found = [];
  for (const [idx, it] of list.entries()) {
    if (typeof it === 'string') {
      names.push(`text ${idx + 1}`);
      found.push(it);
    } else if (it instanceof Blob) {
      names.push(it.webkitRelativePath || it.name || `text ${idx + 1}`);
      found.push(await it.text());
    } else if (typeof it?.text === 'string') {
      names.push(String(it.name ?? `text ${idx + 1}`));
      found.push(it.text);
    } else {
      throw bad(`text ${idx + 1} is no text`, 'give texts, {name, text} or files');
    }
  }
  return { names, texts: found };
}

/** Bytes of a Blob or of anything that holds them. */
export async function bytes(given) {
  const { blob, bytes: found } = part(given);
  return blob ? new Uint8Array(await blob.arrayBuffer()) : found;
}
