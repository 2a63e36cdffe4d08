// Text: what every token cost the model, and what it expected instead.
//
// Position i predicts token i + 1. So token i is coloured by the surprisal at position i - 1, and
// pinning token i shows the prediction that is made after it.

import { textOf } from "../api.js";
import {
  announce, Choice, costOf, count, Facts, fixed, heat, html, likeliest, many, Num, Odds, Panel, Piece, plain, prob, scaleOf, Term, Tokens, useCall, usePieces, useState,
} from "../parts.js";

const RANKS = [[1, "1"], [10, "2–10"], [100, "11–100"], [1000, "101–1,000"], [Infinity, "above 1,000"]];

export default function Text({ state, update }) {
  const { positions, found, subject } = state;
  const ask = subject && ["/inspect/positions", { ...subject, top: 10 }];
  const isTraining = state.mode === "training";
  return html`
    <${Panel} found=${found} ask=${ask} title=${isTraining ? "What is the loss of each token?" : "Which prediction is used?"}
      says=${isTraining ? html`Each token is coloured by its <${Term} name="surprisal" />, −log₂ of the probability that the model gave it.`
        : "Every column predicts. Generation uses the last one alone: it chooses the token that follows."}>
      ${positions && html`<${Columns} state=${state} update=${update} />`}
    <//>
    ${positions && html`<div class="columns wide">
      <${Pinned} state=${state} update=${update} />
      <div><${Totals} state=${state} /><${Poke} state=${state} /></div></div>`}`;
}

// How a token looks that cost the model so many bits; `scale` is a guess's.
export function costLook({ surprisal_bits: bits, rank }, scale, dark, mark = () => "") {
  return (i) => {
    if (i === 0) return { bar: 0, mark: mark(i), says: "nothing predicts the first token" };
    const look = costOf(bits[i - 1], scale, dark);
    return { ...look, mark: mark(i), says: `${look.says}, rank ${count(rank[i - 1])}` };
  };
}

function Columns({ state, update }) {
  const { positions, pin, mode, dark, info } = state;
  const { pieces, next, top_ids, top_logprob, words } = positions;
  const isTraining = mode === "training";
  const scale = scaleOf(info);
  const look = isTraining ? costLook(positions, scale, dark, (i) => (i === pin + 1 ? "next" : "")) : (i) => ({ grey: i < next });
  const likeliest = Math.exp(top_logprob[next][0]);
  const after = !isTraining && html`<span class="ghost">→ <${Piece} text=${words[top_ids[next][0]]} /> ${prob(likeliest)}</span>`;
  const choose = (chosen) => update(chosen === "training" ? { mode: chosen } : { mode: chosen, pin: -1 });
  return html`
    <div class="row">
      <${Choice} label="What the predictions are for" value=${mode} onChange=${choose}
        options=${[["training", "Training"], ["generation", "Generation"]]} />
      <p class="says">${next ? `${count(next + 1)} tokens are read at once.` : "1 token is read."} ${isTraining
        ? `${many(next, "prediction")} ${next === 1 ? "has" : "have"} a known answer: training learns from ${next === 1 ? "it" : "all of them"}.`
        : `${many(next, "prediction")} ${next === 1 ? "is" : "are"} left unused.`}</p>
    </div>
    <div class="hero"><${Tokens} pieces=${pieces} pin=${pin} onPin=${(at) => update({ pin: at })} look=${look}
      label="Tokens: pin one to see what the model expected after it" after=${after} /></div>
    ${isTraining && html`<${Legend} scale=${scale} dark=${dark} />`}`;
}

export function Legend({ scale, dark }) {
  const steps = [0, 0.125, 0.25, 0.5, 0.75, 1];
  return html`<p class="legend" aria-hidden="true"><span>expected</span>
    ${steps.map((t) => html`<span class="swatch" style=${heat(t, dark)}>${fixed(t * scale, 0)}</span>`)}
    <span>bits: surprising</span></p>`;
}

