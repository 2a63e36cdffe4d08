// What the options leave of a distribution: the filters of tiedgpt.infer.filters, in the same order, as
// the view that writes shows them and as the model draws with them.

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
