// Elapid Studio in a real browser: a folder learned end to end by clicking, without a network.
//
// Needs the built package (web/build), a built `elapid` and Chromium; what is missing is named.
// Pictures of the page are left in target/studio-shots to be looked at.

import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import * as fs from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { Browser, chromium } from './browser.mjs';
import { Person } from './person.js';

const ROOT = fileURLToPath(new URL('../..', import.meta.url));
const TARGET = process.env.CARGO_TARGET_DIR ?? join(ROOT, 'target');
const PACKAGE = process.env.ELAPID_PACKAGE ?? join(ROOT, 'web');
const MODEL = join(ROOT, 'models/elapid-code-small.gguf');
const SHOTS = join(TARGET, 'studio-shots');
const BINARY = ['release', 'debug']
  .map((kind) => join(TARGET, kind, 'elapid'))
  .filter((path) => fs.existsSync(path))
  .sort((a, b) => fs.statSync(b).mtimeMs - fs.statSync(a).mtimeMs)[0];

/** Seconds for a step of learning or measuring on a busy machine. */
const LONG = 300;

const missing = [
  [chromium, 'Chromium'],
  [fs.existsSync(join(PACKAGE, 'elapid_bg.wasm')), 'built package (web/build)'],
  [BINARY, 'binary elapid (cargo build)'],
].flatMap(([there, name]) => (there ? [] : [name]));
const options = { skip: missing.length > 0 && `skip: no ${missing.join(', no ')}` };

let scratch;

before(() => {
  if (missing.length > 0) return;
  scratch = fs.mkdtempSync(join(tmpdir(), 'elapid-studio-'));
  fs.mkdirSync(SHOTS, { recursive: true });
  execFileSync(join(ROOT, 'web/build-studio'), [join(scratch, 'studio')], { stdio: 'ignore' });
  makeProject(join(scratch, 'shop'));
});

after(() => scratch && fs.rmSync(scratch, { recursive: true }));

/** A small project: some files of ours, and one of each kind that is not learned. */
function makeProject(dir) {
  for (const name of ['src', 'out', 'node_modules/left-pad']) {
    fs.mkdirSync(join(dir, name), { recursive: true });
  }
  const source = join(ROOT, 'crates/elapid-cli/src/report');
  for (const name of fs.readdirSync(source).filter((name) => name.endsWith('.rs'))) {
    fs.copyFileSync(join(source, name), join(dir, 'src', name));
  }
  const mail = ['first.last', 'somewhere.de'].join('@');
  const files = {
    '.env': 'PASSWORD=1\n',
    '.gitignore': '/out\n',
    'out/a.rs': 'fn a() {}\n',
    'Cargo.lock': '# lock\n',
    'logo.png': '\x89PNG',
    'node_modules/left-pad/index.js': 'module.exports = 1;\n',
    'src/who.rs': `// Written by ${mail}\npub const WHO: &str = "somebody";\n`,
  };
  for (const [name, text] of Object.entries(files)) fs.writeFileSync(join(dir, name), text);
}

/** A server, a browser with a profile of its own, and a way to have people in it. */
async function world(context) {
  const flags = ['--port', '0', '--json', '--studio', join(scratch, 'studio')];
  const server = spawn(BINARY, ['serve', MODEL, ...flags], { stdio: ['ignore', 'pipe', 'ignore'] });
  const line = await new Promise((done) => server.stdout.once('data', done));
  const { url } = JSON.parse(line.toString());
  const browser = await Browser.start();
  context.after(async () => {
    // In peace, so that nobody writes into the profile any more.
    await Promise.race([browser.send('Browser.close'), browser.ended]);
    await browser.ended;
    await browser.close();
    server.kill();
  });
  const visit = async (settings = {}) => {
    // The dialog of the File System Access API cannot be answered here: the other way in is used.
    const script = 'delete window.showDirectoryPicker;';
    const person = await Person.visit(browser, `${url}/studio/`, { script, ...settings });
    await person.wait(() => document.querySelector('#device').options.length > 0);
    return person;
  };
  return { url, server, visit };
}

async function openFolder(person, opens = () => person.click('#pick')) {
  await person.chooseFolder(join(scratch, 'shop'), opens);
  await person.see('#learn:enabled', LONG);
}

