// Model: where the parameters are, each storage once, and the run that made them.

import { bytes, count, Facts, html, Num, Panel, prob, Table } from "../parts.js";
import { Lines } from "../chart.js";

export default function Model({ state: { info } }) {
  if (!info.parameters) return null;
  return html`
    <${Panel} title=${`${count(info.parameters)} parameters`} says="Each storage is counted once, whatever names share it.">
      <${Shape} info=${info} /><${Ledger} info=${info} /><//>
    ${info.run && html`<${Run} run=${info.run} />`}`;
}

// ---- the ledger ----

const PARTS = [
  ["reads-and-predicts", "W: reads and predicts", (row, info) => info.tied && has(row, info.matrices[0].name)],
  ["reads", "wte: reads", (row, info) => has(row, info.matrices[0].name)],
  ["predicts", "head: predicts", (row, info) => info.matrices[1] && (has(row, info.matrices[1].name) || /^head\./.test(row.names[0]))],
  ["place", "positions", (row) => /^wpe\./.test(row.names[0])],
  ["attention", "attention", (row) => /\.attn\./.test(row.names[0])],
  ["mlp", "MLPs", (row) => /\.mlp\./.test(row.names[0])],
  ["norms", "norms", () => true],
];
const has = (row, name) => row.names.includes(name);

function Ledger({ info }) {
  const { rows, explain } = info.ledger;
  const parts = PARTS.map(([kind, name]) => ({ kind, name, parameters: 0, bytes: 0, multiply_adds: 0, storages: 0 }));
  for (const row of rows) {
    const part = parts[PARTS.findIndex(([, , holds]) => holds(row, info))];
    for (const key of ["parameters", "bytes", "multiply_adds"]) part[key] += row[key];
    part.storages += 1;
  }
  const shown = parts.filter((part) => part.storages);
  const share = (part) => part.parameters / info.parameters;
  let from = 0;
  const blocks = shown.map((part) => {
    const block = html`<rect key=${part.kind} class=${part.kind} x=${1000 * from} width=${Math.max(1, 1000 * share(part) - 3)} height="64" />`;
    from += share(part);
    return block;
  });
  const label = shown.map((part) => `${part.name} ${prob(share(part))}`).join(", ");
  return html`
    <svg class="whole" viewBox="0 0 1000 64" preserveAspectRatio="none" role="img" aria-label=${label}>${blocks}</svg>
    <${Table} caption="Parameters by part" rows=${shown} columns=${[
      { key: "name", label: "part", text: true, show: (part) => html`<span class=${`block ${part.kind}`} aria-hidden="true"></span>${part.name}` },
      { key: "parameters", label: "parameters" },
      { key: "share", label: "share", show: (part) => html`<${Num} x=${share(part)} show=${prob} />` },
      { key: "bytes", label: "size", show: (part) => bytes(part.bytes) },
      { key: "multiply_adds", label: "multiply-adds per token" },
      { key: "storages", label: "storages" },
    ]} />
    <p class="verdict">${explain}</p>
    <details><summary>All ${count(rows.length)} storages</summary>
      <${Table} caption="All storages" rows=${rows.map((row) => ({ ...row, name: row.names.join(" = ") }))} columns=${[
        { key: "name", label: "names", text: true, show: (row) => row.name },
        { key: "shape", label: "shape", text: true, show: (row) => row.shape.map(count).join(" × ") },
        { key: "dtype", label: "dtype", text: true, show: (row) => row.dtype },
        { key: "parameters", label: "parameters" },
        { key: "bytes", label: "size", show: (row) => bytes(row.bytes) },
      ]} /></details>`;
}

const SHAPE = [
  ["n_layer", "layers"], ["n_head", "heads"], ["n_embd", "width"], ["vocab_size", "tokens"], ["n_positions", "context"],
];

function Shape({ info }) {
  const { stored } = info;
  return html`<${Facts} of=${SHAPE.map(([key, name]) => [name, info.config[key]])} />
    <p class="says">tiedgpt ${info.version}.${stored && html` The file is ${stored.format}; <code>tiedgpt tie audit</code> calls it
      ${" "}<b>${stored.verdict}</b>.`}${info.precision && ` This page computes with its weights in ${info.precision}.`}</p>`;
}

// ---- the run ----

const FIGURES = [
  ["Loss", "loss, nats", [["loss", "training, smoothed"], ["val_loss", "validation"]]],
  ["Bits per byte", "bits per byte", [["val_bits_per_byte", "validation"]]],
  ["Gradient", "length of the gradient, smoothed", [
    ["grad_norm", "all", 5], ["grad_norm_w_input", "W, from reading", 0], ["grad_norm_w_output", "W, from predicting", 1]]],
  ["Learning rate", "learning rate", [["lr", "learning rate"]]],
];

function Run({ run }) {
  const { unit, finished, curves } = run;
  const figures = FIGURES.map(([title, yLabel, keys]) => [title, yLabel, keys.filter(([key]) => curves[key]?.x.length > 1)
    .map(([key, name, look]) => ({ name, look, xs: curves[key].x, ys: curves[key].y }))]).filter(([, , lines]) => lines.length);
  const label = (title, lines) => `${title} over ${unit}. At the end: ` +
    lines.map((line) => `${line.name} ${line.ys[line.ys.length - 1]?.toPrecision(4)}`).join(", ");
  return html`<${Panel} title="The run that made it" says=${`Over the ${unit} that it was trained on${finished ? "" : "; it is not finished"}.`}>
    <div class="columns">${figures.map(([title, yLabel, lines]) => html`<div key=${title}><h3>${title}</h3>
      <${Lines} label=${label(title, lines)} lines=${lines} xLabel=${unit} yLabel=${yLabel} high=${usual(lines)} /></div>`)}</div><//>`;
}

// What most points stay below, where the first steps' values would press the rest flat.
function usual(lines) {
  const sorted = lines.map(({ ys }) => [...ys].sort((a, b) => a - b));
  const [low, top, most] = [0, 0.97, 1].map((share) => sorted.map((ys) => ys[Math.floor(share * (ys.length - 1))]));
  const [least, high] = [Math.min(...low), 1.02 * Math.max(...top)];
  return lines[0].ys.length > 20 && Math.max(...most) - least > 2 * (high - least) ? high : undefined;
}
