// The shell: one text box, its tokens and the pinned position above the views, all in the URL.

import { h, render } from "./vendor/preact.js";
import { exported, remember, saveCopy, setKey, textOf } from "./api.js";
import {
  count, html, many, Piece, setModelName, Status, Tokens, useCall, useEffect, useRef, useState,
} from "./parts.js";
import Tour, { toQuestion } from "./tour.js";
import Start from "./views/start.js";
import Text from "./views/text.js";
import Write from "./views/write.js";
import Guess from "./views/guess.js";
import Dot from "./views/dot.js";
import Matrix from "./views/matrix.js";
import Vocabulary from "./views/vocabulary.js";
import Layers from "./views/layers.js";
import Heads from "./views/heads.js";
import Compare from "./views/compare.js";
import Learn from "./views/learn.js";
import Model from "./views/model.js";

// The groups of views, which together are a lesson's path. Each view: its name in the URL, on its tab,
// its component, and whether it shows the pinned token.
const GROUPS = [
  ["Read", [["start", "Start", Start], ["text", "Text", Text], ["compare", "Side by side", Compare]]],
  ["Look inside", [["layers", "Layers", Layers, true], ["heads", "Heads", Heads]]],
  ["The matrix", [["matrix", "One matrix", Matrix, true], ["dot", "Dot product", Dot, true], ["vocabulary", "Vocabulary", Vocabulary], ["model", "Model", Model]]],
  ["Learn", [["learn", "One step", Learn, true]]],
  ["Write", [["write", "Let it write", Write], ["guess", "Guess first", Guess]]],
];
const VIEWS = GROUPS.flatMap(([, views]) => views);

// What the URL's fragment keeps, with its defaults; the default's type says how it is read. A view
// that wants something of its own kept adds it here.
const SAVED = {
  view: "", // start, or of a model with a chat template its conversation
  text: "The matrix that reads a token is the matrix that", // or, until it is edited, a text of the run
  ids: [], // tokens in place of the text, where the text alone would be encoded otherwise
  pin: -1, // -1: the last
  mode: "training", // Text: or generation
  layer: 0, // Heads
  head: 0,
  centred: false, // Dot product
  writing: "text", // Write: or chat
  other: "", // Side by side: the second text, which Learn does not learn
  steps: 0, // Learn
  predict: "all", // or last
  train: "all", // or head, blocks
  untied: false,
  tour: 0, // the open question, 1 to 6
  projector: false,
};
const OPENED = exported ? { ...SAVED, text: "", ...exported.state } : SAVED; // without a fragment
const MOST_TOKENS = 1024;
const MOST_CHARACTERS = 64 * MOST_TOKENS; // of a text that is encoded to see where it must end

const UNSAVED = "tiedgpt-unsaved"; // the fragment with what was typed just before the page was left
const [leftAt, unsaved] = remember("sessionStorage", UNSAVED)?.split("\n") ?? [];
if (unsaved && leftAt === location.hash) history.replaceState(null, "", unsaved);
remember("sessionStorage", UNSAVED, "");
let typed = null; // what is in the text box and not yet in the state

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = { ...OPENED };
  for (const [name, value] of given) {
    const like = SAVED[name];
    if (typeof like === "string") found[name] = value;
    else if (typeof like === "boolean") found[name] = value === "true";
    else if (Array.isArray(like)) found[name] = value.split(",").filter((one) => /^\d+$/.test(one)).map(Number);
    else if (typeof like === "number" && Number.isInteger(Number(value))) found[name] = Math.max(like, Number(value));
  }
  if (!VIEWS.some(([name]) => name === found.view)) found.view = "";
  return found;
}

function written(saved) {
  const differs = ([name, value]) => SAVED[name] !== undefined && String(value) !== String(OPENED[name]);
  return new URLSearchParams(Object.entries(saved).filter(differs)).toString();
}

function useSaved() {
  const [saved, setSaved] = useState(read);
  const before = useRef(saved);
  const latest = useRef(saved);
  latest.current = saved;
  useEffect(() => {
    addEventListener("pagehide", () => remember("sessionStorage", UNSAVED,
      `${location.hash}\n#${written(typed === null ? latest.current : { ...latest.current, text: typed, ids: [] })}`));
    const goBack = () => setSaved(read());
    addEventListener("hashchange", goBack); // back, forward, or another fragment in the address
    return () => removeEventListener("hashchange", goBack);
  }, []);
  useEffect(() => {
    const timer = setTimeout(() => {
      const { view, ids } = before.current;
      const isStep = view !== saved.view || String(ids) !== String(saved.ids);
      before.current = saved;
      if (written(saved) === written(read())) return;
      history[isStep ? "pushState" : "replaceState"](null, "", `#${written(saved)}`);
    }, 150);
    return () => clearTimeout(timer);
  }, [saved]);
  return [saved, (patch) => setSaved((old) => ({ ...old, ...patch }))];
}

function useTheme() {
  const page = document.documentElement;
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(query.matches);
  useEffect(() => query.addEventListener("change", () => page.dataset.theme || setDark(query.matches)), []);
  const turn = () => {
    page.dataset.theme = dark ? "light" : "dark"; // before anything is drawn
    setDark(!dark);
  };
  return [dark, turn];
}

