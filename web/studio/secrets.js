// What nobody wants a model to repeat: keys, tokens, passwords, addresses of people. They are
// replaced before anything is learned or measured, by the rules of `elapid adapt`
// (crates/elapid-cli/src/source/secrets.rs).

/**
 * Prefix, what follows it, and whether other words begin so, too.
 * @type {[string, string, boolean?][]}
 */
const TOKENS = [
  ['(?:AKIA|ASIA)', '[A-Z0-9]{16}'],
  ['gh[pousr]_', '[\\w-]{36,255}'],
  ['github_pat_', '[\\w-]{40,255}'],
  ['(?:glpat|gldt|glptt|glrt)-', '[\\w-]{20,64}'],
  ['(?:xox[bpars]|xapp)-', '[\\w-]{20,255}'],
  ['hooks\\.slack\\.com/services/', '[A-Za-z0-9/]{30,90}'],
  ['AIza', '[\\w-]{35}'],
  ['GOCSPX-', '[\\w-]{24,40}'],
  ['ya29\\.', '[\\w.-]{40,512}'],
  ['(?:sk_live_|rk_live_|sk_test_)', '[\\w-]{20,128}'],
  ['whsec_', '[\\w-]{24,64}'],
  ['sk-ant-', '[\\w-]{32,255}'],
  ['sk-', '[\\w-]{20,255}', true],
  ['npm_', '[\\w-]{36}'],
  ['pypi-AgE', '[\\w-]{40,512}'],
  ['hf_', '[\\w-]{30,60}', true],
  ['dop_v1_', '[\\w-]{64}'],
  ['dckr_pat_', '[\\w-]{20,64}'],
  ['shpat_', '[\\w-]{32}'],
  ['SG\\.', '[\\w.-]{60,80}'],
  ['AGE-SECRET-KEY-', '[\\w-]{50,70}'],
  ['hvs\\.', '[\\w-]{24,128}'],
];

