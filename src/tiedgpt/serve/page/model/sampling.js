// The next token: what the options leave of a distribution, and a draw from it.
//
// The filters are those of tiedgpt.infer.filters, in the same order: top_k, top_p, min_p.

export const NEUTRAL = { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };

// Values from the highest down -> {n: how many are left, mass: their probability at this
// temperature, before, after: the probabilities of all, without the options and with them}.
export function filtered({ values }, options) {
  const { temperature, top_k, top_p, min_p } = { ...NEUTRAL, ...options };
  const before = shares(values, 1, values.length);
  if (temperature === 0) return { n: 1, mass: before[0], before, after: before.map((_, k) => (k ? 0 : 1)) };
  const warm = shares(values, temperature, values.length);
  let n = top_k ? Math.min(top_k, values.length) : values.length;
  while (n < values.length && values[n] === values[n - 1]) n += 1; // equal to the last one kept
  if (top_p < 1) {
    const p = shares(values, temperature, n);
    let [reached, k] = [0, 0];
    while (k < n && reached < top_p) reached += p[k++];
    n = k;
  }
  if (min_p) {
    const least = min_p * warm[0];
    while (n > 1 && warm[n - 1] < least) n -= 1;
  }
  const after = shares(values, temperature, n);
  return { n, mass: warm.slice(0, n).reduce((sum, p) => sum + p, 0), before, after };
}

// Of the first n values over the temperature; 0 for the others.
function shares(values, temperature, n) {
  const p = values.map((value, k) => (k < n ? Math.exp((value - values[0]) / temperature) : 0));
  const sum = p.reduce((a, b) => a + b, 0);
  return p.map((x) => x / sum);
}

// The id of the next token by its logits (V), of which the first `size` have a token.
export function draw(logits, size, options, random) {
  const { temperature } = { ...NEUTRAL, ...options };
  if (temperature === 0) return highest(logits.subarray(0, size), 1)[0];
  const ids = Array.from({ length: size }, (_, id) => id).sort((a, b) => logits[b] - logits[a] || a - b);
  const { n, after } = filtered({ values: ids.map((id) => logits[id]) }, options);
  let left = random();
  for (let k = 0; k < n; k += 1) {
    left -= after[k];
    if (left < 0) return ids[k];
  }
  return ids[n - 1];
}

// The ids of the k highest values, the highest first.
export function highest(values, k) {
  const ids = [];
  for (let id = 0; id < values.length; id += 1) {
    if (ids.length === k && !(values[id] > values[ids[k - 1]])) continue;
    let at = Math.min(ids.length, k - 1);
    for (; at > 0 && values[id] > values[ids[at - 1]]; at -= 1) ids[at] = ids[at - 1];
    ids[at] = id;
  }
  return ids;
}

// Numbers from [0, 1) that the seed decides (mulberry32).
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}
