// The package in node, without a worker and with one, and packed as it is published.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { brotliCompressSync, gzipSync } from 'node:zlib';
import * as elapid from '../index.js';

const TEXT = 'fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n'.repeat(40);
/** Largest package, in bytes over the wire. */
const WIRE_MAX = 3 << 20;

async function small(options = {}) {
  const base = { arch: 'llama', preset: 'tiny', context: 64, vocabularySize: 512, device: 'cpu' };
  return elapid.Model.create({ ...base, vocabulary: TEXT, ...options });
}

export const tests = {
  async 'a model is made, trained, saved and loaded again'() {
    const model = await small();
    assert.equal(model.info.family, 'llama');
    const trainer = new elapid.Trainer(model, { batch: 2, context: 16 });
    const steps = [];
    for await (const step of trainer.train(TEXT, { steps: 4, heldOut: TEXT, evalEvery: 2 })) {
      steps.push(step);
    }
    assert.deepEqual(steps.map((it) => it.step), [1, 2, 3, 4]);
    assert.ok(steps[3].loss < steps[0].loss && steps[3].heldOut.bitsPerByte > 0);
    assert.ok(steps[3].memory.wasm > 1e6 && steps[3].tokensPerSecond > 0);
    const options = { maxTokens: 6, temperature: 0 };
    const text = await model.generate('fn add(', options).text();
    for (const format of ['gguf', 'package', 'safetensors']) {
      const files = await model.files(format);
      const again = await elapid.Model.load(files, { device: 'cpu' });
      assert.equal(await again.generate('fn add(', options).text(), text, format);
      again.free();
    }
    const q8 = await elapid.Model.load(await model.save('gguf', { quant: 'q8_0' }));
    assert.ok(q8.info.types.includes('q8_0'), q8.info.types.join());
    const snapshot = await model.snapshot('fn ');
    assert.equal(await snapshot.generate('add(', options).text(), text);
    model.free();
    await assert.rejects(model.embed('x'), elapid.InputError);
  },

  async 'an adapter is trained, saved, and put on its base again'() {
    const base = await (await small()).save('gguf');
    const model = await elapid.Model.load(base, { device: 'cpu' });
    const trainer = new elapid.Trainer(model, { rank: 2, batch: 2, context: 16, lr: 1e-2 });
    await trainer.train(TEXT, { steps: 5 }).done();
    const want = (await elapid.evaluate(model, TEXT)).bitsPerByte;
    const adapters = [await model.files('adapter'), await model.files('adapter-gguf')];
    for (const adapter of adapters) {
      const both = await elapid.Model.load(base, { device: 'cpu', adapter });
      const got = (await elapid.evaluate(both, TEXT)).bitsPerByte;
      assert.ok(Math.abs(got - want) < 1e-5, `${got}, ${want}`);
    }
    const merged = await elapid.Model.load(await model.save('gguf'), { device: 'cpu' });
    const got = (await elapid.evaluate(merged, TEXT)).bitsPerByte;
    assert.ok(Math.abs(got - want) < 1e-4, `merged: ${got}, ${want}`);
    const zip = Buffer.from(await (await model.save()).arrayBuffer());
    assert.equal(zip.subarray(0, 2).toString(), 'PK');
  },

  async 'a run is stopped by a signal and continued from its file'() {
    const dir = mkdtempSync(join(tmpdir(), 'elapid-node-'));
    const name = join(dir, 'run.elapid');
    const options = { batch: 1, context: 16 };
    const whole = [];
    for await (const step of new elapid.Trainer(await small(), options).train(TEXT, { steps: 6 })) {
      whole.push(step.loss);
    }
    const stop = new AbortController();
    const run = new elapid.Trainer(await small(), options).train(TEXT, {
      steps: 6, checkpoint: { name }, signal: stop.signal,
    });
    const losses = [];
    await assert.rejects(async () => {
      for await (const step of run) {
        losses.push(step.loss);
        if (step.step === 3) stop.abort(new Error('enough'));
      }
    }, /enough/);
    const rest = new elapid.Trainer(await small(), options).train(TEXT, {
      steps: 6, checkpoint: { name },
    });
    for await (const step of rest) losses.push(step.loss);
    assert.deepEqual(losses, whole);
    rmSync(dir, { recursive: true });
  },

  async 'time is a budget too'() {
    const model = await small();
    const trainer = new elapid.Trainer(model, { batch: 1, context: 8 });
    const last = await trainer.train(TEXT, { minutes: 0.02 }).done();
    assert.ok(last.step >= 1 && last.step === last.steps, `${last.step} of ${last.steps}`);
    await assert.rejects(trainer.train(TEXT, { minutes: 1, steps: 3 }).done(), elapid.InputError);
  },

  async 'tokenizers, files of a folder, measurements and a limbic head'() {
    const tokenizer = await elapid.Tokenizer.train(TEXT, { size: 300 });
    const ids = await tokenizer.encode('fn add(a');
    assert.equal(await tokenizer.decode(ids), 'fn add(a');
    assert.equal(await tokenizer.decode([9e6]), '');
    const again = await elapid.Tokenizer.load(new Blob([await tokenizer.toJSON()]));
    assert.deepEqual(await again.encode('fn add(a'), ids);
    const own = await small({ vocabulary: tokenizer, vocabularySize: undefined });
    assert.equal(own.info.vocabulary, tokenizer.size);

    const word = (n) => `fn f${n}(x: i32) -> i32 {\n    x * ${n} + ${n * 7 + 1}\n}\n`;
    const file = (path, text) => ({ path, bytes: text.length, read: async () => text });
    const many = Array.from({ length: 30 }, (_, n) =>
      file(`src/a${n}.rs`, Array.from({ length: 30 }, (_, k) => word(n * 977 + k * 31)).join('')));
    const found = await elapid.select([
      ...many, file('node_modules/x.js', 'a'), file('b.rs', 'x\0y'), file('copy.rs', await many[0].read()),
    ]);
    assert.ok(found.train.length > 10 && found.heldOut.length > 0, `${found.train.length}`);
    assert.equal(found.languages[0].language, 'Rust');
    assert.equal(found.leftOut.length, 3, JSON.stringify(found.leftOut));

    const before = await elapid.evaluate(own, found.heldOut, { context: 32 });
    const same = await elapid.compare(before, before);
    assert.equal(same.verdict, 'same');
    assert.equal(same.gain, 0);
    assert.ok((await own.embed(['a', 'b'])).length === 2);

    const limbic = await elapid.Limbic.create({ inputs: 2, hidden: 4 });
    const samples = Array.from({ length: 32 }, (_, n) => ({
      input: [n % 3 ? 0 : 1, 0.5], state: {}, target: { arousal: n % 3 ? 0 : 0.4 }, sequence: n >> 3,
    }));
    const { loss } = await limbic.train(samples, { epochs: 20 });
    assert.ok(loss.at(-1) < loss[0], loss.join());
    const loaded = await elapid.Limbic.load(await limbic.save());
    const state = await elapid.Limbic.setPoint({ openness: 80 });
    const moved = await loaded.step(state, [1, 0.5]);
    assert.ok(moved.hidden.length === 4 && moved.state.arousal !== state.arousal);
    assert.ok((await elapid.kernels()).every((it) => it.path.endsWith('.wgsl')));
    assert.equal((await elapid.devices())[0].id, 'cpu');
  },

  async 'the packed package is small and ten lines use it'(root) {
    const dir = mkdtempSync(join(tmpdir(), 'elapid-pack-'));
    const quiet = { stdio: ['ignore', 'pipe', 'pipe'], encoding: 'utf8' };
    const out = execFileSync('npm', ['pack', '--json', '--pack-destination', dir], {
      cwd: join(root, 'web'), ...quiet,
    });
    const [{ filename, size, files }] = JSON.parse(out.slice(out.indexOf('[')));
    assert.ok(files.some((it) => it.path === 'elapid_bg.wasm'), files.map((it) => it.path).join());
    assert.ok(!files.some((it) => /^(test|examples|studio|bindgen)/.test(it.path)));
    assert.ok(size <= WIRE_MAX, `${size} bytes`);
    const wasm = readFileSync(join(root, 'web/elapid_bg.wasm'));
    const sizes = [wasm.length, gzipSync(wasm, { level: 9 }).length, brotliCompressSync(wasm).length];
    console.log(`  package ${size} bytes; wasm, with gzip, with brotli: ${sizes.join(', ')}`);
    writeFileSync(join(dir, 'package.json'), '{"type":"module"}');
    execFileSync('npm', ['install', '--offline', '--no-audit', join(dir, filename)], { cwd: dir, ...quiet });
    const script = readFileSync(join(root, 'web/test/ten-lines.mjs'), 'utf8');
    assert.ok(script.trimEnd().split('\n').length <= 10);
    writeFileSync(join(dir, 'ten-lines.mjs'), script);
    const text = execFileSync('node', ['ten-lines.mjs'], { cwd: dir, ...quiet });
    assert.match(text, /loss \d/);
    assert.ok(statSync(join(dir, 'model.gguf')).size > 1e6);
    rmSync(dir, { recursive: true });
  },

  async 'a worker of node gives the same answers'(root) {
    const script = `
      import { init, Model, shutdown } from './index.js';
      await init({ worker: true });
      const model = await Model.create({ arch: 'llama', vocabulary: 'a b c '.repeat(99), vocabularySize: 300 });
      console.log(JSON.stringify(await model.generate('a', { maxTokens: 3, temperature: 0 }).text()));
      shutdown();`;
    const run = (text) => execFileSync('node', ['--input-type=module', '-e', text], {
      cwd: join(root, 'web'), encoding: 'utf8',
    });
    assert.equal(run(script), run(script.replace('worker: true', 'worker: false')));
  },
};
