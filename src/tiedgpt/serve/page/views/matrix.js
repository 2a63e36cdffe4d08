// Matrix: W once, with its two jobs; a random head in its place; and which job moves it.

import {
  bytes, Choice, count, Facts, fixed, html, likeliest, Num, Odds, Panel, Piece, prob, short, Table, Term, useCall, usePieces, useState,
} from "../parts.js";
import { Bar } from "../chart.js";

export default function Matrix({ state }) {
  return html`<${Whole} state=${state} /><${RandomHead} state=${state} /><${Gradients} state=${state} />`;
}

// ---- one matrix, two jobs ----

// `children` stand below what is predicted, in place of a sentence.
export function Jobs({ state, children }) {
  const { info, positions, pin } = state;
  if (!info.matrices) return null;
  const reads = positions?.ids[pin];
  const predicts = positions?.top_ids[pin][0];
  return html`<div class=${`jobs ${info.tied ? "" : "untied"}`}>
      <div class="job reads"><h3>reads</h3>
        ${positions && html`<p class="big"><${Piece} text=${positions.words[reads]} /></p>
          <p>is token ${count(reads)}: row ${count(reads)} goes into the layers.</p>`}
        <p class="formula">h₀ = W[${reads ?? "id"}] + position</p></div>
      <${Drawing} info=${info} reads=${reads} predicts=${predicts} />
      <div class="job predicts"><h3>predicts</h3>
        ${positions && html`<p class="big"><${Piece} text=${positions.words[predicts]} /></p>
          ${children ?? html`<p>is expected next, at ${prob(Math.exp(positions.top_logprob[pin][0]))}: row ${count(predicts)} fits h best.</p>`}`}
        <p class="formula">logits = h ${info.tied ? "W" : "head"}ᵀ</p></div>
    </div>`;
}

function Whole({ state }) {
  const { info } = state;
  const says = info.tied
    ? "The matrix W is here once. Reading takes a row out of it; predicting compares with every row of it."
    : "This model is untied: one matrix reads, and a second one of the same shape predicts.";
  return info.matrices && html`<${Panel} title=${info.tied ? "One matrix, two jobs" : "Two matrices, a job each"} says=${says}>
    <${Jobs} state=${state} />
    ${info.matrices.map((matrix) => html`<${Stored} key=${matrix.name} info=${info} matrix=${matrix} />`)}<//>`;
}

const TOP = 30; // of the drawn matrix, which is 200 high
const LAYERS = 292; // the height at which the arrows meet the layers

// The row that is read goes down into the layers; what comes out of them goes up to W again.
function Drawing({ info, reads, predicts }) {
  const V = info.vocab_size;
  const boxes = info.tied ? [{ x: 155, wide: 110, name: "W" }]
    : [{ x: 140, wide: 55, name: "wte" }, { x: 225, wide: 55, name: "head" }];
  const y = (id) => TOP + (200 * (id + 0.5)) / V;
  const [left, right] = [boxes[0].x, boxes[boxes.length - 1].x + boxes[boxes.length - 1].wide];
  const label = `${info.tied ? "One matrix" : "Two matrices"} of ${count(V)} rows and ${count(info.n_embd)} columns: ` +
    "one arrow leads from the row of the token down into the layers, the other from the layers up to the row that is predicted";
  const between = (at) => (at + LAYERS) / 2 + 6; // beside the middle of an arrow
  const hit = (box, id, kind) => html`<rect class=${`hit ${kind}`} x=${box.x - 4} y=${y(id) - 2.5}
    width=${box.wide + 8} height="5" rx="2.5" />`;
  const lines = Array.from({ length: 24 }, (_, i) => TOP + 8 * (i + 1));
  return html`<svg class="drawing" viewBox="0 0 420 316" role="img" aria-label=${label}>
    ${boxes.map((box) => html`<g key=${box.name}><rect class="matrix" x=${box.x} y=${TOP} width=${box.wide} height="200" rx="5" />
      ${lines.map((at) => html`<path class="rule" key=${at} d=${`M${box.x + 1},${at}h${box.wide - 2}`} />`)}
      <text x=${box.x + box.wide / 2} y="20" text-anchor="middle" class="name">${box.name}</text></g>`)}
    <text x="210" y="250" text-anchor="middle" class="size">${`${count(V)} × ${count(info.n_embd)}`}</text>
    <rect class="matrix" x="150" y=${LAYERS - 17} width="120" height="34" rx="9" />
    <text x="210" y=${LAYERS + 5} text-anchor="middle" class="size">${info.config.n_layer} layers</text>
    ${reads !== undefined && html`${hit(boxes[0], reads, "reads")}
      <path class="arrow reads" d=${`M${left - 8},${y(reads)}H70q-20,0 -20,20V${LAYERS - 20}q0,20 20,20H144m-9,-7l9,7l-9,7`} />
      <text class="tag reads" x="42" y=${between(y(reads))} text-anchor="end">h₀</text>`}
    ${predicts !== undefined && html`${hit(boxes[boxes.length - 1], predicts, "predicts")}
      <path class="arrow predicts" d=${`M272,${LAYERS}H350q20,0 20,-20V${y(predicts) + 20}q0,-20 -20,-20H${right + 9}m9,-7l-9,7l9,7`} />
      <text class="tag predicts" x="380" y=${between(y(predicts))}>h</text>`}
  </svg>`;
}

