// What /inspect/NAME answers, computed here: the functions of tiedgpt.inspect, and their fields.
//
// Each is async (model, options, pause) -> the answer. model: see model.js. `pause` is awaited every
// few hundredths of a second, and throws when nobody wants the answer any more. Where Python has NaN
// stands null. learning.js has those that need gradients.

import { KVCache, softmax, TiedEmbedding } from "./network.js";
import { entropyBits, klBits, length, logitsOf, logSumExp, measure, ROWS } from "./reader.js";
import { highest, randomNumbers } from "./sampling.js";

export const sum = (values) => values.reduce((a, b) => a + b, 0);
export const mean = (values) => (values.length ? sum(values) / values.length : null);
const columns = (rows) => Object.fromEntries(Object.keys(rows[0]).map((name) => [name, rows.map((row) => row[name])]));

// A position or an id from 0 to n - 1; negative ones count from the end.
export function index(given, n, name) {
  if (!Number.isInteger(given) || given < -n || given >= n) throw new Error(`${name} must be from 0 to ${n - 1}, got ${given}`);
  return (given + n) % n;
}

// A token, given as its id or as its text -> its id.
function tokenId({ gpt, tokenizer }, given, name) {
  const ids = typeof given === "string" && tokenizer ? tokenizer.encode(given) : [given];
  if (ids.length !== 1) throw new Error(`${name} must be one token, got ${ids.length}: perhaps it needs a space before it`);
  return index(ids[0], gpt.config.vocab_size, name);
}

// The fields that answers share: ids, their pieces, and the words of all ids.
export function described(model, ids, ...others) {
  const words = Object.fromEntries([...ids, ...others.flat(Infinity)].map((id) => [id, model.piece(id)]));
  return { ids, pieces: ids.map((id) => words[id]), words };
}

// ---- predictions ----

async function positions(model, { top = 10, replace_at = null, replace_with = null, ...subject }, pause) {
  const { gpt, reader } = model;
  const ids = await model.read(subject, pause);
  const changed = replace_at === null ? null : await changes(model, ids, index(replace_at, ids.length, "replace_at"), replace_with, pause);
  const found = [];
  for await (const [at, logits] of logitsOf(gpt, reader.state(gpt.config.n_layer), pause)) {
    const { logprob, ...kept } = measure(logits, ids[at + 1], top);
    found.push({ ...kept, logprob, surprisal_bits: logprob === null ? null : -logprob / Math.LN2, entropy_bits: entropyBits(softmax(logits)) });
  }
  const nats = found.slice(0, -1).map(({ logprob }) => -logprob);
  const lengthOf = (id) => (id in model.tokenizer.special ? 0 : model.tokenizer.bytes(id)?.length ?? 0);
  const n_bytes = model.tokenizer && sum(ids.slice(1).map(lengthOf));
  return {
    ...described(model, ids, found.map(({ top_ids }) => top_ids)),
    target: [...ids.slice(1), -1],
    ...columns(found),
    loss: mean(nats),
    bits_per_byte: n_bytes ? sum(nats) / Math.LN2 / n_bytes : null,
    next: ids.length - 1,
    replaced: changed?.replaced ?? null,
    max_abs_change: changed?.most ?? null,
  };
}

// How far each position's logits move by another token at one position. Both texts are computed
// from their first token on: nothing of the one is used for the other.
async function changes(model, ids, at, other, pause) {
  const { gpt } = model;
  const id = other === null ? (ids[at] + 1) % gpt.config.vocab_size : tokenId(model, other, "replace_with");
  const whole = async (all) => {
    let last;
    for (last of gpt.states(all, new KVCache(gpt.config, all.length))) await pause();
    return last;
  };
  const before = logitsOf(gpt, await whole(ids), pause);
  const after = logitsOf(gpt, await whole(ids.with(at, id)), pause);
  const most = [];
  for await (const [, logits] of before) {
    const [, moved] = (await after.next()).value;
    most.push(logits.reduce((far, logit, i) => Math.max(far, Math.abs(moved[i] - logit)), 0));
  }
  return { replaced: [at, ids[at], id], most };
}

