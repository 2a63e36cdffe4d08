// Answers questions as the page's worker does: node model_in_node.mjs MODULES < lines
// A line is {bytes, questions}: a file with what `pack_model` returns, and a list of {path, body}.
// Its answer is a line, a list of {data}, {events} or {error}, and `seconds`.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { inflateSync } from "node:zlib";

const { Model } = await import(`file://${process.argv[2]}/model.js`);
const pause = async () => {};
const plain = (_, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);

async function answer(model, { path, body }) {
  if (!path.startsWith("/v1/")) return { data: await model.call(path, body, pause) };
  const events = [];
  for await (const event of model.stream(path, body, pause)) events.push(event);
  return { events };
}

for await (const line of createInterface({ input: process.stdin })) {
  const { bytes, questions } = JSON.parse(line);
  const opened = inflateSync(readFileSync(bytes));
  const model = new Model(opened.buffer.slice(opened.byteOffset, opened.byteOffset + opened.length));
  const answers = [];
  for (const question of questions) {
    const since = performance.now();
    const result = await answer(model, question).catch(({ message }) => ({ error: message }));
    answers.push({ ...result, seconds: (performance.now() - since) / 1000 });
  }
  process.stdout.write(`${JSON.stringify(answers, plain)}\n`);
}