function Stored({ info, matrix }) {
  const row = info.ledger.rows.find((one) => one.names.includes(matrix.name));
  const job = matrix.does.split(" ")[0]; // "reads and predicts": the stored matrix that reads
  const stored = info.stored?.matrices.find((one) => one.roles.includes(job));
  const share = row && row.parameters / info.parameters;
  const lines = [
    ["name", matrix.name],
    row && ["shape", row.shape.map(count).join(" × ")],
    row && ["parameters", `${count(row.parameters)}, ${prob(share)} of the model`],
    row && ["in memory", `${bytes(row.bytes)} of ${row.dtype}`],
    stored && ["on disk", `${bytes(stored.n_bytes)} of ${stored.dtype} in ${stored.file}`],
    stored && ["key in the file", stored.names.join(", ")],
  ].filter(Boolean);
  return html`<div><h3>${matrix.name} <span class="does">${matrix.does}</span></h3>
    <dl class="list columns wide">${lines.slice(1).map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl></div>`;
}

// ---- a random head ----

function RandomHead({ state }) {
  const { info, subject } = state;
  const [head, setHead] = useState("own");
  const found = useCall("/inspect/random_head", subject);
  const data = found.data;
  const of = (name) => data[head === "random" ? `random_${name}` : name];
  const own = info.tied === false ? "its own head" : "W";
  return html`<${Panel} title="Put a random head in its place" found=${found} ask=${["/inspect/random_head", subject]}
      says="A new head begins as a random matrix of the same shape. The layers are unchanged, but a random head cannot read them.">
    ${data && html`<${Choice} label="What predicts" value=${head} onChange=${setHead}
        options=${[["own", `predict with ${own}`], ["random", "with a random head"]]} />
      <div class="columns" aria-live="polite"><${Facts} of=${[[html`<${Term} name="loss" />, nats`, of("loss"), (x) => fixed(x, 3)],
          [`of a guess among ${count(info.vocab_size)}`, data.uniform_loss, (x) => fixed(x, 3)], ["parameters", of("parameters"), count]]} />
        <${Odds} rows=${likeliest({ top_ids: [of("top_ids")], top_logprob: [of("top_logprob")], words: data.words }, 0)} /></div>
      <p class="says">The model itself stays as it is.</p>`}
  <//>`;
}

// ---- the gradient, split ----

function Gradients({ state }) {
  const { subject, info } = state;
  const found = useCall("/inspect/gradient_split", subject);
  const { named } = usePieces();
  const data = found.data;
  const says = info.tied === false
    ? "Each matrix has a gradient of its own: one from reading, one from predicting."
    : "Training moves W twice: because it read these tokens, and because it predicted. An optimizer adds the two.";
  return html`<${Panel} title="Which job moves it" says=${says} found=${found} ask=${["/inspect/gradient_split", subject]}>
    ${data && html`<${Split} data=${data} />
      <div class="columns">${["reads", "predicts"].map((side) => html`<${Moved} key=${side} side=${side}
        lengths=${side === "reads" ? data.rows_read : data.rows_predict} named=${named} />`)}</div>`}
  <//>`;
}

function Split({ data }) {
  const most = Math.max(data.norm_read, data.norm_predict) || 1;
  const angle = data.cosine === null ? null : (Math.acos(Math.min(1, Math.max(-1, data.cosine))) * 180) / Math.PI;
  const one = (kind, name, norm) => html`<div class="measure"><span>${name}</span>
    <${Bar} t=${norm / most} kind=${kind} /><b><${Num} x=${norm} /></b></div>`;
  return html`<div class="columns split">
    <div>${one("reads", "from reading", data.norm_read)}${one("predicts", "from predicting", data.norm_predict)}
      <p>Predicting pulls <b>${short(data.norm_predict / (data.norm_read || NaN))} times</b> as hard.
        ${angle !== null && html` The two point ${Math.round(angle)}° apart: cosine <b><${Num} x=${data.cosine} digits=${3} /></b>.`}</p></div>
  </div>`;
}

const SHOWN = 10;

function Moved({ side, lengths, named }) {
  const order = lengths.map((_, id) => id).sort((a, b) => lengths[b] - lengths[a]).slice(0, SHOWN)
    .filter((id) => lengths[id] > 0);
  const moved = lengths.reduce((n, length) => n + (length > 0), 0);
  const rows = order.map((id) => ({ id, token: named(id), length: lengths[id] }));
  const title = side === "reads" ? "Most moved by reading" : "Most moved by predicting";
  return html`<div><h3 class=${side}>${title}</h3>
    <p class="says">${count(moved)} of ${count(lengths.length)} rows move.</p>
    <${Table} caption=${title} rows=${rows} columns=${[
      { key: "token", label: "token", text: true, show: (row) => html`<${Piece} text=${row.token} />` },
      { key: "length", label: "gradient", says: "length of the row's gradient", show: (row) => html`
        <${Bar} t=${row.length / rows[0].length} kind=${side} /> <${Num} x=${row.length} />` },
    ]} /></div>`;
}
