// Vocabulary: every row of W as a point; one of them named, with its neighbours.

import {
  announce, Choice, count, fixed, html, Num, Panel, Piece, plain, short, Term, useCall, useMemo, usePieces, useState,
} from "../parts.js";
import { apart, Scatter } from "../chart.js";

const UP = {
  norm: ["length", "length of the row, |e|"],
  centred_norm: ["centred length", "length of the row less the mean row, |c|"],
  prior_logit: ["prior logit", "logit that a token has in every context, b · e"],
  ln_count: ["direction", "ln count as one direction of W tells it"],
};

export default function Vocabulary({ state }) {
  const { positions, pin, info } = state;
  const found = useCall("/inspect/vocabulary", {});
  const { pieces, named } = usePieces();
  const [chosen, choose] = useState(null);
  const [which, setWhich] = useState(0);
  const [up, setUp] = useState("norm");
  const id = chosen ?? positions?.ids[pin] ?? (state.found.busy ? null : 0); // null: not known yet
  const matrix = found.data?.matrices[Math.min(which, found.data.matrices.length - 1)];
  const kinds = matrix ? Object.keys(UP).filter((name) => matrix[name]) : [];
  const kind = kinds.includes(up) ? up : "norm";
  const says = found.data?.count === null
    ? "Each point is a token. Nobody counted them, so they stand in the order of their ids."
    : "Each point is a token: how often it occurs, against its row.";
  return html`
    <${Panel} title=${`${count(info.vocab_size)} rows`} says=${says} found=${found} ask=${["/inspect/vocabulary", {}]}>
      ${matrix && html`
        <div class="row">
          ${found.data.matrices.length > 1 && html`<${Choice} label="Matrix" value=${which} onChange=${setWhich}
            options=${found.data.matrices.map((one, i) => [i, one.does])} />`}
          <${Choice} label="Height of a point" value=${kind} onChange=${setUp}
            options=${kinds.map((name) => [name, UP[name][0]])} /></div>
        <${Trend} matrix=${matrix} kind=${kind} data=${found.data} />
        <${Cloud} data=${found.data} heights=${matrix[kind]} label=${UP[kind][1]} named=${named} id=${id ?? 0}
          text=${positions?.ids ?? NONE} choose=${choose} dark=${state.dark} />
        <${Search} pieces=${pieces} named=${named} choose=${choose} id=${id} />`}
    <//>
    ${id !== null && html`<${Neighbours} id=${id} named=${named} choose=${choose} />`}
    ${found.data && html`<${Lists} data=${found.data} named=${named} choose=${choose} />`}`;
}

const NONE = [];

// What the height says of frequency, in a sentence; below it the number that it rests on.
function Trend({ matrix, kind, data }) {
  if (!data.count) return null;
  const { spearman, interval, r2_heldout: explained } = matrix;
  const rho = spearman[kind];
  if (rho === undefined && kind !== "ln_count") return html`<p class="says">Too few tokens occur to tell a trend.</p>`;
  if (rho === undefined)
    return html`<p class="verdict">W knows how frequent a token is: one direction tells <b>${fixed(100 * explained, 0)} %</b> of
      ${" "}ln count, on tokens that were held out.</p>`;
  const number = (of) => html`ρ = <${Num} x=${spearman[of]} digits=${2} />`;
  const [low, high] = interval[kind];
  const isClear = low * high > 0 && Math.abs(rho) > 0.1;
  const { centred_norm: centred } = spearman;
  const longer = rho < 0 ? "Rare" : "Frequent";
  const found = {
    norm: () => html`Rows of ${longer.toLowerCase()} tokens are longer. ${rho < 0 ? "A rare token is seldom the answer, and nearly every step pushes its row a little away as a wrong one."
        : "Each occurrence moves a row; a rare one stays near where it began."}
      ${" "}${centred === undefined ? "" : html`The mean row is in all rows and changes no probability. Without it, ρ of length and count is <${Num} x=${centred} digits=${2} />: ${
        centred * rho > 0 ? "the trend is one of the predictions." : "the trend is the mean row's, and no probability follows from it."}`}`,
    centred_norm: () => html`Less the mean row, ${longer.toLowerCase()} rows are longer here: this length changes probabilities, and
      the raw one need not.`,
    prior_logit: () => html`${longer} tokens begin ahead in every text: the final norm's bias adds a <${Term} name="prior" /> to each logit.`,
  }[kind];
  return html`<p class="verdict">${isClear ? found() : "Here the height tells next to nothing of how frequent a token is."}</p>
    <p class="says">Rank correlation of ${UP[kind][0]} and count: <b>${number(kind)}</b>, from <${Num} x=${low} digits=${2} /> to
      ${" "}<${Num} x=${high} digits=${2} /> (95 %), over the tokens that occur.</p>`;
}

