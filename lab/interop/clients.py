"""Clients of other APIs against a running `elapid serve`: `openai` (tools, responses), `ollama`,
`anthropic`, and with --node DIR the `ollama` of npm, installed there.

usage: python clients.py [URL] [--tools yes|no] [--node DIR]

URL is http://127.0.0.1:8012 unless given. The server must hold a chat model. With --tools yes its
template must know tools (any small model will do: calls are forced); with no they must be refused
by name. Each check prints one line; exit code 1 if any fails.
"""
import argparse
import json
import subprocess
import sys
import traceback

import anthropic
import ollama
import openai

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASK = "What is the weather in Oslo?"
TURNS = [{"role": "user", "content": ASK}]

NODE = """
const { Ollama } = require('ollama');
(async () => {
  const client = new Ollama({ host: process.argv[1] });
  const model = (await client.list()).models[0].name;
  const messages = [{ role: 'user', content: 'Say hello.' }];
  const options = { temperature: 0, num_predict: 12 };
  const whole = await client.chat({ model, messages, options });
  let text = '';
  for await (const part of await client.chat({ model, messages, options, stream: true }))
    text += part.message.content;
  if (text !== whole.message.content) throw new Error(text + ' / ' + whole.message.content);
  const one = await client.generate({ model, prompt: 'Once', raw: true, options });
  const vectors = await client.embed({ model, input: ['a', 'b'] });
  if (vectors.embeddings.length !== 2 || !one.done) throw new Error('embed or generate');
  console.log(JSON.stringify(text));
})().catch((error) => { console.error(error); process.exit(1); });
"""


def is_city(value):
    return value["city"] in ("Oslo", "Rome")


