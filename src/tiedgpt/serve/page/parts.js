// The parts that all views are built of. A view is `export default ({ state, update }) => html`.
//
// What the shell gives each view (see app.js):
//   state.subject    {text} or {ids}: spread it first into every body; null until it was read
//   state.positions  the answer of /inspect/positions for it, with top 10, or null; state.found is
//                    the `useCall` it came by. pieces, ids and words are there for all views
//   state.pin        the pinned position, 0 to T - 1 (the last, until a person pins one)
//   state.info       the answer of GET /inspect/model, {} where the server has none
//   state.dark       whether the page is dark, for colours that are computed
//   state.NAME       every entry of SAVED in app.js: what the URL's fragment keeps
//   update({...})    changes them; state.pin and so on are shared by all views
//
// Asking:
//   useCall(path, body)   {data, body, error, busy, stale, stop, again}. body null: do not ask (yet);
//                         undefined: GET. Old data of the same text stay, `stale`, until new ones
//                         come; those of another text do not, unless a third argument `keep` is
//                         true. The returned body is what the data answer
//   useRun(of)            {run, stop, running, error}: run(work) awaits work(signal), which ends when
//                         it is stopped, when `of` changes or when the view is left
//   useUnseen(state)      a text that is not the one in the box, or null; undefined: not yet
//   first(state, n)       {ids} or {text} of the first n tokens: for routes that have a cap
// Around:
//   Panel({title, says, found, ask, children})   a section: one sentence that says what one sees,
//                         what `found` is doing, unless `quiet`, and a menu that copies `ask` =
//                         [path, body]
//   Choice, Slider, Term  one of few [value, text] pairs; a number; a word of TERMS, explained
//   round(n, at, choose)  onKeyDown of any other row of n buttons of which one is chosen
// Tokens and tables:
//   Piece({text}), plain(piece)   a token's text, with whitespace visible; the same as a string
//   Tokens({pieces, pin, onPin, label, look, after})   buttons with arrow keys; look(i) is
//                         {fill, bar, grey, mark, says}: shade and height 0..1, a class, a sentence
//   Odds({rows, onPick})  likely tokens with bars; rows: {id, piece, place, p, mark}, and `after`,
//                         another probability; null: the token is cut, or `none` says what it is
//   Table({caption, columns, rows})   sortable; columns: {key, label, says, show, text}
//   Facts({of})           numbers with their names: [name, number, how it is shown]

