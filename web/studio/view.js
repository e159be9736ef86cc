// What is known of a folder, a plan, a step and a result, as elements of the page.

import { STEP_TOKENS, sizeOf } from './learn.js';
import { $, bits, bytes, count, duration, element, many, percent, signed } from './format.js';

/** @typedef {import('./elapid/index.js').Evaluation} Evaluation */

const N_COLORS = 6;
const N_PATHS = 200;

/** @param {string} name @param {import('./learn.js').Chosen} chosen */
export function showFolder(name, chosen) {
  $('folder-title').textContent = name;
  showLanguages(chosen.languages);
  $('n-train').textContent = `${many(chosen.train.length, 'file')}, ${bytes(sizeOf(chosen.train))}`;
  $('n-held').textContent =
    `${many(chosen.heldOut.length, 'file')}, ${bytes(sizeOf(chosen.heldOut))}`;
  $('n-masked').textContent = chosen.masked === 0 ? 'nothing found' : many(chosen.masked, 'secret');
  $('held-words').textContent =
    `Held-out files are never learned. ${bytes(sizeOf(chosen.measured))} of ` +
    `${many(chosen.measured.length, 'file')} are measured before and after.`;
  $('held-list').replaceChildren(...chosen.heldOut.map((file) => element('li', {}, file.name)));
  showLeftOut(chosen.leftOut);
}

/** @param {{ language: string, files: number, bytes: number }[]} languages */
function showLanguages(languages) {
  const all = languages.reduce((sum, one) => sum + one.bytes, 0);
  const files = languages.reduce((sum, one) => sum + one.files, 0);
  $('folder-words').textContent =
    `${many(files, 'file')} in ${many(languages.length, 'language')}, ${bytes(all)}`;
  const shown = languages.slice(0, N_COLORS);
  const rest = languages.slice(N_COLORS);
  if (rest.length > 0) {
    const sum = { files: 0, bytes: 0 };
    for (const one of rest) [sum.files, sum.bytes] = [sum.files + one.files, sum.bytes + one.bytes];
    shown.push({ language: `${rest.length} more`, ...sum });
  }
  const parts = shown.map((one, idx) => {
    const part = element('span', { class: `k${idx}` });
    part.style.flexGrow = String(one.bytes / all);
    return part;
  });
  $('languages-bar').replaceChildren(...parts);
  $('languages-bar').setAttribute(
    'aria-label',
    shown.map((one) => `${one.language} ${percent(one.bytes / all)}`).join(', '),
  );
  $('languages').replaceChildren(
    ...shown.map((one, idx) =>
      element(
        'li',
        {},
        element('i', { class: `k${idx}` }),
        element('b', {}, one.language),
        ` ${many(one.files, 'file')}, ${bytes(one.bytes)}`,
      ),
    ),
  );
}

/** By reason, most first. @param {{ name: string, reason: string }[]} leftOut */
function showLeftOut(leftOut) {
  $('left-details').hidden = leftOut.length === 0;
  $('left-summary').textContent = `Left out: ${many(leftOut.length, 'file')}`;
  /** @type {Map<string, string[]>} */
  const reasons = new Map();
  for (const { name, reason } of leftOut) {
    // Copies name the file that is kept: one line for all of them.
    const kind = reason.replace(/^((?:nearly )?the same as) .*/, '$1 another file');
    reasons.set(kind, [
      ...(reasons.get(kind) ?? []),
      kind === reason ? name : `${name}: ${reason}`,
    ]);
  }
  const lists = [...reasons]
    .sort((a, b) => b[1].length - a[1].length)
    .map(([reason, names]) => {
      const more =
        names.length > N_PATHS ? [element('li', {}, `and ${names.length - N_PATHS} more`)] : [];
      return element(
        'details',
        {},
        element('summary', {}, reason, element('span', { class: 'n' }, String(names.length))),
        element(
          'ul',
          { class: 'paths' },
          ...names.slice(0, N_PATHS).map((name) => element('li', {}, name)),
          ...more,
        ),
      );
    });
  $('left-list').replaceChildren(...lists);
}

/**
 * @param {import('./elapid/index.js').ModelInfo | undefined} info
 * @param {import('./elapid/index.js').Plan | undefined} plan
 */
export function showPlan(info, plan) {
  /** @type {[string, string][]} */
  const facts = [];
  if (info && plan) {
    const share = percent(plan.trainedParameters / plan.parameters);
    const device = info.device.id === 'cpu' ? 'this CPU, in wasm' : info.device.name;
    facts.push(
      ['model', `${info.name}, ${count(info.parameters)} parameters`],
      ['trained', `${count(plan.trainedParameters)} parameters (${share}): an adapter`],
      ['text', `${count(plan.tokens)} tokens in ${many(plan.documents, 'file')}`],
      ['speed', `${count(STEP_TOKENS / plan.stepSeconds)} tokens per second on ${device}`],
      ['memory', `about ${bytes(plan.memory.sum)}`],
    );
  }
  const rows = facts.map(([name, value]) =>
    element('div', {}, element('dt', {}, name), element('dd', {}, value)),
  );
  $('plan').replaceChildren(...rows);
  if (!plan) $('plan-words').textContent = '';
}

/**
 * @param {import('./elapid/index.js').Step | undefined} step
 * @param {import('./store.js').Kept} kept
 */
