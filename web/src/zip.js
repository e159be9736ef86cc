// Files in one: a zip without compression, which weights would not profit from.

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc(bytes) {
  let sum = -1;
  for (let at = 0; at < bytes.length; at++) sum = TABLE[(sum ^ bytes[at]) & 255] ^ (sum >>> 8);
  return ~sum >>> 0;
}

/** The parts of a zip of `{name: bytes}`, for a Blob. Sizes stay below 4 GiB, as all of wasm does. */
export function zip(files) {
  const parts = [];
  const entries = [];
  let place = 0;
  const fields = (view, at, list) => {
    for (const [size, value] of list) {
      if (size === 2) view.setUint16(at, value, true);
      else view.setUint32(at, value, true);
      at += size;
    }
  };
  for (const [name, bytes] of Object.entries(files)) {
    const label = new TextEncoder().encode(name);
    const sum = crc(bytes);
    // Version, UTF-8 names, stored, 1980-01-01: the same files give the same zip.
    const facts = [
      [2, 20], [2, 0x800], [2, 0], [2, 0], [2, 33], [4, sum], [4, bytes.length], [4, bytes.length],
      [2, label.length], [2, 0],
    ];
    const head = new Uint8Array(30);
    fields(new DataView(head.buffer), 0, [[4, 0x04034b50], ...facts]);
    parts.push(head, label, bytes);
    const entry = new Uint8Array(46);
    const rest = [[2, 0], [2, 0], [2, 0], [4, 0], [4, place]];
    fields(new DataView(entry.buffer), 0, [[4, 0x02014b50], [2, 20], ...facts, ...rest]);
    entries.push(entry, label);
    place += head.length + label.length + bytes.length;
  }
  const size = entries.reduce((sum, part) => sum + part.length, 0);
  const n = entries.length / 2;
  const end = new Uint8Array(22);
  const list = [[4, 0x06054b50], [2, 0], [2, 0], [2, n], [2, n], [4, size], [4, place], [2, 0]];
  fields(new DataView(end.buffer), 0, list);
  return [...parts, ...entries, end];
}
