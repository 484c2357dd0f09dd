// The page of a run: facts, alerts, curves, timeline of stages, ledger of fates, config with sources, environment.
import { html, useState, useMemo } from "./vendor/preact.js";
import { useData, link, go, fmt, seconds, plural, embedded } from "./lib.js";
import { Chart } from "./charts.js";
import { Failure, Segments } from "./widgets.js";

const FATES = ["trained", "filtered", "failed", "too_old"];
const HEADLINE = ["critic/rewards/mean", "response_length/mean", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "actor/pg_clipfrac", "reward/zero_std_group_ratio", "response_length/clip_ratio", "perf/throughput"];

export function RunPage({ route, state, theme }) {
  const overview = useData("overview", { run: route.run }, `${state.status} ${state.step}`);
  const metrics = useData("metrics", { run: route.run }, `${state.status} ${state.step}`);
  const alerts = useData("alerts", { run: route.run }, `${state.status} ${state.step}`);
  const tab = route.params.tab || "curves";
  if (overview.error) return html`<${Failure} error=${overview.error} />`;
  if (!overview.data) return null;
  const { record } = overview.data;
  const choose = (name) => go(link(route.run, "run", [], { tab: name }), true);
  const tabs = [["curves", "Curves"], ["time", "Time"], ["ledger", "Prompts' fates"], ...(overview.data.flow ? [["flow", "Data flow"]] : []), ["config", "Config"], ["environment", "Environment"]];
  return html`<div class="scroll"><div class="pad">
    <header class="stack" style=${{ marginBottom: "16px" }}>
      <div class="row wrap"><h1>${overview.data.name}</h1><span class="chip ${overview.data.status === "failed" || overview.data.status === "dead" ? "neg" : "accent"}">${overview.data.status}</span>
        <span class="muted">${record.exit_reason}</span></div>
      <div class="facts">
        <span>step <b class="num">${state.step}</b></span><span>took <b>${seconds(overview.data.seconds)}</b></span>
        ${record.started && html`<span>started <b>${when(record.started)}</b></span>`}
        <span>seed <b class="num">${record.seed ?? "–"}</b></span>
        <span><b class="num">${fmt(state.rows)}</b> answers stored</span>
        ${(record.resumed || []).length > 0 && html`<span>resumed <b>${record.resumed.length}×</b></span>`}
        <span class="mono faint ellipsis" title=${overview.data.path}>${overview.data.path}</span>
      </div>
    </header>
    <${Alerts} alerts=${alerts.data} run=${route.run} />
    <div class="row" style=${{ margin: "0 0 14px" }}><${Segments} label="part of the page" value=${tab} onChange=${choose} options=${tabs} /></div>
    ${tab === "curves" && metrics.data && html`<${Curves} metrics=${metrics.data} alerts=${alerts.data || []} route=${route} theme=${theme} />`}
    ${tab === "time" && metrics.data && html`<${Time} metrics=${metrics.data} theme=${theme} /><${Timeline} run=${route.run} />`}
    ${tab === "ledger" && html`<${Ledger} ledger=${overview.data.ledger} theme=${theme} />`}
    ${tab === "flow" && overview.data.flow && html`<img src=${overview.data.flow} alt="data flow of a training step" style=${{ maxWidth: "100%" }} />`}
    ${tab === "config" && html`<${Config} run=${route.run} command=${record.command || []} />`}
    ${tab === "environment" && html`<${Environment} record=${record} />`}
  </div></div>`;
}

