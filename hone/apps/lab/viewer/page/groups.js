// Groups of a run, and one group with its answers side by side.
import { html, useState, useEffect } from "./vendor/preact.js";
import { useData, link, go, fmt, signed, tone, useKeys, plural, embedded } from "./lib.js";
import { VirtualList, Download, Empty, SortHead, Strip, Failure, Nothing, Pictured, useRows } from "./widgets.js";

const COLUMNS = [["step", "step"], [null, "prompt"], ["n", "answers"], ["score", "mean", "right"], ["spread", "spread", "right"], ["tokens", "tokens", "right"]];

export function Groups({ route, state, range }) {
  const { q = "", sort = "", kind = "" } = route.params;
  const rows = useRows("groups", { run: route.run, kind, q, sort }, "groups", state.version);
  const [selected, setSelected] = useState({ place: null, group: null });
  useEffect(() => setSelected({ place: null, group: null }), [rows.key]);
  const first = rows.total ? rows.row(0) : null;
  const shown = selected.group || first;
  const place = selected.group ? selected.place : first ? 0 : null;
  const open = (group) => group && go(link(route.run, "group", [group.step, group.uid], { kind }));
  useKeys({ o: () => open(shown) });
  return html`<div class="split">
    <section aria-label="groups">
      <${SortHead} columns="cols-groups" names=${COLUMNS} sort=${sort} onSort=${(name) => go(link(route.run, "groups", [], { ...route.params, sort: name }), true)} />
      ${rows.error && html`<${Failure} error=${rows.error} />`}
      ${rows.total === 0 && !rows.error ? html`<${Empty} q=${q} state=${state} what="group" />` : html`<${VirtualList} rows=${rows} height=${46} columns="cols-groups" label="groups" selected=${place} onSelect=${(next, group) => setSelected({ place: next, group })} onOpen=${open}
        draw=${(group) => html`
          <span class="num faint">${group.step}</span>
          <span class="two-lines"><span class="ellipsis" style=${{ display: "block" }}>${group.prompt || group.uid}</span>
            <span><span class="ellipsis">${group.source} · ${group.uid}</span>${group.fate !== "trained" && group.fate !== "validation" && html`<span class="chip warn">${group.fate}</span>`}${group.toolerrors > 0 && html`<span class="chip neg">${plural(group.toolerrors, "tool error")}</span>`}</span></span>
          <${Strip} scores=${group.scores} range=${range} matches=${group.matches} />
          <span class="num right">${fmt(group.score)}</span>
          <span class="num right muted">${fmt(group.spread, 2)}</span>
          <span class="num right muted">${fmt(group.tokens === null ? null : Math.round(group.tokens))}</span>`} />`}
      <div class="bar foot"><span class="count num" data-query=${rows.query}>${plural(rows.total ?? 0, "group")}${rows.query && rows.rows !== null ? `, ${plural(rows.rows, "answer")} match` : ""}</span><span class="grow"></span><${Download} run=${route.run} kind=${kind} q=${q} /></div>
    </section>
    <section aria-label="group">${shown ? html`<${Group} key=${`${shown.step} ${shown.uid}`} run=${route.run} kind=${kind} step=${shown.step} uid=${shown.uid} q=${q} />` : html`<${Nothing} title="No group selected" />`}</section>
  </div>`;
}

export function GroupPage({ route }) {
  const [step, uid] = route.args;
  return html`<${Group} run=${route.run} kind=${route.params.kind} step=${step} uid=${uid} q=${route.params.q} key=${`${step} ${uid}`} alone />`;
}

