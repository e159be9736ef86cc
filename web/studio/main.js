// Elapid Studio: ties the parts of the page together.
//
//   format.js   numbers as people read them        folder.js   files of a folder; ignore.js
//   secrets.js  what must not be learned           learn.js    files to a run; store.js keeps it
//   view.js     what is known, as elements         chart.js    the curve
//   editor.js   ghost text                         playground.js   both models beside each other

import { ElapidError, Model, devices, version } from './elapid/index.js';
import { Chart } from './chart.js';
import * as folders from './folder.js';
import { $, duration, many } from './format.js';
import * as learning from './learn.js';
import { Playground } from './playground.js';
import * as view from './view.js';

/** @typedef {import('./store.js').Kept} Kept */

const BASE = 'model/elapid-code-small.gguf';

/** @typedef {import('./elapid/index.js').Plan} Plan */

/** @type {{ folder?: string, chosen?: learning.Chosen, plan?: Plan }} */
let project = {};
/**
 * The base model, which stays as it is, and the one that learns.
 * @type {{ base?: Model, adapted?: Model }}
 */
const models = {};
/** @type {learning.Run | undefined} */
let run;
/** Ends with the run. @type {Promise<void>} */
let running = Promise.resolve();
const chart = new Chart($('chart'));
const playground = new Playground(models);

// ------------------------------------------------------------------------------- what is shown

/** Says what is waited for; nothing where nothing is. @param {string} [words] */
function busy(words) {
  $('busy').hidden = words === undefined;
  $('busy-words').textContent = words ?? '';
}

/** @param {unknown} error */
function fail(error) {
  busy();
  console.error(error);
  const words = error instanceof Error ? error.message : String(error);
  const hint = error instanceof ElapidError && error.hint ? ` ${error.hint}.` : '';
  $('alert').textContent = `${words}.${hint}`.replace(/\.\.+/g, '.');
  $('alert').hidden = false;
  $('alert').scrollIntoView({ block: 'nearest' });
}

/**
 * A handler whose failures are shown.
 * @template {unknown[]} A
 * @param {(...args: A) => unknown} action
 */
function safely(action) {
  return async (/** @type {A} */ ...args) => {
    $('alert').hidden = true;
    try {
      await action(...args);
    } catch (error) {
      fail(error);
    }
  };
}

/** Lets the browser paint what was said before the next wait. */
const painted = () => new Promise((done) => setTimeout(done, 0));

// ------------------------------------------------------------------------------------- a folder

/** @param {Promise<folders.Folder | undefined> | folders.Folder} opening */
async function open(opening) {
  busy('Listing files …');
  const folder = await opening;
  if (!folder) return busy();
  run?.stop();
  run = undefined;
  await running.catch(() => undefined);
  $('device', HTMLSelectElement).disabled = false;
  busy(`Reading ${many(folder.files.length, 'file')} of ${folder.name} …`);
  await painted();
  const chosen = await learning.choose(folder);
  if (chosen.train.length === 0 || chosen.measured.length === 0) {
    throw new Error(
      `There is too little code in ${folder.name} to learn and to measure: ` +
        'open a folder with some files of source code',
    );
  }
  project = { folder: folder.name, chosen };
  for (const id of ['open', 'run', 'result', 'try', 'take']) $(id).hidden = true;
  view.showFolder(folder.name, chosen);
  $('prepare').hidden = false;
  $('folder-title').focus();
  await prepare();
}

/** Loads the model and measures what a run takes. */
async function prepare() {
  const { chosen } = project;
  if (!chosen) return;
  $('learn', HTMLButtonElement).disabled = true;
  view.showPlan(undefined, undefined);
  await loadModels();
  const base = /** @type {Model} */ (models.base);
  busy('Measuring the speed of this machine …');
  project.plan = await learning.plan(/** @type {Model} */ (models.adapted), chosen.train);
  busy();
  view.showPlan(base.info, project.plan);
  showMinutes();
  $('learn', HTMLButtonElement).disabled = false;
  $('try').hidden = false;
  playground.open(chosen.heldOut);
}

/** Loads the base twice: one stays, one learns. */
async function loadModels() {
  const device = /** @type {import('./elapid/index.js').DeviceName} */ (
    $('device', HTMLSelectElement).value
  );
  models.base?.free();
  models.adapted?.free();
  playground.isAdapted = false;
  busy('Loading the base model …');
  const response = await fetch(BASE);
  if (!response.ok) throw new Error(`The base model is missing (${BASE}): build the folder again`);
  const file = await response.arrayBuffer();
  models.base = await Model.load(file.slice(0), { device, name: 'elapid-code-small' });
  models.adapted = await Model.load(file, { device, name: 'elapid-code-small' });
}

