// Write: the model continues the text, and each token's distribution before and after the options.
//
// All logits of a position come from /inspect/dot, as |h| |e| cos of every row. So the sliders need
// no server, and the kept mass is exact.

import { stream, textOf } from "../api.js";
import { filtered } from "../model/filters.js";
import Chat from "./chat.js";
import {
  announce, Choice, costOf, count, fixed, html, Num, Odds, Panel, Piece, prob, scaleOf, Slider, Tokens, useCall,
  useMemo, usePieces, useRun, useState,
} from "../parts.js";

const SHOWN = 12;
const kept = { // while other views are open
  options: { temperature: 1, top_k: 0, top_p: 1, min_p: 0, max_tokens: 40 },
  text: null, // {of: the subject as JSON, tokens, seed, end}
};

export default function Write({ state, update }) {
  const { subject, positions } = state;
  const [options, setOptions] = useState(kept.options);
  const [text, setText] = useState(kept.text);
  const [at, setAt] = useState(null); // number of a written token, or null: the next one
  const of = JSON.stringify(subject);
  const mine = text?.of === of ? text : null;
  const set = (patch) => setOptions((kept.options = { ...options, ...patch }));
  const put = (next) => setText((kept.text = next));
  const begun = at !== null && mine ? mine.tokens.slice(0, at) : [];
  const body = positions && (begun.length
    ? { ids: [...positions.ids, ...begun.map(({ id }) => id)], position: positions.next + begun.length, top: 10 }
    : { ...subject, position: positions.next, top: 10 });
  const writer = useWriter(state, options, put, setAt, of);
  const kinds = state.info.chat && html`<div class="row"><${Choice} label="What is written" value=${state.writing} onChange=${(writing) => update({ writing })}
    options=${[["text", "the text goes on"], ["chat", "a conversation"]]} /></div>`;
  if (state.info.chat && state.writing === "chat") return html`${kinds}<${Chat} options=${asked(options)} ...${state.info.chat} />`;
  const pick = (token) => writer.write([...begun, token]);
  return html`${kinds}
    <${Running} state=${state} update=${update} writer=${writer} text=${mine} at=${at} setAt=${setAt} />
    <${Distribution} state=${state} body=${body} options=${options} set=${set} drawn=${mine?.tokens[at]}
      pick=${writer.room > begun.length ? pick : null} />`;
}

const asked = ({ temperature, top_k, top_p, min_p, max_tokens }) => ({
  max_tokens, temperature, ...(top_k ? { top_k } : {}), ...(top_p < 1 ? { top_p } : {}), ...(min_p ? { min_p } : {}),
});

// {write(first), stop, running, error, room, body}: `first` are tokens that the writing begins with.
function useWriter({ subject, positions, info }, options, put, setAt, of) {
  const { run, ...others } = useRun(of);
  const room = Math.max(0, (info.n_positions ?? Infinity) - (positions?.ids.length ?? 0));
  const prompt = subject && (subject.ids ?? subject.text);
  const body = subject && { prompt, ...asked(options), max_tokens: Math.min(options.max_tokens, room) };
  const write = (first = []) => run(async (signal) => {
    const made = { of, tokens: [...first], end: "stopped", seed: Math.floor(Math.random() * 2 ** 31), isWhole: !first.length };
    const begun = { ...body, max_tokens: Math.min(options.max_tokens, room - first.length) };
    if (first.length) begun.prompt = [...positions.ids, ...first.map(({ id }) => id)];
    setAt(null);
    put({ ...made, end: null });
    try {
      for await (const event of stream("/v1/completions", { ...begun, seed: made.seed, logprobs: 1 }, signal)) {
        const [{ logprobs, finish_reason: end }] = event.choices;
        logprobs?.tokens.forEach((piece, i) => made.tokens.push({
          piece: info.tokenizer === false ? `id:${logprobs.token_ids[i]}` : piece, id: logprobs.token_ids[i], logprob: logprobs.token_logprobs[i] }));
        made.end = end ?? made.end;
        put({ ...made, end });
      }
      announce(`${made.tokens.length} tokens written.`);
    } finally {
      put({ ...made });
    }
  });
  return { ...others, write, room, body };
}

