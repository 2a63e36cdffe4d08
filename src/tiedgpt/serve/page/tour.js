// The guided tour: six questions, each answered with numbers of the live model, beside its view.

import { count, fixed, html, many, Num, Piece, prob, short, Status, useCall, useEffect, useRef } from "./parts.js";

// Each: the question, the view that shows it, what else of the state it sets, what answers it, and
// the command that says it in a terminal. `ask(state)` is the [path, body] that the answer needs.
const STEPS = [
  {
    question: "Is the output head the same matrix as the input embedding?",
    set: { view: "matrix" },
    Answer: Same,
    command: (name) => `tiedgpt tie show ${name}`,
  },
  {
    question: "If I fine-tune the head, do I fine-tune the embedding?",
    set: { view: "learn", train: "head", predict: "all", untied: false, steps: 1 },
    ask: ({ subject }) => ["/inspect/gradient_split", subject],
    Answer: Tuned,
    command: (name) => `tiedgpt explain head ${name}`,
  },
  {
    question: "Why does replacing the head change the number of parameters?",
    set: { view: "model" },
    Answer: Counted,
    command: (name) => `tiedgpt explain parameters ${name}`,
  },
  {
    question: "Why does training predict at all positions, and generation only at the last?",
    set: { view: "text", mode: "training" },
    ask: ({ subject, positions }) => ["/inspect/positions",
      subject && positions && { ...subject, top: 1, replace_at: positions.next, replace_with: null }],
    Answer: Positions,
    command: (name) => `tiedgpt inspect positions ${name} --text "..."`,
  },
  {
    question: "How can one matrix do both jobs, and what does a row's length mean?",
    set: { view: "dot" },
    ask: ({ subject, positions, pin }) => ["/inspect/dot", subject && positions && { ...subject, position: pin, top: 10 }],
    Answer: Lengths,
    command: (name) => `tiedgpt inspect dot ${name} --text "..."`,
  },
  {
    question: "What is the body, and what is the head?",
    set: { view: "layers" },
    Answer: Body,
    command: (name) => `tiedgpt explain body ${name}`,
  },
];

// What opens a question: its number, and the view that shows it. 0 ends the tour.
export const toQuestion = (n) => ({ tour: n, ...STEPS[n - 1]?.set });

export default function Tour({ state, update }) {
  const at = Math.min(STEPS.length, Math.max(1, state.tour));
  const { question, ask, Answer, command } = STEPS[at - 1];
  const [path, body] = (ask && ask(state)) || ["", null];
  const found = useCall(path, body);
  const heading = useRef(null);
  useEffect(() => heading.current.focus(), [at]);
  const name = state.info.source ?? "MODEL"; // a client elsewhere has no path of it
  return html`<aside class="tour" aria-label="The six questions">
    <div class="row"><ol>${STEPS.map((step, i) => html`<li><button type="button" aria-label=${`Question ${i + 1}: ${step.question}`}
        aria-current=${i + 1 === at ? "step" : null} onClick=${() => update(toQuestion(i + 1))}>${i + 1}</button></li>`)}</ol>
      <button type="button" onClick=${() => update({ tour: 0 })}>Close</button></div>
    <h2 tabindex="-1" ref=${heading}>${question}</h2>
    <${Status} found=${found} />
    <div class="answer"><${Answer} state=${state} data=${found.stale ? null : found.data} info=${state.info} /></div>
    <p class="says">In a terminal: <code>${command(/^[\w./:-]+$/.test(name) ? name : "MODEL")}</code></p>
    <div class="row">
      <button type="button" disabled=${at === 1} onClick=${() => update(toQuestion(at - 1))}>Back</button>
      <button type="button" class="main" onClick=${() => update(toQuestion(at === STEPS.length ? 0 : at + 1))}>
        ${at === STEPS.length ? "Done" : "Next question"}</button></div>
  </aside>`;
}

const size = ({ vocab_size, n_embd }) => vocab_size * n_embd;

