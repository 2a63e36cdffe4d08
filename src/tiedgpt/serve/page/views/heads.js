// Heads: where each head of a layer looks from the pinned token, and what each head is worth.

import { exported } from "../api.js";
import {
  count, first, fixed, heat, html, Num, Panel, Piece, prob, round, Slider, Tokens, useCall,
  useEffect, useRef, useState,
} from "../parts.js";
import { HeatGrid } from "../chart.js";

const MOST_TOKENS = 256;

export default function Heads({ state, update }) {
  const { info, positions, found: read } = state;
  const nLayers = info.config?.n_layer ?? 1;
  const layer = Math.min(state.layer, nLayers - 1);
  const cap = info.most_tokens?.attention ?? MOST_TOKENS;
  const short = positions && !read.stale ? first(state, cap) : null;
  const body = short && { ...short, layer };
  const found = useCall("/inspect/attention", body);
  const data = found.data;
  const pin = data ? Math.min(state.pin, data.ids.length - 1) : 0;
  const head = data ? Math.min(state.head, data.patterns.length - 1) : 0;
  return html`
    <${Panel} title="Where does each head look?" found=${read.error ? read : found} ask=${body && ["/inspect/attention", body]}
      says="From the pinned token back over the text: the higher and stronger, the more of that token's value the head takes.">
      ${positions?.ids.length > cap && html`<p class="note">Heads reads at most ${cap} tokens: these are the first of ${count(positions.ids.length)}.</p>`}
      <div class="row"><${Slider} label="layer" value=${layer} min=${0} max=${nLayers - 1} step=${1}
        show=${(n) => `${n} (0 to ${nLayers - 1})`} onChange=${(value) => update({ layer: value })} /></div>
      ${data && html`<${Look} data=${data} head=${head} pin=${pin} state=${state} update=${update} />
        <${Maps} data=${data} head=${head} pin=${pin} dark=${state.dark} update=${update} />`}
    <//>
    <${Worth} short=${short} at=${[layer, head]} state=${state} update=${update} />`;
}

function Look({ data, head, pin, state, update }) {
  const weights = data.patterns[head][pin];
  const best = weights.indexOf(Math.max(...weights.slice(0, pin + 1)));
  const look = (j) => (j > pin
    ? { grey: true, says: "later: it cannot be seen" }
    : { bar: weights[j] / weights[best], fill: heat(Math.sqrt(weights[j]), state.dark), says: `weight ${prob(weights[j])}` });
  return html`<p class="verdict">Head ${head} of layer ${data.layer}, from <b><${Piece} text=${data.pieces[pin]} /></b> (token ${pin}):
      ${" "}<${Num} x=${weights[best]} show=${prob} /> on <b><${Piece} text=${data.pieces[best]} /></b>${best === pin ? ", itself" : ` (token ${best})`}.</p>
    <${Tokens} pieces=${data.pieces} pin=${pin} onPin=${(at) => update({ pin: at })} look=${look}
      label="Tokens, by the attention that the pinned one pays them" />`;
}

// Small maps of all heads: the row of the pinned token is framed.
function Maps({ data, head, pin, dark, update }) {
  return html`<div class="maps" role="radiogroup" aria-label="Head"
    onKeyDown=${round(data.patterns.length, head, (to) => update({ head: to }))}>
    ${data.patterns.map((pattern, h) => html`<button type="button" role="radio" key=${h} aria-checked=${h === head}
      tabindex=${h === head ? 0 : -1} onClick=${() => update({ head: h })}>
      <${Triangle} pattern=${pattern} row=${pin} dark=${dark} />
      <span>head ${h}</span><small>${habit(data, h)}</small></button>`)}</div>
    <p class="says">Each square is a head: a row for each token, over the tokens that it may look at. The frame is the pinned token's row.</p>`;
}

function habit({ layer, first_share: firsts, previous_share: previous, entropy }, h) {
  const [a, b] = [firsts[layer][h], previous[layer][h]];
  if (a === null) return "";
  if (Math.max(a, b) < 0.3) return `${fixed(entropy[layer][h], 1)} bits wide`;
  return a > b ? `${prob(a)} on the first` : `${prob(b)} on the previous`;
}

function Triangle({ pattern, row, dark }) {
  const canvas = useRef(null);
  const n = pattern.length;
  useEffect(() => {
    Object.assign(canvas.current, { width: n, height: n });
    const pen = canvas.current.getContext("2d");
    const colors = Array.from({ length: 256 }, (_, k) => heat(Math.sqrt(k / 255), dark).background.match(/\d+/g).map(Number));
    const image = pen.createImageData(n, n);
    pattern.forEach((weights, i) => {
      for (let j = 0; j <= i; j += 1) image.data.set([...colors[Math.round(255 * weights[j])], 255], 4 * (i * n + j));
    });
    pen.putImageData(image, 0, 0);
  }, [pattern, dark]);
  return html`<span class="map"><canvas ref=${canvas} aria-hidden="true"></canvas>
    <span style=${{ top: `${(100 * row) / n}%`, height: `${100 / n}%`, width: `${(100 * (row + 1)) / n}%` }}></span></span>`;
}

const signed = (x) => `${x < 0 ? "−" : "+"}${fixed(Math.abs(x), 2)}`;

function Worth({ short, at, state, update }) {
  const [asked, ask] = useState(null);
  const body = exported || asked === JSON.stringify(short) ? short : null;
  const found = useCall("/inspect/ablate", body);
  const data = found.data;
  const [column, setColumn] = useState(null);
  const heads = data ? data.heads[0].length : 0;
  const parts = data && [...data.heads[0].map((_, h) => `head ${h}`), "attention", "MLP"];
  const losses = data && data.heads.map((values, l) => [...values, data.attention[l], data.mlp[l]]);
  const most = data && Math.max(1e-12, ...losses.flat().map(Math.abs));
  const here = [at[0], column ?? at[1]];
  return html`<${Panel} title="What is each head worth?" found=${found} ask=${short && ["/inspect/ablate", short]}
      says="The loss of this text without a part, less the loss with it, in nats: + means that the part helps.">
    ${!body && html`<button type="button" onClick=${() => ask(JSON.stringify(short))} disabled=${!short}>
      Measure: leave out one part at a time</button>`}
    ${data && html`<p class="verdict">With all parts the loss is <b><${Num} x=${data.loss} digits=${3} /></b>. Without
      ${" "}${parts[here[1]]} of layer ${here[0]} it changes by <b><${Num} x=${losses[here[0]][here[1]]} show=${signed} /></b>.</p>
      <${HeatGrid} label="Change of the loss without each part" corner="layer" rows=${losses.map((_, l) => String(l))} columns=${parts}
        cell=${(l, c) => ({ t: Math.abs(losses[l][c]) / most, text: signed(losses[l][c]) })} dark=${state.dark} at=${here}
        onMove=${(layer, c) => {
          setColumn(c);
          update(c < heads ? { layer, head: c } : { layer });
        }} />`}
  <//>`;
}
