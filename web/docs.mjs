#!/usr/bin/env node
// Writes API.md from the comments of index.d.ts.

import { readFileSync, writeFileSync } from 'node:fs';

const at = (name) => new URL(name, import.meta.url);
const source = readFileSync(at('index.d.ts'), 'utf8');
const lines = source.split('\n');
const out = ['# API of elapid', '', 'Made by `web/docs.mjs` from `index.d.ts`.', ''];

/** The words of a comment that ends before line `end`. */
function comment(end) {
  let start = end;
  while (start > 0 && !lines[start].trim().startsWith('/**')) start -= 1;
  const words = lines.slice(start, end + 1).map((it) =>
    it.trim().replace(/^\/\*\*\s?/, '').replace(/\*\/$/, '').replace(/^\*\s?/, '').trimEnd());
  return words.filter((it, idx) => it || (idx > 0 && idx < words.length - 1)).join('\n').trim();
}

for (let idx = 0; idx < lines.length; idx++) {
  const line = lines[idx];
  const heading = lines[idx - 1]?.startsWith('// ----') && line.startsWith('// ');
  if (heading) out.push(`## ${line.slice(3)}`, '');
  const found = /^export (?:declare )?(class|interface|type|function|const) (\w+)/.exec(line);
  if (!found) continue;
  out.push(`### ${found[2]}`, '');
  const before = lines[idx - 1]?.trim();
  if (before?.endsWith('*/')) out.push(comment(idx - 1), '');
  // A declaration ends where its braces are closed, or with the line's semicolon.
  const body = [];
  let depth = 0;
  for (let end = idx; end < lines.length; end++) {
    body.push(lines[end].replace(/^export /, ''));
    for (const letter of lines[end].replace(/\/\*.*?\*\//g, '')) {
      if ('{('.includes(letter)) depth += 1;
      if ('})'.includes(letter)) depth -= 1;
    }
    if (depth === 0 && /[;}]\s*$/.test(lines[end])) break;
  }
  out.push('```ts', ...body, '```', '');
}

const made = out.join('\n').trimEnd() + '\n';
writeFileSync(at('API.md'), made);
