// Ready questions, and the flat list of answers that they and filters open.
import { html, useState, useEffect } from "./vendor/preact.js";
import { useData, link, go, fmt, signed, tone, plural, useKeys } from "./lib.js";
import { VirtualList, Download, Empty, SortHead, Failure, Nothing, useRows } from "./widgets.js";
import { Group } from "./groups.js";

export function Questions({ route, state }) {
  const { kind } = route.params;
  const { data, error } = useData("questions", { run: route.run, kind }, state.version);
  const move = (change) => {
    const cards = [...document.querySelectorAll(".question")];
    cards[Math.min(cards.length - 1, Math.max(0, cards.indexOf(document.activeElement) + change))]?.focus();
  };
  useKeys({ j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1) });
  if (error) return html`<${Failure} error=${error} />`;
  return html`<div class="scroll"><div class="pad"><h1 style=${{ marginBottom: "4px" }}>Questions</h1>
    <p class="muted" style=${{ marginBottom: "16px" }}>Each is a filter with an order; change it in the list that it opens.${state.reading ? ` Numbers grow while ${state.steps.length - state.deep} steps are still being indexed.` : ""}</p>
    <div class="questions">${(data || []).map((question) => html`<${One} key=${question.name} ...${{ question, kind, run: route.run, version: state.version }} />`)}</div></div></div>`;
}

function One({ question, run, kind, version }) {
  const { data } = useData("count", { run, kind, question: question.name }, version);
  const count = data?.count;
  return html`<a class="card question ${count === 0 ? "none" : ""}" href=${link(run, question.view, [], { kind, q: question.query, sort: question.sort })}>
    <span class="row"><b class="grow">${question.title}</b><span class="num ${count ? "score" : "faint"}">${count === undefined ? "…" : fmt(count)}</span></span>
    <span class="muted">${question.about}</span><code class="faint">${question.query}${question.sort && `  ·  by ${question.sort.replace(/^-(.*)/, "$1, largest first")}`}</code></a>`;
}

const MEASURES = ["ratio", "gap", "influence", "entropy", "toolerrors", "seconds", "lag", "correction"];

export function Answers({ route, state }) {
  const { q = "", sort = "", kind = "" } = route.params;
  const rows = useRows("answers", { run: route.run, kind, q, sort }, "answers", state.version);
  const [selected, setSelected] = useState({ place: null, answer: null });
  useEffect(() => setSelected({ place: null, answer: null }), [rows.key]);
  const name = sort.replace(/^-/, "");
  const measure = MEASURES.includes(name) ? name : MEASURES.find((other) => q.includes(other)) || "entropy";
  const columns = [["step", "step"], [null, "answer"], ["index", "#"], ["score", "score", "right"], ["advantage", "adv", "right"], ["tokens", "tokens", "right"], [measure, measure, "right"]];
  const first = rows.total ? rows.row(0) : null;
  const shown = selected.answer || first;
  const open = (answer) => answer && go(link(route.run, "tokens", [answer.step, answer.uid, answer.index, answer.part], { kind }));
  useKeys({ t: () => open(shown) });
  return html`<div class="split"><section aria-label="answers">
    <${SortHead} columns="cols-answers" names=${columns} sort=${sort} onSort=${(next) => go(link(route.run, "answers", [], { ...route.params, sort: next }), true)} />
    ${rows.error && html`<${Failure} error=${rows.error} />`}
    ${rows.total === 0 && !rows.error ? html`<${Empty} q=${q} state=${state} what="answer" />` : html`<${VirtualList} rows=${rows} height=${44} columns="cols-answers" label="answers" selected=${selected.answer ? selected.place : first ? 0 : null} onSelect=${(place, answer) => setSelected({ place, answer })} onOpen=${open}
      draw=${(answer) => html`<span class="num faint">${answer.step}</span>
        <span class="two-lines"><span class="ellipsis end" style=${{ display: "block" }}><bdi dir="ltr">${answer.text || "–"}</bdi></span><span><span class="ellipsis">${answer.prompt || answer.uid}</span>${answer.stop === "length" && html`<span class="chip warn">length</span>`}${answer.error > 0 && html`<span class="chip neg">no verdict</span>`}${answer.toolerrors > 0 && html`<span class="chip neg">${plural(answer.toolerrors, "tool error")}</span>`}</span></span>
        <span class="num faint">${answer.index}</span><span class="num right">${fmt(answer.score)}</span><span class="num right ${tone(answer.advantage)}">${signed(answer.advantage, 2)}</span><span class="num right muted">${fmt(answer.tokens)}</span><span class="num right">${fmt(answer[measure])}</span>`} />`}
    <div class="bar foot"><span class="count num">${plural(rows.total ?? 0, "answer")}</span><span class="grow"></span><${Download} run=${route.run} kind=${kind} q=${q} /></div>
  </section><section aria-label="group">${shown ? html`<${Group} key=${`${shown.step} ${shown.uid}`} run=${route.run} kind=${kind} step=${shown.step} uid=${shown.uid} q=${q} index=${shown.index} part=${shown.part} />` : html`<${Nothing} title="No answer selected" />`}</section></div>`;
}
