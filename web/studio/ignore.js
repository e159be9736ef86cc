// .gitignore: which files of a folder git would not track.

/** @typedef {{ base: string, test: RegExp, negated: boolean, folderOnly: boolean }} Rule */

/**
 * A function that tells of a path whether the ignore files among `entries` leave it out.
 * @param {{ path: string, file: () => Promise<File> }[]} entries
 * @returns {Promise<(path: string) => boolean>}
 */
export async function ignoredBy(entries) {
  const found = entries.filter(({ path }) => /(^|\/)\.gitignore$/.test(path));
  // Deeper files come later, and the last rule that fits decides.
  found.sort((a, b) => a.path.split('/').length - b.path.split('/').length);
  /** @type {Rule[]} */
  const rules = [];
  for (const { path, file } of found) {
    const base = path.slice(0, -'.gitignore'.length);
    for (const line of (await (await file()).text()).split(/\r?\n/)) {
      const rule = parse(line, base);
      if (rule) rules.push(rule);
    }
  }
  /** @type {Map<string, boolean>} */
  const folders = new Map();
  /**
   * What lies in a folder that is ignored cannot be taken back.
   * @type {(path: string) => boolean}
   */
  const isIgnoredFolder = (path) => {
    if (path === '') return false;
    let known = folders.get(path);
    if (known === undefined) {
      known = isIgnoredFolder(parent(path)) || decide(rules, path, true);
      folders.set(path, known);
    }
    return known;
  };
  return (path) => isIgnoredFolder(parent(path)) || decide(rules, path, false);
}

/** @param {string} path */
const parent = (path) => path.slice(0, Math.max(0, path.lastIndexOf('/')));

/** @param {Rule[]} rules @param {string} path @param {boolean} isFolder */
function decide(rules, path, isFolder) {
  for (let idx = rules.length - 1; idx >= 0; idx -= 1) {
    const { base, test, negated, folderOnly } = rules[idx];
    const fits = path.startsWith(base) && (isFolder || !folderOnly);
    if (fits && test.test(path.slice(base.length))) return !negated;
  }
  return false;
}

/**
 * @param {string} line
 * @param {string} base The folder of the ignore file, with a slash at its end, or nothing.
 * @returns {Rule | undefined}
 */
export function parse(line, base) {
  let glob = line.replace(/(?<!\\) +$/, '');
  if (glob === '' || glob.startsWith('#')) return undefined;
  const negated = glob.startsWith('!');
  if (negated) glob = glob.slice(1);
  const folderOnly = glob.endsWith('/');
  if (folderOnly) glob = glob.slice(0, -1);
  // With a slash inside it is a path from here, else a name at any depth.
  const isAnchored = glob.includes('/');
  glob = glob.replace(/^\//, '');
  if (glob === '') return undefined;
  try {
    const test = new RegExp(`^${isAnchored ? '' : '(?:.*/)?'}${toPattern(glob)}$`);
    return { base, test, negated, folderOnly };
  } catch {
    return undefined; // a range that is none, such as [z-a]
  }
}

/** @param {string} glob */
function toPattern(glob) {
  const part = /^(?:\/\*\*(?=\/)|\/\*\*$|\*+|\?|\[(!|\^)?(\]?[^\]]*)\]|\\(.)|[^])/;
  let pattern = glob.startsWith('**/') ? '(?:.*/)?' : '';
  for (let rest = glob.replace(/^\*\*\//, ''); rest !== '';) {
    const [all, not, range, escaped] = part.exec(rest) ?? [rest];
    rest = rest.slice(all.length);
    if (all === '/**') pattern += rest === '' ? '/.*' : '(?:/.*)?';
    else if (all.startsWith('*')) pattern += '[^/]*';
    else if (all === '?') pattern += '[^/]';
    else if (range !== undefined)
      pattern += `[${not ? '^' : ''}${range.replace(/[\\\]]/g, '\\$&')}]`;
    else pattern += (escaped ?? all).replace(/[.*+?^${}()|[\]\\/]/g, '\\$&');
  }
  return pattern;
}