function showMinutes() {
  const { plan } = project;
  if (!plan) return;
  const minutes = $('minutes', HTMLInputElement).valueAsNumber;
  $('learn', HTMLButtonElement).disabled = !(minutes > 0);
  if (!(minutes > 0)) {
    $('plan-words').textContent = 'Say how many minutes it may learn.';
    return;
  }
  const steps = learning.stepsIn(plan, minutes);
  const passes = steps / Math.max(1, plan.stepsPerEpoch);
  $('plan-words').textContent =
    `${many(steps, 'step')} in about ${duration(steps * plan.stepSeconds)}: the files are read ` +
    `${passes < 10 ? passes.toFixed(1) : Math.round(passes)} times. ` +
    'You can close the tab and continue later.';
}

// ------------------------------------------------------------------------------------- learning

async function learn() {
  const { chosen, plan, folder } = project;
  const { base, adapted } = models;
  if (!chosen || !plan || !base || !adapted) return;
  // One that has learned before starts again.
  if (playground.isAdapted) await loadModels();
  $('learn', HTMLButtonElement).disabled = true;
  busy('Measuring the base model on held-out files …');
  await learning.discard();
  const begin = performance.now();
  const before = await learning.measure(/** @type {Model} */ (models.base), chosen.measured);
  const evalSeconds = (performance.now() - begin) / 1000;
  const steps = learning.stepsIn(plan, $('minutes', HTMLInputElement).valueAsNumber);
  await start({
    id: `studio-${Date.now()}`,
    folder: folder ?? '',
    train: chosen.train,
    heldOut: chosen.measured,
    device: /** @type {any} */ ($('device', HTMLSelectElement).value),
    steps,
    ...learning.rhythm(steps, plan.stepSeconds, evalSeconds),
    tokensPerByte: plan.tokens / learning.sizeOf(chosen.train),
    before,
    points: [],
    isDone: false,
  });
}

/** Runs what is new or was kept, and shows what came of it. @param {Kept} kept */
async function start(kept) {
  const current = new learning.Run(/** @type {Model} */ (models.adapted), kept);
  run = current;
  playground.pause('The model is learning: suggestions are back when it is paused or done.');
  for (const id of ['result', 'take']) $(id).hidden = true;
  $('run').hidden = false;
  $('run-title').textContent = `Learning ${kept.folder}`;
  $('pause').textContent = 'Pause';
  for (const id of ['pause', 'stop']) $(id, HTMLButtonElement).disabled = false;
  $('run-words').textContent = '';
  // Another device would load the models anew.
  $('device', HTMLSelectElement).disabled = true;
  view.showStep(undefined, kept);
  chart.show(kept.points, kept.steps, kept.before.bitsPerByte);
  busy();
  $('run').scrollIntoView({ block: 'nearest', behavior: 'smooth' });
  try {
    running = current.learn((step) => {
      view.showStep(step, kept);
      if (step.saved) {
        $('run-words').textContent = `Saved at step ${step.step}: you can close the tab.`;
      }
      chart.show(kept.points, kept.steps, kept.before.bitsPerByte);
    });
    await running;
    if (run === current) await finish(current);
  } finally {
    for (const id of ['pause', 'stop']) $(id, HTMLButtonElement).disabled = true;
    $('learn', HTMLButtonElement).disabled = project.plan === undefined;
  }
}

/** @param {learning.Run} done */
async function finish(done) {
  const { kept } = done;
  const last = kept.points.at(-1)?.step ?? 0;
  $('run-title').textContent = `Learned ${kept.folder}`;
  $('run-words').textContent =
    `${many(last, 'step')} of ${kept.steps}. ` +
    (done.isKept
      ? 'The result is kept in this browser until you learn another folder.'
      : 'This browser keeps no files for pages: save the result before you close the tab.');
  busy('Measuring on held-out files …');
  const { after, comparison } = await done.measure();
  busy();
  view.showResult(kept.before, after, comparison);
  view.showDownloads(done.model, kept.folder, BASE, safely);
  playground.isAdapted = true;
  playground.go();
  for (const id of ['result', 'try', 'take']) $(id).hidden = false;
  $('result').scrollIntoView({ block: 'nearest', behavior: 'smooth' });
}

function togglePause() {
  if (!run) return;
  if (run.isPaused) {
    run.go();
    playground.pause('The model is learning: suggestions are back when it is paused or done.');
  } else {
    run.pause();
    playground.isAdapted = true;
    playground.go();
  }
  $('pause').textContent = run.isPaused ? 'Continue' : 'Pause';
  $('run-words').textContent = run.isPaused ? 'Paused after the current step.' : '';
}

// -------------------------------------------------------------------------- a run that was kept