export function Group({ run, kind, step, uid, q, alone, index, part }) {
  const { data, error } = useData("group", { run, kind, step, uid });
  const [current, setCurrent] = useState(0);
  const answers = data?.answers || [];
  useEffect(() => {
    const place = answers.findIndex((answer) => answer.index === index && answer.part === part);
    if (place >= 0) setCurrent(place);
  }, [data, index, part]);
  const target = (view) => answers[current] && go(link(run, view, [step, uid, answers[current].index, answers[current].part], { kind }));
  useKeys({
    h: () => setCurrent((value) => Math.max(0, value - 1)),
    l: () => setCurrent((value) => Math.min(answers.length - 1, value + 1)),
    ArrowLeft: () => setCurrent((value) => Math.max(0, value - 1)),
    ArrowRight: () => setCurrent((value) => Math.min(answers.length - 1, value + 1)),
    t: () => target("tokens"),
    e: () => target("episode"),
  });
  useEffect(() => {
    document.querySelector('.answer[aria-current="true"]')?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [current, data]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return null;
  return html`
    <div class="prompt">
      <div class="text"><${Pictured} text=${data.prompt || ""} images=${data.images} ...${{ run, kind }} /></div>
      <div class="facts" style=${{ marginTop: "8px" }}>
        <span>step <b>${data.step}</b></span>
        ${data.ground_truth !== null && data.ground_truth !== "" && html`<span>expected <b class="mono">${shown(data.ground_truth)}</b></span>`}
        ${Object.entries(data.columns).map(([name, value]) => html`<span key=${name}>${name} <b class="mono">${String(value)}</b></span>`)}
        <span>${data.data_source}${data.row !== null ? ` · row ${data.row}` : ""}</span>
        <span class="mono faint">${data.uid}</span>
        ${data.row !== null && html`<a hidden=${Boolean(embedded)} href=${link(run, "prompt", [data.data_source || "", data.row], { kind })}>through training</a>`}
        ${!alone && html`<a href=${link(run, "group", [step, uid], { kind })}>open <kbd>o</kbd></a>`}
      </div>
    </div>
    <div class="answers">
      ${answers.map((answer, place) => html`<${Answer} key=${place} ...${{ run, kind, step, uid, answer, q }} current=${place === current} onFocus=${() => setCurrent(place)} />`)}
    </div>`;
}

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function Answer({ run, kind, step, uid, answer, current, onFocus, q }) {
  const at = [step, uid, answer.index, answer.part];
  const failed = answer.calls.filter((call) => call.status !== "ok").length;
  return html`<article class="answer" aria-current=${String(current)} onClick=${onFocus} aria-label=${`answer ${answer.index}`}>
    <header class="stack" style=${{ gap: "5px" }}>
      <div class="row"><span class="faint num">#${answer.index}${answer.part ? `.${answer.part}` : ""}</span>
        <span class="score ${answer.score === null ? "warn" : ""}">${answer.score === null ? "no verdict" : fmt(answer.score)}</span>
        <span class="grow"></span>
        <span class="faint">advantage</span><span class="num ${tone(answer.advantage)}" title="mean over the tokens">${signed(answer.advantage)}</span></div>
      <div class="row wrap" style=${{ gap: "4px" }}>
        <span class="chip num">${plural(answer.tokens, "token")}</span>
        <span class="chip ${answer.stop_reason === "length" ? "warn" : ""}">${answer.stop_reason || "–"}</span>
        ${answer.end && !["answer", "done"].includes(answer.end) && html`<span class="chip warn">${answer.end}</span>`}
        ${answer.calls.length > 0 && html`<span class="chip ${failed ? "neg" : ""}">${plural(answer.calls.length, "call")}${failed ? `, ${failed} failed` : ""}</span>`}
        ${answer.fate !== "trained" && answer.fate !== "validation" && html`<span class="chip warn">${answer.fate}</span>`}
      </div>
      <dl class="terms">${Object.entries(answer.terms || {}).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class=${tone(value)}>${fmt(value)}</dd>`)}</dl>
      ${answer.error && html`<div class="neg">${answer.error}</div>`}
    </header>
    <div class="text" tabindex="0"><${Departing} text=${answer.text} all=${answer.shared_all} any=${answer.shared_any} q=${q} /></div>
    <footer><a class="button quiet small" href=${link(run, "tokens", at, { kind })}>tokens</a>
      ${answer.turns && html`<a class="button quiet small" href=${link(run, "episode", at, { kind })}>episode</a>`}</footer>
  </article>`;
}

// A text with the prefix that it shares with the other answers, and marks where they part.
function Departing({ text, all, any, q }) {
  const rest = Math.max(all, any);
  return html`<span class="same-all" title="shared by all answers">${text.slice(0, all)}</span>${all > 0 && html`<i class="part" role="img" aria-label="all answers share the text up to here"></i>`}<span class="same-any" title="shared with another answer">${text.slice(all, rest)}</span>${rest > all && html`<i class="part any" role="img" aria-label="some answers share the text up to here"></i>`}<${Marked} text=${text.slice(rest)} q=${q} />`;
}

// A text with the words of a query marked.
export function Marked({ text, q }) {
  const words = (q || "").match(/"[^"]+"|\S+/g)?.map((word) => word.replaceAll('"', "")).filter((word) => !/^-|^[a-z_]+(<=|>=|!=|<|>|=|:)/.test(word)) || [];
  if (!words.length) return text;
  const pattern = new RegExp(`(${words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
  return text.split(pattern).map((part, place) => (place % 2 ? html`<mark key=${place}>${part}</mark>` : part));
}
