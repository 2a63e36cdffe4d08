// Weights as the file holds them, and what is done with a matrix: read a row, multiply by all rows.
//
// The bytes are safetensors. A matrix (rows, columns) is fp32, fp16, or int8 with a scale for each
// row (`NAME.scale`). Sums are in double precision, and each number of a result is summed in the
// same order however many vectors are multiplied at once: a token's numbers do not depend on those
// that are computed beside it, not by one bit.

const KINDS = { F32: Float32Array, F16: Uint16Array, I8: Int8Array };

// The bytes of a safetensors file -> {metadata, tensors}: a tensor is {shape, data} by its name.
export function readTensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: metadata, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [start, end] }] of Object.entries(entries)) {
    const Kind = KINDS[dtype];
    const data = new Kind(buffer, 8 + length + start, (end - start) / Kind.BYTES_PER_ELEMENT);
    tensors[name] = { shape, data: dtype === "F16" ? widen(data) : data };
  }
  return { metadata, tensors };
}

// Half precision, as its bits -> fp32.
function widen(bits) {
  const magnitude = (h) => {
    const [power, fraction] = [(h >> 10) & 31, h & 1023];
    if (power === 31) return fraction ? NaN : Infinity;
    return power ? (1 + fraction / 1024) * 2 ** (power - 15) : fraction * 2 ** -24;
  };
  const table = Float32Array.from({ length: 65536 }, (_, h) => (h >> 15 ? -1 : 1) * magnitude(h));
  return Float32Array.from(bits, (h) => table[h]);
}

export class Matrix {
  constructor({ shape: [rows, columns], data }, scale) {
    Object.assign(this, { rows, columns, data, scales: scale?.data ?? new Float32Array(rows).fill(1) });
  }

  row(i) {
    const row = Float64Array.from(this.data.subarray(i * this.columns, (i + 1) * this.columns));
    return row.map((x) => x * this.scales[i]);
  }

  // x (n, columns) -> (n, rows): the dot product of each of n vectors with every row.
  times(x, n) {
    const { rows, columns, data, scales } = this;
    const y = new Float64Array(n * rows);
    const whole = rows - (rows % 4);
    for (let r = 0; r < whole; r += 4) {
      for (let t = 0; t < n; t += 2) eightDots(data, r, x, t, Math.min(t + 1, n - 1), columns, y, rows);
    }
    for (let r = whole; r < rows; r += 1) {
      for (let t = 0; t < n; t += 1) {
        let sum = 0;
        for (let k = 0; k < columns; k += 1) sum += data[r * columns + k] * x[t * columns + k];
        y[t * rows + r] = sum;
      }
    }
    for (let t = 0; t < n; t += 1) {
      for (let r = 0; r < rows; r += 1) y[t * rows + r] *= scales[r];
    }
    return y;
  }
}

// Four rows of `data`, from row r on, times the vectors t and u of x: twice as fast as one by one, as
// each number is loaded for several products.
function eightDots(data, r, x, t, u, columns, y, rows) {
  let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
  const first = r * columns, second = first + columns, third = second + columns, fourth = third + columns;
  const from = t * columns, other = u * columns;
  for (let k = 0; k < columns; k += 1) {
    const value = x[from + k], next = x[other + k];
    const p = data[first + k], q = data[second + k], v = data[third + k], w = data[fourth + k];
    a += p * value;
    b += q * value;
    c += v * value;
    d += w * value;
    e += p * next;
    f += q * next;
    g += v * next;
    h += w * next;
  }
  y.set([a, b, c, d], t * rows + r);
  y.set([e, f, g, h], u * rows + r);
}
