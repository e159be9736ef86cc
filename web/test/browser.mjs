// A real Chromium for tests, spoken to by its DevTools protocol over pipes: nothing to install.

import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { extname, join, normalize } from 'node:path';

const PLACES = [process.env.CHROMIUM, '/usr/bin/chromium', '/usr/bin/chromium-browser'];
export const chromium = PLACES.find((path) => path && existsSync(path));

const TYPES = {
  '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript',
  '.wasm': 'application/wasm', '.json': 'application/json', '.css': 'text/css',
};

/** Serves a folder on a free port; `requests` lists the paths that were asked for. */
export async function serve(root, headers = {}) {
  const requests = [];
  const server = createServer(async (request, response) => {
    const path = decodeURIComponent(new URL(request.url, 'http://x').pathname);
    requests.push(path);
    if (path === '/blank.html') {
      response.writeHead(200, { 'content-type': 'text/html', ...headers });
      return response.end('<!doctype html><link rel="icon" href="data:,"><title>test</title>');
    }
    try {
      const bytes = await readFile(join(root, normalize(path)));
      const type = TYPES[extname(path)] ?? 'application/octet-stream';
      response.writeHead(200, { 'content-type': type, 'content-length': bytes.length, ...headers });
      response.end(bytes);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  const stop = () => {
    server.closeAllConnections();
    server.close();
  };
  return { url: `http://127.0.0.1:${server.address().port}`, requests, stop };
}

const FLAGS = [
  '--headless', '--no-sandbox', '--disable-dev-shm-usage', '--no-first-run', '--disable-sync',
  '--disable-background-networking', '--disable-component-update', '--disable-extensions',
  '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--ignore-gpu-blocklist',
  '--remote-debugging-pipe',
];

export class Browser {
  static async start(flags = []) {
    const profile = mkdtempSync(join(tmpdir(), 'elapid-chromium-'));
    const args = [...FLAGS, ...flags, `--user-data-dir=${profile}`, 'about:blank'];
    const stdio = ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'];
    const child = spawn(chromium, args, { stdio });
    return new Browser(child, profile);
  }

  constructor(child, profile) {
    this.child = child;
    this.profile = profile;
    this.waiting = new Map();
    this.listeners = [];
    this.last = 0;
    let rest = Buffer.alloc(0);
    child.stdio[4].on('data', (more) => {
      rest = Buffer.concat([rest, more]);
      for (let end; (end = rest.indexOf(0)) >= 0; rest = rest.subarray(end + 1)) {
        this.hear(JSON.parse(rest.subarray(0, end).toString()));
      }
    });
    this.ended = new Promise((done) => child.on('exit', done));
  }

  hear(message) {
    const call = this.waiting.get(message.id);
    if (call) {
      this.waiting.delete(message.id);
      if (message.error) call.reject(new Error(message.error.message));
      else call.resolve(message.result);
    } else {
      for (const listener of this.listeners) listener(message);
    }
  }

  send(method, params = {}, sessionId) {
    return new Promise((resolve, reject) => {
      const id = ++this.last;
      this.waiting.set(id, { resolve, reject });
      this.child.stdio[3].write(JSON.stringify({ id, method, params, sessionId }) + '\0');
    });
  }

  /** Opens a page; what it and its workers ask for goes to `page.requests`. */
  async page(url) {
    const { targetId } = await this.send('Target.createTarget', { url: 'about:blank' });
    const attached = await this.send('Target.attachToTarget', { targetId, flatten: true });
    const page = new Page(this, targetId, attached.sessionId);
    this.listeners.push((message) => page.hear(message));
    await page.prepare(page.session);
    await page.send('Page.enable');
    await page.send('Runtime.enable');
    const loaded = page.once('Page.loadEventFired');
    await page.send('Page.navigate', { url });
    await loaded;
    return page;
  }

  async close() {
    this.send('Browser.close').catch(() => {});
    const late = setTimeout(() => this.child.kill('SIGKILL'), 5000);
    await this.ended;
    clearTimeout(late);
    // Some of its processes may still be writing.
    rmSync(this.profile, { recursive: true, force: true, maxRetries: 20, retryDelay: 100 });
  }
}

class Page {
  constructor(browser, target, session) {
    Object.assign(this, { browser, target, session });
    this.requests = [];
    this.console = [];
    this.sessions = new Set([session]);
    this.events = [];
  }

  /** Watches the network of the page or of one of its workers. */
  async prepare(session) {
    await this.browser.send('Network.enable', {}, session);
    const attach = { autoAttach: true, waitForDebuggerOnStart: true, flatten: true };
    await this.browser.send('Target.setAutoAttach', attach, session);
  }

  hear({ method, params, sessionId }) {
    if (!this.sessions.has(sessionId)) return;
    if (method === 'Target.attachedToTarget') {
      const session = params.sessionId;
      this.sessions.add(session);
      const resume = () => this.browser.send('Runtime.runIfWaitingForDebugger', {}, session);
      this.prepare(session).catch(() => {}).then(resume).catch(() => {});
    }
    if (method === 'Network.requestWillBeSent') this.requests.push(params.request.url);
    if (method === 'Runtime.consoleAPICalled') {
      this.console.push(params.args.map((arg) => arg.value ?? arg.description).join(' '));
    }
    for (const event of this.events.filter((it) => it.method === method)) event.resolve(params);
    this.events = this.events.filter((it) => it.method !== method);
  }

  once(method) {
    return new Promise((resolve) => this.events.push({ method, resolve }));
  }

  send(method, params) {
    return this.browser.send(method, params, this.session);
  }

  /** Runs the body of an async function in the page; `elapid` is the package. */
  async run(body, args = {}) {
    const expression = `(async (args) => {
      const elapid = await import('/web/index.js');
      ${body}
    })(${JSON.stringify(args)})`;
    const call = { expression, awaitPromise: true, returnByValue: true };
    const { result, exceptionDetails: failed } = await this.send('Runtime.evaluate', call);
    if (failed) throw new Error(failed.exception?.description ?? JSON.stringify(failed));
    return result.value;
  }

  /** Cuts the network of the page and its workers. */
  async cut() {
    const offline = { offline: true, latency: 0, downloadThroughput: 0, uploadThroughput: 0 };
    for (const session of this.sessions) {
      await this.browser.send('Network.emulateNetworkConditions', offline, session).catch(() => {});
    }
  }

  /** Ends the page's process as a crash does. */
  async kill() {
    this.send('Page.crash').catch(() => {});
    await new Promise((done) => setTimeout(done, 200));
    await this.browser.send('Target.closeTarget', { targetId: this.target }).catch(() => {});
  }
}
