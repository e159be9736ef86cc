"use strict";
const $ = (id) => document.getElementById(id);
const TABS = ["chat", "completion", "infill"];
const N_TALKS_MAX = 50;
let current = "chat";
let running = null; // AbortController of the answer under way
let editing = null; // number of the message that is being edited
let models = [];

// What a person chose and said is kept in the browser; one may forbid it.
const kept = (name) => { try { return localStorage.getItem("elapid." + name); } catch { return null; } };
const keep = (name, value) => { try { localStorage.setItem("elapid." + name, value); return true; } catch { return false; } };
// A key is kept for this tab alone.
try { $("key").value = sessionStorage.getItem("elapid.key") || ""; } catch {}
$("key").addEventListener("change", () => {
  try { sessionStorage.setItem("elapid.key", $("key").value); } catch {}
  start();
});

function setTheme(name) {
  if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
}
setTheme(kept("theme"));
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  setTheme(next);
  keep("theme", next);
});

function headers() {
  const key = $("key").value.trim();
  return key ? { "authorization": "Bearer " + key } : {};
}

async function failure(answer) {
  const text = await answer.text();
  let words = text;
  try { words = JSON.parse(text).error.message; } catch {}
  return new Error(words || "the server answered " + answer.status);
}

async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw await failure(answer);
  return answer;
}

function say(text, bad) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", Boolean(bad));
}

// Conversations: the newest first, each with a system message and what was said.
let talks = [];
try { talks = JSON.parse(kept("talks") || "[]").filter((talk) => Array.isArray(talk.messages)); } catch {}
if (!talks.length) talks = [{ system: "", messages: [] }];
let talk = talks[0];

function keepTalks() {
  talks = talks.slice(0, N_TALKS_MAX);
  // Where there is no more room the oldest go.
  for (let n = talks.length; n > 0 && !keep("talks", JSON.stringify(talks.slice(0, n))); n -= 1);
}

const title = (talk) => (talk.messages[0]?.content || "New conversation").slice(0, 40);

function showTalks() {
  $("talks").replaceChildren(...talks.map((it, n) => new Option(title(it), n, false, it === talk)));
}

function render(text) {
  try { return markdown(text); } catch { return [document.createTextNode(text)]; }
}

function turn(message, n) {
  const line = element("article", message.role);
  const head = element("header", "", message.role === "user" ? "you" : message.model || "model");
  if (message.speed) head.append(element("span", "", "· " + message.speed));
  const act = (name, work) => {
    const button = element("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => { if (!running) work(); });
    head.append(button);
  };
  if (message.role === "user") act("edit", () => {
    editing = n;
    $("message").value = message.content;
    $("editing").hidden = false;
    $("message").focus();
  });
  else act("again", () => { talk.messages.length = n; answer(); });
  act("copy", () => navigator.clipboard?.writeText(message.content));
  const body = element("div", "");
  if (message.role === "user") body.textContent = message.content;
  else body.append(...render(message.content));
  line.append(head, body);
  return line;
}

function showTalk() {
  $("system").value = talk.system || "";
  $("log").replaceChildren(...talk.messages.map(turn));
  $("log").scrollTop = $("log").scrollHeight;
  showTalks();
}

function choose_talk(next) {
  if (running) return;
  talk = next;
  editing = null;
  $("editing").hidden = true;
  showTalk();
}
$("talks").addEventListener("change", () => choose_talk(talks[Number($("talks").value)] || talk));
$("new").addEventListener("click", () => {
  if (running) return;
  if (talk.messages.length) talks.unshift({ system: $("system").value, messages: [] });
  choose_talk(talks[0]);
  $("message").focus();
});
$("delete").addEventListener("click", () => {
  if (running) return;
  talks = talks.filter((it) => it !== talk);
  if (!talks.length) talks = [{ system: "", messages: [] }];
  keepTalks();
  choose_talk(talks[0]);
});
$("system").addEventListener("change", () => { talk.system = $("system").value; keepTalks(); });

// Lines of an event stream, as objects.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function settings(key) {
  const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
  const body = { stream: true, temperature: number("temperature"), top_p: number("top_p"),
    seed: number("seed"), model: $("adapter").value || $("which").value || undefined };
  body[key] = number("n");
  return body;
}

