// What the options leave of a distribution: the stages of tiedgpt.infer.sampling, in the same order, as
// the view that writes shows them and as the model draws with them.

export const NEUTRAL = { temperature: 1, top_k: 0, top_p: 1, min_p: 0, xtc_probability: 0, xtc_threshold: 0.1 };

// Values from the highest down, and their ids -> {n: how many are left, mass: their probability at this
// temperature, before, after: the probabilities of all, without the options and with them}. XTC is
// applied with a probability: `after` is the mean of both cases. It excludes none of the ids in `spared`.
export function filtered({ values, ids = [] }, options, spared = []) {
  const { temperature, top_k, top_p, min_p, xtc_probability, xtc_threshold } = { ...NEUTRAL, ...options };
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
  let after = shares(values, temperature, n);
  let first = 0; // the top choices before it are excluded
  while (xtc_probability && first + 1 < n && after[first + 1] >= xtc_threshold) first += 1;
  if (first && !ids.slice(0, first).some((id) => spared.includes(id))) {
    const others = shares(values, temperature, n, first);
    after = after.map((p, k) => p + xtc_probability * (others[k] - p));
  }
  return { n, mass: warm.reduce((sum, p, k) => sum + (after[k] > 0 ? p : 0), 0), before, after };
}

// Of the values from `first` to n over the temperature; 0 for the others.
function shares(values, temperature, n, first = 0) {
  const p = values.map((value, k) => (k >= first && k < n ? Math.exp((value - values[first]) / temperature) : 0));
  const sum = p.reduce((a, b) => a + b, 0);
  return p.map((x) => x / sum);
}
