// A text area with ghost text: what a model would insert at the cursor, shown there before it is.
//
// The text area itself is transparent but for cursor and selection; a mirror behind it shows the
// same text with the ghost inside. Tab takes the ghost and otherwise leaves the field as usual.

/** Characters around the cursor that a model sees: more is slower and seldom better. */
const BEFORE = 1200;
const AFTER = 300;
const WAIT_MS = 350;
const N_TOK_MAX = 48;

/** @typedef {import('./elapid/index.js').Model} Model */

/**
 * What a model would insert: the rest of a line and, where that is empty, the next one.
 * @param {Model} model
 * @param {string} before
 * @param {string} after
 * @param {AbortSignal} signal
 */
export async function complete(model, before, after, signal) {
  const options = { maxTokens: N_TOK_MAX, temperature: 0, signal };
  const prefix = before.slice(-BEFORE);
  const answer = model.info.canFill
    ? model.fill(prefix, after.slice(0, AFTER), options)
    : model.generate(prefix, options);
  let text = '';
  for await (const token of answer) {
    text += token.text;
    if (/\S[^\n]*\n/.test(text)) break;
  }
  // A small model may say a thing again and again: once is enough.
  const line = text.replace(/(\S[^\n]*)\n[^]*$/, '$1').replace(/(.{8,}?)\1[^]*$/, '$1');
  return line.trimEnd();
}

export class Editor {
  /**
   * @param {HTMLTextAreaElement} area
   * @param {HTMLElement} mirror
   * @param {(before: string, after: string, signal: AbortSignal) => Promise<string>} suggest
   *   The ghost for a place; it may report on its own what else it found.
   * @param {() => void} onChange Called where the text around the cursor changed.
   */
  constructor(area, mirror, suggest, onChange) {
    this.area = area;
    this.mirror = mirror;
    this.suggest = suggest;
    this.onChange = onChange;
    this.ghost = '';
    /** @type {AbortController | undefined} */
    this.running = undefined;
    /** @type {number | undefined} */
    this.timer = undefined;
    area.addEventListener('input', () => this.#changed());
    area.addEventListener('scroll', () => this.#scroll());
    area.addEventListener('keydown', (event) => this.#key(event));
    area.addEventListener('blur', () => this.#cancel());
    document.addEventListener('selectionchange', () => {
      // The cursor moved away from the ghost.
      if (document.activeElement === area && area.selectionEnd !== this.place) this.dismiss();
    });
    this.place = 0;
  }

  /**
   * Shows a text with the cursor at a place.
   * @param {string} text
   * @param {number} at
   */
  open(text, at) {
    this.#cancel();
    this.area.value = text;
    this.area.setSelectionRange(at, at);
    this.place = at;
    this.ghost = '';
    this.#draw();
    // The cursor in the middle.
    const ghost = /** @type {HTMLElement} */ (this.mirror.querySelector('.ghost'));
    this.area.scrollTop = ghost.offsetTop - this.area.clientHeight / 2;
    this.area.scrollLeft = ghost.offsetLeft - this.area.clientWidth / 2;
    this.#scroll();
    this.onChange();
  }

  /** Asks for a ghost now. */
  async ask() {
    this.#cancel();
    const { value, selectionEnd } = this.area;
    const running = new AbortController();
    this.running = running;
    this.place = selectionEnd;
    try {
      const ghost = await this.suggest(
        value.slice(0, selectionEnd),
        value.slice(selectionEnd),
        running.signal,
      );
      if (running.signal.aborted) return;
      this.ghost = ghost;
      this.#draw();
    } catch (error) {
      if (!running.signal.aborted) throw error;
    }
  }

  /** Inserts a text at the cursor, as if typed: it can be undone. @param {string} text */
  insert(text) {
    this.dismiss();
    this.area.focus();
    if (!document.execCommand('insertText', false, text))
      this.area.setRangeText(text, this.place, this.place, 'end');
    this.place = this.area.selectionEnd;
    this.#draw();
  }

  dismiss() {
    this.#cancel();
    if (this.ghost === '') return;
    this.ghost = '';
    this.#draw();
  }

  #cancel() {
    clearTimeout(this.timer);
    this.running?.abort();
    this.running = undefined;
  }

  #changed() {
    const typed = this.area.value.slice(this.place, this.area.selectionEnd);
    // Typing along the ghost keeps what is left of it.
    this.ghost = typed !== '' && this.ghost.startsWith(typed) ? this.ghost.slice(typed.length) : '';
    this.place = this.area.selectionEnd;
    this.#draw();
    if (this.ghost !== '') return;
    this.#cancel();
    this.onChange();
    this.timer = setTimeout(() => this.ask(), WAIT_MS);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key === ' ' && event.ctrlKey) {
      event.preventDefault();
      this.ask();
    } else if (event.key === 'Tab' && !event.shiftKey && this.ghost !== '') {
      event.preventDefault();
      this.insert(this.ghost);
    } else if (event.key === 'Escape') {
      this.dismiss();
    }
  }

  #draw() {
    const { value } = this.area;
    const ghost = document.createElement('span');
    ghost.className = 'ghost';
    ghost.textContent = this.ghost;
    // A last line that is empty has no height without a character.
    this.mirror.replaceChildren(value.slice(0, this.place), ghost, `${value.slice(this.place)}\n `);
  }

  #scroll() {
    this.mirror.scrollTop = this.area.scrollTop;
    this.mirror.scrollLeft = this.area.scrollLeft;
  }
}