export function showStep(step, kept) {
  const last = kept.points.at(-1);
  const held = kept.points.findLast((point) => point.held !== undefined)?.held;
  const progress = $('progress', HTMLProgressElement);
  progress.max = kept.steps;
  progress.value = last?.step ?? 0;
  $('s-step').textContent = `${last?.step ?? 0} of ${kept.steps}`;
  $('s-train').textContent = last ? bits(last.train) : '–';
  $('s-held').textContent = bits(held ?? kept.before.bitsPerByte);
  $('s-left').textContent = step ? duration(step.remaining) : '–';
  $('s-speed').textContent = step ? count(step.tokensPerSecond) : '–';
  const memory = step && Math.max(step.memory.wasm, step.memory.reserved);
  $('s-memory').textContent = memory ? bytes(memory) : '–';
}

const VERDICTS = {
  better: 'Better',
  worse: 'Worse',
  same: 'No difference',
  unknown: 'Too little text to tell',
};

/**
 * @param {Evaluation} before
 * @param {Evaluation} after
 * @param {import('./elapid/index.js').Comparison} comparison
 */
export function showResult(before, after, comparison) {
  $('verdict').textContent = VERDICTS[comparison.verdict];
  $('verdict').className = comparison.verdict;
  // The sentence begins with the verdict, which stands beside it.
  const words = comparison.sentence.replace(/^\w+: /, '');
  $('verdict-words').textContent = words.charAt(0).toUpperCase() + words.slice(1);
  $('r-before').textContent = bits(before.bitsPerByte);
  $('r-after').textContent = bits(after.bitsPerByte);
  $('r-top1').textContent = `${percent(before.top1)} → ${percent(after.top1)}`;
  const changes = before.texts.map((text, idx) => after.texts[idx].bitsPerByte - text.bitsPerByte);
  const widest = Math.max(...changes.map(Math.abs), 1e-9);
  const rows = before.texts.map((text, idx) => {
    const change = changes[idx];
    const bar = element('i', { class: change < 0 ? 'gain' : 'loss' });
    bar.style.width = `${(50 * Math.abs(change)) / widest}%`;
    return element(
      'tr',
      {},
      element('th', { scope: 'row' }, text.name),
      element('td', {}, bits(text.bitsPerByte)),
      element('td', {}, bits(after.texts[idx].bitsPerByte)),
      element('td', {}, element('span', { class: 'change' }, bar), signed(change)),
    );
  });
  $('texts').replaceChildren(...rows);
}

/**
 * What the result can be saved as: a title, for whom, how it is used, its form and its file.
 * @param {string} name
 * @returns {[string, string, string, import('./elapid/index.js').SaveFormat, string, string?][]}
 */
const forms = (name) => [
  [
    'Model, GGUF',
    'for Elapid and llama.cpp',
    `elapid serve ${name}.gguf`,
    'gguf',
    `${name}.gguf`,
    'q8_0',
  ],
  [
    'Model, safetensors',
    'for transformers',
    `unzip ${name}.zip -d ${name}`,
    'safetensors',
    `${name}.zip`,
  ],
  [
    'Adapter, PEFT',
    'for Elapid and transformers',
    `elapid serve elapid-code-small.gguf --adapter ${name}-adapter`,
    'adapter',
    `${name}-adapter.zip`,
  ],
  [
    'Adapter, GGUF',
    'for llama.cpp',
    `llama-server -m elapid-code-small.gguf --lora ${name}-lora.gguf`,
    'adapter-gguf',
    `${name}-lora.gguf`,
  ],
];

/**
 * @param {import('./elapid/index.js').Model} model
 * @param {string} folder
 * @param {string} base Address of the base model.
 * @param {(action: () => unknown) => () => Promise<void>} safely
 */
export function showDownloads(model, folder, base, safely) {
  const name = folder.replace(/[^\w.-]+/g, '-').replace(/^[-.]+|-+$/g, '') || 'adapted';
  const items = forms(name).map(([title, whom, use, format, file, quant]) => {
    const button = element('button', { type: 'button' }, 'Save');
    button.setAttribute('aria-label', `Save: ${title}, ${whom}`);
    button.addEventListener(
      'click',
      safely(async () => {
        $('take-words').textContent = `Writing ${file} …`;
        const blob = await model.save(format, quant ? { quant } : undefined);
        save(URL.createObjectURL(blob), file);
        $('take-words').textContent = `${file}: ${bytes(blob.size)}`;
      }),
    );
    return element(
      'li',
      {},
      element('b', {}, title),
      element('span', { class: 'quiet' }, whom),
      element('code', {}, use),
      button,
    );
  });
  const link = element('button', { type: 'button' }, 'Save');
  link.setAttribute('aria-label', 'Save: the base model');
  link.addEventListener('click', () => save(base, 'elapid-code-small.gguf'));
  items.push(
    element(
      'li',
      {},
      element('b', {}, 'Base model'),
      element('span', { class: 'quiet' }, 'what the adapters belong to'),
      element('code', {}, 'elapid-code-small.gguf'),
      link,
    ),
  );
  $('downloads').replaceChildren(...items);
}

/** @param {string} href @param {string} file */
function save(href, file) {
  element('a', { href, download: file }).click();
  if (href.startsWith('blob:')) setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