async function hasGhost(person) {
  await person.wait(() => document.querySelector('.ghost')?.textContent, { seconds: LONG });
  return person.ask(() => document.querySelector('.ghost').textContent);
}

test('a folder is learned by clicking, with the network cut', options, async (context) => {
  const { url, server, visit } = await world(context);
  const person = await visit();
  await person.picture(join(SHOTS, 'open.png'));
  await person.wait(() => navigator.serviceWorker.controller?.state === 'activated');
  server.kill();
  await new Promise((done) => server.once('exit', done));
  await person.go(`${url}/studio/`);
  await person.wait(() => document.querySelector('#device').options.length > 0);
  await openFolder(person);
  await showsFolder(person);
  await person.picture(join(SHOTS, 'plan.png'));

  await person.fill('#minutes', '0.1');
  await person.click('#learn');
  await person.wait(() => document.querySelector('#progress').value >= 2, { seconds: LONG });
  await person.picture(join(SHOTS, 'learning.png'));
  await person.see('#result', LONG);
  const [was, is] = [await person.text('r-before'), await person.text('r-after')];
  assert.match(was, /^\d\.\d{3}$/);
  assert.notEqual(was, is);
  assert.match(await person.text('verdict'), /Better|Worse|No difference|Too little/);
  assert.match(await person.text('verdict-words'), /bits per byte|too little/);
  await person.wait(() => document.querySelector('#side-adapted').textContent, { seconds: LONG });
  await person.wait(() => document.querySelector('#side-base').textContent, { seconds: LONG });
  await person.picture(join(SHOTS, 'result.png'));
  await saves(person);

  const others = person.page.requests.filter((it) => !it.startsWith(`${url}/studio/`));
  assert.deepEqual(
    others.filter((it) => !it.startsWith('blob:')),
    [],
    'requests to others',
  );
  assert.deepEqual(person.problems, []);

  // What was learned is there again after the tab was closed.
  await person.leave();
  const again = await visit();
  await again.see('#kept');
  assert.match(await again.text('kept-words'), /has learned “shop”/);
  await again.click('#kept-go');
  await again.see('#result', LONG);
  assert.equal(await again.text('r-after'), is, 'the same model to the last digit shown');
});

async function showsFolder(person) {
  assert.equal(await person.text('folder-title'), 'shop');
  assert.match(await person.text('languages'), /Rust/);
  assert.match(await person.text('n-masked'), /1 secret/);
  const left = await person.ask(() => document.querySelector('#left-list').textContent);
  const names = ['.env', 'Cargo.lock', 'logo.png', 'node_modules/', 'out/a.rs'];
  for (const part of [...names, 'ignored by .gitignore', 'may hold keys or passwords']) {
    assert.ok(left.includes(part), `${part} in ${left}`);
  }
  assert.match(await person.text('plan'), /tokens per second/);
}

/** What is downloaded is used by the program: adapters on the base, models alone. */
async function saves(person) {
  const titles = ['Model, GGUF', 'Model, safetensors', 'Adapter, PEFT', 'Adapter, GGUF'];
  const answers = [];
  for (const title of titles) {
    const click = () => person.click(`[aria-label^="Save: ${title}"]`);
    const name = await person.download(scratch, click, LONG);
    const file = join(scratch, title.includes('GGUF') ? `${name}.gguf` : `${name}.zip`);
    fs.renameSync(join(scratch, name), file);
    const path = file.endsWith('.zip') ? join(scratch, name) : file;
    if (path !== file) execFileSync('python3', ['-m', 'zipfile', '-e', file, path]);
    const models = title.startsWith('Adapter') ? [MODEL, '--adapter', path] : [path];
    const prompt = ['-p', 'pub fn ', '-n', '12', '--temperature', '0', '--quiet'];
    answers.push(execFileSync(BINARY, ['generate', ...models, ...prompt], { encoding: 'utf8' }));
  }
  assert.ok(answers[0].trim() !== '', 'an answer');
  assert.equal(answers[2], answers[3], 'both forms of the adapter');
}

