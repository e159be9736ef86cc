// Elapid Studio in a real browser: a folder learned end to end by clicking, without a network.
//
// Needs the built package (web/build), a built `elapid`, playwright-core and Chromium; what is
// missing is named. Screenshots are left in target/studio-shots to be looked at.

import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';

const ROOT = fileURLToPath(new URL('../..', import.meta.url));
const TARGET = process.env.CARGO_TARGET_DIR ?? join(ROOT, 'target');
const PACKAGE = process.env.ELAPID_PACKAGE ?? join(ROOT, 'web');
const SHOTS = join(TARGET, 'studio-shots');
const CHROMIUM = process.env.CHROMIUM ?? '/usr/bin/chromium';
const BINARY = ['release', 'debug'].map((kind) => join(TARGET, kind, 'elapid')).find(existsSync);
const LEARN_MS = 240_000;

const { chromium } = await import('playwright-core').catch(() => ({ chromium: undefined }));
const missing = [
  [chromium, 'playwright-core (npm install)'],
  [existsSync(CHROMIUM), `Chromium at ${CHROMIUM}`],
  [existsSync(join(PACKAGE, 'elapid_bg.wasm')), 'built package (web/build)'],
  [BINARY, 'binary elapid (cargo build)'],
]
  .filter(([there]) => !there)
  .map(([, name]) => name);
const options = { skip: missing.length > 0 && `skip: no ${missing.join(', no ')}` };

let scratch, server, url, browser;

before(async () => {
  if (missing.length > 0) return;
  scratch = mkdtempSync(join(tmpdir(), 'elapid-studio-'));
  mkdirSync(SHOTS, { recursive: true });
  execFileSync(join(ROOT, 'web/build-studio'), [join(scratch, 'studio')], { stdio: 'ignore' });
  makeProject();
  const flags = ['--port', '0', '--json', '--studio', join(scratch, 'studio')];
  server = spawn(BINARY, ['serve', join(ROOT, 'models/elapid-code-small.gguf'), ...flags], {
    stdio: ['ignore', 'pipe', 'ignore'],
  });
  const line = await new Promise((done) =>
    server.stdout.once('data', (data) => done(data.toString())),
  );
  url = JSON.parse(line).url;
  browser = await chromium.launch({ executablePath: CHROMIUM, args: ['--no-sandbox'] });
});

after(async () => {
  await browser?.close();
  server?.kill();
  if (scratch) rmSync(scratch, { recursive: true });
});

/** A small project: some files of ours, and one of each kind that is not learned. */
function makeProject() {
  const dir = join(scratch, 'shop');
  mkdirSync(join(dir, 'src'), { recursive: true });
  mkdirSync(join(dir, 'node_modules/left-pad'), { recursive: true });
  mkdirSync(join(dir, 'out'));
  const source = join(ROOT, 'crates/elapid-cli/src/report');
  for (const name of readdirSync(source).filter((name) => name.endsWith('.rs'))) {
    copyFileSync(join(source, name), join(dir, 'src', name));
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
  for (const [name, text] of Object.entries(files)) writeFileSync(join(dir, name), text);
}

/** A page of its own profile, and what it asked for, from whom. */
async function visit(settings = {}) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 }, ...settings });
  const asked = [];
  context.on('request', (request) => asked.push(request.url()));
  const page = await context.newPage();
  const problems = [];
  page.on('pageerror', (error) => problems.push(String(error)));
  page.on('console', (message) => message.type() === 'error' && problems.push(message.text()));
  // The file chooser of a test takes no handles: the other way in is used.
  await page.addInitScript(() => delete window.showDirectoryPicker);
  await page.goto(`${url}/studio`);
  await page.waitForFunction(() => document.querySelector('#device')?.options.length > 0);
  return { context, page, asked, problems };
}

async function openFolder(page, opener = (button) => button.click()) {
  const chooser = page.waitForEvent('filechooser');
  await opener(page.locator('#pick'));
  await (await chooser).setFiles(join(scratch, 'shop'));
  await page.waitForSelector('#learn:enabled', { timeout: LEARN_MS });
}

/** Waits until the worker has kept all files, then cuts the network. */
async function cutNetwork(context, page) {
  await page.evaluate(async () => (await navigator.serviceWorker.ready).active?.state);
  await page.waitForFunction(() => navigator.serviceWorker.controller?.state === 'activated');
  await context.setOffline(true);
}

const textOf = (page, id) => page.locator(`#${id}`).innerText();

