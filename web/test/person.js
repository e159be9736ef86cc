// A person at a page: clicks, types, opens folders, looks.

import { writeFileSync } from 'node:fs';

const KEYS = { Tab: 9, Enter: 13, Escape: 27, ' ': 32 };

export class Person {
  /** Opens `url` in a new tab of a browser (`browser.mjs`). */
  static async visit(browser, url, { width = 1200, height = 800, scheme = 'light', script } = {}) {
    const page = await browser.page('about:blank');
    const size = { width, height, deviceScaleFactor: 1, mobile: false };
    await page.send('Emulation.setDeviceMetricsOverride', size);
    await page.send('Emulation.setScrollbarsHidden', { hidden: true });
    const features = [{ name: 'prefers-color-scheme', value: scheme }];
    await page.send('Emulation.setEmulatedMedia', { features });
    await page.send('Page.setInterceptFileChooserDialog', { enabled: true });
    if (script) await page.send('Page.addScriptToEvaluateOnNewDocument', { source: script });
    const person = new Person(browser, page);
    await person.go(url);
    return person;
  }

  constructor(browser, page) {
    Object.assign(this, { browser, page });
    /** What the page threw or logged as an error. */
    this.problems = [];
    browser.listeners.push(({ method, params, sessionId }) => {
      if (!page.sessions.has(sessionId)) return;
      if (method === 'Target.attachedToTarget' && params.targetInfo.type === 'service_worker') {
        // It answers nothing else before it runs.
        browser.send('Runtime.runIfWaitingForDebugger', {}, params.sessionId).catch(() => {});
      }
      if (method === 'Runtime.exceptionThrown') {
        const { text, exception } = params.exceptionDetails;
        this.problems.push(exception?.description ?? text);
      }
      if (method === 'Runtime.consoleAPICalled' && params.type === 'error') {
        this.problems.push(params.args.map((arg) => arg.value ?? arg.description).join(' '));
      }
    });
  }

  async go(url) {
    const loaded = this.page.once('Page.loadEventFired');
    await this.page.send('Page.navigate', { url });
    await loaded;
  }

  /** Calls a function in the page. */
  async ask(question, ...args) {
    const expression = `(${question})(...${JSON.stringify(args)})`;
    const call = { expression, awaitPromise: true, returnByValue: true };
    const { result, exceptionDetails: failed } = await this.page.send('Runtime.evaluate', call);
    if (failed) throw new Error(failed.exception?.description ?? failed.text);
    return result.value;
  }

  /** Waits until a function in the page says yes; fails early with what the page complains of. */
  async wait(question, { args = [], seconds = 60, what = String(question) } = {}) {
    const end = Date.now() + 1000 * seconds;
    while (Date.now() < end) {
      const answer = await this.ask(question, ...args);
      if (answer) return answer;
      const alert = await this.ask(() => {
        const alert = document.querySelector('#alert');
        return alert?.hidden ? '' : alert?.textContent;
      });
      if (alert) throw new Error(`the page says: ${alert}`);
      await new Promise((done) => setTimeout(done, 100));
    }
    throw new Error(`not within ${seconds} s: ${what}`);
  }

  /** Waits until what a selector names is shown. */
  see(selector, seconds) {
    const isThere = (name) => document.querySelector(name)?.checkVisibility() === true;
    return this.wait(isThere, { args: [selector], seconds, what: selector });
  }

  text(id) {
    return this.ask((name) => document.getElementById(name).innerText, id);
  }

  async click(selector) {
    await this.see(selector);
    const place = await this.ask((name) => {
      const found = document.querySelector(name);
      found.scrollIntoView({ block: 'center', behavior: 'instant' });
      const { x, y, width, height } = found.getBoundingClientRect();
      return { x: x + width / 2, y: y + height / 2 };
    }, selector);
    const button = { button: 'left', clickCount: 1, ...place };
    for (const type of ['mousePressed', 'mouseReleased']) {
      await this.page.send('Input.dispatchMouseEvent', { type, ...button });
    }
  }

  /** Types in place of what a field holds. */
  async fill(selector, text) {
    await this.ask((name) => {
      document.querySelector(name).focus();
      document.querySelector(name).select();
    }, selector);
    await this.type(text);
  }

  type(text) {
    return this.page.send('Input.insertText', { text });
  }

  async press(key, { control = false } = {}) {
    const code = key === ' ' ? 'Space' : key;
    const modifiers = control ? 2 : 0;
    const all = { key, code, windowsVirtualKeyCode: KEYS[key], modifiers };
    const text = key === 'Enter' ? { text: '\r' } : {};
    await this.page.send('Input.dispatchKeyEvent', { type: 'keyDown', ...all, ...text });
    await this.page.send('Input.dispatchKeyEvent', { type: 'keyUp', ...all });
  }

  /** Chooses a folder in the dialog that `opens` brings up. */
  async chooseFolder(path, opens) {
    const opened = this.page.once('Page.fileChooserOpened');
    await opens();
    const { backendNodeId } = await opened;
    await this.page.send('DOM.setFileInputFiles', { files: [path], backendNodeId });
  }

  async dropFolder(path, x, y) {
    const data = { items: [], files: [path], dragOperationsMask: 1 };
    for (const type of ['dragEnter', 'dragOver', 'drop']) {
      await this.page.send('Input.dispatchDragEvent', { type, x, y, data });
    }
  }

  /** Bytes of what is downloaded after `starts`. */
  async download(folder, starts, seconds = 60) {
    const known = { behavior: 'allowAndName', downloadPath: folder, eventsEnabled: true };
    await this.browser.send('Browser.setDownloadBehavior', known);
    let limit;
    const done = new Promise((resolve, reject) => {
      this.browser.listeners.push(({ method, params }) => {
        if (method !== 'Browser.downloadProgress') return;
        if (params.state === 'completed') resolve(params.guid);
        if (params.state === 'canceled') reject(new Error('the download was cancelled'));
      });
      limit = setTimeout(() => reject(new Error('no download came')), 1000 * seconds);
    });
    await starts();
    return done.finally(() => clearTimeout(limit));
  }

  /** A picture of the whole page. */
  async picture(path) {
    const shot = { format: 'png', captureBeyondViewport: true };
    const { data } = await this.page.send('Page.captureScreenshot', shot);
    writeFileSync(path, Buffer.from(data, 'base64'));
  }

  /** Closes the tab without a word. */
  leave() {
    return this.browser.send('Target.closeTarget', { targetId: this.page.target });
  }
}
