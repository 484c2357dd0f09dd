// One episode: its turns as a tree with sub-agents and rewritten segments, tool input and output, and where the time went.
import { html } from "./vendor/preact.js";
import { useData, link, go, fmt, signed, seconds, tone, plural, useKeys } from "./lib.js";
import { Failure, Pictured } from "./widgets.js";

export function EpisodePage({ route }) {
  const [step, uid, index, part] = route.args;
  const { kind } = route.params;
  const { data, error } = useData("episode", { run: route.run, kind, step, uid, index });
  const other = (change) => {
    const next = data?.siblings[data.siblings.indexOf(data.index) + change];
    if (next !== undefined) go(link(route.run, "episode", [step, uid, next, 0], route.params), true);
  };
  useKeys({ l: () => other(1), h: () => other(-1), ArrowRight: () => other(1), ArrowLeft: () => other(-1), t: () => go(link(route.run, "tokens", route.args, { kind })) });
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return null;
  const turns = data.lanes.reduce((sum, lane) => sum + lane.entries.filter((entry) => entry.turn !== null).length, 0);
  const calls = data.lanes.flatMap((lane) => lane.entries.flatMap((entry) => entry.calls));
  return html`
    <div class="bar"><a href=${link(route.run, "group", [step, uid], { kind })}>group</a><span class="faint">/</span><b class="num">#${index}</b>
      <button class="button quiet small" onClick=${() => other(-1)} disabled=${data.siblings.indexOf(data.index) <= 0} aria-label="previous answer">‹</button><button class="button quiet small" onClick=${() => other(1)} disabled=${data.siblings.indexOf(data.index) >= data.siblings.length - 1} aria-label="next answer">›</button>
      <span>score <b class="num">${fmt(data.score)}</b></span><span class="muted">${plural(turns, "turn")}, ${plural(calls.length, "call")}${data.end ? `, ended by ${data.end}` : ""}${data.retries ? `, played ${data.retries + 1} times` : ""}</span>
      <span class="grow"></span>${data.ground_truth !== null && data.ground_truth !== "" && html`<span class="muted">expected <b class="mono">${typeof data.ground_truth === "string" ? data.ground_truth : JSON.stringify(data.ground_truth)}</b></span>`}
      <a class="button small" href=${link(route.run, "tokens", [step, uid, index, part || 0], { kind })}>tokens <kbd>t</kbd></a></div>
    <div class="scroll"><div class="pad episode">
      ${data.error && html`<div class="error"><b>The episode broke.</b><pre class="text">${data.error}</pre></div>`}
      <${Times} data=${data} calls=${calls} />
      ${data.segments.length > 1 && html`<${Segmented} segments=${data.segments} />`}
      <${Lane} run=${route.run} kind=${kind} lane=${data.lanes[0]} children=${data.lanes.slice(1)} />
    </div></div>`;
}

// Time as lanes: the engine, and each tool.
function Times({ data, calls }) {
  const { generate, outside } = data.times;
  const byTool = {};
  for (const call of calls) if (call.seconds) byTool[call.name || "?"] = (byTool[call.name || "?"] || 0) + call.seconds;
  const lanes = [["engine", generate, "--accent"], ...Object.entries(byTool).map(([name, value]) => [name, value, "--pos"])].filter(([, value]) => value);
  const rest = (data.seconds || 0) - (generate || 0) - (outside || Object.values(byTool).reduce((a, b) => a + b, 0));
  if (rest > 0.001 && lanes.length) lanes.push(["other", rest, "--faint"]);
  if (!lanes.length) return null;
  const longest = Math.max(...lanes.map(([, value]) => value));
  return html`<section class="card times" aria-label="time"><h2>Time <span class="muted num">${seconds(data.seconds)}</span></h2>${lanes.map(([name, value, colour]) => html`<div key=${name} class="lane-row"><span class="ellipsis">${name}</span><i style=${{ width: `${Math.max(0.5, (100 * value) / longest)}%`, background: `var(${colour})` }}></i><span class="num muted">${seconds(value)}</span></div>`)}</section>`;
}

