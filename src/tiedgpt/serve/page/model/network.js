// The network: tokens in, one prediction for each of them out. It is core/model.py in JavaScript.
//
// Follow `wte`: it reads at the bottom of `states` and predicts in `logits`.
// Shapes: n new tokens, D width, V vocabulary; a matrix (n, D) is a Float64Array, row after row.

import { Matrix } from "./tensors.js";

// One matrix, two faces: `read` takes a token's row out of it, `unembed` compares with every row.
export class TiedEmbedding extends Matrix {
  read(id) {
    return this.row(id);
  }

  // h (n, D) -> logits (n, V)
  unembed(h, n = 1) {
    return this.times(h, n);
  }
}

// Keys and values of the tokens that were read, for every layer.
export class KVCache {
  constructor({ n_layer, n_embd }, capacity) {
    const allocate = () => new Float32Array(capacity * n_embd); // zeroed pages cost nothing until they are written
    this.layers = Array.from({ length: n_layer }, () => ({ keys: allocate(), values: allocate() }));
    this.length = 0;
  }

  truncate(length) {
    this.length = Math.min(this.length, length);
  }
}

export class GPT {
  constructor(config, tensors) {
    const matrix = (name, Kind = Matrix) => new Kind(tensors[name], tensors[`${name}.scale`]);
    const linear = (name) => ({ weight: matrix(`${name}.weight`), bias: tensors[`${name}.bias`]?.data });
    const norm = (name) => ({ weight: tensors[`${name}.weight`].data, bias: tensors[`${name}.bias`]?.data });
    this.config = config;
    this.wte = matrix("wte.weight", TiedEmbedding);
    this.wpe = matrix("wpe.weight");
    this.head = config.tie_word_embeddings ? null : matrix("head.weight", TiedEmbedding); // null: wte predicts
    this.h = Array.from({ length: config.n_layer }, (_, layer) => {
      const named = (make, name) => make(`h.${layer}.${name}`);
      return new Block(config, layer, {
        ln_1: named(norm, "ln_1"), c_attn: named(linear, "attn.c_attn"), attn_c_proj: named(linear, "attn.c_proj"),
        ln_2: named(norm, "ln_2"), c_fc: named(linear, "mlp.c_fc"), mlp_c_proj: named(linear, "mlp.c_proj"),
      });
    });
    this.ln_f = config.norm === "pre" ? norm("ln_f") : null;
  }

  // Yields the residual stream (n, D) after the embedding and after each block. The ids follow those
  // in the cache. `edit` holds functions that look at what a part gives, or change it; see Block.
  *states(ids, cache, edit) {
    let x = this.embed(ids, cache.length);
    yield x;
    for (const [layer, block] of this.h.entries()) {
      x = block.forward(x, ids.length, cache.length, cache.layers[layer], edit);
      yield x;
    }
    cache.length += ids.length;
  }

  // n ids, the first of them at position `start` -> (n, D)
  embed(ids, start) {
    const { n_embd: D } = this.config;
    const x = new Float64Array(ids.length * D);
    ids.forEach((id, t) => {
      const place = this.wpe.row(start + t);
      x.set(this.wte.read(id).map((value, k) => value + place[k]), t * D); // h_0 = U W_e + W_p
    });
    return x;
  }

  // (n, D), the last state -> (n, D), what the head reads.
  normalize(x) {
    return this.ln_f ? layerNorm(x, this.ln_f, this.config) : x;
  }

  // (n, D) -> (n, V)
  logits(h, n = 1) {
    return (this.head ?? this.wte).unembed(h, n); // h_n W_e^T
  }

  // The bias (D) of the norm before the head; zeros if it has none.
  finalBias() {
    const norm = this.ln_f ?? this.h[this.h.length - 1].ln_2;
    return Float64Array.from(norm.bias ?? new Float32Array(this.config.n_embd));
  }
}

// Attention, then MLP, each added to the residual stream. GPT-2 normalises what a part reads
// (norm "pre"), GPT-1 normalises the sum ("post").
class Block {
  constructor(config, layer, parts) {
    Object.assign(this, parts, { config, layer });
    const windows = config.attention_windows ?? [0];
    this.window = windows[layer % windows.length] || Infinity;
    this.activation = ACTIVATIONS[config.activation_function];
  }

