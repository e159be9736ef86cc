"use strict";
// Markdown and code as elements of the page. Every text goes in as a text node, so that nothing a
// model says becomes HTML; links are followed only to http and https.

const WORDS = new Set(("abstract and as assert async await bool break case catch char class const " +
  "continue crate def default defer del do double elif else end enum except export extends False " +
  "false final finally float fn for from func function global go if impl implements import in int " +
  "interface is lambda let local long loop match mod module mut namespace new nil None nonlocal " +
  "not null or package pass private protected pub public raise ref return self Self short static " +
  "str String struct super switch then this throw trait True true try type typedef typeof union " +
  "unsafe unsigned use using var void volatile where while with yield fi done echo").split(" "));
const HASH = /^(sh|bash|zsh|python|py|ruby|rb|toml|yaml|yml|perl|r|make|makefile|dockerfile)$/i;

function element(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

// Code with its comments, texts, numbers and words of most languages told apart.
function highlighted(code, language) {
  const comment = HASH.test(language || "") ? "#[^\\n]*" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const text = "\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'|`(?:\\\\.|[^`\\\\])*`?";
  const pattern = new RegExp("(" + comment + ")|(" + text + ")|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)", "g");
  const parts = [];
  let at = 0;
  for (const found of code.matchAll(pattern)) {
    const [all, c, s, n, word] = found;
    const name = c ? "c" : s ? "s" : n ? "n" : WORDS.has(word) ? "k" : "";
    if (!name) continue;
    parts.push(code.slice(at, found.index), element("span", name, all));
    at = found.index + all.length;
  }
  parts.push(code.slice(at));
  return parts;
}

// Code, bold, italics and links inside a line.
function inline(text) {
  const parts = [];
  const pattern = /(`+)(.+?)\1|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    const [all, , code, bold, italic, label, address] = found;
    parts.push(text.slice(at, found.index));
    if (code !== undefined) parts.push(element("code", "", code));
    else if (bold !== undefined) parts.push(element("strong", "", ...inline(bold)));
    else if (italic !== undefined) parts.push(element("em", "", ...inline(italic)));
    else {
      const link = element("a", "", label);
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      parts.push(link);
    }
    at = found.index + all.length;
  }
  parts.push(text.slice(at));
  return parts;
}

const LIST = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

// The blocks of a text: code, headings, lists, quotes, tables, paragraphs.
function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), blocks = [];
  let at = 0;
  const while_ = (is) => { const from = at; while (at < lines.length && is(lines[at])) at += 1; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at], fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/), heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (fence) {
      at += 1;
      const code = while_((it) => !it.trim().startsWith(fence[1]));
      at += 1;
      blocks.push(element("pre", "", element("code", "", ...highlighted(code.join("\n"), fence[2]))));
    } else if (heading) {
      at += 1;
      blocks.push(element("h" + Math.min(heading[1].length + 1, 4), "", ...inline(heading[2])));
    } else if (LIST.test(line)) {
      const ordered = line.match(LIST)[2] !== undefined;
      const items = while_((it) => LIST.test(it) && (it.match(LIST)[2] !== undefined) === ordered);
      const list = element(ordered ? "ol" : "ul", "", ...items.map((it) => element("li", "", ...inline(it.match(LIST)[3]))));
      if (ordered) list.start = Number(line.match(LIST)[2]);
      blocks.push(list);
    } else if (line.startsWith(">")) {
      const quoted = while_((it) => it.startsWith(">")).map((it) => it.replace(/^> ?/, ""));
      blocks.push(element("blockquote", "", ...markdown(quoted.join("\n"))));
    } else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1] || "x")) {
      const [head, , ...rows] = while_((it) => it.includes("|"));
      const row = (tag) => (it) => element("tr", "", ...cells(it).map((cell) => element(tag, "", ...inline(cell))));
      blocks.push(element("table", "", row("th")(head), ...rows.map(row("td"))));
    } else if (!line.trim()) {
      at += 1;
    } else {
      const plain = (it) => it.trim() && !/^\s*(```|~~~)|^#{1,6}\s|^>/.test(it) && !LIST.test(it);
      const paragraph = [lines[at++], ...while_(plain)];
      blocks.push(element("p", "", ...paragraph.flatMap((it, n) => n ? [element("br"), ...inline(it)] : inline(it))));
    }
  }
  return blocks;
}