test('a folder is learned end to end by clicking, with the network cut', options, async () => {
  const { context, page, asked, problems } = await visit({ acceptDownloads: true });
  await page.screenshot({ path: join(SHOTS, 'open.png') });
  await cutNetwork(context, page);
  await page.reload();
  await openFolder(page);

  assert.equal(await textOf(page, 'folder-title'), 'shop');
  assert.match(await textOf(page, 'languages'), /Rust/);
  assert.match(await textOf(page, 'n-masked'), /1 secret/);
  const left = await page.locator('#left-list').evaluate((list) => list.textContent);
  for (const part of [
    '.env',
    'Cargo.lock',
    'logo.png',
    'node_modules/',
    'out/a.rs',
    'ignored by .gitignore',
  ]) {
    assert.ok(left?.includes(part), `${part} in ${left}`);
  }
  assert.match(await textOf(page, 'plan'), /tokens per second/);
  await page.screenshot({ path: join(SHOTS, 'plan.png'), fullPage: true });

  await page.fill('#minutes', '0.5');
  await page.click('#learn');
  await page.waitForSelector('#run:not([hidden])', { timeout: LEARN_MS });
  await page.waitForFunction(
    () => Number(document.querySelector('#progress').value) >= 2,
    undefined,
    { timeout: LEARN_MS },
  );
  await page.screenshot({ path: join(SHOTS, 'learning.png'), fullPage: true });
  await page.waitForSelector('#result:not([hidden])', { timeout: LEARN_MS });
  const [was, is] = [await textOf(page, 'r-before'), await textOf(page, 'r-after')];
  assert.match(was, /^\d\.\d{3}$/);
  assert.notEqual(was, is);
  assert.match(await textOf(page, 'verdict'), /Better|Worse|No difference|Too little/);
  assert.match(await textOf(page, 'verdict-words'), /bits per byte|too little/);

  await page.waitForFunction(
    () =>
      document.querySelector('#take-base').disabled === false ||
      document.querySelector('#try-words').textContent !== '',
    undefined,
    { timeout: LEARN_MS },
  );
  await saves(page);
  await page.screenshot({ path: join(SHOTS, 'result.png'), fullPage: true });
  assert.deepEqual(
    asked.filter((address) => !address.startsWith(`${url}/studio`) && !address.startsWith('blob:')),
    [],
  );
  assert.deepEqual(
    problems.filter((words) => !words.includes('ERR_INTERNET_DISCONNECTED')),
    [],
  );

  // What was learned is there again after the tab was closed.
  await page.close();
  const again = await context.newPage();
  await again.goto(`${url}/studio/`);
  await again.waitForSelector('#kept:not([hidden])');
  assert.match(await textOf(again, 'kept-words'), /has learned “shop”/);
  await again.click('#kept-go');
  await again.waitForSelector('#result:not([hidden])', { timeout: LEARN_MS });
  assert.equal(await textOf(again, 'r-after'), is, 'the same model to the last digit shown');
  await context.close();
});

/** Downloads are whole files of their formats. */
async function saves(page) {
  const begins = {
    'Model, GGUF': 'GGUF',
    'Adapter, GGUF': 'GGUF',
    'Adapter, PEFT': 'PK',
    'Model, safetensors': 'PK',
  };
  for (const [title, magic] of Object.entries(begins)) {
    const saving = page.waitForEvent('download', { timeout: LEARN_MS });
    await page.getByRole('button', { name: `Save: ${title}` }).click();
    const path = await (await saving).path();
    assert.equal(readFileSync(path).subarray(0, magic.length).toString('latin1'), magic, title);
  }
}

test(
  'ghost text is taken by Tab, dismissed by Esc, and asked for by Ctrl and Space',
  options,
  async () => {
    const { context, page } = await visit();
    await openFolder(page);
    const ghost = () => page.locator('#mirror .ghost').textContent();
    const text = page.locator('#text');
    await text.fill('fn largest(list: &[i32]) -> i32 {\n    let mut largest = list[0];\n    for ');
    await page.waitForFunction(
      () => document.querySelector('.ghost')?.textContent !== '',
      undefined,
      { timeout: 60_000 },
    );
    await page.screenshot({ path: join(SHOTS, 'ghost.png'), fullPage: true });
    const first = await ghost();
    await page.keyboard.press('Escape');
    assert.equal(await ghost(), '');
    await page.keyboard.press('Control+Space');
    await page.waitForFunction(
      () => document.querySelector('.ghost')?.textContent !== '',
      undefined,
      { timeout: 60_000 },
    );
    assert.equal(await ghost(), first, 'greedy: the same place, the same text');
    // Typing along the ghost keeps the rest of it.
    await page.keyboard.type(first[0]);
    assert.equal(await ghost(), first.slice(1));
    await page.keyboard.press('Tab');
    assert.ok((await text.inputValue()).endsWith(`    for ${first}`));
    // Without a ghost Tab leaves the field: nobody is caught in it.
    await page.keyboard.press('Escape');
    await page.keyboard.press('Tab');
    assert.notEqual(await page.evaluate(() => document.activeElement?.id), 'text');
    await context.close();
  },
);

