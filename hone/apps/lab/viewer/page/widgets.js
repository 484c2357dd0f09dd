// Pieces of several views: virtual list, messages, segments, score strips, toasts.
import { html, useState, useEffect, useRef, useLayoutEffect, useCallback } from "./vendor/preact.js";
import { get, address, scoreColour, fmt, useKeys, embedded } from "./lib.js";

const PAGE = 100;

export function Failure({ error }) {
  const parts = error.parts || { what: error.message };
  return html`<div class="error" role="alert"><b>${parts.what}</b>${parts.why && html`<div>${parts.why}</div>`}${parts.fix && html`<div class="muted">Fix: ${parts.fix}</div>`}</div>`;
}

// One image of a sample; where the run or file does not hold it, its mark.
function Picture({ run, kind, name }) {
  const [missing, setMissing] = useState(false);
  const place = address("image", { run, kind, name });
  const source = embedded ? embedded.answers[place] : `api/${place}`;
  if (missing || !source) return "<image>";
  return html`<img class="picture" src=${source} alt="image ${name}" loading="lazy" onError=${() => setMissing(true)} />`;
}

// Pieces of text, some of which are images: `pictures` has their names by place.
export const Pieces = ({ pieces, pictures, run, kind }) => pieces.map((piece, place) => (pictures[place] ? html`<${Picture} key=${place} ...${{ run, kind }} name=${pictures[place]} />` : piece));

// A text with a mark for each of the images; with another number of marks they follow it.
export function Pictured({ text, images, run, kind }) {
  if (!images?.length) return text;
  const marked = text.split("<image>");
  const fits = marked.length === images.length + 1;
  const pieces = fits ? marked.flatMap((part, place) => (place ? ["", part] : [part])) : [text, ...images.map(() => "")];
  const pictures = Object.fromEntries(images.map((name, place) => [fits ? 2 * place + 1 : place + 1, name]));
  return html`<${Pieces} ...${{ pieces, pictures, run, kind }} />`;
}

export const Nothing = ({ title, children }) => html`<div class="message"><b>${title}</b>${children}</div>`;

// Why a list is empty.
export function Empty({ q, state, what }) {
  if (state.rows === 0 && !state.reading) return html`<div class="scroll"><${Nothing} title="No answers are stored">trainer.rollout_dump_freq=1 stores those of every step.</${Nothing}></div>`;
  return html`<div class="scroll"><${Nothing} title=${`No ${what} matches`}>${q ? html`Change the filter: <kbd>/</kbd> edits it.` : ""}</${Nothing}></div>`;
}

export function Segments({ options, value, onChange, label }) {
  return html`<div class="segments" role="group" aria-label=${label}>
    ${options.map(([name, text, title]) => html`<button type="button" key=${name} title=${title} aria-pressed=${String(value === name)} onClick=${() => onChange(name)}>${text}</button>`)}
  </div>`;
}

// Answers of several scores as bars; `range` is [lowest, highest] of the run.
export function Strip({ scores, range, matches }) {
  const width = range[1] - range[0] || 1;
  return html`<span class="strip" role="img" aria-label=${`scores ${scores.map((score) => fmt(score)).join(", ")}`}>
    ${scores.slice(0, 20).map((score, place) => {
      const share = score === null ? null : Math.min(1, Math.max(0, (score - range[0]) / width));
      return html`<i key=${place} class=${matches && !matches[place] ? "out" : ""} title=${fmt(score)} style=${{ height: `${share === null ? 3 : 4 + 14 * share}px`, background: scoreColour(share) }}></i>`;
    })}
  </span>`;
}

// Rows by page from the server; `name` and `params` are the question, `field` the rows in its answer.
export function useRows(name, params, field, version) {
  const key = JSON.stringify([name, params]);
  const store = useRef({ key: "", pages: new Map(), total: 0 });
  const [, redraw] = useState(0);
  const [state, setState] = useState({ total: null, error: null, rows: null });
  const load = useCallback(
    (page, keep) => {
      const held = store.current;
      if (held.pages.has(page) && !keep) return;
      if (!keep) held.pages.set(page, null);
      get(name, { ...params, offset: page * PAGE, limit: PAGE }).then(
        (answer) => {
          if (store.current !== held) return;
          held.pages.set(page, answer[field]);
          held.total = answer.total;
          setState({ total: answer.total, error: null, rows: answer.rows ?? null, answer, query: params.q || "" });
          redraw((count) => count + 1);
        },
        (error) => store.current === held && setState((last) => ({ ...last, total: last.total ?? 0, error })),
      );
    },
    [key],
  );
  useEffect(() => {
    store.current = { key, pages: new Map(), total: 0 };
    load(0);
  }, [key]);
  useEffect(() => {
    const held = store.current;
    if (held.key === key) for (const page of held.pages.keys()) load(page, true);
  }, [version]);
  const row = (place) => {
    const page = Math.floor(place / PAGE);
    load(page);
    return store.current.pages.get(page)?.[place % PAGE] ?? null;
  };
  return { ...state, row, key };
}

