"""The official `openai` client against a running `elapid serve`.

usage: python openai_client.py [BASE_URL] [--key KEY] [--suffix yes|no]

BASE_URL is http://127.0.0.1:8012/v1 unless given. With --key the server must demand this key, and
a wrong one is tried too. Each check prints one line; exit code 1 if any fails.
"""
import argparse
import json
import sys
import traceback

import openai

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Checks:
    def __init__(self, args):
        self.base_url = args.base_url
        self.key = args.key
        self.suffix = args.suffix
        self.client = openai.OpenAI(base_url=args.base_url, api_key=args.key or "none", max_retries=0)
        self.model = None

    def models(self):
        listed = self.client.models.list().data
        assert listed and listed[0].object == "model", listed
        self.model = listed[0].id
        assert self.client.models.retrieve(self.model).id == self.model
        return f"{len(listed)}, the first is {self.model}"

    def completion(self):
        ask = dict(model=self.model, prompt="Once upon a time", max_tokens=16, temperature=0)
        one = self.client.completions.create(**ask)
        two = self.client.completions.create(**ask)
        assert one.object == "text_completion" and one.choices[0].text, one
        assert one.choices[0].text == two.choices[0].text, "greedy is greedy"
        assert one.choices[0].finish_reason in ("stop", "length"), one
        usage = one.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
        assert 0 < usage.completion_tokens <= 16, usage
        self.greedy = one.choices[0].text
        return repr(self.greedy)

    def completion_stream(self):
        chunks = list(self.client.completions.create(
            model=self.model, prompt="Once upon a time", max_tokens=16, temperature=0, stream=True,
            stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert text == self.greedy, (text, self.greedy)
        assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices, chunks[-1]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons[-1] in ("stop", "length") and not any(reasons[:-1]), reasons
        assert len({chunk.id for chunk in chunks}) == 1, "one id for all chunks"
        return f"{len(chunks)} chunks"

    def completion_stop(self):
        stop = self.greedy[len(self.greedy) // 2:][:3]
        text = self.client.completions.create(
            model=self.model, prompt="Once upon a time", max_tokens=16, temperature=0,
            stop=[stop]).choices[0].text
        assert text == self.greedy[:self.greedy.index(stop)], (text, stop)
        return repr(stop)

    def completion_several(self):
        answer = self.client.completions.create(
            model=self.model, prompt=["Once", "Twice"], max_tokens=4, n=2, seed=7, temperature=1)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3], answer
        again = self.client.completions.create(
            model=self.model, prompt=["Once", "Twice"], max_tokens=4, n=2, seed=7, temperature=1)
        texts = lambda answer: [choice.text for choice in answer.choices]
        assert texts(answer) == texts(again), "same seed, same text"
        return "2 prompts, 2 answers each"

    def completion_logprobs(self):
        found = self.client.completions.create(
            model=self.model, prompt="Once upon a time", max_tokens=4, temperature=0,
            logprobs=3).choices[0].logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs), found
        assert all(number <= 0 for number in found.token_logprobs), found
        assert all(len(top) >= 3 for top in found.top_logprobs), found
        best = [max(top.values()) for top in found.top_logprobs]
        assert all(abs(a - b) < 1e-4 for a, b in zip(best, found.token_logprobs)), "greedy"
        return f"{found.token_logprobs}"

    def completion_suffix(self):
        ask = dict(model=self.model, prompt="fn add(a: u32, b: u32) -> u32 {\n    ",
                   suffix="\n}\n", max_tokens=16, temperature=0)
        if self.suffix == "yes":
            return repr(self.client.completions.create(**ask).choices[0].text)
        try:
            self.client.completions.create(**ask)
        except openai.BadRequestError as error:
            return f"refused: {error.body['message'][:60]}"
        raise AssertionError("a model without such tokens took a suffix")

    def chat(self):
        answer = self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=16,
            temperature=0)
        assert answer.object == "chat.completion", answer
        message = answer.choices[0].message
        assert message.role == "assistant" and isinstance(message.content, str), answer
        self.said = message.content
        parts = [{"type": "text", "text": "Say hello."}]
        again = self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": parts}],
            max_completion_tokens=16, temperature=0)
        assert again.choices[0].message.content == self.said, "parts are text"
        return repr(self.said)

    def chat_stream(self):
        stream = self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=16,
            temperature=0, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant", deltas[0]
        assert "".join(delta.content or "" for delta in deltas) == self.said, deltas
        assert chunks[-1].usage.total_tokens > 0 and not chunks[-1].choices, chunks[-1]
        return f"{len(chunks)} chunks"

    def chat_schema(self):
        answer = self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": "Name a person."}],
            max_tokens=96, temperature=0, response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}})
        text = answer.choices[0].message.content
        if answer.choices[0].finish_reason == "length":
            return f"cut off at the limit: {text!r}"
        person = json.loads(text)
        assert set(person) == {"name", "age"} and isinstance(person["age"], int), text
        return text

    def chat_logprobs(self):
        found = self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=3,
            temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert found and all(len(token.top_logprobs) == 2 for token in found), found
        return f"{[token.token for token in found]}"

    def embeddings(self):
        one = self.client.embeddings.create(model=self.model, input=["a cat", "a dog", "a cat"])
        vectors = [item.embedding for item in one.data]
        assert len(vectors) == 3 and vectors[0] == vectors[2] != vectors[1], "one for each"
        length = sum(x * x for x in vectors[0]) ** 0.5
        assert abs(length - 1) < 1e-3, length
        plain = self.client.embeddings.create(
            model=self.model, input="a cat", encoding_format="float").data[0].embedding
        assert max(abs(a - b) for a, b in zip(plain, vectors[0])) < 1e-5, "base64 and numbers"
        return f"{len(plain)} numbers, length {length:.4f}"

    def refusals(self):
        def refused(kind, call):
            try:
                call()
            except kind as error:
                body = error.body
                assert isinstance(body, dict) and body.get("message") and body.get("type"), body
                return
            raise AssertionError(f"no {kind.__name__}")

        create = self.client.completions.create
        chat = self.client.chat.completions.create
        refused(openai.BadRequestError,
                lambda: create(model=self.model, prompt="x", temperature=-3))
        refused(openai.BadRequestError, lambda: create(model=self.model, prompt="x", max_tokens=-3))
        refused(openai.BadRequestError, lambda: create(model=self.model, prompt={"no": "text"}))
        refused(openai.BadRequestError, lambda: chat(model=self.model, messages="hello"))
        refused(openai.BadRequestError,
                lambda: chat(model=self.model, messages=[{"role": "user", "content": "x"}],
                             response_format={"type": "json_schema", "json_schema": {
                                 "name": "x", "schema": {"type": 7}}}))
        refused(openai.BadRequestError,
                lambda: create(model=self.model, prompt="x", extra_body={"mirostat": 2}))
        refused(openai.NotFoundError, lambda: self.client.models.retrieve("no-such-model"))
        refused(openai.NotFoundError, lambda: self.client.fine_tuning.jobs.list())
        return "BadRequestError, NotFoundError"

    def keys(self):
        if not self.key:
            return "not tried: the server demands none"
        for key in ["wrong", self.key + "x", self.key[:-1] or "y"]:
            client = openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=0)
            try:
                client.models.list()
            except openai.AuthenticationError:
                continue
            raise AssertionError(f"the key {key!r} was taken")
        return "AuthenticationError"

    def hang_up(self):
        """A client that goes away in the middle leaves the server as it was."""
        stream = self.client.completions.create(
            model=self.model, prompt="Once upon a time", max_tokens=400, stream=True, temperature=1)
        next(iter(stream))
        stream.close()
        text = self.client.completions.create(
            model=self.model, prompt="Once upon a time", max_tokens=16,
            temperature=0).choices[0].text
        assert text == self.greedy, (text, self.greedy)
        return "and the next answer is right"


ORDER = ["models", "completion", "completion_stream", "completion_stop", "completion_several",
         "completion_logprobs", "completion_suffix", "chat", "chat_stream", "chat_schema",
         "chat_logprobs", "embeddings", "refusals", "keys", "hang_up"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8012/v1")
    parser.add_argument("--key")
    parser.add_argument("--suffix", choices=["yes", "no"], default="no",
                        help="whether the model can fill in the middle")
    args = parser.parse_args()
    checks, n_failed = Checks(args), 0
    for name in ORDER:
        try:
            print(f"ok      {name}: {getattr(checks, name)()}")
        except Exception as error:
            n_failed += 1
            words = str(error) or traceback.format_exc(limit=2)
            print(f"FAILED  {name}: {type(error).__name__}: {words}")
    print(f"total   {len(ORDER)} checks, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
