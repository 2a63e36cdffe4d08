// Learn: steps of SGD on the text, and which rows of W they move, for which of its two jobs.

import {
  Choice, count, Facts, first, fixed, html, many, Num, Odds, Panel, Piece, prob, short, Slider, Table, useCall, useEffect, useRef, useState, useUnseen,
} from "../parts.js";
import { Lines } from "../chart.js";

const SIZES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5];
const MOST_STEPS = 100;
const DRAWN = 8; // rows on either side of the drawing
const LISTED = 10; // rows, beside those that are drawn

export default function Learn({ state, update }) {
  const { info, positions, pin, steps, predict, train, untied } = state;
  const [size, setSize] = useState(SIZES.indexOf(0.1));
  const [chosen, choose] = useState(null);
  const isTied = info.tied !== false;
  const most = info.most_tokens?.learn ?? 256;
  const text = first(state, most);
  const unseen = useUnseen(state);
  const at = positions ? Math.max(0, Math.min(pin, Math.min(positions.ids.length, most) - 2)) : 0;
  const key = text && JSON.stringify(text);
  const before = useRef(key);
  useEffect(() => { // another text is learned from the beginning
    if (key && before.current && before.current !== key) update({ steps: 0 });
    before.current = key ?? before.current;
  }, [key]);
  const other = state.other || unseen; // undefined: not known yet
  const n = Math.min(MOST_STEPS, steps);
  const isNone = positions?.ids.length === 1;
  const body = text && !isNone && other !== undefined && { ...text, steps: n, lr: SIZES[size], predict, train, ...(isTied && untied ? { untied } : {}), position: at, top: 40, ...(other ? { other } : {}) };
  const found = useCall("/inspect/learn", body || null);
  const { data } = found;
  const go = (more) => update({ steps: Math.min(MOST_STEPS, n + more) });
  const shown = data && (data.rows.includes(chosen) ? chosen : data.ids[data.position + 1] ?? data.ids.at(-1));
  const choice = (label, name, value, options) => html`<div class="named"><span aria-hidden="true">${label}</span>
    <${Choice} label=${label} value=${value} options=${options} onChange=${(to) => update({ [name]: to })} /></div>`;
  return html`<${Panel} title="One step of learning, seen in W" found=${isNone ? undefined : found} ask=${body && ["/inspect/learn", body]}
      says=${`A step of SGD on the text, in a copy of the model. ${isTied && !untied ? "W is moved twice: because it reads, and because it predicts." : "Each of the two matrices is moved by its own job."}`}>
    ${isNone && html`<p class="note">The text has one token: it has nothing to predict. Write another word.</p>`}
    <div class="row"><button type="button" class="main" disabled=${isNone || data?.diverged || n >= MOST_STEPS} onClick=${() => go(1)}>Learn one step</button>
      <button type="button" disabled=${isNone || data?.diverged || n >= MOST_STEPS} onClick=${() => go(10)}>Ten steps</button>
      <button type="button" disabled=${n === 0} onClick=${() => update({ steps: 0 })}>Start again</button>
      <${Slider} label="step size (learning rate)" value=${size} min=${0} max=${SIZES.length - 1} step=${1} show=${(k) => String(SIZES[k])} onChange=${setSize} /></div>
    <div class="row">${choice("Learn from", "predict", predict, [["all", "every position"], ["last", "the last alone"]])}
      ${choice("Train", "train", train, [["all", "all"], ["head", "the head alone"], ["blocks", "the layers alone"]])}
      ${isTied && choice("Matrices", "untied", untied, [[false, "one matrix"], [true, "two"]])}</div>
    ${positions?.ids.length > most && html`<p class="note">The first ${count(most)} tokens are learned.</p>`}
    ${data && html`<p class="verdict" aria-live="polite"><${Says} data=${data} id=${shown} info=${info} /></p>
      <div class="columns moved"><${Drawing} data=${data} info=${info} />${stepsOf(data) > 0 && html`<${Row} data=${data} id=${shown} />`}</div>
      ${stepsOf(data) > 0 && html`<${Rows} data=${data} id=${shown} choose=${choose} />`}`}
  <//>
  ${data && html`<div class="columns"><${Prediction} data=${data} found=${found} /><${Losses} data=${data} found=${found} /></div>`}`;
}