const PEM = new RegExp(
  '-----BEGIN [A-Z ]{0,30}PRIVATE KEY[A-Z ]{0,12}-----[\\w+/=\\\\\\s"\',:]{40,16384}' +
    '(?:-----END [A-Z ]{0,40}-----)?',
  'g',
);
const WEB_TOKEN = /\beyJ[\w-]{7,4096}\.eyJ[\w-]{7,4096}\.[\w-]{17,4096}/g;
const URL_PASSWORD = /(:\/\/[\w.+%-]{0,64}:)([!#%&*+,.0-9:;=?A-Z^_a-z|~-]{4,128})(?=@\w)/g;
const BEARER = /(Bearer )([\w+/=.-]{20,4096})/gi;
const ASSIGNED = new RegExp(
  '((password|passwd|passphrase|pwd|secret|token|credential|api[_-]?key|access_?key|private_key' +
    '|auth_key|accountkey)([\\w-]{0,40})[\\\\"\'`\\])]{0,3}[ \\t]{0,8}' +
    "(?::[ \\t]*[\\w&<>'?]{1,32}[ \\t]*=(?!=)|[=:>~]{1,3}|,|\\()[ \\t]{0,8}[bfru$@]{0,2})" +
    '(?:(\\\\?["\'`])([^"\'`\\n]{8,4096})\\4|([\\w+/=-]{16,4096})(?=[\\s,;"\'&#\\\\]|$))',
  'gi',
);
/**
 * A pattern of any of these words between two others.
 * @param {string} before
 * @param {string} words
 * @param {string} after
 */
const anyOf = (before, words, after) =>
  new RegExp(`${before}(?:${words.trim().split(/\s+/).join('|')})${after}`, 'i');

/** How names end that hold something about a secret, not the secret. */
const AFTER = anyOf(
  '',
  `type url uri names? field path file count _id len length size expiry expires expires_in regex
  pattern label placeholder title message error hash digest checksum sha256 sha1 index idx version`,
  '$',
);
/** What stands where a secret belongs. */
const PLACEHOLDER = anyOf(
  '',
  `example your xxxx placeholder change-?_?me changethis dummy fake sample redacted replace insert
  todo test mock demo foobar deadbeef passw(?:or)?d secret token api[_-]?key my[_-]?key 123456
  abcdef qwerty 000000 111111 process\\.env hunter2 letmein admin default none null undefined unused
  invalid hello world sha(?:256|384|512)- env\\. config\\. settings\\. ^0x`,
  '',
);
const UUID = /^[\da-f]{8}-(?:[\da-f]{4}-){3}[\da-f]{12}$/i;
const EMAIL = new RegExp(
  '(?<!://)\\b[A-Za-z0-9][\\w.%+-]{0,63}@((?:[A-Za-z0-9-]{1,63}\\.)+)([A-Za-z]{2,12})\\b' +
    '(?![([@_/:])',
  'g',
);
/** Names before the `@` that are nobody's, domains of examples, and last parts of real ones. */
const NOBODY = anyOf(
  '^',
  `git no-?reply.* do-?not-?reply user(?:name)? you your\\.name name someone this super return break
  continue foo bar test example email hg svn postgres root admin support info security`,
  '$',
);
const NOWHERE = anyOf(
  '(?:^|\\.)',
  `noreply\\. (?:example|test|foo|bar|baz|domain|localhost|acme|your-?domain|mysite)\\.$
  (?:invalid|mydomain|(?:your)?company|email)\\.$`,
  '',
);
const TOP = anyOf(
  '^',
  `com org net edu gov mil int info biz dev app tech cloud xyz online site email name pro systems
  software solutions company group team codes engineering agency digital network studio world life
  today works science blog live (?!py|rs|js|ts|go|md|sh|cs|hs|kt|rb)[a-z]{2}`,
  '$',
);

/** Whether a value only stands for a secret. @param {string} value */
function isPlaceholder(value) {
  const isPattern = value.length >= 16 && /[<>{}[\]()*$%# \\]/.test(value);
  return new Set(value.toLowerCase()).size < 4 || isPattern || PLACEHOLDER.test(value);
}

/**
 * Whether a value is no word and no row of words: letters and digits in short runs.
 * @param {string} value
 */
function isRandom(value) {
  const runs = value.match(/[A-Z]+[a-z]*|[a-z]+|\d+/g) ?? [];
  const inRuns = runs.join('').length;
  const digits = value.replace(/\D/g, '').length;
  const letters = inRuns - digits;
  const isMixed = digits >= 2 && letters >= 2 && inRuns <= 3.2 * runs.length;
  const isLong = value.length >= 20 && letters >= 2 && inRuns <= 2.2 * runs.length;
  return entropy(value) >= 3 && (isMixed || isLong);
}

/** Bits of a letter, by how often each occurs. @param {string} value */
function entropy(value) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const letter of value) counts.set(letter, (counts.get(letter) ?? 0) + 1);
  const share = [...counts.values()].map((n) => n / value.length);
  return share.reduce((sum, p) => sum - p * Math.log2(p), 0);
}

/** Whether people choose such a value as a password. @param {string} value */
function isPassword(value) {
  const kinds = [/[a-z]/, /[A-Z]/, /\d/, /[!-/:-@[-`{-~]/].filter((kind) =>
    kind.test(value),
  ).length;
  const isWord = /^[!-~]{8,63}$/.test(value) && !/[/<>{}()[\]\\]/.test(value);
  return isWord && /\d/.test(value) && kinds >= 3 && !(/[.:]/.test(value) && kinds < 4);
}

/**
 * The text with its secrets replaced, and how many there were. It has the same lines.
 * @param {string} text
 * @returns {{ text: string, found: number }}
 */
export function mask(text) {
  let found = 0;
  /** @param {string} secret */
  const hide = (secret) => {
    found += 1;
    return `<secret>${secret.replace(/[^\n]/g, '')}`;
  };
  let clean = text.replace(PEM, (all) => {
    const rest = /\s*$/.exec(all)?.[0] ?? '';
    return hide(all.slice(0, all.length - rest.length)) + rest;
  });
  for (const [prefix, body, isUnsure] of TOKENS) {
    const token = new RegExp(`(?<!\\w)${prefix}(${body})(?![\\w-])`, 'g');
    clean = clean.replace(token, (all, value) => {
      return isPlaceholder(value) || (isUnsure && !isRandom(value)) ? all : hide(all);
    });
  }
  clean = clean.replace(WEB_TOKEN, hide);
  clean = clean.replace(URL_PASSWORD, (all, before, value) => {
    const user = before.slice(3, -1);
    return isPlaceholder(value) || value === user ? all : before + hide(value);
  });
  clean = clean.replace(BEARER, (all, before, value) => {
    return isRandom(value) && !isPlaceholder(value) ? before + hide(value) : all;
  });
  clean = clean.replace(ASSIGNED, (all, before, name, rest, quote, quoted, bare) => {
    const value = quoted ?? bare;
    // `tokenizer` is another word, `tokenValue` is not.
    const isOther = /^[a-z]/.test(rest) || (/^[A-Z]/.test(rest) && /[A-Z]$/.test(name));
    const isWeak = /^(?:pass|pwd)/i.test(name) && quote && isPassword(value);
    const isCode = value.length >= 16 && /^[\w+/=.-]+$/.test(value) && isRandom(value);
    const isSecret = (isWeak || isCode) && !isPlaceholder(value) && !UUID.test(value);
    if (isOther || AFTER.test(rest) || !isSecret) return all;
    return before + (quote ?? '') + hide(value) + (quote ?? '');
  });
  clean = clean.replace(EMAIL, (all, domain, top) => {
    const local = all.slice(0, all.indexOf('@'));
    if (NOBODY.test(local) || NOWHERE.test(domain) || !TOP.test(top)) return all;
    found += 1;
    return 'user@example.com';
  });
  return { text: clean, found };
}
