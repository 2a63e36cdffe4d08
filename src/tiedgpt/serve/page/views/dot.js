// Dot product: one prediction as h · e, number by number, and as |h| |e| cos for the row e of every token.

import {
  Choice, count, diverge, fixed, html, Num, Panel, Piece, plain, prob, short, Table, Term, useCall, useMemo, usePieces, useState,
} from "../parts.js";
import { apart, fullAt, Products, Scatter } from "../chart.js";

export default function Dot({ state, update }) {
  const { subject, pin, positions, centred } = state;
  const last = positions ? positions.ids.length - 1 : 0;
  const body = subject && { ...subject, position: Math.min(pin, last), top: 10 };
  const found = useCall("/inspect/dot", body);
  const { named } = usePieces();
  const data = found.data;
  const every = useMemo(() => data && columns(data, centred), [data, centred]);
  const [chosen, choose] = useState({});
  const seen = chosen.data === data ? chosen.id : data?.ids[0];
  const see = (id) => choose({ data, id });
  return html`
    <${Panel} title="The numbers of W, at work" found=${found} ask=${body && ["/inspect/dot", body]}
      says=${html`The row that is read goes into the layers and comes out as <${Term} name="h" />. Number by number, h is
        multiplied with the row of a candidate; the sum is its <${Term} name="logit" />.`}>
      ${data && html`<${Numbers} data=${data} seen=${seen} see=${see} read=${positions.ids[data.position]} dark=${state.dark} />`}
    <//>
    <${Panel} title="Which row points along h?" quiet found=${found}
      says=${`The same logits, as lengths and angles: h · e = |h| |e| cos, for the row e of every token${
        data ? ` in ${data.matrix}, which ${data.does}` : ""}.`}>
      ${data && html`
        <${Product} data=${data} every=${every} id=${seen} piece=${named(seen)} centred=${centred} />
        <${Choice} label="Rows" value=${centred} onChange=${(value) => update({ centred: value })}
          options=${[[false, "rows as they are"], [true, "less the mean row"]]} />
        <p class="says">${centred
          ? "Subtracting the mean row from all rows changes no probability, but every length and cosine: these are comparable between models."
          : "The further right, the larger the logit; a longer row makes it larger on the right, and smaller on the left."}</p>
        <${Scatter} x=${every.cos} y=${every.norm} order=${every.order} seen=${seen} onSee=${see} dark=${state.dark}
          names=${[`cosine of h and ${every.row}`, `length of ${every.row}`]}
          marks=${data.ids.map((id) => [id, every.labelled.includes(id) ? plain(named(id)) : ""])}
          label="Tokens, the likeliest first" says=${(id) => spoken(data, every, id, named(id))} />`}
    <//>
    ${data && html`<${Likeliest} data=${data} every=${every} centred=${centred} found=${found} positions=${positions} />`}`;
}

// Of all V rows: length, cosine, and the ids from the highest logit down.
function columns(data, centred) {
  const logits = data.all_norm.map((norm, id) => data.h_norm * norm * data.all_cos[id]);
  const [norm, cos] = centred ? [data.all_centred_norm, data.all_centred_cos] : [data.all_norm, data.all_cos];
  const order = logits.map((_, id) => id).sort((a, b) => logits[b] - logits[a]);
  return { logits, norm, cos, order, labelled: apart(data.ids, cos, norm), row: centred ? "c" : "e" };
}

// ---- number by number ----

