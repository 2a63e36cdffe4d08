// Matrix: W once, with its two jobs; a random head in its place; and which job moves it.

import { bytes, Choice, count, html, Num, Panel, Piece, prob, short, Table, useCall, useState } from "../parts.js";
import { Bar } from "../chart.js";

export default function Matrix({ state }) {
  return html`<${Jobs} state=${state} /><${RandomHead} state=${state} /><${Gradients} state=${state} />`;
}

// ---- one matrix, two jobs ----------------------------------------------------------------------

function Jobs({ state }) {
  const { info, positions, pin } = state;
  if (!info.matrices) return null;
  const reads = positions?.ids[pin];
  const predicts = positions?.top_ids[pin][0];
  const says = info.tied
    ? "The matrix W is here once. Reading takes a row out of it; predicting compares with every row of it."
    : "This model is untied: one matrix reads, and a second one of the same shape predicts.";
  return html`<${Panel} title=${info.tied ? "One matrix, two jobs" : "Two matrices, a job each"} says=${says}>
    <div class=${`jobs ${info.tied ? "" : "untied"}`}>
      <div class="job reads"><h3>reads</h3>
        ${positions && html`<p class="big"><${Piece} text=${positions.words[reads]} /></p>
          <p>Token ${count(reads)} is row ${count(reads)}. The row goes into the ${info.config.n_layer} layers.</p>`}
        <p class="formula">h₀ = W[${reads ?? "id"}] + position</p></div>
      <${Drawing} info=${info} reads=${reads} predicts=${predicts} />
      <div class="job predicts"><h3>predicts</h3>
        ${positions && html`<p class="big"><${Piece} text=${positions.words[predicts]} /></p>
          <p>Row ${count(predicts)} fits best what comes out of the layers:
          ${" "}${prob(Math.exp(positions.top_logprob[pin][0]))}.</p>`}
        <p class="formula">logits = h Wᵀ</p></div>
    </div>
    <div class="columns">${info.matrices.map((matrix) => html`<${Facts} key=${matrix.name} info=${info} matrix=${matrix} />`)}</div>
  <//>`;
}

const SIZE = { wide: 240, tall: 250, top: 24, high: 196 };

function Drawing({ info, reads, predicts }) {
  const V = info.vocab_size;
  const boxes = info.tied ? [{ x: 90, wide: 60, name: "W" }]
    : [{ x: 70, wide: 40, name: "W" }, { x: 130, wide: 40, name: "head" }];
  const y = (id) => SIZE.top + (SIZE.high * (id + 0.5)) / V;
  const [left, right] = [boxes[0], boxes[boxes.length - 1]];
  const label = `${info.tied ? "One matrix" : "Two matrices"} of ${count(V)} rows and ${count(info.n_embd)} columns: ` +
    "an arrow goes out to the layers, another comes in from them";
  const row = (box, id, kind) => id !== undefined && html`<rect class=${`hit ${kind}`} x=${box.x - 3}
    y=${y(id) - 2} width=${box.wide + 6} height="4" rx="2" />`;
  return html`<svg class="drawing" viewBox=${`0 0 ${SIZE.wide} ${SIZE.tall}`} role="img" aria-label=${label}>
    ${boxes.map((box) => html`<g key=${box.name}><rect class="matrix" x=${box.x} y=${SIZE.top}
      width=${box.wide} height=${SIZE.high} rx="4" />
      <text x=${box.x + box.wide / 2} y="16" text-anchor="middle" class="name">${box.name}</text></g>`)}
    ${row(left, reads, "reads")}${row(right, predicts, "predicts")}
    ${reads !== undefined && html`<path class="arrow reads" d=${`M${left.x - 8},${y(reads)}H22l8,-7m-8,7l8,7`} />`}
    ${predicts !== undefined && html`<path class="arrow predicts"
      d=${`M${SIZE.wide - 10},${y(predicts)}H${right.x + right.wide + 10}l8,-7m-8,7l8,7`} />`}
    <text x=${SIZE.wide / 2} y=${SIZE.tall - 10} text-anchor="middle" class="size">${
      `${count(V)} × ${count(info.n_embd)}`}</text>
  </svg>`;
}

