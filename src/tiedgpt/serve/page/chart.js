// What the views draw by the width they have: lines, points, and tables of shaded cells.
//
//   Bar({t, kind})          0..1 as a bar; kind: a class, "reads" or "predicts"
//   Lines({label, lines, xLabel, yLabel, xNames, show, tick, low, high})   lines: {name, xs, ys, look};
//       xNames: names of the places 0, 1, ...; what lies above `high` is told
//   Scatter({x, y, names, order, seen, onSee, onPick, says, marks, odd, xTicks, dark, label})   a point
//       for each token on canvas; marks: [id, text] pairs on top. The pointer tells onSee, a click or
//       an arrow key onPick; keys walk through `order`
//   apart(ids, x, y)        those of the ids whose names have room in a Scatter, the first first
//   Pixels({wide, tall, color, of})   color(i): [r, g, b] of cell i, or none; `of` is what it depends on
//   Strip({label, values, most, at, onAt, dark}), NamedStrip   numbers as shaded cells, full at `most`;
//       the pointer and the arrow keys tell onAt which one is seen
//   Products({strips, says, dark})    the last two strips, number by number, and their products
//   HeatGrid({label, corner, rows, columns, cell, at, onMove, onPick, mark, dark})   cell(r, c): {t,
//       text}: the shade 0..1, and what stands in it; mark: a column that is kept in sight

import { diverge, heat, html, Num, Scroll, short, useEffect, useMemo, useRef, useState } from "./parts.js";

function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(600);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => {
      const now = Math.round(entry.contentRect.width);
      if (now > 0) setWidth(now); // 0 while the page is hidden
    });
    watcher.observe(ref.current);
    return () => watcher.disconnect();
  }, []);
  return [ref, width];
}

// Round numbers between low and high, about n of them.
function ticks([low, high], n) {
  const rough = (high - low) / n || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1)
    found.push(Number((k * step).toPrecision(12)));
  return found;
}

function range(values, room = 0) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const more = (high - low || Math.abs(high) || 1) * room;
  return [low - more, high + more];
}

export const Bar = ({ t, kind }) => html`<svg class=${`meter ${kind ?? ""}`} viewBox="0 0 100 10"
  preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * Math.min(1, Math.max(0, t || 0))}
  height="10" /></svg>`;

// ---- lines ----

const TALL = 260;
const EDGE = { left: 52, right: 14, top: 12, bottom: 40 };
const MARKS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-3.5,-3.5h7v7h-7z", "M0,-5L4.6,3.2H-4.6z",
  "M0,-5L5,0L0,5L-5,0z", "M-4,-1.3h2.7V-4h2.6v2.7H4v2.6H1.3V4h-2.6V1.3H-4z", "M0,5L4.6,-3.2H-4.6z",
];
export const MOST_LINES = MARKS.length;

