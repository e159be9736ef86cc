// The curve of a run: bits per byte of what is learned and of what is held out, by step.

const SVG = 'http://www.w3.org/2000/svg';
const MARGIN = { top: 14, right: 16, bottom: 30, left: 46 };

/** @typedef {{ step: number, train: number, held?: number }} Point */

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {string} [text]
 */
function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * Round numbers between two others, about `n` of them.
 * @param {number} low
 * @param {number} high
 * @param {number} n
 */
export function ticks(low, high, n) {
  const rough = (high - low) / n;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough) ?? 10 * power;
  const list = [];
  for (let k = Math.ceil(low / size); k * size <= high + size * 1e-9; k += 1) list.push(k * size);
  return list;
}

/** Each value with those before it, the nearer the more. @param {number[]} values */
export function smoothed(values) {
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    mean = 0.9 * mean + 0.1 * value;
    weight = 0.9 * weight + 0.1;
    return mean / weight;
  });
}

export class Chart {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** @type {Point[]} */
    this.points = [];
    this.steps = 1;
    /** Held-out bits per byte of the base model. @type {number | undefined} */
    this.before = undefined;
    /** Step that the pointer is at. @type {number | undefined} */
    this.at = undefined;
    this.svg = shape('svg', { role: 'img' });
    this.tip = document.createElement('div');
    this.tip.className = 'tip';
    this.tip.hidden = true;
    place.replaceChildren(this.svg, this.tip);
    new ResizeObserver(() => this.draw()).observe(place);
    place.addEventListener('pointermove', (event) => this.#point(event.offsetX));
    place.addEventListener('pointerleave', () => this.#point(undefined));
  }

  /** @param {Point[]} points @param {number} steps @param {number | undefined} before */
  show(points, steps, before) {
    [this.points, this.steps, this.before] = [points, steps, before];
    this.draw();
  }

  /** @param {number | undefined} x */
  #point(x) {
    const span = this.place.clientWidth - MARGIN.left - MARGIN.right;
    this.at = x === undefined ? undefined : ((x - MARGIN.left) / span) * this.steps;
    this.draw();
  }

  draw() {
    const [width, height] = [this.place.clientWidth, this.place.clientHeight];
    if (width < 80 || height < 80) return;
    const smooth = smoothed(this.points.map((point) => point.train));
    const held = this.points.filter((point) => point.held !== undefined);
    const values = [...smooth, ...held.map((point) => point.held ?? 0)];
    if (this.before !== undefined) values.push(this.before);
    if (values.length === 0) values.push(0, 1);
    const pad = Math.max(0.02, 0.12 * (Math.max(...values) - Math.min(...values)));
    const [low, high] = [Math.max(0, Math.min(...values) - pad), Math.max(...values) + pad];
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    /** @param {number} step */
    const x = (step) => MARGIN.left + (step / this.steps) * (right - MARGIN.left);
    /** @param {number} value */
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    /** @param {[number, number][]} list */
    const path = (list) =>
      list.map(([a, b], i) => `${i ? 'L' : 'M'}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join('');
    const parts = [];
    for (const value of ticks(low, high, Math.max(2, Math.floor(height / 60)))) {
      parts.push(
        shape('line', { class: 'grid', x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
      );
      parts.push(
        shape(
          'text',
          { class: 'tick', x: MARGIN.left - 8, y: y(value) + 4, 'text-anchor': 'end' },
          value.toFixed(high - low < 0.2 ? 3 : 2),
        ),
      );
    }
    for (const step of ticks(0, this.steps, Math.max(2, Math.floor(width / 110)))) {
      if (!Number.isInteger(step)) continue;
      parts.push(
        shape(
          'text',
          { class: 'tick', x: x(step), y: bottom + 20, 'text-anchor': 'middle' },
          String(step),
        ),
      );
    }
    if (this.before !== undefined) {
      const line = {
        class: 'before',
        x1: MARGIN.left,
        x2: right,
        y1: y(this.before),
        y2: y(this.before),
      };
      parts.push(shape('line', line));
      parts.push(
        shape(
          'text',
          { class: 'tick', x: right, y: y(this.before) - 6, 'text-anchor': 'end' },
          'held-out before',
        ),
      );
    }
    /** @type {[number, number][]} */
    const trained = this.points.map((point, idx) => [point.step, smooth[idx]]);
    /** @type {[number, number][]} */
    const measured = held.map((point) => [point.step, point.held ?? 0]);
    if (this.before !== undefined) measured.unshift([0, this.before]);
    for (const [name, list] of /** @type {const} */ ([
      ['train', trained],
      ['held', measured],
    ])) {
      parts.push(shape('path', { class: name, d: path(list) }));
    }
    for (const [step, value] of measured) {
      parts.push(shape('circle', { class: 'held', cx: x(step), cy: y(value), r: 3.5 }));
    }
    // Each line is named at its middle.
    for (const [words, name, list] of /** @type {const} */ ([
      ['training', 'train', trained],
      ['held-out', 'held', measured],
    ])) {
      const middle = list[Math.floor(list.length / 2)];
      if (!middle || list.length < 2) continue;
      parts.push(
        shape(
          'text',
          {
            class: `name ${name}`,
            x: x(middle[0]),
            y: y(middle[1]) + (name === 'held' ? 20 : -9),
            'text-anchor': 'middle',
          },
          words,
        ),
      );
    }
    const near = this.#nearest();
    if (near !== undefined) {
      const at = this.points[near];
      parts.push(
        shape('line', {
          class: 'cross',
          x1: x(at.step),
          x2: x(at.step),
          y1: MARGIN.top,
          y2: bottom,
        }),
      );
      parts.push(shape('circle', { class: 'train', cx: x(at.step), cy: y(smooth[near]), r: 3.5 }));
    }
    this.#tell(near, smooth, x);
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    const last = this.points.at(-1);
    /** @param {number | undefined} value */
    const say = (value) => value?.toFixed(3) ?? 'not measured';
    const words = last
      ? `At step ${last.step} of ${this.steps}: training ${say(smooth.at(-1))}, ` +
        `held-out ${say(held.at(-1)?.held)}, before ${say(this.before)}.`
      : 'No step was made yet.';
    this.svg.setAttribute('aria-label', `Bits per byte by step. ${words}`);
  }

  /** Index of the point under the pointer. */
  #nearest() {
    const at = this.at;
    if (at === undefined || this.points.length === 0) return undefined;
    const far = this.points.map((point) => Math.abs(point.step - at));
    return far.indexOf(Math.min(...far));
  }

  /**
   * @param {number | undefined} near
   * @param {number[]} smooth
   * @param {(step: number) => number} x
   */
  #tell(near, smooth, x) {
    this.tip.hidden = near === undefined;
    if (near === undefined) return;
    const { step, held } = this.points[near];
    const measured = held === undefined ? '' : ` · held-out ${held.toFixed(3)}`;
    this.tip.textContent = `step ${step} · training ${smooth[near].toFixed(3)}${measured}`;
    const room = this.place.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(8, Math.min(x(step) + 10, room))}px`;
  }
}
