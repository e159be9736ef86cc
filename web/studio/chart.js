// The curve of a run, by step: bits per byte of held-out text above, of what is learned below. Each
// has a scale of its own, since text that is learned in short pieces with holes is harder to
// predict: what matters is where each of them goes.

const SVG = 'http://www.w3.org/2000/svg';
const MARGIN = { top: 22, right: 14, bottom: 28, left: 50 };
const GAP = 34;
/** Bits per byte that the smallest scale shows. */
const SPAN_MIN = 0.04;

/** @typedef {{ step: number, train: number, held?: number }} Point */
/** @typedef {[step: number, value: number]} Place */

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

/** @param {number} x @param {number} y @param {string} anchor @param {string} text */
const label = (x, y, anchor, text) =>
  shape('text', { class: 'tick', x, y, 'text-anchor': anchor }, text);

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

  /** Where a step is. @param {number} step */
  #x(step) {
    const span = this.place.clientWidth - MARGIN.left - MARGIN.right;
    return MARGIN.left + (step / this.steps) * span;
  }

  draw() {
    const [width, height] = [this.place.clientWidth, this.place.clientHeight];
    if (width < 80 || height < 80) return;
    const smooth = smoothed(this.points.map((point) => point.train));
    /** @type {Place[]} */
    const trained = this.points.map((point, idx) => [point.step, smooth[idx]]);
    /** @type {Place[]} */
    const measured = this.points.flatMap(({ step, held }) =>
      held === undefined ? [] : [/** @type {Place} */ ([step, held])],
    );
    if (this.before !== undefined) measured.unshift([0, this.before]);
    const middle = MARGIN.top + (height - MARGIN.top - MARGIN.bottom - GAP) / 2;
    const bottom = height - MARGIN.bottom;
    const parts = [
      ...this.#panel('held', 'held-out, bits per byte', measured, MARGIN.top, middle),
      ...this.#panel('train', 'training, bits per byte', trained, middle + GAP, bottom),
    ];
    for (const step of ticks(0, this.steps, Math.max(2, Math.floor(width / 110)))) {
      if (!Number.isInteger(step)) continue;
      parts.push(label(this.#x(step), bottom + 20, 'middle', String(step)));
    }
    const near = this.#nearest();
    if (near !== undefined) {
      const x = this.#x(this.points[near].step);
      parts.push(shape('line', { class: 'cross', x1: x, x2: x, y1: MARGIN.top, y2: bottom }));
    }
    this.#tell(near, smooth);
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    this.svg.setAttribute('aria-label', `Bits per byte by step. ${this.#words(smooth, measured)}`);
  }

  /**
   * One line with its scale.
   * @param {'held' | 'train'} name
   * @param {string} title
   * @param {Place[]} list
   * @param {number} top
   * @param {number} bottom
   */
  #panel(name, title, list, top, bottom) {
    const values = list.map(([, value]) => value);
    const centre = list.length > 0 ? (Math.max(...values) + Math.min(...values)) / 2 : 1;
    const span = list.length > 0 ? Math.max(...values) - Math.min(...values) : 0;
    const half = Math.max(SPAN_MIN, 1.25 * span) / 2;
    const [low, high] = [centre - half, centre + half];
    const right = this.place.clientWidth - MARGIN.right;
    /** @param {number} value */
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
    /** @param {string} kind @param {number} value */
    const level = (kind, value) =>
      shape('line', { class: kind, x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) });
    const parts = [shape('text', { class: `name ${name}`, x: MARGIN.left, y: top - 7 }, title)];
    for (const value of ticks(low, high, Math.max(2, Math.floor((bottom - top) / 36)))) {
      const digits = high - low < 0.1 ? 3 : 2;
      parts.push(level('grid', value));
      parts.push(label(MARGIN.left - 8, y(value) + 4, 'end', value.toFixed(digits)));
    }
    if (name === 'held' && this.before !== undefined) {
      parts.push(level('before', this.before), label(right, top - 7, 'end', 'dashed: before'));
    }
    const path = list.map(([step, value]) => `${this.#x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    parts.push(shape('path', { class: name, d: path.length > 0 ? `M${path.join('L')}` : '' }));
    for (const [step, value] of name === 'held' ? list : list.slice(-1)) {
      parts.push(shape('circle', { class: name, cx: this.#x(step), cy: y(value), r: 3.5 }));
    }
    return parts;
  }

  /** @param {number[]} smooth @param {Place[]} measured */
  #words(smooth, measured) {
    const last = this.points.at(-1);
    if (!last) return 'No step was made yet.';
    /** @param {number | undefined} value */
    const say = (value) => value?.toFixed(3) ?? 'not measured';
    return (
      `At step ${last.step} of ${this.steps}: training ${say(smooth.at(-1))}, ` +
      `held-out ${say(measured.at(-1)?.[1])}, before ${say(this.before)}.`
    );
  }

  /** Index of the point under the pointer. */
  #nearest() {
    const at = this.at;
    if (at === undefined || this.points.length === 0) return undefined;
    const far = this.points.map((point) => Math.abs(point.step - at));
    return far.indexOf(Math.min(...far));
  }

  /** @param {number | undefined} near @param {number[]} smooth */
  #tell(near, smooth) {
    this.tip.hidden = near === undefined;
    if (near === undefined) return;
    const { step, held } = this.points[near];
    const measured = held === undefined ? '' : ` · held-out ${held.toFixed(3)}`;
    this.tip.textContent = `step ${step} · training ${smooth[near].toFixed(3)}${measured}`;
    const room = this.place.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(8, Math.min(this.#x(step) + 10, room))}px`;
  }
}