// All runs of the viewer, the first page where there are several.
export function Runs({ state }) {
  const { data, error } = useData("summaries", {}, `${state.status} ${state.step}`);
  if (error) return html`<${Failure} error=${error} />`;
  return html`<div class="scroll"><div class="pad"><h1 style=${{ marginBottom: "12px" }}>Runs</h1>
    <table class="table"><thead><tr><th>run</th><th>status</th><th class="right">step</th><th class="right">result</th><th class="roomy">metric</th><th class="right roomy">took</th><th class="roomy">started</th></tr></thead>
      <tbody>${(data || []).map((run) => html`<tr key=${run.name}><td><a href=${link(run.name, "run")}>${run.name}</a></td><td><span class="row"><span class="dot ${run.status}"></span>${run.status}</span></td><td class="right num">${fmt(run.step)}</td><td class="right num" title=${run.metric}>${fmt(run.result)}</td><td class="mono muted roomy">${run.metric}</td><td class="right num muted roomy">${seconds(run.seconds)}</td><td class="num muted roomy">${when(run.started)}</td></tr>`)}</tbody></table></div></div>`;
}

const when = (started) => (started ? started.slice(0, 16).replace("T", " ") : "–");

function Alerts({ alerts, run }) {
  if (!alerts?.length) return null;
  return html`<section aria-label="alerts" class="stack" style=${{ marginBottom: "16px" }}>
    ${alerts.slice(0, 6).map((alert, place) => html`<details key=${place} class="card alert" open=${place === 0}>
      <summary><span class="warn">▲</span> ${alert.detector && html`<b>${alert.detector}</b> `}${alert.what} ${alert.step !== null && html`<a href=${link(run, "groups", [], { q: `step=${alert.step}` })}>step ${alert.step}</a>`}</summary>
      ${alert.why && html`<p class="muted">${alert.why}</p>`}
      <ol>${alert.causes.map((cause) => html`<li key=${cause}>${cause}</li>`)}</ol>
      ${alert.samples.length > 0 && html`<p class="muted">Look at ${alert.samples.map((sample) => html`<a key=${`${sample.uid}#${sample.index}`} href=${link(run, "tokens", [sample.step, sample.uid, sample.index, 0])}>${sample.uid}#${sample.index}</a> `)}</p>`}
    </details>`)}
    ${alerts.length > 6 && html`<span class="muted">and ${plural(alerts.length - 6, "older alert")}</span>`}
  </section>`;
}

function Curves({ metrics, alerts, route, theme }) {
  const [space, setSpace] = useState("main");
  const [filter, setFilter] = useState("");
  const names = Object.keys(metrics.columns);
  const main = [...new Set([...metrics.headline.filter((name) => name.startsWith("val-core/")), ...HEADLINE, ...metrics.headline])].filter((name) => names.includes(name));
  const spaces = [...new Set(names.map((name) => name.split("/")[0]))];
  const shown = filter ? names.filter((name) => name.toLowerCase().includes(filter.toLowerCase())) : space === "main" ? main : names.filter((name) => name.startsWith(`${space}/`) || name === space);
  if (!names.length) return html`<p class="muted">The run has no metrics yet.</p>`;
  const marks = alerts.map((alert) => alert.step).filter((step) => step !== null);
  return html`
    <div class="row wrap" style=${{ marginBottom: "12px" }}>
      <select aria-label="group of metrics" onChange=${(event) => setSpace(event.target.value)}><option value="main">main metrics</option>${spaces.map((name) => html`<option key=${name} selected=${name === space}>${name}</option>`)}</select>
      <input class="input" style=${{ width: "240px" }} aria-label="filter metrics" placeholder="metric name" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <span class="muted num">${shown.length} of ${plural(names.length, "metric")}; drag to zoom, double-click to reset, click to see that step's answers</span>
    </div>
    <div class="charts">${shown.slice(0, 60).map((name) => html`<${OneCurve} key=${name} name=${name} metrics=${metrics} marks=${marks} theme=${theme} onStep=${(step) => go(link(route.run, "groups", [], { q: `step=${step}` }))} />`)}</div>`;
}

function OneCurve({ name, metrics, ...rest }) {
  const series = useMemo(() => [{ name, values: metrics.columns[name] }], [metrics, name]);
  return html`<${Chart} title=${name} about=${metrics.about[name]} steps=${metrics.steps} series=${series} ...${rest} />`;
}

function Time({ metrics, theme }) {
  const names = Object.keys(metrics.columns).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step");
  const sum = (name) => metrics.columns[name].reduce((total, value) => total + (value || 0), 0);
  const sorted = names.map((name) => ({ name: name.slice(9), values: metrics.columns[name], total: sum(name) })).sort((a, b) => b.total - a.total);
  if (!sorted.length) return html`<p class="muted">No times were recorded.</p>`;
  const whole = sorted.reduce((total, one) => total + one.total, 0);
  const main = sorted.slice(0, 6);
  const series = useMemo(() => main, [metrics]);
  return html`<div class="charts wide"><${Chart} title="seconds per step, by stage" steps=${metrics.steps} series=${series} stacked theme=${theme} height=${220} /></div>
    <table class="table" style=${{ marginTop: "14px", maxWidth: "640px" }}><thead><tr><th>stage</th><th class="right">seconds</th><th class="right">share</th><th></th></tr></thead>
      <tbody>${sorted.map((one) => html`<tr key=${one.name}><td class="mono">${one.name}</td><td class="right num">${fmt(one.total)}</td><td class="right num">${fmt((100 * one.total) / whole, 2)} %</td><td style=${{ width: "45%" }}><i class="meter" style=${{ width: `${(100 * one.total) / sorted[0].total}%` }}></i></td></tr>`)}</tbody></table>`;
}

// What every process did during a step: one line of bars for each depth of nesting; waits are hatched.
function Timeline({ run }) {
  const [step, setStep] = useState(-1);
  const [at, setAt] = useState(null);
  const { data, error } = useData("timeline", { run, step });
  if (error && !embedded) return html`<${Failure} error=${error} />`;
  if (!data?.steps.length) return null;
  const place = data.steps.indexOf(data.step);
  const go_to = (change) => data.steps[place + change] !== undefined && setStep(data.steps[place + change]);
  const percent = (value) => `${(100 * value) / data.seconds}%`;
  return html`<section class="timeline" aria-label="timeline of the processes">
    <div class="row"><b>What each process did</b>
      <button class="button quiet small" disabled=${place <= 0} onClick=${() => go_to(-1)} aria-label="previous step">‹</button><span class="num">step ${data.step}, ${seconds(data.seconds)}</span>
      <button class="button quiet small" disabled=${place === data.steps.length - 1} onClick=${() => go_to(1)} aria-label="next step">›</button>
      <span class="muted num">${at ? `${at[0]}: ${seconds(at[2] - at[1])}${at[3] ? ", a wait" : ""}` : "point at a bar"}</span></div>
    ${data.processes.map((process) => html`<div key=${process.name} class="process"><span class="mono">${process.name}</span><div>
      ${process.rows.map((row, number) => html`<div key=${number} class="bars">${row.map((span, index) => html`<i key=${index} class=${span[3] ? "wait" : ""} style=${{ left: percent(span[1]), width: percent(span[2] - span[1]), "--hue": hue(span[0]) }} title=${`${span[0]}: ${seconds(span[2] - span[1])}`} onMouseEnter=${() => setAt(span)}>${span[2] - span[1] > data.seconds / 14 ? span[0] : ""}</i>`)}</div>`)}
    </div></div>`)}
    ${data.left_out > 0 && html`<p class="muted">${plural(data.left_out, "shorter span")} not shown; <span class="mono">hone profile ${run} --trace FILE</span> writes all.</p>`}
  </section>`;
}

// A hue for each name, the same in every step.
const hue = (name) => [...name.replace(/\d+/g, "")].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 360, 7);