class Checks:
    def __init__(self, args):
        self.args = args
        self.url = args.url.rstrip("/")
        self.has_tools = args.tools == "yes"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.ollama = ollama.Client(host=self.url)
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)
        self.model = self.openai.models.list().data[0].id

    def openai_other_name(self):
        answer = self.openai.chat.completions.create(
            model="google/gemini-2.5-flash", messages=TURNS, max_tokens=4)
        assert answer.model == self.model, answer.model
        return answer.model

    def openai_unknown_field(self):
        try:
            self.openai.chat.completions.create(
                model=self.model, messages=TURNS, max_tokens=4, extra_body={"mirostat": 2})
        except openai.BadRequestError as error:
            assert error.param == "mirostat", error
            return error.message
        raise AssertionError("mirostat was accepted")

    def openai_tools(self):
        ask = dict(model=self.model, messages=TURNS, tools=TOOLS, max_tokens=80)
        if not self.has_tools:
            try:
                self.openai.chat.completions.create(**ask)
            except openai.BadRequestError as error:
                assert error.param == "tools" and error.code == "no_tools", error
                return "refused by name"
            raise AssertionError("tools were accepted")
        choice = self.openai.chat.completions.create(**ask, tool_choice="required").choices[0]
        assert choice.finish_reason == "tool_calls", choice
        call = choice.message.tool_calls[0]
        assert call.function.name == "weather" and is_city(json.loads(call.function.arguments))
        turns = TURNS + [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3 C"}]
        after = self.openai.chat.completions.create(
            model=self.model, messages=turns, tools=TOOLS, max_tokens=12).choices[0]
        return f"{call.function.arguments}, then {after.message.content!r}"

    def openai_tools_stream(self):
        if not self.has_tools:
            return "not asked"
        named = {"type": "function", "function": {"name": "weather"}}
        with self.openai.chat.completions.stream(
                model=self.model, messages=TURNS, tools=TOOLS, tool_choice=named,
                max_tokens=80) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in kinds, kinds
        assert is_city(json.loads(final.message.tool_calls[0].function.arguments)), final
        return f"{len(kinds)} events"

    def openai_responses(self):
        answer = self.openai.responses.create(
            model=self.model, input=ASK, instructions="Be short.", max_output_tokens=12,
            temperature=0)
        assert answer.output_text and answer.usage.output_tokens > 0, answer
        with self.openai.responses.stream(
                model=self.model, input=ASK, instructions="Be short.", max_output_tokens=12,
                temperature=0) as stream:
            kinds = [event.type for event in stream]
        # The helper of the client returns only what is complete.
        assert kinds[0] == "response.created", kinds
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
        return repr(answer.output_text)

    def openai_responses_tools(self):
        if not self.has_tools:
            return "not asked"
        tool = {"type": "function", "strict": True, **FUNCTION}
        ask = dict(model=self.model, input=ASK, tools=[tool], tool_choice="required")
        call = self.openai.responses.create(**ask).output[0]
        assert call.type == "function_call" and is_city(json.loads(call.arguments)), call
        with self.openai.responses.stream(**ask) as stream:
            final = list(stream)[-1].response
        assert final.output[0].type == "function_call", final
        items = [{"role": "user", "content": ASK}, call.model_dump(exclude_none=True),
                 {"type": "function_call_output", "call_id": call.call_id, "output": "3 C"}]
        after = self.openai.responses.create(model=self.model, input=items, max_output_tokens=8)
        return f"{call.arguments}, then {after.output_text!r}"

    def ollama_about(self):
        listed = self.ollama.list().models
        assert listed[0].model == self.model, listed
        shown = self.ollama.show(f"{self.model}:latest")
        assert ("tools" in shown.capabilities) == self.has_tools, shown.capabilities
        assert self.ollama.ps().models[0].model == self.model
        return f"{listed[0].details.parameter_size}, {shown.capabilities}"

    def ollama_chat(self):
        ask = dict(model=self.model, messages=TURNS, options={"temperature": 0, "num_predict": 12})
        whole = self.ollama.chat(**ask)
        parts = list(self.ollama.chat(**ask, stream=True))
        text = "".join(part.message.content for part in parts)
        assert text == whole.message.content and parts[-1].done, (text, whole)
        assert parts[-1].eval_count == whole.eval_count > 0
        return repr(text)

    def ollama_format(self):
        text = self.ollama.chat(
            model=self.model, messages=TURNS, format=PARAMETERS,
            options={"num_predict": 40}).message.content
        assert is_city(json.loads(text)), text
        return text

    def ollama_generate(self):
        options = {"temperature": 0, "num_predict": 8}
        raw = self.ollama.generate(self.model, "Once upon a time", raw=True, options=options)
        chat = self.ollama.generate(self.model, "Once upon a time", system="s", options=options)
        assert raw.response != chat.response and raw.done_reason == "length", (raw, chat)
        parts = self.ollama.generate(
            self.model, "Once upon a time", raw=True, options=options, stream=True)
        assert "".join(part.response for part in parts) == raw.response
        return repr(raw.response)

    def ollama_tools(self):
        def weather(city: str) -> str:
            """Weather of a city.

            Args:
                city: its name
            """
            return city

        ask = dict(model=self.model, messages=TURNS, tools=[weather])
        if not self.has_tools:
            try:
                self.ollama.chat(**ask, options={"num_predict": 4})
            except ollama.ResponseError as error:
                assert "`tools`" in error.error, error
                return "refused by name"
            raise AssertionError("tools were accepted")
        # Ollama has no way to force a call: the conversation of one is read.
        call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
        turns = TURNS + [{"role": "assistant", "content": "", "tool_calls": [call]},
                         {"role": "tool", "tool_name": "weather", "content": "3 C"}]
        ask["messages"] = turns
        answer = self.ollama.chat(**ask, options={"num_predict": 12, "temperature": 0})
        return repr(answer.message.content)

    def ollama_embed(self):
        vectors = self.ollama.embed(self.model, ["a", "b"]).embeddings
        one = self.ollama.embeddings(self.model, "b").embedding
        assert list(vectors[1]) == list(one) and len(vectors) == 2
        return f"{len(one)} numbers"

    def ollama_refusal(self):
        try:
            self.ollama.chat(self.model, TURNS, options={"mirostat": 1})
        except ollama.ResponseError as error:
            assert error.status_code == 400 and "`mirostat`" in error.error, error
            return error.error
        raise AssertionError("mirostat was accepted")

    def anthropic_messages(self):
        ask = dict(model="any-other-name", max_tokens=12, system="Be short.", messages=TURNS,
                   extra_body={"temperature": 0})
        whole = self.anthropic.messages.create(**ask)
        with self.anthropic.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text, (text, whole)
        assert final.usage.output_tokens == whole.usage.output_tokens, (final, whole)
        assert whole.model == self.model and whole.stop_reason in ("max_tokens", "end_turn")
        del ask["max_tokens"], ask["extra_body"]
        counted = self.anthropic.messages.count_tokens(**ask).input_tokens
        usage = whole.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)
        return f"{text!r}, {counted} tokens"

    def anthropic_tools(self):
        tool = {"name": "weather", "description": "Weather.", "input_schema": PARAMETERS}
        ask = dict(model=self.model, max_tokens=80, messages=TURNS, tools=[tool])
        if not self.has_tools:
            try:
                self.anthropic.messages.create(**ask)
            except anthropic.BadRequestError as error:
                assert "`tools`" in str(error), error
                return "refused by name"
            raise AssertionError("tools were accepted")
        ask["tool_choice"] = {"type": "tool", "name": "weather"}
        call = self.anthropic.messages.create(**ask)
        assert call.stop_reason == "tool_use" and is_city(call.content[0].input), call
        with self.anthropic.messages.stream(**ask) as stream:
            final = stream.get_final_message()
        assert is_city(final.content[0].input), final
        result = {"type": "tool_result", "tool_use_id": call.content[0].id, "content": "3 C"}
        turns = TURNS + [{"role": "assistant", "content": call.content},
                         {"role": "user", "content": [result]}]
        ask.update(messages=turns, tool_choice={"type": "auto"}, max_tokens=12)
        after = self.anthropic.messages.create(**ask)
        return f"{final.content[0].input}, then {after.content[0].to_dict()}"

    def anthropic_refusal(self):
        try:
            self.anthropic.messages.create(
                model=self.model, max_tokens=2000, messages=TURNS,
                thinking={"type": "enabled", "budget_tokens": 1024})
        except anthropic.BadRequestError as error:
            assert error.body["error"]["type"] == "invalid_request_error", error.body
            return error.body["error"]["message"]
        raise AssertionError("thinking was accepted")

    def npm_ollama(self):
        if not self.args.node:
            return "not asked"
        done = subprocess.run(["node", "-e", NODE, self.url], cwd=self.args.node,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


ORDER = ["openai_other_name", "openai_unknown_field", "openai_tools", "openai_tools_stream",
         "openai_responses", "openai_responses_tools", "ollama_about", "ollama_chat",
         "ollama_format", "ollama_generate", "ollama_tools", "ollama_embed", "ollama_refusal",
         "anthropic_messages", "anthropic_tools", "anthropic_refusal", "npm_ollama"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8012")
    parser.add_argument("--tools", choices=["yes", "no"], default="no",
                        help="whether the template of the model knows tools")
    parser.add_argument("--node", metavar="DIR", help="where npm has installed `ollama`")
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
