// Starts `elapid lsp` and shows its answers as inline suggestions. One file, no dependencies: of the
// protocol only what inline completion needs is here.

const vscode = require("vscode");
const { spawn } = require("child_process");

/** The bytes of a message. */
function framed(message) {
  const body = Buffer.from(JSON.stringify(message), "utf8");
  return Buffer.concat([Buffer.from(`Content-Length: ${body.length}\r\n\r\n`), body]);
}

/** Calls `take` with each message of a stream that comes in pieces. */
function unframed(take) {
  let held = Buffer.alloc(0);
  return (piece) => {
    held = Buffer.concat([held, piece]);
    for (;;) {
      const end = held.indexOf("\r\n\r\n");
      if (end < 0) return;
      const length = /Content-Length: *(\d+)/i.exec(held.toString("ascii", 0, end));
      const start = end + 4;
      const stop = start + Number(length ? length[1] : 0);
      if (held.length < stop) return;
      const body = held.toString("utf8", start, stop);
      held = held.subarray(stop);
      if (length) take(JSON.parse(body));
    }
  };
}

class Server {
  constructor(command, folders, log) {
    this.pending = new Map();
    this.nextId = 1;
    this.isGone = false;
    this.child = spawn(command[0], command.slice(1), { cwd: folders[0]?.uri.fsPath });
    this.child.on("error", (error) => this.end(`${command[0]} does not start: ${error.message}`));
    this.child.on("exit", (code) => this.end(`${command.join(" ")} ended with ${code}`));
    this.child.stdin.on("error", () => {});
    this.child.stdout.on("data", unframed((message) => this.take(message)));
    this.child.stderr.on("data", (text) => log.append(text.toString()));
    this.log = log;
    const folder = (one) => ({ uri: one.uri.toString(), name: one.name });
    this.ready = this.request("initialize", {
      processId: process.pid,
      rootUri: null,
      workspaceFolders: folders.map(folder),
      capabilities: {
        general: { positionEncodings: ["utf-16"] },
        textDocument: { inlineCompletion: {} },
        workspace: { workspaceFolders: true },
      },
    }).then(() => this.notify("initialized", {}));
    this.ready.catch(() => {});
  }

  take(message) {
    const waiting = this.pending.get(message.id);
    if (!waiting) return;
    this.pending.delete(message.id);
    if (message.error) waiting.reject(new Error(message.error.message));
    else waiting.resolve(message.result);
  }

  send(message) {
    if (!this.isGone) this.child.stdin.write(framed({ jsonrpc: "2.0", ...message }));
  }

  notify(method, params) {
    this.send({ method, params });
  }

  /** The answer to a request, which a token of VS Code cancels. */
  request(method, params, token) {
    const id = this.nextId++;
    const answer = new Promise((resolve, reject) => this.pending.set(id, { resolve, reject }));
    if (this.isGone) this.take({ id, error: { message: "the server has ended" } });
    this.send({ id, method, params });
    const watch = token?.onCancellationRequested(() => this.notify("$/cancelRequest", { id }));
    return answer.finally(() => watch?.dispose());
  }

  end(why) {
    if (this.isGone) return;
    this.isGone = true;
    this.log.appendLine(why);
    for (const id of [...this.pending.keys()]) this.take({ id, error: { message: why } });
  }

  stop() {
    const leave = () => this.notify("exit");
    this.request("shutdown").then(leave, leave);
  }
}

const isCode = (document) => ["file", "untitled"].includes(document.uri.scheme);
const named = (document) => ({ uri: document.uri.toString(), version: document.version });

let server;
let log;

function open(document) {
  if (!isCode(document)) return;
  const item = { ...named(document), languageId: document.languageId, text: document.getText() };
  server.notify("textDocument/didOpen", { textDocument: item });
}

function start() {
  const command = vscode.workspace.getConfiguration("elapid").get("command");
  server = new Server(command, vscode.workspace.workspaceFolders ?? [], log);
  server.ready.then(() => vscode.workspace.textDocuments.forEach(open), () => {});
}

/** Tells the server, once it knows of documents. */
function tell(method, params) {
  const to = server;
  to.ready.then(() => to.notify(method, params), () => {});
}

async function provide(document, position, context, token) {
  await server.ready;
  const params = {
    textDocument: named(document),
    position: { line: position.line, character: position.character },
    context: { triggerKind: context.triggerKind === 0 ? 1 : 2 },
  };
  const selected = context.selectedCompletionInfo;
  if (selected) {
    const place = ({ line, character }) => ({ line, character });
    const range = { start: place(selected.range.start), end: place(selected.range.end) };
    params.context.selectedCompletionInfo = { range, text: selected.text };
  }
  const list = await server.request("textDocument/inlineCompletion", params, token);
  return list.items.map(({ insertText, range: { start, end } }) => {
    const range = new vscode.Range(start.line, start.character, end.line, end.character);
    return new vscode.InlineCompletionItem(insertText, range);
  });
}

function activate(context) {
  log = vscode.window.createOutputChannel("Elapid");
  start();
  const provideInlineCompletionItems = (...asked) => provide(...asked).catch(() => []);
  context.subscriptions.push(
    log,
    { dispose: () => server.stop() },
    vscode.languages.registerInlineCompletionItemProvider(
      [{ scheme: "file" }, { scheme: "untitled" }],
      { provideInlineCompletionItems },
    ),
    vscode.commands.registerCommand("elapid.restart", () => {
      server.stop();
      start();
    }),
    vscode.workspace.onDidOpenTextDocument((document) => {
      server.ready.then(() => open(document), () => {});
    }),
    vscode.workspace.onDidCloseTextDocument((document) => {
      if (isCode(document)) tell("textDocument/didClose", { textDocument: named(document) });
    }),
    vscode.workspace.onDidChangeTextDocument(({ document, contentChanges }) => {
      if (!isCode(document) || contentChanges.length === 0) return;
      const place = ({ line, character }) => ({ line, character });
      const changes = contentChanges.map(({ range, text }) => ({
        range: { start: place(range.start), end: place(range.end) },
        text,
      }));
      tell("textDocument/didChange", { textDocument: named(document), contentChanges: changes });
    }),
    vscode.workspace.onDidChangeWorkspaceFolders(({ added, removed }) => {
      const folder = (one) => ({ uri: one.uri.toString(), name: one.name });
      const event = { added: added.map(folder), removed: removed.map(folder) };
      tell("workspace/didChangeWorkspaceFolders", { event });
    }),
  );
}

function deactivate() {
  server?.stop();
}

module.exports = { activate, deactivate };