function Ledger({ ledger, theme }) {
  if (!ledger) return html`<p class="muted">The run has no coverage.jsonl.</p>`;
  if (!ledger.counts) return html`<p class="neg">${ledger.problem}</p>`;
  const series = FATES.filter((fate) => ledger.fates[fate]?.some((count) => count)).map((fate) => ({ name: fate, values: ledger.fates[fate].map((count, place) => count - (ledger.fates[fate][place - 1] || 0)) }));
  const { drawn } = ledger.counts;
  const open = Object.entries(ledger.open).filter(([, count]) => count);
  return html`
    ${ledger.problem && html`<p class="error">${ledger.problem}</p>`}
    <div class="charts wide">${series.length > 0 && html`<${Chart} title="prompts per step, by fate" steps=${ledger.steps} series=${series} stacked theme=${theme} height=${180} />`}</div>
    <table class="table" style=${{ marginTop: "14px", maxWidth: "640px" }}><thead><tr><th>fate</th><th class="right">prompts</th><th class="right">share</th></tr></thead><tbody>
      ${[...FATES.map((fate) => [fate, ledger.counts[fate]]), ...open].map(([name, count]) => html`<tr key=${name}><td>${name.replace("_", " ")}</td><td class="right num">${fmt(count)}</td><td class="right num muted">${fmt((100 * count) / Math.max(1, drawn), 3)} %</td></tr>`)}
      <tr><td><b>drawn</b></td><td class="right num"><b>${fmt(drawn)}</b></td><td></td></tr></tbody></table>
    ${Object.keys(ledger.reasons).length > 0 && html`<h2 style=${{ margin: "18px 0 6px" }}>Reasons</h2><table class="table" style=${{ maxWidth: "640px" }}><tbody>${Object.entries(ledger.reasons).sort((a, b) => b[1] - a[1]).map(([name, count]) => html`<tr key=${name}><td>${name}</td><td class="right num">${fmt(count)}</td></tr>`)}</tbody></table>`}`;
}