function Numbers({ data, seen, see, read, dark }) {
  const k = Math.max(0, data.ids.indexOf(seen));
  const row = data.rows[k];
  const full = useMemo(() => fullAt(data.row_read, row), [data, k]);
  const word = (piece) => html`<b><${Piece} text=${piece} /></b>`;
  return html`
    <${Products} dark=${dark} strips=${[[html`reads row ${count(read)} ${word(data.piece)}`, data.row_read, full], [html`<i>h</i>, after all layers`, data.h],
      [html`× row ${count(data.ids[k])} ${word(data.pieces[k])}`, row, full]]} says=${(at, products) => html`
        Number ${at}: h <${Num} x=${data.h[at]} /> × row <${Num} x=${row[at]} /> = <${Num} x=${products[at]} />.
        ${" "}All ${count(row.length)} products: ${[1, -1].map((sign) => html`${sign > 0 ? "+ " : " − "}<${Num}
          x=${products.reduce((total, x) => total + Math.max(0, sign * x), 0)} />`)}${
          data.head_bias[k] ? html` + bias <${Num} x=${data.head_bias[k]} />` : ""} = logit <b class="predicts"><${Num} x=${data.logit[k]} /></b>`} />
    <p class="legend">${[-1, -0.5, 0, 0.5, 1].map((t) => html`<span class="swatch" key=${t} style=${diverge(t, dark)}>${
      ["below 0", "", "0", "", "above"][2 * t + 2]}</span>`)}<span>full colour in a row of W: ±${short(full)}</span></p>
    <${Choice} kind="chips" label="The row that h is multiplied with" value=${data.ids[k]} onChange=${see}
      options=${data.ids.map((id, j) => [id, html`<${Piece} text=${data.pieces[j]} /> <small><${Num} x=${data.logit[j]} /></small>`])} />`;
}

// ---- lengths and angles ----

function spoken(data, { norm, cos, logits, row }, id, piece) {
  return `${plain(piece)}: length of ${row} ${short(norm[id])}, cosine ${fixed(cos[id], 3)}, logit ${short(logits[id])}`;
}

function Product({ data, every, id, piece, centred }) {
  const { norm, cos, logits } = every;
  const value = data.h_norm * norm[id] * cos[id];
  return html`<div class="product">
    <div><span>${centred ? html`h · c for` : html`logit of`}</span><b class="predicts"><${Piece} text=${piece} /></b></div>
    <i aria-label="equals">=</i><div><span>|h|</span><b><${Num} x=${data.h_norm} /></b></div>
    <i aria-label="times">×</i><div><span>|${every.row}|</span><b><${Num} x=${norm[id]} /></b></div>
    <i aria-label="times">×</i><div><span>cos</span><b><${Num} x=${cos[id]} digits=${3} /></b></div>
    <i aria-label="equals">=</i><div><span>${centred ? html`of logit ${short(logits[id])}` : "logit"}</span><b><${Num} x=${value} /></b></div>
  </div>`;
}

function Likeliest({ data, every, centred, found, positions }) {
  const target = positions.target[data.position];
  const byCos = (id) => every.cos.reduce((n, x) => n + (x > every.cos[id]), 1); // of the rows that are shown
  const rows = data.ids.map((id, k) => ({
    id, piece: data.pieces[k], rank: k + 1, prob: data.prob[k], logit: data.logit[k],
    norm: centred ? data.centred_norm[k] : data.row_norm[k], cos: centred ? data.centred_cos[k] : data.cos[k],
    rank_cos: byCos(id), bias: data.bias_part[k] + data.head_bias[k], gain: data.gain_part[k],
  }));
  const row = centred ? "c" : "e";
  const columns = [
    { key: "piece", label: "token", text: true, show: (r) => html`<${Piece} text=${r.piece} />${r.id === target && html`<small class="truth"> ● true next</small>`}` },
    { key: "prob", label: "prob", says: "softmax over all logits", show: (r) => html`<${Num} x=${r.prob} show=${prob} />` },
    { key: "logit", label: "logit", says: "bias part + context part" },
    { key: "bias", label: "= bias part", says: "b · e, by the final norm's bias: the same in every text" },
    { key: "gain", label: "+ context", says: "what this text adds" },
    { key: "norm", label: `|${row}|`, says: "length of the row" },
    { key: "cos", label: "cos", says: `of h and ${row}`, show: (r) => html`<${Num} x=${r.cos} digits=${3} />` },
    { key: "rank", label: "# by logit" },
    { key: "rank_cos", label: "# by cos", says: `of h and ${row}, among all tokens`,
      show: (r) => html`<${Num} x=${r.rank_cos} show=${count} />${r.rank_cos !== r.rank && html` <span aria-label="differs">≠</span>`}` },
  ];
  return html`<${Panel} title="The ten likeliest, in numbers" found=${found} quiet
      says=${html`The bias part is the <${Term} name="prior">prior logit</${Term}>: it writes a token's frequency whatever the text.
        ≠ marks tokens that the <${Term} name="cosine" /> alone would rank otherwise.`}>
    <${Table} caption="The ten likeliest tokens and their dot products" columns=${columns} rows=${rows} />
  <//>`;
}
