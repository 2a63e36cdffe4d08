// A model that a file holds, behind the same questions as the server: `call` and `stream` answer what
// api.js asks for, by path and body. It runs in a worker (worker.js), or in Node.

import { INSPECTIONS } from "./inspections.js";
import { GRADIENTS } from "./learning.js";
import { GPT } from "./network.js";
import { length, logSumExp, Reader } from "./reader.js";
import { draw, highest, randomNumbers } from "./sampling.js";
import { readTensors } from "./tensors.js";
import { StreamDecoder, Tokenizer } from "./tokenizer.js";

const MOST_TOKENS = 16; // the default of max_tokens, as in OpenAI's API

export class Model {
  // The bytes of a safetensors file whose metadata are {config, tokenizer, info, template, counts},
  // each as JSON.
  constructor(buffer) {
    const { metadata, tensors } = readTensors(buffer);
    const { config, tokenizer, info, template, counts } = Object.fromEntries(
      Object.entries(metadata).map(([name, text]) => [name, JSON.parse(text)]));
    Object.assign(this, { info, template, held: counts, tensors, gpt: new GPT(config, tensors) });
    this.reader = new Reader(this.gpt);
    this.tokenizer = tokenizer && new Tokenizer(tokenizer);
    this.pieces = Array.from({ length: config.vocab_size }, (_, id) => (this.tokenizer ? this.tokenizer.piece(id) : `id:${id}`));
  }

  piece(id) {
    return this.pieces[id];
  }

  // The matrix that reads and predicts, or both: with their names, the mean row, its dot product with
  // each row, and each row's length, also less the mean row.
  get faces() {
    this.measured ??= [this.gpt.wte, this.gpt.head].filter(Boolean).map((matrix, at) => {
      const { rows, columns, data, scales } = matrix;
      const [mean, norm] = [new Float64Array(columns), []];
      for (let id = 0; id < rows; id += 1) {
        let square = 0;
        for (let k = 0; k < columns; k += 1) {
          const x = data[id * columns + k] * scales[id];
          mean[k] += x / rows;
          square += x * x;
        }
        norm.push(Math.sqrt(square));
      }
      const along = matrix.times(mean, 1);
      const square = length(mean) ** 2;
      const centred_norm = norm.map((x, id) => Math.sqrt(Math.max(0, x * x - 2 * along[id] + square)));
      return { ...this.info.matrices[at], matrix, mean, along, square, norm, centred_norm };
    });
    return this.measured;
  }

  // Those of the matrix that predicts.
  get rows() {
    return this.faces[this.faces.length - 1];
  }

  encode(prompt) {
    if (typeof prompt !== "string") return this.checked(prompt);
    if (!this.tokenizer) throw new Error("this model has no tokenizer: give token ids");
    return this.tokenizer.encode(prompt);
  }

  checked(ids) {
    const { vocab_size } = this.gpt.config;
    const wrong = ids.find((id) => !Number.isInteger(id) || id < 0 || id >= vocab_size);
    if (wrong !== undefined) throw new Error(`${wrong} is not an id of the model's vocabulary of ${vocab_size} tokens`);
    return ids;
  }

  // Reads {text} or {ids} and returns the ids; an Error says what is wrong with them.
  async read({ text, ids: given }, pause) {
    const { n_positions } = this.gpt.config;
    const ids = this.encode(given ?? text);
    if (!ids.length) throw new Error("the text is empty: write a word");
    if (ids.length > n_positions) throw new Error(`the model reads at most ${n_positions} tokens, and the text has ${ids.length}: shorten it`);
    await this.reader.read(ids, pause);
    return ids;
  }

  async call(path, body, pause) {
    const name = path.split("/").pop();
    if (name === "model") return this.info;
    if (name === "pieces") return { pieces: this.pieces };
    if (name === "detokenize") return { prompt: this.tokenizer.decode(body.tokens) };
    if (name === "tokenize") {
      const { end } = this.tokenizer ?? {};
      const isEnd = end != null && body.prompt === this.piece(end); // so people ask for it; within a text it is ordinary text
      const tokens = isEnd ? [end] : this.encode(body.prompt);
      return { tokens, count: tokens.length, max_model_len: this.gpt.config.n_positions };
    }
    const inspect = { ...INSPECTIONS, ...GRADIENTS }[name];
    if (path === `/inspect/${name}` && inspect) return inspect(this, body, pause);
    throw new Error(`a file does not answer ${path}: ask \`tiedgpt serve\``);
  }