test(
  'ghost text is taken by Tab, dismissed by Esc, asked for by keys',
  options,
  async (context) => {
    const { visit } = await world(context);
    const person = await visit();
    await openFolder(person);
    const text = 'fn largest(list: &[i32]) -> i32 {\n    let mut largest = list[0];\n    for ';
    await person.fill('#text', text);
    const first = await hasGhost(person);
    await person.picture(join(SHOTS, 'ghost.png'));
    await person.press('Escape');
    assert.equal(await person.ask(() => document.querySelector('.ghost').textContent), '');
    await person.press(' ', { control: true });
    assert.equal(await hasGhost(person), first, 'greedy: the same place, the same text');
    // Typing along the ghost keeps the rest of it.
    await person.type(first[0]);
    assert.equal(await hasGhost(person), first.slice(1));
    await person.press('Tab');
    assert.equal(await person.ask(() => document.querySelector('#text').value), text + first);
    // Without a ghost Tab leaves the field: nobody is caught in it.
    await person.press('Escape');
    await person.press('Tab');
    assert.notEqual(await person.ask(() => document.activeElement.id), 'text');
  },
);

test('a tab closed in the middle of a run continues where it was', options, async (context) => {
  const { visit } = await world(context);
  const person = await visit();
  await openFolder(person);
  await person.fill('#minutes', '3');
  await person.click('#learn');
  const isSaved = () => document.querySelector('#run-words').textContent.includes('Saved at step');
  await person.wait(isSaved, { seconds: LONG });
  await person.leave();
  const again = await visit();
  await again.see('#kept');
  const step = Number(/step (\d+) of/.exec(await again.text('kept-words'))?.[1]);
  assert.ok(step > 0, 'a step that was kept');
  await again.click('#kept-go');
  const isPast = (kept) => document.querySelector('#progress').value > kept;
  await again.wait(isPast, { args: [step], seconds: LONG });
  await again.click('#pause');
  await again.wait(() => document.querySelector('#run-words').textContent.includes('Paused'));
  await again.click('#pause');
  await again.click('#stop');
  await again.see('#result', LONG);
});

test('a folder may be dropped', options, async (context) => {
  const { visit } = await world(context);
  const person = await visit();
  await person.dropFolder(join(scratch, 'shop'), 600, 450);
  await person.see('#learn:enabled', LONG);
  await showsFolder(person);
});

test('a folder may be opened by the File System Access API', options, async (context) => {
  const { visit } = await world(context);
  // A real handle, of a folder that a test can make.
  const script = `window.showDirectoryPicker = async () => {
    const origin = await navigator.storage.getDirectory();
    const root = await origin.getDirectoryHandle('yard', { create: true });
    const lib = await root.getDirectoryHandle('lib', { create: true });
    for (let n = 0; n < 10; n += 1) {
      const file = await lib.getFileHandle('file-' + n + '.py', { create: true });
      const stream = await file.createWritable();
      const lines = Array.from({ length: 60 }, (_, k) => 'value_' + n + '_' + k + ' = ' + k * n);
      await stream.write(lines.join('\\n'));
      await stream.close();
    }
    return root;
  };`;
  const person = await visit({ script });
  await person.click('#pick');
  await person.see('#prepare', LONG);
  assert.equal(await person.text('folder-title'), 'yard');
  assert.match(await person.text('languages'), /Python/);
});

test('it fits 360 pixels, light and dark, and is operated by keys', options, async (context) => {
  const { visit } = await world(context);
  for (const scheme of ['light', 'dark']) {
    const person = await visit({ width: 360, height: 740, scheme });
    await openFolder(person, async () => {
      await person.ask(() => document.querySelector('#pick').focus());
      await person.press('Enter');
    });
    await hasGhost(person);
    const width = await person.ask(() => {
      for (const id of ['run', 'result', 'take']) document.getElementById(id).hidden = false;
      return document.documentElement.scrollWidth;
    });
    await person.picture(join(SHOTS, `small-${scheme}.png`));
    assert.ok(width <= 360, `${scheme}: ${width} pixels`);
    const nameless = await person.ask(() => {
      const controls = [...document.querySelectorAll('button, select, input, textarea')];
      const isNamed = (it) => it.textContent.trim() || it.ariaLabel || it.labels?.length;
      return controls.filter((it) => it.checkVisibility() && !isNamed(it)).map((it) => it.id);
    });
    assert.deepEqual(nameless, [], 'controls without a name');
    await person.leave();
  }
});
