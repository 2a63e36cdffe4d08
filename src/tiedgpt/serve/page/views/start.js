// Start: the matrix with its two jobs on the text, the way of one token through the model, the cost.

import {
  count, first, html, likeliest, many, Num, Odds, Panel, Piece, prob, scaleOf, Term, Tokens, useCall,
} from "../parts.js";
import { fullAt, NamedStrip } from "../chart.js";
import { Jobs } from "./matrix.js";
import { costLook, Legend } from "./text.js";

export default function Start({ state, update }) {
  const { info, positions, found, pin } = state;
  const sentence = info.tied === false ? "One matrix reads the text, and another predicts what comes next"
    : "One matrix W reads the text, and the same W predicts what comes next";
  return html`
    <${Panel} title=${sentence} found=${found} says=${info.run?.data
        && `The model learned from ${info.run.data}.${state.text === info.opening ? " It never saw this text." : ""}`}>
      <${Jobs} state=${state}>${positions && html`<${Odds} rows=${likeliest(positions, pin).slice(0, 5)} />`}<//><//>
    ${positions && html`<${Cost} state=${state} update=${update} /><${Path} state=${state} update=${update} />`}`;
}

function Cost({ state, update }) {
  const { positions, pin, info, dark, found } = state;
  const scale = scaleOf(info);
  return html`<${Panel} title="The loss of the text" found=${found} quiet says=${html`Colour and height are each token's
      ${" "}<${Term} name="surprisal" />. Pin another token, and this page shows what was predicted after it.`}>
    <div class="hero"><${Tokens} pieces=${positions.pieces} pin=${pin} onPin=${(at) => update({ pin: at })}
      look=${costLook(positions, scale, dark)} label="Tokens: pin one" /></div>
    <${Legend} scale=${scale} dark=${dark} /><//>`;
}

// ---- the way of the pinned token ----

function Path({ state, update }) {
  const { info, positions, subject, pin, layer } = state;
  const most = (name) => info.most_tokens?.[name] ?? 256;
  const dot = useCall("/inspect/dot", { ...subject, position: pin, top: 10 });
  const lens = useCall("/inspect/lens", pin < most("lens") ? { ...first(state, most("lens")), top: 5, position: pin } : null);
  const heads = useCall("/inspect/attention", pin < most("attention") ? { ...first(state, most("attention")), layer } : null);
  const stages = [["the token", "text", html`<${Piece} text=${positions.pieces[pin]} /> is number ${pin} in the text and ${
    count(positions.ids[pin])} in the vocabulary.`]];
  if (dot.data) stages.push(...numbers(dot.data, info, state.dark, looks(heads.data, pin), words(lens.data, pin)));
  return html`<${Panel} title=${html`The way from <q><${Piece} text=${positions.pieces[pin]} /></q> to the next token`}
      found=${[dot, lens, heads].find(({ busy }) => busy) ?? dot}
      says="From top to bottom, with this model's numbers. Each stage opens the view that shows more of it.">
    <ol class="path">${stages.map(([name, view, content, kind]) => html`<li key=${name} class=${kind}>
      <button type="button" onClick=${() => update({ view })}>${name}</button><div>${content}</div></li>`)}</ol><//>`;
}

function numbers(data, info, dark, looks, words) {
  const strip = (name, values) => html`<${NamedStrip} name=${name} values=${values} dark=${dark} most=${fullAt(values)} />`;
  const { n_layer: layers = 1 } = info.config ?? {};
  const each = (values, show) => html`<p class="each">${data.ids.slice(0, 5).map((id, k) => html`<span key=${id}><${Piece} text=${data.pieces[k]} />
    ${" "}<${Num} x=${values[k]} show=${show} /></span>`)}</p>`;
  return [
    [info.tied === false ? "row of wte" : "row of W", "matrix", strip(many(data.h.length, "number"), data.row_read), "reads"],
    ["+ position", "model", strip(`place ${data.position}`, data.row_place)],
    [`attention × ${layers}`, "heads", looks],
    [`MLP × ${layers}`, "layers", words],
    ["h", "dot", strip("after all layers", data.h)],
    [info.tied === false ? "rows of the head" : "all rows of W", "dot", html`h times each of ${count(data.all_norm.length)} rows:
      ${" "}the <${Term} name="logit">logits</${Term}>${each(data.logit)}`, "predicts"],
    ["softmax", "write", html`<${Term} name="softmax" /> makes them probabilities${each(data.prob, prob)}`, "predicts"],
  ];
}

// Where the heads of a layer look most from the pinned token.
function looks(data, pin) {
  if (!data || pin >= data.pieces.length) return html`The heads take from earlier tokens.`;
  const best = data.patterns.map((pattern, h) => ({ h, at: pattern[pin].indexOf(Math.max(...pattern[pin])) }))
    .map((one) => ({ ...one, weight: data.patterns[one.h][pin][one.at] })).sort((a, b) => b.weight - a.weight).slice(0, 4);
  return html`<${Term} name="attention">Heads</${Term}> gather from earlier tokens; layer ${data.layer} most from
    <p class="each">${best.map(({ h, at, weight }) => html`<span key=${h}><${Piece} text=${data.pieces[at]} />
      ${" "}<${Num} x=${weight} show=${prob} /> <small>head ${h}</small></span>`)}</p>`;
}

// The word that each layer's state would predict.
function words(data, pin) {
  if (!data || pin >= data.pieces.length) return html`Each position is changed by itself.`;
  return html`The <${Term} name="MLP" /> changes each position by itself. After each layer, W would predict
    <p class="each">${data.layers.map((name, s) => html`<span key=${name}><${Piece} text=${data.words[data.top_ids[s][pin][0]]} />
      ${" "}<small>${name}</small></span>`)}</p>`;
}