// What is saved, with the text that the model's run suggests while nobody wrote one.
function opened(saved, info) {
  if (exported || saved.text !== SAVED.text || saved.ids.length) return saved;
  const text = info.opening ?? (info.tokenizer === false ? [1, 2, 3, 4, 5] : saved.text);
  return Array.isArray(text) ? { ...saved, text: "", ids: text.filter((id) => id < (info.vocab_size ?? Infinity)) } : { ...saved, text };
}

// {text} or {ids}, why there is none, and whether they are only the first tokens of the text.
function useSubject(saved, info) {
  const { text, ids } = saved;
  const cap = Math.min(MOST_TOKENS, info.n_positions ?? MOST_TOKENS);
  const isLong = !ids.length && info.tokenizer !== false && new Blob([text]).size > cap;
  const measured = useCall("/tokenize", isLong ? { prompt: text.slice(0, MOST_CHARACTERS) } : null);
  const asIds = info.tokenizer === false && !ids.length ? text.split(/[\s,]+/).filter(Boolean).map(Number) : ids;
  if (asIds.some((id) => !Number.isInteger(id) || id < 0))
    return [null, "this model has no tokenizer: write token ids, such as 464 3280 318"];
  const tokens = isLong ? measured.data?.tokens ?? [] : asIds;
  if (tokens.length > cap) return [{ ids: tokens.slice(0, cap) }, null, cap];
  if (asIds.length) return [{ ids: asIds }, null];
  if (!text) return [null, "the box is empty: write a word"];
  return [isLong && !measured.data && !measured.error ? null : { text }, null];
}

function App() {
  const [stored, store] = useSaved();
  const [dark, turn] = useTheme();
  const asked = useCall("/inspect/model", undefined);
  const info = asked.data ?? {};
  const first = info.chat ? { view: "write", writing: "chat" } : { view: "start" };
  const saved = { ...opened(stored, info), ...(!stored.view && first) };
  const { view, writing } = saved;
  const isChat = info.chat && view === "write" && writing === "chat";
  const update = (patch) => store(info.chat ? { view, writing, ...patch } : patch);
  const isKnown = asked.data || asked.error; // whether there is a tokenizer
  const [given, reason, cap] = useSubject(saved, info);
  const found = useCall("/inspect/positions", isKnown && given ? { ...given, top: 10 } : null, true);
  if (!isKnown) Object.assign(found, { busy: asked.busy, stop: asked.stop });
  if (isKnown && reason) Object.assign(found, { error: reason, busy: false, stale: true, again: null });
  const positions = found.data;
  const { top, ...subject } = found.body ?? {};
  const last = positions ? positions.ids.length - 1 : 0;
  const pin = saved.pin < 0 ? last : Math.min(saved.pin, last);
  const state = { ...saved, pin, subject: positions && subject, positions, found, info, dark };
  const [, title, View, showsPin] = VIEWS.find(([name]) => name === saved.view);
  const [next, nextTitle] = VIEWS[(VIEWS.findIndex(([one]) => one === saved.view) + 1) % VIEWS.length];
  useProjector(saved.projector, saved.view, update);
  const name = info.name ?? "MODEL";
  setModelName(info.source ?? "MODEL");
  useEffect(() => {
    document.title = `${title} · ${name} · tiedgpt`;
  }, [title, name]);
  return html`
    <header>
      <div class="brand"><h1>tiedgpt</h1><${Summary} info=${info} />
        <button type="button" onClick=${() => update(toQuestion(saved.tour ? 0 : 1))}
          aria-expanded=${saved.tour > 0}>Six questions</button>
        <button type="button" class="wide" onClick=${() => update({ projector: !saved.projector })}>Projector</button>
        <${Share} saved=${saved} />
        <button type="button" onClick=${turn}>${dark ? "Light" : "Dark"}</button></div>
      ${isChat ? null : saved.view === "guess" ? html`<p class="says">The text is hidden while you guess.</p>` : html`<${Box} saved=${isKnown || stored.text !== SAVED.text ? saved : { ...saved, text: "" }} info=${info} update=${update} />`}
      ${cap && html`<p class="note">The text has more than ${many(cap, "token")}: the page reads the first ${count(cap)}.
        ${" "}<button type="button" onClick=${async () => update({ text: await textOf(given.ids, info), ids: given.ids })}>Leave out the rest</button></p>`}
      ${(asked.status === 401 || found.status === 401) && html`<${Key} />`}
      <${Tabs} view=${saved.view} update=${update} />
    </header>
    <div class=${saved.tour > 0 ? "beside" : ""}>
    ${saved.tour > 0 && html`<${Tour} state=${state} update=${update} />`}
    <main><div id="view" role="tabpanel" tabindex="-1" aria-labelledby=${`tab-${saved.view}`}>
      ${(showsPin || reason) && saved.view !== "text" && saved.view !== "guess" && html`<${Strip} state=${state} update=${update} />`}
      <${View} key=${saved.view} state=${state} update=${update} /></div>
      <p class="row path-on"><button type="button" class="main" onClick=${() => { update({ view: next }); scrollTo(0, 0); }}>Next: ${nextTitle}</button></p>
      <div id="live" class="hidden" aria-live="polite"></div></main></div>`;
}

