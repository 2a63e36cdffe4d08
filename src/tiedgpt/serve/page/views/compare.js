// Side by side: a second text, or a second model, and what each token costs in either.

import {
  Choice, count, diverge, Facts, fixed, html, many, Num, Odds, Panel, Piece, scaleOf, Term, Tokens, useCall, useState,
} from "../parts.js";
import { textOf } from "../api.js";
import { HeatGrid } from "../chart.js";
import { costLook } from "./text.js";

const TOP = 40; // likeliest tokens that are asked for, so that most words of one are among those of the other

export default function Compare({ state, update }) {
  const { info, subject, positions, found, other } = state;
  const [kind, setKind] = useState("text");
  const isModel = kind === "model";
  const from = positions && middle(positions.pieces);
  const half = positions?.ids.slice(from);
  const second = other ? (info.tokenizer === false ? { ids: other.split(/[\s,]+/).filter(Boolean).map(Number) } : { text: other }) : half && { ids: half };
  const a = useCall("/inspect/positions", subject && { ...subject, top: TOP });
  const b = useCall(isModel ? "/beside/inspect/positions" : "/inspect/positions", subject ? { ...(isModel ? subject : second), top: TOP } : null);
  const model = useCall("/beside/inspect/model", isModel ? undefined : null).data;
  const isThere = a.data && b.data && !a.error && !b.error;
  const names = isModel ? [info.name, info.beside === info.name ? `${info.beside}, beside it` : info.beside] : ["The text", "The second text"];
  return html`
    <${Panel} title=${isModel ? "The same text, read by two models" : "The same words, after another beginning"}
      found=${found.error ? found : a.error ? a : b}
      says=${isModel ? "Which tokens does one model expect better than the other?" : "A model has nothing but the text before a token: change it, and see what that costs."}>
      ${info.beside && html`<${Choice} label="Beside it" value=${kind} onChange=${setKind}
        options=${[["text", "another text"], ["model", `another model: ${info.beside}`]]} />`}
      ${!isModel && html`<${Second} value=${other} hint=${positions?.pieces.slice(from).join("")} update=${update} />`}
      ${!info.beside && html`<p class="note">To compare two models, such as tied and untied or before and after tuning:
        ${" "}<code>tiedgpt serve MODEL --beside OTHER</code></p>`}
      ${isThere && html`<div class="columns">${[[a.data, info], [b.data, isModel ? model ?? info : info]].map(([data, of], k) => html`<${Side}
        key=${k} name=${names[k]} data=${data} info=${of} dark=${state.dark} isModel=${isModel} />`)}</div>`}
    <//>
    ${isThere && !isModel && html`<${Carried} key=${`${JSON.stringify(subject)} ${other}`} a=${a.data} b=${b.data} subject=${subject} other=${other} state=${state} update=${update} />`}
    ${isThere && html`<${Difference} key=${kind} a=${a.data} b=${b.data} names=${names} dark=${state.dark} />`}`;
}

// Where the second half of a text begins with a word.
function middle(pieces) {
  const at = pieces.length >> 1;
  const next = pieces.findIndex((piece, i) => i >= at && i < pieces.length - 1 && /^\s/.test(piece));
  return next < 0 ? at : next;
}

// The ids of a text with one word replaced by another that the model expected there; null if there is none.
function withOtherWord({ ids, pieces, top_ids, words }) {
  const isWord = (piece) => /^ ?\p{L}+$/u.test(piece);
  for (let at = 1; at < ids.length - 1; at += 1) {
    const id = isWord(pieces[at]) && top_ids[at - 1].find((one) => one !== ids[at] && isWord(words[one]) && words[one][0] === " " === (pieces[at][0] === " "));
    if (id) return ids.with(at, id);
  }
  return null;
}

