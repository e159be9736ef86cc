// Prompt and decode speed in a real Chromium, beside @wllama/wllama (llama.cpp in wasm):
//
//   npm install --prefix DIR @wllama/wllama
//   node lab/web/speed.mjs MODEL.gguf DIR [n] > receipt.json
//
// Both read the same file from the same server, run in their own workers, with one thread and
// without WebGPU, in turns. A prompt of about 512 tokens and an answer of one token give the prompt
// speed; 64 tokens after a short prompt the decode speed, by the clock of the page. The medians of
// n turns (default 3) are printed with load times and the bytes that are fetched for the engine.

import { readFileSync, statSync, symlinkSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { brotliCompressSync, constants } from 'node:zlib';
import { Browser, chromium, serve } from '../../web/test/browser.mjs';

const [model, peer, turns = '3'] = process.argv.slice(2);
if (!model || !peer) {
  console.error('usage: node lab/web/speed.mjs MODEL.gguf DIR [n]');
  process.exit(2);
}
if (!chromium) {
  console.error('error: there is no Chromium\n\nhint: apt-get install chromium');
  process.exit(1);
}
const project = join(dirname(fileURLToPath(import.meta.url)), '../..');
const root = mkdtempSync(join(tmpdir(), 'elapid-speed-'));
symlinkSync(join(project, 'web'), join(root, 'web'));
symlinkSync(resolve(peer, 'node_modules/@wllama/wllama/esm'), join(root, 'wllama'));
symlinkSync(resolve(model), join(root, 'model.gguf'));

const PROMPT = 'The quick brown fox jumps over the lazy dog near the river bank. '.repeat(36);
const SHORT = 'Once upon a time';
const N_DECODE = 64;

const OURS = `
  const { prompt, short, n } = args;
  const clock = () => performance.now() / 1e3;
  let begin = clock();
  const model = await elapid.Model.load('/model.gguf', { device: 'cpu' });
  const nPrompt = (await model.tokenizer.encode(prompt)).length;
  await model.generate('a', { maxTokens: 1, temperature: 0 }).text();
  const load = clock() - begin;
  begin = clock();
  await model.generate(prompt, { maxTokens: 1, temperature: 0 }).text();
  const promptSpeed = nPrompt / (clock() - begin);
  const answer = model.generate(short, { maxTokens: n, temperature: 0 });
  let first, tokens = 0;
  for await (const token of answer) { first ??= clock(); tokens += 1; }
  // Tokens come in small groups: what the engine itself says is counted from the first of them.
  const decodeSpeed = answer.finish.tokensPerSecond;
  elapid.shutdown();
  return { load, nPrompt, promptSpeed, decodeSpeed, tokens };`;

const THEIRS = `
  const { prompt, short, n, nPrompt } = args;
  const clock = () => performance.now() / 1e3;
  const { Wllama } = await import('/wllama/index.js');
  let begin = clock();
  const wllama = new Wllama({ default: '/wllama/wasm/wllama.wasm' }, { suppressNativeLog: true });
  const blob = await (await fetch('/model.gguf')).blob();
  await wllama.loadModel([blob], { n_ctx: 2048, n_threads: args.threads, n_gpu_layers: 0 });
  const ask = (text, max_tokens) => wllama.createCompletion({
    prompt: text, max_tokens, temperature: 0, stream: true, cache_prompt: false,
  });
  for await (const chunk of await ask('a', 1));
  const load = clock() - begin;
  begin = clock();
  for await (const chunk of await ask(prompt, 1));
  const promptSpeed = nPrompt / (clock() - begin);
  let first, last, tokens = 0;
  for await (const chunk of await ask(short, n)) {
    last = clock();
    first ??= last;
    tokens += 1;
  }
  const decodeSpeed = (tokens - 1) / (last - first);
  const threads = wllama.getNumThreads();
  await wllama.exit();
  return { load, nPrompt, promptSpeed, decodeSpeed, tokens, threads };`;

const middle = (list) => list.toSorted((a, b) => a - b)[list.length >> 1];
const round = (x) => Number(x.toPrecision(3));
const brotli = (path) =>
  brotliCompressSync(readFileSync(path), { params: { [constants.BROTLI_PARAM_QUALITY]: 9 } }).length;

const server = await serve(root);
const found = { ours: [], theirs: [] };
for (let turn = 0; turn < Number(turns); turn++) {
  for (const [who, body] of Object.entries({ ours: OURS, theirs: THEIRS })) {
    const browser = await Browser.start();
    try {
      const page = await browser.page(`${server.url}/blank.html`);
      const nPrompt = found.ours.at(-1)?.nPrompt;
      const args = { prompt: PROMPT, short: SHORT, n: N_DECODE, threads: 1, nPrompt };
      const result = await page.run(body, args);
      console.error(who, JSON.stringify(result));
      found[who].push(result);
    } finally {
      await browser.close();
    }
  }
}
server.stop();
rmSync(root, { recursive: true });

const figure = (what, key, unit) => {
  const [value, peerValue] = ['ours', 'theirs'].map((who) => middle(found[who].map((it) => it[key])));
  const ratio = Number((value / peerValue).toFixed(2));
  return { what, value: round(value), unit, peer: 'wllama', peer_value: round(peerValue), ratio };
};
const wires = [
  brotli(join(project, 'web/elapid_bg.wasm')),
  brotli(resolve(peer, 'node_modules/@wllama/wllama/esm/wasm/wllama.wasm')),
].map((bytes) => bytes / 1e6);
const wire = {
  what: 'wasm over the wire, brotli', value: round(wires[0]), unit: 'MB', peer: 'wllama',
  peer_value: round(wires[1]), ratio: Number((wires[0] / wires[1]).toFixed(2)),
};
const version = JSON.parse(
  readFileSync(resolve(peer, 'node_modules/@wllama/wllama/package.json'), 'utf8'),
).version;
const nPrompt = found.ours[0].nPrompt;
console.log(JSON.stringify({
  title: 'generation in Chromium, wasm on the CPU, one thread',
  machine: process.env.MACHINE ?? 'two cores',
  device: 'CPU',
  commit: process.env.COMMIT ?? '',
  date: new Date().toISOString().slice(0, 10),
  command: 'node lab/web/speed.mjs SmolLM2-135M-Instruct.Q4_1.gguf DIR',
  note: `Medians of ${turns} turns; wllama ${version}. Both with one thread and without WebGPU; ` +
    `the model has ${round(statSync(model).size / 1e6)} MB. ${process.env.NOTE ?? ''}`.trim(),
  figures: [
    figure(`prompt of ${nPrompt} tokens, SmolLM2-135M Q4_1`, 'promptSpeed', 'tok/s'),
    figure('decode, SmolLM2-135M Q4_1', 'decodeSpeed', 'tok/s'),
    figure('load of engine and model, with a first token', 'load', 's'),
    wire,
  ],
}, null, 2));
process.exit(0);