function Summary({ info }) {
  if (!info.name) return null;
  const tied = info.tied ? "one matrix reads and predicts" : "two matrices: one reads, one predicts";
  const shape = info.vocab_size && `${count(info.vocab_size)} × ${count(info.n_embd)}, ${tied}`;
  return html`<p><b>${info.name}</b> ${shape}</p>`;
}

// The text that all views read. It is taken a moment after the last key.
function Box({ saved, info, update }) {
  const [draft, setDraft] = useState(null);
  const timer = useRef(0);
  const shown = draft ?? (saved.text || saved.ids.join(" "));
  const edit = (text) => {
    setDraft(text);
    typed = text;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      update({ text, ids: [] });
      setDraft(null);
      typed = null;
    }, 400);
  };
  return html`<label class="box"><span>${info.tokenizer === false ? "Token ids" : "Text"}</span>
    <textarea rows="2" spellcheck=${false} value=${shown}
      onInput=${(event) => edit(event.target.value)}></textarea></label>`;
}

function Key() {
  const submit = (event) => {
    event.preventDefault();
    setKey(new FormData(event.target).get("key"));
    start(); // every view asks again
  };
  return html`<form class="key" onSubmit=${submit}>
    <label>This server asks for its API key <input name="key" type="password" autocomplete="off" /></label>
    <button>Use it</button></form>`;
}

function Tabs({ view, update }) {
  const at = VIEWS.findIndex(([name]) => name === view);
  const [group, views] = GROUPS.find(([, all]) => all.includes(VIEWS[at]));
  const isWalking = useRef(false);
  useEffect(() => {
    if (isWalking.current) document.getElementById(`tab-${view}`).focus();
    isWalking.current = false;
  }, [view]);
  const keyed = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    isWalking.current = true;
    update({ view: VIEWS.at((at + step) % VIEWS.length)[0] });
  };
  return html`<nav class="groups" aria-label="Groups of views">${GROUPS.map(([name, [[first]]]) => html`<button type="button" key=${name}
      aria-current=${name === group ? "true" : null} onClick=${() => update({ view: first })}>${name}</button>`)}</nav>
    <div class="tabs" role="tablist" aria-label=${`Views: ${group}`} onKeyDown=${keyed}>
    ${views.map(([name, label]) => html`<button type="button" role="tab" key=${name} id=${`tab-${name}`}
      aria-selected=${name === view} aria-controls=${name === view ? "view" : null}
      tabindex=${name === view ? 0 : -1} onClick=${() => update({ view: name })}>${label}</button>`)}</div>`;
}

// One panel at a time, as large as the screen; the arrow keys lead through the panels and the views.
function useProjector(isOn, view, update) {
  useEffect(() => {
    document.documentElement.toggleAttribute("data-projector", isOn);
    if (!isOn) return undefined;
    const keyed = (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1 }[event.key];
      if (event.key === "Escape") update({ projector: false });
      if (!step || event.defaultPrevented || event.target.closest("input, textarea")) return;
      event.preventDefault();
      const panels = [...document.querySelectorAll("#view .panel")];
      const here = panels.findLastIndex((panel) => panel.getBoundingClientRect().top < 60);
      const to = panels[here + step];
      if (to) return to.scrollIntoView();
      const next = VIEWS.at((VIEWS.findIndex(([name]) => name === view) + step) % VIEWS.length);
      update({ view: next[0] });
      return scrollTo(0, 0);
    };
    addEventListener("keydown", keyed);
    return () => removeEventListener("keydown", keyed);
  }, [isOn, view]);
}

// A link to what is shown, or, of a file, a copy of it that opens with what is shown.
function Share({ saved }) {
  const [said, setSaid] = useState(null);
  const share = async () => {
    if (exported) return saveCopy({ ...saved, projector: false });
    const link = `${location.href.replace(/#.*/, "")}#${written(saved)}`;
    const copied = await navigator.clipboard?.writeText(link).then(() => true, () => false);
    return setSaid(copied ? "The link is copied." : link);
  };
  return html`<button type="button" onClick=${share}>${exported ? "Save a copy" : "Copy link"}</button>
    ${said && html`<p class="says link" role="status">${said}</p>`}`;
}

// The tokens in one line, for the views that show something of the pinned one.
function Strip({ state, update }) {
  const { positions, found, pin } = state;
  return html`<div class="strip">
    <${Status} found=${found} />
    ${positions && html`<div class=${found.stale || found.error ? "stale" : ""}>
      <${Tokens} small pieces=${positions.pieces} pin=${pin} onPin=${(at) => update({ pin: at })}
        label="Tokens: choose the pinned one" /></div>
      <p class="says">Pinned: token ${pin}, <b><${Piece} text=${positions.pieces[pin]} /></b>. Choose another to see its prediction.</p>`}
  </div>`;
}

let starts = 0;
const start = () => render(h(App, { key: (starts += 1) }), document.getElementById("app"));
start();
