// Checkpoints: in the origin's private file system, or, in node, in files.
//
// A file is replaced as a whole or not at all: a tab that is closed in the middle of writing leaves
// the one that was there.

import { exception } from './errors.js';

const END = '.elapid';
const isNode = typeof process === 'object' && !!process.versions?.node;

function failed(doing, name, cause) {
  const hint = isNode
    ? 'check the path, the free disk space and the permissions'
    : 'storage may be full or blocked, for example in a private window';
  const code = doing === 'write' ? 'write' : 'read';
  return exception({ code, message: `cannot ${doing} the checkpoint ${name}: ${cause.message}`, hint });
}

async function folder() {
  if (!globalThis.navigator?.storage?.getDirectory) {
    throw new Error('this page has no private file system');
  }
  const root = await navigator.storage.getDirectory();
  return root.getDirectoryHandle('elapid', { create: true });
}

const fileName = (name) => encodeURIComponent(name).replaceAll('*', '%2A') + END;

async function writeOrigin(name, bytes) {
  const dir = await folder();
  const final = fileName(name);
  const target = await dir.getFileHandle(final + '.part', { create: true });
  if (target.createSyncAccessHandle) {
    const handle = await target.createSyncAccessHandle();
    try {
      handle.truncate(0);
      if (handle.write(bytes, { at: 0 }) !== bytes.length) throw new Error('it is cut short');
      handle.flush();
    } finally {
      handle.close();
    }
  } else {
    const stream = await target.createWritable();
    await stream.write(bytes);
    await stream.close();
  }
  await target.move(final);
}

async function writeNode(path, bytes) {
  const fs = await import('node:fs/promises');
  const file = await fs.open(path + '.part', 'w');
  try {
    await file.writeFile(bytes);
    await file.sync();
  } finally {
    await file.close();
  }
  await fs.rename(path + '.part', path);
}

export async function write(name, bytes) {
  try {
    await (isNode ? writeNode(name, bytes) : writeOrigin(name, bytes));
  } catch (cause) {
    throw failed('write', name, cause);
  }
}

/** The bytes, or `undefined` where there are none. */
export async function read(name) {
  try {
    if (isNode) return new Uint8Array(await (await import('node:fs/promises')).readFile(name));
    const file = await (await (await folder()).getFileHandle(fileName(name))).getFile();
    return new Uint8Array(await file.arrayBuffer());
  } catch (cause) {
    if (cause.name === 'NotFoundError' || cause.code === 'ENOENT') return undefined;
    throw failed('read', name, cause);
  }
}

export async function remove(name) {
  try {
    if (isNode) await (await import('node:fs/promises')).rm(name, { force: true });
    else await (await folder()).removeEntry(fileName(name));
  } catch (cause) {
    if (cause.name !== 'NotFoundError') throw failed('remove', name, cause);
  }
}

/** Names, bytes and times (milliseconds); in node those of the current folder. */
export async function list() {
  const found = [];
  if (isNode) {
    const fs = await import('node:fs/promises');
    for (const name of (await fs.readdir('.')).filter((it) => it.endsWith(END))) {
      const facts = await fs.stat(name);
      found.push({ name, bytes: facts.size, modified: facts.mtimeMs });
    }
    return found;
  }
  for await (const [entry, handle] of (await folder()).entries()) {
    if (!entry.endsWith(END)) continue;
    const file = await handle.getFile();
    const name = decodeURIComponent(entry.slice(0, -END.length));
    found.push({ name, bytes: file.size, modified: file.lastModified });
  }
  return found;
}
