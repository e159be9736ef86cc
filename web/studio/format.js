// Numbers as people read them, and the few helpers that build elements.

/** @param {number} n */
export function bytes(n) {
  const units = ['bytes', 'kB', 'MB', 'GB'];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${unit > 0 && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

/** @param {number} n */
export function count(n) {
  if (n < 1000) return String(Math.round(n));
  return n < 1e6 ? `${(n / 1e3).toFixed(n < 1e4 ? 1 : 0)} k` : `${(n / 1e6).toFixed(1)} M`;
}

/** @param {number} n @param {string} noun */
export const many = (n, noun) => `${n.toLocaleString('en')} ${noun}${n === 1 ? '' : 's'}`;

/** @param {number} seconds */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${String(s % 60).padStart(2, '0')} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, '0')} m`;
}

/** Bits per byte. @param {number} x */
export const bits = (x) => x.toFixed(3);

/** A difference with its sign. @param {number} x */
export const signed = (x) => `${x < 0 ? '−' : '+'}${Math.abs(x).toFixed(3)}`;

/** @param {number} x */
export const percent = (x) => `${(100 * x).toFixed(1)}%`;

/**
 * The element with this id, which the page has.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} [type]
 * @returns {T}
 */
export function $(id, type) {
  const found = document.getElementById(id);
  if (!found || (type && !(found instanceof type))) throw new Error(`no element ${id}`);
  return /** @type {T} */ (found);
}

/**
 * A new element. What a file or a model says is put in as text, never as HTML.
 * @param {string} tag
 * @param {Record<string, string>} attributes
 * @param {...(Node | string)} children
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
