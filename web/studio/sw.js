// Keeps all files of the page, so that it works offline. Its address carries the version of the
// files (main.js registers it): a new version installs a new worker with a new cache.

const version = new URL(location.href).searchParams.get('version');
const CACHE = `elapid-studio-${version}`;

self.addEventListener('install', (event) => {
  event.waitUntil(
    (async () => {
      const list = await (await fetch('files.json', { cache: 'no-cache' })).json();
      const cache = await caches.open(CACHE);
      // The page itself is asked for by the name of its folder.
      await cache.addAll(
        ['./', ...list.files].map((name) => new Request(name, { cache: 'no-cache' })),
      );
      await self.skipWaiting();
    })(),
  );
});

self.addEventListener('activate', (event) => {
  event.waitUntil(
    (async () => {
      const old = (await caches.keys()).filter(
        (n) => n.startsWith('elapid-studio-') && n !== CACHE,
      );
      await Promise.all(old.map((name) => caches.delete(name)));
      await self.clients.claim();
    })(),
  );
});

self.addEventListener('fetch', (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== 'GET' || url.origin !== location.origin) return;
  event.respondWith(
    (async () => {
      const cache = await caches.open(CACHE);
      const kept = await cache.match(event.request, { ignoreSearch: true });
      // The list says whether there is a new version: it alone is asked for anew.
      if (!url.pathname.endsWith('/files.json')) return kept ?? fetch(event.request);
      return fetch(event.request).catch(() => kept ?? Response.error());
    })(),
  );
});