import { h } from "./vendor/preact.js";
import { useEffect, useId, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
import htm from "./vendor/htm.js";
import { call, exported, hasKey } from "./api.js";

export { useEffect, useId, useMemo, useRef, useState };
export const html = htm.bind(h);

// ---- asking ----

export function useCall(path, body, keep = false) {
  const key = body === null ? null : `${path} ${JSON.stringify(body)}`;
  const [answer, setAnswer] = useState({});
  const [tries, setTries] = useState(0);
  const running = useRef(null);
  useEffect(() => {
    if (key === null) return undefined;
    const controller = new AbortController();
    running.current = controller;
    setAnswer((old) => ({ ...old, busy: true, error: null }));
    call(path, body, controller.signal).then(
      (data) => controller.signal.aborted || setAnswer({ data, key, body }),
      (error) => {
        if (controller.signal.reason === "left") return;
        const message = controller.signal.aborted ? "stopped: these numbers are older" : error.message;
        setAnswer((old) => ({ ...old, busy: false, error: message, status: error.status }));
      },
    );
    return () => controller.abort("left");
  }, [key, tries]);
  const hasData = Boolean(answer.data) && (keep || body === undefined || (body && textOf(answer.body) === textOf(body)));
  return {
    data: hasData ? answer.data : null,
    body: answer.body,
    error: key === null ? null : answer.error ?? null,
    status: answer.status,
    busy: key !== null && Boolean(answer.busy),
    stale: hasData && answer.key !== key,
    stop: () => running.current?.abort("stopped"),
    again: () => setTries((n) => n + 1),
  };
}

const textOf = (body) => JSON.stringify(body?.text ?? body?.ids ?? body?.prompt);

// The texts of all tokens by id, [] until they are there; `named` tells one of them.
export function usePieces() {
  const pieces = useCall("/inspect/pieces", undefined).data?.pieces ?? NONE;
  return { pieces, named: (id) => pieces[id] ?? `id:${id}` };
}
const NONE = [];

// A text that is not in the box: the run's opening, or a sentence of the page. null: there is none; undefined: not known yet.
export function useUnseen({ info, text, subject }) {
  const isOpening = typeof info.opening === "string" && info.opening !== text;
  const { data, error } = useCall("/tokenize", subject && !isOpening && info.tokenizer ? { prompt: SENTENCE } : null);
  if (isOpening) return info.opening;
  if (!info.tokenizer || error || text === SENTENCE || data?.count > info.n_positions) return null;
  return data ? SENTENCE : undefined;
}
const SENTENCE = "The name of the first file is not the same as the name of the last one, and that is the reason for the error.";

export function useRun(of) {
  const controller = useRef(null);
  const [state, setState] = useState({ running: false, error: null });
  useEffect(() => () => controller.current?.abort(), [of]);
  const run = async (work) => {
    controller.current?.abort();
    const { signal } = (controller.current = new AbortController());
    setState({ running: true, error: null });
    const error = await work(signal).then(() => null, ({ message }) => (signal.aborted ? null : message));
    if (controller.current.signal === signal) setState({ running: false, error });
  };
  return { ...state, run, stop: () => controller.current.abort() };
}

export function first(state, n) {
  const ids = state.positions?.ids;
  return !state.subject || !ids || ids.length <= n ? state.subject : { ids: ids.slice(0, n) };
}

// ---- around ----

export function Panel({ title, says, found, ask, quiet, children }) {
  const id = useId();
  return html`<section class="panel" aria-labelledby=${id} aria-busy=${Boolean(found?.busy && !quiet)}>
    <div class="panel-head"><h2 id=${id}>${title}</h2>${ask?.[1] && html`<${Copy} key=${JSON.stringify(ask)} path=${ask[0]} body=${ask[1]} />`}</div>
    ${says && html`<p class="says">${says}</p>`}
    ${found && !quiet && html`<${Status} found=${found} />`}
    <div class=${found && (found.stale || found.error) ? "stale" : ""}>${children}</div>
  </section>`;
}

export function Status({ found }) {
  const [seconds, setSeconds] = useState(0);
  useEffect(() => {
    setSeconds(0);
    if (!found.busy) return undefined;
    const timer = setInterval(() => setSeconds((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [found.busy]);
  if (found.busy && (seconds > 0 || !found.data))
    return html`<p class="status" role="status"><span class="spinner" aria-hidden="true"></span>
      computing ...${seconds > 1 && ` ${seconds} s`}
      <button type="button" onClick=${found.stop}>Stop</button></p>`;
  if (found.error)
    return html`<p class="status error" role="status"><span>${sentence(found.error)}</span>
      ${found.data && html` <span>The numbers below are from before.</span>`}
      ${found.again && html`<button type="button" onClick=${found.again}>Try again</button>`}</p>`;
  return null;
}

const sentence = (text) => text.replace(/^replace_with|^./, (a) => (a[1] ? "The new token" : a.toUpperCase())) + (/[.?!]$/.test(text) ? "" : ".");

function Copy({ path, body }) {
  const [shown, setShown] = useState(null);
  const copy = (kind, text) => {
    const say = (said) => { setShown({ kind, text, said }); announce(said); };
    say("Select it and copy it.");
    navigator.clipboard?.writeText(text).then(() => say("Copied."), () => {});
  };
  return html`<details class="copy"><summary>Copy as code</summary>
    <div class="row">${[["Python", python], ...(exported ? [] : [["curl", curl]])].map(([kind, write]) => html`<button type="button" key=${kind}
      aria-pressed=${shown?.kind === kind} onClick=${() => copy(kind, write(path, body))}>${kind}</button>`)}
      ${shown && html`<span class="says">${shown.said}</span>`}</div>
    ${shown && html`<pre tabindex="0" role="region" aria-label=${`${shown.kind}, as copied`}>${shown.text}</pre>`}</details>`;
}

// A ref for a box in a `.more`, which is told at which edges the box hides something.
export function useMore() {
  const box = useRef(null);
  useEffect(() => {
    const { current: of } = box;
    const look = () => {
      const [left, right] = [of.scrollLeft, of.scrollWidth - of.clientWidth - of.scrollLeft];
      of.parentElement.dataset.more = `${left > 1 ? "left" : ""} ${right > 1 ? "right" : ""}`;
    };
    const watcher = new ResizeObserver(look);
    [of, ...of.children].forEach((one) => watcher.observe(one));
    of.addEventListener("scroll", look);
    return () => watcher.disconnect();
  }, []);
  return box;
}

export const Scroll = ({ label, children }) => html`<div class="more"><div class="scroll" tabindex=${label ? 0 : null}
  role=${label ? "region" : null} aria-label=${label} ref=${useMore()}>${children}</div></div>`;

// ---- words that explain themselves ----

const TERMS = {
  surprisal: "How unexpected a token was: −log₂ of the probability that the model gave it. 1 bit is a probability of 50 %, 10 bits are 0.1 %.",
  entropy: "How undecided a prediction is, in bits: the surprisal to be expected if the model is right. 0 is certainty.",
  rank: "A token's place when all tokens are sorted by probability; 1 is the model's first choice.",
  KL: "Kullback–Leibler divergence: how many bits a prediction by this state would lose against the model's own. 0: they are equal.",
  logit: "What a token gets before softmax: the dot product of h with the token's row. 1 more multiplies its odds by 2.7.",
  prior: "The part of a logit that is the same in every text: the final norm's bias times the row. It mostly tells how frequent the token is.",
  loss: "The mean surprisal of the true tokens. In nats it uses the natural logarithm: 1 nat is 1.44 bits. Training makes it small.",
  perplexity: "e to the power of the loss: the model is as undecided as among this many equally likely tokens.",
  softmax: "Turns logits into probabilities: e to the power of each, over the sum of all.",
  h: "What the body makes of the text so far: as many numbers as a row of W has.",
  cosine: "How well two directions agree, whatever the lengths: 1 the same, 0 at right angles, −1 opposite.",
  attention: "How a token gathers from earlier ones: each head gives them weights, which sum to 1, and adds up their values.",
  MLP: "Two matrices with a curve between them; it changes each position by itself.",
};

export function Term({ name, children }) {
  const id = useId();
  const place = ({ newState, target: pop }) => {
    if (newState !== "open") return;
    const word = pop.previousElementSibling.getBoundingClientRect();
    const below = word.bottom + 6 + pop.offsetHeight < innerHeight;
    pop.style.left = `${Math.max(8, Math.min(word.left, innerWidth - pop.offsetWidth - 8))}px`;
    pop.style.top = `${below ? word.bottom + 6 : word.top - pop.offsetHeight - 6}px`;
  };
  return html`<button type="button" class="term" popovertarget=${id}>${children ?? name}</button><span popover id=${id}
    onToggle=${place}><b>${name}</b>: ${TERMS[name]}</span>`;
}

let modelName = "MODEL";
export const setModelName = (name) => { modelName = name; };

function python(path, { text, ids, prompt, ...options }) {
  const literal = (value) => (value === null ? "None" : typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value));
  const arguments_ = (given) => Object.entries(given).map(([k, v]) => `, ${k}=${literal(v)}`).join("");
  if (prompt !== undefined) {
    const { max_tokens, logprobs, ...rest } = options;
    const given = arguments_({ max_new_tokens: max_tokens, ...rest });
    return `from tiedgpt.infer import Engine\n\nwith Engine(${literal(modelName)}) as engine:\n` +
      `    print(engine.generate(${literal(prompt)}${given}).text)`;
  }
  const name = path.split("/").pop();
  const read = text ?? ids;
  const given = arguments_({ ...(read === undefined ? {} : { text: read }), ...options });
  return `from tiedgpt.inspect import ${name}\n\nfound = ${name}(${literal(modelName)}${given})`;
}

function curl(path, body) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = hasKey() ? ` -H "Authorization: Bearer $TIEDGPT_API_KEY"` : "";
  const url = new URL(path, location.href).href;
  return `curl ${url}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}

// For a row of buttons of which one, number `at`, is chosen: the arrow keys go round.
export function round(n, at, choose) {
  return (event) => {
    const to = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: n - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose((to + n) % n);
    event.currentTarget.children[(to + n) % n].focus();
  };
}

export function Choice({ label, value, options, onChange, kind = "choice" }) {
  const at = options.findIndex(([one]) => one === value);
  return html`<div class=${kind} role="radiogroup" aria-label=${label}
    onKeyDown=${round(options.length, at, (next) => onChange(options[next][0]))}>
    ${options.map(([one, text], i) => html`<button type="button" role="radio" key=${one} aria-checked=${i === at}
      tabindex=${i === at ? 0 : -1} onClick=${() => onChange(one)}>${text}</button>`)}
  </div>`;
}

export function Slider({ label, value, min, max, step, show, onChange }) {
  return html`<label class="slider"><span>${label} <b>${show ? show(value) : value}</b></span>
    <input type="range" min=${min} max=${max} step=${step} value=${value}
      aria-valuetext=${show ? show(value) : String(value)}
      onInput=${(event) => onChange(Number(event.target.value))} /></label>`;
}

let waiting = null;
let spoken = 0;
export function announce(text) {
  const region = document.getElementById("live");
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    spoken = Date.now();
    if (region) region.textContent = text;
  }, Math.max(100, spoken + 1000 - Date.now()));
}

// ---- tokens and tables ----

const SIGNS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
const UNSEEN = /([\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}])/u;

function spell(piece) {
  if (/^ ?[!-~]+$/.test(piece) && !piece.startsWith("bytes:"))
    return piece[0] === " " ? [["␣", "blank"], [piece.slice(1), ""]] : [[piece, ""]];
  const partial = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(piece);
  if (partial) return [[partial[1].slice(2).replaceAll("\\x", " "), "raw"]];
  return piece.split(UNSEEN).filter(Boolean).map((part) => {
    if (SIGNS[part]) return [SIGNS[part], "blank"];
    return UNSEEN.test(part) ? [`u+${part.codePointAt(0).toString(16).padStart(4, "0")}`, "raw"] : [part, ""];
  });
}

export const plain = (piece) => spell(piece).map(([text]) => text).join("");

const parts = (text) => spell(text).map(([part, kind]) => (kind ? h("span", { class: kind }, part) : part));

export const Piece = ({ text }) => html`<bdi>${parts(text)}</bdi>`;

const TALL = 46; // pixels of the highest bar

export function Tokens({ pieces, pin, onPin, label, look = () => ({}), after, small }) {
  const drawn = useRef([]); // what did not change is given again, and Preact skips it
  const tall = small ? TALL / 2 : TALL;
  const isLong = pieces.length > 256; // then blanks are no chips: a second element takes as long as the first
  const at = Math.min(pin ?? 0, pieces.length - 1); // a pin may be older than the tokens
  const keyed = (event) => {
    const box = event.currentTarget;
    const steps = { ArrowLeft: () => at - 1, ArrowRight: () => at + 1, Home: () => 0, End: () => pieces.length - 1,
      ArrowUp: () => line(box, at, -1), ArrowDown: () => line(box, at, 1) };
    const to = steps[event.key]?.();
    if (to === undefined || !pieces[to] || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    onPin(to);
    box.querySelectorAll(".token")[to].focus();
  };
  const pressed = (event) => {
    const token = event.target.closest(".token");
    if (token) onPin(Number(token.dataset.at));
  };
  const one = (piece, i) => {
    const { fill, bar, grey, mark = "", says } = look(i);
    const isNext = i === at;
    const key = [piece, fill?.background, bar, grey, mark, says, isNext, i === pin].join("\n");
    if (drawn.current[i]?.key === key) return drawn.current[i].node;
    const style = bar === undefined ? fill ?? {} : { ...fill, paddingTop: `${bar * tall}px`, marginTop: `${(1 - bar) * tall}px` };
    const node = html`<button type="button" key=${i} data-at=${i} tabindex=${isNext ? 0 : -1} style=${style}
      class=${`token ${grey ? "grey" : ""} ${mark}`} aria-pressed=${i === pin}
      aria-label=${says ? `${plain(piece)}, ${says}` : plain(piece)}>${(isLong ? plain : parts)(piece)}</button>`;
    drawn.current[i] = { key, node };
    return node;
  };
  const cells = pieces.flatMap((piece, i) => (/\n$/.test(piece) ? [one(piece, i), html`<br key=${`after ${i}`} />`] : [one(piece, i)]));
  return html`<div class=${`tokens ${small ? "small" : ""}`} role="toolbar" aria-label=${label}
    onKeyDown=${keyed} onClick=${pressed}>${cells}${after}</div>`;
}

// The token below (step 1) or above (-1) the one at `at`, as the text is wrapped.
function line(box, at, step) {
  const tokens = box.querySelectorAll(".token");
  const here = tokens[at].getBoundingClientRect();
  for (let i = at + step; tokens[i]; i += step) {
    const place = tokens[i].getBoundingClientRect();
    const isThere = step > 0 ? place.right > here.left : place.left <= here.left;
    if (isThere && Math.abs(place.bottom - here.bottom) > 8) return i;
  }
  return at;
}

export function Odds({ rows, onPick, none = "cut" }) {
  const most = Math.max(...rows.flatMap(({ p, after }) => [p ?? 0, after ?? 0]));
  const wide = (p) => ({ width: `${(100 * (p ?? 0)) / most}%` });
  const tag = onPick ? "button" : "div";
  return html`<ol class="odds">${rows.map(({ id, piece, place, p, after, mark }, k) => html`<li key=${id}
      class=${`${k && place > rows[k - 1].place + 1 ? "apart" : ""} ${mark ? "true" : ""} ${after === undefined ? "" : "pair"} ${after === null && none === "cut" ? "cut" : ""}`}>
    <${tag} class="odd" onClick=${onPick && (() => onPick(id))}><span class="place">${count(place)}</span>
      <span class="what"><${Piece} text=${piece} />${mark && html`<small> ● ${mark}</small>`}</span>
      <span class="line"><span style=${wide(p)}></span>${after !== undefined && html`<span class="after" style=${wide(after)}></span>`}</span>
      <span class="share"><${Num} x=${p} show=${prob} />${after !== undefined && html` → ${after === null ? none
        : html`<${Num} x=${after} show=${prob} />`}`}</span><//></li>`)}</ol>`;
}

export const likeliest = ({ top_ids, top_logprob, words }, at) =>
  top_ids[at].map((id, k) => ({ id, place: k + 1, piece: words[id], p: Math.exp(top_logprob[at][k]) }));

export const scaleOf = ({ vocab_size: size }) => (size ? Math.log2(size) : 16);

export function costOf(bits, scale, dark) {
  const t = Math.min(1, bits / scale);
  return { bar: t, fill: heat(t, dark), says: `${fixed(bits, 1)} bits` };
}

export const Facts = ({ of }) => html`<dl class="facts">${of.map(([name, x, show], k) => html`<div key=${k}>
  <dt>${name}</dt><dd><${Num} x=${x} show=${show} /></dd></div>`)}</dl>`;

export function Table({ caption, columns, rows }) {
  const [by, setBy] = useState(null); // [key, 1 or -1]
  const [key, sign] = by ?? [];
  const sorted = useMemo(() => (by ? [...rows].sort((a, b) => sign * compare(a[key], b[key])) : rows), [rows, by]);
  const turn = (column) => setBy([column.key, key === column.key ? -sign : column.text ? 1 : -1]);
  const head = (column) => html`<th scope="col" class=${column.text ? "" : "number"} title=${column.says}
    aria-sort=${key === column.key ? (sign > 0 ? "ascending" : "descending") : "none"}>
    <button type="button" onClick=${() => turn(column)}>${column.label}<span aria-hidden="true">${
      key === column.key ? (sign > 0 ? " ↑" : " ↓") : ""}</span></button></th>`;
  const cell = (row, column, i) => {
    const shown = column.show ? column.show(row) : html`<${Num} x=${row[column.key]} />`;
    if (i === 0) return html`<th scope="row">${shown}</th>`;
    return html`<td class=${column.text ? "" : "number"}>${shown}</td>`;
  };
  return html`<${Scroll} label=${caption}><table>
    <caption class="hidden">${caption}</caption>
    <thead><tr>${columns.map(head)}</tr></thead>
    <tbody>${sorted.map((row) => html`<tr>${columns.map((column, i) => cell(row, column, i))}</tr>`)}</tbody></table><//>`;
}

function compare(a, b) {
  if (typeof a === "string") return a.localeCompare(b);
  return (a ?? -Infinity) - (b ?? -Infinity);
}

// ---- numbers and colours ----

export const fixed = (x, digits) => (x === null || x === undefined ? "–" : minus(x.toFixed(digits)));
const minus = (text) => text.replace("-", "−");
const grouped = new Intl.NumberFormat("en"); // toLocaleString makes one at each call
export const count = (n) => (n === null || n === undefined ? "–" : minus(grouped.format(n)));
export const many = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
export const bytes = (n) => {
  const power = n < 1000 ? 0 : Math.min(3, Math.floor(Math.log10(n) / 3));
  return `${(n / 1000 ** power).toFixed(power ? 1 : 0)} ${["bytes", "kB", "MB", "GB"][power]}`;
};

export function prob(p) {
  if (p === null || p === undefined) return "–";
  const percent = 100 * p;
  if (p >= 0.0995 || p === 0) return `${percent.toFixed(0)} %`;
  return `${p >= 1e-8 ? percent.toPrecision(p >= 0.00095 ? 2 : 1) : percent.toExponential(0)} %`;
}

export function short(x) {
  if (x === null || x === undefined) return "–";
  if (Number.isInteger(x)) return count(x);
  const size = Math.abs(x);
  if (size < 0.0005) return minus(x.toExponential(0));
  return size >= 1000 ? count(Math.round(x)) : fixed(x, size < 10 ? 3 : size < 100 ? 2 : 1);
}

export function Num({ x, digits, show }) {
  if (x === null || x === undefined) return "–";
  return html`<data value=${String(x)}>${show ? show(x) : digits === undefined ? short(x) : fixed(x, digits)}</data>`;
}

const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];
const PAGE = { light: [251, 250, 247], dark: [21, 22, 27] };

function cividis(t) {
  const at = Math.min(1, Math.max(0, t)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  return mix(CIVIDIS[low], CIVIDIS[low + 1], at - low);
}

const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));
const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// Black or white, whichever has the higher contrast: at least 4.58 : 1.
function ink(rgb) {
  const [r, g, b] = rgb.map((x) => (x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// Small numbers look like the page, large ones stand out: dark blue in light, yellow in dark.
export function heat(t, dark) {
  const shade = Math.max(0, t || 0); // of a vocabulary of one token every share is 0 / 0
  const end = cividis(dark ? shade : 1 - shade);
  const rgb = mix(dark ? PAGE.dark : PAGE.light, end, Math.min(1, 0.08 + 1.8 * shade));
  return { background: css(rgb), color: ink(rgb), rgb };
}

export function diverge(t, dark) {
  const end = t < 0 ? (dark ? [186, 170, 255] : [84, 39, 143]) : dark ? [247, 190, 60] : [166, 97, 0];
  const rgb = mix(dark ? PAGE.dark : PAGE.light, end, Math.min(1, Math.abs(t || 0)) ** 0.8);
  return { background: css(rgb), color: ink(rgb), rgb };
}
