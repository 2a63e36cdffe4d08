// The page's questions to the model in its own file: the second answerer beside the server (api.js).
//
// <script type="text/plain" id="worker"> holds the modules that compute, as one script; those of class
// "weights" hold the model, in parts that are sent to the worker one by one.

const pending = new Map(); // the id of a question -> what takes its answers
let [worker, asked] = [null, 0];

const opening = new Promise((resolve) => setTimeout(resolve)).then(open); // the first view is drawn before

async function open() {
  const policy = globalThis.trustedTypes?.createPolicy("tiedgpt-worker", { createScriptURL: (url) => url });
  const script = new Blob([document.getElementById("worker").textContent], { type: "text/javascript" });
  const url = URL.createObjectURL(script);
  worker = new Worker(policy ? policy.createScriptURL(url) : url);
  worker.onmessage = ({ data: { id, ...answer } }) => pending.get(id)?.(answer);
  worker.onerror = ({ message }) => pending.forEach((take) => take({ error: message ?? "the model could not be opened" }));
  for (const part of document.querySelectorAll("script.weights")) {
    worker.postMessage({ part: part.textContent });
    await new Promise((resolve) => setTimeout(resolve));
  }
  worker.postMessage({ open: true });
}

// Yields the events that answer a question; leaving the loop, or the signal, stops the model.
export async function* stream(path, body, signal) {
  await opening;
  const [id, answers] = [(asked += 1), []];
  let wake;
  const take = (answer) => {
    answers.push(answer);
    wake?.();
  };
  const stop = () => take({ error: "stopped" });
  pending.set(id, take);
  signal?.addEventListener("abort", stop);
  worker.postMessage({ id, path, body: body ?? null });
  try {
    for (;;) {
      if (!answers.length) await new Promise((resolve) => { wake = resolve; });
      const { event, end, error } = answers.shift();
      if (error !== undefined) throw new Error(error);
      if (end) return;
      yield event;
    }
  } finally {
    pending.delete(id);
    signal?.removeEventListener("abort", stop);
    worker.postMessage({ cancel: id });
  }
}

export async function call(path, body, signal) {
  for await (const event of stream(path, body, signal)) return event;
  return null;
}