function degrees(cosine) {
  const angle = (Math.acos(Math.min(1, Math.max(-1, cosine))) * 180) / Math.PI;
  return fixed(angle, angle < 10 ? 1 : 0);
}

const isOne = (data) => data.reads === data.predicts;
const stepsOf = (data) => data.loss.length - 1;

// What just happened, in a sentence.
function Says({ data, id, info }) {
  const [n, k] = [stepsOf(data), data.rows.indexOf(id)];
  const word = html`<b><${Piece} text=${data.words[id]} /></b>`;
  const answers = data.ids.length - 1;
  const taught = data.predict === "last" ? "the last prediction alone taught it" : `${many(answers, "prediction")} with a known answer taught it at once (generation uses the last alone)`;
  if (data.diverged) return html`Step ${n + 1} diverged: the loss is not finite. Try a step size of ${data.try_lr}.`;
  if (!n) return html`Nothing is learned yet. Of this text, ${data.predict === "last" ? "the last prediction with a known answer" : `${many(answers, "prediction")} with a known answer`} will teach it; generation uses
    the last prediction alone.`;
  const [reading, predicting] = [data.reading[n][k], data.predicting[n][k]];
  if (data.train === "blocks") return html`You trained the layers alone, and ${taught}. No row of W moved, for reading or for predicting.`;
  if (isOne(data) && data.train === "head") return html`You trained the head alone, and ${taught}. W is one matrix, so ${word} is also read differently now: its row moved by <${Num} x=${data.together[n][k]} />.`;
  if (isOne(data)) {
    const [read, all] = [data.all_reading, data.all_predicting].map((lengths) => lengths.reduce((total, x) => total + (x > 0), 0));
    return html`One matrix, two jobs: ${count(read)} rows moved because they were read, ${count(all)} of ${count(info.vocab_size)} because they predicted, and ${taught}.
      ${" "}The row of ${word} that predicts is the row that is read.`;
  }
  return html`Two matrices: ${reading ? html`the row of ${word} that is read moved by <${Num} x=${reading} />` : html`the row of ${word} that is read did not move`}, the one that predicts by
    ${" "}<${Num} x=${predicting} />, and the two rows now differ by <b>${degrees(data.twin_cosine[n][k])} degrees</b>. What one job learns, the other does not${info.tied === false ? "" : html`, and the second matrix has ${count(info.vocab_size * info.n_embd)} numbers more`}.`;
}

