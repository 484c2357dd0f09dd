// The tokens of one answer, coloured by a number, and the chain from reward to weight of the token under the pointer.
import { html, useState, useMemo, useEffect, useRef } from "./vendor/preact.js";
import { useData, link, go, fmt, signed, useKeys } from "./lib.js";
import { Failure, Pieces, Segments } from "./widgets.js";
import { LabelBox } from "./labels.js";

const MODES = [
  ["advantages", "advantage", "diverging"],
  ["log_ratio", "log-ratio", "diverging"],
  ["engine_gap", "engine gap", "diverging"],
  ["entropy", "entropy", "single"],
  ["correction", "correction", "around1"],
  ["loss_mask", "mask", "mask"],
  ["token_versions", "version", "classes"],
  ["share", "loss share", "diverging"],
  ["surprise", "surprise", "single"],
];
const BLOCK = 400;
const SIGNED = ["reward", "advantage", "share"];
const ABOUT = {
  advantages: "advantage of the token", log_ratio: "new minus old log-prob: how far the update moved the token", engine_gap: "trainer minus engine log-prob, same weights",
  entropy: "entropy of the distribution in nats", correction: "weight of the rollout correction", loss_mask: "tokens that the update learned from; others were given, or rejected",
  token_versions: "weight version that sampled the token", share: "share of the update's loss", surprise: "minus the log-prob of the sampled token",
};

export function TokensPage({ route, state }) {
  const [step, uid, index, part] = route.args;
  const { kind } = route.params;
  const address = { run: route.run, kind, step, uid, index, part };
  const { data: stored, error } = useData("tokens", address);
  const factors = useData("factors", address).data; // of the loss: the first ones of a step take some seconds
  const data = useMemo(() => stored && { ...stored, chain: [...stored.chain, ...(factors || [])] }, [stored, factors]);
  const group = useData("group", { run: route.run, kind, step, uid });
  const [picked, setPicked] = useState(null);
  const [hovered, setHovered] = useState(null);
  useEffect(() => setPicked(null), [step, uid, index, part]);
  const columns = useMemo(() => (data ? withDerived(data) : {}), [data]);
  const modes = MODES.filter(([name]) => columns[name]?.some((value) => value !== null));
  const mode = modes.find(([name]) => name === route.params.by) || modes[0];
  const choose = (name) => go(link(route.run, "tokens", route.args, { ...route.params, by: name }), true);
  const answers = group.data?.answers || [];
  const place = answers.findIndex((answer) => String(answer.index) === index && String(answer.part) === (part || "0"));
  const other = (change) => {
    const next = answers[place + change];
    if (next) go(link(route.run, "tokens", [step, uid, next.index, next.part], route.params), true);
  };
  const move = (change) => data && setPicked((value) => Math.min(data.texts.length - 1, Math.max(0, (value ?? -1) + change)));
  useKeys({
    l: () => move(1), h: () => move(-1), ArrowRight: () => move(1), ArrowLeft: () => move(-1), j: () => other(1), k: () => other(-1), e: () => go(link(route.run, "episode", route.args, { kind })),
    ...Object.fromEntries(modes.map(([name], number) => [String(number + 1), () => choose(name)])),
  });
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return null;
  const pointed = hovered ?? picked;
  const at = pointed !== null && pointed < data.texts.length ? pointed : null; // the answer before may have had more tokens
  return html`
    <div class="bar">
      <a href=${link(route.run, "group", [step, uid], { kind })}>group</a><span class="faint">/</span><b class="num">#${index}${data.part ? `.${data.part}` : ""}</b>
      <button class="button quiet small" disabled=${place <= 0} onClick=${() => other(-1)} aria-label="previous answer">‹</button><button class="button quiet small" disabled=${place < 0 || place >= answers.length - 1} onClick=${() => other(1)} aria-label="next answer">›</button>
      <span class="num">score <b>${fmt(data.score)}</b></span><span class="muted num">${fmt(data.ids.length)} tokens, step ${data.step}, ${data.fate}</span><span class="grow"></span>
      ${modes.length > 0 && html`<${Segments} label="colour" value=${mode[0]} onChange=${choose} options=${modes.map(([name, title], number) => [name, title, `${ABOUT[name]} (${number + 1})`])} />`}
    </div>
    <div class="tokens-page">
      <div class="scroll pad" onMouseLeave=${() => setHovered(null)}>
        ${mode && html`<${Legend} mode=${mode} values=${columns[mode[0]]} />`}
        <div class="text faint" style=${{ marginBottom: "10px" }}>${data.prompt_texts.length ? html`<${Pieces} pieces=${data.prompt_texts} pictures=${data.prompt_pictures} run=${route.run} kind=${kind} />` : data.prompt}</div>
        <${Body} run=${route.run} kind=${kind} data=${data} values=${mode ? columns[mode[0]] : null} mode=${mode} at=${picked} onHover=${setHovered} onPick=${setPicked} />
      </div>
      <aside class="inspector scroll" aria-label="token" aria-live="polite">
        ${at === null ? html`<p class="muted">Point at a token, or move with <kbd>h</kbd> <kbd>l</kbd>, to see how its weight came about.</p>` : html`<${Inspector} data=${data} columns=${columns} at=${at} />`}
        <${Summary} data=${data} columns=${columns} />
        <${LabelBox} run=${route.run} kind=${kind} address=${{ step: data.step, uid: data.uid, index: data.index, part: data.part }} version=${state.labels} />
      </aside>
    </div>`;
}

