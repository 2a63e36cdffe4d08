// Answers questions as the page's worker does: node model_in_node.mjs MODULES BYTES < questions.json
// BYTES: a file with what `pack_model` returns. Questions: a list of {path, body}; an answer is
// {data}, {events} or {error}, and `seconds`.

import { readFileSync } from "node:fs";
import { inflateSync } from "node:zlib";

const [, , modules, bytes] = process.argv;
const { Model } = await import(`file://${modules}/model.js`);
const opened = inflateSync(readFileSync(bytes));
const model = new Model(opened.buffer.slice(opened.byteOffset, opened.byteOffset + opened.length));
const pause = async () => {};
const answers = [];
for (const { path, body } of JSON.parse(readFileSync(0))) {
  const since = performance.now();
  const answer = {};
  try {
    if (path.startsWith("/v1/")) {
      answer.events = [];
      for await (const event of model.stream(path, body, pause)) answer.events.push(event);
    } else answer.data = await model.call(path, body, pause);
  } catch ({ message }) {
    answer.error = message;
  }
  answers.push({ ...answer, seconds: (performance.now() - since) / 1000 });
}
const plain = (_, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);
process.stdout.write(JSON.stringify(answers, plain));
