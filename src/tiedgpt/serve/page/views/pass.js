// One pass, played: a token's row leaves W, the layers turn it into h, and h meets all rows of W.
// The winner is appended, and its row is read next. All numbers are those of /inspect/dot and /inspect/lens.

import { Choice, count, html, many, Num, Odds, Panel, Piece, prob, scaleOf, Slider, Tokens, useCall, useEffect, useRef, useState } from "../parts.js";
import { fullAt, NamedStrip } from "../chart.js";
import { costLook } from "./text.js";

const SECONDS = 2.6; // that a step is shown at speed 1; a block takes half of it
const GATHER = "Heads gather from earlier tokens, and an MLP adds its part.";

export default function Pass({ state, update }) {
  const { info, positions, pin, dark } = state;
  const [added, setAdded] = useState([]); // the winners of earlier passes
  const [at, setAt] = useState([0, 0]); // the pass and its step
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(1);
  const ids = [...positions.ids.slice(0, pin + 1), ...added.map(({ id }) => id)];
  const hasLens = ids.length <= (info.most_tokens?.lens ?? 256);
  const dot = useCall("/inspect/dot", { ids, position: ids.length - 1, top: 5 }, true);
  const lens = useCall("/inspect/lens", hasLens ? { ids, top: 1, position: ids.length - 1 } : null, true);
  const isReady = dot.data && !dot.stale && (!hasLens || (lens.data && !lens.stale));
  const shown = useRef(null); // the newest pass of which all is known
  if (isReady) shown.current = { pass: added.length, steps: stepsOf(dot.data, hasLens && lens.data, ids, info), winner: { id: dot.data.ids[0], piece: dot.data.pieces[0] } };
  const { pass, steps, winner } = shown.current ?? {};
  const last = steps ? steps.length - 1 : 0;
  const k = at[0] === pass ? Math.min(at[1], last) : last;
  const step = steps?.[k];
  const isFull = ids.length >= (info.n_positions ?? 1024);
  const advance = () => {
    if (k < last) return setAt([pass, k + 1]);
    if (isFull) return setPlaying(false);
    setAdded([...added, winner]);
    return setAt([pass + 1, 0]);
  };
  useEffect(() => {
    if (!playing || !isReady) return undefined;
    const timer = setTimeout(advance, (1000 * SECONDS * step.time) / speed);
    return () => clearTimeout(timer);
  }, [playing, isReady, k, pass, speed]);
  const cost = costLook(positions, scaleOf(info), dark);
  const choose = (chosen) => chosen <= pin && update({ pin: chosen });
  return html`<${Panel} title=${html`One pass, played: from <q><${Piece} text=${positions.pieces[pin]} /></q> to the next token`} quiet=${playing}
      found=${dot.error ? dot : lens.error ? lens : { ...dot, stale: false }} says=${`The layers turn a row into h, and h meets all rows of ${info.tied === false ? "the head" : "W again"}.`}>
    ${step && html`<div class="row">
        <button type="button" class="main" onClick=${() => setPlaying(!playing)}>${playing ? "Pause" : "Play"}</button>
        <button type="button" disabled=${k === 0} onClick=${() => setAt([pass, k - 1])}>Back</button>
        <button type="button" disabled=${!isReady || (k === last && isFull)} onClick=${advance}>Step</button>
        <${Choice} label="Speed" value=${speed} onChange=${setSpeed} options=${[0.5, 1, 2, 4].map((x) => [x, `${x}×`])} />
        <${Slider} label=${`Step ${k + 1} of ${last + 1}:`} value=${k} min=${0} max=${last} step=${1} show=${(to) => steps[to].name} onChange=${(to) => setAt([pass, to])} />
        ${added.length > 0 && html`<button type="button" onClick=${() => { setAdded([]); setAt([0, 0]); }}>From the beginning</button>`}</div>
      <${Tokens} pieces=${[...positions.pieces.slice(0, pin + 1), ...added.slice(0, pass).map(({ piece }) => piece), ...(step.appends ? [winner.piece] : [])]}
        pin=${pin + pass} onPin=${choose} look=${(i) => (i > pin ? { mark: "next", says: "appended" } : cost(i))} label="Tokens: choose where the pass begins" />
      <div class="pass"><${Way} step=${step} info=${info} />
        <div><h3>${step.name}</h3><p aria-live=${playing ? "off" : "polite"}>${step.says}</p>
          ${step.strip && html`<${NamedStrip} name=${step.strip[0]} values=${step.strip[1]} dark=${dark} most=${fullAt(step.strip[1])} />`}
          ${step.logits && html`<ol class="falling">${step.logits.map(([piece, logit], j) => html`<li key=${j} style=${{ "--k": j }}><${Piece} text=${piece} /> <${Num} x=${logit} /></li>`)}</ol>`}
          ${step.odds && html`<${Odds} rows=${step.odds} />`}
          <button type="button" onClick=${() => update({ view: step.view, writing: "text" })}>More of this</button></div></div>`}
  <//>`;
}

