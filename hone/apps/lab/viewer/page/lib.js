// Data, addresses, keys and number formats: what every view uses.
import { useState, useEffect, useRef } from "./vendor/preact.js";

// data ---------------------------------------------------------------------------------------------------------------

const holder = document.getElementById("hone-data");
export const embedded = holder ? JSON.parse(holder.textContent) : null;

export class ViewError extends Error {
  constructor(parts) {
    super(parts.what);
    this.parts = parts;
  }
}

export function address(name, params) {
  const used = Object.entries(params || {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  used.sort(([a], [b]) => (a < b ? -1 : 1));
  const query = used.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  return query ? `${name}?${query}` : name;
}

export async function get(name, params, signal) {
  const key = address(name, params);
  if (embedded) {
    if (key in embedded.answers) return embedded.answers[key];
    throw new ViewError({ what: "This file does not hold that part of the run.", why: `It was written by hone view --export with ${embedded.about}.` });
  }
  return answerOf(await fetch(`api/${key}`, { signal }));
}

export async function post(name, body) {
  if (embedded) throw new ViewError({ what: "A file cannot be changed.", why: "Labels and exports need `hone view` on the run." });
  const headers = { "Content-Type": "application/json", "X-Hone-View": "1" };
  return answerOf(await fetch(`api/${name}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answerOf(response) {
  if (response.ok) return response.json();
  let parts = { what: `The server answered ${response.status}.` };
  try {
    parts = (await response.json()).error || parts;
  } catch {
    if (response.status === 403) parts = { what: "The access token is wrong.", why: "Open the address that `hone view` printed." };
  }
  throw new ViewError(parts);
}

// The answer to a question; the last one stays until the next is there.
export function useData(name, params, version = 0) {
  const key = name ? address(name, params) : "";
  const [state, setState] = useState({ data: null, error: null, key: "" });
  useEffect(() => {
    if (!key) return;
    const controller = new AbortController();
    get(name, params, controller.signal).then(
      (data) => setState({ data, error: null, key }),
      (error) => error.name !== "AbortError" && setState((last) => ({ data: last.key === key ? last.data : null, error, key })),
    );
    return () => controller.abort();
  }, [key, version]);
  return { ...state, loading: state.key !== key };
}

// addresses ----------------------------------------------------------------------------------------------------------

export function parseHash(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { run: parts[0] || "", view: parts[1] || "", args: parts.slice(2), params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function link(run, view, args = [], params = {}) {
  const path = [run, view, ...args].map((part) => encodeURIComponent(part)).join("/");
  return `#/${address(path, params)}`;
}

export function go(target, replace = false) {
  if (replace) {
    history.replaceState(null, "", target);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

export function useRoute() {
  const [route, setRoute] = useState(() => parseHash(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parseHash(location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}

// keys ---------------------------------------------------------------------------------------------------------------

const layers = [];
let prefix = "";

export function useKeys(keys) {
  const current = useRef(keys);
  current.current = keys;
  useEffect(() => {
    layers.push(current);
    return () => layers.splice(layers.indexOf(current), 1);
  }, []);
}

export function handleKey(event) {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  const name = prefix ? `${prefix} ${event.key}` : event.key;
  for (const layer of [...layers].reverse()) {
    const action = layer.current[name];
    if (action) {
      prefix = "";
      event.preventDefault();
      action(event);
      return;
    }
  }
  prefix = !prefix && event.key === "g" ? "g" : "";
}

// numbers ------------------------------------------------------------------------------------------------------------

export function fmt(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value < 0) return `−${fmt(-value, digits)}`;
  if (Number.isInteger(value)) return value < 1e6 ? value.toLocaleString("en-US") : value.toPrecision(4);
  if (value >= 1000) return Math.round(value).toLocaleString("en-US");
  if (value < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "") + fmt(Math.abs(value), digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 60) return `${fmt(value)} s`;
  const whole = Math.round(value);
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const plural = (count, word) => `${fmt(count)} ${word}${count === 1 ? "" : "s"}`;
export const tone = (value) => (value > 0 ? "pos" : value < 0 ? "neg" : "muted");

// Colour of a share from 0 to 1, from orange over grey to teal.
export function scoreColour(share) {
  if (share === null || Number.isNaN(share)) return "var(--line-strong)";
  const percent = Math.round(Math.abs(share - 0.5) * 200);
  return `color-mix(in oklab, var(${share < 0.5 ? "--neg" : "--pos"}) ${percent}%, var(--line-strong))`;
}