const text = (value) => (value === null || value === undefined ? "null" : typeof value === "string" ? value || '""' : JSON.stringify(value));

function Config({ run, command }) {
  const config = useData("config", { run }).data || [];
  const [filter, setFilter] = useState("");
  const [all, setAll] = useState(false);
  const shown = config.filter((entry) => (all || filter || entry.source !== "default") && `${entry.key} ${text(entry.value)} ${entry.source}`.toLowerCase().includes(filter.toLowerCase()));
  return html`
    <pre class="mono card" style=${{ padding: "10px 12px", marginBottom: "12px", whiteSpace: "pre-wrap", overflowWrap: "anywhere" }}>${command.join(" ").replace(/^\S*\/(hone|hone\/cli\/main\.py) /, "hone ")}</pre>
    <div class="row wrap" style=${{ marginBottom: "10px" }}><input class="input" style=${{ width: "280px" }} aria-label="filter keys" placeholder="key, value or source" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <label class="row"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} /> defaults too</label><span class="muted num">${shown.length} of ${plural(config.length, "key")}</span></div>
    <table class="table stacked"><thead class="roomy"><tr><th>key</th><th>value</th><th>source</th><th>default</th></tr></thead><tbody>
      ${shown.slice(0, 600).map((entry) => html`<tr key=${entry.key}><td class="mono">${entry.key}</td><td class="mono"><b>${text(entry.value)}</b></td><td><span class="chip ${entry.source === "command line" ? "accent" : entry.source.startsWith("preset") ? "pos" : ""}">${entry.source}</span></td><td class="mono faint roomy">${entry.source === "default" ? "" : text(entry.default)}</td></tr>`)}</tbody></table>`;
}

function rowsOf(value, prefix = "") {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) return Object.entries(value).flatMap(([key, entry]) => rowsOf(entry, prefix ? `${prefix}.${key}` : key));
  return [[prefix, Array.isArray(value) ? value.map(text).join(", ") : text(value)]];
}

function Environment({ record }) {
  const parts = ["versions", "hardware", "git", "memory", "rewards"].filter((name) => record[name] && Object.keys(record[name]).length);
  return html`<div class="columns">${parts.map((name) => html`<section key=${name}><h2>${name}</h2><table class="table"><tbody>${rowsOf(record[name]).map(([key, value]) => html`<tr key=${key}><td class="muted">${key}</td><td class="mono">${value}</td></tr>`)}</tbody></table></section>`)}</div>`;
}
