// `worker.js` in node: the names that a browser's worker has.

import { parentPort } from 'node:worker_threads';

globalThis.self = globalThis;
self.postMessage = (message, list) => parentPort.postMessage(message, list);
await import('./worker.js');
// Messages wait until somebody listens.
parentPort.on('message', (data) => self.onmessage({ data }));