function Segmented({ segments }) {
  const longest = Math.max(...segments.map((segment) => segment.tokens));
  return html`<section class="card times" aria-label="segments"><h2>Segments <span class="muted">the history was rewritten ${segments.length - 1}×</span></h2>
    ${segments.map((segment) => html`<div key=${segment.part} class="lane-row"><span>part ${segment.part}</span><span class="segment"><i style=${{ width: `${(100 * segment.shared) / longest}%`, background: "var(--line-strong)" }} title=${`${segment.shared} tokens shared`}></i><i style=${{ width: `${(100 * (segment.tokens - segment.shared)) / longest}%`, background: "var(--accent)" }}></i></span><span class="num muted">${fmt(segment.tokens)} tokens</span></div>`)}</section>`;
}

// The messages of a lane without those of tools whose output is shown at the call.
function shownEntries(entries) {
  let outputs = [];
  return entries.filter((entry) => {
    if (entry.turn !== null) outputs = entry.calls.map((call) => call.result);
    return !(entry.message.role === "tool" && outputs.includes(entry.message.content));
  });
}

function Lane({ lane, children = [], ...at }) {
  return html`<ol class="lane" aria-label=${lane.name}>${shownEntries(lane.entries).map((entry, place) => html`<${Entry} key=${place} ...${at} entry=${entry} children=${children.filter((child) => entry.turn !== null && child.after === entry.turn)} />`)}
    ${children.filter((child) => child.after === null).map((child) => html`<li key=${child.name}><${Child} ...${at} lane=${child} /></li>`)}</ol>`;
}

const Child = ({ lane, ...at }) => html`<details class="child" open><summary>${lane.name} <span class="faint">from turn ${lane.first + 1}</span></summary><${Lane} ...${at} lane=${lane} /></details>`;

function Entry({ entry, children, run, kind }) {
  const { message, turn, reward, value, calls } = entry;
  const content = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content, null, 1) : "";
  const isTool = message.role === "tool";
  const text = html`<${Pictured} text=${content} images=${entry.images} ...${{ run, kind }} />`;
  return html`<li class="turn ${message.role}">
    <div class="row who"><b>${turn !== null ? `turn ${turn + 1}` : message.role}</b>${message.name && html`<span class="mono">${message.name}</span>`}${reward ? html`<span class="chip ${tone(reward)}">reward ${signed(reward)}</span>` : ""}${value !== null && html`<span class="chip accent" title="mean reward of the answers that were forked here">fork, value ${fmt(value)}</span>`}</div>
    ${message.reasoning_content && html`<details class="thoughts"><summary>thoughts</summary><div class="text">${message.reasoning_content}</div></details>`}
    ${content && (isTool && content.length > 900 ? html`<details><summary class="muted">${plural(content.length, "character")} of output</summary><div class="text">${text}</div></details>` : html`<div class="text">${text}</div>`)}
    ${calls.map((call, place) => html`<${Call} key=${place} call=${call} written=${message.tool_calls?.[place]?.function?.arguments} />`)}
    ${!calls.length && (message.tool_calls || []).map((call, place) => html`<div key=${place} class="call card"><span class="mono">${call.function?.name}(${call.function?.arguments})</span></div>`)}
    ${children.map((child) => html`<${Child} key=${child.name} ...${{ run, kind }} lane=${child} />`)}
  </li>`;
}

function readable(value) {
  const line = JSON.stringify(value);
  return line.length < 90 ? line : JSON.stringify(value, null, 1);
}

function Call({ call, written }) {
  return html`<div class="call card">
    <div class="row"><b class="mono">${call.name || "?"}</b><span class="chip ${call.status === "ok" ? "pos" : "neg"}">${call.status}</span>${call.attempts > 1 && html`<span class="chip warn">${call.attempts} tries</span>`}${call.truncated && html`<span class="chip warn">output cut</span>`}${call.reward ? html`<span class="chip ${tone(call.reward)}">reward ${signed(call.reward)}</span>` : ""}<span class="grow"></span>${call.seconds !== undefined && html`<span class="num faint">${seconds(call.seconds)}</span>`}</div>
    <dl class="io"><dt>in</dt><dd class="text">${call.arguments === null ? html`<span class="neg">${written || "not readable"}</span>` : readable(call.arguments)}</dd><dt>out</dt><dd class="text">${call.result}</dd></dl></div>`;
}