function Second({ value, hint, update }) {
  const [draft, setDraft] = useState(null);
  const take = () => draft !== null && update({ other: draft });
  return html`<form onSubmit=${(event) => { event.preventDefault(); take(); }}><label class="box"><span>Second text; when it is empty, the second half of the first</span>
    <textarea rows="2" spellcheck=${false} value=${draft ?? value} placeholder=${hint} onInput=${(event) => setDraft(event.target.value)}
      onChange=${take}></textarea></label></form>`;
}

function Side({ name, data, info, dark, isModel }) {
  const [pin, setPin] = useState(null);
  const { loss, bits_per_byte: perByte, next } = data;
  return html`<div><h3>${name}</h3>
    ${isModel && info.parameters && html`<p class="says">${count(info.parameters)} parameters, ${info.tied ? "tied" : "untied"}.</p>`}
    <${Facts} of=${[[html`mean <${Term} name="loss" />, nats`, loss, (x) => fixed(x, 3)], ["bits per byte", perByte, (x) => fixed(x, 3)], ["predictions", next]]} />
    <${Tokens} small pieces=${data.pieces} pin=${pin} onPin=${setPin} look=${costLook(data, scaleOf(info), dark)} label=${`${name}: the loss of each token`} />
    ${pin > 0 && html`<p class="says"><${Piece} text=${data.pieces[pin]} />: <${Num} x=${data.surprisal_bits[pin - 1]} digits=${2} /> bits,
      ${" "}rank <${Num} x=${data.rank[pin - 1]} /></p>`}</div>`;
}

// Pairs [token of a, token of b] that are the same from the end on, or else from the beginning.
function common(a, b) {
  const [n, m] = [a.length, b.length];
  let [end, begin] = [0, 0];
  while (end < Math.min(n, m) && a[n - 1 - end] === b[m - 1 - end]) end += 1;
  while (begin < Math.min(n, m) && a[begin] === b[begin]) begin += 1;
  return Array.from({ length: Math.max(end, begin) }, (_, k) => (end >= begin ? [n - end + k, m - end + k] : [k, k]));
}

function Difference({ a, b, names, dark }) {
  const pairs = common(a.ids, b.ids);
  const [chosen, choose] = useState(null);
  const at = Math.min(chosen ?? Infinity, pairs.length - 1);
  const scored = pairs.map(([i, j]) => (i && j ? b.surprisal_bits[j - 1] - a.surprisal_bits[i - 1] : null));
  const known = scored.filter((x) => x !== null);
  const most = Math.max(1e-9, ...known.map(Math.abs));
  const mean = known.reduce((x, y) => x + y, 0) / (known.length || 1);
  const look = (k) => {
    if (scored[k] === null) return { bar: 0, says: "nothing predicts the first token" };
    return { bar: Math.abs(scored[k]) / most, fill: diverge(scored[k] / most, dark), says: `${signed(scored[k])} bits` };
  };
  if (!pairs.length) return html`<${Panel} title="Token by token"><p>They share no token at the beginning or at the end: nothing is compared.</p><//>`;
  const [i, j] = pairs[at];
  return html`<${Panel} title="Token by token" says=${html`The difference in <${Term} name="surprisal" />: gold costs more in the second, purple less.`}>
    <p class="verdict">${known.length ? html`Over ${many(known.length, "token")} that both predict, the second needs
      ${" "}<b><${Num} x=${mean} show=${(x) => fixed(Math.abs(x), 2)} /></b> bits ${mean < 0 ? "less" : "more"} for each.` : "There is no token that both predict."}</p>
    <${Tokens} pieces=${pairs.map(([one]) => a.pieces[one])} pin=${at} onPin=${choose} look=${look} label="Tokens that both have" />
    <h3>After <q><${Piece} text=${a.pieces[i]} /></q></h3>
    <p class="says">Grey: ${names[0]}. In colour: ${names[1]}. –: not among the ${TOP} likeliest.</p>
    <${Odds} rows=${both(a, i, b, j)} none="–" /><//>`;
}

