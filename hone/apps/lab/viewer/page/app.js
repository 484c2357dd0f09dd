// Frame of the viewer: navigation, search field, theme, help, live updates.
import { html, render, useState, useEffect, useRef } from "./vendor/preact.js";
import { get, link, go, useRoute, useKeys, handleKey, embedded, fmt } from "./lib.js";
import { Failure, Toasts, Segments, copy } from "./widgets.js";
import { Groups, GroupPage } from "./groups.js";
import { RunPage, Runs } from "./run.js";
import { TokensPage } from "./tokens.js";
import { Prompts, PromptPage } from "./prompts.js";
import { Questions, Answers } from "./questions.js";
import { EpisodePage } from "./episode.js";
import { Compare, Rescore } from "./compare.js";

const POLL = 1000;

const VIEWS = {
  ...(embedded ? {} : { runs: { title: "Runs", key: "l", draw: Runs } }),
  run: { title: "Run", key: "r", draw: RunPage },
  groups: { title: "Groups", key: "g", draw: Groups, filters: true },
  group: { parent: "groups", draw: GroupPage },
  tokens: { parent: "groups", draw: TokensPage },
  episode: { parent: "groups", draw: EpisodePage },
  answers: { title: "Answers", key: "a", draw: Answers, filters: true },
  ...(embedded // a file holds groups, and no answers to other questions
    ? {}
    : {
        prompts: { title: "Prompts", key: "p", draw: Prompts, filters: true },
        prompt: { parent: "prompts", draw: PromptPage },
        questions: { title: "Questions", key: "q", draw: Questions },
        compare: { title: "Compare", key: "c", draw: Compare },
        rescore: { title: "Re-score", key: "s", draw: Rescore },
      }),
};

function useTheme() {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const [choice, setChoice] = useState(() => localStorage.getItem("hone-theme") || "");
  const [system, setSystem] = useState(media.matches);
  useEffect(() => {
    const changed = (event) => setSystem(event.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);
  const theme = choice || (system ? "dark" : "light");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    window.dispatchEvent(new CustomEvent("hone-theme"));
  }, [theme]);
  return [theme, () => {
    const next = theme === "dark" ? "light" : "dark";
    localStorage.setItem("hone-theme", next);
    setChoice(next);
  }];
}

// Runs with their states; the shown run's is asked for again while the page is visible.
function useRuns(name) {
  const [runs, setRuns] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    get("runs").then(setRuns, setError);
  }, []);
  useEffect(() => {
    if (!runs || embedded) return;
    const timer = setInterval(async () => {
      if (document.hidden) return;
      try {
        const state = await get("state", { run: name || runs.runs[0].name });
        setRuns((last) => {
          const before = last.runs.find((run) => run.name === state.name);
          if (JSON.stringify(before) === JSON.stringify(state)) return last;
          return { ...last, runs: last.runs.map((run) => (run.name === state.name ? state : run)) };
        });
        setError(null);
      } catch (problem) {
        setError(problem);
      }
    }, POLL);
    return () => clearInterval(timer);
  }, [name, runs !== null]);
  return { runs, error };
}

