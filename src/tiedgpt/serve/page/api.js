// Where the page's numbers come from: the server, or the model in the page's own file (model/file.js).
//
//   call(path, body, signal)    the answer as an object. `body` undefined: GET, otherwise POST
//   textOf(ids, info)           the text of tokens
//   stream(path, body, signal)  an async iterator over the events of a streamed completion
//   saveCopy(state)             saves the exported file, such that it shows that state first
//   exported                    null, or the export's own {key: answer}; `exported.state` is what
//                               the page shows first, such as {"text": "...", "pin": 3}
//
// The key of an answer is `path + " " + JSON.stringify(body ?? null)`: no blanks, keys in the order
// in which the views write them: text (or ids) first, then the options.
// Errors are `Error`s whose message is one sentence for people; `.status` is HTTP's, 0 without one.

const data = document.getElementById("data");
export const exported = data && JSON.parse(data.textContent); // what a file does not compute
const file = data && (await import("./model/file.js"));

const KEPT = 24;
const KEY = "tiedgpt-key"; // kept for this tab, until it is closed
const answers = new Map(); // the newest answers, so that going back to a view costs nothing
let lastAsked = Promise.resolve(); // one at a time: what is given up before its turn is never sent
let apiKey = exported ? "" : remember("sessionStorage", KEY) ?? "";

export function setKey(key) {
  apiKey = key.trim();
  remember("sessionStorage", KEY, apiKey);
}

// What the browser keeps under a name, which a value replaces; null where it may keep nothing.
export function remember(storage, name, value) {
  try {
    if (value !== undefined) window[storage].setItem(name, value);
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

// Saves a copy of the exported file whose first view is this state.
export function saveCopy(state) {
  const page = document.documentElement.cloneNode(true);
  page.querySelector("#app").replaceChildren();
  page.querySelector("#data").firstChild.data = JSON.stringify({ ...exported, state }).replaceAll("<", "\\u003c");
  const text = `<!doctype html>\n<html lang="en">\n${page.getHTML()}\n</html>\n`;
  const link = document.createElement("a");
  Object.assign(link, { href: URL.createObjectURL(new Blob([text], { type: "text/html" })), download: decodeURIComponent(location.pathname.split("/").pop()) });
  link.click();
}

export const hasKey = () => apiKey !== "";

export async function call(path, body, signal) {
  const key = `${path} ${JSON.stringify(body ?? null)}`;
  if (exported && key in exported) return exported[key];
  if (answers.has(key)) return answers.get(key);
  const asked = lastAsked.then(() => {
    signal?.throwIfAborted();
    return file ? file.call(path, body, signal) : send(path, body, signal).then((response) => response.json());
  });
  lastAsked = asked.catch(() => {});
  const answer = await asked;
  answers.set(key, answer);
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return answer;
}

// The text of tokens; their ids where the model has no tokenizer.
export async function textOf(ids, info) {
  return info.tokenizer === false ? ids.join(" ") : (await call("/detokenize", { tokens: ids })).prompt;
}

export async function* stream(path, body, signal) {
  if (file) {
    yield* file.stream(path, body, signal);
    return;
  }
  const response = await send(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw failure("the server ended in the middle of the text", 0);
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const content = event.replace(/^data: /, "");
      if (content === "[DONE]") return;
      const found = JSON.parse(content);
      if (found.error) throw failure(found.error.message, 500);
      yield found;
    }
  }
}

async function send(path, body, signal) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw failure("the server does not answer: is `tiedgpt serve` still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 429) { // others are before us: come again
    await new Promise((resolve) => setTimeout(resolve, 1000));
    signal?.throwIfAborted();
    return send(path, body, signal);
  }
  const said = await response.json().catch(() => null);
  throw failure(said?.error?.message ?? `the server answered ${response.status}`, response.status);
}

function failure(message, status) {
  return Object.assign(new Error(message), { status });
}
