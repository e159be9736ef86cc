// The files of a folder that a person opened or dropped, before any is read.
//
// Not here: which of them are worth learning; the engine's `select` decides that.

import { ignoredBy } from './ignore.js';

/** @typedef {import('./elapid/index.js').FolderFile} FolderFile */
/** @typedef {{ name: string, reason: string }} LeftOut */
/** @typedef {{ name: string, files: FolderFile[], leftOut: LeftOut[] }} Folder */
/** @typedef {{ path: string, file: () => Promise<File> }} Entry */

// Folders that are not even listed: they may hold more files than everything else. Others of this
// kind are told by the engine.
const PASSED = new Set([
  '.git',
  '.hg',
  '.svn',
  'node_modules',
  '.venv',
  'venv',
  '__pycache__',
  '.tox',
]);
const N_FILES_MAX = 50_000;

/** Whether the browser lets a page open a folder by its own dialog. */
export const hasPicker = 'showDirectoryPicker' in window;

/** Asks for a folder; `undefined` where the person changed their mind. */
export async function pick() {
  try {
    // @ts-ignore: not in TypeScript's library yet
    return fromHandle(await window.showDirectoryPicker({ id: 'elapid-project', mode: 'read' }));
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') return undefined;
    throw error;
  }
}

/** The folder of `<input webkitdirectory>`. @param {FileList} list */
export function fromInput(list) {
  const all = [...list];
  const name = all[0]?.webkitRelativePath.split('/')[0] || 'folder';
  const entries = all.map((file) => ({
    path: (file.webkitRelativePath || file.name).split('/').slice(1).join('/') || file.name,
    file: async () => file,
  }));
  return gather(name, entries, []);
}

/** What was dropped: one folder, or several things under one name. @param {DataTransfer} data */
export async function fromDrop(data) {
  // Both must be taken before anything is waited for.
  const items = [...data.items].filter((item) => item.kind === 'file');
  const roots = items.map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  /** @type {Entry[]} */
  const entries = [];
  /** @type {string[]} */
  const passed = [];
  const only = roots.length === 1 && roots[0].isDirectory;
  for (const root of roots) await walkEntry(root, only ? '' : root.name, entries, passed);
  return gather(only ? roots[0].name : 'dropped files', entries, passed);
}

/** @param {FileSystemDirectoryHandle} handle */
async function fromHandle(handle) {
  /** @type {Entry[]} */
  const entries = [];
  /** @type {string[]} */
  const passed = [];
  /** @type {[string, FileSystemDirectoryHandle][]} */
  const waiting = [['', handle]];
  for (let next = waiting.pop(); next && entries.length < N_FILES_MAX; next = waiting.pop()) {
    const [prefix, dir] = next;
    // @ts-ignore: the iterator is not in TypeScript's library yet
    for await (const child of dir.values()) {
      const path = prefix + child.name;
      if (child.kind === 'file') entries.push({ path, file: () => child.getFile() });
      else if (PASSED.has(child.name)) passed.push(`${path}/`);
      else waiting.push([`${path}/`, child]);
    }
  }
  return gather(handle.name, entries, passed);
}

/**
 * @param {FileSystemEntry} entry
 * @param {string} path
 * @param {Entry[]} entries
 * @param {string[]} passed
 */
async function walkEntry(entry, path, entries, passed) {
  if (entries.length >= N_FILES_MAX) return;
  if (entry.isFile) {
    const one = /** @type {FileSystemFileEntry} */ (entry);
    entries.push({ path, file: () => new Promise((done, failed) => one.file(done, failed)) });
    return;
  }
  if (path && PASSED.has(entry.name)) {
    passed.push(`${path}/`);
    return;
  }
  const reader = /** @type {FileSystemDirectoryEntry} */ (entry).createReader();
  for (;;) {
    // A reader gives a hundred at a time, and nothing at the end.
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (some.length === 0) return;
    for (const child of some) {
      await walkEntry(child, path ? `${path}/${child.name}` : child.name, entries, passed);
    }
  }
}

/**
 * @param {string} name
 * @param {Entry[]} entries
 * @param {string[]} passed
 * @returns {Promise<Folder>}
 */
async function gather(name, entries, passed) {
  const leftOut = passed.map((path) => ({ name: path, reason: 'a folder of packages or of git' }));
  /** @type {FolderFile[]} */
  const files = [];
  const isIgnored = await ignoredBy(entries);
  for (const { path, file } of entries.sort((a, b) => (a.path < b.path ? -1 : 1))) {
    const top = path
      .split('/')
      .slice(0, -1)
      .find((part) => PASSED.has(part));
    if (top) {
      const inside = `${path.slice(0, path.indexOf(`${top}/`))}${top}/`;
      if (leftOut.at(-1)?.name !== inside) {
        leftOut.push({ name: inside, reason: 'a folder of packages or of git' });
      }
    } else if (isIgnored(path)) {
      leftOut.push({ name: path, reason: 'ignored by .gitignore' });
    } else {
      const opened = await file();
      files.push({ path, bytes: opened.size, read: () => opened.arrayBuffer() });
    }
  }
  if (entries.length >= N_FILES_MAX) {
    leftOut.push({ name: '…', reason: `past the first ${N_FILES_MAX} files` });
  }
  return { name, files, leftOut };
}