function App() {
  const route = useRoute();
  const { runs, error } = useRuns(route.run);
  const [theme, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  const search = useRef(null);
  useEffect(() => {
    window.addEventListener("keydown", handleKey);
    return () => window.removeEventListener("keydown", handleKey);
  }, []);
  const state = runs?.runs.find((run) => run.name === route.run) || runs?.runs[0];
  const run = state?.name || "";
  const several = !embedded && runs?.runs.length > 1;
  const view = VIEWS[route.view] ? route.view : several && !route.run ? "runs" : "run";
  useEffect(() => {
    if (runs && (!route.run || !VIEWS[route.view])) go(link(run, view), true);
  }, [runs, route.run, route.view]);
  useKeys({
    "/": () => search.current?.focus(),
    "?": () => setHelp((value) => !value),
    Escape: () => (help ? setHelp(false) : document.activeElement?.blur()),
    d: toggleTheme,
    u: () => history.back(),
    y: () => copy(location.href, "Link copied"),
    ...Object.fromEntries(Object.entries(VIEWS).filter(([, entry]) => entry.key).map(([name, entry]) => [`g ${entry.key}`, () => go(link(run, name))])),
  });
  if (!runs) return error ? html`<${Failure} error=${error} />` : null;
  const entry = VIEWS[view];
  const current = entry.parent || view;
  const kind = route.params.kind || "";
  return html`<div class="frame" data-view=${view}>
    <header class="top">
      <a class="brand" href=${link(run, several ? "runs" : "run")}><${Mark} />Hone</a>
      ${runs.runs.length > 1
        ? html`<select aria-label="run" onChange=${(event) => go(link(event.target.value, current))}>${runs.runs.map((other) => html`<option key=${other.name} selected=${other.name === run}>${other.name}</option>`)}</select>`
        : html`<b>${run}</b>`}
      <span class="row muted" title=${state.status}><span class="dot ${state.status}"></span><span class="roomy">${state.status}${state.step ? html`, step <span class="num">${state.step}</span>` : ""}</span></span>
      <span class="grow"></span>
      ${!embedded && html`<${SearchField} field=${search} route=${route} run=${run} view=${view} columns=${runs.columns} />`}
      ${!embedded && state.validation.length > 0 && html`<${Segments} label="samples" value=${kind} onChange=${(value) => go(link(run, current, [], { ...route.params, kind: value }))} options=${[["", "training"], ["validation", "validation"]]} />`}
      <button class="button quiet" onClick=${toggleTheme} title="light or dark (d)" aria-label="light or dark">${theme === "dark" ? "☾" : "☀"}</button>
      <button class="button quiet" onClick=${() => setHelp(true)} title="keys (?)" aria-label="keys">?</button>
    </header>
    <nav class="nav" aria-label="views">
      ${Object.entries(VIEWS).filter(([name, item]) => item.title && (name !== "runs" || several)).map(([name, item]) => html`<a key=${name} href=${link(run, name, [], { kind })} aria-current=${name === current ? "page" : undefined}>${item.title}<kbd>g ${item.key}</kbd></a>`)}
      <div class="foot num">${fmt(state.rows)} answers<br />${fmt(state.steps.length)} steps${state.reading ? html`<br />indexing ${state.deep} of ${state.steps.length}` : ""}${embedded ? html`<br />file, ${embedded.about}` : ""}</div>
    </nav>
    <main tabindex="-1">${error && html`<${Failure} error=${error} />`}<${entry.draw} route=${{ ...route, run }} state=${state} range=${state.range || [0, 1]} runs=${runs} theme=${theme} /></main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} columns=${runs.columns} />`}
    <${Toasts} />
  </div>`;
}

const Mark = () => html`<svg viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="7" fill="var(--accent)" /><path d="M9 23V9m0 7.5c3-3.5 14-3.5 14 .5v6" fill="none" stroke="var(--on-accent)" stroke-width="3.2" stroke-linecap="round" /></svg>`;

function SearchField({ field, route, run, view, columns }) {
  const [text, setText] = useState(route.params.q || "");
  useEffect(() => setText(route.params.q || ""), [route.params.q, view]);
  const timer = useRef(0);
  const apply = (value) => {
    const target = VIEWS[view].filters ? view : "answers";
    go(link(run, target, [], { ...(target === view ? route.params : { kind: route.params.kind }), q: value }), target === view);
  };
  const changed = (value) => {
    setText(value);
    clearTimeout(timer.current);
    if (VIEWS[view].filters) timer.current = setTimeout(() => apply(value), 90);
  };
  return html`<label class="search"><span class="visually-hidden">filter and search</span>
    <svg viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.6" aria-hidden="true"><circle cx="7" cy="7" r="4.5" /><path d="m10.5 10.5 4 4" /></svg>
    <input class="input" ref=${field} value=${text} spellcheck="false" autocomplete="off" list="query-words" placeholder='score<0.5 stop:length "words of an answer"'
      onInput=${(event) => changed(event.target.value)} onKeyDown=${(event) => event.key === "Enter" && (apply(text), event.target.blur())} />
    <datalist id="query-words">${[...Object.keys(columns.numbers).map((name) => `${name}>`), ...Object.keys(columns.words).map((name) => `${name}:`)].map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    ${!text && html`<kbd>/</kbd>`}</label>`;
}

const KEYS = [
  ["j k", "next, previous"], ["/", "filter and search"], ["h l", "answer left, right"], ["?", "this help"], ["o Enter", "open"], ["u", "back"],
  ["t", "tokens of the answer"], ["d", "light or dark"], ["e", "episode of the answer"], ["Esc", "close, leave a field"], ["y", "copy a link to this view"],
];

function Help({ onClose, columns }) {
  const box = useRef(null);
  useEffect(() => box.current.focus(), []);
  return html`<div class="overlay" onClick=${(event) => event.target === event.currentTarget && onClose()}>
    <div class="dialog" role="dialog" aria-modal="true" aria-label="keys and filters" tabindex="-1" ref=${box}>
      <div class="row" style=${{ marginBottom: "12px" }}><h1 class="grow">Keys</h1><button class="button quiet" onClick=${onClose}>close</button></div>
      <div class="keys">${[...KEYS, ...Object.entries(VIEWS).filter(([, view]) => view.key).map(([, view]) => [`g ${view.key}`, view.title])].map(([keys, what]) => html`<span key=${what}>${keys.split(keys.startsWith("g ") ? "\n" : " ").map((key) => html`<kbd>${key}</kbd> `)}</span><span key=${`${what}-`}>${what}</span>`)}</div>
      <h1 style=${{ margin: "20px 0 6px" }}>Filters</h1>
      <p class="muted" style=${{ marginBottom: "10px" }}>Words separated by blanks. A comparison restricts a column; other words are searched for in prompts, answers and tool output; a minus negates.</p>
      <div class="keys">${[...Object.entries(columns.numbers), ...Object.entries(columns.words)].map(([name, about]) => html`<span class="mono" key=${name}>${name}</span><span class="muted" key=${`${name}-`}>${about}</span>`)}</div>
    </div>
  </div>`;
}

render(html`<${App} />`, document.getElementById("app"));