// The steps of a pass: name, sentence, the view that shows more, how long, where h is, and what it is.
function stepsOf(dot, lens, ids, info) {
  const { n_layer: layers } = info.config;
  const [id, word] = [ids[ids.length - 1], (piece) => html`<b><${Piece} text=${piece} /></b>`];
  const [reads, predicts] = info.tied === false ? ["wte", "the head"] : ["W", "W"];
  const blocks = Array.from({ length: layers }, (_, layer) => {
    const there = lens && { id: lens.top_ids[layer + 1].at(-1)[0], p: Math.exp(lens.top_logprob[layer + 1].at(-1)[0]) };
    return { name: `Layer ${layer + 1} of ${layers}`, view: "layers", time: 0.5, block: layer,
      says: there ? html`${GATHER} Read out here, ${predicts} would say ${word(lens.words[there.id])}, at <${Num} x=${there.p} show=${prob} />.`
        : GATHER };
  });
  const odds = dot.ids.map((one, j) => ({ id: one, place: j + 1, piece: dot.pieces[j], p: dot.prob[j] }));
  return [
    { name: "Read", view: "matrix", time: 1, row: id, says: html`${word(dot.piece)} is row ${count(id)} of ${reads}: ${many(dot.row_read.length, "number")}.`, strip: ["the row", dot.row_read] },
    { name: "Add the position", view: "model", time: 1, block: -1, says: html`The row of place ${count(dot.position)} is added: h₀ = row + position.`, strip: ["the position", dot.row_place] },
    ...blocks,
    { name: "h", view: "layers", time: 1, block: layers, says: "The final norm makes h of the last state.", strip: ["h", dot.h] },
    { name: "Dot products", view: "dot", time: 1.3, block: layers, rows: dot.ids, logits: dot.ids.map((_, j) => [dot.pieces[j], dot.logit[j]]),
      says: html`h times each of the ${count(dot.all_norm.length)} rows of ${predicts} gives the logits. The highest:` },
    { name: "Softmax", view: "write", time: 1, block: layers, rows: dot.ids, odds, says: "Softmax makes them probabilities." },
    { name: "The winner", view: "text", time: 1.3, row: dot.ids[0], appends: true, odds: odds.slice(0, 1),
      says: html`${word(dot.pieces[0])} is appended. ${info.tied === false ? "Its row of wte" : "The row of W that won"} is the one that is read next.` },
  ];
}

// W on the left, the layers on the right, and h on its way; an untied head at the far right.
function Way({ step, info }) {
  const { vocab_size: size, tied, config: { n_layer: layers } } = info;
  const y = (id) => 30 + (200 * (id + 0.5)) / size;
  const tall = 150 / layers;
  const level = (block) => (block < 0 ? 222 : block >= layers ? 34 : 205 - tall * (block + 0.5));
  const matrices = tied === false ? [["wte", 20, 90], ["head", 335, 55]] : [["W", 20, 90]];
  const [, left, wide] = matrices.at(-1); // the one that predicts
  const at = step.row === undefined ? [260, level(step.block)] : [65, y(step.row)];
  const hit = (id, kind, x = 20, w = 90) => html`<rect key=${kind + id} class=${`hit ${kind}`} x=${x - 4} y=${y(id) - 2.5} width=${w + 8} height="5" rx="2.5" />`;
  return html`<svg class="drawing" viewBox="0 0 400 250" role="img" aria-label=${`${step.name}: matrix on the left, ${many(layers, "layer")} on the right`}>
    ${matrices.map(([name, x, w]) => html`<g key=${name}><rect class="matrix" x=${x} y="30" width=${w} height="200" rx="5" />
      <text x=${x + w / 2} y="20" text-anchor="middle" class="name">${name}</text></g>`)}
    ${Array.from({ length: layers }, (_, layer) => html`<rect key=${layer} class=${`matrix ${step.block === layer ? "now" : ""}`}
      x="210" y=${205 - tall * (layer + 1)} width="100" height=${Math.max(1, tall - 2)} rx="4" />`)}
    <text x="260" y="246" text-anchor="middle" class="size">${many(layers, "layer")}</text>
    ${step.rows?.map((id, k) => html`<g key=${id} class="predicts"><path class="arrow" d=${`M260,34L${left < 210 ? left + wide + 8 : left - 8},${y(id)}`}
      style=${{ strokeWidth: k ? 1.2 : 3 }} />${hit(id, "predicts", left, wide)}</g>`)}
    ${step.row !== undefined && hit(step.row, step.appends ? "predicts" : "reads")}
    <g class="ball" style=${{ transform: `translate(${at[0]}px, ${at[1]}px)` }}><circle r="9" />
      ${step.row === undefined && html`<text x="58" y="6" class="name">${step.block < 0 ? "h₀" : "h"}</text>`}</g></svg>`;
}