function withDerived(data) {
  const columns = { ...data.columns };
  const mask = columns.response_mask;
  for (const name of ["advantages", "entropy", "correction"]) {
    if (columns[name] && mask) columns[name] = columns[name].map((value, place) => (mask[place] ? value : null));
  }
  const sampled = columns.rollout_log_probs || columns.old_log_probs;
  if (sampled) columns.surprise = sampled.map((value, place) => (columns.response_mask?.[place] && value !== null ? -value : null));
  const share = data.chain.find((factor) => factor.name === "share");
  if (share) columns.share = share.values;
  if (!columns.loss_mask && columns.response_mask) columns.loss_mask = columns.response_mask;
  return columns;
}

function limitOf(values) {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1 : 1;
}

function colourOf([, , kind], values) {
  const limit = limitOf(kind === "around1" ? values.map((value) => (value === null ? null : value - 1)) : values);
  const lowest = Math.min(...values.filter((value) => value !== null && value >= 0));
  const mix = (variable, share) => `color-mix(in oklab, var(${variable}) ${Math.round(Math.min(1, share) * 50)}%, transparent)`;
  return (value) => {
    if (value === null) return "";
    if (kind === "mask") return value ? mix("--pos", 0.45) : mix("--neg", 0.3);
    if (kind === "classes") return value < 0 ? "" : `color-mix(in oklab, var(${["--accent", "--pos", "--warn", "--neg"][(value - lowest) % 4]}) 34%, transparent)`;
    if (kind === "single") return value > 0 ? mix("--accent", value / limit) : "";
    const shifted = kind === "around1" ? value - 1 : value;
    return shifted === 0 ? "" : mix(shifted > 0 ? "--pos" : "--neg", Math.abs(shifted) / limit);
  };
}

function Legend({ mode, values }) {
  const limit = limitOf(mode[2] === "around1" ? values.map((value) => (value === null ? null : value - 1)) : values);
  const colour = colourOf(mode, values);
  const ends = { diverging: [-limit, 0, limit], around1: [1 - limit, 1, 1 + limit], single: [0, limit / 2, limit] }[mode[2]];
  return html`<div class="row faint" style=${{ marginBottom: "12px", fontSize: "11.5px" }}><span>${ABOUT[mode[0]]}</span><span class="grow"></span>
    ${ends ? ends.map((value) => html`<span key=${value} class="num row" style=${{ gap: "4px" }}><i class="swatch" style=${{ background: colour(value) || "var(--sunken)" }}></i>${fmt(value, 2)}</span>`) : mode[2] === "mask" ? html`<span class="row" style=${{ gap: "4px" }}><i class="swatch" style=${{ background: colour(1) }}></i>learned from<i class="swatch" style=${{ background: colour(0) }}></i>not</span>` : ""}</div>`;
}

