// Steps of plain SGD on a text, and the rows of W that they move: tiedgpt.inspect.learn in JavaScript,
// with fp32 weights. The gradients are those of backward.js.

import { addGradients } from "./backward.js";
import { described, index, mean, sum } from "./inspections.js";
import { GPT, KVCache, softmax } from "./network.js";
import { length, logitsOf, logSumExp } from "./reader.js";
import { highest } from "./sampling.js";

const LIKELY = 10; // tokens that are listed before and after
const MOST_SECONDS = 20; // of a step
const MOST_PARAMETERS = 50e6; // of a copy that a browser has memory for
const ALONE = "a file learns in this browser alone";

// A copy of the model in training, the sums of both parts of the change of its rows, and its states.
class Learner {
  constructor({ gpt, tensors }, { untied, train }) {
    const copy = {};
    for (const [name, { shape, data }] of Object.entries(tensors)) {
      if (name.endsWith(".scale")) continue;
      const scales = tensors[`${name}.scale`]?.data;
      copy[name] = { shape, data: new Float32Array(data) };
      if (scales) copy[name].data.forEach((x, i, all) => { all[i] = x * scales[Math.floor(i / shape[1])]; });
    }
    const isTied = !gpt.head && !untied;
    if (!gpt.head && untied) copy["head.weight"] = { ...copy["wte.weight"], data: copy["wte.weight"].data.slice() };
    this.gpt = new GPT({ ...gpt.config, tie_word_embeddings: isTied }, copy);
    this.matrices = isTied ? ["wte.weight"] : ["wte.weight", "head.weight"];
    const trains = (name) => train === "all" || (train === "blocks" ? name.startsWith("h.") : name === this.matrices.at(-1));
    this.trained = Object.keys(copy).filter(trains).map((name) => copy[name].data);
    const { wte, head } = this.gpt;
    const zeros = () => new Float32Array(wte.data.length);
    Object.assign(this, { read: zeros(), predict: zeros(), pull: new Float64Array(wte.rows), states: [] });
    this.jobs = [[wte.data, "read"], [(head ?? wte).data, "predict"]].filter(([data]) => this.trained.includes(data));
  }

  async step(ids, from, lr, pause) {
    const isW = (data) => this.jobs.some(([one]) => one === data);
    const grads = new Map(this.trained.filter((data) => !isW(data)).map((data) => [data, new Float32Array(data.length)]));
    const parts = Object.fromEntries(this.jobs.map(([data, job]) => [job, new Float32Array(data.length)]));
    await addGradients(this.gpt, ids, from, { grads, ...parts }, pause);
    for (const [data, grad] of grads) for (let i = 0; i < data.length; i += 1) data[i] -= lr * grad[i];
    for (const [data, job] of this.jobs) {
      const other = this.gpt.head ? null : parts[job === "read" ? "predict" : "read"];
      for (let i = 0; i < data.length; i += 1) {
        this[job][i] -= lr * parts[job][i];
        if (job === "read" || other === null) data[i] -= lr * (parts[job][i] + (other ? other[i] : 0));
      }
    }
    const { expected } = this.states.at(-1);
    for (const id of ids.slice(from + 1)) this.pull[id] += 1;
    expected.forEach((x, id) => { this.pull[id] -= x; });
  }

  // The losses, the logits (V) at the position, and the numbers (V) of all rows.
  async observe(ids, from, position, other, pause) {
    const { wte, head, config: { n_embd: D, vocab_size: V } } = this.gpt;
    const expected = new Float64Array(V);
    let logits;
    const nats = await this.nats(ids, pause, (at, row) => {
      if (at === position) logits = Float32Array.from(row);
      if (at >= from && at < ids.length - 1) softmax(row).forEach((p, id) => { expected[id] += p; });
    });
    const [reading, predicting, together, cosine] = [0, 1, 2, 3].map(() => new Float32Array(V));
    const [twin_cosine, twin_distance] = [0, 1].map(() => head && new Float32Array(V));
    for (let id = 0; id < V; id += 1) {
      const [aa, bb, ab] = products(this.read, this.predict, id * D, D);
      [reading[id], predicting[id], together[id]] = [Math.sqrt(aa), Math.sqrt(bb), Math.sqrt(Math.max(0, aa + 2 * ab + bb))];
      cosine[id] = ab / Math.sqrt(aa * bb);
      if (!head) continue;
      const [ee, ww, ew, apart] = products(wte.data, head.data, id * D, D);
      twin_cosine[id] = ew / Math.sqrt(ee * ww);
      twin_distance[id] = Math.sqrt(apart);
    }
    this.states.push({
      loss: logits.every(Number.isFinite) ? mean(nats) : NaN, learned_loss: mean(nats.slice(from)), other_loss: other && mean(await this.nats(other, pause)),
      logits, expected, reading, predicting, together: head ? null : together, cosine, pull: Float32Array.from(this.pull), twin_cosine, twin_distance,
    });
  }

  // The loss of each prediction whose answer is known. `see` gets every position and its logits.
  async nats(ids, pause, see) {
    const { gpt } = this;
    let last;
    for (last of gpt.states(ids, new KVCache(gpt.config, ids.length))) await pause();
    const nats = [];
    for await (const [at, row] of logitsOf(gpt, last, pause)) {
      if (at < ids.length - 1) nats.push(logSumExp(row) - row[ids[at + 1]]);
      see?.(at, row);
    }
    return nats;
  }
}

