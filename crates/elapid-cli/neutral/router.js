'use strict';

/**
 * A small HTTP router: patterns with named parameters, middleware, JSON bodies.
 *
 *   const router = new Router();
 *   router.get('/items/:id', async (req) => ({ id: req.params.id }));
 *   http.createServer(router.handler()).listen(3000);
 */

const MAX_BODY_BYTES = 1024 * 1024;

class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.name = 'HttpError';
    this.status = status;
  }
}

function compile(pattern) {
  const names = [];
  const source = pattern
    .split('/')
    .map((part) => {
      if (part.startsWith(':')) {
        names.push(part.slice(1));
        return '([^/]+)';
      }
      if (part === '*') {
        names.push('rest');
        return '(.*)';
      }
      return part.replace(/[.+?^${}()|[\]\\]/g, '\\$&');
    })
    .join('/');
  return { names, regex: new RegExp(`^${source}/?$`) };
}

async function readJson(request) {
  const chunks = [];
  let size = 0;
  for await (const chunk of request) {
    size += chunk.length;
    if (size > MAX_BODY_BYTES) {
      throw new HttpError(413, 'the body is too large');
    }
    chunks.push(chunk);
  }
  if (size === 0) {
    return null;
  }
  try {
    return JSON.parse(Buffer.concat(chunks).toString('utf8'));
  } catch (error) {
    throw new HttpError(400, `the body is not JSON: ${error.message}`);
  }
}

class Router {
  constructor() {
    this.routes = [];
    this.middleware = [];
  }

  use(fn) {
    this.middleware.push(fn);
    return this;
  }

  add(method, pattern, handler) {
    this.routes.push({ method, handler, ...compile(pattern) });
    return this;
  }

  get(pattern, handler) {
    return this.add('GET', pattern, handler);
  }

  post(pattern, handler) {
    return this.add('POST', pattern, handler);
  }

  delete(pattern, handler) {
    return this.add('DELETE', pattern, handler);
  }

  find(method, path) {
    let otherMethod = false;
    for (const route of this.routes) {
      const match = route.regex.exec(path);
      if (!match) {
        continue;
      }
      if (route.method !== method) {
        otherMethod = true;
        continue;
      }
      const params = {};
      route.names.forEach((name, index) => {
        params[name] = decodeURIComponent(match[index + 1]);
      });
      return { handler: route.handler, params };
    }
    throw otherMethod
      ? new HttpError(405, `${method} is not allowed here`)
      : new HttpError(404, `nothing is at ${path}`);
  }

  async dispatch(request) {
    const url = new URL(request.url, 'http://localhost');
    const { handler, params } = this.find(request.method, url.pathname);
    const context = {
      params,
      query: Object.fromEntries(url.searchParams),
      headers: request.headers,
      body: ['POST', 'PUT', 'PATCH'].includes(request.method) ? await readJson(request) : null,
    };
    const chain = this.middleware.reduceRight(
      (next, fn) => () => fn(context, next),
      () => handler(context),
    );
    return chain();
  }

  handler() {
    return async (request, response) => {
      const started = process.hrtime.bigint();
      let status = 200;
      let payload;
      try {
        payload = await this.dispatch(request);
        if (payload === undefined) {
          status = 204;
        }
      } catch (error) {
        status = error instanceof HttpError ? error.status : 500;
        payload = { error: status === 500 ? 'internal error' : error.message };
        if (status === 500) {
          console.error(error);
        }
      }
      const text = payload === undefined ? '' : JSON.stringify(payload);
      response.writeHead(status, {
        'content-type': 'application/json; charset=utf-8',
        'content-length': Buffer.byteLength(text),
      });
      response.end(text);
      const ms = Number(process.hrtime.bigint() - started) / 1e6;
      console.log(`${request.method} ${request.url} ${status} ${ms.toFixed(1)} ms`);
    };
  }
}

module.exports = { HttpError, Router, compile };