async function dot(model, { position = -1, top = 10, ...subject }, pause) {
  const { gpt, reader, rows } = model;
  const ids = await model.read(subject, pause);
  const at = index(position, ids.length, "position");
  const h = reader.h(at, at + 1);
  const [logits, h_norm] = [gpt.logits(h), length(h)];
  const { top_ids } = measure(logits, null, top);
  const bias = rows.matrix.times(gpt.finalBias(), 1);
  const p = softmax(logits.slice());
  const along = sum(h.map((x, k) => x * rows.mean[k]));
  const all_cos = Array.from(logits, (logit, id) => logit / (h_norm * rows.norm[id] + 1e-30));
  const all_centred_cos = Array.from(logits, (logit, id) => (logit - along) / (h_norm * rows.centred_norm[id] + 1e-30));
  const of = (values) => top_ids.map((id) => values[id]);
  const { words } = described(model, [ids[at]], top_ids);
  return {
    matrix: rows.name, does: rows.does, position: at, piece: words[ids[at]], h_norm, ids: top_ids, pieces: of(words),
    logit: of(logits), row_norm: of(rows.norm), cos: of(all_cos), centred_norm: of(rows.centred_norm), centred_cos: of(all_centred_cos),
    bias_part: of(bias), gain_part: top_ids.map((id) => logits[id] - bias[id]), head_bias: top_ids.map(() => 0), prob: of(p),
    rank_cos: top_ids.map((id) => 1 + all_cos.reduce((n, cos) => n + (cos > all_cos[id]), 0)),
    all_norm: rows.norm, all_cos, all_centred_norm: rows.centred_norm, all_centred_cos,
    row_read: Array.from(gpt.wte.read(ids[at])), row_place: Array.from(gpt.wpe.row(at)), h: Array.from(h),
    rows: top_ids.map((id) => Array.from(rows.matrix.row(id))),
  };
}

async function random_head(model, { top = 5, seed = 0, ...subject }, pause) {
  const { gpt, reader, info } = model;
  const { vocab_size: V, n_embd: D } = gpt.config;
  const std = 0.02;
  const ids = await model.read(subject, pause);
  if (ids.length < 2) throw new Error("the text must have at least 2 tokens");
  const random_matrix = new TiedEmbedding({ shape: [V, D], data: normals(V * D, std, seed) });
  const outcome = async (matrix) => {
    const nats = [];
    let last;
    for await (const [at, logits] of logitsOf(gpt, reader.state(gpt.config.n_layer), pause, matrix)) {
      last = measure(logits, ids[at + 1], top);
      nats.push(-last.logprob);
    }
    return { ...last, loss: mean(nats.slice(0, -1)) };
  };
  const [own, random] = [await outcome(), await outcome(random_matrix)];
  return {
    loss: own.loss, random_loss: random.loss, uniform_loss: Math.log(V), std, parameters: info.parameters,
    random_parameters: info.parameters + (info.tied ? V * D : 0), top_ids: own.top_ids, top_logprob: own.top_logprob,
    random_top_ids: random.top_ids, random_top_logprob: random.top_logprob, words: described(model, [], own.top_ids, random.top_ids).words,
  };
}

// n numbers from N(0, std) by Box and Muller; not torch's of the same seed.
function normals(n, std, seed) {
  const random = randomNumbers(seed);
  return Float32Array.from({ length: n }, () => std * Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random()));
}

// ---- layers ----

async function lens(model, { top = 5, position = -1, ...subject }, pause) {
  const { gpt, reader } = model;
  const { n_embd: D } = gpt.config;
  const ids = await model.read(subject, pause);
  const at = index(position, ids.length, "position");
  const made = reader.kept.map(() => []);
  const there = [];
  for (let from = 0; from < ids.length; from += ROWS) {
    const end = Math.min(from + ROWS, ids.length);
    const own = [];
    for (let layer = gpt.config.n_layer; layer >= 0; layer -= 1) {
      const state = reader.state(layer, from, end);
      for await (const [row, logits] of logitsOf(gpt, state, pause)) {
        if (layer === gpt.config.n_layer) own[row] = logits;
        if (from + row === at) there[layer] = logits;
        const { logprob, rank, ...kept } = measure(logits, ids[from + row + 1], top);
        made[layer][from + row] = { ...kept, target_logprob: logprob, target_rank: rank, kl_bits: klBits(own[row], logits),
          state_norm: length(state.subarray(row * D, (row + 1) * D)) };
      }
    }
  }
  const watch = [...new Set([...there].reverse().map((logits) => highest(logits, 1)[0]))];
  const found = columns(made.map(columns));
  return {
    layers: ["wte + wpe", ...gpt.h.map((_, layer) => `h.${layer}`)], ...found, ...described(model, ids, watch, found.top_ids),
    position: at, watch, watch_logprob: there.map((logits) => watch.map((id) => logits[id] - logSumExp(logits))),
  };
}

