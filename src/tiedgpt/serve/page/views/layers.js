// Layers: what the state after each layer would predict, read by the final norm and the head.

import { Choice, count, fixed, first, html, Num, Panel, Piece, plain, prob, Term, useCall, useState } from "../parts.js";
import { HeatGrid, Lines, MOST_LINES } from "../chart.js";

const CAUTION = "Early layers were not trained to be read this way: a strange word there may say more of the lens than of the layer.";
// What a cell may be shaded by: a number, its shade 0..1 among so many tokens, and how it is shown.
const BY = {
  prob: { name: "probability", says: "of the word in the cell", number: ({ top_logprob }, s, t) => Math.exp(top_logprob[s][t][0]),
    shade: (p) => p, show: prob },
  rank: { name: "rank", says: html`<${Term} name="rank" /> of the true next token; 1 is strongest`, number: ({ target_rank }, s, t) => target_rank[s][t],
    shade: (rank, size) => (rank ? 1 - Math.log(rank) / Math.log(size) : 0), show: (rank) => (rank ? count(rank) : "–") },
  kl: { name: "KL", says: html`<${Term} name="KL" />: bits from the model's own prediction; 0 is strongest`, number: ({ kl_bits }, s, t) => kl_bits[s][t],
    shade: (bits, size) => 1 - Math.min(1, bits / Math.log2(size)), show: (bits) => fixed(bits, 1) },
};

export default function Layers({ state, update }) {
  const { info, pin, positions } = state;
  const most = info.most_tokens?.lens ?? 256;
  const at = Math.min(pin, most - 1);
  const body = positions && { ...first(state, most), top: 5, position: at };
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

function Grid({ data, state, pin, update }) {
  const [by, setBy] = useState("prob");
  const [seen, see] = useState(null); // [layer, token] under the keyboard or the pointer
  const { says, number, shade, show } = BY[by];
  const top = data.layers.length - 1; // is drawn first
  const n = data.ids.length;
  const [s, t] = seen && seen[0] <= top && seen[1] < n ? seen : [top, Math.min(pin, n - 1)];
  const cell = (row, at) => ({
    t: shade(number(data, top - row, at), state.info.vocab_size ?? 50257),
    text: html`<${Piece} text=${data.words[data.top_ids[top - row][at][0]]} /><small>${show(number(data, top - row, at))}</small>`,
  });
  return html`
    <div class="row"><${Choice} label="Colour by" value=${by} onChange=${setBy}
      options=${Object.entries(BY).map(([key, { name }]) => [key, name])} />
      <span class="says">${says}</span></div>
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