  // x (n, D), the tokens from position `start` on -> (n, D); their keys and values go into `past`.
  //
  // edit.project(layer, qkv)   looks at queries, keys and values (n, 3 D)
  // edit.weights(layer, head, position, first, weights)   looks at attention weights, from key `first` on
  // edit.heads(layer, y), edit.attention(layer, y), edit.mlp(layer, y)   change, in place, what the
  //     heads give before c_proj, and what the two parts give (n, D)
  forward(x, n, start, past, edit) {
    const { config, layer } = this;
    const isPost = config.norm === "post";
    const attend = (given) => {
      const qkv = linear(given, n, this.c_attn);
      edit?.project?.(layer, qkv);
      const y = this.attend(qkv, n, start, past, edit);
      edit?.heads?.(layer, y);
      return linear(y, n, this.attn_c_proj);
    };
    const think = (given) => linear(linear(given, n, this.c_fc).map(this.activation), n, this.mlp_c_proj);
    for (const [name, part, norm] of [["attention", attend, this.ln_1], ["mlp", think, this.ln_2]]) {
      const y = part(isPost ? x : layerNorm(x, norm, config));
      edit?.[name]?.(layer, y);
      const sum = x.map((value, k) => value + y[k]);
      x = isPost ? layerNorm(sum, norm, config) : sum;
    }
    return x;
  }

  // Queries, keys and values (n, 3 D) -> (n, D): softmax(q k^T / sqrt(D/H)) v of every head.
  attend(qkv, n, start, { keys, values }, edit) {
    const { n_embd: D, n_head: H } = this.config;
    const width = D / H;
    for (let t = 0; t < n; t += 1) {
      keys.set(qkv.subarray((3 * t + 1) * D, (3 * t + 2) * D), (start + t) * D);
      values.set(qkv.subarray((3 * t + 2) * D, (3 * t + 3) * D), (start + t) * D);
    }
    const y = new Float64Array(n * D);
    for (let t = 0; t < n; t += 1) {
      const first = Math.max(0, start + t + 1 - this.window);
      for (let head = 0; head < H; head += 1) {
        const query = qkv.subarray(3 * t * D + head * width, 3 * t * D + (head + 1) * width);
        const weights = attentionWeights(query, keys, first, start + t, head * width, D);
        edit?.weights?.(this.layer, head, start + t, first, weights);
        const to = t * D + head * width;
        for (let j = 0; j < weights.length; j += 1) {
          const from = (first + j) * D + head * width;
          for (let k = 0; k < width; k += 1) y[to + k] += weights[j] * values[from + k];
        }
      }
    }
    return y;
  }
}

// One query (D/H) against the keys first to last, which stand at `offset` of rows of D numbers.
export function attentionWeights(query, keys, first, last, offset, D) {
  const weights = new Float64Array(last - first + 1);
  for (let j = 0; j < weights.length; j += 1) {
    const from = (first + j) * D + offset;
    let sum = 0;
    for (let k = 0; k < query.length; k += 1) sum += query[k] * keys[from + k];
    weights[j] = sum / Math.sqrt(query.length);
  }
  return softmax(weights);
}

// Changes its argument.
export function softmax(x) {
  let [most, sum] = [-Infinity, 0];
  for (let i = 0; i < x.length; i += 1) most = Math.max(most, x[i]);
  for (let i = 0; i < x.length; i += 1) sum += x[i] = Math.exp(x[i] - most);
  for (let i = 0; i < x.length; i += 1) x[i] /= sum;
  return x;
}

// x (n, columns) W^T + b -> (n, rows)
export function linear(x, n, { weight, bias }) {
  const y = weight.times(x, n);
  if (bias) for (let i = 0; i < y.length; i += 1) y[i] += bias[i % bias.length];
  return y;
}

export function layerNorm(x, { weight, bias }, { n_embd: D, layer_norm_epsilon: epsilon }) {
  const y = new Float64Array(x.length);
  for (let at = 0; at < x.length; at += D) {
    let [mean, variance] = [0, 0];
    for (let k = 0; k < D; k += 1) mean += x[at + k] / D;
    for (let k = 0; k < D; k += 1) variance += (x[at + k] - mean) ** 2 / D;
    const scale = 1 / Math.sqrt(variance + epsilon);
    for (let k = 0; k < D; k += 1) y[at + k] = (x[at + k] - mean) * scale * weight[k] + (bias ? bias[k] : 0);
  }
  return y;
}

export const ACTIVATIONS = {
  gelu_new: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  relu: (x) => Math.max(0, x),
  silu: (x) => x / (1 + Math.exp(-x)),
};

// Abramowitz and Stegun, 7.1.26: within 1.5e-7.
export function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return Math.sign(x) * (1 - series * Math.exp(-x * x));
}
