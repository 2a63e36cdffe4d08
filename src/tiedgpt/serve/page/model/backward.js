// The backward pass: what autograd does in Python, for every layer of network.js.
//
// A layer is a function x -> [y, back]. back(dy) returns the gradient of x, and adds the gradients of
// the layer's parameters to `grads`, a Map from a parameter's numbers to its gradient; a parameter that
// is not in it is frozen. Shapes as in network.js: n tokens, a matrix (n, D) row after row.

import { ACTIVATIONS, attentionWeights, erf, layerNorm, linear, softmax } from "./network.js";
import { ROWS } from "./reader.js";

export const chain = (layers) => (x) => {
  const backs = [];
  for (const layer of layers) {
    const [y, back] = layer(x);
    x = y;
    backs.unshift(back);
  }
  return [x, (dy) => backs.reduce((d, back) => back(d), dy)];
};

const plus = (a, b) => a.map((x, i) => x + b[i]);

export const residual = (layer) => (x) => {
  const [y, back] = layer(x);
  return [plus(x, y), (dy) => plus(dy, back(dy))];
};

// y = x W^T + b
export const linearLayer = (parts, grads) => (x) => {
  const { weight, bias } = parts;
  const n = x.length / weight.columns;
  return [linear(x, n, parts), (dy) => {
    const db = grads.get(bias);
    if (db) for (let i = 0; i < dy.length; i += 1) db[i % db.length] += dy[i];
    if (grads.has(weight.data)) addOuter(grads.get(weight.data), dy, x, n, weight);
    return timesRows(dy, n, weight);
  }];
};

export const normLayer = (norm, config, grads) => (x) => [layerNorm(x, norm, config), (dy) => {
  const { n_embd: D, layer_norm_epsilon: epsilon } = config;
  const [dw, db, dx] = [grads.get(norm.weight), grads.get(norm.bias), new Float64Array(x.length)];
  for (let at = 0; at < x.length; at += D) {
    let [mean, variance, slope, tilt] = [0, 0, 0, 0];
    for (let k = 0; k < D; k += 1) mean += x[at + k] / D;
    for (let k = 0; k < D; k += 1) variance += (x[at + k] - mean) ** 2 / D;
    const scale = 1 / Math.sqrt(variance + epsilon);
    for (let k = 0; k < D; k += 1) {
      const [unit, d] = [(x[at + k] - mean) * scale, dy[at + k]];
      if (dw) dw[k] += d * unit;
      if (db) db[k] += d;
      slope += (d * norm.weight[k]) / D;
      tilt += (d * norm.weight[k] * unit) / D;
    }
    for (let k = 0; k < D; k += 1) dx[at + k] = scale * (dy[at + k] * norm.weight[k] - slope - (x[at + k] - mean) * scale * tilt);
  }
  return dx;
}];

const SLOPES = {
  gelu_new: (x) => {
    const [a, b] = [Math.sqrt(2 / Math.PI), 0.044715];
    const t = Math.tanh(a * (x + b * x ** 3));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * a * (1 + 3 * b * x * x);
  },
  gelu: (x) => 0.5 * (1 + erf(x / Math.SQRT2)) + (x * Math.exp((-x * x) / 2)) / Math.sqrt(2 * Math.PI),
  relu: (x) => Number(x > 0),
  silu: (x) => {
    const s = 1 / (1 + Math.exp(-x));
    return s * (1 + x * (1 - s));
  },
};

export const activationLayer = (name) => (x) => [x.map(ACTIVATIONS[name]), (dy) => dy.map((d, i) => d * SLOPES[name](x[i]))];

// Queries, keys and values (n, 3 D) -> (n, D).
export const attentionLayer = ({ n_embd: D, n_head: H }, window) => (qkv) => {
  const [n, width] = [qkv.length / (3 * D), D / H];
  const y = new Float64Array(n * D);
  const all = []; // [t, head, first, weights]
  for (let t = 0; t < n; t += 1) {
    const first = Math.max(0, t + 1 - window);
    for (let head = 0; head < H; head += 1) {
      const at = 3 * t * D + head * width;
      const weights = attentionWeights(qkv.subarray(at, at + width), qkv, first, t, D + head * width, 3 * D);
      all.push([t, head, first, weights]);
      for (let j = 0; j < weights.length; j += 1) {
        const from = (3 * (first + j) + 2) * D + head * width;
        for (let k = 0; k < width; k += 1) y[t * D + head * width + k] += weights[j] * qkv[from + k];
      }
    }
  }
  return [y, (dy) => {
    const d = new Float64Array(qkv.length);
    for (const [t, head, first, weights] of all) {
      const [query, out] = [3 * t * D + head * width, t * D + head * width];
      const slopes = new Float64Array(weights.length);
      let mean = 0;
      for (let j = 0; j < weights.length; j += 1) {
        const value = (3 * (first + j) + 2) * D + head * width;
        for (let k = 0; k < width; k += 1) {
          slopes[j] += dy[out + k] * qkv[value + k];
          d[value + k] += weights[j] * dy[out + k];
        }
        mean += weights[j] * slopes[j];
      }
      for (let j = 0; j < weights.length; j += 1) {
        const key = (3 * (first + j) + 1) * D + head * width;
        const score = (weights[j] * (slopes[j] - mean)) / Math.sqrt(width);
        for (let k = 0; k < width; k += 1) {
          d[query + k] += score * qkv[key + k];
          d[key + k] += score * qkv[query + k];
        }
      }
    }
    return d;
  }];
};

