// Start: the matrix with its two jobs on the text, and one pass.

import { html, likeliest, Odds, Panel } from "../parts.js";
import { Jobs } from "./matrix.js";
import Pass from "./pass.js";

export default function Start({ state, update }) {
  const { info, positions, found, pin, subject } = state;
  const sentence = info.tied === false ? "One matrix reads the text, and another predicts what comes next"
    : "One matrix W reads the text, and the same W predicts what comes next";
  return html`
    <${Panel} title=${sentence} found=${found} says=${info.run?.data
        && `The model learned from ${info.run.data}.${state.text === info.opening ? " It never saw this text." : ""}`}>
      <${Jobs} state=${state}>${positions && html`<${Odds} rows=${likeliest(positions, pin).slice(0, 5)} />`}<//><//>
    ${positions && info.config && html`<${Pass} key=${`${JSON.stringify(subject)} ${pin}`} state=${state} update=${update} />`}`;
}
