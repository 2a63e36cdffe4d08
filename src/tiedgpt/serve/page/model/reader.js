// What the network made of the last text: its states, kept, so that a text that goes on, or changes
// at its end, costs only its new tokens. Writing is reading one token after another.

import { KVCache, softmax } from "./network.js";
import { highest } from "./sampling.js";

export const ROWS = 32; // positions whose logits are held at a time

export class Reader {
  constructor(gpt) {
    const { n_positions, n_embd, n_layer } = gpt.config;
    this.gpt = gpt;
    this.ids = [];
    this.cache = new KVCache(gpt.config, n_positions);
    this.kept = Array.from({ length: n_layer + 1 }, () => new Float32Array(n_positions * n_embd));
  }

  // Has the states be those of these ids. `pause` is awaited between layers; it may throw.
  async read(ids, pause) {
    const same = ids.findIndex((id, t) => id !== this.ids[t]);
    const n = Math.min(same < 0 ? ids.length : same, this.ids.length);
    this.ids = this.ids.slice(0, n);
    this.cache.truncate(n);
    if (n === ids.length) return;
    let layer = 0;
    for (const state of this.gpt.states(ids.slice(n), this.cache)) {
      this.kept[layer].set(state, n * this.gpt.config.n_embd);
      layer += 1;
      await pause();
    }
    this.ids = [...ids];
  }

  // The state after a layer (0: the embedding), at positions from `start` to before `end`: (n, D).
  state(layer, start = 0, end = this.ids.length) {
    const { n_embd: D } = this.gpt.config;
    return Float64Array.from(this.kept[layer].subarray(start * D, end * D));
  }

  // What the head reads at these positions: (n, D).
  h(start, end) {
    return this.gpt.normalize(this.state(this.kept.length - 1, start, end));
  }
}

// Yields [position, logits (V)] of states (n, D) before the final norm, by the model's matrix or another.
export async function* logitsOf(gpt, states, pause, matrix = gpt.head ?? gpt.wte) {
  const { n_embd: D, vocab_size: V } = gpt.config;
  for (let at = 0; at < states.length; at += ROWS * D) {
    const some = states.subarray(at, at + ROWS * D);
    const logits = matrix.unembed(gpt.normalize(some), some.length / D);
    for (let row = 0; row * D < some.length; row += 1) yield [at / D + row, logits.subarray(row * V, (row + 1) * V)];
    await pause();
  }
}

// What is kept of logits (V) with the id that truly follows, null where there is none. Of equal
// logits none is ahead of another.
export function measure(logits, target, top) {
  const total = logSumExp(logits);
  const top_ids = highest(logits, Math.min(top, logits.length));
  const known = target !== null && target !== undefined;
  let ahead = 0;
  if (known) for (let id = 0; id < logits.length; id += 1) ahead += logits[id] > logits[target];
  return {
    top_ids,
    top_logprob: top_ids.map((id) => logits[id] - total),
    logprob: known ? logits[target] - total : null,
    rank: known ? 1 + ahead : 0,
  };
}

export function logSumExp(logits) {
  let [most, sum] = [-Infinity, 0];
  for (let i = 0; i < logits.length; i += 1) most = Math.max(most, logits[i]);
  for (let i = 0; i < logits.length; i += 1) sum += Math.exp(logits[i] - most);
  return most + Math.log(sum);
}

// Of probabilities.
export function entropyBits(p) {
  let sum = 0;
  for (let i = 0; i < p.length; i += 1) if (p[i] > 0) sum -= p[i] * Math.log2(p[i]);
  return sum;
}

// KL(softmax(a) || softmax(b)).
export function klBits(a, b) {
  const [p, totalA, totalB] = [softmax(a.slice()), logSumExp(a), logSumExp(b)];
  let sum = 0;
  for (let i = 0; i < p.length; i += 1) if (p[i] > 0) sum += p[i] * (a[i] - totalA - b[i] + totalB);
  return Math.max(0, sum / Math.LN2);
}

export const length = (x) => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