const LANE = -0.7; // log10 of the count at which the tokens that were never seen stand

function Cloud({ data, heights, label, named, id, text, choose, dark }) {
  const [over, setOver] = useState(null);
  const { count: counts, reachable } = data;
  const x = useMemo(() => heights.map((_, one) => (!counts ? one : counts[one] ? Math.log10(counts[one])
    : LANE + 0.05 * ((one % 7) - 3))), [data]);
  const order = useMemo(() => x.map((_, one) => one).sort((a, b) => x[a] - x[b]), [x]);
  const far = useMemo(() => extremes(x, heights, order), [x, heights]);
  const odd = useMemo(() => unreached(data), [data]);
  const spoken = (one) => {
    const often = counts ? `, ${count(counts[one])} times` : "";
    return `${plain(named(one))}, id ${count(one)}${often}, ${short(heights[one])}`;
  };
  const seen = over ?? id;
  const labelled = apart([id, ...far], x, heights);
  const marks = [...new Set([id, ...text, ...labelled])].map((one) => [one, labelled.includes(one) ? plain(named(one)) : ""]);
  const most = order.length && x[order[order.length - 1]];
  const xTicks = counts && [...(counts.includes(0) ? [[LANE, "never"]] : []),
    ...Array.from({ length: Math.max(1, Math.floor(most) + 1) }, (_, k) => [k, count(10 ** k)])];
  return html`<div class="cloud" onPointerLeave=${() => setOver(null)}>
    <${Scatter} x=${x} y=${heights} order=${order} seen=${seen} onSee=${setOver} odd=${odd} marks=${marks} dark=${dark}
      onPick=${(one) => { setOver(null); choose(one); }} says=${spoken} label=${`Tokens, from rare to frequent: ${label}`}
      names=${[counts ? "count in the training text" : "token id", label]} xTicks=${xTicks || undefined} />
    <p class="readout"><b><${Piece} text=${named(seen)} /></b> id ${count(seen)}${counts && html`,
      ${" "}<${Num} x=${counts[seen]} /> times`}, <${Num} x=${heights[seen]} /></p>
    <p class="key-of"><span class="ours">● in the text, chosen, or extreme</span>
      ${reachable && html`<span class="unreached">+ tokens that the tokenizer never produces</span>`}</p>
  </div>`;
}

// The highest, the lowest and the most frequent tokens, and those farthest from others of their frequency.
function extremes(x, heights, order) {
  const up = [...order].sort((a, b) => heights[b] - heights[a]);
  const sums = [0];
  for (const id of order) sums.push(sums[sums.length - 1] + heights[id]);
  const off = order.map((id, k) => {
    const [from, to] = [Math.max(0, k - 20), Math.min(order.length, k + 21)];
    return [Math.abs(heights[id] - (sums[to] - sums[from]) / (to - from)), id];
  }).sort((a, b) => b[0] - a[0]).slice(0, 6).map(([, id]) => id);
  return [...new Set([up[0], up[up.length - 1], order[order.length - 1], ...off, up[1], up[up.length - 2]])].filter((id) => id !== undefined);
}

