// Heads: where each head of a layer looks from the pinned token, and what each head is worth.

import {
  Choice, count, first, fixed, heat, html, Num, Panel, Piece, prob, Term, Tokens, useCall,
  useMemo, useState,
} from "../parts.js";
import { HeatGrid, Pixels, Products } from "../chart.js";

const MOST_TOKENS = 256;

export default function Heads({ state, update }) {
  const { info, positions, found: read } = state;
  const layer = Math.min(state.layer, (info.config?.n_layer ?? 1) - 1);
  const cap = info.most_tokens?.attention ?? MOST_TOKENS;
  const short = positions && first(state, cap);
  const body = short && { ...short, layer };
  const found = useCall("/inspect/attention", body);
  const data = found.data;
  const pin = data ? Math.min(state.pin, data.ids.length - 1) : 0;
  const head = data ? Math.min(state.head, data.patterns.length - 1) : 0;
  return html`
    ${data && html`<${All} data=${data} short=${short} at=${[layer, head]} pin=${pin} found=${found} state=${state} update=${update} />`}
    <${Panel} title="Where does each head look?" found=${read.error ? read : found} ask=${body && ["/inspect/attention", body]}
      says=${html`<${Term} name="attention">Attention</${Term}> from the pinned token back over the text: the higher and stronger,
        the more of that token's value the head takes.`}>
      ${positions?.ids.length > cap && html`<p class="note">Heads reads at most ${cap} tokens: these are the first of ${count(positions.ids.length)}.</p>`}
      ${data && html`<${Look} data=${data} head=${head} pin=${pin} state=${state} update=${update} />`}
    <//>
    ${data && html`<${Match} key=${`${data.layer} ${head} ${pin}`} data=${data} head=${head} pin=${pin} found=${found} dark=${state.dark} />`}`;
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

// Query times key, for the pinned token and one that it may look at.
function Match({ data, head, pin, found, dark }) {
  const { queries, keys, patterns, pieces } = data;
  const weights = patterns[head][pin];
  const [other, choose] = useState(weights.indexOf(Math.max(...weights.slice(0, pin + 1))));
  const [query, key] = [queries[head][pin], keys[head][other]];
  const sum = query.reduce((total, x, i) => total + x * key[i], 0);
  const word = (i) => html`<b><${Piece} text=${pieces[i]} /></b>`;
  return html`<${Panel} title="Why does it look there?" found=${found} quiet
      says="A head asks with a query and answers with keys: their product, over all tokens through softmax, is the weight.">
    <${Tokens} small pieces=${pieces.slice(0, pin + 1)} pin=${other} onPin=${choose} label="The token whose key is shown"
      look=${(j) => ({ bar: weights[j], fill: heat(Math.sqrt(weights[j]), dark), says: `weight ${prob(weights[j])}` })} />
    <${Products} strips=${[[html`query of ${word(pin)}`, query], [html`× key of ${word(other)}`, key]]} dark=${dark}
      says=${() => html`Sum <${Num} x=${sum} /> / √${query.length} = <b><${Num} x=${sum / Math.sqrt(query.length)} /></b>;
        ${" "}softmax over ${count(pin + 1)} makes it a weight of <b><${Num} x=${weights[other]} show=${prob} /></b>.`} />
  <//>`;
}

const BY = {
  pattern: ["patterns"],
  previous_share: ["on the previous token", prob],
  first_share: ["on the first token", prob],
  entropy: ["entropy, bits", (x) => fixed(x, 1)],
  worth: ["worth, nats", (x) => `${x < 0 ? "−" : "+"}${fixed(Math.abs(x), 2)}`],
};

// All heads of all layers: where they look, their habits, or what the loss would be without each.
function All({ data, short, at, pin, found, state, update }) {
  const [by, setBy] = useState("pattern");
  const [chosen, choose] = useState(null); // a column that is no head
  const [isMap, isWorth] = [by === "pattern", by === "worth"];
  const layers = data.entropy.map((_, layer) => useCall("/inspect/attention", isMap && short ? { ...short, layer } : null));
  const worth = useCall("/inspect/ablate", isWorth ? short : null);
  const heads = data.patterns.length;
  const table = isMap ? layers.map((one) => one.data?.patterns ?? Array(heads).fill(null))
    : !isWorth ? data[by] : worth.data?.heads.map((values, l) => [...values, worth.data.attention[l], worth.data.mlp[l]]);
  const columns = [...data.patterns.map((_, h) => `head ${h}`), "attention", "MLP"];
  const here = [at[0], isWorth ? chosen ?? at[1] : at[1]];
  const most = isMap || /share/.test(by) ? 1 : table && Math.max(1e-9, ...table.flat().map(Math.abs));
  const cell = (l, c) => isMap ? { t: null, text: html`<${Triangle} name=${`layer ${l}, head ${c}`} pattern=${table[l][c]} row=${pin} dark=${state.dark} />` }
    : { t: Math.abs(table[l][c]) / most, text: BY[by][1](table[l][c]) };
  return html`<${Panel} title="All layers and heads" found=${isWorth ? worth : isMap ? layers.find(({ busy, error }) => busy || error) ?? found : found}
      quiet=${!isWorth && !isMap} ask=${isWorth && short && ["/inspect/ablate", short]} says=${isWorth
        ? html`The <${Term} name="loss" /> of this text without a part, less the loss with it: + means that the part helps.`
        : isMap ? "Each square is a head: a row for each token, over the tokens that it may look at. The frame is the pinned token's row."
          : html`Means over this text: how much of its weight a head gives to one token, or the <${Term} name="entropy" /> of its weights.`}>
    <${Choice} label="Measure" value=${by} onChange=${setBy} options=${Object.entries(BY).map(([key, [name]]) => [key, name])} />
    ${isWorth && table && html`<p class="verdict">With all parts the loss is <b><${Num} x=${worth.data.loss} digits=${3} /></b>. Without
      ${" "}${columns[here[1]]} of layer ${here[0]} it changes by <b><${Num} x=${table[here[0]][here[1]]} show=${BY.worth[1]} /></b>.</p>`}
    ${table && html`<${HeatGrid} label="All heads" corner="layer" rows=${table.map((_, l) => String(l))} dark=${state.dark} at=${here}
      columns=${columns.slice(0, table[0].length)} cell=${cell}
      onMove=${(layer, c) => {
        choose(c < heads ? null : c);
        update(c < heads ? { layer, head: c } : { layer });
      }} />`}
  <//>`;
}

// A row for each token, over the tokens that it may look at; the pinned token's is framed.
function Triangle({ name, pattern, row, dark }) {
  const n = pattern?.length ?? Infinity; // not known yet: a frame of no size
  const colors = useMemo(() => Array.from({ length: 256 }, (_, k) => heat(Math.sqrt(k / 255), dark).rgb), [dark]);
  const color = (i) => i % n <= Math.floor(i / n) && colors[Math.round(255 * pattern[Math.floor(i / n)][i % n])];
  return html`<span class="hidden">${name}</span><span class="map">
    ${pattern && html`<${Pixels} wide=${n} tall=${n} color=${color} of=${[pattern, dark]} />`}
    <span style=${{ top: `${(100 * row) / n}%`, height: `${100 / n}%`, width: `${(100 * (row + 1)) / n}%` }}></span></span>`;
}
