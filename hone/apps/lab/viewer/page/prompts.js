// Prompts through training: courses of all prompts, and one prompt's answers step by step.
import { html, useState, useEffect } from "./vendor/preact.js";
import { useData, link, go, fmt, useKeys } from "./lib.js";
import { VirtualList, SortHead, Segments, Strip, Failure, Nothing, useRows } from "./widgets.js";
import { Spark } from "./charts.js";

const COURSES = [["", "all"], ["learned", "learned"], ["unlearned", "unlearned"], ["never", "never solved"], ["always", "always right"], ["open", "others"]];
const COLUMNS = [["row", "row"], [null, "prompt"], [null, "share of right answers"], ["first", "first", "right"], ["last", "last", "right"], ["gain", "gain", "right"], ["visits", "visits", "right"]];

export function Prompts({ route, state }) {
  const { q = "", sort = "", course = "", kind = "" } = route.params;
  const rows = useRows("prompts", { run: route.run, kind, q, sort, course }, "prompts", state.version);
  const [selected, setSelected] = useState(null);
  useEffect(() => setSelected(null), [rows.key]);
  const change = (params) => go(link(route.run, "prompts", [], { ...route.params, ...params }), true);
  const counts = rows.answer?.courses || {};
  const open = (prompt) => prompt && go(link(route.run, "prompt", [prompt.source, prompt.row, prompt.uid], { kind }));
  return html`
    <div class="bar"><${Segments} label="course" value=${course} onChange=${(name) => change({ course: name })} options=${COURSES.map(([name, title]) => [name, name && counts[name] !== undefined ? `${title} ${counts[name]}` : title])} />
      <span class="grow"></span>${rows.answer && html`<span class="muted">right from a score of ${fmt(rows.answer.right)}</span>`}</div>
    <${SortHead} columns="cols-prompts" names=${COLUMNS} sort=${sort || "-gain"} onSort=${(name) => change({ sort: name })} />
    ${rows.error && html`<${Failure} error=${rows.error} />`}
    <${VirtualList} rows=${rows} height=${40} columns="cols-prompts" label="prompts" selected=${selected} onSelect=${setSelected} onOpen=${open}
      draw=${(prompt) => html`<span class="num faint">${prompt.row < 0 ? "–" : prompt.row}</span><span class="ellipsis"><a href=${link(route.run, "prompt", [prompt.source, prompt.row, prompt.uid], { kind })}>${prompt.prompt || prompt.uid}</a></span>
        <${Spark} values=${prompt.right} steps=${prompt.steps} width=${170} />
        <span class="num right">${fmt(prompt.first, 2)}</span><span class="num right">${fmt(prompt.last, 2)}</span><span class="num right ${prompt.gain > 0 ? "pos" : prompt.gain < 0 ? "neg" : "muted"}">${fmt(prompt.gain, 2)}</span><span class="num right muted">${prompt.visits}</span>`} />
    ${rows.total === 0 && html`<${Nothing} title="No such prompt" />`}`;
}

const SHOWN = 4;

export function PromptPage({ route, range }) {
  const [source, row, uid] = route.args;
  const { kind } = route.params;
  const { data, error } = useData("prompt", { run: route.run, kind, source, row, uid });
  const [chosen, setChosen] = useState(null);
  const visits = data?.visits || [];
  const even = visits.length <= SHOWN ? visits.map((_, place) => place) : Array.from({ length: SHOWN }, (_, number) => Math.round((number * (visits.length - 1)) / (SHOWN - 1)));
  const shown = chosen || even;
  const shift = (change) => setChosen(shown.map((place) => Math.min(visits.length - 1, Math.max(0, place + change))));
  useKeys({ l: () => shift(1), h: () => shift(-1), ArrowRight: () => shift(1), ArrowLeft: () => shift(-1) });
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return null;
  const toggle = (place) => setChosen(shown.includes(place) ? shown.filter((other) => other !== place) : [...shown, place].sort((a, b) => a - b).slice(-6));
  return html`
    <div class="prompt"><div class="text">${data.prompt}</div>
      <div class="facts" style=${{ marginTop: "8px" }}><span>${data.source} · row <b>${data.row}</b></span><span class="chip ${data.course === "learned" || data.course === "always" ? "pos" : data.course === "open" ? "" : "neg"}">${data.course}</span><span>right <b class="num">${fmt(data.first, 2)}</b> at first, <b class="num">${fmt(data.last, 2)}</b> at last, length × <b class="num">${fmt(data.tokens, 2)}</b></span></div></div>
    <div class="visits" role="group" aria-label="visits">${visits.map((visit, place) => html`<button key=${place} class="visit" aria-pressed=${String(shown.includes(place))} onClick=${() => toggle(place)} title=${`step ${visit.step}: ${fmt(visit.right, 2)} right`}><${Strip} scores=${visit.scores} range=${range} /><span class="num">${visit.step}</span></button>`)}</div>
    <div class="answers">${shown.map((place) => html`<${Visit} key=${place} run=${route.run} kind=${kind} visit=${visits[place]} range=${range} />`)}</div>`;
}

function Visit({ run, kind, visit, range }) {
  const { data } = useData("group", { run, kind, step: visit.step, uid: visit.uid });
  const [place, setPlace] = useState(0);
  const answer = data?.answers[Math.min(place, data.answers.length - 1)];
  return html`<article class="answer" aria-label=${`step ${visit.step}`}>
    <header class="stack" style=${{ gap: "6px" }}><div class="row"><b>step ${visit.step}</b><span class="grow"></span><span class="num muted">${fmt(visit.right, 2)} right · ${fmt(Math.round(visit.tokens))} tokens</span></div>
      <div class="picks">${visit.scores.map((score, number) => html`<button key=${number} aria-pressed=${String(number === place)} onClick=${() => setPlace(number)} title=${`answer ${number}`} class="num">${fmt(score, 2)}</button>`)}</div></header>
    <div class="text" tabindex="0">${answer ? answer.text : ""}</div>
    <footer>${answer && html`<a class="button quiet small" href=${link(run, "tokens", [visit.step, visit.uid, answer.index, answer.part], { kind })}>tokens</a>`}<a class="button quiet small" href=${link(run, "group", [visit.step, visit.uid], { kind })}>group</a></footer>
  </article>`;
}
