// Guess first: the reader picks the next token among five, and then sees the model's answer. Both are
// scored in bits: -log2 of the share that was given to the true token.

import { Choice, Facts, fixed, html, likeliest, Odds, Panel, Piece, prob, useCall, useState, useUnseen } from "../parts.js";

const CHOICES = 5;
const two = (x) => fixed(x, 2);

export default function Guess({ state }) {
  const unseen = useUnseen(state);
  const [isOwn, setOwn] = useState(false);
  const text = isOwn ? null : unseen; // undefined: not known yet
  const asked = useCall("/inspect/positions", text ? { text, top: 10 } : null);
  const { positions, found, subject } = text === null ? state : { positions: asked.data, found: asked, subject: text };
  const choice = unseen && html`<div class="row"><${Choice} label="The text" value=${isOwn} onChange=${setOwn}
    options=${[[false, "a text that you did not see"], [true, "the text of the page"]]} /></div>`;
  if (!positions) return html`<${Panel} title="Guess first" found=${found}>${choice}<//>`;
  if (!positions.next) return html`<${Panel} title="Guess first" found=${found}>${choice}<p>Write a text of two tokens or more: there is nothing to guess.</p><//>`;
  return html`<${Game} key=${JSON.stringify(subject)} positions=${positions} found=${found} choice=${choice} />`;
}

function Game({ positions, found, choice }) {
  const { pieces, words, target, logprob, next } = positions;
  const [at, setAt] = useState(Math.min(2, next - 1)); // the token after this one is guessed
  const [sure, setSure] = useState(0.6);
  const [picked, pick] = useState(null);
  const [scores, setScores] = useState([]); // [the reader's bits, the model's]
  const answer = { id: target[at], piece: words[target[at]], p: Math.exp(logprob[at]) };
  const others = likeliest(positions, at).filter(({ id }) => id !== answer.id).slice(0, CHOICES - 1);
  const five = [...others, answer].sort((a, b) => a.id - b.id);
  const sum = five.reduce((total, { p }) => total + p, 0);
  const share = (id, chosen) => (id === chosen ? sure : (1 - sure) / Math.max(1, five.length - 1));
  const choose = (id) => {
    pick(id);
    setScores([...scores, [-Math.log2(share(answer.id, id)), -Math.log2(answer.p / sum)]]);
  };
  const mean = (who) => (scores.length ? scores.reduce((total, score) => total + score[who], 0) / scores.length : null);
  const rows = five.map((one) => ({ ...one, p: one.p / sum, after: share(one.id, picked), mark: one.id === answer.id && "true next" }))
    .sort((a, b) => b.p - a.p).map((row, k) => ({ ...row, place: k + 1 }));
  return html`<${Panel} title="Guess first" found=${found} says="Which token comes next? Say how sure you are, and press one. The score is the mean surprise in bits: lower is better.">
    ${choice}<p class="written">${pieces.slice(0, at + 1).map((piece, k) => html`<${Piece} key=${k} text=${piece} />`)}<span class="ghost">?</span></p>
    ${picked === null
      ? html`<div class="row"><${Choice} label="How sure you are" value=${sure} onChange=${setSure} options=${[0.3, 0.6, 0.9].map((x) => [x, `${prob(x)} sure`])} /></div>
        <div class="chips" role="group" aria-label="The next token">${five.map(({ id, piece }) => html`<button type="button" key=${id} onClick=${() => choose(id)}><${Piece} text=${piece} /></button>`)}</div>`
      : html`<p class="verdict" aria-live="polite">${picked === answer.id ? "Right" : "Not this time"}: <b class="truth"><${Piece} text=${answer.piece} /></b>.</p>
        <p class="says">Upper bar: the model's probability among the five. Lower: yours.</p><${Odds} rows=${rows} />
        ${at + 1 < next ? html`<button type="button" class="main" onClick=${() => { setAt(at + 1); pick(null); }}>Next token</button>` : "The text ends here."}`}
    <${Facts} of=${[["you, bits", mean(0), two], ["the model, bits", mean(1), two], ["a blind guess, bits", Math.log2(five.length), two], ["tokens guessed", scores.length]]} /><//>`;
}
