// Two runs, steps or filters compared: numbers, paired prompts, phrases, tools and ends; and a run under an edited reward.
import { html, useState, useEffect } from "./vendor/preact.js";
import { useData, link, go, fmt, signed, tone, get, post, plural } from "./lib.js";
import { Failure, Nothing } from "./widgets.js";

const NUMBERS = [["answers", "answers"], ["score", "mean score"], ["right", "right"], ["tokens", "tokens"], ["entropy", "entropy"], ["turns", "turns"], ["calls", "tool calls"], ["toolerrors", "tool errors"]];

export function Compare({ route, state, runs }) {
  const fifth = Math.max(1, Math.round(state.steps.length / 5));
  const early = state.steps[fifth - 1];
  const late = state.steps[state.steps.length - fifth];
  const { kind } = route.params;
  const given = { run_a: route.run, q_a: `step<=${early}`, run_b: route.run, q_b: `step>=${late}`, ...route.params };
  const [form, setForm] = useState(given);
  useEffect(() => setForm(given), [route.run]);
  const { data, error, loading } = useData(state.steps.length ? "compare" : "", { run_a: given.run_a, q_a: given.q_a, run_b: given.run_b, q_b: given.q_b, kind });
  const apply = (event) => {
    event.preventDefault();
    go(link(route.run, "compare", [], { kind, ...form }), true);
  };
  const side = (name) => html`<div class="row grow"><b class="side side-${name}">${name.toUpperCase()}</b>
    ${runs.runs.length > 1 && html`<select aria-label=${`run ${name}`} onChange=${(event) => setForm({ ...form, [`run_${name}`]: event.target.value })}>${runs.runs.map((run) => html`<option key=${run.name} selected=${run.name === form[`run_${name}`]}>${run.name}</option>`)}</select>`}
    <input class="input mono" aria-label=${`filter ${name}`} value=${form[`q_${name}`]} onInput=${(event) => setForm({ ...form, [`q_${name}`]: event.target.value })} /></div>`;
  return html`
    <form class="bar" onSubmit=${apply}>${side("a")}${side("b")}<button class="button primary" disabled=${loading}>compare</button></form>
    ${error && html`<${Failure} error=${error} />`}
    ${!data && !error && state.steps.length > 0 && html`<${Nothing} title="Comparing …" />`}
    ${!state.steps.length && html`<${Nothing} title="No rollouts yet" />`}
    ${data && html`<div class="scroll"><div class="pad">
      <div class="columns two">
        <section><h2>Numbers</h2><table class="table"><thead><tr><th></th><th class="right side-a">A</th><th class="right side-b">B</th><th class="right">B − A</th></tr></thead><tbody>
          ${NUMBERS.map(([name, title]) => html`<${Difference} key=${name} title=${title} values=${data.sides.map((one) => one[name])} plain=${name !== "score" && name !== "right"} />`)}</tbody></table>
          <p class="muted" style=${{ marginTop: "10px" }}>${data.paired.count ? html`${plural(data.paired.count, "prompt")} in both: <b class="pos num">${data.paired.better}</b> better in B, <b class="neg num">${data.paired.worse}</b> worse${data.paired.mean !== null ? html`, mean difference <b class="num">${signed(data.paired.mean)}</b>${data.paired.error ? ` ± ${fmt(data.paired.error, 2)}` : ""}` : ""}.
          ${data.same_seed.pairs ? ` ${plural(data.same_seed.pairs, "answer")} with the same prompt and seed; ${data.same_seed.equal} have the same text, mean difference ${signed(data.same_seed.difference)}.` : ""}` : "No prompt is in both."}</p></section>
        <section><${Shares} title="End of the answer" rows=${data.stops} /><${Shares} title="End of the episode" rows=${data.ends} /><${Shares} title="Tools" rows=${data.tools} /></section>
      </div>
      <div class="columns two" style=${{ marginTop: "22px" }}>
        <${Phrases} title="More frequent in B" rows=${data.phrases.more} /><${Phrases} title="Less frequent in B" rows=${data.phrases.less} /></div>
      ${data.paired.count > 0 && html`<h2 style=${{ margin: "22px 0 6px" }}>Paired prompts</h2>
      <table class="table"><thead><tr><th>prompt</th><th class="right side-a">A</th><th class="right side-b">B</th><th class="right">B − A</th><th class="right roomy">tokens A</th><th class="right roomy">tokens B</th><th></th></tr></thead><tbody>
        ${data.paired.prompts.slice(0, 200).map((prompt) => html`<tr key=${`${prompt.source} ${prompt.row}`}><td class="ellipsis">${prompt.prompt || prompt.row}</td>
          <td class="right num">${fmt(prompt.scores[0])}</td><td class="right num">${fmt(prompt.scores[1])}</td><td class="right num ${tone(prompt.scores[1] - prompt.scores[0])}">${signed(prompt.scores[1] - prompt.scores[0])}</td>
          <td class="right num muted roomy">${fmt(Math.round(prompt.tokens[0]))}</td><td class="right num muted roomy">${fmt(Math.round(prompt.tokens[1]))}</td>
          <td class="right"><a href=${link(given.run_a, "group", [prompt.at[0].step, prompt.at[0].uid], { kind })}>A</a> · <a href=${link(given.run_b, "group", [prompt.at[1].step, prompt.at[1].uid], { kind })}>B</a></td></tr>`)}</tbody></table>`}
    </div></div>`}`;
}