function Body({ run, kind, data, values, mode, at, onHover, onPick }) {
  const box = useRef(null);
  const blocks = useMemo(() => {
    const colour = values ? colourOf(mode, values) : () => "";
    const mask = data.columns.response_mask;
    const result = [];
    for (let start = 0; start < data.texts.length; start += BLOCK) {
      const tokens = data.texts.slice(start, start + BLOCK).map((token, offset) => {
        const place = start + offset;
        return html`<span key=${place} data-token=${place} class=${mask && !mask[place] ? "given" : ""} style=${{ background: values ? colour(values[place] ?? null) : "" }}>${data.pictures[place] ? html`<${Pieces} pieces=${[token]} pictures=${[data.pictures[place]]} ...${{ run, kind }} />` : token}</span>`;
      });
      result.push(html`<div key=${start} class="block">${tokens}</div>`);
    }
    return result;
  }, [run, kind, data, values, mode?.[0]]);
  useEffect(() => {
    const token = box.current.querySelector(`[data-token="${at}"]`);
    token?.classList.add("at");
    token?.scrollIntoView({ block: "nearest" });
    return () => token?.classList.remove("at");
  }, [at, blocks]);
  const placeOf = (event) => (event.target.dataset?.token === undefined ? null : Number(event.target.dataset.token));
  return html`<div class="text tokens" ref=${box} onMouseOver=${(event) => onHover(placeOf(event))} onClick=${(event) => onPick(placeOf(event))}>${blocks}</div>`;
}

// Why a token has no weight: from its share of the loss where that is computed (the KL loss can add to an advantage of 0), else from
// the first stored factor that is 0.
function reason(data, at) {
  const mask = data.columns.response_mask?.[at];
  if (mask === 0) return "Its weight is 0: the policy did not sample it (tool output or text of another).";
  const share = data.chain.find((factor) => factor.name === "share");
  if (share?.why[at]) return `It has no weight: ${share.why[at]}.`;
  for (const factor of share ? [] : data.chain) {
    if (factor.values[at] !== 0) continue;
    if (factor.name === "advantage") return "Its weight is 0: the advantage is 0, as all answers to the prompt are equally good.";
    if (factor.name === "mask") return "Its weight is 0: the rollout correction rejected it.";
    if (factor.name === "correction") return "Its weight is 0: the rollout correction gives it none.";
  }
  return data.fate === "trained" ? "" : `No update used it: the group's fate is ${data.fate}.`;
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

function Inspector({ data, columns, at }) {
  const why = reason(data, at);
  const rest = ["log_ratio", "engine_gap", "reference_gap", "old_log_probs", "new_log_probs", "rollout_log_probs", "sampling_log_probs", "ref_log_probs", "entropy", "values", "returns", "token_versions"].filter((name) => columns[name]);
  return html`<section class="stack">
    <div class="row"><code class="token-text">${visible(data.texts[at])}</code><span class="grow"></span><span class="faint num">${at} · id ${data.ids[at] ?? "–"}</span></div>
    <ol class="chain">${data.chain.map((factor) => html`<li key=${factor.name} class=${factor.values[at] === 0 && factor.name !== "reward" ? "zero" : ""}>
      <div class="row"><span>${factor.name}</span><span class="grow"></span><b class="num">${SIGNED.includes(factor.name) ? signed(factor.values[at], 4) : fmt(factor.values[at], 4)}</b></div>
      <div class="row faint mono"><span class="ellipsis" title=${factor.key}>${factor.key}</span>${factor.config !== null && factor.config !== undefined && html`<span class="ellipsis">= ${typeof factor.config === "object" ? JSON.stringify(factor.config) : factor.config}</span>`}</div></li>`)}</ol>
    ${why && html`<p class="chip-block warn">${why}</p>`}
    <dl class="terms">${rest.map((name) => html`<dt key=${name}>${name.replaceAll("_", " ")}</dt><dd>${fmt(columns[name][at], 4)}</dd>`)}
      ${columns.log_ratio && columns.log_ratio[at] !== null ? html`<dt>ratio</dt><dd>${fmt(Math.exp(columns.log_ratio[at]), 4)}</dd>` : ""}</dl>
  </section>`;
}

function Summary({ data, columns }) {
  const mean = (name) => {
    const known = (columns[name] || []).filter((value, place) => value !== null && columns.response_mask?.[place]);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  const sampled = (columns.response_mask || []).filter(Boolean).length;
  const learned = (columns.loss_mask || []).filter(Boolean).length;
  return html`<section class="stack" style=${{ marginTop: "18px" }}><h2>Answer</h2><dl class="terms"><dt>sampled tokens</dt><dd>${fmt(sampled)}</dd><dt>in the loss</dt><dd>${fmt(learned)}</dd><dt>mean advantage</dt><dd>${signed(mean("advantages"))}</dd><dt>mean entropy</dt><dd>${fmt(mean("entropy"))}</dd><dt>ended by</dt><dd>${data.stop_reason || "–"}</dd>
    ${Object.entries(data.terms || {}).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${fmt(value)}</dd>`)}</dl></section>`;
}