// Tokens whose text is encoded as other tokens; parts of characters are not counted.
const unreached = ({ reachable, fragment }) => reachable === null ? NONE :
  reachable.map((_, id) => id).filter((id) => !reachable[id] && !fragment[id]);

// ---- search, neighbours, lists ----

const MOST_HITS = 24;

function Search({ pieces, named, choose, id }) {
  const [sought, setSought] = useState("");
  const hits = useMemo(() => {
    if (!sought) return [];
    const wanted = sought.toLowerCase();
    const rank = (piece) => (piece === sought ? 0 : piece.trim() === sought.trim() ? 1 : piece.trim().toLowerCase().startsWith(wanted.trim()) ? 2 : 3);
    const found = [];
    pieces.forEach((piece, one) => {
      if (piece.toLowerCase().includes(wanted) || String(one) === sought) found.push([rank(piece), piece.length, one]);
    });
    return found.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]).slice(0, MOST_HITS).map(([, , one]) => one);
  }, [sought, pieces]);
  return html`<div class="search"><label>Find a token <input type="search" value=${sought}
      onInput=${(event) => setSought(event.target.value)} /></label>
    ${sought && html`<${Chips} ids=${hits} named=${named} choose=${choose} id=${id} />`}
    ${sought && !hits.length && html`<p class="says">No token holds this.</p>`}</div>`;
}

const Chips = ({ ids, named, choose, id }) => html`<div class="chips">${ids.map((one) => html`<button type="button"
  key=${one} aria-pressed=${one === id} onClick=${() => {
    choose(one);
    announce(`Chosen: ${plain(named(one))}`);
  }}><${Piece} text=${named(one)} /></button>`)}</div>`;

const NEAR = [
  ["dot", "dot product", "what the model computes; long rows win"],
  ["cos", "cosine", "the angle alone; all rows share a direction"],
  ["centred_cos", "centred cosine", "the angle after the mean row is taken away"],
];

function Neighbours({ id, named, choose }) {
  const body = { token: id, top: 10 };
  const found = useCall("/inspect/neighbours", body);
  const data = found.data;
  const list = (matrix, [key, title, says]) => html`<div key=${key}><h3>${title}</h3><p class="says">${says}</p>
    <ol class="near">${matrix[`${key}_ids`].map((one, i) => html`<li key=${one}><button type="button" onClick=${() => choose(one)}>
      <${Piece} text=${data.words[one]} /></button> <${Num} x=${matrix[key][i]} /></li>`)}</ol></div>`;
  return html`<${Panel} title=${html`Near <q><${Piece} text=${named(id)} /></q>`} found=${found} ask=${["/inspect/neighbours", body]}
      says="Which rows are near depends on the measure: three answers for one row.">
    ${data?.matrices.map((matrix) => html`<div key=${matrix.name}>
      ${data.matrices.length > 1 && html`<p class="verdict">${matrix.name}, which ${matrix.does}</p>`}
      <div class="columns three">${NEAR.map((measure) => list(matrix, measure))}</div></div>`)}
  <//>`;
}

const MOST_LISTED = 200;

function Lists({ data, named, choose }) {
  const { reachable, fragment, unseen } = data;
  const never = reachable && unreached(data);
  const parts = fragment?.reduce((n, is) => n + is, 0);
  const one = (title, says, ids) => ids && html`<details><summary>${title}: <b>${count(ids.length)}</b></summary>
    <p class="says">${says}</p><${Chips} ids=${ids.slice(0, MOST_LISTED)} named=${named} choose=${choose} />
    ${ids.length > MOST_LISTED && html`<p class="says">These are the first ${MOST_LISTED}.</p>`}</details>`;
  if (!never && !unseen) return null;
  return html`<${Panel} title="Rows that learn little" says="A token that no text reaches is never read, and only ever predicted away.">
    ${one("No text is encoded as", `Their text is encoded as other tokens. Not counted: ${count(parts)} tokens that are parts of characters.`, never)}
    ${one("Never seen in training", `They do not occur in ${data.counted_in}.`, unseen)}
  <//>`;
}
