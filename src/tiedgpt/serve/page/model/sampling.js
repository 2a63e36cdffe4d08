// The next token: a draw from what the options leave of its distribution.

import { filtered, NEUTRAL } from "./filters.js";

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