test('a tab that is closed in the middle of a run continues where it was', options, async () => {
  const { context, page } = await visit();
  await openFolder(page);
  await page.fill('#minutes', '3');
  await page.click('#learn');
  await page.waitForFunction(
    () => document.querySelector('.chart circle.held:nth-of-type(2)'),
    undefined,
    { timeout: LEARN_MS },
  );
  await page.close({ runBeforeUnload: false });
  const again = await context.newPage();
  await again.goto(`${url}/studio/`);
  await again.waitForSelector('#kept:not([hidden])');
  const step = Number(/step (\d+) of/.exec(await textOf(again, 'kept-words'))?.[1]);
  assert.ok(step > 0);
  await again.click('#kept-go');
  await again.waitForFunction((k) => Number(document.querySelector('#progress').value) > k, step, {
    timeout: LEARN_MS,
  });
  await again.click('#pause');
  await again.waitForFunction(() =>
    document.querySelector('#run-words').textContent?.includes('Paused'),
  );
  await again.click('#pause');
  await again.click('#stop');
  await again.waitForSelector('#result:not([hidden])', { timeout: LEARN_MS });
  await context.close();
});

test('a folder may be dropped', options, async () => {
  const { context, page } = await visit();
  const session = await context.newCDPSession(page);
  const data = { items: [], files: [join(scratch, 'shop')], dragOperationsMask: 1 };
  for (const type of ['dragEnter', 'dragOver', 'drop']) {
    await session.send('Input.dispatchDragEvent', { type, x: 600, y: 450, data });
  }
  await page.waitForFunction(
    () => document.querySelector('#folder-title').textContent === 'shop',
    undefined,
    { timeout: 60_000 },
  );
  assert.match(await textOf(page, 'languages'), /Rust/);
  await context.close();
});

test('a folder may be opened by the File System Access API', options, async () => {
  const { context, page } = await visit();
  // A real handle, of a folder that a test can make.
  const names = Array.from({ length: 10 }, (_, n) => [
    `lib/file-${n}.py`,
    `def value_${n}(x):\n    return x * ${n * n}\n`,
  ]);
  const files = Object.fromEntries(names);
  await page.addInitScript((files) => {
    window.showDirectoryPicker = async () => {
      const root = await (
        await navigator.storage.getDirectory()
      ).getDirectoryHandle('yard', {
        create: true,
      });
      for (const [name, text] of Object.entries(files)) {
        const parts = name.split('/');
        let dir = root;
        for (const part of parts.slice(0, -1)) {
          dir = await dir.getDirectoryHandle(part, { create: true });
        }
        const file = await dir.getFileHandle(parts.at(-1), { create: true });
        const stream = await file.createWritable();
        await stream.write(text.repeat(200));
        await stream.close();
      }
      return root;
    };
  }, files);
  await page.reload();
  await page.click('#pick');
  await page.waitForSelector('#prepare:not([hidden])', { timeout: 60_000 });
  assert.equal(await textOf(page, 'folder-title'), 'yard');
  assert.match(await textOf(page, 'languages'), /Python/);
  await context.close();
});

test('it fits 360 pixels, in light and dark, and is operated by keys', options, async () => {
  for (const colorScheme of ['light', 'dark']) {
    const { context, page } = await visit({ viewport: { width: 360, height: 740 }, colorScheme });
    await openFolder(page, async (button) => {
      await button.focus();
      await page.keyboard.press('Enter');
    });
    for (const id of ['result', 'take', 'run']) {
      await page.locator(`#${id}`).evaluate((section) => (section.hidden = false));
    }
    await page.screenshot({ path: join(SHOTS, `small-${colorScheme}.png`), fullPage: true });
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= 360, `${colorScheme}: ${width} pixels`);
    const names = await page
      .locator('button:visible, select:visible, input:visible, textarea:visible')
      .evaluateAll((list) =>
        list
          .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
          .map((one) => one.id),
      );
    assert.deepEqual(names, [], 'controls without a name');
    await context.close();
  }
});