export function Lines({ label, lines, xLabel, yLabel, xNames, show = short, tick, low, high }) {
  const [ref, width] = useWidth();
  const [at, setAt] = useState(null);
  const [x0, x1] = range(lines.flatMap((line) => line.xs));
  const [least, most] = range(lines.flatMap((line) => line.ys).filter((y) => y !== null));
  const [y0, y1] = [low ?? least, high ?? most];
  const wide = Math.max(1, width - EDGE.left - EDGE.right);
  const tall = TALL - EDGE.top - EDGE.bottom;
  const x = (value) => EDGE.left + (wide * (value - x0)) / (x1 - x0 || 1);
  const y = (value) => EDGE.top + tall * (1 - (value - y0) / (y1 - y0 || 1));
  const above = Math.max(...lines.flatMap((line) => line.ys));
  const every = Math.ceil((xNames?.length ?? 0) / Math.max(2, wide / 64));
  const marks = xNames ? xNames.map((name, i) => [i, name]).filter(([i]) => i % every === 0)
    : ticks([x0, x1], Math.max(4, wide / 110)).map((value) => [value, round(value)]);
  const isIn = (value) => value !== null && value !== undefined && value <= y1;
  const path = (line) => line.xs.map((value, i) => !isIn(line.ys[i]) ? "" :
    `${i && isIn(line.ys[i - 1]) ? "L" : "M"}${x(value).toFixed(1)},${y(line.ys[i]).toFixed(1)}`).join("");
  const point = (event) => {
    const value = x0 + ((event.offsetX - EDGE.left) / wide) * (x1 - x0);
    setAt(lines[0].xs[nearest(lines[0].xs, value)]);
  };
  const here = at ?? x1;
  return html`<figure class="chart" ref=${ref}>
    <svg role="img" aria-label=${label} width=${width} height=${TALL}
      onPointerMove=${point} onPointerLeave=${() => setAt(null)}>
      ${ticks([y0, y1], 4).map((value) => html`<g key=${value}>
        <line class="rule" x1=${EDGE.left} x2=${width - EDGE.right} y1=${y(value)} y2=${y(value)} />
        <text class="tick" x=${EDGE.left - 8} y=${y(value) + 4} text-anchor="end">${(tick ?? round)(value)}</text></g>`)}
      ${marks.map(([value, name]) => html`<text class="tick" key=${value} x=${x(value)}
        y=${TALL - EDGE.bottom + 18} text-anchor="middle">${name}</text>`)}
      ${at !== null && html`<line class="rule now" x1=${x(at)} x2=${x(at)} y1=${EDGE.top} y2=${TALL - EDGE.bottom} />`}
      ${lines.map((line, i) => html`<g class=${`series series-${line.look ?? i}`} key=${line.key ?? line.name}>
        <path class="stroke" d=${path(line)} />
        ${line.xs.map((value, j) => j % (line.xs.length > 40 ? Math.ceil(line.xs.length / 10) : 1) === 0 && isIn(line.ys[j]) && html`<path class="mark"
          d=${MARKS[line.look ?? i]} transform=${`translate(${x(value)} ${y(line.ys[j])})`} />`)}</g>`)}
      <text class="tick" x=${EDGE.left + wide / 2} y=${TALL - 4} text-anchor="middle">${xLabel}</text>
    </svg>
    <figcaption>${above > y1 && html`<p class="note">↑ Above the chart: values up to ${show(above)}.</p>`}<span>${yLabel}${xNames ? ` at ${xNames[here]}` : ` at ${short(here)}`}</span>
      <ul>${lines.map((line, i) => html`<li key=${line.key ?? line.name} class=${`series series-${line.look ?? i}`}>
        <svg width="26" height="12" aria-hidden="true"><path class="stroke" d="M0,6H26" />
          <path class="mark" d=${MARKS[line.look ?? i]} transform="translate(13 6)" /></svg>
        <span>${line.name}</span> <b>${show(line.ys[nearest(line.xs, here)])}</b></li>`)}</ul></figcaption>
  </figure>`;
}

const round = (x) => x.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });

function nearest(xs, x) {
  return xs.reduce((best, one, i) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? i : best), 0);
}

// ---- points ----

// The points are mixed into pixels here: 50,000 calls of fillRect take ten times as long.
function drawPoints(canvas, xs, ys, odd, [width, height]) {
  const scale = devicePixelRatio || 1;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  Object.assign(canvas, { width: across, height: down });
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const color = style.color.match(/[\d.]+/g).map(Number);
  const image = pen.createImageData(across, down);
  const many = xs.length > 5000;
  const [size, cover] = [Math.round((many ? 2 : 4) * scale), many ? 0.4 : 0.65];
  for (let i = 0; i < xs.length; i += 1) {
    const [left, top] = [Math.round(xs[i] * scale - size / 2), Math.round(ys[i] * scale - size / 2)];
    for (let y = top; y < top + size; y += 1)
      for (let x = left; x < left + size; x += 1) {
        const at = 4 * (y * across + x);
        image.data[at] = color[0];
        image.data[at + 1] = color[1];
        image.data[at + 2] = color[2];
        image.data[at + 3] += cover * (255 - image.data[at + 3]);
      }
  }
  pen.putImageData(image, 0, 0);
  pen.scale(scale, scale);
  pen.fillStyle = style.outlineColor; // there is no outline: it only carries the second colour
  for (const i of odd) {
    pen.fillRect(xs[i] - 4, ys[i] - 0.8, 8, 1.6);
    pen.fillRect(xs[i] - 0.8, ys[i] - 4, 1.6, 8);
  }
}

const NONE = [];

