// The worker in which a file's model computes, so that the page never waits.
//
// It is sent {part}, base64 of the compressed bytes, again and again, then {open}; then questions
// {id, path, body} and {cancel: id}. It answers {id, event}, several times where the answer is a stream,
// and then {id, end}; or {id, error}. Questions are answered one after another.

import { Model } from "./model.js";

const AT_ONCE = 30; // milliseconds after which it looks whether anything was cancelled

const parts = [];
const wanted = new Set(); // the questions that have no answer yet
let model = null; // a promise
let last = Promise.resolve();

onmessage = ({ data: { part, open, cancel, ...question } }) => {
  if (part !== undefined) parts.push(decode(part));
  else if (open) model = inflate(parts).then((buffer) => new Model(buffer));
  else if (cancel !== undefined) wanted.delete(cancel);
  else {
    wanted.add(question.id);
    last = last.then(() => answer(question));
  }
};

async function answer({ id, path, body }) {
  let since = performance.now();
  const pause = async () => {
    if (performance.now() - since > AT_ONCE) {
      await new Promise((resolve) => setTimeout(resolve));
      since = performance.now();
    }
    if (!wanted.has(id)) throw new Error("nobody waits for the answer");
  };
  try {
    await pause();
    const opened = await model;
    const events = path.startsWith("/v1/") ? opened.stream(path, body, pause) : [opened.call(path, body, pause)];
    for await (const event of events) postMessage({ id, event });
    postMessage({ id, end: true });
  } catch ({ message }) {
    postMessage({ id, error: message });
  }
  wanted.delete(id);
}

function decode(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  return bytes;
}

const inflate = (chunks) => new Response(new Blob(chunks).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
