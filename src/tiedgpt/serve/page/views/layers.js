// Layers: what the state after each layer would predict, read by the final norm and the head.

import { Choice, count, fixed, first, html, Num, Panel, Piece, plain, prob, Term, useCall, useState } from "../parts.js";
import { HeatGrid, Lines, MOST_LINES } from "../chart.js";

const CAUTION = "Early layers were not trained to be read this way: a strange word there may say more of the lens than of the layer.";
const BY = {
  prob: ["probability", "of the word in the cell"],
  rank: ["rank", html`<${Term} name="rank" /> of the true next token; 1 is strongest`],
  kl: ["KL", html`<${Term} name="KL" />: bits from the model's own prediction; 0 is strongest`],
};

export default function Layers({ state, update }) {
  const { info, pin, positions, found: read } = state;
  const most = info.most_tokens?.lens ?? 256;
  const at = Math.min(pin, most - 1);
  const body = positions && !read.stale ? { ...first(state, most), top: 5, position: at } : null;
  const found = useCall("/inspect/lens", body);
  const data = found.data;
  const isCut = positions && positions.ids.length > most;
  return html`
    <${Panel} title="What would each layer say?" found=${found} ask=${body && ["/inspect/lens", body]}
      says="Upwards: the layers. Each cell is the word that the state there would predict next.">
      <p class="note">${CAUTION}</p>
      ${isCut && html`<p class="says">The first ${most} of ${count(positions.ids.length)} tokens.</p>`}
      ${data && html`<${Grid} data=${data} state=${state} pin=${at} update=${update} />`}
    <//>
    ${data && html`<${Watched} data=${data} />`}`;
}

// How a cell is shaded, 0..1, and the number in it, by what is asked for.
function cellOf(data, by, size) {
  const words = Math.log(size);
  const shade = {
    prob: (s, t) => Math.exp(data.top_logprob[s][t][0]),
    rank: (s, t) => (data.target_rank[s][t] ? 1 - Math.log(data.target_rank[s][t]) / words : 0),
    kl: (s, t) => 1 - Math.min(1, data.kl_bits[s][t] / Math.log2(size)),
  }[by];
  const number = {
    prob: (s, t) => prob(Math.exp(data.top_logprob[s][t][0])),
    rank: (s, t) => (data.target_rank[s][t] ? count(data.target_rank[s][t]) : "–"),
    kl: (s, t) => fixed(data.kl_bits[s][t], 1),
  }[by];
  return { shade, number };
}

function Grid({ data, state, pin, update }) {
  const [by, setBy] = useState("prob");
  const [seen, see] = useState(null); // [layer, token] under the keyboard or the pointer
  const { shade, number } = cellOf(data, by, state.info.vocab_size ?? 50257);
  const top = data.layers.length - 1; // is drawn first
  const n = data.ids.length;
  const [s, t] = seen && seen[0] <= top && seen[1] < n ? seen : [top, Math.min(pin, n - 1)];
  const cell = (row, at) => ({
    t: shade(top - row, at),
    text: html`<${Piece} text=${data.words[data.top_ids[top - row][at][0]]} /><small>${number(top - row, at)}</small>`,
  });
  return html`
    <div class="row"><${Choice} label="Colour by" value=${by} onChange=${setBy}
      options=${Object.entries(BY).map(([key, [name]]) => [key, name])} />
      <span class="says">${BY[by][1]}</span></div>
    <div class="lens"><${HeatGrid} label="Likeliest word by layer and token" rows=${[...data.layers].reverse()}
      columns=${data.pieces.map((piece) => html`<${Piece} text=${piece} />`)} cell=${cell} dark=${state.dark}
      at=${[top - s, t]} mark=${Math.min(pin, n - 1)} onMove=${(row, at) => see([top - row, at])} onPick=${(_, at) => update({ pin: at })}
      corner=${html`<span class="hidden">state after</span>`} /></div>
    <${Readout} data=${data} s=${s} t=${t} />`;
}

function Readout({ data, s, t }) {
  const rank = data.target_rank[s][t];
  return html`<div class="readout"><p>After <b>${data.layers[s]}</b>, at token ${t} <b><${Piece} text=${data.pieces[t]} /></b>:
    ${" "}${data.top_ids[s][t].map((id, k) => html`<span class="one" key=${id}><${Piece} text=${data.words[id]} />
      ${" "}${prob(Math.exp(data.top_logprob[s][t][k]))}</span>`)}</p>
    <p>True next token: ${rank ? html`rank <${Num} x=${rank} />` : "none"}. KL from the model's own prediction:
      ${" "}<${Num} x=${data.kl_bits[s][t]} digits=${2} /> bits. Length of the state: <${Num} x=${data.state_norm[s][t]} />.</p></div>`;
}

// The words that rank first in any state at the pinned position, as lines through the layers.
function Watched({ data }) {
  const { watch, watch_logprob: logprobs, layers, words, position, pieces } = data;
  const lines = watch.slice(0, MOST_LINES).map((id, m) => ({
    name: html`<${Piece} text=${words[id]} />`, key: id, xs: layers.map((_, s) => s),
    ys: logprobs.map((row) => Math.exp(row[m])),
  }));
  const label = `Probability of ${lines.length} words after each layer; at the end: ` +
    lines.map((line, m) => `${plain(words[watch[m]])} ${prob(line.ys[layers.length - 1])}`).join(", ");
  const left = watch.length - lines.length;
  return html`<${Panel} title="How the answer comes about"
    says=${`Each word that ranks first after any layer at token ${position}, “${plain(pieces[position])}”${left > 0 ? `, without the ${left} earliest` : ""}.`}>
    <${Lines} label=${label} lines=${lines} xNames=${layers} xLabel="state after" yLabel="probability"
      show=${prob} tick=${prob} low=${0} high=${1} /><//>`;
}