async function attention(model, { layer = 0, ...subject }, pause) {
  const { gpt } = model;
  const { n_layer, n_head, n_embd: D } = gpt.config;
  const ids = await model.read(subject, pause);
  const [n, kept, width] = [ids.length, index(layer, n_layer, "layer"), D / n_head];
  const perHead = (make) => Array.from({ length: n_head }, make);
  const patterns = perHead(() => Array.from(ids, () => new Float32Array(n)));
  const found = { entropy: [], first_share: [], previous_share: [] };
  for (const values of Object.values(found)) values.push(...Array.from({ length: n_layer }, () => perHead(() => (n > 1 ? 0 : null))));
  const weights = (at, head, t, first, shares) => {
    if (at === kept) patterns[head][t].set(shares, first);
    if (t === 0) return;
    found.entropy[at][head] += entropyBits(shares) / (n - 1);
    found.first_share[at][head] += first === 0 ? shares[0] / (n - 1) : 0;
    found.previous_share[at][head] += shares.length > 1 ? shares[shares.length - 2] / (n - 1) : 0;
  };
  const [queries, keys] = [perHead(() => []), perHead(() => [])];
  const project = (at, qkv) => {
    if (at !== kept) return;
    for (let t = 0; t < n; t += 1) {
      for (let head = 0; head < n_head; head += 1) {
        const from = 3 * t * D + head * width;
        queries[head].push(Array.from(qkv.subarray(from, from + width)));
        keys[head].push(Array.from(qkv.subarray(from + D, from + D + width)));
      }
    }
  };
  for (const _ of gpt.states(ids, new KVCache(gpt.config, n), { weights, project })) await pause();
  return { ...described(model, ids), layer: kept, patterns, queries, keys, ...found };
}

// x (n, D), the state that enters a layer -> the last state. `edit` is of that layer.
async function finish(gpt, x, layer, pause, edit) {
  const n = x.length / gpt.config.n_embd;
  const { layers } = new KVCache(gpt.config, n);
  for (let at = layer; at < gpt.config.n_layer; at += 1) {
    x = gpt.h[at].forward(x, n, 0, layers[at], at === layer ? edit : undefined);
    await pause();
  }
  return x;
}

// Of what the library's patch replaces, the state that enters a layer, at one position.
async function patch(model, { corrupted: text, answer, wrong = -1, ...subject }, pause) {
  const { gpt, reader } = model;
  const { n_embd: D, n_layer } = gpt.config;
  const ids = await model.read(subject, pause);
  const kept = reader.kept.map((_, layer) => reader.state(layer));
  const corrupted_ids = await model.read({ text }, pause);
  if (corrupted_ids.length !== ids.length) throw new Error(`corrupted must have the ${ids.length} tokens of the text, got ${corrupted_ids.length}`);
  const score = (x) => {
    const logits = gpt.logits(gpt.normalize(x.subarray(-D)));
    return logits[answer] - (wrong < 0 ? logSumExp(logits) : logits[wrong]);
  };
  const residual = [];
  for (let layer = 0; layer < n_layer; layer += 1) {
    const scores = [];
    for (let at = 0; at < ids.length * D; at += D) {
      const x = reader.state(layer);
      x.set(kept[layer].subarray(at, at + D), at);
      scores.push(score(await finish(gpt, x, layer, pause)));
    }
    residual.push(scores);
  }
  const ends = { clean: score(kept[n_layer]), corrupted: score(reader.state(n_layer)) };
  return { ...described(model, ids, corrupted_ids, [answer, wrong < 0 ? answer : wrong]), corrupted_ids, answer, wrong, ...ends, residual };
}