function Facts({ info, matrix }) {
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
    <dl class="list">${lines.slice(1).map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl></div>`;
}

// ---- a random head -----------------------------------------------------------------------------

function RandomHead({ state }) {
  const { info, subject } = state;
  const [head, setHead] = useState("own");
  const found = useCall("/inspect/random_head", subject);
  const data = found.data;
  const random = head === "random";
  const says = "A new head begins as a random matrix of the same shape. The layers stay; what they say is lost.";
  const own = info.tied === false ? "its own head" : "W";
  return html`<${Panel} title="Put a random head in its place" says=${says} found=${found}
    ask=${["/inspect/random_head", subject]}>
    ${data && html`<${Choice} label="What predicts" value=${head} onChange=${setHead}
        options=${[["own", `predict with ${own}`], ["random", "with a random head"]]} />
      <div class="numbers" aria-live="polite">
        <div><span class="huge"><${Num} x=${random ? data.random_loss : data.loss} digits=${3} /></span>
          <span>nats of loss; a guess among ${count(info.vocab_size)} costs <${Num} x=${data.uniform_loss} digits=${3} /></span>
          <${Bar} t=${(random ? data.random_loss : data.loss) / Math.max(data.random_loss, data.uniform_loss, data.loss)}
            kind=${random ? "other" : "predicts"} /></div>
        <div><span class="huge"><${Num} x=${random ? data.random_parameters : data.parameters} show=${count} /></span>
          <span>parameters${random && `, ${count(data.random_parameters - data.parameters)} more`}</span>
          <${Bar} t=${(random ? data.random_parameters : data.parameters) / data.random_parameters}
            kind=${random ? "other" : "predicts"} /></div>
        <div class="next"><span>After the text comes</span><ol>${(random ? data.random_top_ids : data.top_ids).map((id, i) => html`<li key=${id}>
          <${Piece} text=${data.words[id]} /> ${prob(Math.exp((random ? data.random_top_logprob : data.top_logprob)[i]))}</li>`)}</ol></div>
      </div>
      <p class="note">The model itself stays as it is.</p>`}
  <//>`;
}

// ---- the gradient, split -----------------------------------------------------------------------

function Gradients({ state }) {
  const { subject, info } = state;
  const found = useCall("/inspect/gradient_split", subject);
  const pieces = useCall("/inspect/pieces", undefined).data?.pieces;
  const data = found.data;
  const says = info.tied === false
    ? "Each matrix has a gradient of its own: one from reading, one from predicting."
    : "Training moves W twice: because it read these tokens, and because it predicted. An optimizer adds the two.";
  return html`<${Panel} title="Which job moves it" says=${says} found=${found} ask=${["/inspect/gradient_split", subject]}>
    ${data && html`<${Split} data=${data} />
      <div class="columns">${["reads", "predicts"].map((side) => html`<${Moved} key=${side} side=${side}
        lengths=${side === "reads" ? data.rows_read : data.rows_predict} pieces=${pieces} />`)}</div>`}
  <//>`;
}

function Split({ data }) {
  const most = Math.max(data.norm_read, data.norm_predict) || 1;
  const angle = data.cosine === null ? null : (Math.acos(Math.min(1, Math.max(-1, data.cosine))) * 180) / Math.PI;
  const one = (kind, name, norm) => html`<div class="measure"><span>${name}</span>
    <${Bar} t=${norm / most} kind=${kind} /><b><${Num} x=${norm} /></b></div>`;
  return html`<div class="split">
    <div>${one("reads", "from reading", data.norm_read)}${one("predicts", "from predicting", data.norm_predict)}
      <p>Predicting pulls <b>${short(data.norm_predict / (data.norm_read || NaN))} times</b> as hard.
        ${angle !== null && html` The two point ${Math.round(angle)}° apart: cosine <b><${Num} x=${data.cosine} digits=${3} /></b>.`}</p></div>
    <${Angle} angle=${angle} read=${data.norm_read / most} predict=${data.norm_predict / most} />
  </div>`;
}

function Angle({ angle, read, predict }) {
  if (angle === null) return null;
  const turned = (-angle * Math.PI) / 180;
  const arrow = (length, turn) => {
    const [x, y] = [Math.cos(turn) * 100 * length, Math.sin(turn) * 100 * length];
    const back = (side) => `${x - 9 * Math.cos(turn + side)},${y - 9 * Math.sin(turn + side)}`;
    return `M0,0L${x},${y}M${back(0.5)}L${x},${y}L${back(-0.5)}`;
  };
  return html`<svg class="angle" viewBox="-110 -112 225 130" role="img"
    aria-label=${`The two gradients as arrows, ${Math.round(angle)} degrees apart`}>
    <path class="arrow predicts" d=${arrow(Math.max(0.12, predict), 0)} />
    <path class="arrow reads" d=${arrow(Math.max(0.12, read), turned)} /></svg>`;
}

const SHOWN = 10;

function Moved({ side, lengths, pieces }) {
  const order = lengths.map((_, id) => id).sort((a, b) => lengths[b] - lengths[a]).slice(0, SHOWN)
    .filter((id) => lengths[id] > 0);
  const moved = lengths.reduce((n, length) => n + (length > 0), 0);
  const rows = order.map((id) => ({ id, token: pieces?.[id] ?? `id:${id}`, length: lengths[id] }));
  const title = side === "reads" ? "Most moved by reading" : "Most moved by predicting";
  return html`<div><h3 class=${side}>${title}</h3>
    <p class="says">${count(moved)} of ${count(lengths.length)} rows move.</p>
    <${Table} caption=${title} rows=${rows} columns=${[
      { key: "token", label: "token", text: true, show: (row) => html`<${Piece} text=${row.token} />` },
      { key: "length", label: "gradient", says: "length of the row's gradient", show: (row) => html`
        <${Bar} t=${row.length / rows[0].length} kind=${side} /> <${Num} x=${row.length} />` },
    ]} /></div>`;
}