async function offerKept() {
  const found = await learning.unfinished();
  if (!found) return;
  const { run: kept, step } = found;
  const state = step >= kept.steps ? 'has learned' : `was learning (step ${step} of ${kept.steps})`;
  $('kept-words').textContent = `The model ${state} “${kept.folder}” in this browser.`;
  $('kept-go').textContent = step >= kept.steps ? 'Open it' : 'Continue';
  $('kept').hidden = false;
  $('kept-go').onclick = safely(() => resume(kept));
  $('kept-drop').onclick = safely(async () => {
    await learning.discard();
    $('kept').hidden = true;
  });
}

/** @param {Kept} kept */
async function resume(kept) {
  const list = $('device', HTMLSelectElement);
  if ([...list.options].some((option) => option.value === kept.device)) list.value = kept.device;
  $('open').hidden = true;
  await loadModels();
  $('try').hidden = false;
  playground.open(kept.heldOut);
  await start(kept);
}

// ---------------------------------------------------------------------------------------- begin

/** @param {import('./elapid/index.js').DeviceInfo} device */
function nameOf({ id, name, isSoftware }) {
  if (id === 'cpu') return `CPU: ${name.replace(/^cpu, /, '')}`;
  return `GPU: ${name || 'WebGPU'}${isSoftware ? ' (in software)' : ''}`;
}

async function showDevices() {
  const found = await devices();
  const gpu = found.find((device) => device.id === 'webgpu');
  // A GPU in software is slower than the CPU beside it.
  const best = gpu && !gpu.isSoftware ? 'webgpu' : 'cpu';
  const options = found.map((device) => new Option(nameOf(device), device.id));
  $('device', HTMLSelectElement).replaceChildren(...options);
  $('device', HTMLSelectElement).value = best;
  const why = !gpu
    ? 'This browser offers no WebGPU here'
    : 'WebGPU is only emulated in software here';
  $('device-words').textContent =
    best === 'webgpu'
      ? ''
      : `${why}, so the model learns on the CPU, ` +
        'in wasm: slower, with the same result. The plan says how fast.';
}

/** Light or dark, as chosen here or by the system. */
function setUpTheme() {
  const root = document.documentElement;
  try {
    const kept = localStorage.getItem('elapid.theme');
    if (kept) root.dataset.theme = kept;
  } catch {
    // A browser may forbid to keep anything.
  }
  $('theme').addEventListener('click', () => {
    const isDark =
      (root.dataset.theme ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : '')) ===
      'dark';
    root.dataset.theme = isDark ? 'light' : 'dark';
    try {
      localStorage.setItem('elapid.theme', root.dataset.theme);
    } catch {
      // For this visit alone, then.
    }
  });
}

function setUpNetwork() {
  const show = () => ($('network').hidden = navigator.onLine);
  addEventListener('online', show);
  addEventListener('offline', show);
  show();
}

/** Keeps the files of the page for the next time, without a network. */
async function setUpOffline() {
  if (!('serviceWorker' in navigator)) return;
  try {
    const { version: files } = await (await fetch('files.json')).json();
    await navigator.serviceWorker.register(`sw.js?version=${files}`);
  } catch (error) {
    console.warn('not kept for use offline:', error);
  }
}

function setUpFolders() {
  const input = $('input', HTMLInputElement);
  const choose = safely(async () => {
    if (folders.hasPicker) await open(folders.pick());
    else input.click();
  });
  $('pick').addEventListener('click', choose);
  $('other').addEventListener('click', choose);
  input.addEventListener(
    'change',
    safely(async () => {
      if (input.files?.length) await open(folders.fromInput(input.files));
      input.value = '';
    }),
  );
  // A folder may be dropped anywhere.
  const zone = $('drop');
  document.addEventListener('dragover', (event) => {
    event.preventDefault();
    zone.classList.add('over');
  });
  document.addEventListener('dragleave', (event) => {
    if (event.relatedTarget === null) zone.classList.remove('over');
  });
  document.addEventListener('drop', (event) => {
    event.preventDefault();
    zone.classList.remove('over');
    const data = event.dataTransfer;
    if (data && data.items.length > 0) safely(open)(folders.fromDrop(data));
  });
}

addEventListener('unhandledrejection', (event) => fail(event.reason));
setUpTheme();
setUpNetwork();
setUpFolders();
$('minutes').addEventListener('input', showMinutes);
$('learn').addEventListener('click', safely(learn));
$('pause').addEventListener('click', togglePause);
$('stop').addEventListener('click', () => run?.stop());
$('device').addEventListener('change', safely(prepare));
$('version').textContent = `version ${version}`;
safely(async () => {
  await showDevices();
  await offerKept();
  await setUpOffline();
})();