// a · a, b · b, a · b and |a - b|² of the rows (D) of two matrices that begin at `at`.
function products(x, y, at, D) {
  let aa = 0, bb = 0, ab = 0, apart = 0;
  for (let k = at; k < at + D; k += 1) {
    aa += x[k] * x[k];
    bb += y[k] * y[k];
    ab += x[k] * y[k];
    apart += (x[k] - y[k]) ** 2;
  }
  return [aa, bb, ab, apart];
}

async function learn(model, options, pause) {
  const { steps = 1, lr = 0.1, predict = "all", train = "all", untied = false, other = null, position = -2, top = 10, ...subject } = options;
  const ids = model.encode(subject.ids ?? subject.text);
  if (ids.length < 2) throw new Error("the text has one token: it has nothing to predict. Write another word");
  const most = Math.min(256, model.gpt.config.n_positions);
  if (ids.length > most) throw new Error(`a page learns texts of up to ${most} tokens, and this one has ${ids.length}: shorten it`);
  if (!(lr > 0 && lr < Infinity)) throw new Error(`lr must be positive and finite, got ${lr}`);
  if (model.info.parameters > MOST_PARAMETERS) throw new Error(`${ALONE}, and this model is too large to copy there: run \`tiedgpt inspect learn\``);
  const [at, from] = [index(position, ids.length, "position"), predict === "last" ? ids.length - 2 : 0];
  const others = other === null ? null : model.encode(other);
  const key = JSON.stringify([ids, lr, predict, train, untied, other, at]);
  let learner = model.learner?.key === key ? model.learner : null; // which goes on from its last step
  const observe = () => learner.observe(ids, from, at, others, pause);
  model.learner = null; // it is kept only when it is whole
  if (!learner) {
    learner = Object.assign(new Learner(model, { untied, train }), { key });
    const since = performance.now();
    await observe();
    const seconds = (4 * (performance.now() - since)) / 1000; // two passes forward, and one back of about two
    if (seconds > MOST_SECONDS) throw new Error(`${ALONE}, and a step would take it about ${Math.round(seconds)} s: shorten the text, or run \`tiedgpt inspect learn\``);
  }
  while (learner.states.length <= steps && !learner.diverged) {
    await learner.step(ids, from, lr, pause);
    await observe();
    if (Number.isFinite(learner.states.at(-1).loss)) continue;
    learner.states.pop();
    learner.diverged = true;
  }
  model.learner = learner;
  const states = learner.states.slice(0, steps + 1);
  const last = states.at(-1);
  const far = last.reading.map((x, id) => Math.hypot(x, last.predicting[id]));
  const rows = [...new Set([...ids, ...highest(far, top).filter((id) => far[id] > 0)])].sort((a, b) => far[b] - far[a] || a - b);
  const likely = [...new Set([states[0], last].flatMap(({ logits }) => highest(logits, LIKELY)))].sort((a, b) => a - b);
  const pick = (values, some) => some.map((id) => (Number.isNaN(values[id]) ? null : values[id]));
  const of = (name, some = rows) => (last[name] ? states.map((state) => pick(state[name], some)) : null);
  const prob = (some) => states.map(({ logits }) => pick(softmax(Float64Array.from(logits)), some));
  const column = (name) => states.map((state) => state[name]);
  const isDiverged = Boolean(learner.diverged) && learner.states.length <= steps;
  return {
    reads: learner.matrices[0], predicts: learner.matrices.at(-1), predict, train, lr, ...described(model, ids, rows, likely),
    loss: column("loss"), learned_loss: column("learned_loss"), other, other_loss: others && column("other_loss"),
    position: at, likely, likely_prob: prob(likely), rows, reading: of("reading"), predicting: of("predicting"), together: of("together"),
    cosine: of("cosine"), pull: of("pull"), logit: of("logits"), prob: prob(rows), twin_cosine: of("twin_cosine"), twin_distance: of("twin_distance"),
    all_reading: last.reading, all_predicting: last.predicting,
    diverged: isDiverged, try_lr: isDiverged ? Math.min(0.1, lr / 10) : null,
  };
}

// The gradient of W before any step, in its two parts.
async function gradient_split(model, subject, pause) {
  const { info } = model;
  const ids = await model.read(subject, pause);
  if (ids.length < 2) throw new Error("the text must have at least 2 tokens");
  const copy = new Learner(model, {}).gpt;
  const { wte, config: { n_embd: D } } = copy;
  const [read, predict] = [0, 1].map(() => new Float32Array(wte.data.length));
  const loss = await addGradients(copy, ids, 0, { grads: new Map(), read, predict }, pause);
  const lengths = (part) => Array.from({ length: wte.rows }, (_, id) => length(part.subarray(id * D, (id + 1) * D)));
  const [norm_read, norm_predict] = [read, predict].map(length);
  const dot = read.reduce((total, x, i) => total + x * predict[i], 0);
  const cosine = dot / (norm_read * norm_predict);
  return {
    reads: info.matrices[0].name, predicts: info.matrices.at(-1).name, loss, norm_read, norm_predict,
    cosine: Number.isNaN(cosine) ? null : cosine, rows_read: lengths(read), rows_predict: lengths(predict),
  };
}

export const GRADIENTS = { learn, gradient_split };
