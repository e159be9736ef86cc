// One npm client against a running server: node clients.js NAME URL, in a folder that has it.
const { createRequire } = require("module");
const here = createRequire(process.cwd() + "/");
const [name, url] = process.argv.slice(2);
const messages = [{ role: "user", content: "Say hello in one short sentence." }];
const same = (a, b) => { if (!a || a !== b) throw new Error(JSON.stringify([a, b])); };

const clients = {
  async openai() {
    const OpenAI = here("openai");
    const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
    const body = { model: "any", messages, temperature: 0, max_tokens: 16 };
    const whole = await client.chat.completions.create(body);
    let text = "";
    for await (const part of await client.chat.completions.create({ ...body, stream: true }))
      text += part.choices[0]?.delta?.content ?? "";
    same(whole.choices[0].message.content, text);
    const response = await client.responses.create({ model: "any", input: "Say hello.", max_output_tokens: 8 });
    const vectors = await client.embeddings.create({ model: "any", input: ["a", "b"] });
    if (!response.output_text || vectors.data.length !== 2) throw new Error("responses, embeddings");
    return "chat whole and streamed, responses, embeddings";
  },
  async ollama() {
    const { Ollama } = here("ollama");
    const client = new Ollama({ host: url });
    const model = (await client.list()).models[0].name;
    const options = { temperature: 0, num_predict: 16 };
    const whole = await client.chat({ model, messages, options });
    let text = "";
    for await (const part of await client.chat({ model, messages, options, stream: true }))
      text += part.message.content;
    same(whole.message.content, text);
    const vectors = await client.embed({ model, input: ["a", "b"] });
    if (vectors.embeddings.length !== 2) throw new Error("embed");
    return "list, chat whole and streamed, embed";
  },
  // What llama.vscode sends, as its source has it (src/llama-server.ts): its model's name is the
  // default of its settings, which no server of one's own has.
  async vscode() {
    const post = async (path, body) => {
      const answer = await fetch(url + path, { method: "POST", body: JSON.stringify(body),
        headers: { "content-type": "application/json", authorization: "Bearer " } });
      const value = await answer.json();
      if (!answer.ok) throw new Error(path + ": " + JSON.stringify(value));
      return value;
    };
    const model = "google/gemini-2.5-flash";
    const fim = { id_slot: 0, input_prefix: "fn add(a: u32, b: u32) -> u32 {\n", input_suffix: "\n}\n",
      input_extra: [{ text: "fn one() {}", time: 1, filename: "a.rs" }], prompt: "    a +",
      n_predict: 16, n_indent: 4, top_k: 40, top_p: 0.99, stream: false, n_cmpl: 1,
      samplers: ["top_k", "top_p", "infill"], cache_prompt: true, t_max_prompt_ms: 500,
      t_max_predict_ms: 2500, response_fields: ["content", "timings/prompt_ms"], model };
    const chat = { id_slot: 0, messages, stream: false, temperature: 0.8, top_p: 0.95, max_tokens: 16,
      samplers: "edkypmxt", cache_prompt: true, t_max_prompt_ms: 500, t_max_predict_ms: 5000,
      dynatemp_range: 0, dynatemp_exponent: 1, top_k: 40, min_p: 0.05, xtc_probability: 0,
      xtc_threshold: 0.1, typical_p: 1, repeat_last_n: 64, repeat_penalty: 1, presence_penalty: 0,
      frequency_penalty: 0, dry_multiplier: 0, dry_base: 1.75, dry_allowed_length: 2,
      dry_penalty_last_n: -1, model };
    const did = ["/v1/models", "/props"];
    const models = await (await fetch(url + "/v1/models")).json();
    const props = await (await fetch(url + "/props?model=" + encodeURIComponent(models.data[0].id))).json();
    if (!props.default_generation_settings.n_ctx) throw new Error("props");
    if (props.infill) {
      if (typeof (await post("/infill", fim)).content !== "string") throw new Error("infill");
      await post("/infill", { ...fim, n_predict: 0, samplers: [], prompt: "" });
      did.push("/infill (completion, warm-up)");
    }
    if (props.chat_template) {
      await post("/v1/chat/completions", chat);
      const prompt = (await post("/apply-template", { messages, model })).prompt;
      const tokens = (await post("/tokenize", { content: prompt, add_special: true, parse_special: true })).tokens;
      if (!tokens.length) throw new Error("tokenize");
      did.push("chat", "/apply-template", "/tokenize");
    }
    const vectors = await post("/v1/embeddings", { input: "a", model, encoding_format: "float" });
    if (!vectors.data[0].embedding.length) throw new Error("embeddings");
    return [...did, "embeddings"].join(", ");
  },
};

clients[name]().then((did) => {
  const version = name === "vscode" ? process.env.VERSION : JSON.parse(require("fs").readFileSync(`node_modules/${name}/package.json`)).version;
  console.log(JSON.stringify({ version, did }));
}).catch((error) => { console.error(error); process.exit(1); });