function Same({ info }) {
  if (!info.matrices) return null;
  const [first, second] = info.matrices;
  if (info.tied)
    return html`<p>Yes. In this model <code>${first.name}</code> ${first.does}: one matrix of
      ${" "}${count(info.vocab_size)} rows, one for each token, and ${count(info.n_embd)} columns. It is the same memory, not only the same shape.</p>`;
  return html`<p>No: this model is untied. <code>${first.name}</code> reads and <code>${second.name}</code> predicts: the same
    shape, but two matrices, each with ${count(size(info))} numbers of its own.</p>`;
}

function Tuned({ info, data }) {
  if (!data) return null;
  const times = short(data.norm_predict / data.norm_read);
  return html`<p>${info.tied
    ? html`Yes: there is one matrix, so <code>lm_head</code> is no parameter of its own. For this text its gradient has two parts:
        from reading, of length <b><${Num} x=${data.norm_read} /></b>, and from predicting, <b><${Num} x=${data.norm_predict} /></b>, ${times} times as long.
        An optimizer steps with their sum: beside this, one step trained the head alone, and the rows that are read moved with it.`
    : html`Not here: the head is a matrix of its own. Its gradient has length <b><${Num} x=${data.norm_predict} /></b>, that of the
        embedding <b><${Num} x=${data.norm_read} /></b>; a step moves each apart from the other.`}</p>`;
}

function Counted({ info }) {
  if (!info.parameters) return null;
  const more = size(info);
  const [tied, untied] = info.tied ? [info.parameters, info.parameters + more] : [info.parameters - more, info.parameters];
  return html`<p>A head of its own is a second matrix: ${count(info.vocab_size)} × ${count(info.n_embd)} = <b>${count(more)}</b> numbers.
    Tied, this model has <b>${count(tied)}</b> parameters; untied it ${info.tied ? "would have" : "has"} <b>${count(untied)}</b>,
    ${" "}${prob(more / tied)} more, and what one matrix learns, the other does not (Learn: two matrices). <code>tiedgpt tie fix</code> shares the matrix again.</p>`;
}

function Positions({ state, data }) {
  const { positions } = state;
  if (!positions) return null;
  const before = data?.max_abs_change?.slice(0, -1);
  return html`<p>Attention looks back only, so each token makes its prediction from what came before it: of ${many(positions.ids.length, "prediction")}
    ${" "}${count(positions.next)} have a known answer, and training learns from all at once. ${before?.length > 0 && html`Changing the last token
    moved the logits before it by at most <b><${Num} x=${Math.max(...before)} /></b>.`} Generation wants the one answer that is not known: the last.</p>`;
}

function Lengths({ data }) {
  if (!data) return null;
  return html`<p>Reading takes a row out of W; predicting compares the body's output h with every row. Here
    ${" "}<b><${Piece} text=${data.pieces[0]} /></b> wins: |h| <${Num} x=${data.h_norm} /> × |e| <${Num} x=${data.row_norm[0]} /> × cos
    ${" "}<${Num} x=${data.cos[0]} digits=${3} /> = logit <b><${Num} x=${data.logit[0]} /></b>. By the cosine alone it would be number
    ${" "}${count(data.rank_cos[0])}. On the output side a longer row makes every logit of its token larger, up or down; on the input side
    it makes the token louder in the sum h₀ = e + position.</p>`;
}

function Body({ info, state }) {
  if (!info.parameters) return null;
  const matrices = size(info) * (info.tied ? 1 : 2);
  const body = info.parameters - matrices;
  return html`<p>The body is everything up to h: ${count(info.config.n_layer)} layers, positions and the final norm, here <b>${count(body)}</b>
    ${" "}parameters besides W (${fixed((100 * body) / info.parameters, 0)} %). It turns each token into h, ${count(info.n_embd)} numbers. A head is what
    reads h: for language it is W again; a classifier puts another, small matrix on the same body (<code>tiedgpt train --task</code>).
    ${state.positions && html` Below, W reads the state after every layer.`}</p>`;
}