// W with the rows that moved: read ones at the left, predicting ones at the right, up or down.
function Drawing({ data, info }) {
  const [n, V] = [stepsOf(data), info.vocab_size];
  const boxes = isOne(data) ? [[150, 100, "W"]] : [[140, 52, "wte"], [208, 52, "head"]];
  const y = (id) => 30 + (220 * (id + 0.5)) / V;
  const most = Math.max(...data.reading[n], ...data.predicting[n]) || 1;
  const side = (lengths, chosen) => chosen.map((k) => ({ id: data.rows[k], k, t: lengths[n][k] / most })).sort((a, b) => a.id - b.id)
    .map((row, i, all) => ({ ...row, slot: 30 + (220 * (i + 0.5)) / all.length }));
  const [read, predicting] = [side(data.reading, farthest(data.reading[n])), side(data.predicting, upAndDown(data))];
  const [left, right] = [boxes[0][0], boxes.at(-1)[0] + boxes.at(-1)[1]];
  const name = (id) => html`<${Token} text=${data.words[id]} />`;
  const shades = (lengths) => Array.from({ length: 55 }, (_, i) => Math.max(0, ...lengths.slice(Math.floor((i * V) / 55), Math.floor(((i + 1) * V) / 55))) / most);
  const shade = (kind, lengths, x, wide) => shades(lengths).map((t, i) => t > 0 && html`<rect key=${kind + i} class=${`hit ${kind}`} x=${x} y=${30 + 4 * i} width=${wide} height="4" opacity=${0.12 + 0.7 * Math.sqrt(t)} />`);
  const half = (box, at) => [box[0] + at * (box[1] / 2), box[1] / 2];
  const [firstHalf, secondHalf] = isOne(data) ? [half(boxes[0], 0), half(boxes[0], 1)] : boxes.map(([x, wide]) => [x, wide]);
  const label = n ? `Moved by reading: ${read.length ? read.map(({ id }) => data.words[id]).join(", ") : "no row"}. Moved by predicting: ${predicting.map(({ id, k }) => `${data.words[id]} ${data.pull[n][k] > 0 ? "up" : "down"}`).join(", ") || "no row"}`
    : "The rows of W, not moved yet";
  return html`<svg class="drawing" viewBox="0 0 400 268" role="img" aria-label=${label}>
    ${shade("reads", data.all_reading, ...firstHalf)}${shade("predicts", data.all_predicting, ...secondHalf)}
    ${boxes.map(([x, wide, box]) => html`<g key=${box}><rect class="matrix bare" x=${x} y="30" width=${wide} height="220" rx="4" />
      <text x=${x + wide / 2} y="20" text-anchor="middle" class="name">${box}</text></g>`)}
    <text x=${left - 12} y="20" text-anchor="end" class="tag reads">reads</text><text x=${right + 12} y="20" class="tag predicts">predicts</text>
    ${!n && [...new Set(data.ids)].map((id) => html`<rect key=${id} class="hit reads" x=${left} y=${y(id) - 1.5} width=${firstHalf[1]} height="3" />`)}
    ${read.map(({ id, t, slot }) => html`<g key=${id} class="reads"><path class="lead" d=${`M${left},${y(id)}L${left - 16},${slot}`} />
      <rect class="hit far" x="-44" y="-6" width="44" height="12" rx="2" style=${{ transform: `translate(${left - 18}px, ${slot}px) scaleX(${Math.max(0.05, t)})` }} />
      <text class="word" x=${left - 66} y=${slot + 5} text-anchor="end">${name(id)}</text></g>`)}
    ${predicting.map(({ id, k, t, slot }) => html`<g key=${id} class="predicts"><path class="lead" d=${`M${right},${y(id)}L${right + 16},${slot}`} />
      <path class="hit far" d="M0,0l9,-22l9,22z" style=${{ transform: `translate(${right + 20}px, ${slot}px) scaleY(${(data.pull[n][k] > 0 ? 1 : -1) * Math.max(0.1, t)})` }} />
      <text class="word" x=${right + 44} y=${slot + 5}>${name(id)}</text></g>`)}</svg>`;
}

// The places of the greatest numbers above 0.
const farthest = (lengths, most = DRAWN, is = () => true) => lengths.map((_, k) => k).filter((k) => lengths[k] > 0 && is(k))
  .sort((a, b) => lengths[b] - lengths[a]).slice(0, most);

// Those of the rows that predicting moved most: of right tokens, and of tokens that were too likely.
function upAndDown(data) {
  const n = stepsOf(data);
  const up = (isUp) => farthest(data.predicting[n], DRAWN / 2, (k) => data.pull[n][k] > 0 === isUp);
  return [...up(true), ...up(false)];
}

// A token in a drawing, which holds no HTML.
const Token = ({ text }) => (text.length > 9 ? `${text.slice(0, 8)}…` : text).replaceAll(" ", "␣").replaceAll("\n", "↵");

const agreement = (cosine) => (cosine > 0.3 ? ": the jobs pull together" : cosine < -0.3 ? ": the jobs pull against each other" : ": the jobs hardly disturb each other");

function Row({ data, id }) {
  const [n, k] = [stepsOf(data), data.rows.indexOf(id)];
  const change = (name, show) => html`<${Num} x=${data[name][0][k]} show=${show} /> → <b><${Num} x=${data[name][n][k]} show=${show} /></b>`;
  const lines = [
    ["probability", change("prob", prob)], ["logit", change("logit")],
    ["moved by reading", html`<b class="reads"><${Num} x=${data.reading[n][k]} /></b>`],
    ["moved by predicting", html`<b class="predicts"><${Num} x=${data.predicting[n][k]} /></b>${data.pull[n][k] ? data.pull[n][k] > 0 ? ", up: it was the right token" : ", down: it was too likely" : ""}`],
    data.together ? ["together", html`<b><${Num} x=${data.together[n][k]} /></b>${data.cosine[n][k] === null ? "" : html`; its two parts point ${degrees(data.cosine[n][k])}° apart${agreement(data.cosine[n][k])}`}`]
      : ["its two rows", html`<b><${Num} x=${data.twin_distance[n][k]} /></b> apart, at an angle of ${degrees(data.twin_cosine[n][k])}°`],
  ];
  return html`<div><h3>The row of <q><${Piece} text=${data.words[id]} /></q></h3>
    <p class="says">Its prediction after <q><${Piece} text=${data.pieces[data.position]} /></q>, before and after ${many(n, "step")}:</p>
    <dl class="list">${lines.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></div>`;
}

