// A conversation with a model that has a chat template; the tokens of a reply show their alternatives.

import { stream } from "../api.js";
import { announce, html, Odds, Panel, Piece, Tokens, useRun, useState } from "../parts.js";

let kept = []; // {role, content, tokens}, while other views are open

// `single`: whether the model was tuned on single exchanges, so that earlier messages mislead it;
// `system`: the message that the template puts first; `question`: a message of the tuning data.
export default function Chat({ options, single, system, question }) {
  const [turns, setTurns] = useState(kept);
  const [keepsHistory, setKeepsHistory] = useState(!single);
  const [draft, setDraft] = useState(kept.length ? "" : question ?? "");
  const [showsTokens, setShowsTokens] = useState(false);
  const { run, stop, running, error } = useRun();
  const put = (next) => setTurns((kept = next));
  const send = (event) => run(async (signal) => {
    event.preventDefault();
    const said = [...turns, { role: "user", content: draft.trim() }];
    const sent = keepsHistory ? said : said.slice(-1);
    const reply = { role: "assistant", content: "", tokens: [] };
    put(said);
    setDraft("");
    const body = { messages: sent.map(({ role, content }) => ({ role, content })), ...options, logprobs: true, top_logprobs: 5 };
    for await (const { choices: [{ delta, logprobs }] } of stream("/v1/chat/completions", body, signal)) {
      reply.content += delta.content ?? "";
      reply.tokens.push(...(logprobs?.content ?? []));
      put([...said, { ...reply }]);
    }
    announce(reply.content);
  });
  return html`<${Panel} title="Talk with it" says="The conversation is one text, written by the model's template; a reply is its continuation.">
    ${system && html`<p class="says">It begins with the system message of the tuning data: <q>${system}</q></p>`}
    <ol class="turns">${turns.map((turn, k) => html`<li key=${k} class=${turn.role}>${turn.tokens && showsTokens
      ? html`<${Reply} tokens=${turn.tokens} />` : html`<p>${turn.content}</p>`}</li>`)}</ol>
    ${turns.length > 0 && html`<label><input type="checkbox" checked=${showsTokens} onChange=${(event) => setShowsTokens(event.target.checked)} /> show tokens</label>`}
    ${showsTokens && html`<p class="says">Press a token to see what else it could have been.</p>`}
    ${single && html`<p class="says">This model was tuned on single exchanges: each message starts anew.
      <label><input type="checkbox" checked=${keepsHistory} onChange=${(event) => setKeepsHistory(event.target.checked)} /> send earlier messages, too</label></p>`}
    ${error && html`<p class="status error" role="status">${error}</p>`}
    <form class="row" onSubmit=${send}><label class="box"><span>Your words</span>
      <input value=${draft} onInput=${(event) => setDraft(event.target.value)} autocomplete="off" /></label>
      ${running ? html`<button type="button" class="main" onClick=${stop}>Stop</button>`
        : html`<button class="main" disabled=${!draft.trim()}>Send</button>`}
      ${turns.length > 0 && !running && html`<button type="button" onClick=${() => put([])}>Begin anew</button>`}</form><//>`;
}

function Reply({ tokens }) {
  const [at, setAt] = useState(null);
  const chosen = tokens[at];
  const rows = chosen?.top_logprobs.map(({ token, token_id: id, logprob }, k) => (
    { id, piece: token, place: k + 1, p: Math.exp(logprob), mark: id === chosen.token_id && "written" }));
  return html`<${Tokens} pieces=${tokens.map(({ token }) => token)} pin=${at} onPin=${(i) => setAt(i === at ? null : i)} label="A reply, token by token" />
    ${rows && html`<div class="alternatives"><p class="says">In place of <${Piece} text=${chosen.token} />:</p><${Odds} rows=${rows} /></div>`}`;
}