async function ablate(model, { mode = "zero", ...subject }, pause) {
  const { gpt, reader } = model;
  const { n_embd: D, n_head, n_layer } = gpt.config;
  const ids = await model.read(subject, pause);
  if (ids.length < 2) throw new Error("the text must have at least 2 tokens");
  const loss = async (state) => {
    const nats = [];
    for await (const [at, logits] of logitsOf(gpt, state.subarray(0, -D), pause)) nats.push(logSumExp(logits) - logits[ids[at + 1]]);
    return mean(nats);
  };
  const replace = (from, width) => (_, y) => { // in every position, from a column on
    for (let k = from; k < from + width; k += 1) {
      let value = 0;
      if (mode === "mean") for (let at = k; at < y.length; at += D) value += y[at] / ids.length;
      for (let at = k; at < y.length; at += D) y[at] = value;
    }
  };
  const whole = await loss(reader.state(n_layer));
  const without = async (layer, edit) => (await loss(await finish(gpt, reader.state(layer), layer, pause, edit))) - whole;
  const found = { heads: [], attention: [], mlp: [] };
  for (let layer = 0; layer < n_layer; layer += 1) {
    const heads = [];
    for (let head = 0; head < n_head; head += 1) heads.push(await without(layer, { heads: replace((head * D) / n_head, D / n_head) }));
    found.heads.push(heads);
    for (const part of ["attention", "mlp"]) found[part].push(await without(layer, { [part]: replace(0, D) }));
  }
  return { ids, mode, loss: whole, ...found };
}

// ---- rows ----

async function neighbours(model, { token, top = 10 }) {
  const id = tokenId(model, token, "token");
  const matrices = model.faces.map(({ name, does, matrix, along, square, norm, centred_norm }) => {
    const dots = matrix.times(matrix.row(id), 1);
    const found = { name, does };
    const add = (key, values) => {
      values[id] = -Infinity;
      const best = highest(values, Math.min(top, values.length - 1));
      Object.assign(found, { [key]: best.map((one) => values[one]), [`${key}_ids`]: best });
    };
    add("cos", dots.map((x, one) => x / (norm[one] * norm[id] + 1e-30)));
    add("centred_cos", dots.map((x, one) => (x - along[one] - along[id] + square) / (centred_norm[one] * centred_norm[id] + 1e-30)));
    add("dot", dots);
    return found;
  });
  const named = matrices.flatMap(({ dot_ids, cos_ids, centred_cos_ids }) => [dot_ids, cos_ids, centred_cos_ids]);
  return { id, piece: model.piece(id), matrices, words: described(model, [id], named).words };
}

// Of each matrix the trends with the counts come from the file, which has no training text.
async function vocabulary(model, _, pause) {
  const { gpt, tokenizer, faces, held } = model;
  const bias = gpt.finalBias();
  const matrices = faces.map(({ name, does, matrix, norm, centred_norm }, at) => ({
    name, does, norm, centred_norm, prior_logit: does === "reads" ? null : Array.from(matrix.times(bias, 1)), ...held.matrices[at],
  }));
  const [reachable, fragment] = tokenizer ? [[], []] : [null, null];
  for (let id = 0; tokenizer && id < gpt.config.vocab_size; id += 1) {
    const piece = model.piece(id);
    fragment.push(piece.startsWith("bytes:\\x"));
    reachable.push(!fragment[id] && tokenizer.bytes(id) !== null && isReached(tokenizer, id));
    if (id % 256 === 0) await pause();
  }
  return { matrices, count: held.count, counted_in: held.counted_in, unseen: held.count && held.count.flatMap((n, id) => (n ? [] : [id])), reachable, fragment };
}

// Whether a token's text is encoded as this token.
function isReached(tokenizer, id) {
  try {
    const ids = tokenizer.encode(tokenizer.decode([id]));
    return ids.length === 1 && ids[0] === id;
  } catch {
    return false; // characters that the vocabulary lacks
  }
}

export const INSPECTIONS = { positions, lens, dot, vocabulary, neighbours, attention, ablate, patch, random_head };
