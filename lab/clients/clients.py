"""One Python client against a running server: clients.py NAME URL. Prints its version and what was
done as JSON; any failure is an exception. See `run`."""
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile

name, url = sys.argv[1:3]
TURNS = [{"role": "user", "content": "Say hello in one short sentence."}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]


def same(whole, streamed):
    assert whole and whole == streamed, (whole, streamed)


def openai():
    import openai
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    args = dict(model=model, messages=TURNS, temperature=0, max_tokens=16)
    whole = client.chat.completions.create(**args).choices[0].message.content
    parts = client.chat.completions.create(stream=True, **args)
    same(whole, "".join(part.choices[0].delta.content or "" for part in parts))
    text = client.completions.create(model=model, prompt="Once", max_tokens=8, logprobs=2)
    assert len(text.choices[0].logprobs.tokens) > 0
    answer = client.responses.create(model=model, input="Say hello.", max_output_tokens=8)
    assert answer.output_text
    assert len(client.embeddings.create(model=model, input=["a", "b"]).data) == 2
    try:
        client.chat.completions.create(tools=TOOLS, **args)
        tools = "tools taken"
    except openai.BadRequestError as error:
        assert error.param == "tools"
        tools = "tools refused by name (its template has none)"
    return f"chat whole and streamed, completions with logprobs, responses, embeddings; {tools}"


def ollama():
    import ollama
    client = ollama.Client(host=url)
    model = client.list().models[0].model
    options = {"temperature": 0, "num_predict": 16}
    whole = client.chat(model=model, messages=TURNS, options=options).message.content
    parts = client.chat(model=model, messages=TURNS, options=options, stream=True)
    same(whole, "".join(part.message.content for part in parts))
    assert client.generate(model=model, prompt="Once", raw=True, options=options).response
    assert len(client.embed(model=model, input=["a", "b"]).embeddings) == 2
    assert client.show(model).modelinfo and client.ps().models
    return "list, show, ps, chat whole and streamed, generate, embed"


def anthropic():
    import anthropic
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    args = dict(model="any", messages=TURNS, max_tokens=16, extra_body={"temperature": 0})
    whole = client.messages.create(**args).content[0].text
    with client.messages.stream(**args) as stream:
        same(whole, "".join(stream.text_stream))
    assert client.messages.count_tokens(model="any", messages=TURNS).input_tokens > 0
    return "messages whole and streamed, count_tokens"


def langchain_openai():
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="any", temperature=0,
                      max_tokens=16)
    whole = chat.invoke(TURNS[0]["content"]).content
    same(whole, "".join(part.content for part in chat.stream(TURNS[0]["content"])))
    embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model="any",
                                  check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["a", "b"])) == 2
    return "invoke, stream, embed_documents"


def litellm():
    import litellm
    done = []
    for model, base in [("openai/any", f"{url}/v1"), ("ollama_chat/any", url),
                        ("anthropic/any", url)]:
        answer = litellm.completion(model=model, api_base=base, api_key="none", messages=TURNS,
                                    max_tokens=16, temperature=0)
        assert answer.choices[0].message.content
        done.append(model.split("/")[0])
    return "completion by " + ", ".join(done)


def llm():
    home = tempfile.mkdtemp()
    with open(f"{home}/extra-openai-models.yaml", "w") as file:
        file.write(f"- model_id: here\n  model_name: any\n  api_base: {url}/v1\n")
    environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
    program = os.path.join(os.path.dirname(sys.executable), "llm")
    for more in [[], ["--no-stream"]]:
        command = [program, "-m", "here", "-o", "max_tokens", "16", *more, "Say hello."]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
    return "a prompt, streamed and whole"


def aider():
    work = tempfile.mkdtemp()
    with open(f"{work}/hello.py", "w") as file:
        file.write("print('hello')\n")
    command = [os.path.join(os.path.dirname(sys.executable), "aider"), "--model", "openai/any",
               "--openai-api-base", f"{url}/v1", "--openai-api-key", "none", "--no-git", "--yes",
               "--no-show-model-warnings", "--no-check-update", "--analytics-disable",
               "--edit-format", "ask", "--map-tokens", "0", "--message",
               "What does hello.py print?", "hello.py"]
    environment = {**os.environ, "HOME": work, "TERM": "dumb"}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True,
                          timeout=500, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "Tokens:" in line)
    return f"a scripted session about a file: {line.strip()}"


did = globals()[name]()
packages = {"langchain_openai": "langchain-openai", "aider": "aider-chat"}
version = importlib.metadata.version(packages.get(name, name))
print(json.dumps({"version": version, "did": did}))
