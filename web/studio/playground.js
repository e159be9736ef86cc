// A place in a file that was not learned, and what both models would write there.

import { $ } from './format.js';
import { Editor, complete } from './editor.js';

/** @typedef {import('./elapid/index.js').Model} Model */
/** @typedef {import('./elapid/index.js').TextFile} TextFile */
/** @typedef {'base' | 'adapted'} Which */

/** Longer files are cut for the text area. */
const CHARS_MAX = 60_000;

export class Playground {
  #isAdapted = false;

  /** @param {{ base?: Model, adapted?: Model }} models */
  constructor(models) {
    this.models = models;
    /** @type {TextFile[]} */
    this.files = [];
    /** Why there are no suggestions now. @type {string | undefined} */
    this.paused = undefined;
    this.editor = new Editor(
      $('text', HTMLTextAreaElement),
      $('mirror'),
      (before, after, signal) => this.#suggest(before, after, signal),
      () => this.#clear(),
    );
    $('file').addEventListener('change', () => this.#example());
    $('example').addEventListener('click', () => this.#example());
    for (const which of /** @type {Which[]} */ (['base', 'adapted'])) {
      $(`take-${which}`).addEventListener('click', () =>
        this.editor.insert($(`side-${which}`).textContent ?? ''),
      );
      this.#radio(which).addEventListener('change', () => this.editor.ask());
    }
  }

  /** Whether the model has learned something, so that two can be compared. */
  get isAdapted() {
    return this.#isAdapted;
  }

  set isAdapted(is) {
    if (is && !this.#isAdapted) this.#radio('adapted').checked = true;
    if (!is) this.#radio('base').checked = true;
    this.#radio('adapted').disabled = !is;
    $('figure-adapted').hidden = !is;
    this.#isAdapted = is;
  }

  /** @param {Which} which */
  #radio(which) {
    const found = document.querySelector(`input[name=which][value=${which}]`);
    return /** @type {HTMLInputElement} */ (found);
  }

  /** Shows the first of these files. @param {TextFile[]} files */
  open(files) {
    this.files = files;
    const options = files.map(({ name }, idx) => new Option(name, String(idx)));
    $('file', HTMLSelectElement).replaceChildren(...options);
    this.paused = undefined;
    this.#example();
  }

  /** No suggestions until `go`. @param {string} words */
  pause(words) {
    this.paused = words;
    this.editor.dismiss();
    $('try-words').textContent = words;
  }

  go() {
    this.paused = undefined;
    $('try-words').textContent = '';
    this.editor.ask();
  }

  /** Opens the file at the middle of some line, whose rest is taken away and shown beside. */
  #example() {
    const file = this.files[$('file', HTMLSelectElement).selectedIndex];
    if (!file) return;
    const text = file.text.slice(0, CHARS_MAX);
    const lines = text.split('\n');
    // Lines with enough on them, past the first ones: the model needs something to go by.
    const fit = lines.flatMap((line, idx) => (idx > 3 && line.trim().length > 20 ? [idx] : []));
    const line = fit[Math.floor(Math.random() * fit.length)];
    if (line === undefined) {
      this.truth = '';
      this.editor.open(text, text.length);
    } else {
      const words = [...lines[line].matchAll(/\b\w/g)].map((match) => match.index);
      const column = words[Math.floor(words.length / 2)] ?? lines[line].length;
      const before = [...lines.slice(0, line), lines[line].slice(0, column)].join('\n');
      this.truth = lines[line].slice(column);
      this.editor.open(before + text.slice(before.length + this.truth.length), before.length);
    }
    if (this.truth) $('side-truth').textContent = this.truth;
    this.editor.ask();
  }

  #clear() {
    for (const which of ['base', 'adapted']) {
      $(`side-${which}`).textContent = '';
      $(`take-${which}`, HTMLButtonElement).disabled = true;
    }
    $('side-truth').textContent = '';
  }

  /** @param {string} before @param {string} after @param {AbortSignal} signal */
  async #suggest(before, after, signal) {
    if (this.paused) return '';
    const first = /** @type {Which} */ (this.#radio('adapted').checked ? 'adapted' : 'base');
    const ghost = await this.#ask(first, before, after, signal);
    // The other one only for the comparison; the ghost does not wait for it.
    const other = first === 'base' ? 'adapted' : 'base';
    if (other === 'base' || this.#isAdapted) {
      this.#ask(other, before, after, signal).catch(() => undefined);
    }
    return ghost;
  }

  /**
   * @param {Which} which
   * @param {string} before
   * @param {string} after
   * @param {AbortSignal} signal
   */
  async #ask(which, before, after, signal) {
    const model = this.models[which];
    if (!model) return '';
    const side = $(`side-${which}`);
    side.classList.add('waits');
    const begin = performance.now();
    try {
      const text = await complete(model, before, after, signal);
      if (signal.aborted) return '';
      side.textContent = text;
      $(`take-${which}`, HTMLButtonElement).disabled = text === '';
      const seconds = ((performance.now() - begin) / 1000).toFixed(1);
      $('try-words').textContent =
        text === '' ? 'nothing to insert here' : `suggested in ${seconds} s`;
      return text;
    } finally {
      side.classList.remove('waits');
    }
  }
}