function Difference({ title, values, plain }) {
  const change = values[0] === null || values[1] === null ? null : values[1] - values[0];
  return html`<tr><td>${title}</td><td class="right num">${fmt(values[0])}</td><td class="right num">${fmt(values[1])}</td><td class="right num ${plain ? "muted" : tone(change)}">${signed(change)}</td></tr>`;
}

function Shares({ title, rows }) {
  if (!rows.length) return null;
  return html`<div style=${{ marginBottom: "14px" }}><h2>${title}</h2><table class="table"><tbody>${rows.slice(0, 10).map((row) => html`<tr key=${row.name}><td class="mono">${row.name}</td><td style=${{ width: "46%" }}><${Twin} row=${row} most=${Math.max(...rows.map((other) => Math.max(other.first, other.second)))} /></td><td class="right num">${percent(row.first)}</td><td class="right num">${percent(row.second)}</td></tr>`)}</tbody></table></div>`;
}

const percent = (share) => `${fmt(100 * share, 3)} %`;
const Twin = ({ row, most }) => html`<i class="meter a" style=${{ width: `${(100 * row.first) / most}%` }}></i><i class="meter b" style=${{ width: `${(100 * row.second) / most}%` }}></i>`;

function Phrases({ title, rows }) {
  return html`<section><h2>${title}</h2>${rows.length ? html`<table class="table"><tbody>${rows.map((row) => html`<tr key=${row.phrase}><td class="mono">${row.phrase}</td><td style=${{ width: "30%" }}><${Twin} row=${row} most=${1} /></td><td class="right num muted">${percent(row.first)}</td><td class="right num">${percent(row.second)}</td></tr>`)}</tbody></table>` : html`<p class="muted">No phrase differs by more than chance.</p>`}</section>`;
}

const SHARES = [["flipped", "verdicts that flip"], ["reordered_pairs", "pairs in another order"], ["reordered_groups", "groups with such a pair"], ["advantage_signs", "advantages with another sign"], ["tokens", "tokens with another advantage"], ["gradient", "past gradient that would differ"]];

export function Rescore({ route }) {
  const [rewards, setRewards] = useState([]);
  useEffect(() => { get("runs").then((data) => setRewards(data.rewards), () => {}); }, []);
  const [reward, setReward] = useState("");
  const [result, setResult] = useState({});
  const start = async (event) => {
    event.preventDefault();
    setResult({ busy: true });
    try {
      setResult({ data: await post("rescore", { run: route.run, reward }) });
    } catch (error) {
      setResult({ error });
    }
  };
  const { data, error, busy } = result;
  return html`<form class="bar" onSubmit=${start}><label class="row grow"><span class="muted">reward</span><input class="input mono" list="rewards" placeholder="a function of hone view --reward FILE:NAME, or the name of a scorer" value=${reward} onInput=${(event) => setReward(event.target.value)} /><datalist id="rewards">${rewards.map((name) => html`<option value=${name}></option>`)}</datalist></label><button class="button primary" disabled=${busy || !reward}>${busy ? "scoring …" : "score again"}</button></form>
    ${error && html`<${Failure} error=${error} />`}
    ${!data && !error && html`<${Nothing} title="Edit the reward, then score the stored answers again">What would have been different is shown here; the run is not changed. It runs in worker processes on this machine. Whoever has the link of this page reads the runs, adds labels and starts these functions and scorers; no others.</${Nothing}>`}
    ${data && html`<div class="scroll"><div class="pad"><p style=${{ marginBottom: "12px" }}>${plural(data.episodes, "answer")} in ${plural(data.groups, "group")}, ${plural(data.changed, "answer")} would differ.</p>
      <table class="table" style=${{ maxWidth: "460px" }}><tbody>${SHARES.map(([name, title]) => html`<tr key=${name}><td>${title}</td><td class="right num">${percent(data[name])}</td></tr>`)}</tbody></table>
      <table class="table" style=${{ marginTop: "16px" }}><thead><tr><th>step</th><th>answer</th><th class="right">score</th><th class="right">new</th><th class="right">advantage</th><th class="right">new</th></tr></thead><tbody>
        ${data.differences.map((one, place) => html`<tr key=${place}><td class="num">${one.step}</td><td class="ellipsis mono"><a href=${link(route.run, "group", [one.step, one.uid])}>${one.text.slice(-160)}</a></td><td class="right num">${fmt(one.old)}</td><td class="right num">${fmt(one.new)}</td><td class="right num muted">${signed(one.old_advantage)}</td><td class="right num ${tone(one.new_advantage)}">${signed(one.new_advantage)}</td></tr>`)}</tbody></table></div></div>`}`;
}
