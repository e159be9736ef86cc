"""Replays the editing of a file against `/infill`, as an editor would ask.

usage: python replay.py [BASE_URL] [--file FILE] [--events 200] [--seed 1] [--tokens 16] [--key KEY]

Without --file two thousand lines of made-up code are edited. An event is an edit (typing continues,
a word is taken back, something is changed in the middle of a line) or a move of the cursor, near
or far, and one request with all text before and behind the cursor. Prints one JSON object: time to
the first token (p50, p95, worst; in ms), prompt tokens in all, of which were computed, and how many
times more there would be without snapshots. --completions FILE writes the completions, one per line,
to be compared with those of another server: greedy, they are to be the same.
"""
import argparse
import http.client
import json
import random
import statistics
import time
import urllib.parse

NOUNS = ["count", "index", "value", "node", "buffer", "offset", "limit", "result", "item"]
VERBS = ["push", "find", "insert", "merge", "split", "update", "remove", "read", "write"]
N_AT_PLACE = 10  # events before the cursor goes elsewhere
FAR = 0.25  # of the places; the others are near the last one


def made_up(n, rng):
    lines = []
    for number in range(n):
        a, b, verb, k = rng.choice(NOUNS), rng.choice(NOUNS), rng.choice(VERBS), rng.randrange(1000)
        lines.append([
            f"/// Calls {verb} for each {a} below {k}.",
            f"pub fn {verb}_{a}_{number}({b}: usize, {a}s: &mut Vec<u32>) -> usize {{",
            f"    let mut {a} = {b}.{verb}({k});",
            f"    for {b} in 0..{a}.len() {{",
            f"        {a}s.{verb}({b} + {k});",
            "    }",
            f"    {a} + {k}",
            "}"][number % 8])
    return lines


class Editing:
    """A file with a cursor."""

    def __init__(self, lines, rng):
        self.lines, self.rng = lines, rng
        self.row, self.column = len(lines) // 2, 0
        self.typed = ""

    def event(self, n):
        if n % N_AT_PLACE == 0:
            return self.move()
        kind = self.rng.random()
        if kind < 0.75:
            self.type()
        elif kind < 0.9:
            self.take_back()
        else:
            self.change()

    def move(self):
        far = self.rng.random() < FAR
        last = len(self.lines) - 1
        near = self.row + self.rng.randint(-25, 25)
        self.row = self.rng.randint(0, last) if far else max(0, min(last, near))
        self.column = len(self.lines[self.row])
        self.typed = ""

    def type(self):
        if not self.typed:
            self.typed = made_up(8, self.rng)[self.rng.randrange(8)]
            self.row += 1
            self.lines.insert(self.row, "")
            self.column = 0
        n = self.rng.randint(3, 8)
        self.put(self.typed[:n])
        self.typed = self.typed[n:]

    def put(self, text):
        line = self.lines[self.row]
        self.lines[self.row] = line[:self.column] + text + line[self.column:]
        self.column += len(text)

    def take_back(self):
        line = self.lines[self.row]
        n = min(self.rng.randint(1, 4), self.column)
        self.lines[self.row] = line[:self.column - n] + line[self.column:]
        self.column -= n

    def change(self):
        self.column = self.rng.randint(0, len(self.lines[self.row]))
        self.put(self.rng.choice(NOUNS))

    def around(self):
        line = self.lines[self.row]
        before = self.lines[:self.row] + [line[:self.column]]
        behind = [line[self.column:]] + self.lines[self.row + 1:]
        return "\n".join(before), "\n".join(behind)


def ask(connection, path, body, headers):
    """(milliseconds to the first token, text, last event)."""
    begin = time.perf_counter()
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"the server answered {answer.status}: {answer.read().decode()[:500]}")
    first, text, last = None, "", {}
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            continue
        if first is None:
            first = 1e3 * (time.perf_counter() - begin)
        event = json.loads(data)
        if "error" in event:
            raise SystemExit(f"the server said: {event['error']}")
        text += event.get("content", "")
        if event.get("stop"):
            last = event
    return first, text, last


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8012")
    parser.add_argument("--file")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=100_000, help="tokens before the cursor, at most")
    parser.add_argument("--key")
    parser.add_argument("--completions")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lines = made_up(args.lines, rng)
    if args.file:
        lines = open(args.file, encoding="utf-8").read().split("\n")
    editing = Editing(lines, rng)
    url = urllib.parse.urlsplit(args.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=600)
    headers = {"content-type": "application/json"}
    if args.key:
        headers["authorization"] = f"Bearer {args.key}"
    waits, n_prompt, n_computed, n_answer, texts, cold = [], 0, 0, 0, [], []
    for n in range(args.events):
        editing.event(n)
        prefix, suffix = editing.around()
        body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": args.tokens,
                "n_prefix": args.prefix, "temperature": 0, "cache_prompt": True, "stream": True}
        wait, text, last = ask(connection, url.path.rstrip("/") + "/infill", body, headers)
        timings = last["timings"]
        computed = timings["prompt_n"]
        whole = computed + timings["cache_n"]
        n_prompt, n_computed = n_prompt + whole, n_computed + computed
        n_answer += timings["predicted_n"]
        # The first has nothing to begin from, whatever the server keeps.
        (cold if n == 0 else waits).append(wait)
        texts.append(text)
    if args.completions:
        with open(args.completions, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(text) + "\n" for text in texts)
    print(json.dumps({
        "events": args.events, "lines": len(editing.lines), "first_ms_cold": round(cold[0], 1),
        "first_ms_p50": round(statistics.median(waits), 1),
        "first_ms_p95": round(percentile(waits, 0.95), 1),
        "first_ms_max": round(max(waits), 1), "prompt_tokens": n_prompt,
        "computed_tokens": n_computed, "answer_tokens": n_answer,
        "times_fewer": round(n_prompt / max(1, n_computed), 1)}))


if __name__ == "__main__":
    main()