export function Scatter({ x, y, names, order, seen, onSee, onPick = onSee, says, marks, odd = NONE,
  xTicks, dark, label }) {
  const [box, width] = useWidth();
  const canvas = useRef(null);
  const height = Math.round(Math.min(460, Math.max(280, width * 0.6)));
  const [xs, ys] = useMemo(() => [range(x, 0.04), range(y, 0.04)], [x, y]);
  const inner = [width - EDGE.left - EDGE.right, height - EDGE.top - EDGE.bottom];
  const px = (value) => EDGE.left + ((value - xs[0]) / (xs[1] - xs[0])) * inner[0];
  const py = (value) => EDGE.top + (1 - (value - ys[0]) / (ys[1] - ys[0])) * inner[1];
  const places = useMemo(() => [Float32Array.from(x, px), Float32Array.from(y, py)], [x, y, width]);
  useEffect(() => drawPoints(canvas.current, ...places, odd, [width, height]), [places, odd, dark]);
  const near = (event) => {
    const place = canvas.current.getBoundingClientRect();
    const [a, b] = [event.clientX - place.left, event.clientY - place.top];
    let [best, least] = [seen, 900];
    for (let i = 0; i < x.length; i += 1) {
      const far = (places[0][i] - a) ** 2 + (places[1][i] - b) ** 2;
      if (far < least) [best, least] = [i, far];
    }
    return best;
  };
  const at = Math.max(0, order.indexOf(seen));
  const keyed = (event) => {
    const page = Math.max(10, Math.round(order.length / 50));
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -at, End: order.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    onPick(order[Math.min(order.length - 1, Math.max(0, at + steps[event.key]))]);
  };
  const over = (event) => {
    const best = near(event);
    if (best !== seen) onSee(best);
  };
  const dot = (id, size, kind) => html`<circle cx=${px(x[id])} cy=${py(y[id])} r=${size} class=${kind} />`;
  return html`<div class="scatter" ref=${box} role="slider" tabindex="0" aria-label=${label}
      aria-valuemin="1" aria-valuemax=${order.length} aria-valuenow=${at + 1} aria-valuetext=${says(seen)}
      onKeyDown=${keyed} onPointerMove=${over} onPointerDown=${(event) => onPick(near(event))}>
    <canvas ref=${canvas} style=${{ width: `${width}px`, height: `${height}px` }}></canvas>
    <svg width=${width} height=${height} aria-hidden="true">
      ${(xTicks ?? ticks(xs, Math.max(5, width / 110)).map((t) => [t, t])).map(([t, name]) => html`<text key=${t} x=${px(t)} y=${height - 22}
        text-anchor="middle">${name}</text>`)}
      ${ticks(ys, height / 60).filter((t) => py(t) > 26).map((t) => html`<text x=${EDGE.left - 8} y=${py(t) + 4} text-anchor="end">${t}</text>`)}
      <text class="axis" x=${width - EDGE.right} y=${height - 5} text-anchor="end">${names[0]} →</text>
      <text class="axis" x="4" y="12">${names[1]} ↑</text>
      <path class="frame" d=${`M${EDGE.left},${EDGE.top}V${height - EDGE.bottom}H${width - EDGE.right}`} />
      ${marks.map(([id, text]) => html`<g key=${id}>${dot(id, 4.5, "mark")}
        ${text && html`<text class="word" x=${px(x[id]) + (px(x[id]) > width * 0.75 ? -8 : 8)} y=${py(y[id]) + (py(y[id]) < 36 ? 16 : -6)}
          text-anchor=${px(x[id]) > width * 0.75 ? "end" : "start"}>${text}</text>`}</g>`)}
      ${dot(seen, 8, "seen")}
    </svg></div>`;
}

export function apart(ids, x, y) {
  const size = (values) => (([low, high]) => high - low || 1)(range(values));
  const [wide, high] = [size(x) / 8, size(y) / 16];
  const isNear = (a) => (b) => Math.abs(x[a] - x[b]) < wide && Math.abs(y[a] - y[b]) < high;
  return ids.reduce((kept, id) => (kept.some(isNear(id)) ? kept : [...kept, id]), []);
}

// ---- cells ----

export function HeatGrid({ label, rows, columns, cell, dark, at, onMove, onPick, corner = "", mark }) {
  const table = useRef(null);
  const keyed = (event) => {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, -columns.length], End: [0, columns.length] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const row = Math.min(rows.length - 1, Math.max(0, at[0] + down));
    const column = Math.min(columns.length - 1, Math.max(0, at[1] + right));
    onMove(row, column);
    table.current.querySelectorAll("td button")[row * columns.length + column].focus();
  };
  useEffect(() => { // the marked column is in sight, and the first one in sight is whole
    const [box, [names, ...cells]] = [table.current.parentElement, table.current.rows[0].cells];
    const kept = cells[Math.min(mark ?? 0, cells.length - 1)];
    const least = kept.offsetLeft + kept.offsetWidth - box.clientWidth;
    const starts = cells.map((cell) => cell.offsetLeft - names.offsetWidth - 2);
    const from = least > 0 ? starts.find((start) => start >= least) ?? starts[starts.length - 1] : 0;
    box.parentElement.style.setProperty("--kept", `${names.offsetWidth}px`);
    box.style.paddingRight = `${Math.max(0, from && from + box.clientWidth - table.current.offsetWidth)}px`; // room to scroll so far
    box.scrollLeft = from;
  }, [mark, columns.length]);
  return html`<${Scroll}><table class="heat" role="grid" aria-label=${label} ref=${table} onKeyDown=${keyed}>
    <thead><tr role="row"><th role="columnheader">${corner}</th>${columns.map((name, c) => html`<th scope="col"
      role="columnheader" key=${c} class=${c === mark ? "now" : ""}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map((name, r) => html`<tr role="row" key=${r}><th scope="row" role="rowheader">${name}</th>
      ${columns.map((_, c) => {
        const { t, text } = cell(r, c);
        const isHere = r === at[0] && c === at[1];
        return html`<td role="gridcell" key=${c} aria-selected=${isHere}><button type="button" tabindex=${isHere ? 0 : -1}
          style=${t === null ? {} : heat(t, dark)} onPointerEnter=${onPick && (() => onMove(r, c))}
          onClick=${() => (onPick ?? onMove)(r, c)}>${text}</button></td>`;
      })}</tr>`)}</tbody></table><//>`;
}