function Rows({ data, id, choose }) {
  const n = stepsOf(data);
  const listed = [...new Set([...data.rows.slice(0, LISTED).keys(), ...upAndDown(data), data.rows.indexOf(id)])];
  const rows = listed.map((k) => ({
    id: data.rows[k], token: data.words[data.rows[k]], reading: data.reading[n][k], predicting: data.predicting[n][k], both: (data.together ?? data.twin_distance)[n][k],
    cosine: data.cosine[n][k], pull: data.pull[n][k], before: data.prob[0][k], after: data.prob[n][k],
  }));
  return html`<${Table} caption="The rows that moved most" rows=${rows} columns=${[
    { key: "token", label: "row", text: true, show: (row) => html`<button type="button" aria-pressed=${row.id === id} onClick=${() => choose(row.id)}><${Piece} text=${row.token} /></button>` },
    { key: "reading", label: "by reading", says: "length of the row's change because it was read" },
    { key: "predicting", label: "by predicting", says: "length of the row's change because it predicted" },
    data.together ? { key: "both", label: "together", says: "length of the sum of both parts" } : { key: "both", label: "apart", says: "distance between the token's two rows" },
    { key: "cosine", label: "cosine", says: "of the two parts", show: (row) => html`<${Num} x=${row.cosine} digits=${2} />` },
    { key: "pull", label: "pull", says: "how often the token came next, less how often it was predicted", show: (row) => html`${row.pull > 0 ? "▲" : row.pull < 0 ? "▼" : ""} <${Num} x=${row.pull} digits=${2} />` },
    { key: "before", label: "before", says: "the token's probability before", show: (row) => html`<${Num} x=${row.before} show=${prob} />` },
    { key: "after", label: "after", says: "the token's probability after", show: (row) => html`<${Num} x=${row.after} show=${prob} />` },
  ]} />`;
}

function Prediction({ data, found }) {
  const n = stepsOf(data);
  const target = data.ids[data.position + 1];
  const rows = data.likely.map((id, k) => ({ id, piece: data.words[id], p: data.likely_prob[0][k], after: data.likely_prob[n][k], mark: id === target && "true next" }))
    .sort((a, b) => b.after - a.after).slice(0, 10).map((row, k) => ({ ...row, place: k + 1 }));
  return html`<${Panel} title=${html`After <q><${Piece} text=${data.pieces[data.position]} /></q>`} quiet found=${found}
    says=${`Upper bar: before. Lower bar: after ${many(n, "step")}.`}><${Odds} rows=${rows} /><//>`;
}

function Losses({ data, found }) {
  const [n, xs] = [stepsOf(data), data.loss.map((_, i) => i)];
  const isOther = data.other_loss && data.other !== data.pieces.join("");
  const lines = [["this text", data.loss], ...(data.predict === "last" ? [["its last prediction", data.learned_loss]] : []), ...(isOther ? [["the other text", data.other_loss]] : [])]
    .map(([name, ys], look) => ({ name, xs, ys, look }));
  return html`<${Panel} title="What it learned, what it forgot" quiet found=${found}
      says=${isOther ? html`The other text is not learned: <q>${data.other}</q>` : "The mean loss of the text, by step."}>
    ${n ? html`<${Lines} label="Loss by step" lines=${lines} xNames=${xs.map(String)} xLabel="step" yLabel="loss, nats," show=${(x) => fixed(x, 3)} />`
      : html`<${Facts} of=${lines.map(({ name, ys }) => [`loss of ${name}`, ys[0], (x) => fixed(x, 3)])} />`}<//>`;
}
