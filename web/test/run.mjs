// The package in node and in a real Chromium: `node web/test/run.mjs [name ...]` runs all tests, or
// those whose names hold one of these words. `web/build` comes first.
//
// What the engine computes as a program of its own is in the file that NATIVE names (made by
// `cargo run -p elapid-web --example native`); golden sets are the project's.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { readFileSync, readdirSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Browser, chromium, serve } from './browser.mjs';
import * as node from './node.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '../..');
const MODEL = 'models/elapid-code-small.gguf';
const TEXT = 'web/test/text.txt';
/** Six families everywhere; on the CPU, where it takes no time, experts too. */
const SETS = ['mamba', 'mamba2', 'mamba3_siso', 'llama_gqa_untied', 'qwen3', 'bamba'];
const CPU_SETS = [...SETS, 'falcon_h1', 'jamba', 'mixtral', 'qwen2_moe', 'zamba'];
const OPTIONS = { lr: 1e-3, batch: 2, context: 32, seed: 7, clip: 1 };

let native;
function reference() {
  if (!native) {
    const run = ['run', '-q', '-p', 'elapid-web', '--example', 'native', '--', MODEL, TEXT];
    const text = process.env.NATIVE
      ? readFileSync(process.env.NATIVE, 'utf8')
      : execFileSync('cargo', run, { cwd: root, encoding: 'utf8' });
    native = JSON.parse(text);
  }
  return native;
}

/** Devices that a page has; a missing one is told once. */
const DEVICES = (process.env.DEVICES ?? 'cpu,webgpu').split(',');