// ---- numbers ----

export function Pixels({ wide, tall, color, of }) {
  const canvas = useRef(null);
  useEffect(() => {
    Object.assign(canvas.current, { width: wide, height: tall });
    const pen = canvas.current.getContext("2d");
    const image = pen.createImageData(wide, tall);
    for (let i = 0; i < wide * tall; i += 1) {
      const rgb = color(i);
      if (rgb) image.data.set([...rgb, 255], 4 * i);
    }
    pen.putImageData(image, 0, 0);
  }, [wide, tall, ...of]);
  return html`<canvas ref=${canvas} aria-hidden="true"></canvas>`;
}

// Cells in a row: as many as are wide enough, if possible such that the last row is full.
function across(n, width) {
  const most = Math.min(128, Math.max(8, Math.floor(width / 5)));
  for (let k = Math.min(n, most); k >= 16; k -= 1) if (n % k === 0) return k;
  return Math.min(n, most);
}

export function Strip({ label, values, most, at, onAt, dark }) {
  const [box, width] = useWidth();
  const n = values.length;
  const wide = across(n, width);
  const tall = Math.ceil(n / wide);
  const see = (i) => onAt(Math.min(n - 1, Math.max(0, i)));
  const point = ({ clientX, clientY }) => {
    const { left, top, width: w, height: h } = box.current.getBoundingClientRect();
    see(Math.min(wide - 1, Math.floor(((clientX - left) / w) * wide)) + wide * Math.min(tall - 1, Math.floor(((clientY - top) / h) * tall)));
  };
  const keyed = (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + wide, ArrowUp: at - wide, Home: 0, End: n - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    see(to);
  };
  const live = onAt && { role: "slider", tabindex: 0, "aria-valuemin": 0, "aria-valuemax": n - 1, "aria-valuenow": at,
    "aria-valuetext": `number ${at}: ${short(values[at])}`, onKeyDown: keyed, onPointerMove: point, onPointerDown: point };
  return html`<div class="numbers-of" role="img" aria-label=${label} ref=${box} ...${live}
      style=${{ height: `${tall * (tall > 2 ? 9 : 22)}px` }}><${Pixels} wide=${wide} tall=${tall} of=${[values, most, dark]}
      color=${(i) => i < n && diverge(values[i] / most, dark).rgb} />
    ${onAt && html`<span style=${{ left: `${(100 * (at % wide)) / wide}%`, top: `${(100 * Math.floor(at / wide)) / tall}%`,
      width: `${100 / wide}%`, height: `${100 / tall}%` }}></span>`}</div>`;
}

export const NamedStrip = ({ name, values, at, most = fullAt(values), ...others }) => html`<div class="strip-row"><span>${name}</span>
  <${Strip} values=${values} at=${at} most=${most} label=${`${values.length} numbers`} ...${others} />${at !== undefined && html`<${Num} x=${values[at]} />`}</div>`;

export function Products({ strips, dark, says }) {
  const [[, a], [, b]] = strips.slice(-2);
  const products = useMemo(() => a.map((x, i) => x * b[i]), [a, b]);
  const [hovered, setAt] = useState(null);
  const at = hovered !== null && hovered < products.length ? hovered : products.indexOf(Math.max(...products));
  return html`<div class="strips">${[...strips, ["= products", products]].map(([name, values, most], k) => html`<${NamedStrip} key=${k}
      name=${name} values=${values} most=${most} at=${at} onAt=${setAt} dark=${dark} />`)}
    <p class="readout">${says(at, products)}</p></div>`;
}

// What full colour stands for: all but the largest of the numbers are below it.
export function fullAt(...lists) {
  const sizes = lists.flat().map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
}