// Sends a request and shows its answer as it comes; returns its text and what it took.
async function ask(path, body, textOf, show) {
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  say("waiting for the first token");
  const begin = performance.now();
  let first = null, n = 0, text = "", last = null, speed = "";
  try {
    const answer = await fetch(path, { method: "POST", signal: running.signal,
      headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body) });
    if (!answer.ok) throw await failure(answer);
    for await (const event of events(answer.body)) {
      const piece = textOf(event);
      if (event.usage || event.timings) last = { ...last, ...event };
      if (event.model) last = { ...last, model: event.model };
      if (!piece) continue;
      first ??= performance.now();
      n += 1;
      text += piece;
      show(text);
      say(speeds(begin, first, performance.now(), n, null));
    }
    speed = speeds(begin, first ?? performance.now(), performance.now(), n, last);
    say(speed);
  } catch (error) {
    speed = "stopped · " + speeds(begin, first ?? begin, performance.now(), n, last);
    if (error.name === "AbortError") say(speed);
    else { say(error.message, true); if (!text) throw error; }
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    watch();
  }
  return { text, speed, model: last?.model };
}

// What the server counted goes before what was seen here.
function speeds(begin, first, now, n, last) {
  const timings = last?.timings, usage = last?.usage;
  const n_tok = usage?.completion_tokens ?? timings?.predicted_n ?? n;
  const rate = timings?.predicted_per_second ?? (n_tok > 1 && now > first ? 1e3 * (n_tok - 1) / (now - first) : null);
  const parts = [n_tok + " tokens"];
  if (rate) parts.push(rate.toFixed(1) + " tokens/s");
  if (first > begin) parts.push("first token after " + (first - begin).toFixed(0) + " ms");
  const read = usage?.prompt_tokens ?? last?.tokens_evaluated ?? timings?.prompt_n;
  if (read !== undefined) parts.push("prompt " + read + " tokens");
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n ?? last?.tokens_cached;
  if (cached !== undefined) parts.push(cached + " of them kept");
  return parts.join(" · ");
}

function marked(before, middle, after) {
  return [document.createTextNode(before), element("mark", "", middle), document.createTextNode(after)];
}

// Has the model answer the conversation as it stands.
async function answer() {
  const system = $("system").value.trim();
  const said = talk.messages.map(({ role, content }) => ({ role, content }));
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...said];
  talks = [talk, ...talks.filter((it) => it !== talk)];
  showTalk();
  const made = { role: "assistant", content: "", model: $("adapter").value || $("which").value };
  const line = turn(made, talk.messages.length);
  $("log").append(line);
  let wanted = null;
  const show = (text) => {
    // Once a frame: a long answer is not laid out again for every token.
    wanted ??= requestAnimationFrame(() => {
      wanted = null;
      const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      line.lastChild.replaceChildren(...render(made.content));
      if (follows) log.scrollTop = log.scrollHeight;
    });
    made.content = text;
  };
  $("log").scrollTop = $("log").scrollHeight;
  const body = { ...settings("max_tokens"), messages, stream_options: { include_usage: true } };
  const asked = talk;
  try {
    const { text, speed, model } = await ask("/v1/chat/completions", body, (event) => event.choices?.[0]?.delta?.content, show);
    asked.messages.push({ ...made, content: text, speed, model: model || made.model });
    keepTalks();
    showTalk();
  } catch {
    // What was not answered was not said.
    const last = asked.messages.pop();
    showTalk();
    if (!$("message").value) $("message").value = last?.content || "";
  }
}

const send = {
  async completion() {
    const prompt = $("prompt").value;
    const show = (text) => $("completed").replaceChildren(...marked(prompt, text, ""));
    show("");
    const body = { ...settings("max_tokens"), prompt, stream_options: { include_usage: true } };
    await ask("/v1/completions", body, (event) => event.choices?.[0]?.text, show);
  },
  async infill() {
    const [prefix, suffix] = [$("prefix").value, $("suffix").value];
    const show = (text) => $("filled").replaceChildren(...marked(prefix, text, suffix));
    show("");
    const body = { ...settings("n_predict"), input_prefix: prefix, input_suffix: suffix };
    await ask("/infill", body, (event) => event.content, show);
  },
  async chat() {
    const content = $("message").value.trim();
    if (!content) return;
    if (editing !== null) talk.messages.length = editing;
    editing = null;
    $("editing").hidden = true;
    talk.messages.push({ role: "user", content });
    talk.system = $("system").value;
    $("message").value = "";
    await answer();
  },
};