const tests = {
  async 'golden sets hold in the page'(page) {
    for (const device of DEVICES) {
      for (const set of device === 'cpu' ? CPU_SETS : SETS) {
        const found = await page.run(
          `const files = {};
          for (const name of args.names) {
            files[name] = await (await fetch('/golden/sets/' + args.set + '/' + name)).arrayBuffer();
          }
          return elapid.checkGolden(files, { device: args.device });`,
          { set, device, names: readdirSync(join(root, 'golden/sets', set)) },
        );
        const bad = found.filter((it) => !it.holds);
        assert.ok(found.length > 5, `${set}: ${found.length} comparisons`);
        assert.ok(found.some((it) => it.quantity === 'adamw mean'), `${set}: AdamW`);
        assert.deepEqual(bad, [], `${set} on ${device}`);
        console.log(`  ${set} on ${device}: ${found.length} comparisons hold`);
      }
    }
  },

  async 'twenty steps of training are those of the program'(page) {
    const want = reference().losses;
    for (const device of DEVICES) {
      for (const arch of Object.keys(want)) {
        const got = await page.run(
          `const text = await (await fetch('/' + args.text)).text();
          const model = await elapid.Model.create({
            arch: args.arch, preset: 'tiny', context: 64, vocabulary: text, vocabularySize: 512,
            seed: 7, device: args.device,
          });
          const losses = [];
          const trainer = new elapid.Trainer(model, args.options);
          for await (const step of trainer.train(text, { steps: 20 })) losses.push(step.loss);
          model.free();
          return losses;`,
          { arch, device, text: TEXT, options: OPTIONS },
        );
        assert.equal(got.length, 20);
        const far = got.map((loss, idx) => Math.abs(loss - want[arch][idx]) / want[arch][idx]);
        const worst = Math.max(...far);
        const limit = device === 'cpu' ? 1e-5 : 1e-3;
        assert.ok(worst <= limit, `${arch} on ${device}: off by ${worst}`);
        console.log(`  ${arch} on ${device}: off by at most ${worst.toExponential(1)}`);
      }
    }
  },

  async 'greedy tokens are those of the program'(page) {
    for (const device of DEVICES) {
      const got = await page.run(
        `const model = await elapid.Model.load('/' + args.model, { device: args.device });
        const answers = [];
        for (const prompt of ['fn main() {\\n', 'def add(a, b):\\n    return']) {
          const ids = [];
          for await (const token of model.generate(prompt, { maxTokens: 24, temperature: 0 })) {
            ids.push(token.id);
          }
          answers.push(ids);
        }
        model.free();
        return answers;`,
        { device, model: MODEL },
      );
      assert.deepEqual(got, reference().answers, device);
    }
  },

  async 'a tab that was killed resumes to the bit'(page, { browser, url }) {
    const run = (stopAt) => `
      const text = await (await fetch('/' + args.text)).text();
      const model = await elapid.Model.create({
        arch: 'llama', preset: 'tiny', context: 64, vocabulary: text, vocabularySize: 512,
        device: args.device,
      });
      const trainer = new elapid.Trainer(model, args.options);
      const checkpoint = args.name ? { name: args.name, every: 2 } : undefined;
      const losses = {};
      for await (const step of trainer.train(text, { steps: 9, checkpoint })) {
        losses[step.step] = step.loss;
        if (step.step === ${stopAt}) await new Promise(() => {});
        globalThis.reached = step.step;
      }
      const files = await model.files('gguf');
      const hash = await crypto.subtle.digest('SHA-256', Object.values(files)[0]);
      return { losses, hash: Array.from(new Uint8Array(hash)).join() };`;
    for (const device of DEVICES) {
      const args = { text: TEXT, options: OPTIONS, device };
      const name = `killed ${device}`;
      const whole = await page.run(run(0), args);
      const killed = await browser.page(`${url}/blank.html`);
      killed.run(run(5), { ...args, name }).catch(() => {});
      for (let reached = 0; reached !== 4; ) {
        await new Promise((done) => setTimeout(done, 50));
        reached = await killed.run('return globalThis.reached');
      }
      await killed.kill();
      const again = await browser.page(`${url}/blank.html`);
      const rest = await again.run(run(0), { ...args, name });
      assert.deepEqual(Object.keys(rest.losses), ['5', '6', '7', '8', '9'], device);
      for (const [step, loss] of Object.entries(rest.losses)) {
        assert.equal(loss, whole.losses[step], `step ${step} on ${device}`);
      }
      assert.equal(rest.hash, whole.hash, device);
      const list = await again.run('return (await elapid.checkpoints.list()).map((it) => it.step)');
      assert.deepEqual(list, [9]);
      const other = await again.run(
        `try {
          const model = await elapid.Model.create({
            arch: 'llama', preset: 'tiny', context: 64, vocabulary: 'other text '.repeat(99),
            vocabularySize: 512, device: 'cpu',
          });
          const trainer = new elapid.Trainer(model, { batch: 1, context: 8 });
          await trainer.train('other text '.repeat(99), {
            steps: 9, checkpoint: { name: args.name },
          }).done();
        } catch (error) {
          return [error.name, error.message];
        }`,
        { name },
      );
      assert.equal(other[0], 'FormatError');
      await again.run('await elapid.checkpoints.delete(args.name)', { name });
      assert.deepEqual(await again.run('return elapid.checkpoints.list()'), []);
      await again.kill();
    }
  },

  async 'nothing leaves the page, and it works with the network cut'(_, { browser, url }) {
    const page = await browser.page(`${url}/blank.html`);
    await page.run(
      `globalThis.model = await elapid.Model.load('/' + args.model, { device: 'cpu' });`,
      { model: MODEL },
    );
    const before = page.requests.length;
    assert.ok(before > 3, 'requests are recorded');
    assert.ok(page.requests.some((it) => it.endsWith('.wasm')), 'those of the worker too');
    await page.cut();
    const found = await page.run(`
      const { model } = globalThis;
      const texts = Array.from({ length: 12 }, (_, n) =>
        Array.from({ length: 20 }, (_, k) => 'let x' + n * k + ' = ' + n + ' + ' + k + ';').join(' '));
      const before = await elapid.evaluate(model, texts.slice(8), { context: 64 });
      const trainer = new elapid.Trainer(model, { batch: 2, context: 32, rank: 4 });
      const plan = await trainer.plan(texts.slice(0, 8), { steps: 3 });
      let steps = 0;
      for await (const step of trainer.train(texts.slice(0, 8), { steps: 3 })) steps = step.step;
      const after = await elapid.evaluate(model, texts.slice(8), { context: 64 });
      const sentence = (await elapid.compare(after, before)).sentence;
      const text = await model.generate('fn ', { maxTokens: 4 }).text();
      const adapter = await model.save();
      const vector = await model.embed('fn main');
      return { steps, sentence, text, size: adapter.size, n: vector.length, plan };`);
    assert.equal(found.steps, 3);
    assert.ok(found.size > 1000 && found.n > 100);
    assert.ok(found.plan.memory.sum > 0 && found.plan.stepSeconds > 0, JSON.stringify(found.plan));
    assert.match(found.sentence, /bits per byte/);
    assert.equal(page.requests.length, before, page.requests.slice(before).join(' '));
    const foreign = page.requests.filter((it) => !it.startsWith(url) && !it.startsWith('data:'));
    assert.deepEqual(foreign, []);
    await page.kill();
  },

  async 'the examples run as they are'(_, { browser, url }) {
    for (const name of ['generate', 'train', 'adapt', 'embed']) {
      const page = await browser.page(`${url}/web/examples/${name}.html`);
      const found = await page.run(`
        for (let n = 0; n < 3000 && !document.body.dataset.done; n++) {
          await new Promise((done) => setTimeout(done, 100));
        }
        return [document.body.dataset.done, document.body.innerText];`);
      assert.equal(found[0], 'yes', `${name}: ${found[1]}`);
      await page.kill();
    }
  },

  async 'errors are typed and say what to do'(page) {
    const found = await page.run(`
      const tries = {
        format: () => elapid.Model.load(new Uint8Array([71, 71, 85, 70, 1, 2, 3])),
        empty: () => elapid.Model.load(new Uint8Array()),
        missing: () => elapid.Model.load('/no-such-model.gguf'),
        nothing: () => elapid.Model.load(null),
        files: () => elapid.Model.load({ 'config.json': new Uint8Array([123, 125]), 'a': new Uint8Array(1) }),
        device: () => elapid.Model.load(new Uint8Array(9), { device: 'abacus' }),
        preset: () => elapid.Model.create({ preset: 'huge', vocabulary: 'text' }),
        typo: () => elapid.Model.create({ arhc: 'llama', vocabulary: 'text' }),
        type: () => elapid.Tokenizer.train([3]),
        few: () => elapid.Tokenizer.train('text', { size: 3 }),
      };
      const found = {};
      for (const [name, make] of Object.entries(tries)) {
        try { await make(); found[name] = ['nothing was thrown']; }
        catch (error) {
          found[name] = [error.constructor.name, error instanceof elapid.ElapidError, error.hint];
        }
      }
      return found;`);
    const classes = {
      format: 'FormatError', empty: 'FormatError', missing: 'StorageError', nothing: 'InputError',
      files: 'ConfigError', device: 'InputError', preset: 'InputError', typo: 'InputError',
      type: 'InputError', few: 'InputError',
    };
    for (const [name, want] of Object.entries(classes)) {
      assert.equal(found[name][0], want, `${name}: ${found[name]}`);
      assert.ok(found[name][1] && found[name][2].length > 0, `${name}: ${found[name]}`);
    }
  },
};

const words = process.argv.slice(2);
const wanted = (name) => !words.length || words.some((word) => name.includes(word));
let n = 0;
async function run(name, test) {
  if (!wanted(name)) return;
  const start = performance.now();
  await test();
  n += 1;
  console.log(`ok      ${name} (${((performance.now() - start) / 1e3).toFixed(1)} s)`);
}

for (const [name, test] of Object.entries(node.tests)) await run(name, () => test(root));
if (!chromium) {
  console.log('skip: no Chromium: the package was not run in a browser');
} else {
  const server = await serve(root);
  const browser = await Browser.start();
  try {
    const page = await browser.page(`${server.url}/blank.html`);
    for (const [name, test] of Object.entries(tests)) {
      await run(name, () => test(page, { browser, url: server.url }));
    }
  } finally {
    await browser.close();
    server.stop();
  }
}
console.log(`done    ${n} tests`);
process.exit(0);