function Running({ state, update, writer, text, at, setAt }) {
  const { subject, positions, info, dark } = state;
  const { write, stop, running, error, room, body } = writer;
  const take = async () => {
    const ids = [...positions.ids, ...text.tokens.map(({ id }) => id)];
    update({ ids, text: await textOf(ids, info), view: "text", pin: positions.next });
  };
  const look = (i) => costOf(-text.tokens[i].logprob / Math.LN2, scaleOf(info), dark);
  const says = "Each new token is drawn from the last position's distribution, then read like any other token. Press one to see what else it could have been.";
  const ask = text?.isWhole && !running ? { ...body, seed: text.seed } : body;
  return html`<${Panel} title="Let it write on" says=${says} ask=${["/v1/completions", ask]}>
    <div class="row">
      ${running
        ? html`<button type="button" class="main" onClick=${stop}>Stop</button>`
        : html`<button type="button" class="main" disabled=${!room || !subject} onClick=${() => write()}>${text ? "Write again" : "Write"}</button>`}
      ${text?.tokens.length > 0 && !running && html`<button type="button" onClick=${take}>Take it as the text</button>`}
      ${!room && html`<span>The text fills the context of ${count(info.n_positions)} tokens: shorten it.</span>`}
      ${text?.end && html`<span class="says">${ENDS[text.end] ?? text.end}; seed ${text.seed}</span>`}</div>
    ${error && html`<p class="status error" role="status">${error}</p>`}
    <p class="written">${subject?.text ?? state.text}</p>
    ${text && html`<${Tokens} pieces=${text.tokens.map(({ piece }) => piece)} pin=${at} onPin=${setAt} look=${look}
      label="Written tokens: choose one to see what it was drawn from"
      after=${running && html`<span class="caret" aria-hidden="true"></span>`} />`}
  <//>`;
}

const ENDS = { stop: "It ended the text itself", length: "The length is reached", stopped: "Stopped" };

function Distribution({ state, body, options, set, drawn, pick }) {
  const found = useCall("/inspect/dot", body);
  const { named } = usePieces();
  const logits = useMemo(() => found.data && sorted(found.data), [found.data]);
  const result = useMemo(() => logits && filtered(logits, options), [logits, options]);
  const shown = logits ? [...logits.ids.slice(0, SHOWN).keys()] : [];
  const isChanged = result && (result.n < logits.ids.length || options.temperature !== 1);
  const place = drawn && logits ? logits.ids.indexOf(drawn.id) : -1;
  if (place >= SHOWN) shown.push(place);
  const row = (k) => {
    const id = logits.ids[k];
    const after = isChanged ? { after: k < result.n ? result.after[k] : null } : {};
    return { id, piece: named(id), place: k + 1, p: result.before[k], ...after, mark: k === place && "drawn" };
  };
  const rows = result ? shown.map(row) : [];
  const tokenOf = ({ id, piece, p }) => ({ id, piece, logprob: Math.log(p) });
  const slider = (name, label, min, max, step, show) => html`<${Slider} label=${label} value=${options[name]}
    min=${min} max=${max} step=${step} show=${show} onChange=${(value) => set({ [name]: value })} />`;
  const off = (none) => (value) => (value === none ? "off" : String(value));
  const where = drawn ? html`Before <q><${Piece} text=${drawn.piece} /></q>` : "The next token";
  return html`<${Panel} title=${where} found=${found} ask=${body && ["/inspect/dot", body]}
      says=${`Grey: the model's own distribution${isChanged ? ". In colour: what is drawn from, after temperature, top-k, top-p and min-p, in this order"
        : ", which is drawn from while no option changes it"}. Press a token to write on with it.`}>
    <div class="row sliders">
      ${slider("temperature", "temperature", 0, 2, 0.05, (t) => (t === 0 ? "0: the likeliest" : fixed(t, 2)))}
      ${slider("top_k", "top-k", 0, 100, 1, off(0))}${slider("top_p", "top-p", 0.05, 1, 0.05, off(1))}
      ${slider("min_p", "min-p", 0, 0.5, 0.01, off(0))}${slider("max_tokens", "tokens to write", 1, 200, 1)}</div>
    ${result && html`<p class="verdict">Drawn among <b><${Num} x=${result.n} show=${count} /></b> of ${count(logits.ids.length)} tokens, which
      keep <b><${Num} x=${result.mass} show=${prob} /></b> of the probability${options.temperature !== 1 && options.temperature > 0 && " at this temperature"}.</p>
      <${Odds} rows=${rows} onPick=${pick && ((id) => pick(tokenOf(rows.find((one) => one.id === id))))} />`}
  <//>`;
}

// All logits from the highest down, and the ids in this order.
export function sorted({ h_norm: h, all_norm: norm, all_cos: cos }) {
  const logits = norm.map((length, id) => h * length * cos[id]);
  const ids = logits.map((_, id) => id).sort((a, b) => logits[b] - logits[a] || a - b);
  return { ids, values: ids.map((id) => logits[id]) };
}