async function go() {
  if (running) return;
  try { await send[current](); } catch {} // said already
}

function choose(name, focus) {
  current = name;
  for (const tab of TABS) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $("tab-" + tab).setAttribute("aria-selected", chosen);
    $("tab-" + tab).tabIndex = chosen ? 0 : -1;
  }
  if (focus) $("tab-" + name).focus();
}

for (const tab of TABS) $("tab-" + tab).addEventListener("click", () => { choose(tab); keep("tab", tab); });
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) choose(TABS[(TABS.indexOf(current) + step + TABS.length) % TABS.length], true);
});
$("send").addEventListener("click", go);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || event.target === $("message") && !event.shiftKey;
  if (event.key === "Enter" && sends && !event.isComposing) { event.preventDefault(); go(); }
  if (event.key === "Escape") {
    running?.abort();
    editing = null;
    $("editing").hidden = true;
  }
});

// The sum of a metric over its labels, from Prometheus text.
function metric(text, name) {
  let sum = null;
  for (const line of text.split("\n")) {
    if (!line.startsWith(name)) continue;
    const rest = line.slice(name.length);
    if (rest[0] === " " || rest[0] === "{") sum = (sum ?? 0) + Number(rest.split(" ").pop());
  }
  return sum;
}

async function watch() {
  const rows = [];
  const add = (name, value) => {
    if (value === null || value === undefined) return;
    const head = element("th", "", name);
    head.scope = "row";
    rows.push(element("tr", "", head, element("td", "", String(value))));
  };
  try {
    const health = await (await get("/health")).json();
    add("slots", health.slots_processing + " of " + (health.slots_processing + health.slots_idle) + " busy");
    add("loaded", health.models.filter((it) => it.loaded).map((it) => it.id).join(", ") || "no model");
    const text = await (await get("/metrics")).text();
    const whole = (n) => n === null ? null : n.toLocaleString("en");
    const mib = (n) => n === null ? null : (n / 1048576).toFixed(1) + " MiB";
    add("waiting", whole(metric(text, "llamacpp:requests_deferred")));
    add("prompt tokens computed", whole(metric(text, "llamacpp:prompt_tokens_total")));
    add("prompt tokens kept", whole(metric(text, "elapid_cached_tokens_total")));
    add("answer tokens", whole(metric(text, "llamacpp:tokens_predicted_total")));
    add("memory of snapshots", mib(metric(text, "elapid_snapshot_bytes")));
    add("memory of running sequences", mib(metric(text, "elapid_state_bytes")));
    add("resident memory", mib(metric(text, "elapid_resident_bytes")));
  } catch (error) { add("state", "not shown: " + error.message); }
  $("facts").replaceChildren(...rows);
}

// The adapters of the model that is chosen, and what it can do.
async function showModel() {
  const name = $("which").value;
  const own = models.filter((it) => it.parent === name);
  const was = $("adapter").value;
  const options = [new Option("as served", ""), ...own.map((it) => new Option(it.id, it.id))];
  $("adapter").replaceChildren(...options);
  if (own.some((it) => it.id === was)) $("adapter").value = was;
  $("adapter").parentElement.hidden = own.length === 0;
  document.title = "Elapid: " + name;
  try {
    const props = await (await get("/props?model=" + encodeURIComponent(name))).json();
    const can = { chat: Boolean(props.chat_template), completion: true, infill: props.infill };
    for (const tab of TABS) $("tab-" + tab).disabled = !can[tab];
    const tab = kept("tab");
    choose(TABS.includes(tab) && can[tab] ? tab : can.chat ? "chat" : "completion");
    if (current === "chat") $("message").focus();
  } catch (error) { say(error.message, true); }
}
$("which").addEventListener("change", () => { keep("model", $("which").value); showModel(); });

async function start() {
  try {
    models = (await (await get("/v1/models")).json()).data;
    const bases = models.filter((it) => !it.parent);
    const was = $("which").value || kept("model");
    $("which").replaceChildren(...bases.map((it) => new Option(it.id, it.id)));
    if (bases.some((it) => it.id === was)) $("which").value = was;
    say("");
    await showModel();
  } catch (error) { say(error.message, true); }
  watch();
}

showTalk();
start();
// Models and adapters may come and go while the page is open.
$("which").addEventListener("focus", start);
// Watched only while somebody looks.
setInterval(() => { if (!document.hidden && $("state").open) watch(); }, 2000);