// A list of any length: only the visible rows are elements. `rows` comes from useRows.
export function VirtualList({ rows, height, draw, selected, onSelect, onOpen, label, columns }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, size: 600 });
  useLayoutEffect(() => {
    const element = box.current;
    const measure = () => setView({ top: element.scrollTop, size: element.clientHeight });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (box.current) box.current.scrollTop = 0;
  }, [rows.key]);
  const total = rows.total || 0;
  const move = (change) => {
    const next = Math.min(total - 1, Math.max(0, (selected ?? -1) + change));
    if (next < 0) return;
    const element = box.current;
    if (next * height < element.scrollTop) element.scrollTop = next * height;
    if ((next + 1) * height > element.scrollTop + element.clientHeight) element.scrollTop = (next + 1) * height - element.clientHeight;
    onSelect(next, rows.row(next));
  };
  const screen = Math.max(1, Math.floor(view.size / height) - 1);
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    PageDown: () => move(screen),
    PageUp: () => move(-screen),
    Home: () => move(-total),
    End: () => move(total),
    Enter: () => selected !== null && onOpen && onOpen(rows.row(selected)),
  });
  const first = Math.max(0, Math.floor(view.top / height) - 6);
  const last = Math.min(total, Math.ceil((view.top + view.size) / height) + 6);
  const items = [];
  for (let place = first; place < last; place++) {
    const row = rows.row(place);
    items.push(
      html`<div key=${place} role="option" id=${`row-${place}`} aria-selected=${String(place === selected)} aria-posinset=${place + 1} aria-setsize=${total}
        class="item ${columns}" style=${{ top: `${place * height}px`, height: `${height}px` }}
        onClick=${() => row && onSelect(place, row)} onDblClick=${() => row && onOpen && onOpen(row)}>${row ? draw(row, place) : ""}</div>`,
    );
  }
  return html`<div class="list" ref=${box} role="listbox" tabindex="0" aria-label=${label} aria-activedescendant=${selected === null ? undefined : `row-${selected}`}
    onScroll=${(event) => setView({ top: event.target.scrollTop, size: event.target.clientHeight })}>
    <div style=${{ height: `${total * height}px` }}>${items}</div>
  </div>`;
}

export function SortHead({ columns, names, sort, onSort }) {
  return html`<div class="head ${columns}">
    ${names.map(([name, text, align]) => {
      const active = sort.replace(/^-/, "") === name && name;
      const arrow = active ? (sort.startsWith("-") ? " ↓" : " ↑") : "";
      if (name === null) return html`<span key=${text}>${text}</span>`;
      return html`<button key=${text} class="${active ? "sorted" : ""} ${align || ""}" aria-label=${`sort by ${text}`} onClick=${() => onSort(active && sort.startsWith("-") ? name : `-${name}`)}>${text}${arrow}</button>`;
    })}
  </div>`;
}

let showToast = () => {};
export const toast = (text) => showToast(text);
export function Toasts() {
  const [text, setText] = useState("");
  useEffect(() => {
    let timer;
    showToast = (value) => {
      setText(value);
      clearTimeout(timer);
      timer = setTimeout(() => setText(""), 2200);
    };
  }, []);
  return html`<div aria-live="polite">${text && html`<div class="toast">${text}</div>`}</div>`;
}

export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
    toast(what);
  } catch {
    toast("The browser did not allow copying.");
  }
}

// Links that save the answers of a filter as a dataset.
export function Download({ run, kind, q }) {
  if (embedded) return null;
  const address = (form) => `api/selection?${new URLSearchParams({ run, kind: kind || "", q: q || "", form })}`;
  return html`<span class="row"><span class="muted">save as</span><a class="button small" href=${address("sft")} download title="conversations for hone sft">SFT</a><a class="button small" href=${address("pairs")} download title="best and worst answer of each group, for hone prefer">pairs</a></span>`;
}