// Activation patching: the states of the text, put one at a time into the second text.
function Carried({ a, b, subject, other, state, update }) {
  const [isAsked, ask] = useState(false);
  const [[l, t], see] = useState([0, Math.max(0, a.ids.findIndex((id, k) => id !== b.ids[k]))]);
  const [answer, wrong] = [a, b].map(({ top_ids, next }) => top_ids[next][0]);
  const most = state.info.most_tokens?.patch ?? 64;
  const isFit = other && state.info.tokenizer !== false && a.ids.length === b.ids.length && a.ids.length <= most;
  const replaced = withOtherWord(a);
  const body = { ...subject, corrupted: other, answer, ...(wrong === answer ? {} : { wrong }) };
  const found = useCall("/inspect/patch", isAsked && isFit ? body : null);
  const { clean, corrupted, residual } = found.data ?? {};
  const share = (layer, at) => (residual[layer][at] - corrupted) / (clean - corrupted);
  const percent = (layer, at) => `${fixed(100 * share(layer, at), 0)} %`;
  const [top, word] = [residual?.length - 1, (data, at) => html`<b><${Piece} text=${data.pieces[at]} /></b>`];
  const next = (id) => html`<q><b><${Piece} text=${a.words[id] ?? b.words[id]} /></b></q>`;
  return html`<${Panel} title="What carries the answer?" found=${found} ask=${isFit && ["/inspect/patch", body]} says=${html`After the text
      ${" "}${next(answer)} is expected, after the second ${next(wrong)}. One state of the text is put into the second, before a layer and at a token: how
      much of the answer comes with it?`}>
    ${!isFit ? html`<p class="note">For this the texts must have equally many tokens, at most ${most}: here ${a.ids.length} and ${b.ids.length}.
        ${" "}Copy the text into the second box, and replace a word.
        ${replaced && html` <button type="button" onClick=${async () => update({ other: await textOf(replaced, state.info) })}>Replace a word of the text</button>`}</p>`
      : !isAsked && html`<button type="button" class="main" onClick=${() => ask(true)}>Put each state into the second text</button>`}
    ${residual && html`<div class="lens"><${HeatGrid} label="Share of the answer, by layer and token" corner="before layer" dark=${state.dark}
        rows=${residual.map((_, row) => String(top - row))} columns=${b.pieces.map((piece) => html`<${Piece} text=${piece} />`)}
        cell=${(row, at) => ({ t: Math.min(1, share(top - row, at)), text: percent(top - row, at) })}
        at=${[top - l, t]} onMove=${(row, at) => see([top - row, at])} /></div>
      <p class="readout">Before layer ${l}, the state of ${word(a, t)} in place of ${word(b, t)} brings <b>${percent(l, t)}</b>: log P(${next(answer)})
        ${wrong !== answer && html` − log P(${next(wrong)})`} goes from <${Num} x=${corrupted} /> to <${Num} x=${residual[l][t]} />, and the text itself has <${Num} x=${clean} />.</p>`}
  <//>`;
}

const signed = (x) => `${x < 0 ? "−" : "+"}${fixed(Math.abs(x), 2)}`;

// The ten likeliest of either; a probability is unknown where the token is not among the first TOP.
function both(a, i, b, j) {
  const odds = (of, at) => new Map(of.top_ids[at].map((id, k) => [id, Math.exp(of.top_logprob[at][k])]));
  const [p, after] = [odds(a, i), odds(b, j)];
  const either = (id) => Math.max(p.get(id) ?? 0, after.get(id) ?? 0);
  const ids = [...new Set([...p.keys(), ...after.keys()])].sort((x, y) => either(y) - either(x)).slice(0, 10);
  return ids.map((id, k) => ({ id, place: k + 1, piece: a.words[id] ?? b.words[id], p: p.get(id) ?? null, after: after.get(id) ?? null }));
}
