// Computes gradients as the page's worker does: node gradients_in_node.mjs MODULES < lines
// A line is {bytes, ids, from}, or {layers: true}: the largest error of each layer's gradients
// against finite differences, relative to the largest gradient. The answer is a line.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { inflateSync } from "node:zlib";

const from = (name) => import(`file://${process.argv[2]}/${name}.js`);
const [{ Model }, backward, { Matrix }] = await Promise.all(["model", "backward", "tensors"].map(from));

async function gradients({ bytes, ids, from: start }) {
  const opened = inflateSync(readFileSync(bytes));
  const { gpt, tensors } = new Model(opened.buffer.slice(opened.byteOffset, opened.byteOffset + opened.length));
  const names = Object.keys(tensors).filter((name) => !["wte.weight", "head.weight"].includes(name));
  const grads = new Map(names.map((name) => [tensors[name].data, new Float32Array(tensors[name].data.length)]));
  const [read, predict] = [0, 1].map(() => new Float32Array(gpt.wte.data.length));
  const loss = await backward.addGradients(gpt, ids, start, { grads, read, predict }, async () => {});
  const all = Object.fromEntries(names.map((name) => [name, Array.from(grads.get(tensors[name].data))]));
  return { loss, all, read: Array.from(read), predict: Array.from(predict) };
}

// A layer's loss is the dot product of its output with `dy`.
function check(layerOf, inputs, parameters, size) {
  const random = (n) => Float64Array.from({ length: n }, () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random()));
  const x = random(inputs);
  const [dy, data] = [random(size), parameters.map((n) => random(n))];
  const grads = new Map(data.map((one) => [one, new Float64Array(one.length)]));
  const loss = () => layerOf(data, grads)(x)[0].reduce((total, y, i) => total + y * dy[i], 0);
  const dx = layerOf(data, grads)(x)[1](dy);
  let worst = 0;
  for (const [values, gradient] of [[x, dx], ...grads]) {
    const most = Math.max(...gradient.map(Math.abs));
    values.forEach((value, i) => {
      const [step, ends] = [1e-4, []];
      for (const sign of [1, -1]) {
        values[i] = value + sign * step;
        ends.push(loss());
      }
      values[i] = value;
      worst = Math.max(worst, Math.abs((ends[0] - ends[1]) / (2 * step) - gradient[i]) / most);
    });
  }
  return worst;
}

function layers() {
  const errors = {};
  const config = { n_embd: 6, n_head: 2, layer_norm_epsilon: 1e-5 };
  for (const n of [1, 5, 6]) {
    errors[`linear ${n}`] = check(([w, b], grads) => backward.linearLayer({ weight: new Matrix({ shape: [7, 6], data: w }), bias: b }, grads), 6 * n, [42, 7], 7 * n);
    errors[`norm ${n}`] = check(([weight, bias], grads) => backward.normLayer({ weight, bias }, config, grads), 6 * n, [6, 6], 6 * n);
    for (const window of [Infinity, 3])
      errors[`attention ${n} ${window}`] = check(() => backward.attentionLayer(config, window), 18 * n, [], 6 * n);
  }
  for (const name of ["gelu_new", "gelu", "silu", "relu"]) errors[name] = check(() => backward.activationLayer(name), 11, [], 11);
  errors.residual = check(() => backward.residual(backward.chain([backward.activationLayer("silu"), backward.activationLayer("gelu_new")])), 11, [], 11);
  const targets = [3, 0, 6, 2, 2];
  errors.head = check(([w], grads) => (h) => {
    const [loss, dh] = backward.headLoss(h, targets, matrix(w), null);
    return [Float64Array.of(loss), ([d]) => {
      const dw = new Float64Array(w.length);
      backward.headLoss(h, targets, matrix(w), dw);
      dw.forEach((x, i) => { grads.get(w)[i] = d * x; });
      return dh.map((value) => d * value);
    }];
  }, 30, [42], 1);
  return errors;
}

function matrix(data) {
  const made = new Matrix({ shape: [7, 6], data });
  made.unembed = (h, n) => made.times(h, n);
  return made;
}

for await (const line of createInterface({ input: process.stdin })) {
  const question = JSON.parse(line);
  const answer = question.layers ? layers() : await gradients(question);
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