  // Yields the events of a streamed /v1/completions or /v1/chat/completions.
  async *stream(path, { prompt, messages, max_tokens, logprobs: top, top_logprobs = 0, seed, ...options }, pause) {
    const isChat = messages !== undefined;
    const start = isChat ? this.encodeMessages(messages) : this.encode(prompt);
    const ids = start.length ? [...start] : [this.gpt.config.bos_token_id ?? this.gpt.config.eos_token_id ?? 0];
    const room = this.gpt.config.n_positions - ids.length;
    const most = Math.min(room, max_tokens ?? (isChat ? room : MOST_TOKENS));
    if (most < 1) throw new Error(`the text fills the context of ${this.gpt.config.n_positions} tokens: shorten it`);
    const ends = [this.gpt.config.eos_token_id, ...(isChat ? this.template.ends : [])];
    const size = Math.min(this.tokenizer?.size ?? Infinity, this.gpt.config.vocab_size);
    const random = randomNumbers(seed ?? Math.floor(Math.random() * 2 ** 32));
    const decoder = this.tokenizer && new StreamDecoder(this.tokenizer, ids[ids.length - 1]);
    const event = (text, logprobs, finish_reason = null) => ({
      choices: [{ index: 0, ...(isChat ? { delta: { content: text } } : { text }), logprobs, finish_reason }],
    });
    const n_prompt = ids.length;
    for (let reason = null; !reason;) {
      await this.read({ ids }, pause);
      const logits = this.gpt.logits(this.reader.h(ids.length - 1, ids.length));
      const id = draw(logits, size, options, random);
      const isEnd = ends.includes(id);
      const text = isEnd ? "" : decoder?.push(id) ?? `${ids.length > n_prompt ? " " : ""}${id}`;
      const entry = this.likely(id, logits, isChat ? top_logprobs : top);
      ids.push(id);
      reason = isEnd ? "stop" : ids.length - n_prompt >= most ? "length" : null;
      yield event(text, top === undefined || top === false ? null : isChat ? { content: [entry] } : asColumns(entry));
      if (reason) yield event(decoder?.finish() ?? "", null, reason);
    }
  }

  // A written token with its logprob, and the likeliest in its place.
  likely(id, logits, n) {
    const total = logSumExp(logits);
    const named = (one) => ({ token: this.piece(one), token_id: one, logprob: logits[one] - total });
    return { ...named(id), top_logprobs: highest(logits, n || 0).map(named) };
  }

  // The ids of a conversation that the model is to go on with, as tiedgpt.data.templates encodes it:
  // neighbouring text is encoded as one, unless only one of the two is trained. Special tokens are
  // tokens in the template's own texts, and ordinary text in messages.
  encodeMessages(messages) {
    if (!this.template) throw new Error("this model has no chat template");
    const { begin, roles, specials, default_system: system } = this.template;
    const all = system !== null && messages[0]?.role !== "system" ? [{ role: "system", content: system }, ...messages] : messages;
    const names = Object.keys(specials).map((name) => name.replace(/\W/g, "\\$&"));
    const special = new RegExp(`(${names.join("|")})`);
    const split = (text, counted = false) => text.split(special).map((part, i) => ({ text: part, counted, id: i % 2 ? specials[part] : null }));
    const around = all.flatMap(({ role, content }) => {
      if (!roles[role]) throw new Error(`the template has no role ${role}: ${Object.keys(roles).join(", ")}`);
      const { prefix, before, after, suffix, counted } = roles[role];
      return [...split(prefix), ...split(before, counted), { text: content, counted, id: null }, ...split(after, counted), ...split(suffix)];
    });
    const reply = Object.values(roles).find(({ counted }) => counted);
    const ids = [];
    let run = { text: "" };
    for (const { text, counted, id } of [...split(begin), ...around, ...split(reply.prefix), { text: "end", id: 0 }]) {
      if (!text) continue;
      if (id !== null || counted !== run.counted) {
        ids.push(...this.tokenizer.encode(run.text));
        run = { text: "" };
      }
      if (id !== null) ids.push(id);
      else run = { text: run.text + text, counted };
    }
    return ids.slice(0, -1);
  }
}

// As OpenAI's /v1/completions writes one token.
function asColumns({ token, token_id, logprob, top_logprobs }) {
  return {
    tokens: [token], token_ids: [token_id], token_logprobs: [logprob],
    top_token_ids: [top_logprobs.map((one) => one.token_id)], top_token_logprobs: [top_logprobs.map((one) => one.logprob)],
  };
}