// The mean loss of states h (n, D) that are to predict `targets` (n), and the gradient of h; that of
// the matrix goes to `dw`.
export function headLoss(h, targets, matrix, dw) {
  const [n, { rows: V, columns: D }] = [targets.length, matrix];
  const dh = new Float64Array(n * D);
  let loss = 0;
  for (let at = 0; at < n; at += ROWS) {
    const some = h.subarray(at * D, Math.min(n, at + ROWS) * D);
    const m = some.length / D;
    const d = matrix.unembed(some, m);
    for (let t = 0; t < m; t += 1) {
      const p = softmax(d.subarray(t * V, (t + 1) * V));
      loss -= Math.log(p[targets[at + t]]) / n;
      p[targets[at + t]] -= 1;
    }
    for (let i = 0; i < d.length; i += 1) d[i] /= n;
    if (dw) addOuter(dw, d, some, m, matrix);
    dh.set(timesRows(d, m, matrix), at * D);
  }
  return [loss, dh];
}

// Adds the gradients of the mean loss of ids (n + 1), from the prediction `from` on, to `grads`, and
// those of the rows of W to `read` and `predict` (V, D). Returns the loss. `pause` is awaited between layers.
export async function addGradients(gpt, ids, from, { grads, read, predict }, pause) {
  const { config, ln_f: last } = gpt;
  const [n, D] = [ids.length - 1, config.n_embd];
  const linearly = (parts) => linearLayer(parts, grads);
  const layers = gpt.h.flatMap(({ ln_1, ln_2, c_attn, attn_c_proj, c_fc, mlp_c_proj, window }) => [
    [ln_1, linearly(c_attn), attentionLayer(config, window), linearly(attn_c_proj)],
    [ln_2, linearly(c_fc), activationLayer(config.activation_function), linearly(mlp_c_proj)],
  ].map(([norm, ...part]) => (config.norm === "post" ? chain([residual(chain(part)), normLayer(norm, config, grads)])
    : residual(chain([normLayer(norm, config, grads), ...part])))));
  if (last) layers.push(normLayer(last, config, grads));
  let x = gpt.embed(ids.slice(0, n), 0);
  const backs = [];
  for (const layer of layers) {
    const [y, back] = layer(x);
    x = y;
    backs.unshift(back);
    await pause();
  }
  const [loss, dh] = headLoss(x.subarray(from * D), ids.slice(from + 1), gpt.head ?? gpt.wte, predict);
  let d = new Float64Array(n * D);
  d.set(dh, from * D);
  for (const back of backs) {
    d = back(d);
    await pause();
  }
  const places = grads.get(gpt.wpe.data);
  for (let i = 0; i < d.length; i += 1) {
    if (read) read[ids[Math.floor(i / D)] * D + (i % D)] += d[i];
    if (places) places[i] += d[i];
  }
  return loss;
}

// dw (rows, columns) += dy^T x, for dy (n, rows) and x (n, columns), four tokens at a time.
function addOuter(dw, dy, x, n, { rows, columns }) {
  for (let t = 0; t < n; t += 4) {
    const [u, v, w] = [1, 2, 3].map((more) => Math.min(n - 1, t + more));
    for (let r = 0; r < rows; r += 1) {
      const a = dy[t * rows + r], b = t + 1 < n ? dy[u * rows + r] : 0;
      const c = t + 2 < n ? dy[v * rows + r] : 0, d = t + 3 < n ? dy[w * rows + r] : 0;
      for (let k = 0; k < columns; k += 1) {
        dw[r * columns + k] += a * x[t * columns + k] + b * x[u * columns + k] + c * x[v * columns + k] + d * x[w * columns + k];
      }
    }
  }
}

// dy (n, rows) times the matrix (rows, columns) -> (n, columns), four rows at a time.
function timesRows(dy, n, { rows, columns, data }) {
  const dx = new Float64Array(n * columns);
  for (let r = 0; r < rows; r += 4) {
    const [s, u, v] = [1, 2, 3].map((more) => Math.min(rows - 1, r + more));
    for (let t = 0; t < n; t += 1) {
      const a = dy[t * rows + r], b = r + 1 < rows ? dy[t * rows + s] : 0;
      const c = r + 2 < rows ? dy[t * rows + u] : 0, d = r + 3 < rows ? dy[t * rows + v] : 0;
      for (let k = 0; k < columns; k += 1) {
        dx[t * columns + k] += a * data[r * columns + k] + b * data[s * columns + k] + c * data[u * columns + k] + d * data[v * columns + k];
      }
    }
  }
  return dx;
}
