// What the page decides itself about files: secrets, by the cases of the command's own tests, and
// .gitignore, beside git.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { test } from 'node:test';
import { ignoredBy } from '../studio/ignore.js';
import { mask } from '../studio/secrets.js';

const CLI = new URL('../../crates/elapid-cli/src/', import.meta.url);
const RUST = new URL('source/secrets/tests.rs', CLI);

/** The string literals of a Rust constant; `~` in them stands for nothing. */
function literals(name) {
  const text = readFileSync(RUST, 'utf8');
  const body = text.slice(text.indexOf(`const ${name}:`));
  const list = body.slice(body.indexOf('= [') + 2, body.indexOf('\n];'));
  const found = list.match(/"(?:[^"\\]|\\.)*"/g) ?? [];
  return found.map((literal) => JSON.parse(literal.replaceAll("\\'", "'")).replaceAll('~', ''));
}

test('secrets that the command finds are masked here', () => {
  const all = literals('FOUND');
  assert.ok(all.length >= 120);
  for (let idx = 0; idx < all.length; idx += 3) {
    const [text, , secret] = all.slice(idx, idx + 3);
    const masked = mask(text);
    assert.ok(!masked.text.includes(secret), `${text} became ${masked.text}`);
    assert.equal(masked.found, 1, text);
  }
});

test('what only looks like a secret is left alone', () => {
  const all = literals('NOT_FOUND');
  assert.ok(all.length >= 60);
  for (const text of all) assert.deepEqual(mask(text), { text, found: 0 });
});

test('a private key is masked as a whole and the lines keep their numbers', () => {
  const line = 'MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfnqB/+Lm2YcJ3mHd5PfSgUaEoKi6TkR9vLq\n';
  const [begin, end] = ['BEGIN', 'END'].map((word) => `-----${word} RSA ${'PRIVATE'} KEY-----`);
  const masked = mask(`first\n${begin}\n${line.repeat(3)}${end}\nlast`);
  assert.equal(masked.text.replace(/\n+/g, '\n'), 'first\n<secret>\nlast');
  assert.equal(masked.text.split('\n').length, 7);
});

test('files are ignored as git ignores them', async (context) => {
  const ignoreFiles = {
    '.gitignore':
      '# a comment\n*.log\n!keep.log\n/out\nbuild/\ndocs/*.html\n**/cache\na/**/z\nx?y\n[ab].txt\n' +
      '\\#odd\n\\!odd\ntrailing \nsp\\ ace\nlib/**\n!lib/kept\n[!0-9].n\n',
    'deep/.gitignore': '/only-here\n!*.log\n',
  };
  const files = [
    'a.log',
    'keep.log',
    'src/b.log',
    'out/x',
    'src/out/x',
    'build/x',
    'src/build/x',
    'build2/x',
    'src/build.rs',
    'docs/a.html',
    'docs/sub/a.html',
    'cache',
    'src/cache/x',
    'a/z',
    'a/b/c/z',
    'b/a/z',
    'xay',
    'x/y',
    'a.txt',
    'b.txt',
    'c.txt',
    '#odd',
    '!odd',
    'trailing',
    'sp ace',
    'deep/only-here',
    'deep/er/only-here',
    'only-here',
    'deep/a.log',
    'build/keep.log',
    'lib/x',
    'lib/kept',
    'a.n',
    '1.n',
  ];
  const dir = mkdtempSync(join(tmpdir(), 'elapid-ignore-'));
  context.after(() => rmSync(dir, { recursive: true }));
  execFileSync('git', ['init', '-q', dir]);
  for (const [path, text] of Object.entries(ignoreFiles)) {
    mkdirSync(dirname(join(dir, path)), { recursive: true });
    writeFileSync(join(dir, path), text);
  }
  const entries = Object.entries(ignoreFiles).map(([path, text]) => ({
    path,
    file: async () => ({ text: async () => text }),
  }));
  const isIgnored = await ignoredBy(entries);
  const mine = files.filter((path) => isIgnored(path));
  for (const path of files.filter((path) => path !== 'cache')) {
    mkdirSync(dirname(join(dir, path)), { recursive: true });
    writeFileSync(join(dir, path), '');
  }
  writeFileSync(join(dir, 'cache'), '');
  const list = { cwd: dir, encoding: 'utf8' };
  const others = execFileSync('git', ['ls-files', '-z', '--others', '--exclude-standard'], list);
  const wanted = new Set(others.split('\0'));
  assert.deepEqual(
    mine,
    files.filter((path) => !wanted.has(path)),
  );
});

test('page and server say the same policy, and it allows nothing inline or from elsewhere', () => {
  const page = readFileSync(new URL('../studio/index.html', import.meta.url), 'utf8');
  const server = readFileSync(new URL('server/studio.rs', CLI), 'utf8');
  const tidy = (text) =>
    text
      .split(';')
      .map((rule) => rule.replace(/\\?\s+/g, ' ').trim())
      .filter((rule) => !rule.startsWith('frame-ancestors')); // means nothing in a page
  const own = tidy(/http-equiv="Content-Security-Policy" content="([^"]*)"/.exec(page)[1]);
  assert.deepEqual(own, tidy(/const POLICY: &str = "([^"]*)"/.exec(server)[1]));
  assert.ok(own.includes("default-src 'none'"));
  assert.doesNotMatch(own.join(), /unsafe-inline|'unsafe-eval'|\*|https?:|data:/);
  assert.doesNotMatch(
    page,
    /<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|(?:src|href)="(?:https?:)?\/\//,
  );
});