function Pinned({ state, update }) {
  const { positions, pin, found, info } = state;
  const { ids, pieces, words, target, logprob, rank, surprisal_bits: bits, entropy_bits: entropy } = positions;
  const hasNext = target[pin] >= 0;
  const undecided = [html`<${Term} name="entropy" />, bits`, entropy[pin], two];
  const rows = likeliest(positions, pin);
  let answer = rows.find(({ id }) => id === target[pin]);
  if (hasNext && !answer) rows.push(answer = { id: target[pin], place: rank[pin], piece: words[target[pin]], p: Math.exp(logprob[pin]) });
  if (answer) answer.mark = "true next";
  const go = async (id) => {
    const all = [...ids.slice(0, pin + 1), id];
    update({ ids: all, text: await textOf(all, info), pin: -1 });
    announce(`Continued with ${plain(words[id])}.`);
  };
  return html`<${Panel} title=${html`After <q><${Piece} text=${pieces[pin]} /></q>`} found=${found} quiet
    says="The ten likeliest tokens here. Press one to continue with it.">
    ${hasNext
      ? html`<p>The text goes on with <b class="truth"><${Piece} text=${words[target[pin]]} /></b>.</p>
        <${Facts} of=${[["probability", Math.exp(logprob[pin]), prob], [html`<${Term} name="rank" /> of ${count(info.vocab_size)}`, rank[pin]],
          [html`<${Term} name="surprisal" />, bits`, bits[pin], two], undecided]} />`
      : html`<p>The text ends here: no answer is known.</p><${Facts} of=${[undecided]} />`}
    <${Odds} rows=${rows} onPick=${go} />
  <//>`;
}

const two = (x) => fixed(x, 2);
const three = (x) => fixed(x, 3);

function Totals({ state }) {
  const { positions, found } = state;
  const { loss, bits_per_byte: perByte, next, rank } = positions;
  const counts = RANKS.map(([most], k) => rank.slice(0, next)
    .filter((r) => r <= most && r > (k ? RANKS[k - 1][0] : 0)).length);
  return html`<${Panel} title="The whole text" found=${found} quiet
    says="The loss is the mean surprisal; below is how often the true token had which rank.">
    <${Facts} of=${[[html`mean <${Term} name="loss" />, nats`, loss, three], ["bits per byte", perByte, three],
      [html`<${Term} name="perplexity" />`, loss === null ? null : Math.exp(loss)], ["predictions", next]]} />
    <table class="ranks"><caption class="hidden">How often the true token had which rank</caption>
      <tbody>${RANKS.map(([, name], k) => html`<tr><th scope="row">rank ${name}</th>
        <td class="line"><span style=${{ width: `${(100 * counts[k]) / Math.max(1, ...counts)}%` }}></span></td>
        <td class="number"><${Num} x=${counts[k]} /></td></tr>`)}</tbody></table>
  <//>`;
}

// Change token j: no column before j may move.
function Poke({ state }) {
  const { positions, subject, pin, dark, info } = state;
  const [word, setWord] = useState("");
  const [asked, setAsked] = useState(null);
  const { named } = usePieces();
  const next = named((positions.ids[pin] + 1) % info.vocab_size); // where nothing is written
  const isId = info.tokenizer === false && /^\d+$/.test(word);
  const change = (event) => {
    event.preventDefault();
    setAsked({ of: JSON.stringify(subject), replace_at: pin, replace_with: isId ? Number(word) : word || null });
  };
  const isAsked = asked?.of === JSON.stringify(subject);
  const bodyOf = (replace_at, id) => ({ ...subject, top: 1, replace_at, replace_with: id });
  const body = isAsked ? bodyOf(asked.replace_at, asked.replace_with) : null;
  const found = useCall("/inspect/positions", body);
  return html`<${Panel} title="Change one token" found=${found} ask=${subject && ["/inspect/positions", body ?? bodyOf(pin, null)]}
    says="A later token cannot change an earlier prediction: attention looks back only.">
    <form class="row" onSubmit=${change}>
      <label>Replace <b><${Piece} text=${positions.pieces[pin]} /></b> by another token:
        <input value=${word} placeholder=${plain(next)} onInput=${(event) => setWord(event.target.value)} /></label>
      <button>Change token ${pin}</button></form>
    ${found.data?.replaced && html`<${Moved} found=${found.data} dark=${dark} />`}
  <//>`;
}

function Moved({ found, dark }) {
  const [at] = found.replaced;
  const [chosen, setSeen] = useState(at);
  const seen = Math.min(chosen, found.pieces.length - 1); // chosen in a text that may have been longer
  const changes = found.max_abs_change;
  const most = Math.max(...changes);
  const before = Math.max(0, ...changes.slice(0, at));
  const look = (i) => ({
    bar: most ? changes[i] / most : 0, fill: heat(most ? changes[i] / most : 0, dark),
    mark: i === at ? "next" : "", says: `logits moved by ${changes[i]}`,
  });
  return html`
    <p class="verdict">${at === 0 ? "Nothing comes before the first token." : html`Before token ${at}, logits moved by
      at most <b><${Num} x=${before} /></b>${before === 0 ? ": not one bit." : ": rounding."}`}
      ${" "}From it on, by up to <b><${Num} x=${most} /></b>.</p>
    <${Tokens} small pieces=${found.pieces} pin=${seen} onPin=${setSeen} look=${look}
      label="How far the logits of each column moved" />
    <p class="says">Column ${seen}: moved by <${Num} x=${changes[seen]} />.</p>`;
}
